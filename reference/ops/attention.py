"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), absorbed: all heads read one latent row a token."""

import numpy as np

from npglm.trace.probes import NO_PROBE
from reference.numerics import F32, Numerics
from reference.ops.matmul import linear, linear_heads
from reference.ops.norm import rms_norm
from reference.ops.rope import rope
from reference.ops.store import store


def queries(h, w, table, config, probe=NO_PROBE, num: Numerics = F32) -> tuple[np.ndarray, np.ndarray]:
    """h [T,D] normed hidden -> q_a [T,Q] normed (the indexer reads it too), q [T,H,R+P]: absorbed nope part, then the rope part."""
    c = config
    q_a = linear(h, w.attn_q_a, num=num)
    probe("q_a", q_a)
    q_a = rms_norm(q_a, w.attn_q_a_norm, c.rms_eps, num=num)
    probe("q_a_norm", q_a)
    q = linear(q_a, w.attn_q_b, num=num)
    probe("q", q)
    q = q.reshape(len(h), c.n_heads, c.nope + c.rope)  # [T,H,N+P]
    q_pe = rope(q[..., c.nope :], table, num=num)  # [T,H,P]
    probe("q_pe", q_pe)
    absorbed = linear_heads(q[..., : c.nope], w.attn_k_b, num=num)  # [T,H,R]
    probe("q_nope_absorbed", absorbed)
    return q_a, np.concatenate([absorbed, q_pe], axis=-1)


def latents(h, w, table, config, probe=NO_PROBE, num: Numerics = F32) -> np.ndarray:
    """h [T,D] normed hidden -> [T,R+P]: the row that the cache keeps, normed latent, then k_pe after rope."""
    c = config
    kv = linear(h, w.attn_kv_a_mqa, num=num)
    probe("kv_cmpr_pe", kv)
    latent = rms_norm(kv[:, : c.kv_rank], w.attn_kv_a_norm, c.rms_eps, num=num)  # [T,R]
    probe("kv_cmpr", latent)
    k_pe = rope(kv[:, c.kv_rank :], table, num=num)  # [T,P]
    probe("k_pe", k_pe)
    return np.concatenate([latent, k_pe], axis=-1)


def projections(h, w, cache, table, pos, config, probe=NO_PROBE, num: Numerics = F32) -> tuple[np.ndarray, np.ndarray]:
    """h [T,D] normed hidden -> queries' q_a and q. Stores this call's latents in cache [capacity,R+P]."""
    q_a, q = queries(h, w, table, config, probe, num)
    store(cache, latents(h, w, table, config, probe, num), pos, num)
    return q_a, q


def attention(
    q: np.ndarray, cache: np.ndarray, top_k: np.ndarray, pos: np.ndarray, rank: int, scale: float, num: Numerics = F32
):
    """q [T,H,R+P], cache [capacity,R+P], top_k int32 [T,n], pos int32 [T] -> [T,H,R].

    softmax(scale * q . k) over the tokens that top_k names (entries < 0 or > pos are padding), values = the latent part. A row
    without any token, which takes NaN in all its scores, is NaN.
    """
    q = q.astype(num.acc, copy=False)
    out = np.empty((*q.shape[:2], rank), num.acc)
    for t, chosen in enumerate(top_k):
        k = cache[chosen[(chosen >= 0) & (chosen <= pos[t])]].astype(num.acc, copy=False)  # [n,R+P]
        if not len(k):
            out[t] = np.nan
            continue
        score = q[t] @ k.T * num.acc(scale)  # [H,n]
        p = np.exp(score - score.max(-1, keepdims=True))  # [H,n]
        out[t] = (p / p.sum(-1, keepdims=True, dtype=num.acc)) @ k[:, :rank]  # [H,R]
    return num.result(out)


def attend(q, w, cache, top_k, pos, config, probe=NO_PROBE, num: Numerics = F32) -> np.ndarray:
    """q [T,H,R+P], cache [capacity,R+P], top_k int32 [T,n], pos int32 [T] -> [T,H*V]: attention, and its values from the latents."""
    kqv = attention(q, cache, top_k, pos, config.kv_rank, config.attn_scale, num)  # [T,H,R]
    probe("kqv", kqv)
    kqv = linear_heads(kqv, w.attn_v_b, num=num).reshape(len(q), -1)
    probe("kqv_out", kqv)
    return kqv
