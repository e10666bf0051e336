"""The graph of ops: which probes each probe is made of, and how the reference makes it from them, one op at a time.

`steps(config, layer)` is reference/forward.py cut at its probes: the same small verbs, each from named inputs, so that an op can be
recomputed from numbers that another engine recorded. `Lane` keeps one version of every probe that is still needed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np

from npglm.config import GlmConfig
from npglm.trace.probes import PROBES
from reference.numerics import Numerics
from reference.ops import ReferenceOps
from reference.weights import WeightCache

MATMUL, NORM, ROPE, ATTENTION, SCORE, ELEMENTWISE, CHOICE, GATHER = (
    "matmul", "norm", "rope", "attention", "score", "elementwise", "choice", "gather",
)  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One op. inputs: trace names. compute(place, *inputs) -> the probe's array. length: terms of its longest sum.

    weights: attributes of the layer's (or the model's) weights that it reads. rowwise: a token's output needs that token's inputs only.
    """

    probe: str
    layer: int | None
    kind: str
    inputs: tuple[str, ...]
    compute: Callable
    length: int = 1
    weights: tuple[str, ...] = ()
    rowwise: bool = True

    @property
    def name(self) -> str:
        return self.probe if self.layer is None else f"{self.probe}-{self.layer}"


@dataclass(frozen=True)
class Place:
    """What a step may look at: c config, o the verbs of one Numerics, w its weights, pos and table of the rows that it is given."""

    c: GlmConfig
    o: ReferenceOps
    w: SimpleNamespace
    tokens: np.ndarray
    pos: np.ndarray
    table: tuple[np.ndarray, np.ndarray]
    rotation: np.ndarray | None = None  # [J,J] that the indexer's queries and keys go through before the cache

    def times(self, n: int) -> "Place":
        """The same for n copies of the rows, one below the other."""
        table = tuple(np.tile(t, (n, 1)) for t in self.table)
        return replace(self, tokens=np.tile(self.tokens, n), pos=np.tile(self.pos, n), table=table)


class Model:
    """A checkpoint and the token ids of one prefill. Weights are decoded once for all numerics, up to `weight_cache` bytes."""

    def __init__(self, checkpoint, tokens, weight_cache: int = 1 << 30):
        self.checkpoint, self.config = checkpoint, checkpoint.config
        self.tokens = np.asarray(tokens, np.int32)
        self.pos = np.arange(len(self.tokens), dtype=np.int32)
        self.weights = WeightCache(weight_cache).wrap(checkpoint.weights)
        self.ops: dict[Numerics, ReferenceOps] = {}

    def place(self, layer: int | None, numerics: Numerics, **changes) -> Place:
        """changes: fields of GlmConfig that this computation sees otherwise."""
        ops = self.ops.setdefault(numerics, ReferenceOps(numerics, 0))
        config = replace(self.config, **changes)
        table = ops.rope_table(self.pos, config.rope, config.rope_theta)
        weights = self.weights if layer is None else self.weights.layers[layer]
        return Place(config, ops, weights, self.tokens, self.pos, table)

    def steps(self):
        """Every step, in graph order."""
        yield model_steps(self.config)["embd"]
        for layer in range(self.config.n_layers):
            yield from layer_steps(self.config, layer).values()
        yield from list(model_steps(self.config).values())[1:]


# --- the steps --------------------------------------------------------------------------------------------------------------


def heads(p: Place, q: np.ndarray) -> np.ndarray:
    return q.reshape(len(q), p.c.n_heads, p.c.nope + p.c.rope)  # [T,H,N+P]


def rope_first(p: Place, x: np.ndarray) -> np.ndarray:
    """Turn the first P dims of the indexer's queries or keys."""
    n = p.c.rope
    return np.concatenate([p.o.rope(x[..., :n], p.table), x[..., n:]], axis=-1)


def indexer_k(p: Place, h):
    return rope_first(
        p, p.o.layer_norm(p.o.linear(h, p.w.indexer_attn_k), p.w.indexer_k_norm, p.w.indexer_k_norm_bias, p.c.indexer_eps)
    )


def indexer_q(p: Place, q_a):
    q = p.o.linear(q_a, p.w.indexer_attn_q_b)
    return rope_first(p, q.reshape(len(q), p.c.indexer_heads, p.c.indexer_dim))


def indexer_weights(p: Place, h):
    num = p.o.numerics
    return num.result(p.o.linear(h, p.w.indexer_proj) * num.acc(p.c.indexer_scale))


def indexer_score(p: Place, q, k, weights):
    if p.rotation is not None:
        q, k = q @ p.rotation, k @ p.rotation
    return p.o.indexer_score(q, k.astype(p.o.cache_dtype), weights, p.pos)


def kqv(p: Place, absorbed, q_pe, latent, k_pe, top_k):
    cache = np.concatenate([latent, k_pe], axis=-1).astype(p.o.cache_dtype)  # [S,R+P]
    empty = ~((top_k >= 0) & (top_k <= p.pos[:, None])).any(-1)  # where all scores were NaN
    if empty.any():
        top_k = np.where(empty[:, None], 0, top_k)
    out = p.o.attention(np.concatenate([absorbed, q_pe], axis=-1), cache, top_k, p.pos, p.c.kv_rank, p.c.attn_scale)
    out[empty] = np.nan
    return out


def biased(p: Place, probs):
    num, bias = p.o.numerics, p.w.exp_probs_b
    return probs if bias is None else num.result(probs + num.weights(bias.decode()))


def normalised(p: Place, weights):
    num = p.o.numerics
    if not p.c.expert_norm:
        return weights
    total = weights.sum(-1, keepdims=True, dtype=num.acc)
    return num.result(weights / np.maximum(total, num.acc(MIN_WEIGHT_SUM)))


MIN_WEIGHT_SUM = 6.103515625e-5  # as reference/ops/moe.py


def layer_steps(c: GlmConfig, layer: int) -> dict[str, Step]:
    """Probe name -> Step, in graph order, of one layer."""
    x = "embd" if layer == 0 else f"l_out-{layer - 1}"
    steps: dict[str, Step] = {}

    def step(probe, kind, inputs, compute, length=1, weights="", rowwise=True):
        names = tuple(f"{n}-{layer}" if n in PROBES else n for n in inputs.split())
        steps[probe] = Step(probe, layer, kind, names, compute, length, tuple(weights.split()), rowwise)

    def linear(probe, source, weight, length):
        step(probe, MATMUL, source, lambda p, x: p.o.linear(x, getattr(p.w, weight)), length, weight)

    def norm(probe, source, weight, length):
        step(probe, NORM, source, lambda p, x: p.o.rms_norm(x, getattr(p.w, weight), p.c.rms_eps), length, weight)

    def experts(probe, source, weight, length):
        step(
            probe,
            MATMUL,
            f"{source} ffn_moe_topk",
            lambda p, x, e: p.o.linear_experts(x, getattr(p.w, weight), e),
            length,
            weight,
        )

    norm("attn_norm", x, "attn_norm", c.hidden)
    steps["attn_norm"] = replace(steps["attn_norm"], inputs=(x,))
    linear("q_a", "attn_norm", "attn_q_a", c.hidden)
    norm("q_a_norm", "q_a", "attn_q_a_norm", c.q_rank)
    linear("q", "q_a_norm", "attn_q_b", c.q_rank)
    step("q_pe", ROPE, "q", lambda p, q: p.o.rope(heads(p, q)[..., p.c.nope :], p.table))
    step(
        "q_nope_absorbed", MATMUL, "q",
        lambda p, q: p.o.linear_heads(heads(p, q)[..., : p.c.nope], p.w.attn_k_b), c.nope, "attn_k_b",
    )  # fmt: skip
    linear("kv_cmpr_pe", "attn_norm", "attn_kv_a_mqa", c.hidden)
    step(
        "kv_cmpr", NORM, "kv_cmpr_pe",
        lambda p, kv: p.o.rms_norm(kv[:, : p.c.kv_rank], p.w.attn_kv_a_norm, p.c.rms_eps), c.kv_rank, "attn_kv_a_norm",
    )  # fmt: skip
    step("k_pe", ROPE, "kv_cmpr_pe", lambda p, kv: p.o.rope(kv[:, p.c.kv_rank :], p.table))
    if c.full[layer]:
        step("indexer_k", MATMUL, "attn_norm", indexer_k, c.hidden, "indexer_attn_k indexer_k_norm indexer_k_norm_bias")
        step("indexer_q", MATMUL, "q_a_norm", indexer_q, c.q_rank, "indexer_attn_q_b")
        step("indexer_weights", MATMUL, "attn_norm", indexer_weights, c.hidden, "indexer_proj")
        step(
            "indexer_score", SCORE, "indexer_q indexer_k indexer_weights", indexer_score,
            c.indexer_dim * c.indexer_heads, rowwise=False,
        )  # fmt: skip
        step(
            "top_k", CHOICE, "indexer_score",
            lambda p, score: p.o.select_top_k(score, p.pos, p.c.indexer_top_k), rowwise=False,
        )  # fmt: skip
    else:
        step("top_k", CHOICE, f"top_k-{layer - 1}", lambda p, top_k: top_k, rowwise=False)
        steps["top_k"] = replace(steps["top_k"], inputs=(f"top_k-{layer - 1}",))
    step(
        "kqv", ATTENTION, "q_nope_absorbed q_pe kv_cmpr k_pe top_k", kqv,
        c.kv_rank + c.rope + c.indexer_top_k, rowwise=False,
    )  # fmt: skip
    step(
        "kqv_out", MATMUL, "kqv",
        lambda p, y: p.o.linear_heads(y, p.w.attn_v_b).reshape(len(y), -1), c.kv_rank, "attn_v_b",
    )  # fmt: skip
    linear("attn_out", "kqv_out", "attn_output", c.n_heads * c.v_dim)
    step("ffn_inp", ELEMENTWISE, "attn_out", lambda p, x, y: p.o.add(x, y))
    steps["ffn_inp"] = replace(steps["ffn_inp"], inputs=(x, f"attn_out-{layer}"))
    norm("ffn_norm", "ffn_inp", "ffn_norm", c.hidden)
    if c.is_moe(layer):
        linear("ffn_moe_logits", "ffn_norm", "ffn_gate_inp", c.hidden)
        step("ffn_moe_probs", ELEMENTWISE, "ffn_moe_logits", lambda p, x: p.o.sigmoid(x))
        step("ffn_moe_probs_biased", ELEMENTWISE, "ffn_moe_probs", biased, 1, "exp_probs_b")
        step("ffn_moe_topk", CHOICE, "ffn_moe_probs_biased", lambda p, x: p.o.select_experts(x, p.c.n_chosen))
        step("ffn_moe_weights", GATHER, "ffn_moe_probs ffn_moe_topk", lambda p, x, e: np.take_along_axis(x, e, axis=-1))
        step("ffn_moe_weights_norm", ELEMENTWISE, "ffn_moe_weights", normalised, c.n_chosen)
        step(
            "ffn_moe_weights_scaled", ELEMENTWISE, "ffn_moe_weights_norm",
            lambda p, x: p.o.numerics.result(x * p.o.numerics.acc(p.c.expert_scale)),
        )  # fmt: skip
        experts("ffn_moe_gate", "ffn_norm", "ffn_gate_exps", c.hidden)
        experts("ffn_moe_up", "ffn_norm", "ffn_up_exps", c.hidden)
        step("ffn_moe_swiglu", ELEMENTWISE, "ffn_moe_gate ffn_moe_up", lambda p, g, u: p.o.swiglu(g, u))
        experts("ffn_moe_down", "ffn_moe_swiglu", "ffn_down_exps", c.expert_ffn)
        step(
            "ffn_moe_out", ELEMENTWISE, "ffn_moe_down ffn_moe_weights_scaled",
            lambda p, y, weights: p.o.combine_experts(y, weights), c.n_chosen,
        )  # fmt: skip
    shared = "_shexp" if c.is_moe(layer) else ""
    width = c.shared_ffn if shared else c.ffn
    linear("ffn_gate", "ffn_norm", "ffn_gate" + shared, c.hidden)
    linear("ffn_up", "ffn_norm", "ffn_up" + shared, c.hidden)
    step("ffn_swiglu", ELEMENTWISE, "ffn_gate ffn_up", lambda p, g, u: p.o.swiglu(g, u))
    if shared:
        linear("ffn_shexp", "ffn_swiglu", "ffn_down_shexp", width)
        step("ffn_out", ELEMENTWISE, "ffn_moe_out ffn_shexp", lambda p, x, y: p.o.add(x, y))
    else:
        linear("ffn_out", "ffn_swiglu", "ffn_down", width)
    step("l_out", ELEMENTWISE, "ffn_inp ffn_out", lambda p, x, y: p.o.add(x, y))
    return steps


def model_steps(c: GlmConfig) -> dict[str, Step]:
    last = f"l_out-{c.n_layers - 1}"
    return {
        "embd": Step("embd", None, GATHER, (), lambda p: p.o.embed(p.tokens, p.w.token_embd), 1, ("token_embd",)),
        "result_norm": Step(
            "result_norm", None, NORM, (last,), lambda p, x: p.o.rms_norm(x, p.w.output_norm, p.c.rms_eps), c.hidden, ("output_norm",)
        ),
        "result_output": Step(
            "result_output", None, MATMUL, ("result_norm",), lambda p, x: p.o.linear(x, p.w.output), c.hidden, ("output",)
        ),
    }  # fmt: skip


# --- running them -----------------------------------------------------------------------------------------------------------


def run(step: Step, place: Place, *versions: list) -> list[np.ndarray]:
    """The step on several versions of its inputs. Versions that are the same arrays are computed once, rowwise steps in one pass."""
    distinct: list[list] = []
    which = []
    for inputs in versions:
        same = (i for i, d in enumerate(distinct) if all(a is b for a, b in zip(d, inputs, strict=True)))
        which.append(next(same, len(distinct)))
        if which[-1] == len(distinct):
            distinct.append(inputs)
    if step.rowwise and len(distinct) > 1:
        n_rows = len(place.pos)
        stacked = [np.concatenate(arrays) for arrays in zip(*distinct, strict=True)]
        whole = step.compute(place.times(len(distinct)), *stacked)
        made = [whole[i * n_rows : (i + 1) * n_rows] for i in range(len(distinct))]
    else:
        made = [step.compute(place, *inputs) for inputs in distinct]
    return [made[i] for i in which]
