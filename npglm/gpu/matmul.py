"""Products with (quantised) weights, and the rounding of their activations. Twins: reference/ops/{matmul,quant}.py.

Few tokens: a matrix-vector kernel, bound by the weights' bytes. Many: tiles on the matrix unit. Weights without integer kernels
are decoded in the tile and multiplied in f32.
"""

from typing import NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from npglm.gpu.device import row_stride

FEW_TOKENS = 8  # up to here the matrix-vector kernels
BLOCK_KIND = {"q8_0": "q8_0", "q2_k": "q8_k"}  # the activation blocks of integer kernels
UNIT_VALUES = {"q8_0": 16, "q2_k": 64}  # that 16 bytes of weights hold
WIDTH = {True: 64, False: 32}  # tokens and rows of a tile: matmul.hip, matmul_decoded.hip


class Blocks(NamedTuple):
    """8-bit activation blocks: q int8 [..., n], d of each block, sums int16 of each 16 values (Q8_K)."""

    q: object
    d: object
    sums: object = None


def quantize_q8_0(x, *, ops):
    """x f32 [..., n] -> q int8 [..., n/32, 32], d f16 [..., n/32]."""
    b = _q8_0(x, ops)
    return b.q.reshape(*b.d.shape, 32), b.d


def quantize_q8_k(x, *, ops):
    """x f32 [..., n] -> q int8 [..., n/256, 256], d f32 [..., n/256]."""
    b = _q8_k(x, ops)
    return b.q.reshape(*b.d.shape, 256), b.d


def _q8_0(x, ops) -> Blocks:
    q, d = ops.empty(x.shape, np.int8), ops.empty((*x.shape[:-1], x.shape[-1] // 32), np.float16)
    ops.launch("quantize_q8_0", (-(-x.size // 256),), 256, x, q, d, x.size // x.shape[-1], x.shape[-1], row_stride(x))
    return Blocks(q, d)


def _q8_k(x, ops) -> Blocks:
    q, d = ops.empty(x.shape, np.int8), ops.empty((*x.shape[:-1], x.shape[-1] // 256), np.float32)
    sums = ops.empty((*x.shape[:-1], x.shape[-1] // 16), np.int16)
    n_rows, n = x.size // x.shape[-1], x.shape[-1]
    ops.launch("quantize_q8_k", (_warps(x.size // 256, ops),), 256, x, q, d, sums, n_rows, n, row_stride(x))
    return Blocks(q, d, sums)


def _warps(n: int, ops) -> int:
    """Blocks of 256 threads for n warps."""
    return -(-n * ops.device.lanes // 256)


def round_activations(x, w, ops):
    """x [..., n] as a product with w sees it: Blocks for integer kernels, else f32."""
    if w.fast:
        kind = BLOCK_KIND[w.type]
    elif not ops.rounds or w.type == "f32":
        return x
    elif w.type in ("f16", "bf16"):
        kind = f"round_{w.type}_f32"
    else:
        kind = "round_q8_k_f32" if GGML_QUANT_SIZES[GGMLQuantizationType[w.type.upper()]][0] == 256 else "round_q8_0_f32"
    return ops.remember((kind,), x, lambda: _round(x, kind, ops))


def _round(x, kind: str, ops):
    if kind == "q8_0":
        return _q8_0(x, ops)
    if kind == "q8_k":
        return _q8_k(x, ops)
    y = ops.empty(x.shape, np.float32)
    n = x.shape[-1]
    grid = _warps(x.size // 256, ops) if kind == "round_q8_k_f32" else -(-x.size // 256)
    ops.launch(kind, (grid,), 256, x, y, x.size // n, n, row_stride(x))
    return y


def linear(x, w, *, ops):
    """x [T,in], w [out,in] -> [T,out]."""
    return _product(x, w, ops.empty((len(x), w.n_out), np.float32), ops)


def linear_heads(x, w, *, ops, out=None):
    """x [T,H,in], w [H,out,in] -> [T,H,out]."""
    y = ops.empty((*x.shape[:2], w.n_out), np.float32) if out is None else out
    return _product(x, w, y, ops)


def linear_experts(x, w, experts, *, ops):
    """x [T,in] or [T,K,in], w [E,out,in], experts int32 [T,K] -> [T,K,out]."""
    return _product(x, w, ops.empty((*experts.shape, w.n_out), np.float32), ops, experts)


def _product(x, w, y, ops, experts=None):
    n_tokens, n_pairs, n_in, n_out = len(x), y.size // w.n_out, w.n_in, w.n_out
    x_div = n_pairs // (x.size // n_in)  # K where one row of x serves all experts of its token
    n_matrices = 1 if experts is not None else w.n_matrices
    a = round_activations(x, w, ops)
    shape = (n_in, n_out, n_matrices, x_div)
    if w.fast and n_tokens <= FEW_TOKENS:
        plain = experts is None and n_matrices == 1
        tokens = 1 << (n_tokens - 1).bit_length() if plain else 1
        grid, variant = matvec_grid(w, n_pairs // tokens if plain else n_pairs, TOKENS=tokens)
        args = (*w.parts, *a, experts, y, n_pairs, n_out, n_matrices, x_div, row_stride(y))
        ops.launch(f"matvec_{w.type}", (grid, -(-n_pairs // tokens)), 128, *args, **variant)
        return y
    if w.type == "f32" and n_tokens <= FEW_TOKENS and experts is None and n_matrices == 1 and n_in % 4 == 0:
        rows = w.w.view(np.float32)
        ops.launch("matvec_f32_f32", (n_out, n_tokens), 256, rows, a, y, n_in, n_out)
        return y
    width = WIDTH[w.fast]
    if experts is None:
        order = tiles = (None, None, None, None)
        grid = (-(-n_out // width), -(-n_tokens // width), n_matrices)
    else:
        tiles = ops.expert_tiles(experts, w.n_matrices, width)
        grid = (-(-n_out // width), len(tiles[1]))
    if w.fast:
        variant = matmul_variant(w.type, n_in, ops.device.max_shared)
        order = (*w.parts, *a, *tiles, y, n_tokens, n_out, n_matrices, x_div, row_stride(y))
        ops.launch(f"matmul_{w.type}", grid, 128, *order, shared=matmul_bytes(w.type, variant["STAGES"]), **variant)
    else:
        order = (w.w, w.grid, a, *tiles, y, n_tokens, *shape, row_stride(a), row_stride(y))
        ops.launch(f"matmul_decoded_{w.type}", grid, 256, *order, **w.defines)
    return y


def matmul_variant(kind: str, n_in: int, max_shared: int) -> dict:
    """The -D set of raw_kernels/matmul.hip."""
    stages = 2 if matmul_bytes(kind, 2) <= max_shared else 1
    return {"TYPE": kind, "N_IN": n_in, "STAGES": stages} | ({"IS_Q2_K": 1} if kind == "q2_k" else {})


def matmul_bytes(kind: str, stages: int) -> int:
    """Its dynamic shared memory."""
    rows = 64 * (256 + 16)
    if kind == "q2_k":
        return (stages + 1) * (rows + 64 * 48) + 64 * 4 * 5
    return 2 * stages * rows + 64 * 4 * (2 * 9 + 2)


def matvec_grid(w, n_pairs: int, **defines) -> tuple[int, dict]:
    """(blocks for the rows of a matrix, -D set) of a matrix-vector kernel."""
    group, rows = matvec_shape(w, n_pairs)
    variant = {"TYPE": w.type, "N_IN": w.n_in, "GROUP": group, "ROWS": rows, "TOKENS": 1, "CHOSEN": 1} | defines
    return -(-w.n_out // (128 // variant["GROUP"] * variant["ROWS"])), variant


def matvec_shape(w, n_pairs: int) -> tuple[int, int]:
    """(threads that share a row, rows at a time). Enough threads to fill the device come first, then fewer reads of x."""
    units, rows = w.n_in // UNIT_VALUES[w.type], w.n_out * n_pairs * w.n_matrices
    if units < 64:  # short rows: 4 units a thread
        return max(4, 1 << (units // 4).bit_length() - 1) if units >= 4 else 4, 1
    return (128, 2 if rows >= 2048 else 1) if units >= 256 and rows < 4096 else (32, 1)
