"""What a matrix product reads of its activations: rows in ggml's 8-bit blocks (or in f32), and panels of TOKENS rows for tiles.

A row of n elements becomes a record of 4 * n bytes:
    float types   f32 [n], rounded as the weight type asks
    8-bit types   q int8 [n], d f32 [n/32], start i32 [n/4], sums i16 [n/16], mixed int8 [n]
        q and d: the blocks of ggml's Q8_0 or Q8_K (whose d is repeated); start: -128 * the sum of four q (see simd.keep_*);
        sums: of sixteen q; mixed: q with the 32s of each 256 in the order 0 4 1 5 2 6 3 7, as Q2_K's bit pairs lie.
"""

import numpy as np

from npglm.cpu.blocks import BF16 as KIND_BF16
from npglm.cpu.blocks import BLOCK
from npglm.cpu.blocks import F16 as KIND_F16
from npglm.cpu.blocks import F32 as KIND_F32
from npglm.cpu.jit import inner, kernel
from npglm.cpu.simd import (
    TOKENS,
    absolute,
    as_f32,
    as_i32,
    f16_bits,
    f16_to_f32,
    lane_max,
    load_f32,
    load_f32x16,
    load_i8x16,
    load_i8x32,
    load_i16,
    load_i32,
    load_i64,
    maximum,
    minimum,
    round_even,
    splat_f32x16,
    splat_i32x8,
    store_f32,
    store_f32x16,
    store_i8x16,
    store_i16,
    store_i32,
    store_i32x8,
    sum_f32x16,
    sum_fours,
    sum_low_high,
    to_i8x16,
    transpose_16x16,
)

AS_F32, AS_F16, AS_BF16, AS_Q8_0, AS_Q8_K = range(5)  # how a row is kept
RECORD_BYTES = 4  # an element
GROUP_ROWS = 16  # dwords [GROUP_ROWS][TOKENS] that a panel holds for 32 elements of 8-bit rows


@inner
def kept_as(kind):
    """Which of AS_* a weight type asks for; ggml's vec_dot_type on x86."""
    if kind == KIND_F32:
        return AS_F32
    if kind == KIND_F16:
        return AS_F16
    if kind == KIND_BF16:
        return AS_BF16
    return AS_Q8_K if BLOCK[kind] == 256 else AS_Q8_0


@inner
def d_at(record, n):
    return record + n


@inner
def start_at(record, n):
    return record + n + n // 8


@inner
def sums_at(record, n):
    return record + 2 * n + n // 8


@inner
def mixed_at(record, n):
    return record + 2 * n + n // 4


@inner
def _quantize(x, q, n, factor):
    """q = min(rint(x * factor), 127); n a multiple of 16."""
    scale, most = splat_f32x16(factor), splat_f32x16(np.float32(127))
    for i in range(0, n, 16):
        store_i8x16(q + i, to_i8x16(minimum(round_even(load_f32x16(x + 4 * i) * scale), most)))


@inner
def _add_up(record, n, g):
    """start and sums of the 32 elements of group g."""
    fours, start, sums = sum_fours(load_i8x32(record + 32 * g)), start_at(record, n) + 32 * g, sums_at(record, n) + 4 * g
    store_i32x8(start, fours * splat_i32x8(-128))
    total = sum_low_high(fours)
    store_i16(sums, total & 0xFFFF)
    store_i16(sums + 2, total >> 32)


@inner
def _poison(x, n):
    """0, or NaN if one of x f32 [n] is NaN or inf: 8-bit integers could not show it. n a multiple of 16."""
    total = splat_f32x16(np.float32(0))
    for i in range(0, n, 16):
        total = total + load_f32x16(x + 4 * i) * splat_f32x16(np.float32(0))
    return sum_f32x16(total)


@inner
def quantize_q8_0(x, record, n):
    """x f32 [n] at an address -> its record; bit for bit reference.ops.quant.quantize_q8_0."""
    for g in range(n // 32):
        at = x + 128 * g
        amax = lane_max(maximum(absolute(load_f32x16(at)), absolute(load_f32x16(at + 64))))
        factor = np.float32(127) / amax if amax != 0 else np.float32(0)
        _quantize(at, record + 32 * g, 32, factor)
        store_f32(d_at(record, n) + 4 * g, f16_to_f32(f16_bits(amax / np.float32(127))) + _poison(at, 32))  # round: f16 scale
        _add_up(record, n, g)


@inner
def quantize_q8_k(x, record, n):
    """x f32 [n] at an address -> its record; bit for bit reference.ops.quant.quantize_q8_k."""
    mixed = mixed_at(record, n)
    for b in range(n // 256):
        at, q = x + 1024 * b, record + 256 * b
        high = low = load_f32x16(at)
        for i in range(16, 256, 16):
            v = load_f32x16(at + 4 * i)
            high, low = maximum(v, high), minimum(v, low)
        largest, lowest = lane_max(high), -lane_max(splat_f32x16(np.float32(0)) - low)
        if -lowest > largest or (-lowest == largest and _comes_first(at, lowest, largest)):
            largest = lowest
        factor = np.float32(-127) / largest if largest != 0 else np.float32(0)
        d = (np.float32(1) / factor if factor != 0 else np.float32(0)) + _poison(at, 256)
        _quantize(at, q, 256, factor)
        for g in range(8):
            store_f32(d_at(record, n) + 32 * b + 4 * g, d)
            _add_up(record, n, 8 * b + g)
            to = mixed + 256 * b + 32 * (2 * (g & 3) + (g >> 2))
            store_i8x16(to, load_i8x16(q + 32 * g))
            store_i8x16(to + 16, load_i8x16(q + 32 * g + 16))


@inner
def _comes_first(x, a, b):
    """Whether a is met before b."""
    i = 0
    while True:
        v = load_f32(x + 4 * i)
        if v in (a, b):
            return v == a
        i += 1


@kernel
def keep_row(x, record, n, form):
    """x f32 [n] -> its record, in one of AS_*."""
    if form == AS_Q8_K:
        quantize_q8_k(x, record, n)
    elif form == AS_Q8_0:
        quantize_q8_0(x, record, n)
    else:
        for i in range(n):
            v = load_f32(x + 4 * i)
            if form == AS_F16:
                v = f16_to_f32(f16_bits(v))
            elif form == AS_BF16:
                v = round_bf16(v)
            store_f32(record + 4 * i, v)


@inner
def round_bf16(v):
    bits = as_i32(v)
    if (bits & 0x7F800000) == 0x7F800000:
        return v
    return as_f32((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536)


# --- panels -----------------------------------------------------------------------------------------------------------------


@inner
def panel_bytes(n, form):
    """Bytes of a panel of TOKENS rows of n elements."""
    return (GROUP_ROWS * n // 8 if form >= AS_Q8_0 else 4 * n) * TOKENS + 64  # 64: slack for pack_panel


@kernel
def pack_panel(records, tokens, n_tokens, panel, n, form, spare):
    """Rows tokens[0..n_tokens) (int64 at an address, or 0: the first ones) of `records` -> one panel; the rest of it is zero.

    Floats: f32 [n][TOKENS]. 8-bit: for each group of 32, dwords [GROUP_ROWS][TOKENS]: 0..7 q, four elements each; 8 d; 9 both
    sums as i16; 10, 11 -128 * the sum of sixteen; 12 -128 * the sum of 32; 13, 14 d * the sum of sixteen; 15 d * the sum of 32.
    spare: 1024 bytes.
    """
    line, is_float = 4 * TOKENS, form < AS_Q8_0
    step, n_dwords = RECORD_BYTES * n, n if is_float else n // 4
    for i in range(0, 1024, 64):
        store_f32x16(spare + i, splat_f32x16(np.float32(0)))
    for first in range(0, n_dwords // 16 * 16, 16):
        for t in range(n_tokens):
            store_f32x16(spare + 64 * t, load_f32x16(records + step * _source(tokens, t) + 4 * first))
        to = panel + line * first if is_float else panel + line * GROUP_ROWS * (first // 8)
        second = to + line * (8 if is_float else GROUP_ROWS)
        # Rows are 16 dwords long here: what is too much is covered by the row after it, or lies in the panel's slack.
        transpose_16x16(spare, 64, to, second, line)
    for i in range(n_dwords // 16 * 16, n_dwords):
        to = panel + line * (i if is_float else GROUP_ROWS * (i // 8) + i % 8)
        for t in range(TOKENS):
            v = load_f32(records + step * _source(tokens, t) + 4 * i) if t < n_tokens else np.float32(0)
            store_f32(to + 4 * t, v)
    if is_float:
        return
    for t in range(TOKENS):
        row = records + step * _source(tokens, t) if t < n_tokens else 0
        for g in range(n // 32):
            at = panel + line * (GROUP_ROWS * g + 8) + 4 * t
            if t >= n_tokens:
                for i in range(8):
                    store_i32(at + line * i, 0)
                continue
            scale, sums = load_f32(d_at(row, n) + 4 * g), sums_at(row, n) + 4 * g
            a, b = load_i16(sums), load_i16(sums + 2)
            store_f32(at, scale)
            store_i32(at + line, load_i32(sums))
            store_i32(at + 2 * line, -128 * a)
            store_i32(at + 3 * line, -128 * b)
            store_i32(at + 4 * line, -128 * (a + b))
            store_f32(at + 5 * line, scale * np.float32(a))
            store_f32(at + 6 * line, scale * np.float32(b))
            store_f32(at + 7 * line, scale * np.float32(a + b))


@inner
def _source(tokens, t):
    return load_i64(tokens + 8 * t) if tokens else t
