"""Products with (quantised) weights, and the rounding of their activations. Twins: reference/ops/{matmul,quant}.py.

Few tokens: a matrix-vector kernel, bound by the weights' bytes. Many: tiles on the matrix unit. Weights without integer kernels
are decoded in the tile and multiplied in f32.
"""

from typing import NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from npglm.gpu.device import row_stride

FEW_TOKENS = 16  # up to here the matrix-vector kernels
BLOCK_KIND = {"q8_0": "q8_0", "q2_k": "q8_k"}  # the activation blocks of integer kernels
UNIT_VALUES = {"q8_0": 16, "q2_k": 64}  # that 16 bytes of weights hold
RING = {"q8_0": 12, "q2_k": 8}  # units of 16 bytes that a thread keeps on their way: dots.hip
ROUNDED_VALUES = 2048  # of a row that every block of threads rounds itself
NOWHERE = (None, None, 0, 0, 0)  # no rank gets what a kernel makes: npglm.gpu.collective.Outbox
WHOLE_BLOCKS = {"WHOLE_BLOCKS": True}  # a block of threads makes 32 rows or a multiple
TILE_ROWS = 128  # output rows of a block of matmul.hip
DECODED_WIDTH = 64  # tokens and rows of a block of matmul_decoded.hip


class Blocks(NamedTuple):
    """8-bit activation blocks: q int8 [..., n] (Q8_K: placed as raw_kernels/blocks.hip says), d of each block, sums int16 of each 16
    values (Q8_K)."""

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
    q = b.q.reshape(*b.d.shape, 4, 2, 32).copy()
    q[..., 1::2, :, :, :] = q[..., 1::2, [1, 0, 3, 2], :, :]  # odd blocks: raw_kernels/blocks.hip
    return q.swapaxes(-3, -2).reshape(*b.d.shape, 256), b.d


def _q8_0(x, ops) -> Blocks:
    blocks, n = _empty_q8_0(x, ops), x.shape[-1]
    ops.launch("quantize_q8_0", (-(-x.size // 1024),), 256, x, blocks.q, blocks.d, x.size // n, n, row_stride(x))
    return blocks


def _q8_k(x, ops) -> Blocks:
    blocks, n = _empty_q8_k(x, ops), x.shape[-1]
    ops.launch("quantize_q8_k", (_warps(x.size // 256, ops),), 256, x, *blocks, x.size // n, n, row_stride(x))
    return blocks


def _empty_q8_0(x, ops) -> Blocks:
    return Blocks(ops.empty(x.shape, np.int8), ops.empty((*x.shape[:-1], x.shape[-1] // 32), np.float16))


def _empty_q8_k(x, ops) -> Blocks:
    *rows, n = x.shape
    shapes = (x.shape, np.int8), ((*rows, n // 256), np.float32), ((*rows, n // 16), np.int16)
    return Blocks(*(ops.empty(*s) for s in shapes))


def q8_0_beside(y, ops) -> Blocks:
    """Room for the Q8_0 blocks of y, which the kernel that is launched next makes: products will find them."""
    blocks = _empty_q8_0(y, ops)
    return ops.remember(("q8_0",), y, lambda: blocks)


def q8_k_beside(y, ops) -> Blocks:
    """The same for Q8_K."""
    blocks = _empty_q8_k(y, ops)
    return ops.remember(("q8_k",), y, lambda: blocks)


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


def linear(x, w, *, ops, to=None, pending=None):
    """x [T,in], w [out,in] -> [T,out]. to: a npglm.gpu.collective.Outbox, which a product of few tokens may use.
    pending: int32 [T,n] that becomes NOT_YET (raw_kernels/preamble.hip); only where is_few_f32()."""
    return _product(x, w, ops.empty((len(x), w.n_out), np.float32), ops, to=to, pending=pending)


def linear_beside(x, w, other, its_w, ops):
    """linear(x, w), of one token; where its kernel can, the Q8_K blocks of `other`, which its_w will be multiplied with, come with it."""
    y = ops.empty((len(x), w.n_out), np.float32)
    wanted = its_w.fast and BLOCK_KIND[its_w.type] == "q8_k" and other.flags.c_contiguous
    if not (wanted and w.fast and len(x) == 1 and rounds_itself(x, w, ops)):
        return _product(x, w, y, ops)
    return _rounding(x, w, y, 1, 1, ops, other, q8_k_beside(other, ops))


def linear_heads(x, w, *, ops, out=None):
    """x [T,H,in], w [H,out,in] -> [T,H,out]."""
    y = ops.empty((*x.shape[:2], w.n_out), np.float32) if out is None else out
    return _product(x, w, y, ops)


def linear_experts(x, w, experts, *, ops):
    """x [T,in] or [T,K,in], w [E,out,in], experts int32 [T,K] -> [T,K,out]."""
    return _product(x, w, ops.empty((*experts.shape, w.n_out), np.float32), ops, experts)


def is_few_f32(x, w) -> bool:
    """Whether x times w is raw_kernels/matvec_f32.hip's, as the router's is."""
    return w.type == "f32" and len(x) <= FEW_TOKENS and w.n_matrices == 1 and w.n_in % 4 == 0


def _product(x, w, y, ops, experts=None, to=None, pending=None):
    n_tokens, n_pairs, n_in, n_out = len(x), y.size // w.n_out, w.n_in, w.n_out
    x_div = n_pairs // (x.size // n_in)  # K where one row of x serves all experts of its token
    n_matrices = 1 if experts is not None else w.n_matrices
    if w.fast and n_tokens <= FEW_TOKENS:
        return _matvec(x, w, y, n_pairs, n_matrices, x_div, experts, ops, to)
    a = round_activations(x, w, ops)
    shape = (n_in, n_out, n_matrices, x_div)
    if experts is None and is_few_f32(x, w):
        rows, marked = w.w.view(np.float32), (None, 0) if pending is None else (pending, pending.shape[1])
        ops.launch("matvec_f32_f32", (n_out, n_tokens), 256, rows, a, y, n_in, n_out, *marked)
        return y
    height, width = (TILE_ROWS, tile_tokens(w, n_pairs, ops.device)) if w.fast else (DECODED_WIDTH, DECODED_WIDTH)
    if experts is None:
        tiles = (None, None, None, None)
        grid = (-(-n_out // height), -(-n_tokens // width), n_matrices)
    else:
        tiles = ops.expert_tiles(experts, w.n_matrices, width)
        ops.launch("zero_pairs_f32", (n_pairs,), 64, experts, y, n_out, row_stride(y))
        grid = (-(-n_out // height), len(tiles[1]))
    if w.fast:
        variant = matmul_variant(w.type, n_in, width, ops.device.max_shared)
        args = (*w.parts, *a, *tiles, y, n_tokens, n_out, n_matrices, x_div, row_stride(y))
        block = max(1, width // 64) * (height // 32) * ops.device.lanes  # a warp makes up to 64 tokens by 32 rows
        ops.launch(f"matmul_{w.type}", grid, block, *args, shared=matmul_bytes(variant), **variant)
    else:
        args = (w.w, w.grid, a, *tiles, y, n_tokens, *shape, row_stride(a), row_stride(y))
        ops.launch(f"matmul_decoded_{w.type}", grid, 256, *args, **w.defines)
    return y


def tile_tokens(w, n_pairs: int, device) -> int:
    """Tokens of a block: 32 if a matrix has few; of Q8_0, which need no unpacking, 128 if that leaves a block for every processor."""
    each = -(-n_pairs // w.n_matrices)
    if each <= 32:
        return 32
    blocks = -(-each // 128) * -(-w.n_out // TILE_ROWS) * w.n_matrices
    return 128 if w.type == "q8_0" and blocks >= device.n_processors else 64


def matmul_variant(kind: str, n_in: int, tokens: int, max_shared: int) -> dict:
    """The -D set of raw_kernels/matmul.hip."""
    shapes = [(256, 2), (256, 1)] if kind == "q2_k" else [(2 * max(tokens, 64), 2), (128, 2), (128, 1), (64, 2), (32, 2)]
    for depth, stages in shapes:
        variant = {"TYPE": kind, "N_IN": n_in, "BLOCK_TOKENS": tokens, "DEPTH": depth, "STAGES": stages}
        variant |= {"IS_Q2_K": 1} if kind == "q2_k" else {}
        if n_in % depth == 0 and matmul_bytes(variant) <= max_shared:
            return variant
    raise NotImplementedError(f"a tile of {kind} does not fit {max_shared} bytes of shared memory")


def matmul_bytes(variant: dict) -> int:
    """Its dynamic shared memory."""
    tokens, depth = variant["BLOCK_TOKENS"], variant["DEPTH"]
    if "IS_Q2_K" in variant:
        stage = tokens * (depth + 16 + 4 + 48) + TILE_ROWS * (80 + 8 + 48 + 16)
    else:
        stage = (tokens + TILE_ROWS) * (depth + 16 + 4 * depth // 32)
    return variant["STAGES"] * stage + 8 * tokens


def _matvec(x, w, y, n_pairs: int, n_matrices: int, x_div: int, experts, ops, to):
    """The product of few tokens; that of each head, into an array of its own, comes with its Q8_0 blocks."""
    one_each = experts is None and (n_matrices > 1 or n_pairs == 1)  # a row of activations per matrix
    if one_each and to is None and rounds_itself(x, w, ops):  # with `to` all ranks do alike, however long their rows are
        return _rounding(x, w, y, n_pairs, n_matrices, ops)
    a = round_activations(x, w, ops)
    tokens = tokens_at_once(n_pairs) if experts is None and n_matrices == 1 else 1
    blocks = n_matrices > 1 and ops.fused and w.n_out % 32 == 0 and y.flags.c_contiguous
    grid, variant = matvec_grid(w, TOKENS=tokens, **WHOLE_BLOCKS if blocks else {})
    q, d, _ = q8_0_beside(y, ops) if blocks else (None,) * 3
    sent = to.send(y) if to else NOWHERE
    args = (*w.parts, *a, experts, y, q, d, n_pairs, w.n_out, n_matrices, x_div, row_stride(y), *sent)
    ops.launch(f"matvec_{w.type}", (grid, -(-n_pairs // tokens)), variant["BLOCK"], *args, **variant)
    return y


def _rounding(x, w, y, n_pairs: int, n_matrices: int, ops, beside=None, blocks=(None,) * 3):
    """The product of rows that it rounds itself. beside: an array, contiguous, whose Q8_K blocks are made in the same launch."""
    grid, variant = matvec_grid(w, ROWS=2, BLOCK=256)
    n = 0 if beside is None else beside.size
    args = (w.w, w.d, x, y, w.n_out, n_matrices, row_stride(x), row_stride(y), beside, *blocks, n, beside.shape[-1] if n else 0)
    grid = (grid + _warps(n // 256, ops), n_pairs)
    ops.launch(f"matvec_rounding_{w.type}", grid, variant["BLOCK"], *args, **variant)
    return y


def tokens_at_once(n: int) -> int:
    """Of n tokens, those that one block of threads multiplies with the weights it has read."""
    return min(8, 1 << (n - 1).bit_length())


def rounds_itself(x, w, ops) -> bool:
    """Whether every block of threads rounds x, which is short: cheaper than a launch for it."""
    aligned = row_stride(x) % 4 == 0 and ops.device.address(x) % 16 == 0
    return w.type == "q8_0" and w.n_in <= ROUNDED_VALUES and aligned and ops.recall(("q8_0",), x) is None


def matvec_grid(w, **defines) -> tuple[int, dict]:
    """(blocks for the rows of a matrix, -D set) of a matrix-vector kernel: see raw_kernels/dots.hip."""
    units = w.n_in // UNIT_VALUES[w.type]
    group = 64 if units >= 1024 and "BLOCK" not in defines else 32  # two warps: a block of its own
    if units < 64:  # 4 units a thread
        group = max(4, 1 << max(0, (units // 4).bit_length() - 1))
    shape = {"BLOCK": 64 if group == 64 else 128, "GROUP": group, "ROWS": 1, "TOKENS": 1, "CHOSEN": 1, "REFILL": 1}
    variant = {"TYPE": w.type, "N_IN": w.n_in, "RING": RING[w.type]} | shape | defines
    if variant.pop("WHOLE_BLOCKS", False):
        variant["ROWS"] = max(1, 32 * variant["GROUP"] // variant["BLOCK"])
    variant["ROWS"] = min(variant["ROWS"], w.n_out)
    return -(-w.n_out // (variant["BLOCK"] // variant["GROUP"] * variant["ROWS"])), variant
