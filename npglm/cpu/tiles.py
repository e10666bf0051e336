"""Rows of a matrix times panels of TOKENS records: 16 rows x TOKENS tokens of accumulators stay in registers.

Weights of 16 rows are decoded once and laid out [n/4][16][4] bytes (8-bit) or [n][16] f32; every panel then runs over them.
"""

import numpy as np

from npglm.cpu.activations import AS_Q8_0, GROUP_ROWS, panel_bytes
from npglm.cpu.blocks import FLOATS, GROUP, HAS_MIN, Q2_K
from npglm.cpu.jit import inner, kernel
from npglm.cpu.job import CHUNK_BYTES, FORM, KIND, PANELS, ROW_BYTES, TOKENS, UNPACK, Y_STRIDE, N, W, Y, get
from npglm.cpu.matvec import float_weight
from npglm.cpu.simd import TOKENS as WIDTH
from npglm.cpu.simd import (
    bytes_i8x32_pair,
    call_5,
    i8_to_f32x16,
    load_f16,
    load_f32,
    load_f32x16,
    load_i8x16,
    load_i8x32,
    load_i8x64,
    load_i16x32,
    load_u8,
    multiply_small,
    prefetch,
    splat_f32x16,
    splat_i8x32,
    store_f32,
    store_f32x16,
    store_i8x32,
    store_i16,
    tile_add,
    tile_dot2,
    tile_dot4,
    tile_dot4_kept,
    tile_fma,
    tile_scale,
    tile_start,
    tile_store,
    tile_zero,
    tile_zero_i32,
    transpose_16x16,
    transpose_keep_16x16,
)

ROW_GROUP = 16  # rows in one vector
SPARE = 1024 + 16 * 1024  # bytes: one row's 256 weights in parts, and 16 rows' as f32
DECODED_BYTES = 1 << 19  # of decoded weights that a thread keeps: they are read again for every panel, from its L2 cache


@inner
def group_bytes(n, form):
    """Bytes of 16 decoded rows: 8-bit ones with 16 scales and 16 minima for every 16 weights at most, or f32."""
    return 24 * whole(n) if form >= AS_Q8_0 else 64 * ((n + 15) // 16 * 16)


@inner
def whole(n):
    return (n + 63) // 64 * 64


@inner
def rows_per_item(n, form):
    return ROW_GROUP * max(1, min(4, DECODED_BYTES // group_bytes(n, form)))


@inner
def scratch_bytes(n, form):
    """What tile_rows needs."""
    return rows_per_item(n, form) // ROW_GROUP * group_bytes(n, form) + SPARE


@kernel
def tile_rows(job, first, last, scratch):
    """Rows [first, last) of a job for all its tokens."""
    n, form, kind = get(job, N), get(job, FORM), get(job, KIND)
    step, spare, decoded = group_bytes(n, form), scratch, scratch + SPARE
    for group in range(first, last, ROW_GROUP):
        decode_rows(job, group, min(ROW_GROUP, last - group), decoded + (group - first) // ROW_GROUP * step, spare)
    n_tokens, y, y_stride, panel = get(job, TOKENS), get(job, Y), get(job, Y_STRIDE), get(job, PANELS)
    for t in range(0, n_tokens, WIDTH):
        for group in range(first, last, ROW_GROUP):
            at = decoded + (group - first) // ROW_GROUP * step
            if form < AS_Q8_0:
                tile = multiply_f32(at, panel, n)
            elif kind == Q2_K:
                tile = multiply_q2_k(at, panel, n)
            else:
                tile = multiply_8_bit(at, panel, n, GROUP[kind], HAS_MIN[kind])
            to, here = y + t * y_stride + 4 * group, min(WIDTH, n_tokens - t)
            if group + ROW_GROUP <= last:
                tile_store(tile, to, y_stride, here)
            else:
                tile_store(tile, spare, 64, here)
                for i in range(here):
                    for r in range(last - group):
                        store_f32(to + i * y_stride + 4 * r, load_f32(spare + 64 * i + 4 * r))
        panel += panel_bytes(n, form)


# --- decoding 16 rows -------------------------------------------------------------------------------------------------------


@inner
def decode_rows(job, first, count, to, spare):
    """Rows first..first+count (at most 16; the others become zero) -> decoded at `to`. spare: SPARE bytes."""
    kind, n, form, row_bytes = get(job, KIND), get(job, N), get(job, FORM), get(job, ROW_BYTES)
    unpack, chunk_bytes = get(job, UNPACK), get(job, CHUNK_BYTES)
    if count < ROW_GROUP:
        for i in range(0, SPARE, 64):
            store_f32x16(spare + i, splat_f32x16(np.float32(0)))
        for i in range(0, group_bytes(n, form), 64):
            store_f32x16(to + i, splat_f32x16(np.float32(0)))
    w = get(job, W) + first * row_bytes
    if form < AS_Q8_0:
        decode_f32(kind, unpack, w, row_bytes, chunk_bytes, n, count, to, spare)
    elif kind == Q2_K:
        decode_q2_k(w, row_bytes, n, count, to, spare)
    else:
        decode_8_bit(kind, unpack, w, row_bytes, chunk_bytes, n, count, to, spare)


@inner
def decode_f32(kind, unpack, w, row_bytes, chunk_bytes, n, count, to, spare):
    """At `to`: f32 [n][16]."""
    rows = spare + 1024  # f32 [16][256]
    for first in range(0, n, 256):
        here = min(256, n - first)
        for r in range(count):
            at, row = w + r * row_bytes, rows + 1024 * r
            if kind in FLOATS:
                for i in range(here):
                    store_f32(row + 4 * i, float_weight(kind, at, first + i))
            else:
                decode_256(kind, unpack, at + first // 256 * chunk_bytes, here, row, spare)
        for i in range(0, here, 16):
            at = to + 64 * (first + i)
            transpose_16x16(rows + 4 * i, 1024, at, at + 512, 64)


@inner
def decode_256(kind, unpack, w, n, to, spare):
    """n (at most 256) weights of a quantised type -> f32 at `to`. spare: 1024 bytes."""
    group, has_min = GROUP[kind], HAS_MIN[kind]
    call_5(unpack, w, n // 32, spare, spare + 256, spare + 512)
    for i in range(0, n, 16):
        g = 4 * (i // group)
        v = i8_to_f32x16(load_i8x16(spare + i)) * splat_f32x16(load_f32(spare + 256 + g))
        if has_min:
            v = v - splat_f32x16(load_f32(spare + 512 + g))
        store_f32x16(to + 4 * i, v)


@inner
def decode_8_bit(kind, unpack, w, row_bytes, chunk_bytes, n, count, to, spare):
    """At `to`: bytes [n/4][16][4], n rounded up to 64s; then scales f32 [n/group][16]; then minima the same."""
    group, has_min, rows = GROUP[kind], HAS_MIN[kind], spare + 1024  # rows: int8 [16][256]
    scales = to + 16 * whole(n)
    minima = scales + 64 * (n // group)
    for first in range(0, n, 256):
        here = min(256, n - first)
        for r in range(count):
            prefetch(w + r * row_bytes + chunk_bytes)
            call_5(unpack, w + r * row_bytes, here // 32, rows + 256 * r, spare, spare + 64)
            for i in range(here // group):
                store_f32(scales + 64 * i + 4 * r, load_f32(spare + 4 * i))
                if has_min:
                    store_f32(minima + 64 * i + 4 * r, -load_f32(spare + 64 + 4 * i))
        for i in range(0, here, 64):
            at = to + 16 * (first + i)
            transpose_keep_16x16(rows + i, 256, at, at + 512, 64)
        scales, minima, w = scales + 64 * (here // group), minima + 64 * (here // group), w + chunk_bytes


@inner
def decode_q2_k(w, row_bytes, n, count, to, spare):
    """At `to`: q * scale, at most 45, as bytes [n/4][16][4]; then for each block d f32 [16], -dmin f32 [16], minima i16 [8][16][2]."""
    rows, more = spare + 1024, to + 16 * n
    for _ in range(n // 256):
        for r in range(count):
            at, row = w + r * row_bytes, rows + 256 * r
            prefetch(at + 84)
            for half in range(2):
                bits = load_i8x32(at + 16 + 32 * half)
                for j in range(4):
                    scale = at + 8 * half + 2 * j
                    both = bytes_i8x32_pair(load_u8(scale) & 15, load_u8(scale + 1) & 15)
                    store_i8x32(row + 128 * half + 32 * j, multiply_small((bits >> (2 * j)) & splat_i8x32(3), both))
            store_f32(more + 4 * r, load_f16(at + 80))
            store_f32(more + 64 + 4 * r, -load_f16(at + 82))
            for i in range(16):
                store_i16(more + 128 + 64 * (i // 2) + 4 * r + 2 * (i % 2), load_u8(at + i) >> 4)
        for i in range(0, 256, 64):
            transpose_16x16(rows + i, 256, to + 16 * i, to + 16 * i + 512, 64)
        to, more, w = to + 4096, more + 640, w + 84


# --- multiplying ------------------------------------------------------------------------------------------------------------


@inner
def multiply_f32(w, panel, n):
    """Sums of 16 products at a time, so that rounding errors do not pile up over n."""
    acc = tile_zero()
    for first in range(0, n, 16):
        part = tile_zero()
        for i in range(first, min(n, first + 16)):
            part = tile_fma(part, load_f32x16(w + 64 * i), panel + 4 * WIDTH * i)
        acc = tile_add(acc, part)
    return acc


@inner
def multiply_8_bit(w, panel, n, group, has_min):
    acc, line = tile_zero(), 4 * WIDTH
    scales = w + 16 * whole(n)
    minima = scales + 64 * (n // group)
    for _ in range(n // 32):
        if group == 32:
            dots = tile_start(panel + 12 * line)
            for i in range(8):
                dots = tile_dot4_kept(dots, load_i8x64(w + 64 * i), panel + i * line)
            acc = tile_scale(acc, dots, load_f32x16(scales), panel + 8 * line)
            if has_min:
                acc = tile_fma(acc, load_f32x16(minima), panel + 15 * line)
            scales, minima = scales + 64, minima + 64
        else:
            for half in range(2):
                dots = tile_start(panel + (10 + half) * line)
                for i in range(4 * half, 4 * half + 4):
                    dots = tile_dot4_kept(dots, load_i8x64(w + 64 * i), panel + i * line)
                acc = tile_scale(acc, dots, load_f32x16(scales), panel + 8 * line)
                if has_min:
                    acc = tile_fma(acc, load_f32x16(minima), panel + (13 + half) * line)
                scales, minima = scales + 64, minima + 64
        w += 512
        panel += GROUP_ROWS * line
    return acc


@inner
def multiply_q2_k(w, panel, n):
    acc, line = tile_zero(), 4 * WIDTH
    more = w + 16 * n
    for _ in range(n // 256):
        dots, at = tile_zero_i32(), panel
        for _ in range(8):
            for i in range(8):
                dots = tile_dot4(dots, load_i8x64(w + 64 * i), at + i * line)
            w += 512
            at += GROUP_ROWS * line
        acc = tile_scale(acc, dots, load_f32x16(more), panel + 8 * line)
        least = tile_zero_i32()
        for i in range(8):
            least = tile_dot2(least, load_i16x32(more + 128 + 64 * i), panel + (GROUP_ROWS * i + 9) * line)
        acc = tile_scale(acc, least, load_f32x16(more + 64), panel + 8 * line)
        more += 640
        panel = at
    return acc
