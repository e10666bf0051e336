"""Absorbed multi-head latent attention. Twins: reference/ops/attention.py."""

import numpy as np

from npglm.gpu.matmul import Blocks, round_activations
from npglm.trace.probes import NO_PROBE

MAX_SPLITS = 256  # attention_merge_f32


def queries(h, w, table, config, probe=NO_PROBE, *, ops):
    """h [T,D] normed hidden -> q_a [T,Q] normed, q [T,H,R+P]: absorbed nope part, then the rope part."""
    round_activations(h, w.attn_q_a, ops)  # latents read it too
    with ops.beside():
        return _queries(h, w, table, config, probe, ops)


def _queries(h, w, table, config, probe, ops):
    c = config
    q_a = ops.linear(h, w.attn_q_a)
    probe("q_a", q_a)
    q_a = ops.rms_norm(q_a, w.attn_q_a_norm, c.rms_eps)
    probe("q_a_norm", q_a)
    q = ops.linear(q_a, w.attn_q_b)
    probe("q", q)
    q = q.reshape(len(h), c.n_heads, c.nope + c.rope)  # [T,H,N+P]
    out = ops.empty((len(h), c.n_heads, c.kv_rank + c.rope), np.float32)  # [T,H,R+P]
    probe("q_pe", ops.rope(q[..., c.nope :], table, out=out[..., c.kv_rank :]))
    probe("q_nope_absorbed", ops.linear_heads(q[..., : c.nope], w.attn_k_b, out=out[..., : c.kv_rank]))
    return q_a, out


def latents(h, w, table, config, probe=NO_PROBE, *, ops):
    """h [T,D] normed hidden -> [T,R+P]: the row that the cache keeps, normed latent, then k_pe after rope."""
    c = config
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
    ops.join()  # q
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
        ops.launch("attention_merge_f32", (heads, n_tokens), 512, part, part_ml, out, q8, d, heads, splits, **shape)
    return out


def tile_bytes(width: int, heads: int, group: int, keys: int) -> int:
    """Dynamic shared memory of attention_f16."""
    pitch = -(-width // 16) * 16 + 8
    return 2 * (2 * heads + keys) * pitch + 4 * heads * (keys + 8) + 4 * group * heads * (keys + 8) + 4 * heads + 4 * keys


def tile_shape(device, width: int, n_tokens: int, heads: int) -> tuple[int, int, int]:
    """(heads of a block, warps per 16 heads, rows staged at a time): all heads for many tokens, 16 and more blocks for few."""
    shapes = [(16, 8, 64), (16, 4, 32), (16, 4, 16)]
    if n_tokens * -(-heads // 64) >= device.n_processors and heads > 16:
        shapes = [(32, 4, 64), *shapes]
    for shape in shapes:
        if tile_bytes(width, *shape) <= device.max_shared:
            return shape
    raise NotImplementedError(f"attention rows of {width} numbers do not fit the shared memory of {device.name}")
