"""Every op of a recorded llama.cpp graph, recomputed by the reference from that op's own inputs.

`Recorded` holds a graph's nodes and its probes; `CHECKS` says, for each probe, what it should be and how far off it may be;
`judge(recorded, ops)` runs them all and returns a Result for each probe, so that a caller can print what it asserts.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from npglm.trace.formats.llamacpp import Node, map_graph, split_graphs
from npglm.trace.inject import Flip, flips
from npglm.trace.metrics import errors
from reference.numerics import GGML
from reference.ops import ReferenceOps

EXACT, FLOAT, MATMUL, SCORE, ATTENTION, ROPE, CHOICE = "exact", "float", "matmul", "score", "attention", "rope", "choice"
# Relative L2 of the worst row (a token). FLOAT: norms, activations, sums of a few terms, all in f32. ATTENTION: over all rows, against the
# same sums with ggml's roundings to f16 (attention_as_llamacpp); one of them may fall to the other side now and then.
# ROPE: llama.cpp multiplies its angles up in f32, so that they are an ulp or two off and the error grows with the position.
BAR = {EXACT: 0.0, FLOAT: 1e-6, MATMUL: 2e-6, SCORE: 2e-6, ATTENTION: 1e-4, ROPE: 2e-6}


class Recorded:
    """One graph over all tokens from position 0. arrays: trace name -> array; nodes: layer -> its nodes, in order."""

    def __init__(self, checkpoint, tokens, nodes: list[Node]):
        self.checkpoint, self.tokens = checkpoint, np.asarray(tokens, np.int32)
        graphs = split_graphs(nodes)
        assert len(graphs) == 1, [len(g) for g in graphs]
        self.mapped = map_graph(graphs[0])
        self.arrays = {}
        for m in self.mapped:
            assert m.rows is None, f"{m.name} has rows {m.rows} only"
            self.arrays[m.name] = m.take(m.node.value)[0]
        self.nodes: dict[int | None, list[Node]] = {}
        layer = None
        for node in graphs[0]:
            if node.label.startswith("attn_norm-") and node.op == "MUL":
                layer = 0 if layer is None else layer + 1
            self.nodes.setdefault(layer, []).append(node)

    @property
    def flash(self) -> bool:
        return any(node.op == "FLASH_ATTN_EXT" for node in self.nodes[0])


class Layer:
    """A layer's recorded probes as attributes, and what the reference needs to recompute one: o ops, w weights, c config."""

    def __init__(self, recorded: Recorded, index: int | None, ops: ReferenceOps, weights):
        self.r, self.i, self.o, self.c = recorded, index, ops, recorded.checkpoint.config
        self.w = weights if index is None else weights.layers[index]
        self.tokens = recorded.tokens
        self.pos = np.arange(len(self.tokens), dtype=np.int32)
        self.table = ops.rope_table(self.pos, self.c.rope, self.c.rope_theta)

    def __getattr__(self, probe: str) -> np.ndarray:
        name = probe if self.i is None else f"{probe}-{self.i}"
        if name not in self.r.arrays:
            raise AttributeError(name)
        return self.r.arrays[name]

    def has(self, probe: str) -> bool:
        return f"{probe}-{self.i}" in self.r.arrays

    @property
    def x(self) -> np.ndarray:
        """The residual stream that comes in."""
        return self.r.arrays[f"l_out-{self.i - 1}" if self.i else "embd"]

    @property
    def last(self) -> np.ndarray:
        return self.r.arrays[f"l_out-{self.c.n_layers - 1}"]

    def raw(self, op: str, base: str, nth: int = -1) -> np.ndarray:
        """[T, n] of a node that is no probe, heads side by side; nth of that op and label in the layer."""
        hits = [n for n in self.r.nodes[self.i] if n.op == op and n.base == base]
        return hits[nth].value.reshape(len(self.tokens), -1)

    # parts of the split queries and of the indexer
    @property
    def q_heads(self) -> np.ndarray:
        return self.q.reshape(len(self.tokens), self.c.n_heads, -1)  # [T,H,N+P]

    def turned(self, x: np.ndarray) -> np.ndarray:
        """Rope over the first P dims."""
        n = self.c.rope
        return np.concatenate([self.o.rope(x[..., :n], self.table), x[..., n:]], axis=-1)

    @cached_property
    def raw_k(self) -> np.ndarray:
        return self.raw("MUL_MAT", "indexer_k", 0)  # [T,J]

    @cached_property
    def normed_k(self) -> np.ndarray:
        return self.raw("ADD", "indexer_k")  # [T,J]

    @cached_property
    def raw_q(self) -> np.ndarray:
        return self.raw("MUL_MAT", "indexer_q", 0).reshape(len(self.tokens), self.c.indexer_heads, -1)  # [T,I,J]

    @cached_property
    def hadamard_k(self) -> np.ndarray:
        return self.raw("MUL_MAT", "indexer_k", 1)  # [T,J]

    @cached_property
    def hadamard_q(self) -> np.ndarray:
        return self.raw("MUL_MAT", "indexer_q", 1).reshape(self.raw_q.shape)  # [T,I,J]

    @property
    def cached(self) -> np.ndarray:
        """What attention reads: f16 [T,R+P]"""
        return np.concatenate([self.kv_cmpr, self.k_pe], axis=-1).astype(np.float16)

    @property
    def final_weights(self) -> np.ndarray:
        """[T,K]; llama.cpp has no SCALE node where the scale is 1."""
        return self.ffn_moe_weights_scaled if self.has("ffn_moe_weights_scaled") else self.normed_weights

    @property
    def normed_weights(self) -> np.ndarray:
        """[T,K]; it has no DIV node where the weights are not to be normalised."""
        return self.ffn_moe_weights_norm if self.has("ffn_moe_weights_norm") else self.ffn_moe_weights

    @property
    def q_cur(self) -> np.ndarray:
        """[T,H,R+P]"""
        return np.concatenate([self.q_nope_absorbed, self.q_pe], axis=-1)

    def k_norm(self, eps: float) -> np.ndarray:
        return self.o.layer_norm(self.raw_k, self.w.indexer_k_norm, self.w.indexer_k_norm_bias, eps)

    def linear(self, source: str, weight: str) -> np.ndarray:
        return self.o.linear(getattr(self, source), getattr(self.w, weight))

    def experts(self, source: str, weight: str) -> np.ndarray:
        return self.o.linear_experts(getattr(self, source), getattr(self.w, weight), self.ffn_moe_topk)

    @property
    def shexp(self) -> str:
        return "_shexp" if self.c.is_moe(self.i) else ""


def hadamard(n: int) -> np.ndarray:
    """Sylvester's matrix over sqrt(n), f64 [n,n]"""
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h / np.sqrt(n)


def normalised(layer: Layer) -> np.ndarray:
    w = layer.ffn_moe_weights
    return w / np.maximum(w.sum(-1, keepdims=True), np.float32(6.103515625e-5))


def exact_attention(layer: Layer) -> np.ndarray:
    """In f64 over the f16 cache."""
    o, c = ReferenceOps(GGML.truth(), 0), layer.c
    return o.attention(layer.q_cur, layer.cached, layer.top_k, layer.pos, c.kv_rank, c.attn_scale)


TILE = 64  # tokens from which on ggml's CPU flash attention works in tiles, in f32


FP16_STEP = 128  # values that ggml's AVX512-FP16 loop takes at a time; what is left goes the way of other machines


def attention_as_llamacpp(layer: Layer, native: bool = False) -> np.ndarray:
    """Attention over the f16 cache with ggml's own roundings.

    Flash attention from 64 tokens on: none. Below: queries, and the running sum of values, in f16; native: as a machine with AVX512-FP16
    adds it up, whose weights are f16 too. Without flash attention: queries and probabilities in f16, since they meet an f16 matrix.
    """
    if layer.r.flash and len(layer.tokens) >= TILE:
        return exact_attention(layer)
    c, (f16, f32) = layer.c, (np.float16, np.float32)
    out = np.empty(layer.kqv.shape, f32)
    for t, chosen in enumerate(layer.top_k):
        rows = layer.cached[chosen[(chosen >= 0) & (chosen <= t)]].astype(f32)  # [n,R+P]
        score = layer.q_cur[t].astype(f16).astype(f32) @ rows.T * f32(c.attn_scale)  # [H,n]
        values = rows[:, : c.kv_rank]
        if not layer.r.flash:
            p = np.exp(score - score.max(-1, keepdims=True))
            out[t] = (p / p.sum(-1, keepdims=True)).astype(f16).astype(f32) @ values
            continue
        largest, weights = np.full(c.n_heads, -np.inf, f32), np.zeros(c.n_heads, f32)
        total = np.zeros((c.n_heads, c.kv_rank), f16)
        n_native = c.kv_rank // FP16_STEP * FP16_STEP if native else 0
        for s, value in zip(score.T, values, strict=True):
            above = np.maximum(largest, s)
            shrink, weight = np.exp(largest - above), np.exp(s - above)  # one of the two is 1
            factors = np.broadcast_to([shrink[:, None], weight[:, None]], (2, *total.shape)).astype(np.float64)  # [2,H,R]
            factors[..., :n_native] = factors[..., :n_native].astype(f16)
            total = (total * factors[0]).astype(f16)
            total = (total + value * factors[1]).astype(f16)
            largest, weights = above, weights * shrink + weight
        out[t] = total.astype(f32) / weights[:, None]
    return out


# probe -> (kind, what it should be). A name with a point is a node on the way to that probe.
CHECKS = {
    "embd": (EXACT, lambda L: L.o.embed(L.tokens, L.w.token_embd)),
    "attn_norm": (FLOAT, lambda L: L.o.rms_norm(L.x, L.w.attn_norm, L.c.rms_eps)),
    "q_a": (MATMUL, lambda L: L.linear("attn_norm", "attn_q_a")),
    "q_a_norm": (FLOAT, lambda L: L.o.rms_norm(L.q_a, L.w.attn_q_a_norm, L.c.rms_eps)),
    "q": (MATMUL, lambda L: L.linear("q_a_norm", "attn_q_b")),
    "q_pe": (ROPE, lambda L: L.o.rope(L.q_heads[..., L.c.nope :], L.table)),
    "q_nope_absorbed": (MATMUL, lambda L: L.o.linear_heads(L.q_heads[..., : L.c.nope], L.w.attn_k_b)),
    "kv_cmpr_pe": (MATMUL, lambda L: L.linear("attn_norm", "attn_kv_a_mqa")),
    "kv_cmpr": (FLOAT, lambda L: L.o.rms_norm(L.kv_cmpr_pe[:, : L.c.kv_rank], L.w.attn_kv_a_norm, L.c.rms_eps)),
    "k_pe": (ROPE, lambda L: L.o.rope(L.kv_cmpr_pe[:, L.c.kv_rank :], L.table)),
    "indexer_k.raw_k": (MATMUL, lambda L: L.linear("attn_norm", "indexer_attn_k")),
    "indexer_k.normed_k": (FLOAT, lambda L: L.k_norm(0.0)),
    "indexer_k": (ROPE, lambda L: L.turned(L.normed_k)),
    "indexer_q.raw_q": (MATMUL, lambda L: L.linear("q_a_norm", "indexer_attn_q_b").reshape(L.raw_q.shape)),
    "indexer_q": (ROPE, lambda L: L.turned(L.raw_q)),
    "indexer_score.hadamard_k": (FLOAT, lambda L: L.indexer_k @ hadamard(L.c.indexer_dim)),
    "indexer_score.hadamard_q": (FLOAT, lambda L: L.indexer_q @ hadamard(L.c.indexer_dim)),
    "indexer_weights": (MATMUL, lambda L: L.linear("attn_norm", "indexer_proj") * np.float32(L.c.indexer_scale)),
    "indexer_score": (
        SCORE,
        lambda L: L.o.indexer_score(L.hadamard_q, L.hadamard_k.astype(np.float16), L.indexer_weights, L.pos),
    ),
    "top_k": (CHOICE, None),
    "kqv": (ATTENTION, attention_as_llamacpp),
    "kqv_out": (MATMUL, lambda L: L.o.linear_heads(L.kqv, L.w.attn_v_b).reshape(len(L.tokens), -1)),
    "attn_out": (MATMUL, lambda L: L.linear("kqv_out", "attn_output")),
    "ffn_inp": (EXACT, lambda L: L.o.add(L.x, L.attn_out)),
    "ffn_norm": (FLOAT, lambda L: L.o.rms_norm(L.ffn_inp, L.w.ffn_norm, L.c.rms_eps)),
    "ffn_moe_logits": (MATMUL, lambda L: L.linear("ffn_norm", "ffn_gate_inp")),
    "ffn_moe_probs": (FLOAT, lambda L: L.o.sigmoid(L.ffn_moe_logits)),
    "ffn_moe_probs_biased": (EXACT, lambda L: L.ffn_moe_probs + L.w.exp_probs_b.decode()),
    "ffn_moe_topk": (CHOICE, None),
    "ffn_moe_weights": (EXACT, lambda L: np.take_along_axis(L.ffn_moe_probs, L.ffn_moe_topk, axis=-1)),
    "ffn_moe_weights_norm": (FLOAT, normalised),
    "ffn_moe_weights_scaled": (EXACT, lambda L: L.normed_weights * np.float32(L.c.expert_scale)),
    "ffn_moe_gate": (MATMUL, lambda L: L.experts("ffn_norm", "ffn_gate_exps")),
    "ffn_moe_up": (MATMUL, lambda L: L.experts("ffn_norm", "ffn_up_exps")),
    "ffn_moe_swiglu": (FLOAT, lambda L: L.o.swiglu(L.ffn_moe_gate, L.ffn_moe_up)),
    "ffn_moe_down": (MATMUL, lambda L: L.experts("ffn_moe_swiglu", "ffn_down_exps")),
    "ffn_moe_out": (FLOAT, lambda L: L.o.combine_experts(L.ffn_moe_down, L.final_weights)),
    "ffn_gate": (MATMUL, lambda L: L.linear("ffn_norm", "ffn_gate" + L.shexp)),
    "ffn_up": (MATMUL, lambda L: L.linear("ffn_norm", "ffn_up" + L.shexp)),
    "ffn_swiglu": (FLOAT, lambda L: L.o.swiglu(L.ffn_gate, L.ffn_up)),
    "ffn_shexp": (MATMUL, lambda L: L.linear("ffn_swiglu", "ffn_down_shexp")),
    "ffn_out": (MATMUL, lambda L: L.linear("ffn_swiglu", "ffn_down")),  # on MoE layers MOE_FFN_OUT
    "l_out": (EXACT, lambda L: L.o.add(L.ffn_inp, L.ffn_out)),
    "result_norm": (FLOAT, lambda L: L.o.rms_norm(L.last, L.w.output_norm, L.c.rms_eps)),
    "result_output": (MATMUL, lambda L: L.linear("result_norm", "output")),
}
MOE_FFN_OUT = (EXACT, lambda L: L.o.add(L.ffn_moe_out, L.ffn_shexp))
# the weights of each MATMUL check that may be quantised
MATMUL_WEIGHT = {
    "q_a": "attn_q_a", "q": "attn_q_b", "q_nope_absorbed": "attn_k_b", "kv_cmpr_pe": "attn_kv_a_mqa", "indexer_k.raw_k": "indexer_attn_k",
    "indexer_q.raw_q": "indexer_attn_q_b", "indexer_weights": "indexer_proj", "kqv_out": "attn_v_b", "attn_out": "attn_output",
    "ffn_moe_logits": "ffn_gate_inp", "ffn_moe_gate": "ffn_gate_exps", "ffn_moe_up": "ffn_up_exps", "ffn_moe_down": "ffn_down_exps",
    "ffn_shexp": "ffn_down_shexp", "ffn_out": "ffn_down", "result_output": "output",
}  # fmt: skip


@dataclass(frozen=True)
class Result:
    """error and bar as BAR says. flips: of a choice, the rows that differ where the scores do not tie. ties: those where they do."""

    probe: str
    layer: int | None
    kind: str
    error: float = 0.0
    bar: float = 0.0
    flips: tuple[Flip, ...] = ()
    ties: tuple[Flip, ...] = ()
    weight_type: str = ""

    @property
    def ok(self) -> bool:
        return self.error <= self.bar and not self.flips  # NaN fails


def row_errors(x: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """L2 of each row's difference, relative to the row or, if that is larger, to rows on average: few outputs may cancel to nothing."""
    x, truth = (a.reshape(len(a), -1).astype(np.float64) for a in (x, truth))
    finite = np.isfinite(truth)
    if not np.array_equal(np.where(finite, 0, x), np.where(finite, 0, truth)):
        return np.full(len(x), np.nan)
    norm = np.linalg.norm(np.where(finite, truth, 0), axis=1)
    difference = np.linalg.norm(np.where(finite, x, 0) - np.where(finite, truth, 0), axis=1)
    return np.divide(difference, np.maximum(norm, np.sqrt(np.mean(norm**2))), out=np.zeros(len(x)), where=difference > 0)


def checks_of(probe: str, layer: int | None, config) -> list[tuple[str, str, object]]:
    """(name, kind, function) of a probe and of the nodes on the way to it."""
    found = [(name, *check) for name, check in CHECKS.items() if name.split(".")[0] == probe]
    if probe == "ffn_out" and config.is_moe(layer):
        found = [(probe, *MOE_FFN_OUT)]
    assert found, f"nothing checks {probe}"
    return found


def judge(recorded: Recorded, ops: ReferenceOps, only=None, weights=None) -> list[Result]:
    """The checks of every probe that was mapped, in graph order; `only`: of these kinds. weights: what some op set's load() gave."""
    weights = weights or ops.load(recorded.checkpoint)
    layers = {}
    results = []
    for m in recorded.mapped:
        layer = layers.setdefault(m.layer, Layer(recorded, m.layer, ops, weights))
        for name, kind, expected in checks_of(m.probe.name, m.layer, recorded.checkpoint.config):
            if only is None or kind in only:
                results.append(_choice(layer, name) if kind == CHOICE else _value(layer, name, kind, expected))
    return results


def _value(layer: Layer, name: str, kind: str, expected) -> Result:
    recorded, truth = getattr(layer, name.split(".")[-1]), expected(layer)
    if kind == ATTENTION:
        error = min(errors(recorded, t).rms for t in (truth, attention_as_llamacpp(layer, native=True)))
    else:
        error = float(row_errors(recorded, truth).max())
    weight = getattr(layer.w, MATMUL_WEIGHT[name], None) if kind == MATMUL and name in MATMUL_WEIGHT else None
    if name in ("ffn_gate", "ffn_up"):
        weight = getattr(layer.w, name + layer.shexp)
    return Result(name, layer.i, kind, error, BAR[kind], weight_type=weight.type.name if weight else "")


def _choice(layer: Layer, name: str) -> Result:
    """The choice, from llama.cpp's own scores: only exact ties may go either way. Shared layers: the same as above."""
    if name == "top_k" and not layer.c.full[layer.i]:
        same = np.array_equal(layer.top_k, layer.r.arrays[f"top_k-{layer.i - 1}"])
        return Result(name, layer.i, CHOICE, 0.0 if same else np.inf)
    if name == "top_k":
        scores, theirs, pos = layer.indexer_score, layer.top_k, layer.pos
        ours = layer.o.select_top_k(scores, pos, layer.c.indexer_top_k)
    else:
        scores = layer.ffn_moe_probs_biased if layer.has("ffn_moe_probs_biased") else layer.ffn_moe_probs
        theirs, pos = layer.ffn_moe_topk, None
        ours = layer.o.select_experts(scores, layer.c.n_chosen)
    found = flips(scores, ours, theirs, pos)
    tied = tuple(f for f in found if f.gap == 0)
    return Result(name, layer.i, CHOICE, flips=tuple(f for f in found if f.gap != 0), ties=tied)  # NaN is a flip


def table(results: list[Result]) -> str:
    """The worst of each probe, one line each."""
    lines = []
    for name in dict.fromkeys(r.probe for r in results):
        mine = [r for r in results if r.probe == name]
        worst = max(mine, key=lambda r: np.inf if np.isnan(r.error) else r.error)
        types = " ".join(sorted({r.weight_type for r in mine} - {""}))
        ties = sum(len(r.ties) for r in mine)
        types += f" {ties} ties" * (ties > 0)
        lines.append(f"{name:26} {worst.error:8.1e} of {worst.bar:.1e}  {len(mine)} x  {types}")
    return "\n".join(lines)
