"""Absorbed multi-head latent attention. Twins: reference/ops/attention.py."""

from types import SimpleNamespace

import numpy as np

from npglm.gpu.device import row_stride
from npglm.gpu.elementwise import BLOCK, norm_parts, with_blocks
from npglm.gpu.matmul import FEW_TOKENS, Blocks, matvec_grid, round_activations, tokens_at_once
from npglm.trace.probes import NO_PROBE

MAX_SPLITS = 256  # attention_merge_f32
# Of attention_f16: heads of a block, warps per 16 heads, rows staged at a time. For many tokens, and for few: more blocks.
MANY_SHAPES, FEW_SHAPES = ((32, 4, 64), (32, 4, 32)), ((16, 8, 64), (16, 4, 32), (16, 4, 16))


def queries(h, w, table, config, probe=NO_PROBE, *, ops):
    """h [T,D] normed hidden -> q_a [T,Q] normed, q [T,H,R+P]: absorbed nope part, then the rope part."""
    c = config
    out = ops.empty((len(h), c.n_heads, c.kv_rank + c.rope), np.float32)  # [T,H,R+P]
    start = latent_start(h, w, table, c, ops)
    if start and w.attn_q_b.fast:
        q = product_and_rope(start.q_a, w.attn_q_b, table, c.nope, c.n_heads, out[..., c.kv_rank :], ops)  # [T,H,N+P]
        ops.linear_heads(q[..., : c.nope], w.attn_k_b, out=out[..., : c.kv_rank])
        return start.q_a, out
    q_a = ops.linear(h, w.attn_q_a)
    probe("q_a", q_a)
    q_a = ops.rms_norm(q_a, w.attn_q_a_norm, c.rms_eps)
    probe("q_a_norm", q_a)
    q = ops.linear(q_a, w.attn_q_b)
    probe("q", q)
    q = q.reshape(len(h), c.n_heads, c.nope + c.rope)  # [T,H,N+P]
    probe("q_pe", ops.rope(q[..., c.nope :], table, out=out[..., c.kv_rank :]))
    probe("q_nope_absorbed", ops.linear_heads(q[..., : c.nope], w.attn_k_b, out=out[..., : c.kv_rank]))
    return q_a, out


def latent_start(h, w, table, config, ops):
    """For few tokens: q_a [T,Q] normed and latent [T,R+P], made by two kernels, with the indexer's first products (index_k [T,J] and
    proj [T,I]; None where the layer has none) on the way. None where these kernels do not fit the weights."""
    c, pair = config, (w.attn_q_a, w.attn_kv_a_mqa)
    fits = ops.fused and len(h) <= FEW_TOKENS and c.q_rank % 256 == 0 and h.flags.c_contiguous
    if not fits or not all(p.fast and p.type == w.attn_q_a.type for p in pair):
        return None
    start = ops.recall(("start",), h)
    if start is None or start.w is not w or start.table is not table:
        start = _latent_start(h, w, table, c, pair, ops)
        ops.remembered[("start",)] = [(h, start)]  # the last one only: each layer makes its own
    return start


def _latent_start(h, w, table, c, pair, ops):
    more = [getattr(w, name, None) for name in ("indexer_attn_k", "indexer_proj")]
    parts = [*pair, *(p if p and p.fast and p.type == w.attn_q_a.type else None for p in more)]
    made = [p and ops.empty((len(h), p.n_out), np.float32) for p in parts]
    tokens = tokens_at_once(len(h))
    _, variant = matvec_grid(w.attn_q_a, TOKENS=tokens)
    rows = variant["BLOCK"] // variant["GROUP"] * variant["ROWS"]
    grid = sum(-(-p.n_out // rows) for p in parts if p), -(-len(h) // tokens)
    matrices = [v for p, y in zip(parts, made, strict=True) for v in ((*p.parts, y, p.n_out) if p else (None,) * 4 + (0,))]
    x = round_activations(h, w.attn_q_a, ops)
    ops.launch(f"matvec_projections_{w.attn_q_a.type}", grid, variant["BLOCK"], *x, *matrices, len(h), **variant)
    q_a, blocks = with_blocks(made[0].shape, ops)
    latent = ops.empty(made[1].shape, np.float32)
    parts = norm_parts(*q_a.shape)
    kv = (made[1], w.attn_kv_a_norm, *table, latent, c.kv_rank, c.rope // 2)
    args = (made[0], w.attn_q_a_norm, q_a, *blocks, c.q_rank, *kv, c.rms_eps, parts)
    ops.launch("latent_norms_f32", (len(h), parts + 1), BLOCK, *args)
    return SimpleNamespace(w=w, table=table, q_a=q_a, latent=latent, index_k=made[2], proj=made[3])


def product_and_rope(x, w, table, first: int, heads: int, turned, ops):
    """x [T,in], w [heads*width,in], fast, few tokens -> [T,heads,width], but the 2n values from `first` on, which are turned by the
    table [T,n], go to turned [T,heads,2n]; None: where they were."""
    n_tokens, n = table[0].shape
    tokens = tokens_at_once(n_tokens)
    shape = {"GROUP": 8} if w.n_out >= 8192 else {}  # long enough to fill the device
    grid, variant = matvec_grid(w, TOKENS=tokens, ROWS=2, **shape)
    width = w.n_out // heads
    y = ops.empty((n_tokens, heads, width), np.float32)
    turned = y if turned is None else turned
    a = round_activations(x, w, ops)
    args = (*w.parts, *a, *table, y, turned, n_tokens, w.n_out, width, first, n, row_stride(turned))
    ops.launch(f"matvec_rope_{w.type}", (grid, -(-n_tokens // tokens)), variant["BLOCK"], *args, **variant)
    return y


def latents(h, w, table, config, probe=NO_PROBE, *, ops):
    """h [T,D] normed hidden -> [T,R+P]: the row that the cache keeps, normed latent, then k_pe after rope."""
    c = config
    if start := latent_start(h, w, table, c, ops):
        return start.latent
    kv = ops.linear(h, w.attn_kv_a_mqa)
    probe("kv_cmpr_pe", kv)
    out = ops.empty(kv.shape, np.float32)
    probe("kv_cmpr", ops.rms_norm(kv[:, : c.kv_rank], w.attn_kv_a_norm, c.rms_eps, out=out[:, : c.kv_rank]))
    probe("k_pe", ops.rope(kv[:, c.kv_rank :], table, out=out[:, c.kv_rank :]))
    return out


def attention(q, cache, top_k, pos, rank: int, scale: float, *, ops, splits: int | None = None):
    """q [T,H,R+P], cache [capacity,R+P], top_k int32 [T,n], pos int32 [T] -> [T,H,R].

    splits: how many blocks share a token's rows (default: what fills the device).
    """
    n_tokens, heads, width = q.shape
    n = top_k.shape[1]
    out = ops.empty((n_tokens, heads, rank), np.float32)
    shape = {"RANK": rank, "ROPE": width - rank}
    if cache.dtype == np.float32:
        ops.launch("attention_f32", (heads, n_tokens), 128, q, cache, top_k, pos, out, heads, n, scale, **shape)
        return out
    tile_heads, group, keys = tile_shape(ops.device, width, n_tokens, heads)
    if splits is None:
        splits = -(-ops.device.n_processors // (n_tokens * -(-heads // tile_heads)))
    splits = max(1, min(splits, -(-n // keys), MAX_SPLITS))
    part = part_ml = None
    if splits > 1:
        part = ops.empty((n_tokens, splits, heads, rank), np.float32)
        part_ml = ops.empty((n_tokens, splits, heads, 2), np.float32)
    ops.launch(
        "attention_f16", (splits, n_tokens, -(-heads // tile_heads)), tile_heads // 16 * group * ops.device.lanes,
        q, cache, top_k, pos, None if splits > 1 else out, part, part_ml, heads, n, splits, scale,
        shared=tile_bytes(width, tile_heads, group, keys), **shape, HEADS=tile_heads, GROUP=group, KEYS=keys,
    )  # fmt: skip
    if splits > 1:
        q8 = d = None
        if ops.fused and rank % 32 == 0:
            q8, d = ops.empty(out.shape, np.int8), ops.empty((n_tokens, heads, rank // 32), np.float16)
            ops.remember(("q8_0",), out, lambda: Blocks(q8, d))
        ops.launch(
            "attention_merge_f32", (heads, n_tokens, -(-rank // 128)), 128, part, part_ml, out, q8, d, heads, splits, **shape
        )
    return out


def tile_bytes(width: int, heads: int, group: int, keys: int) -> int:
    """Dynamic shared memory of attention_f16."""
    pitch = -(-width // 16) * 16 + 8
    return 2 * pitch * (keys + max(keys, 2 * heads)) + 4 * (1 + group) * heads * (keys + 8) + 8 * heads + 4 * keys


def tile_shape(device, width: int, n_tokens: int, heads: int) -> tuple[int, int, int]:
    """The first of MANY_SHAPES, where there is work for all blocks, and FEW_SHAPES that fits the device's shared memory."""
    many = n_tokens * -(-heads // 64) >= device.n_processors and heads > 16
    for shape in (*(MANY_SHAPES if many else ()), *FEW_SHAPES):
        if tile_bytes(width, *shape) <= device.max_shared:
            return shape
    raise NotImplementedError(f"attention rows of {width} numbers do not fit the shared memory of {device.name}")
