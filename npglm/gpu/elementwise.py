"""Embedding, norms, rope, sums, activations, and writing into the cache. Twins: reference/ops/{embed,norm,rope,elementwise,store}.py.

Ops with `out` write into a given array, whose rows may be strided.
"""

import numpy as np

from npglm.gpu.device import row_stride
from npglm.gpu.matmul import q8_0_beside, q8_k_beside

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


def add_norm(x, y, weight, eps: float, *, ops):
    """x and y [T,n], weight [n] -> x + y [T,n] and its RMSNorm [T,n]."""
    if ops.fused and ops.rounds and x.shape[-1] % 256 == 0:
        total = ops.empty(x.shape, np.float32)
        return total, _norm_and_blocks(x, weight, eps, ops, y, total)
    x = ops.add(x, y)
    return x, ops.rms_norm(x, weight, eps)


def sum_add_norm(x, weight, eps: float, inboxes: tuple, *, ops):
    """add_norm of one row, x [1,n], with the sum over the ranks of what the last kernel of each has put into the inboxes (an Outbox's
    `where`, npglm/gpu/collective.py)."""
    total, (made, blocks), parts = ops.empty(x.shape, np.float32), with_blocks(x.shape, ops), norm_parts(*x.shape)
    addresses, calls, *where = inboxes
    args = (x, total, weight, made, *blocks, addresses, calls, x.shape[-1], eps, parts, *where, ops.device.settled(x))
    ops.launch("sum_rms_norm_blocks_f32", (1, parts), BLOCK, *args, shared=4 * x.shape[-1])
    return total, made


def _norm_and_blocks(x, weight, eps, ops, plus=None, total=None):
    y, blocks = with_blocks(x.shape, ops)
    parts = norm_parts(*x.shape)
    args = (x, plus, total, weight, y, *blocks, x.shape[-1], eps, parts, ops.device.settled(x))
    ops.launch("rms_norm_blocks_f32", (len(x), parts), BLOCK, *args)
    return y


def with_blocks(shape, ops):
    """An array [T,n] that a kernel will write, and its 8-bit blocks that come with it: the kernel's arguments q, d, q_k, d_k, sums."""
    y = ops.empty(shape, np.float32)
    return y, (*q8_0_beside(y, ops)[:2], *q8_k_beside(y, ops))


def norm_parts(n_rows: int, n: int) -> int:
    """Blocks of threads that share a row (raw_kernels/norm_blocks.hip): few rows are spread over the device."""
    return max(1, min(n // 256, 64 // n_rows))


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
