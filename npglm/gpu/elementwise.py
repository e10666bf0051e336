"""Embedding, norms, rope, sums, activations, and writing into the cache. Twins: reference/ops/{embed,norm,rope,elementwise,store}.py.

Ops with `out` write into a given array, whose rows may be strided.
"""

import numpy as np

from npglm.gpu.device import row_stride
from npglm.gpu.matmul import Blocks

BLOCK = 256


def _blocks(n: int) -> tuple[int]:
    return (-(-n // BLOCK),)


def embed(tokens, table, *, ops):
    """tokens int32 [T], table [Y,D] -> [T,D]."""
    y = ops.empty((len(tokens), table.n_in), np.float32)
    ops.launch(f"embed_{table.type}", _blocks(y.size), BLOCK, table.w, table.grid, tokens, y, *y.shape, **table.defines)
    return y


def rms_norm(x, weight, eps: float, *, ops, out=None):
    """x [T,n], weight [n] -> [T,n]. Fused: its 8-bit blocks, which products will ask for, come with it."""
    if ops.fused and ops.rounds and out is None and x.shape[-1] % 256 == 0 and x.flags.c_contiguous:
        return _norm_and_blocks(x, weight, eps, ops)
    y = ops.empty(x.shape, np.float32) if out is None else out
    ops.launch("rms_norm_f32", (len(x),), _row_block(x), x, weight, y, x.shape[-1], row_stride(x), row_stride(y), eps)
    return y


def _norm_and_blocks(x, weight, eps, ops):
    (n_rows, n), y = x.shape, ops.empty(x.shape, np.float32)
    q_0 = Blocks(ops.empty(x.shape, np.int8), ops.empty((n_rows, n // 32), np.float16))
    shapes = (x.shape, np.int8), ((n_rows, n // 256), np.float32), ((n_rows, n // 16), np.int16)
    q_k = Blocks(*(ops.empty(*s) for s in shapes))
    ops.remember(("q8_0",), y, lambda: q_0)
    ops.remember(("q8_k",), y, lambda: q_k)
    lanes = ops.device.lanes
    warps = min(1024 // lanes, -(-n // 256))
    block = -(-warps * lanes // 64) * 64
    chunks = -(-n // (256 * (block // lanes)))
    ops.launch("rms_norm_blocks_f32", (n_rows,), block, x, weight, y, *q_0[:2], *q_k, n, eps, CHUNKS=chunks)
    return y


def layer_norm(x, weight, bias, eps: float, *, ops):
    """x [T,n], weight and bias [n] -> [T,n]."""
    y = ops.empty(x.shape, np.float32)
    ops.launch("layer_norm_f32", (len(x),), _row_block(x), x, weight, bias, y, x.shape[-1], row_stride(x), row_stride(y), eps)
    return y


def _row_block(x) -> int:
    return 1024 if x.shape[-1] > 2048 and len(x) < 64 else 256


def rope_table(pos, n_dims: int, theta: float, *, ops):
    """pos int32 [T] -> cos, sin [T, n_dims/2], made in f64."""
    frequency = ops.constant(("rope", n_dims, theta), lambda: np.float64(theta) ** (-np.arange(0, n_dims, 2) / n_dims))
    cosine, sine = (ops.empty((len(pos), n_dims // 2), np.float32) for _ in range(2))
    ops.launch("rope_table_f32", _blocks(cosine.size), BLOCK, pos, frequency, cosine, sine, *cosine.shape)
    return cosine, sine


def rope(x, table, *, ops, out=None):
    """x [T, ..., n_dims], table of its T positions -> the same shape. out may be x."""
    y = ops.empty(x.shape, np.float32) if out is None else out
    n_rows, n = x.size // x.shape[-1], x.shape[-1] // 2
    grid = _blocks(n_rows * n)
    heads = n_rows // len(x)
    ops.launch("rope_f32", grid, BLOCK, x, *table, y, n_rows, heads, n, row_stride(x), row_stride(y))
    return y


def add(x, y, *, ops):
    """x + y, of one shape."""
    out = ops.empty(x.shape, np.float32)
    ops.launch("add_f32", _blocks(x.size), BLOCK, x, y, out, x.size)
    return out


def scale(x, factor: float, *, ops):
    out = ops.empty(x.shape, np.float32)
    ops.launch("scale_f32", _blocks(x.size), BLOCK, x, out, x.size, factor)
    return out


def sigmoid(x, *, ops):
    out = ops.empty(x.shape, np.float32)
    ops.launch("sigmoid_f32", _blocks(x.size), BLOCK, x, out, x.size)
    return out


def swiglu(gate, up, *, ops):
    """gate and up [..., n] -> gate * sigmoid(gate) * up."""
    out = ops.empty(gate.shape, np.float32)
    ops.launch("swiglu_f32", _blocks(out.size), BLOCK, gate, up, out, out.size)
    return out


def store(cache, rows, pos, *, ops) -> None:
    """cache [capacity, n], rows [T, n], pos int32 [T]: cache[pos] = rows."""
    kind = "f16" if cache.dtype == np.float16 else "f32"
    ops.launch(f"store_{kind}", _blocks(rows.size), BLOCK, rows, pos, cache, *rows.shape)
