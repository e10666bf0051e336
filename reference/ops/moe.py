"""The FFNs: dense (also the shared expert), router, routed experts and their combination."""

import numpy as np

from npglm.trace.probes import NO_PROBE
from reference.numerics import F32, Numerics
from reference.ops.elementwise import add, sigmoid, swiglu
from reference.ops.matmul import linear, linear_experts

MIN_WEIGHT_SUM = (
    6.103515625e-5  # f16's smallest normal number: llama.cpp's build_moe_ffn clamps the sum there; transformers adds 1e-20
)


def select_experts(biased: np.ndarray, k: int, num: Numerics = F32) -> np.ndarray:
    """biased [T,E] -> int32 [T,k]: score descending, then index ascending. NaN comes last."""
    return np.argsort(-biased, axis=-1, kind="stable")[:, :k].astype(np.int32)


def route_weights(probs, experts, config, probe=NO_PROBE, num: Numerics = F32) -> np.ndarray:
    """probs [T,E], experts int32 [T,K] -> [T,K]: the chosen probabilities, renormalised (if the model says so), then scaled."""
    weights = np.take_along_axis(probs, experts, axis=-1)
    probe("ffn_moe_weights", weights)
    if config.expert_norm:
        total = weights.sum(-1, keepdims=True, dtype=num.acc)
        weights = num.result(weights / np.maximum(total, num.acc(MIN_WEIGHT_SUM)))
    probe("ffn_moe_weights_norm", weights)
    weights = num.result(weights * num.acc(config.expert_scale))
    probe("ffn_moe_weights_scaled", weights)
    return weights


def route(h, w, config, probe=NO_PROBE, held=None, num: Numerics = F32) -> tuple[np.ndarray, np.ndarray]:
    """h [T,D] -> experts int32 [T,K], weights [T,K]. The bias serves the choice only; weights are renormalised, then scaled.
    held: (first, count) of local_experts(), which is then applied.

    Sigmoid scores with a selection bias: DeepSeek-V3, arXiv:2412.19437, section 2.1.2.
    """
    c = config
    logits = linear(h, w.ffn_gate_inp, num=num)  # [T,E]
    probe("ffn_moe_logits", logits)
    probs = sigmoid(logits, num=num)
    probe("ffn_moe_probs", probs)
    biased = probs if w.exp_probs_b is None else num.result(probs + num.weights(w.exp_probs_b.decode()))
    probe("ffn_moe_probs_biased", biased)
    experts = select_experts(biased, c.n_chosen, num=num)  # [T,K]
    probe("ffn_moe_topk", experts)
    weights = route_weights(probs, experts, c, probe, num=num)  # [T,K]
    return local_experts(experts, *held) if held else experts, weights


def local_experts(experts: np.ndarray, first: int, count: int, num: Numerics = F32) -> np.ndarray:
    """experts int32 [T,K] -> int32 [T,K]: their places among the `count` experts that a rank holds from `first` on; -1: not here."""
    local = experts - first
    return np.where((local >= 0) & (local < count), local, -1).astype(np.int32)


def gate_up_swiglu(h, gate, up, probe=NO_PROBE, num: Numerics = F32) -> np.ndarray:
    """h [T,D], gate and up [F,D] -> [T,F]."""
    g = linear(h, gate, num=num)
    probe("ffn_gate", g)
    u = linear(h, up, num=num)
    probe("ffn_up", u)
    y = swiglu(g, u, num=num)
    probe("ffn_swiglu", y)
    return y


def moe_gate_up_swiglu(h, gate, up, experts, probe=NO_PROBE, num: Numerics = F32) -> np.ndarray:
    """h [T,D], gate and up [E,G,D], experts int32 [T,K] -> [T,K,G]."""
    g = linear_experts(h, gate, experts, num=num)
    probe("ffn_moe_gate", g)
    u = linear_experts(h, up, experts, num=num)
    probe("ffn_moe_up", u)
    y = swiglu(g, u, num=num)
    probe("ffn_moe_swiglu", y)
    return y


def combine_experts(y: np.ndarray, weights: np.ndarray, num: Numerics = F32) -> np.ndarray:
    """y [T,K,D], weights [T,K] -> [T,D], added up in the order of K."""
    out = np.zeros((y.shape[0], y.shape[2]), num.acc)
    for k in range(y.shape[1]):
        out += y[:, k].astype(num.acc, copy=False) * weights[:, k, None].astype(num.acc, copy=False)
    return num.result(out)


def moe_down_combine(x, down, experts, weights, probe=NO_PROBE, num: Numerics = F32) -> np.ndarray:
    """x [T,K,G], down [E,D,G], experts int32 [T,K], weights [T,K] -> [T,D]."""
    y = linear_experts(x, down, experts, num=num)  # [T,K,D]
    probe("ffn_moe_down", y)
    return combine_experts(y, weights, num=num)


def dense_ffn(h, w, probe=NO_PROBE, num: Numerics = F32) -> np.ndarray:
    """h [T,D] -> [T,D]."""
    return linear(gate_up_swiglu(h, w.ffn_gate, w.ffn_up, probe, num=num), w.ffn_down, num=num)


def moe_ffn(h, w, config, probe=NO_PROBE, num: Numerics = F32) -> np.ndarray:
    """h [T,D] -> [T,D]: routed experts + shared expert."""
    experts, weights = route(h, w, config, probe, num=num)
    return moe_experts(h, w, experts, weights, probe, num=num)


def moe_experts(h, w, experts, weights, probe=NO_PROBE, num: Numerics = F32) -> np.ndarray:
    """h [T,D], experts int32 [T,K], weights [T,K] -> [T,D]: the part of moe_ffn after the router. An expert of -1 adds 0."""
    x = moe_gate_up_swiglu(h, w.ffn_gate_exps, w.ffn_up_exps, experts, probe, num=num)  # [T,K,G]
    routed = moe_down_combine(x, w.ffn_down_exps, experts, weights, probe, num=num)  # [T,D]
    probe("ffn_moe_out", routed)
    x = gate_up_swiglu(h, w.ffn_gate_shexp, w.ffn_up_shexp, probe, num=num)  # [T,G]
    shared = linear(x, w.ffn_down_shexp, num=num)  # [T,D]
    probe("ffn_shexp", shared)
    return add(routed, shared, num=num)
