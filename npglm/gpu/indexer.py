"""The DSA indexer. Twins: reference/ops/indexer.py."""

import numpy as np

from npglm.gpu.attention import KEY_THREADS, latent_start, normed_product_and_rope, product_and_rope
from npglm.gpu.matmul import FEW_TOKENS
from npglm.trace.probes import NO_PROBE

SCORE_BYTES = 256 << 20  # of scores at a time
LONG_ROW = 16384  # scores from which several blocks search a row
CHUNK, COUNTS = 4096, 2112  # scores that one of them takes, and its counts: topk.hip
SHORT_ROW = 8192  # scores that 512 threads keep in registers
KEYS, BLOCK = 64, 256  # keys that a block takes at a time, and its threads: indexer_f16.hip


def indexer_score(q, cache, weights, pos, *, ops, width: int | None = None):
    """q [T,I,J], cache [capacity,J], weights [T,I], pos int32 [T] ascending -> [T,width]; -inf where s > pos.

    width: default pos[-1] + 1, which is read back from the device.
    """
    width = int(ops.numpy(pos[-1:])[0]) + 1 if width is None else width
    return _score(q, cache, weights, pos, width, 1.0, ops)


def _score(q, cache, weights, pos, width: int, factor: float, ops, one: bool = False):
    """indexer_score times factor (1 for an f32 cache). one: pos is [1], and of the cache the launch before wrote that row at most."""
    n_tokens, heads, dim = q.shape
    score = ops.empty((n_tokens, width), np.float32)
    args = (q, cache, weights, pos, score)
    if cache.dtype == np.float32:
        shared = 4 * heads * (dim + 1)
        ops.launch("indexer_score_f32", (-(-width // 128), n_tokens), 128, *args, heads, width, shared=shared, DIM=dim)
        return score
    padded, pitch = -(-heads // 16) * 16, -(-dim // 16) * 16 + 8
    shared = 2 * pitch * (2 * padded + KEYS) + 4 * padded * (KEYS + 1)
    tiles = -(-width // KEYS)  # a block goes through several if there are more than the device has room for
    chunks = max(1, min(4, tiles * n_tokens // (4 * ops.device.n_processors)))
    grid = (-(-tiles // chunks), n_tokens)
    args += width, chunks, factor, one and ops.device.settled(pos)
    ops.launch("indexer_score_f16", grid, BLOCK, *args, shared=shared, DIM=dim, HEADS=heads)
    return score


def select_top_k(score, pos, k: int, *, ops, out=None):
    """score [T,S], pos int32 [T] -> int32 [T, min(k,S)]: the chosen tokens, ascending, then -1."""
    n_tokens, width = score.shape
    chosen = ops.empty((n_tokens, min(k, width)), np.int32) if out is None else out
    if width >= LONG_ROW and n_tokens <= FEW_TOKENS:
        chunks, k = -(-width // CHUNK), chosen.shape[1]
        grid, block, histogram = (chunks, n_tokens), 512, ops.empty((n_tokens, 3, COUNTS), np.int32)
        tally = ops.empty((n_tokens, chunks, 2), np.int32)
        ops.launch("zero_i32", (-(-histogram.size // 256),), 256, histogram, histogram.size)
        for step in range(3):
            ops.launch("top_k_count", grid, block, score, pos, histogram, width, k, step, THREADS=block)
        ops.launch("top_k_tally", grid, block, score, pos, histogram, tally, width, k, THREADS=block)
        ops.launch("top_k_place", grid, block, score, pos, histogram, tally, chosen, width, k, THREADS=block)
        return chosen
    block = 512 if width <= SHORT_ROW else 1024
    args = (score, pos, chosen, width, chosen.shape[1], ops.device.settled(pos))
    ops.launch("select_top_k_f32", (n_tokens,), block, *args, THREADS=block)
    return chosen


def indexer(h, q_a, w, cache, table, pos, config, probe=NO_PROBE, *, ops):
    """h [T,D] normed hidden, q_a [T,Q] normed -> top_k int32 [T, min(top_k,S)]. Stores this call's keys in cache [capacity,J] first.

    Fused: S is the cache's capacity, so that nothing is read back and a captured step can be replayed.
    """
    c, p = config, config.rope
    start = latent_start(h, w, table, c, ops)
    both = start and start.index_k is not None and start.proj is not None
    if both and w.indexer_attn_q_b.fast and cache.dtype == np.float16:
        return _few_tokens(start, q_a, w, cache, table, pos, c, ops)
    k = ops.layer_norm(ops.linear(h, w.indexer_attn_k), w.indexer_k_norm, w.indexer_k_norm_bias, c.indexer_eps)  # [T,J]
    ops.rope(k[:, :p], table, out=k[:, :p])
    probe("indexer_k", k)
    ops.store(cache, k, pos)
    weights = ops.scale(ops.linear(h, w.indexer_proj), c.indexer_scale)  # [T,I]
    q = ops.linear(q_a, w.indexer_attn_q_b).reshape(len(h), c.indexer_heads, c.indexer_dim)  # [T,I,J]
    ops.rope(q[..., :p], table, out=q[..., :p])
    probe("indexer_q", q)
    probe("indexer_weights", weights)
    if not ops.fused:
        score = ops.indexer_score(q, cache, weights, pos)  # [T,S]
        probe("indexer_score", score)
        return ops.select_top_k(score, pos, c.indexer_top_k)
    return _choose(q, cache, weights, pos, 1.0, c, ops)


def _few_tokens(start, q_a, w, cache, table, pos, c, ops):
    n = c.indexer_dim
    key = (start.index_k, w.indexer_k_norm, w.indexer_k_norm_bias, *table, pos, cache, n, c.rope // 2, c.indexer_eps)
    one = start.raw is not None  # one token: q_a is made after the mark, by the product of attention's queries
    mine = one and n <= KEY_THREADS  # this product makes it again, and the key
    with ops.device.beside(start.mark if mine or not one else None):  # the queries' other products
        if mine:
            norm, more = (start.raw, w.attn_q_a_norm), (*key[:3], cache, n, c.indexer_eps)
            shape = (0, c.indexer_heads, None, c.rms_eps)
            q = normed_product_and_rope(*norm, w.indexer_attn_q_b, table, *shape, ops, pos=pos, key=more)  # [1,I,J]
        else:
            q = product_and_rope(q_a, w.indexer_attn_q_b, table, 0, c.indexer_heads, None, ops)  # [T,I,J]
            ops.launch("index_key_f16", (len(pos),), -(-n // 64) * 64, *key)
        return _choose(q, cache, start.proj, pos, c.indexer_scale, c, ops, mine)


def _choose(q, cache, weights, pos, factor: float, c, ops, one: bool = False):
    """The best of the whole cache's scores, at most SCORE_BYTES of them at a time. one: as in _score."""
    top_k = ops.empty((len(q), min(c.indexer_top_k, len(cache))), np.int32)
    width = -(-len(cache) // 4) * 4  # rows of scores are aligned
    step = max(1, SCORE_BYTES // (4 * width))
    for first in range(0, len(q), step):
        rows = slice(first, first + step)
        score = _score(q[rows], cache, weights[rows], pos[rows], width, factor, ops, one)
        ops.select_top_k(score, pos[rows], c.indexer_top_k, out=top_k[rows])
    return top_k
