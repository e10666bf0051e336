"""Faults planted in the reference's run, written without npglm.trace.faults: each computes the wrong thing in its own way.

A plant gets (p, inputs, right, values): the Place (config p.c, weights p.w, positions p.pos), the op's inputs, what is right, and every
probe so far by name. It returns what the broken engine would have made. `run_planted` runs the model with one op broken on one layer.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf.quants import dequantize

from npglm.trace.graph import Model, run
from reference.numerics import Numerics

F = np.float32


@dataclass(frozen=True)
class Plant:
    """op, layer: what is broken. families: of npglm.trace.faults, that name it rightly; () = only its structure can be told.

    number: in shared/field/faults.md. tokens: the least prompt at which it shows. after: a change of the recorded arrays only.
    """

    name: str
    number: str
    op: str
    layer: int | None
    families: tuple[str, ...]
    make: Callable
    tokens: int = 5
    after: bool = False


PLANTS: dict[str, Plant] = {}


def plant(name, number, op, layer, families, tokens=5, after=False):
    def register(make):
        PLANTS[name] = Plant(
            name, number, op, layer, tuple(f.strip() for f in families.split(",") if f.strip()), make, tokens, after
        )
        return make

    return register


def run_planted(model: Model, numerics: Numerics, broken: Plant | None = None) -> dict[str, np.ndarray]:
    """Every probe of a prefill, with one op broken. Arrays are f32 (choices int32)."""
    values: dict = {"__tensors": model.checkpoint.tensors, "__layers": model.weights.layers}
    for step in model.steps():
        place = model.place(step.layer, numerics)
        inputs = [values[n] for n in step.inputs]
        made = run(step, place, inputs)[0]
        if broken and not broken.after and (step.probe, step.layer) == (broken.op, broken.layer):
            with np.errstate(all="ignore"):
                made = np.asarray(broken.make(place, inputs, made, values), made.dtype)
        values[step.name] = made
    if broken and broken.after:
        broken.make(model, values)
    return {
        n: np.ascontiguousarray(v, np.int32 if v.dtype.kind == "i" else F) for n, v in values.items() if not n.startswith("__")
    }


# --- rope -------------------------------------------------------------------------------------------------------------------


def turn(x, pos, theta, n, neox=False):
    """Rotate the last axis of x [T,...,n] in its own loop over pairs."""
    y = np.array(x, np.float64)
    d = x.shape[-1]
    for i in range(d // 2):
        a, b = (i, i + d // 2) if neox else (2 * i, 2 * i + 1)
        angle = pos * theta ** (-2 * i / n)
        c, s = (f(angle).reshape(-1, *[1] * (x.ndim - 2)) for f in (np.cos, np.sin))
        y[..., a], y[..., b] = x[..., a] * c - x[..., b] * s, x[..., a] * s + x[..., b] * c
    return y


def raw_q(p, q):
    return q.reshape(len(q), p.c.n_heads, -1)[..., p.c.nope :].astype(np.float64)


@plant("q_pe half-split", "8", "q_pe", 1, "rope pairs half-split")
def _(p, inputs, right, values):
    return turn(raw_q(p, inputs[0]), p.pos, p.c.rope_theta, p.c.rope, neox=True)


@plant("q_pe theta 1e6", "12,13", "q_pe", 0, "rope base or dims")
def _(p, inputs, right, values):
    return turn(raw_q(p, inputs[0]), p.pos, 1e6, p.c.rope)


@plant("q_pe theta 3.3e5", "12,13", "q_pe", 2, "rope base or dims")
def _(p, inputs, right, values):
    return turn(raw_q(p, inputs[0]), p.pos, 3.3e5, p.c.rope)


@plant("k_pe theta 1e6", "13", "k_pe", 0, "rope base or dims")
def _(p, inputs, right, values):
    return turn(inputs[0][:, p.c.kv_rank :].astype(np.float64), p.pos, 1e6, p.c.rope)


@plant("k_pe frequencies over head_dim", "15", "k_pe", 1, "rope base or dims")
def _(p, inputs, right, values):
    return turn(inputs[0][:, p.c.kv_rank :].astype(np.float64), p.pos, p.c.rope_theta, p.c.nope + p.c.rope)


@plant("q_pe positions off by one", "24", "q_pe", 1, "rope positions")
def _(p, inputs, right, values):
    return turn(raw_q(p, inputs[0]), p.pos + 1, p.c.rope_theta, p.c.rope)


@plant("k_pe half-split and theta 1e6", "9,12", "k_pe", 2, "rope pairs half-split, rope base or dims")
def _(p, inputs, right, values):
    return turn(inputs[0][:, p.c.kv_rank :].astype(np.float64), p.pos, 1e6, p.c.rope, neox=True)


def raw_indexer_k(p, h, eps=None, rms=False, bias=True):
    w = p.w
    x = h.astype(np.float64) @ w.indexer_attn_k.decode().astype(np.float64).T
    if not rms:
        x = x - x.mean(-1, keepdims=True)
    y = x / np.sqrt((x**2).mean(-1, keepdims=True) + (p.c.indexer_eps if eps is None else eps)) * w.indexer_k_norm.decode()
    return y + w.indexer_k_norm_bias.decode() * bias


def turned_first(p, x, neox=False):
    n = p.c.rope
    return np.concatenate([turn(x[..., :n], p.pos, p.c.rope_theta, n, neox), x[..., n:]], -1)


@plant("indexer_k half-split", "8,9,10,14", "indexer_k", 1, "rope pairs half-split")
def _(p, inputs, right, values):
    return turned_first(p, raw_indexer_k(p, inputs[0]), neox=True)


@plant("indexer_q half-split", "8,9,14", "indexer_q", 0, "rope pairs half-split")
def _(p, inputs, right, values):
    q = inputs[0].astype(np.float64) @ p.w.indexer_attn_q_b.decode().astype(np.float64).T
    return turned_first(p, q.reshape(len(q), p.c.indexer_heads, -1), neox=True)


@plant("indexer_k RMSNorm with bias", "17", "indexer_k", 1, "another norm")
def _(p, inputs, right, values):
    return turned_first(p, raw_indexer_k(p, inputs[0], rms=True))


@plant("indexer_k RMSNorm without bias", "17", "indexer_k", 0, "another norm")
def _(p, inputs, right, values):
    return turned_first(p, raw_indexer_k(p, inputs[0], rms=True, bias=False))


@plant("indexer_k eps 1e-3", "18", "indexer_k", 1, "norm eps")
def _(p, inputs, right, values):
    return turned_first(p, raw_indexer_k(p, inputs[0], eps=1e-3))


# --- norms ------------------------------------------------------------------------------------------------------------------


def rms(x, w, eps):
    x = x.astype(np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * w.decode()


@plant("q_a_norm eps 1e-4", "hf#48762", "q_a_norm", 0, "norm eps")
def _(p, inputs, right, values):
    return rms(inputs[0], p.w.attn_q_a_norm, 1e-4)


@plant("kv_cmpr norm over all columns", "35", "kv_cmpr", 1, "another norm")
def _(p, inputs, right, values):
    x = inputs[0].astype(np.float64)
    return (x / np.sqrt((x**2).mean(-1, keepdims=True) + p.c.rms_eps))[:, : p.c.kv_rank] * p.w.attn_kv_a_norm.decode()


@plant("ffn_norm half of the lanes", "70", "ffn_norm", 1, "another norm")
def _(p, inputs, right, values):
    x = inputs[0].astype(np.float64)
    half = (x.reshape(len(x), -1, 64)[..., :32] ** 2).sum((-1, -2))[:, None]
    return x / np.sqrt(half / x.shape[1] + p.c.rms_eps) * p.w.ffn_norm.decode()


@plant("attn_norm of another layer", "7", "attn_norm", 2, "wrong tensor")
def _(p, inputs, right, values):
    return right / p.w.attn_norm.decode() * values["__layers"][1].attn_norm.decode()


# --- projections ------------------------------------------------------------------------------------------------------------


def product(x, w):
    return x.astype(np.float64) @ np.asarray(w, np.float64).T


@plant("q first half of the sum", "54", "q", 1, "parts of the sum")
def _(p, inputs, right, values):
    n = inputs[0].shape[1] // 2
    return product(inputs[0][:, :n], p.w.attn_q_b.decode()[:, :n])


@plant("attn_out lanes 0-31 of 64", "70", "attn_out", 0, "parts of the sum")
def _(p, inputs, right, values):
    keep = np.arange(inputs[0].shape[1]) % 64 < 32
    return product(inputs[0][:, keep], p.w.attn_output.decode()[:, keep])


@plant("ffn_gate beyond column 128 missing", "61", "ffn_gate", 0, "parts of the sum")
def _(p, inputs, right, values):
    return product(inputs[0][:, :128], p.w.ffn_gate.decode()[:, :128])


@plant("ffn_out last block twice", "3", "ffn_out", 0, "parts of the sum")
def _(p, inputs, right, values):
    w, x = p.w.ffn_down.decode(), inputs[0]
    return product(x, w) + product(x[:, -32:], w[:, -32:])


@plant("q_a rows shuffled in 16 x 16 tiles", "62", "q_a", 1, "transposed or permuted weights")
def _(p, inputs, right, values):
    w = p.w.attn_q_a.decode()
    n, k = w.shape
    tiles = [w[i : i + 16, j : j + 16].ravel() for i in range(0, n, 16) for j in range(0, k, 16)]
    return product(inputs[0], np.concatenate(tiles).reshape(n, k))


@plant("gate and up swapped", "7", "ffn_gate", 1, "wrong tensor")
def _(p, inputs, right, values):
    return product(inputs[0], p.w.ffn_up_shexp.decode())


@plant("kv_a in fp8", "46", "kv_cmpr_pe", 0, "precision of the weights")
def _(p, inputs, right, values):
    return product(inputs[0], e4m3(p.w.attn_kv_a_mqa.decode()))


@plant("q_nope_absorbed in fp8", "46", "q_nope_absorbed", 0, "precision of the weights")
def _(p, inputs, right, values):
    q = inputs[0].reshape(len(right), p.c.n_heads, -1)[..., : p.c.nope]
    return np.einsum("thn,hrn->thr", q.astype(np.float64), e4m3(p.w.attn_k_b.decode()))


@plant("kqv_out in fp8", "46", "kqv_out", 1, "precision of the weights")
def _(p, inputs, right, values):
    return np.einsum("thr,hvr->thv", inputs[0].astype(np.float64), e4m3(p.w.attn_v_b.decode())).reshape(right.shape)


def e4m3(w):
    """Through a table of all fp8 e4m3 numbers, one scale for the tensor."""
    codes = np.arange(127)
    table = np.where(codes < 8, codes * 2.0**-9, (1 + (codes & 7) / 8) * 2.0 ** ((codes >> 3) - 7.0))
    scale = np.abs(w).max() / 448
    x = np.abs(w / scale).astype(np.float64)
    i = np.clip(np.searchsorted(table, x), 1, len(table) - 1)
    low, high = table[i - 1], table[i]
    even_low = (i - 1) % 2 == 0
    nearer = np.where(np.abs(x - low) == np.abs(high - x), even_low, x - low < high - x)
    return (np.sign(w) * np.where(nearer, low, high) * scale).astype(F)


@plant("attn_k_b transposed", "48", "q_nope_absorbed", 1, "transposed or permuted weights")
def _(p, inputs, right, values):
    q = inputs[0].reshape(len(right), p.c.n_heads, -1)[..., : p.c.nope].astype(np.float64)
    w = p.w.attn_k_b.decode()
    return np.stack([q[:, h] @ w[h].reshape(p.c.nope, p.c.kv_rank) for h in range(p.c.n_heads)], 1)


@plant("attn_k_b overflows f16", "51", "q_nope_absorbed", 1, "")
def _(p, inputs, right, values):
    return (right * 1e6).astype(np.float16)


@plant("ffn_out overflows f16", "71", "ffn_out", 0, "")
def _(p, inputs, right, values):
    wrong = right.copy()
    wrong[:, 3:9] = np.inf
    return wrong


@plant("attn_out in bf16", "72", "attn_out", 1, "precision of the output, precision of the inputs, precision of the weights")
def _(p, inputs, right, values):
    return cut_bf16(product(cut_bf16(inputs[0]), cut_bf16(p.w.attn_output.decode())))


def cut_bf16(x):
    """To the nearest bf16 through f64 arithmetic."""
    x = np.asarray(x, np.float64)
    e = np.floor(np.log2(np.maximum(np.abs(x), 1e-38)))
    return np.rint(x / 2.0 ** (e - 7)) * 2.0 ** (e - 7)


@plant("last partial tile is zero", "53", "ffn_up", 1, "moved or missing rows", tokens=9)
def _(p, inputs, right, values):
    wrong = right.copy()
    wrong[len(right) // 8 * 8 :] = 0
    return wrong if len(right) % 8 else zero_last(wrong)


def zero_last(x):
    x[-1] = 0
    return x


@plant("rows of an earlier batch", "45,55", "kv_cmpr_pe", 1, "moved or missing rows", tokens=9)
def _(p, inputs, right, values):
    wrong = right.copy()
    wrong[8:] = right[: len(right) - 8] if len(right) <= 16 else right[np.arange(8, len(right)) % 8]
    return wrong


@plant("columns shifted", "2", "indexer_k", 0, "moved or missing columns")
def _(p, inputs, right, values):
    return np.roll(right, 7, axis=1)


@plant("heads permuted", "48", "kqv_out", 0, "moved or missing columns, transposed or permuted weights")
def _(p, inputs, right, values):
    return np.roll(right.reshape(len(right), p.c.n_heads, -1), 1, 1).reshape(right.shape)


# --- quantised blocks -------------------------------------------------------------------------------------------------------


def edited(weight, edit, first=0, count=None):
    """Decode with the blocks' bytes changed."""
    while hasattr(weight, "tensor"):
        weight = weight.tensor
    data = np.array(weight.data)
    block_bytes = GGML_QUANT_SIZES[weight.type][1]
    blocks = data.reshape(len(data), -1, block_bytes)
    return dequantize(np.ascontiguousarray(edit(blocks)).reshape(data.shape), weight.type).reshape(weight.shape)


def q8_two_scales(blocks):
    for b in range(1, blocks.shape[1], 2):
        blocks[:, b, :2] = blocks[:, b - 1, :2]
    return blocks


def q2_no_minimum(blocks):
    blocks[..., 82:84] = 0
    return blocks


def q2_scale_order(blocks):
    first = blocks[..., :8].copy()
    blocks[..., :8] = blocks[..., 8:16]
    blocks[..., 8:16] = first
    return blocks


@plant("Q8_0 one scale for two blocks", "67", "q_a", 0, "block layout")
def _(p, inputs, right, values):
    return product(inputs[0], edited(p.w.attn_q_a, q8_two_scales))


def experts_with(x, w, chosen):
    w = np.asarray(w, np.float64)
    x = x.astype(np.float64)
    return np.stack([
        np.stack([w[e] @ (x[t] if x.ndim == 2 else x[t, k]) for k, e in enumerate(row)]) for t, row in enumerate(chosen)
    ])  # fmt: skip


@plant("Q2_K minima left out", "65", "ffn_moe_gate", 1, "block layout")
def _(p, inputs, right, values):
    return experts_with(inputs[0], edited(p.w.ffn_gate_exps, q2_no_minimum), inputs[1])


@plant("Q2_K scales in the wrong order", "65", "ffn_moe_down", 2, "block layout")
def _(p, inputs, right, values):
    return experts_with(inputs[0], edited(p.w.ffn_down_exps, q2_scale_order), inputs[1])


@plant("Q2_K halves swapped", "65", "ffn_moe_up", 1, "transposed or permuted weights, block layout")
def _(p, inputs, right, values):
    w = p.w.ffn_up_exps.decode()
    e, g, d = w.shape
    return experts_with(inputs[0], w.reshape(e, g, d // 256, 2, 128)[:, :, :, ::-1].reshape(w.shape), inputs[1])


# --- indexer and top-k --------------------------------------------------------------------------------------------------------


def scores(q, k, w):
    out = np.full((len(q), len(k)), -np.inf)
    for t in range(len(q)):
        for s in range(t + 1):
            out[t, s] = sum(float(w[t, i]) * max(0.0, float(q[t, i].astype(np.float64) @ k[s])) for i in range(q.shape[1]))
    return out


@plant("score without relu", "21", "indexer_score", 1, "indexer score")
def _(p, inputs, right, values):
    q, k, w = inputs
    dots = np.einsum("ti,tij,sj->ts", w.astype(np.float64), q, k)
    return np.where(np.isfinite(right), dots, -np.inf)


@plant("paged keys read wrongly", "21,24", "indexer_score", 0, "indexer score", tokens=9)
def _(p, inputs, right, values):
    q, k, w = inputs
    k = k.copy()
    for s in range(8, len(k)):
        k[s] = k[s % 8]
    return scores(q, k, w)


@plant("score in bf16", "28", "indexer_score", 1, "indexer score precision, precision of the output")
def _(p, inputs, right, values):
    return np.where(np.isfinite(right), cut_bf16(np.where(np.isfinite(right), right, 1)), -np.inf)


@plant("score columns random beyond a page", "21", "indexer_score", 1, "", tokens=64)
def _(p, inputs, right, values):
    wrong = right.copy()
    late = np.isfinite(right) & (np.arange(right.shape[1]) >= 32)
    wrong[late] = np.random.default_rng(5).standard_normal(int(late.sum()))
    return wrong


@plant("NaN in a score row", "25", "indexer_score", 1, "")
def _(p, inputs, right, values):
    wrong = right.copy()
    wrong[3, :3] = np.nan
    return wrong


def best(score, k):
    out = np.full((len(score), min(k, score.shape[1])), -1, np.int32)
    for t, row in enumerate(score):
        order = sorted(range(t + 1), key=lambda s: (-row[s], s))[: out.shape[1]]
        out[t, : len(order)] = sorted(order)
    return out


@plant("top-k of the scores' negatives", "25", "top_k", 0, "top-k", tokens=64)
def _(p, inputs, right, values):
    return best(-inputs[0], p.c.indexer_top_k)


@plant("top-k of the layer before", "29,31", "top_k", 1, "top-k", tokens=64)
def _(p, inputs, right, values):
    return values["top_k-0"]


@plant("shared layer runs its own indexer", "29", "top_k", 2, "top-k", tokens=64)
def _(p, inputs, right, values):
    tensors = values["__tensors"]
    w = {
        k: tensors[f"blk.2.indexer.{k}"].decode().astype(np.float64)
        for k in ("attn_q_b.weight", "attn_k.weight", "proj.weight")
    }
    h, q_a = values["attn_norm-2"].astype(np.float64), values["q_a_norm-2"].astype(np.float64)
    x = h @ w["attn_k.weight"].T
    x = x - x.mean(-1, keepdims=True)
    k = x / np.sqrt((x**2).mean(-1, keepdims=True) + p.c.indexer_eps) * tensors["blk.2.indexer.k_norm.weight"].decode()
    k = turned_first(p, k + tensors["blk.2.indexer.k_norm.bias"].decode())
    q = turned_first(p, (q_a @ w["attn_q_b.weight"].T).reshape(len(h), p.c.indexer_heads, -1))
    return best(
        np.where(
            np.tri(len(h)) > 0,
            np.einsum("ti,tis->ts", h @ w["proj.weight"].T, np.maximum(np.einsum("tij,sj->tis", q, k), 0)),
            -np.inf,
        ),
        p.c.indexer_top_k,
    )


@plant("the most recent tokens instead of top-k", "26", "top_k", 1, "top-k", tokens=64)
def _(p, inputs, right, values):
    k = right.shape[1]
    return np.array([[s if s >= 0 else -1 for s in range(t - k + 1, t + 1)] for t in range(len(right))])


# --- attention ----------------------------------------------------------------------------------------------------------------


def attend(p, inputs, scale=1.0, pick=None):
    absorbed, q_pe, latent, k_pe, top = (a.astype(np.float64) if a.dtype.kind == "f" else a for a in inputs)
    out = np.zeros_like(absorbed)
    for t in range(len(absorbed)):
        rows = [s for s in top[t] if 0 <= s <= t]
        rows = pick(t, rows) if pick else rows
        for h in range(absorbed.shape[1]):
            score = (
                np.array([absorbed[t, h] @ latent[s] + q_pe[t, h] @ k_pe[s] for s in rows])
                * scale
                * (p.c.nope + p.c.rope) ** -0.5
            )
            weight = np.exp(score - score.max())
            out[t, h] = weight / weight.sum() @ latent[rows]
    return out


@plant("mscale squared of YaRN 40", "16", "kqv", 1, "attention scale")
def _(p, inputs, right, values):
    return attend(p, inputs, scale=(0.1 * np.log(40) + 1) ** 2)


@plant("attention scale x 1.13", "16", "kqv", 0, "attention scale")
def _(p, inputs, right, values):
    return attend(p, inputs, scale=1.13)


@plant("attention scale of nope dims only", "16", "kqv", 2, "attention scale")
def _(p, inputs, right, values):
    return attend(p, inputs, scale=(p.c.nope + p.c.rope) ** 0.5 * p.c.nope**-0.5)


@plant("dense attention", "10", "kqv", 1, "attended tokens", tokens=64)
def _(p, inputs, right, values):
    return attend(p, inputs, pick=lambda t, rows: list(range(t + 1)))


@plant("-1 read as the last token", "26", "kqv", 1, "attended tokens")
def _(p, inputs, right, values):
    top, n = inputs[4], len(right)
    return attend(p, inputs, pick=lambda t, rows: rows + [n - 1] * int((top[t] < 0).sum()))


@plant("context shards merged without weights", "5", "kqv", 1, "attention operands", tokens=9)
def _(p, inputs, right, values):
    half = -(-len(right) // 2)
    early = attend(p, inputs, pick=lambda t, rows: [s for s in rows if s < half] or rows)
    late = attend(p, inputs, pick=lambda t, rows: [s for s in rows if s >= half] or rows)
    return (early + late) / 2


@plant("cache index wraps at 64", "24", "kqv", 0, "attended tokens", tokens=83)
def _(p, inputs, right, values):
    return attend(p, inputs, pick=lambda t, rows: [s % 64 for s in rows])


@plant("ubatch mask reused", "55", "kqv", 1, "attended tokens", tokens=64)
def _(p, inputs, right, values):
    return attend(p, inputs, pick=lambda t, rows: [s for s in rows if s // 32 == t // 32] or [t])


@plant("the latent's second half is zero", "50", "kqv", 1, "attention operands")
def _(p, inputs, right, values):
    latent = inputs[2].copy()
    latent[:, latent.shape[1] // 2 :] = 0
    return attend(p, [inputs[0], inputs[1], latent, *inputs[3:]])


@plant("keys before rope", "8", "kqv", 2, "attention operands", tokens=9)
def _(p, inputs, right, values):
    return attend(p, [*inputs[:3], values["kv_cmpr_pe-2"][:, p.c.kv_rank :], inputs[4]])


@plant("Q8_0 latents in the cache", "58", "kqv", 1, "cache precision")
def _(p, inputs, right, values):
    blocks = inputs[2].reshape(-1, 32)
    d = np.abs(blocks).max(-1, keepdims=True) / F(127)
    latent = (np.rint(blocks * (1 / d)) * d.astype(np.float16)).reshape(inputs[2].shape)
    return attend(p, [inputs[0], inputs[1], latent, inputs[3], inputs[4]])


# --- router and experts -------------------------------------------------------------------------------------------------------


@plant("router bias in bf16", "36,37", "ffn_moe_probs_biased", 1, "router bias precision")
def _(p, inputs, right, values):
    return inputs[0] + cut_bf16(p.w.exp_probs_b.decode())


@plant("softmax router", "39", "ffn_moe_probs", 1, "router")
def _(p, inputs, right, values):
    e = np.exp(inputs[0].astype(np.float64))
    return e / e.sum(-1, keepdims=True)


@plant("router bias left out", "36", "ffn_moe_probs_biased", 2, "router")
def _(p, inputs, right, values):
    return inputs[0]


@plant("experts chosen without the bias", "39", "ffn_moe_topk", 1, "expert choice")
def _(p, inputs, right, values):
    return np.argsort(-values["ffn_moe_probs-1"], -1, kind="stable")[:, : right.shape[1]]


@plant("experts limited to half of 4 groups", "39", "ffn_moe_topk", 1, "expert choice", tokens=9)
def _(p, inputs, right, values):
    out = []
    for row in inputs[0]:
        groups = row.reshape(4, -1)
        keep = sorted(range(4), key=lambda g: -sum(sorted(groups[g])[-2:]))[:2]
        masked = np.full_like(groups, -np.inf)
        masked[keep] = groups[keep]
        out.append(np.argsort(-masked.ravel(), kind="stable")[: right.shape[1]])
    return np.array(out)


@plant("weights from biased scores", "39", "ffn_moe_weights", 1, "router")
def _(p, inputs, right, values):
    return np.take_along_axis(values["ffn_moe_probs_biased-1"], inputs[1], -1)


@plant("weights not normalised", "39", "ffn_moe_weights_norm", 1, "router")
def _(p, inputs, right, values):
    return inputs[0]


@plant("routed factor dropped", "40", "ffn_moe_weights_scaled", 1, "router, constant factor")
def _(p, inputs, right, values):
    return inputs[0]


@plant("routed factor twice", "41", "ffn_moe_weights_scaled", 2, "router, constant factor")
def _(p, inputs, right, values):
    return right * p.c.expert_scale


@plant("shared expert x 0.4", "42", "ffn_out", 1, "sum of two")
def _(p, inputs, right, values):
    return inputs[0] + 0.4 * inputs[1]


@plant("wrong expert per tile", "44", "ffn_moe_gate", 1, "wrong expert")
def _(p, inputs, right, values):
    chosen = inputs[1].copy()
    chosen[::2] = (chosen[::2] + 1) % p.c.n_experts
    return experts_with(inputs[0], p.w.ffn_gate_exps.decode(), chosen)


@plant("experts from 8 on skipped", "44", "ffn_moe_down", 1, "wrong expert")
def _(p, inputs, right, values):
    return np.where((inputs[1] < 8)[..., None], right, 0)


@plant("id -1 read as expert 0", "63", "ffn_moe_up", 1, "wrong expert")
def _(p, inputs, right, values):
    chosen = inputs[1].copy()
    chosen[:, -1] = 0
    return experts_with(inputs[0], p.w.ffn_up_exps.decode(), chosen)


@plant("NaN in one expert", "56", "ffn_moe_gate", 1, "NaN in an expert")
def _(p, inputs, right, values):
    e = inputs[1][0, 0]
    return np.where((inputs[1] == e)[..., None], np.nan, right)


@plant("expert sum without weights", "40", "ffn_moe_out", 1, "expert weights")
def _(p, inputs, right, values):
    return inputs[0].astype(np.float64).sum(1)


@plant("expert sum with unscaled weights", "40", "ffn_moe_out", 2, "expert weights, wrong input, constant factor")
def _(p, inputs, right, values):
    return np.einsum("tkd,tk->td", inputs[0].astype(np.float64), values["ffn_moe_weights-2"])


@plant("last expert left out of the sum", "45", "ffn_moe_out", 1, "expert weights")
def _(p, inputs, right, values):
    return np.einsum("tkd,tk->td", inputs[0][:, :-1].astype(np.float64), inputs[1][:, :-1])


@plant("swiglu with gate and up swapped", "7", "ffn_swiglu", 0, "activation")
def _(p, inputs, right, values):
    g, u = inputs
    return u / (1 + np.exp(-u)) * g


@plant("gelu instead of silu", "-", "ffn_moe_swiglu", 1, "activation")
def _(p, inputs, right, values):
    g, u = (a.astype(np.float64) for a in inputs)
    return 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) * u


# --- residuals, output, capture -----------------------------------------------------------------------------------------------


@plant("residual twice", "35", "l_out", 0, "sum of two")
def _(p, inputs, right, values):
    return right + inputs[0]


@plant("residual missing", "35", "ffn_inp", 1, "sum of two")
def _(p, inputs, right, values):
    return inputs[1]


@plant("gate from the un-normed input", "35", "ffn_gate", 0, "wrong input")
def _(p, inputs, right, values):
    return product(values["ffn_inp-0"], p.w.ffn_gate.decode())


@plant("logits x 2", "-", "result_output", None, "constant factor")
def _(p, inputs, right, values):
    return right * 2


@plant("embedding mutated after capture", "6,76", "embd", None, "mutated after capture", after=True)
def _(model, values):
    values["embd"] = values["ffn_inp-0"]


@plant("ffn_inp mutated after capture", "76", "ffn_inp", 1, "mutated after capture, sum of two", after=True)
def _(model, values):
    values["ffn_inp-1"] = values["l_out-1"]


@plant("random garbage in some rows", "-", "kqv_out", 1, "", tokens=9)
def _(p, inputs, right, values):
    wrong = right.copy()
    wrong[5:8] += np.random.default_rng(1).standard_normal(wrong[5:8].shape)
    return wrong
