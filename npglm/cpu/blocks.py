"""GGUF's weight blocks, one decoder per type: bytes -> signed 8-bit numbers, and a scale (and minimum) for each group of them.

Every type here is w = scale[group] * q - minimum[group], with q in -128..127 and groups of 16 or 32. A decoder takes addresses:
w (the start of a block), n (32 * n weights are decoded: 8 where blocks are 256 wide), q (int8 weights), s and m (f32, by group; m
only where HAS_MIN). Only the decoders that a checkpoint needs are compiled, by unpacker(). Formats: ggml-quants.c; tests compare
with gguf.quants.
"""

from functools import cache

import numpy as np
from gguf import GGML_QUANT_SIZES, quants
from gguf import GGMLQuantizationType as T

from npglm.cpu.jit import inner, kernel
from npglm.cpu.simd import (
    add_16_i8x32,
    bit_pairs,
    bytes_i8x16,
    bytes_i8x32,
    f16_to_f32,
    gather_i8x64,
    high_f32x8,
    i8_to_f32x16,
    iq4_values,
    load_f16,
    load_i8x16,
    load_i8x32,
    load_i16x8,
    load_i64,
    load_u8,
    load_u16,
    load_u32,
    low_bytes,
    low_f32x8,
    low_high_f32x16,
    negate_i8x32,
    negate_i8x64,
    splat_f32x16,
    splat_i8x16,
    splat_i8x32,
    splat_i16x8,
    store_f32,
    store_f32x8,
    store_f32x16,
    store_i8x32,
    store_i8x64,
    widen_bytes,
    zip_bytes,
)

F32, F16, BF16 = int(T.F32), int(T.F16), int(T.BF16)
FLOATS = (F32, F16, BF16)
Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL = (int(t) for t in (T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.IQ4_NL))
Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS = (int(t) for t in (T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K, T.IQ4_XS))
IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S = (int(t) for t in (T.IQ2_XXS, T.IQ2_XS, T.IQ2_S, T.IQ3_XXS, T.IQ3_S))
IQ1_S, IQ1_M = int(T.IQ1_S), int(T.IQ1_M)

SUPPORTED = frozenset({
    T.F32, T.F16, T.BF16, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.IQ4_NL, T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K, T.IQ4_XS,
    T.IQ2_XXS, T.IQ2_XS, T.IQ2_S, T.IQ3_XXS, T.IQ3_S, T.IQ1_S, T.IQ1_M,
})  # fmt: skip
N_TYPES = 1 + max(int(t) for t in SUPPORTED)


def _by_type(of):
    table = np.zeros(N_TYPES, np.int64)
    for t in SUPPORTED:
        table[int(t)] = of(t)
    return table


BLOCK = _by_type(lambda t: GGML_QUANT_SIZES[t][0])  # weights a block
BLOCK_BYTES = _by_type(lambda t: GGML_QUANT_SIZES[t][1])
GROUP = _by_type(lambda t: 16 if t in (T.Q2_K, T.Q3_K, T.Q6_K, T.IQ2_XS, T.IQ2_S, T.IQ1_M) else 32)  # weights a scale
HAS_MIN = _by_type(lambda t: t in (T.Q4_1, T.Q5_1, T.Q2_K, T.Q4_K, T.Q5_K))


def _grid(quant, n_bytes) -> np.ndarray:
    """A codebook, its entries as integers of 4 or 8 bytes."""
    quant.init_grid()
    grid = np.ascontiguousarray(quant.grid.reshape(quant.grid_shape).astype(np.int8))
    return grid.view(np.int64 if n_bytes == 8 else np.uint32).reshape(-1).astype(np.int64)


GRID_2XXS, GRID_2XS, GRID_2S = (_grid(q, 8) for q in (quants.IQ2_XXS, quants.IQ2_XS, quants.IQ2_S))
GRID_3XXS, GRID_3S = (_grid(q, 4) for q in (quants.IQ3_XXS, quants.IQ3_S))
quants.IQ1_S.init_grid()
_GRID_1 = quants.IQ1_S.grid.reshape(2048, 8).astype(np.int8) * 8  # of which an eighth is added or taken
GRID_1_UP, GRID_1_DOWN = ((_GRID_1 + n).astype(np.int8).view(np.int64).reshape(-1) for n in (1, -1))
SIGNS = np.frombuffer(quants.IQ2_XXS.ksigns, np.uint8).astype(np.int64)  # 7 bits -> 8 of even parity


# --- blocks of 32 -----------------------------------------------------------------------------------------------------------


@inner
def _nibbles(at):
    """16 bytes -> their low nibbles, then their high ones."""
    low, high = load_i64(at), load_i64(at + 8)
    both = bytes_i8x32(low, high, low >> 4, high >> 4)
    return both & splat_i8x32(15)


def unpack_q4_0(w, n, q, s, m):
    for i in range(n):
        at = w + 18 * i
        store_i8x32(q + 32 * i, _nibbles(at + 2) - splat_i8x32(8))
        store_f32(s + 4 * i, load_f16(at))


def unpack_q4_1(w, n, q, s, m):
    for i in range(n):
        at = w + 20 * i
        store_i8x32(q + 32 * i, _nibbles(at + 4))
        store_f32(s + 4 * i, load_f16(at))
        store_f32(m + 4 * i, -load_f16(at + 2))


def unpack_q5_0(w, n, q, s, m):
    for i in range(n):
        at = w + 22 * i
        store_i8x32(q + 32 * i, add_16_i8x32(_nibbles(at + 6), load_u32(at + 2)) - splat_i8x32(16))
        store_f32(s + 4 * i, load_f16(at))


def unpack_q5_1(w, n, q, s, m):
    for i in range(n):
        at = w + 24 * i
        store_i8x32(q + 32 * i, add_16_i8x32(_nibbles(at + 8), load_u32(at + 4)))
        store_f32(s + 4 * i, load_f16(at))
        store_f32(m + 4 * i, -load_f16(at + 2))


def unpack_q8_0(w, n, q, s, m):
    for i in range(n):
        at = w + 34 * i
        store_i8x32(q + 32 * i, load_i8x32(at + 2))
        store_f32(s + 4 * i, load_f16(at))


def unpack_iq4_nl(w, n, q, s, m):
    for i in range(n):
        at = w + 18 * i
        store_i8x32(q + 32 * i, iq4_values(_nibbles(at + 2)))
        store_f32(s + 4 * i, load_f16(at))


# --- K-quants ---------------------------------------------------------------------------------------------------------------


def unpack_q2_k(w, n, q, s, m):
    scales = load_i8x16(w)
    store_f32x16(s, splat_f32x16(load_f16(w + 80)) * i8_to_f32x16(scales & splat_i8x16(15)))
    store_f32x16(m, splat_f32x16(load_f16(w + 82)) * i8_to_f32x16(scales >> 4))
    for half in range(2):
        bits = load_i8x32(w + 16 + 32 * half)
        for j in range(4):
            store_i8x32(q + 128 * half + 32 * j, (bits >> (2 * j)) & splat_i8x32(3))


def unpack_q3_k(w, n, q, s, m):
    d = load_f16(w + 108)
    low, high = load_i64(w + 96), load_u32(w + 104)
    fours, twos = 0x0F0F0F0F0F0F0F0F, 0x3030303030303030
    first = (low & fours) | ((high << 4 | high << 34) & twos)  # bits 0-1 and 2-3 of `high` become bits 4-5
    second = (low >> 4 & fours) | ((high | high << 30) & twos)  # bits 4-5 and 6-7
    store_f32x16(s, splat_f32x16(d) * i8_to_f32x16(bytes_i8x16(first, second) - splat_i8x16(32)))
    mask, low_half, high_half = load_i8x32(w), load_i8x32(w + 32), load_i8x32(w + 64)
    twice = mask + mask
    _store_q3_k(q, low_half, twice + twice)
    _store_q3_k(q + 32, low_half >> 2, twice)
    _store_q3_k(q + 64, low_half >> 4, mask)
    _store_q3_k(q + 96, low_half >> 6, mask >> 1)
    _store_q3_k(q + 128, high_half, mask >> 2)
    _store_q3_k(q + 160, high_half >> 2, mask >> 3)
    _store_q3_k(q + 192, high_half >> 4, mask >> 4)
    _store_q3_k(q + 224, high_half >> 6, mask >> 5)


@inner
def _store_q3_k(q, low, high):
    """Bits 0 and 1 of `low`, less 4 where bit 2 of `high` is 0."""
    four = splat_i8x32(4)
    store_i8x32(q, ((low & splat_i8x32(3)) | (high & four)) - four)


@inner
def _scales_k4(w, s, m, d, d_min):
    """Q4_K's and Q5_K's 12 bytes at w -> 8 scales and 8 minima of 6 bits."""
    a, b, c = load_u32(w), load_u32(w + 4), load_u32(w + 8)
    low, high = 0x3F3F3F3F, 0x0F0F0F0F
    scale = (a & low) | ((c & high) | ((a >> 2) & 0x30303030)) << 32
    minimum = (b & low) | (((c >> 4) & high) | ((b >> 2) & 0x30303030)) << 32
    both = i8_to_f32x16(bytes_i8x16(scale, minimum)) * low_high_f32x16(d, d_min)
    store_f32x8(s, low_f32x8(both))
    store_f32x8(m, high_f32x8(both))


def unpack_q4_k(w, n, q, s, m):
    _scales_k4(w + 4, s, m, load_f16(w), load_f16(w + 2))
    for i in range(4):
        bits = load_i8x32(w + 16 + 32 * i)
        store_i8x32(q + 64 * i, bits & splat_i8x32(15))
        store_i8x32(q + 64 * i + 32, bits >> 4)


def unpack_q5_k(w, n, q, s, m):
    _scales_k4(w + 4, s, m, load_f16(w), load_f16(w + 2))
    top = load_i8x32(w + 16)
    sixteen = splat_i8x32(16)
    for i in range(4):
        bits = load_i8x32(w + 48 + 32 * i)
        high = top >> (2 * i)
        high_0, high_1 = high & splat_i8x32(1), (high >> 1) & splat_i8x32(1)
        store_i8x32(q + 64 * i, (bits & splat_i8x32(15)) + high_0 * sixteen)
        store_i8x32(q + 64 * i + 32, (bits >> 4) + high_1 * sixteen)


def unpack_q6_k(w, n, q, s, m):
    store_f32x16(s, splat_f32x16(load_f16(w + 208)) * i8_to_f32x16(load_i8x16(w + 192)))
    four, sixteen, offset = splat_i8x32(15), splat_i8x32(16), splat_i8x32(32)
    for half in range(2):
        top = load_i8x32(w + 128 + 32 * half)
        for j in range(4):
            low = load_i8x32(w + 64 * half + 32 * (j & 1)) >> (4 * (j >> 1))
            high = (top >> (2 * j)) & splat_i8x32(3)
            store_i8x32(q + 128 * half + 32 * j, (low & four) + high * sixteen - offset)


def unpack_iq4_xs(w, n, q, s, m):
    d, high = load_f16(w), load_u16(w + 2)
    for i in range(8):
        low = load_u8(w + 4 + (i >> 1)) >> (4 * (i & 1))
        store_f32(s + 4 * i, d * np.float32((low & 15 | ((high >> (2 * i)) & 3) << 4) - 32))
        store_i8x32(q + 32 * i, iq4_values(_nibbles(w + 8 + 16 * i)))


# --- codebooks --------------------------------------------------------------------------------------------------------------


@inner
def _with_parity(bits):
    """Bytes of 7 bits -> of 8, with an even number of ones."""
    p = bits ^ (bits >> 4 & 0x0F0F0F0F0F0F0F0F)
    p ^= p >> 2
    p ^= p >> 1
    return bits | (p & 0x0101010101010101) << 7


@inner
def _sevens(rest):
    """Four times 7 bits -> four bytes."""
    return rest & 0x7F | (rest & 0x3F80) << 1 | (rest & 0x1FC000) << 2 | (rest & 0xFE00000) << 3


def unpack_iq2_xxs(w, n, q, s, m):
    d, table = load_f16(w), GRID_2XXS.ctypes.data
    for i in range(4):
        at = w + 2 + 16 * i
        indices = widen_bytes(load_u32(at) | load_u32(at + 8) << 32)
        a, b = load_u32(at + 4), load_u32(at + 12)
        signs = _with_parity(_sevens(a) | _sevens(b) << 32)
        store_i8x64(q + 64 * i, negate_i8x64(gather_i8x64(table, indices), signs))
        store_f32(s + 8 * i, d * (np.float32(0.5) + np.float32(a >> 28)) * np.float32(0.25))
        store_f32(s + 8 * i + 4, d * (np.float32(0.5) + np.float32(b >> 28)) * np.float32(0.25))


@inner
def _signs(rest):
    """Four times 7 bits -> 32 signs."""
    return SIGNS[rest & 127] | SIGNS[rest >> 7 & 127] << 8 | SIGNS[rest >> 14 & 127] << 16 | SIGNS[rest >> 21 & 127] << 24


def unpack_iq2_xs(w, n, q, s, m):
    table, low = GRID_2XS.ctypes.data, splat_i16x8(511)
    for i in range(4):
        v = load_i16x8(w + 2 + 16 * i)
        signs = _with_parity(low_bytes(v >> 9))
        store_i8x64(q + 64 * i, negate_i8x64(gather_i8x64(table, v & low), signs))
    _scales_iq2(load_i64(w + 66), s, load_f16(w))


@inner
def _scales_iq2(nibbles, s, d):
    """16 nibbles, low ones first -> d * (0.5 + nibble) / 4."""
    low, high = nibbles & 0x0F0F0F0F0F0F0F0F, nibbles >> 4 & 0x0F0F0F0F0F0F0F0F
    half, quarter = splat_f32x16(np.float32(0.5)), splat_f32x16(np.float32(0.25))
    store_f32x16(s, splat_f32x16(d) * (half + i8_to_f32x16(zip_bytes(low, high))) * quarter)


def unpack_iq2_s(w, n, q, s, m):
    table, of_256 = GRID_2S.ctypes.data, splat_i16x8(256)
    for i in range(4):
        indices = widen_bytes(load_i64(w + 2 + 8 * i)) + bit_pairs(load_u16(w + 66 + 2 * i)) * of_256
        store_i8x64(q + 64 * i, negate_i8x64(gather_i8x64(table, indices), load_i64(w + 34 + 8 * i)))
    _scales_iq2(load_i64(w + 74), s, load_f16(w))


def unpack_iq3_xxs(w, n, q, s, m):
    d = load_f16(w)
    for i in range(8):
        at = load_i64(w + 2 + 8 * i)
        rest = load_u32(w + 66 + 4 * i)
        grid = bytes_i8x32(
            GRID_3XXS[at & 255] | GRID_3XXS[at >> 8 & 255] << 32,
            GRID_3XXS[at >> 16 & 255] | GRID_3XXS[at >> 24 & 255] << 32,
            GRID_3XXS[at >> 32 & 255] | GRID_3XXS[at >> 40 & 255] << 32,
            GRID_3XXS[at >> 48 & 255] | GRID_3XXS[at >> 56 & 255] << 32,
        )
        store_i8x32(q + 32 * i, negate_i8x32(grid, _signs(rest)))
        store_f32(s + 4 * i, d * (np.float32(0.5) + np.float32(rest >> 28)) * np.float32(0.5))


def unpack_iq3_s(w, n, q, s, m):
    d = load_f16(w)
    for i in range(8):
        at, high = load_i64(w + 2 + 8 * i), load_u8(w + 66 + i)
        grid = bytes_i8x32(
            GRID_3S[at & 255 | (high & 1) << 8] | GRID_3S[at >> 8 & 255 | (high & 2) << 7] << 32,
            GRID_3S[at >> 16 & 255 | (high & 4) << 6] | GRID_3S[at >> 24 & 255 | (high & 8) << 5] << 32,
            GRID_3S[at >> 32 & 255 | (high & 16) << 4] | GRID_3S[at >> 40 & 255 | (high & 32) << 3] << 32,
            GRID_3S[at >> 48 & 255 | (high & 64) << 2] | GRID_3S[at >> 56 & 255 | (high & 128) << 1] << 32,
        )
        store_i8x32(q + 32 * i, negate_i8x32(grid, load_u32(w + 74 + 4 * i)))
        scale = load_u8(w + 106 + (i >> 1)) >> (4 * (i & 1)) & 15
        store_f32(s + 4 * i, d * np.float32(1 + 2 * scale))


@inner
def _grid_1(index, down):
    return GRID_1_DOWN[index] if down else GRID_1_UP[index]


def unpack_iq1_s(w, n, q, s, m):
    d = load_f16(w)
    for i in range(8):
        at, high = load_u32(w + 2 + 4 * i), load_u16(w + 34 + 2 * i)
        down = high >> 15
        grid = bytes_i8x32(
            _grid_1(at & 255 | (high & 7) << 8, down),
            _grid_1(at >> 8 & 255 | (high >> 3 & 7) << 8, down),
            _grid_1(at >> 16 & 255 | (high >> 6 & 7) << 8, down),
            _grid_1(at >> 24 | (high >> 9 & 7) << 8, down),
        )
        store_i8x32(q + 32 * i, grid)
        store_f32(s + 4 * i, d * np.float32(2 * (high >> 12 & 7) + 1) * np.float32(0.125))


def unpack_iq1_m(w, n, q, s, m):
    d = _scale_1m(w)
    for i in range(8):
        at, high = load_u32(w + 4 * i), load_u16(w + 32 + 2 * i)
        grid = bytes_i8x32(
            _grid_1(at & 255 | (high & 7) << 8, high >> 3 & 1),
            _grid_1(at >> 8 & 255 | (high >> 4 & 7) << 8, high >> 7 & 1),
            _grid_1(at >> 16 & 255 | (high >> 8 & 7) << 8, high >> 11 & 1),
            _grid_1(at >> 24 | (high >> 12 & 7) << 8, high >> 15),
        )
        store_i8x32(q + 32 * i, grid)
        scales = load_u16(w + 48 + 2 * (i >> 1)) >> (6 * (i & 1))
        store_f32(s + 8 * i, d * np.float32(2 * (scales & 7) + 1) * np.float32(0.125))
        store_f32(s + 8 * i + 4, d * np.float32(2 * (scales >> 3 & 7) + 1) * np.float32(0.125))


@inner
def _scale_1m(w):
    """IQ1_M's f16 scale: the top nibbles of four u16, low nibble first."""
    bits = (
        load_u16(w + 48) >> 12 | (load_u16(w + 50) >> 12) << 4 | (load_u16(w + 52) >> 12) << 8 | (load_u16(w + 54) >> 12) << 12
    )
    return f16_to_f32(bits)


UNPACK = {
    Q4_0: unpack_q4_0, Q4_1: unpack_q4_1, Q5_0: unpack_q5_0, Q5_1: unpack_q5_1, Q8_0: unpack_q8_0, IQ4_NL: unpack_iq4_nl,
    Q2_K: unpack_q2_k, Q3_K: unpack_q3_k, Q4_K: unpack_q4_k, Q5_K: unpack_q5_k, Q6_K: unpack_q6_k, IQ4_XS: unpack_iq4_xs,
    IQ2_XXS: unpack_iq2_xxs, IQ2_XS: unpack_iq2_xs, IQ2_S: unpack_iq2_s, IQ3_XXS: unpack_iq3_xxs, IQ3_S: unpack_iq3_s,
    IQ1_S: unpack_iq1_s, IQ1_M: unpack_iq1_m,
}  # fmt: skip


@cache
def unpacker(kind: int) -> kernel:
    """The decoder of a quantised type, to be called by address with (w, n, q, s, m)."""
    return kernel(UNPACK[kind])
