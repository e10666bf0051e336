"""The DSA indexer: scores of every cached token, and the choice of the top-k (DeepSeek-V3.2's lightning indexer)."""

import numpy as np

from npglm.trace.probes import NO_PROBE
from reference.numerics import F32, Numerics
from reference.ops.matmul import linear
from reference.ops.norm import layer_norm
from reference.ops.rope import rope
from reference.ops.store import store


def indexer_score(q: np.ndarray, cache: np.ndarray, weights: np.ndarray, pos: np.ndarray, num: Numerics = F32) -> np.ndarray:
    """q [T,I,J], cache [capacity,J], weights [T,I], pos int32 [T] ascending -> [T,S], S = pos[-1] + 1.

    sum over heads of weights * relu(q . k); -inf where s > pos. One row of q at a time, so that memory stays at [I,S].
    """
    n_cached = int(pos[-1]) + 1
    q, weights = q.astype(num.acc, copy=False), weights.astype(num.acc, copy=False)
    keys = cache[:n_cached].astype(num.acc, copy=False)  # [S,J]
    score = np.full((len(q), n_cached), -np.inf, num.acc)
    for t, last in enumerate(pos):
        n = int(last) + 1
        score[t, :n] = weights[t] @ np.maximum(q[t] @ keys[:n].T, 0)  # [I] @ [I,n]
    return num.result(score)


def select_top_k(score: np.ndarray, pos: np.ndarray, k: int, num: Numerics = F32) -> np.ndarray:
    """score [T,S], pos int32 [T] -> int32 [T, min(k,S)]: the chosen tokens, ascending, then -1.

    Order of choice: score descending, then index ascending. NaN and tokens after the row's position are never chosen.
    """
    n_cached = score.shape[1]
    width = min(k, n_cached)
    chosen = np.full((len(score), width), -1, np.int32)
    for t, last in enumerate(pos):
        row = score[t, : int(last) + 1]
        order = np.argsort(-row, kind="stable")  # NaN sorts to the end
        order = order[: min(width, len(row) - int(np.isnan(row).sum()))]
        chosen[t, : len(order)] = np.sort(order)
    return chosen


def indexer(h, q_a, w, cache, table, pos, config, probe=NO_PROBE, num: Numerics = F32) -> np.ndarray:
    """h [T,D] normed hidden, q_a [T,Q] normed -> top_k int32 [T, min(top_k,S)]. Stores this call's keys in cache [capacity,J] first."""
    c, p = config, config.rope
    k = layer_norm(
        linear(h, w.indexer_attn_k, num=num), w.indexer_k_norm, w.indexer_k_norm_bias, c.indexer_eps, num=num
    )  # [T,J]
    k = np.concatenate([rope(k[:, :p], table, num=num), k[:, p:]], axis=-1)  # [T,J]
    probe("indexer_k", k)
    store(cache, k, pos, num=num)
    q = linear(q_a, w.indexer_attn_q_b, num=num).reshape(len(h), c.indexer_heads, c.indexer_dim)  # [T,I,J]
    q = np.concatenate([rope(q[..., :p], table, num=num), q[..., p:]], axis=-1)  # [T,I,J]
    probe("indexer_q", q)
    weights = num.result(linear(h, w.indexer_proj, num=num) * num.acc(c.indexer_scale))  # [T,I]
    probe("indexer_weights", weights)
    score = indexer_score(q, cache, weights, pos, num=num)  # [T,S]
    probe("indexer_score", score)
    return select_top_k(score, pos, c.indexer_top_k, num=num)
