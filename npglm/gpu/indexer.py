"""The DSA indexer. Twins: reference/ops/indexer.py."""

import numpy as np

from npglm.trace.probes import NO_PROBE

SCORE_BYTES = 256 << 20  # of scores at a time


def indexer_score(q, cache, weights, pos, *, ops, width: int | None = None):
    """q [T,I,J], cache [capacity,J], weights [T,I], pos int32 [T] ascending -> [T,width]; -inf where s > pos.

    width: default pos[-1] + 1, which is read back from the device.
    """
    n_tokens, heads, dim = q.shape
    width = int(ops.numpy(pos[-1:])[0]) + 1 if width is None else width
    score = ops.empty((n_tokens, width), np.float32)
    args = (q, cache, weights, pos, score)
    if cache.dtype == np.float32:
        shared = 4 * heads * (dim + 1)
        ops.launch("indexer_score_f32", (-(-width // 128), n_tokens), 128, *args, heads, width, shared=shared, DIM=dim)
        return score
    padded, pitch = -(-heads // 16) * 16, -(-dim // 16) * 16 + 8
    shared = 2 * pitch * (2 * padded + 64) + 4 * padded * 65 + 4 * heads
    chunks = 1 if n_tokens * width < 1 << 18 else 4  # of 64 keys, that one block goes through
    grid = (-(-width // (64 * chunks)), n_tokens)
    ops.launch("indexer_score_f16", grid, 128, *args, width, chunks, shared=shared, DIM=dim, HEADS=heads)
    return score


def select_top_k(score, pos, k: int, *, ops, out=None):
    """score [T,S], pos int32 [T] -> int32 [T, min(k,S)]: the chosen tokens, ascending, then -1."""
    n_tokens, width = score.shape
    chosen = ops.empty((n_tokens, min(k, width)), np.int32) if out is None else out
    ops.launch("select_top_k_f32", (n_tokens,), 1024, score, pos, chosen, width, chosen.shape[1])
    return chosen


def indexer(h, q_a, w, cache, table, pos, config, probe=NO_PROBE, *, ops):
    """h [T,D] normed hidden, q_a [T,Q] normed -> top_k int32 [T, min(top_k,S)]. Stores this call's keys in cache [capacity,J] first.

    Fused: S is the cache's capacity, so that nothing is read back and a captured step can be replayed.
    """
    c, p = config, config.rope
    k = ops.layer_norm(ops.linear(h, w.indexer_attn_k), w.indexer_k_norm, w.indexer_k_norm_bias, c.indexer_eps)  # [T,J]
    ops.rope(k[:, :p], table, out=k[:, :p])
    probe("indexer_k", k)
    ops.store(cache, k, pos)
    weights = ops.scale(ops.linear(h, w.indexer_proj), c.indexer_scale)  # [T,I]
    ops.join()  # q_a
    q = ops.linear(q_a, w.indexer_attn_q_b).reshape(len(h), c.indexer_heads, c.indexer_dim)  # [T,I,J]
    ops.rope(q[..., :p], table, out=q[..., :p])
    probe("indexer_q", q)
    probe("indexer_weights", weights)
    if not ops.fused:
        score = ops.indexer_score(q, cache, weights, pos)  # [T,S]
        probe("indexer_score", score)
        return ops.select_top_k(score, pos, c.indexer_top_k)
    width = len(cache)
    top_k = ops.empty((len(h), min(c.indexer_top_k, width)), np.int32)
    step = max(1, SCORE_BYTES // (4 * width))
    for first in range(0, len(h), step):
        rows = slice(first, first + step)
        score = ops.indexer_score(q[rows], cache, weights[rows], pos[rows], width=width)
        ops.select_top_k(score, pos[rows], c.indexer_top_k, out=top_k[rows])
    return top_k
