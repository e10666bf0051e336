"""Absorbed multi-head latent attention. Twins: reference/ops/attention.py."""

from types import SimpleNamespace

import numpy as np

from npglm.gpu.device import row_stride
from npglm.gpu.elementwise import BLOCK, norm_parts, with_blocks
from npglm.gpu.matmul import FEW_TOKENS, ROUNDED_VALUES, matvec_grid, q8_0_beside, round_activations, tokens_at_once
from npglm.trace.probes import NO_PROBE

NO_LATENT, NO_KEY = (None, None, None, None, 0), (None, None, None, None, 0, 0.0)  # normed_product_and_rope
WHOLE_RING = 32  # units of 16 bytes
KEY_THREADS = 128  # that one block of it has at least
MAX_SPLITS = 256  # raw_kernels/merge.hip
MERGE = {"BLOCK": 512, "ROWS": 2}  # of matvec_merge, whose blocks of threads each put all splits of a head together
FEW_SPLITS = 32  # more take longer to merge than they save
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


def latent_start(h, w, table, config, ops, pos=None, cache=None):
    """For few tokens: q_a [T,Q] normed and latent [T,R+P], made by two kernels, with the indexer's first products (index_k [T,J] and
    proj [T,I]; None where the layer has none) on the way. cache f16 [capacity,R+P] gets the latents, at pos [T], if it is given. None
    where these kernels do not fit the weights."""
    if not _start_fits(h, w, config, ops):
        return None
    start = ops.recall(("start",), h)
    elsewhere = start and (start.w is not w or start.table is not table or (cache is not None and start.cache is not cache))
    if not start or elsewhere:
        start = _start(h, w, table, cache, ops)
        _latent_norms(start, config, pos, ops)
    return start


def _start_fits(h, w, c, ops) -> bool:
    same = all(p.fast and p.type == w.attn_q_a.type for p in (w.attn_q_a, w.attn_kv_a_mqa))
    return ops.fused and len(h) <= FEW_TOKENS and c.q_rank % 256 == 0 and h.flags.c_contiguous and same


def first_products(h, w, ops):
    """h [T,D] of few tokens times attn_q_a and attn_kv_a_mqa, and the indexer's two matrices or None, in one launch: a list of 4."""
    more = [getattr(w, name, None) for name in ("indexer_attn_k", "indexer_proj")]
    parts = [w.attn_q_a, w.attn_kv_a_mqa, *(p if p and p.fast and p.type == w.attn_q_a.type else None for p in more)]
    made = [p and ops.empty((len(h), p.n_out), np.float32) for p in parts]
    tokens = tokens_at_once(len(h))
    most = 2 if tokens == 1 else 1  # rows of a group: two, and the next kernel's first blocks of threads find room
    _, variant = matvec_grid(w.attn_q_a, TOKENS=tokens, ROWS=min(most, *(p.n_out for p in parts if p)))
    rows = variant["BLOCK"] // variant["GROUP"] * variant["ROWS"]
    grid = sum(-(-p.n_out // rows) for p in parts if p), -(-len(h) // tokens)
    matrices = [v for p, y in zip(parts, made, strict=True) for v in ((*p.parts, y, p.n_out) if p else (None,) * 4 + (0,))]
    x = round_activations(h, w.attn_q_a, ops)
    ops.launch(f"matvec_projections_{w.attn_q_a.type}", grid, variant["BLOCK"], *x, *matrices, len(h), **variant)
    return made


def _start(h, w, table, cache, ops):
    """What latent_start() begins with: q_a and latent are still to be made, of the products raw [T,Q] and kv [T,R+P]."""
    raw, kv, index_k, proj = first_products(h, w, ops)
    q_a, latent = (ops.empty(product.shape, np.float32) for product in (raw, kv))
    mark = ops.device.mark()
    start = SimpleNamespace(
        w=w, table=table, cache=cache, raw=raw, kv=kv, index_k=index_k, proj=proj, q_a=q_a, latent=latent, mark=mark
    )
    ops.remembered[("start",)] = [(h, start)]  # the last one only: each layer makes its own
    return start


def _latent_norms(start, c, pos, ops):
    start.q_a, blocks = with_blocks(start.raw.shape, ops)
    parts = norm_parts(*start.raw.shape)
    kv = (start.kv, start.w.attn_kv_a_norm, *start.table, start.latent, pos, start.cache, c.kv_rank, c.rope // 2)
    args = (start.raw, start.w.attn_q_a_norm, start.q_a, *blocks, c.q_rank, *kv, c.rms_eps, parts)
    ops.launch("latent_norms_f32", (len(start.raw), parts + 1), BLOCK, *args)
    start.raw, start.mark = None, ops.device.mark()


def product_and_rope(x, w, table, first: int, heads: int, turned, ops):
    """x [T,in], w [heads*width,in], fast, few tokens -> [T,heads,width], but the 2n values from `first` on, which are turned by the
    table [T,n], go to turned [T,heads,2n]; None: where they were."""
    n_tokens, n = table[0].shape
    tokens = tokens_at_once(n_tokens)
    grid, variant, y = _rope_product(w, n_tokens, heads, ops, TOKENS=tokens)
    width, turned = y.shape[-1], y if turned is None else turned
    a = round_activations(x, w, ops)
    args = (*w.parts, *a, *table, y, turned, n_tokens, w.n_out, width, first, n, row_stride(turned))
    ops.launch(f"matvec_rope_{w.type}", (grid, -(-n_tokens // tokens)), variant["BLOCK"], *args, **variant)
    return y


def _rope_product(w, n_tokens: int, heads: int, ops, **defines):
    """What the kernels of matvec_rope.hip begin with: matvec_grid()'s two, and y [T,heads,width]."""
    shape = {"GROUP": 8, "BLOCK": 256} if w.n_out >= 8192 else {}  # long enough to fill the device
    grid, variant = matvec_grid(w, ROWS=2, **defines, **shape)
    if shape and n_tokens == 1 and grid <= ops.device.n_processors:
        variant["RING"] = WHOLE_RING  # a block for each of them: all its weights are on their way
    return grid, variant, ops.empty((n_tokens, heads, w.n_out // heads), np.float32)


def normed_product_and_rope(
    x, gain, w, table, first, heads, turned, eps, ops, normed=None, pos=None, latent=NO_LATENT, key=NO_KEY
):
    """product_and_rope of the RMSNorm of x, one token, which the kernel makes itself; normed [1,in] gets it. latent, key: what the kernel
    needs to make a row of that cache, at pos, too."""
    grid, variant, y = _rope_product(w, 1, heads, ops)
    width, n, turned = y.shape[-1], table[0].shape[1], y if turned is None else turned
    args = (*w.parts, x, gain, *table, y, turned, normed, w.n_out, width, first, n, row_stride(turned), eps, pos, *latent, *key)
    ops.launch(f"matvec_queries_{w.type}", (grid + (pos is not None),), variant["BLOCK"], *args, **variant)
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


def projections(h, w, cache, table, pos, config, probe=NO_PROBE, *, ops):
    """h [T,D] normed hidden -> queries' q_a and q. Stores this call's latents in cache [capacity,R+P]."""
    c = config
    one = len(h) == 1 and c.q_rank <= ROUNDED_VALUES and cache.dtype == np.float16 and w.attn_q_b.fast
    if one and _start_fits(h, w, c, ops):
        start, q = _start(h, w, table, cache, ops), ops.empty((1, c.n_heads, c.kv_rank + c.rope), np.float32)
        norm, shape = (start.raw, w.attn_q_a_norm), (c.nope, c.n_heads, q[..., c.kv_rank :], c.rms_eps)
        latent = (start.kv, w.attn_kv_a_norm, start.latent, cache, c.kv_rank)
        parts = normed_product_and_rope(*norm, w.attn_q_b, table, *shape, ops, start.q_a, pos, latent)  # [1,H,N+P]
        ops.linear_heads(parts[..., : c.nope], w.attn_k_b, out=q[..., : c.kv_rank])
        return start.q_a, q
    stored = cache.dtype == np.float16 and latent_start(h, w, table, c, ops, pos, cache)
    q_a, q = ops.queries(h, w, table, c, probe)
    if not stored:
        ops.store(cache, ops.latents(h, w, table, c, probe), pos)
    return q_a, q


def attention(q, cache, top_k, pos, rank: int, scale: float, *, ops, splits: int | None = None):
    """q [T,H,R+P], cache [capacity,R+P], top_k int32 [T,n], pos int32 [T] -> [T,H,R].

    splits: how many blocks share a token's rows (default: what fills the device).
    """
    n_tokens, heads, width = q.shape
    out = ops.empty((n_tokens, heads, rank), np.float32)
    shape = {"RANK": rank, "ROPE": width - rank}
    if cache.dtype == np.float32:
        args = (q, cache, top_k, pos, out, heads, top_k.shape[1], scale)
        ops.launch("attention_f32", (heads, n_tokens), 128, *args, **shape)
        return out
    parts = _attention_f16(q, cache, top_k, pos, out, scale, ops, splits)
    if parts is not None:
        q8, d, _ = q8_0_beside(out, ops) if ops.fused and rank % 32 == 0 else (None,) * 3
        grid = (heads, n_tokens, -(-rank // 128))
        ops.launch("attention_merge_f32", grid, 128, *parts, out, q8, d, heads, parts[0].shape[1], **shape)
    return out


def _attention_f16(q, cache, top_k, pos, out, scale: float, ops, splits: int | None = None):
    """To out [T,H,R], or where several blocks share a token's rows their part [T,splits,H,R] and part_ml [T,splits,H,2]."""
    n_tokens, heads, width = q.shape
    n, rank, device = top_k.shape[1], out.shape[-1], ops.device
    tile_heads, group, keys = tile_shape(device, width, n_tokens, heads, n)
    if splits is None:
        splits = -(-device.n_processors // (n_tokens * -(-heads // tile_heads)))
    splits = max(1, min(splits, -(-n // keys), MAX_SPLITS))
    parts = [ops.empty((n_tokens, splits, heads, size), np.float32) for size in (rank, 2)] if splits > 1 else None
    args = (q, cache, top_k, pos, *((None, *parts) if parts else (out, None, None)), heads, n, splits, scale)
    variant = {"RANK": rank, "ROPE": width - rank, "HEADS": tile_heads, "GROUP": group, "KEYS": keys}
    grid, shared = (splits, n_tokens, -(-heads // tile_heads)), tile_bytes(width, tile_heads, group, keys)
    block = tile_heads // 16 * group * device.lanes
    ops.launch("attention_f16", grid, block, *args, device.settled(cache, top_k, pos), shared=shared, **variant)
    return parts


def attend(q, w, cache, top_k, pos, config, probe=NO_PROBE, *, ops):
    """q [T,H,R+P], cache [capacity,R+P], top_k int32 [T,n], pos int32 [T] -> [T,H*V]: attention, and its values from the latents."""
    w, rank, scale = w.attn_v_b, config.kv_rank, config.attn_scale
    if ops.fused and cache.dtype == np.float16 and w.fast and w.type == "q8_0" and w.n_out % 32 == 0 and len(q) <= FEW_TOKENS:
        kqv = ops.empty((*q.shape[:2], rank), np.float32)  # [T,H,R]
        if parts := _attention_f16(q, cache, top_k, pos, kqv, scale, ops):
            return _merge_and_multiply(*parts, w, ops).reshape(len(q), -1)
    else:
        kqv = ops.attention(q, cache, top_k, pos, rank, scale)
    probe("kqv", kqv)
    kqv = ops.linear_heads(kqv, w).reshape(len(q), -1)
    probe("kqv_out", kqv)
    return kqv


def _merge_and_multiply(part, part_ml, w, ops):
    """Parts of attention [T,splits,H,R] and [T,splits,H,2], w [H,V,R] -> [T,H,V]."""
    n_tokens, splits, heads, _ = part.shape
    y = ops.empty((n_tokens, heads, w.n_out), np.float32)
    grid, variant = matvec_grid(w, **MERGE)
    args = (w.w, w.d, part, part_ml, y, *q8_0_beside(y, ops)[:2], w.n_out, heads, splits)
    ops.launch(f"matvec_merge_{w.type}", (grid, n_tokens * heads), variant["BLOCK"], *args, **variant)
    return y


def tile_bytes(width: int, heads: int, group: int, keys: int) -> int:
    """Dynamic shared memory of attention_f16."""
    pitch = -(-width // 16) * 16 + 8
    return 2 * pitch * (keys + max(keys, 2 * heads)) + 4 * (1 + group) * heads * (keys + 8) + 8 * heads + 4 * keys


def tile_shape(device, width: int, n_tokens: int, heads: int, n: int) -> tuple[int, int, int]:
    """One of MANY_SHAPES, where there is work for all blocks, or FEW_SHAPES that fits the device's shared memory: of the latter the
    smallest by which FEW_SPLITS blocks take n rows at once."""
    many = n_tokens * -(-heads // 64) >= device.n_processors and heads > 16
    few = [shape for shape in FEW_SHAPES if shape[2] * FEW_SPLITS < 2 * n] or FEW_SHAPES[-1:]
    for shape in (*(MANY_SHAPES if many else ()), *few, *FEW_SHAPES):
        if tile_bytes(width, *shape) <= device.max_shared:
            return shape
    raise NotImplementedError(f"attention rows of {width} numbers do not fit the shared memory of {device.name}")
