"""Norms, rope, residuals, SwiGLU, embedding rows and the cache: what lies between the products. Addresses throughout."""

import numpy as np

from npglm.cpu.blocks import FLOATS, GROUP, HAS_MIN
from npglm.cpu.jit import inner
from npglm.cpu.job import CHUNK_BYTES, KIND, ROW_BYTES, UNPACK, N, W, get
from npglm.cpu.matvec import float_weight
from npglm.cpu.simd import (
    call_5,
    divide_f32x16,
    exp_f32x16,
    first_lane,
    fma_f32x16,
    load_f32,
    load_f32x16,
    load_i8,
    splat_f32x16,
    store_f16,
    store_f16x16,
    store_f32,
    store_f32x16,
    sum_f32x16,
)


@inner
def sum_of(x, n):
    acc, whole = splat_f32x16(np.float32(0)), n // 16 * 16
    for i in range(0, whole, 16):
        acc = acc + load_f32x16(x + 4 * i)
    total = sum_f32x16(acc)
    for i in range(whole, n):
        total += load_f32(x + 4 * i)
    return total


@inner
def sum_of_squares(x, n):
    acc, whole = splat_f32x16(np.float32(0)), n // 16 * 16
    for i in range(0, whole, 16):
        v = load_f32x16(x + 4 * i)
        acc = fma_f32x16(v, v, acc)
    total = sum_f32x16(acc)
    for i in range(whole, n):
        total += load_f32(x + 4 * i) * load_f32(x + 4 * i)
    return total


@inner
def rms_norm(x, weight, eps, n, y):
    """x f32 [n] / sqrt(mean(x^2) + eps) * weight -> y; may be in place."""
    root = np.sqrt(sum_of_squares(x, n) / np.float32(n) + eps)
    for i in range(n):
        store_f32(y + 4 * i, load_f32(x + 4 * i) / root * load_f32(weight + 4 * i))


@inner
def layer_norm(x, weight, bias, eps, n, y):
    mean = sum_of(x, n) / np.float32(n)
    for i in range(n):
        store_f32(y + 4 * i, load_f32(x + 4 * i) - mean)
    root = np.sqrt(sum_of_squares(y, n) / np.float32(n) + eps)
    for i in range(n):
        store_f32(y + 4 * i, load_f32(y + 4 * i) / root * load_f32(weight + 4 * i) + load_f32(bias + 4 * i))


@inner
def rope(x, cos, sin, n, y):
    """x f32 [n] -> y: each pair (x[2i], x[2i+1]) turned by its angle; may be in place."""
    for i in range(n // 2):
        c, s = load_f32(cos + 4 * i), load_f32(sin + 4 * i)
        even, odd = load_f32(x + 8 * i), load_f32(x + 8 * i + 4)
        store_f32(y + 8 * i, even * c - odd * s)
        store_f32(y + 8 * i + 4, even * s + odd * c)


@inner
def add(x, y, n, out):
    for i in range(n):
        store_f32(out + 4 * i, load_f32(x + 4 * i) + load_f32(y + 4 * i))


@inner
def copy(x, n, y):
    for i in range(n):
        store_f32(y + 4 * i, load_f32(x + 4 * i))


@inner
def _swiglu(gate, up):
    one = splat_f32x16(np.float32(1))
    return divide_f32x16(gate, one + exp_f32x16(splat_f32x16(np.float32(0)) - gate)) * up


@inner
def swiglu(gate, up, n, y):
    """gate * sigmoid(gate) * up -> y; may be in place."""
    whole = n // 16 * 16
    for i in range(0, whole, 16):
        store_f32x16(y + 4 * i, _swiglu(load_f32x16(gate + 4 * i), load_f32x16(up + 4 * i)))
    for i in range(whole, n):
        v = _swiglu(splat_f32x16(load_f32(gate + 4 * i)), splat_f32x16(load_f32(up + 4 * i)))
        store_f32(y + 4 * i, first_lane(v))


@inner
def sigmoid(x, n, y):
    one, zero = splat_f32x16(np.float32(1)), splat_f32x16(np.float32(0))
    whole = n // 16 * 16
    for i in range(0, whole, 16):
        store_f32x16(y + 4 * i, divide_f32x16(one, one + exp_f32x16(zero - load_f32x16(x + 4 * i))))
    for i in range(whole, n):
        store_f32(y + 4 * i, first_lane(divide_f32x16(one, one + exp_f32x16(zero - splat_f32x16(load_f32(x + 4 * i))))))


@inner
def store_row(x, n, number_bytes, to):
    """f32 [n] -> a row of the cache."""
    if number_bytes == 4:
        copy(x, n, to)
        return
    whole = n // 16 * 16
    for i in range(0, whole, 16):
        store_f16x16(to + 2 * i, load_f32x16(x + 4 * i))  # round: f16, as the cache stores it
    for i in range(whole, n):
        store_f16(to + 2 * i, load_f32(x + 4 * i))  # round: f16


@inner
def decode_row(matrix, row, y, spare):
    """Row of a matrix of any type -> f32 [n]. spare: 1024 bytes."""
    kind, n, w = get(matrix, KIND), get(matrix, N), get(matrix, W) + row * get(matrix, ROW_BYTES)
    if kind in FLOATS:
        for i in range(n):
            store_f32(y + 4 * i, float_weight(kind, w, i))
        return
    group, has_min = GROUP[kind], HAS_MIN[kind]
    for first in range(0, n, 256):
        here = min(256, n - first)
        call_5(get(matrix, UNPACK), w, here // 32, spare, spare + 256, spare + 512)
        for i in range(here):
            g = 4 * (i // group)
            v = load_f32(spare + 256 + g) * np.float32(load_i8(spare + i))
            if has_min:
                v -= load_f32(spare + 512 + g)
            store_f32(y + 4 * (first + i), v)
        w += get(matrix, CHUNK_BYTES)
