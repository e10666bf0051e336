"""Rows of a matrix times one record of activations (activations.py): what decoding is made of, bound by reading the weights."""

import numpy as np

from npglm.cpu.activations import d_at, mixed_at, start_at, sums_at
from npglm.cpu.blocks import F16, F32, FLOATS, GROUP, HAS_MIN, Q2_K, Q8_0
from npglm.cpu.jit import inner, kernel
from npglm.cpu.job import CHUNK_BYTES, KIND, ROW_BYTES, UNPACK, N, W, get
from npglm.cpu.simd import (
    as_f32,
    as_i16x32,
    call_5,
    dot2_i32x8,
    dot2_i32x16,
    dot4_i32x16,
    dot4_kept_i32x8,
    fma_f32x8,
    fma_f32x16,
    four_times_i8x16,
    i8_to_f32x16,
    keep_i8x32,
    load_bf16x16,
    load_f16,
    load_f16x16,
    load_f32,
    load_f32x8,
    load_f32x16,
    load_i8x16,
    load_i8x32,
    load_i8x64,
    load_i16x16,
    load_u16,
    low_high_f32x8,
    prefetch,
    q2_k_scales_0,
    q2_k_scales_1,
    q2_k_scales_2,
    q2_k_scales_3,
    splat_f32x8,
    splat_f32x16,
    splat_i8x16,
    splat_i8x64,
    splat_i32x16,
    start_i32x8,
    store_f32,
    store_f32x8,
    store_f32x16,
    sum_f32x8,
    sum_f32x16,
    sum_pairs,
    to_f32x8,
    to_f32x16,
    widen_i8x16,
    zero_i32x8,
)

AHEAD = 3072  # bytes between what is read and what is prefetched
SCRATCH = 1024  # bytes a thread: one row's 256 weights, 16 scales, 16 minima


@inner
def q8_0_two_rows(w, apart, x, n, y, y_apart):
    """Two rows, the second `apart` bytes after the first, share the activations' loads. -> f32 at y and y + y_apart."""
    acc_0 = acc_1 = splat_f32x8(np.float32(0))
    d, start = d_at(x, n), start_at(x, n)
    for g in range(n // 32):
        at = w + 34 * g
        prefetch(at + AHEAD)
        prefetch(at + apart + AHEAD)
        a, first, scale = load_i8x32(x + 32 * g), start_i32x8(start + 32 * g), load_f32(d + 4 * g)
        dots = dot4_kept_i32x8(first, keep_i8x32(load_i8x32(at + 2)), a)
        acc_0 = fma_f32x8(to_f32x8(dots), splat_f32x8(load_f16(at) * scale), acc_0)
        at += apart
        dots = dot4_kept_i32x8(first, keep_i8x32(load_i8x32(at + 2)), a)
        acc_1 = fma_f32x8(to_f32x8(dots), splat_f32x8(load_f16(at) * scale), acc_1)
    store_f32(y, sum_f32x8(acc_0))
    store_f32(y + y_apart, sum_f32x8(acc_1))


@inner
def q2_k_two_rows(w, apart, x, n, y, y_apart):
    """As q8_0_two_rows."""
    acc_0 = acc_1 = splat_f32x16(np.float32(0))
    minima_0 = minima_1 = splat_f32x8(np.float32(0))
    mixed, d, sums = mixed_at(x, n), d_at(x, n), sums_at(x, n)
    for b in range(n // 256):
        scale, a = load_f32(d + 32 * b), mixed + 256 * b
        a_0, a_1, a_2, a_3 = load_i8x64(a), load_i8x64(a + 64), load_i8x64(a + 128), load_i8x64(a + 192)
        a_sums, v = load_i16x16(sums + 32 * b), w + apart
        dots = to_f32x16(_q2_k_dots(w, a_0, a_1, a_2, a_3))
        acc_0 = fma_f32x16(dots, splat_f32x16(load_f16(w + 80) * scale), acc_0)
        minima_0 = fma_f32x8(to_f32x8(_q2_k_minima(w, a_sums)), splat_f32x8(load_f16(w + 82) * scale), minima_0)
        dots = to_f32x16(_q2_k_dots(v, a_0, a_1, a_2, a_3))
        acc_1 = fma_f32x16(dots, splat_f32x16(load_f16(v + 80) * scale), acc_1)
        minima_1 = fma_f32x8(to_f32x8(_q2_k_minima(v, a_sums)), splat_f32x8(load_f16(v + 82) * scale), minima_1)
        w += 84
    store_f32(y, sum_f32x16(acc_0) - sum_f32x8(minima_0))
    store_f32(y + y_apart, sum_f32x16(acc_1) - sum_f32x8(minima_1))


@inner
def _q2_k_dots(w, a_0, a_1, a_2, a_3):
    """A block's quants with its activations, times their scales. 64 bytes hold all the quants, four to a byte."""
    prefetch(w + AHEAD)
    prefetch(w + AHEAD + 64)
    zero, three = splat_i32x16(0), splat_i8x64(3)
    bits, scales = load_i8x64(w + 16), four_times_i8x16(load_i8x16(w) & splat_i8x16(15))
    # A sum of four products fits i16, so dot2 with [scale, 0] multiplies it by its scale.
    total = dot2_i32x16(zero, as_i16x32(dot4_i32x16(zero, bits & three, a_0)), q2_k_scales_0(scales))
    total = dot2_i32x16(total, as_i16x32(dot4_i32x16(zero, (bits >> 2) & three, a_1)), q2_k_scales_1(scales))
    total = dot2_i32x16(total, as_i16x32(dot4_i32x16(zero, (bits >> 4) & three, a_2)), q2_k_scales_2(scales))
    return dot2_i32x16(total, as_i16x32(dot4_i32x16(zero, (bits >> 6) & three, a_3)), q2_k_scales_3(scales))


@inner
def _q2_k_minima(w, a_sums):
    """A block's minima, each times the sum of its activations."""
    return dot2_i32x8(zero_i32x8(), widen_i8x16(load_i8x16(w) >> 4), a_sums)


@inner
def unpacked_row(kind, unpack, w, chunk_bytes, x, n, scratch):
    """One row of any quantised type, decoded 256 weights at a time into `scratch` (SCRATCH bytes)."""
    acc, minima = splat_f32x8(np.float32(0)), splat_f32x8(np.float32(0))
    d, start, sums = d_at(x, n), start_at(x, n), sums_at(x, n)
    s, m, group, has_min = scratch + 256, scratch + 512, GROUP[kind], HAS_MIN[kind]
    for g0 in range(0, n // 32, 8):
        n_groups = min(8, n // 32 - g0)
        for line in range(0, chunk_bytes, 64):
            prefetch(w + AHEAD + line)
        if n_groups < 8:  # what is not there counts as zero
            for i in range(SCRATCH // 2, SCRATCH, 32):
                store_f32x8(scratch + i, splat_f32x8(np.float32(0)))
            for i in range(n_groups):
                store_f32(scratch + 768 + 4 * i, load_f32(d + 4 * (g0 + i)))
            d_8 = load_f32x8(scratch + 768)
        else:
            d_8 = load_f32x8(d + 4 * g0)
        call_5(unpack, w, n_groups, scratch, s, m)
        if has_min:  # groups of 32 only
            minima = fma_f32x8(to_f32x8(sum_pairs(load_i16x16(sums + 4 * g0))), load_f32x8(m) * d_8, minima)
        if group == 32:
            store_f32x8(s, load_f32x8(s) * d_8)
            for i in range(n_groups):
                acc = fma_f32x8(to_f32x8(_dots(scratch, x, start, i, g0)), splat_f32x8(load_f32(s + 4 * i)), acc)
        else:  # blocks of 256: one d
            store_f32x16(s, load_f32x16(s) * splat_f32x16(load_f32(d + 4 * g0)))
            for i in range(8):
                scales = low_high_f32x8(load_f32(s + 8 * i), load_f32(s + 8 * i + 4))
                acc = fma_f32x8(to_f32x8(_dots(scratch, x, start, i, g0)), scales, acc)
        w += chunk_bytes
    return sum_f32x8(acc) - sum_f32x8(minima)


@inner
def _dots(q, x, start, i, g0):
    """Group i of the decoded weights with group g0 + i of the activations."""
    at = 32 * (g0 + i)
    return dot4_kept_i32x8(start_i32x8(start + at), keep_i8x32(load_i8x32(q + 32 * i)), load_i8x32(x + at))


@inner
def float_row(kind, w, x, n):
    """One row of F32, F16 or BF16 with f32 activations -> f32."""
    acc = splat_f32x16(np.float32(0))
    whole = n // 16 * 16
    size = 4 if kind == F32 else 2
    for i in range(0, whole, 16):
        prefetch(w + size * i + AHEAD)
        if kind == F32:
            v = load_f32x16(w + 4 * i)
        elif kind == F16:
            v = load_f16x16(w + 2 * i)
        else:
            v = load_bf16x16(w + 2 * i)
        acc = fma_f32x16(v, load_f32x16(x + 4 * i), acc)
    total = sum_f32x16(acc)
    for i in range(whole, n):
        total += float_weight(kind, w, i) * load_f32(x + 4 * i)
    return total


@inner
def float_weight(kind, w, i):
    """Weight i of a row of a float type."""
    if kind == F32:
        return load_f32(w + 4 * i)
    if kind == F16:
        return load_f16(w + 2 * i)
    return as_f32(load_u16(w + 2 * i) << 16)


@inner
def decoded_row(kind, unpack, w, chunk_bytes, x, n, scratch):
    """One row of a quantised type with f32 activations: weights are decoded to f32."""
    acc = splat_f32x16(np.float32(0))
    s, m, group, has_min = scratch + 256, scratch + 512, GROUP[kind], HAS_MIN[kind]
    for first in range(0, n, 256):
        n_here = min(256, n - first)
        call_5(unpack, w, n_here // 32, scratch, s, m)
        for i in range(0, n_here, 16):
            at = 4 * (i // group)
            v = i8_to_f32x16(load_i8x16(scratch + i)) * splat_f32x16(load_f32(s + at))
            if has_min:
                v = v - splat_f32x16(load_f32(m + at))
            acc = fma_f32x16(v, load_f32x16(x + 4 * (first + i)), acc)
        w += chunk_bytes
    return sum_f32x16(acc)


@kernel
def rows(job, first, last, record, y, scratch, exact):
    """Rows [first, last) of a job for one record -> f32 at y + 4 * row. exact: f32 activations although weights are quantised."""
    kind, row_bytes, n = get(job, KIND), get(job, ROW_BYTES), get(job, N)
    unpack, chunk_bytes = get(job, UNPACK), get(job, CHUNK_BYTES)
    w, y, count = get(job, W) + first * row_bytes, y + 4 * first, last - first
    if kind in FLOATS:
        for r in range(count):
            store_f32(y + 4 * r, float_row(kind, w + r * row_bytes, record, n))
    elif exact:
        for r in range(count):
            store_f32(y + 4 * r, decoded_row(kind, unpack, w + r * row_bytes, chunk_bytes, record, n, scratch))
    elif kind in (Q8_0, Q2_K):
        half = count // 2  # a row of each half together: two long streams are read faster than rows in turn
        for r in range(half + count % 2):
            row = r if r < half else count - 1  # the last of an odd number goes with itself
            apart = half if r < half else 0
            if kind == Q8_0:
                q8_0_two_rows(w + row * row_bytes, apart * row_bytes, record, n, y + 4 * row, 4 * apart)
            else:
                q2_k_two_rows(w + row * row_bytes, apart * row_bytes, record, n, y + 4 * row, 4 * apart)
    else:
        for r in range(count):
            store_f32(y + 4 * r, unpacked_row(kind, unpack, w + r * row_bytes, chunk_bytes, record, n, scratch))
