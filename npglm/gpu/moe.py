"""The FFNs: dense (also the shared expert), router, routed experts and their combination. Twins: reference/ops/moe.py.

Each coarse verb has two ways: its small verbs, each probed, and where `ops.fused` allows fewer kernels.
"""

from types import SimpleNamespace

import numpy as np

from npglm.gpu.device import LaunchError
from npglm.gpu.matmul import FEW_TOKENS, UNIT_VALUES, matvec_grid, round_activations
from npglm.trace.probes import NO_PROBE

GATE_ROWS = {"q8_0": 1, "q2_k": 2}  # that a group of matvec_gate_up_swiglu makes
DOWN = {"BLOCK": 256, "GROUP": 32, "ROWS": 4}  # of matvec_down_combine, whose groups share a block's rows
MIN_WEIGHT_SUM = 6.103515625e-5  # reference/ops/moe.py


def select_experts(biased, k: int, *, ops):
    """biased [T,E] -> int32 [T,k]: score descending, then index ascending. NaN comes last."""
    experts = ops.empty((len(biased), k), np.int32)
    shared = _candidate_bytes(biased.shape[1], k, ops)
    ops.launch("select_experts_f32", (len(biased),), 256, biased, experts, biased.shape[1], k, shared=shared)
    return experts


def _candidate_bytes(n: int, k: int, ops) -> int:
    """Shared memory in which k of n are chosen: raw_kernels/moe.hip."""
    lanes = ops.device.lanes
    return 8 * -(-n // lanes) * min(k, lanes)


def route(h, w, config, probe=NO_PROBE, *, ops):
    """h [T,D] -> experts int32 [T,K], weights [T,K]."""
    c = config
    logits = ops.linear(h, w.ffn_gate_inp)  # [T,E]
    probe("ffn_moe_logits", logits)
    n_tokens, n = logits.shape
    experts, scaled = (ops.empty((n_tokens, c.n_chosen), t) for t in (np.int32, np.float32))
    probs = biased = weights = norm = None
    if not ops.fused:
        probs, biased = (ops.empty(logits.shape, np.float32) for _ in range(2))
        weights, norm = (ops.empty(experts.shape, np.float32) for _ in range(2))
    shared = _candidate_bytes(n, c.n_chosen, ops) + 8 * n + 4 * c.n_chosen
    outputs = (probs, biased, experts, weights, norm, scaled)
    limits = (n, c.n_chosen, c.expert_norm, MIN_WEIGHT_SUM, c.expert_scale)
    ops.launch("route_f32", (n_tokens,), 256, logits, w.exp_probs_b, *outputs, *limits, shared=shared)
    if not ops.fused:
        probe("ffn_moe_probs", probs)
        probe("ffn_moe_probs_biased", biased)
        probe("ffn_moe_topk", experts)
        probe("ffn_moe_weights", weights)
        probe("ffn_moe_weights_norm", norm)
        probe("ffn_moe_weights_scaled", scaled)
    return experts, scaled


def expert_tiles(experts, n_experts: int, width: int, *, ops):
    """experts int32 [T,K] -> order [T*K], tile_expert, tile_first [tiles], first [E+1]: see raw_kernels/rows.hip."""
    order, first = ops.remember(("sorted", n_experts), experts, lambda: _sort(experts, n_experts, ops))
    tiles = ops.remember(("tiles", n_experts, width), experts, lambda: _tiles(first, n_experts, width, order.size, ops))
    return order, *tiles, first


def _sort(experts, n_experts: int, ops):
    order, first = ops.empty((experts.size,), np.int32), ops.empty((n_experts + 1,), np.int32)
    ops.launch("moe_sort", (n_experts,), 256, experts, order, first, experts.size, n_experts)
    return order, first


def _tiles(first, n_experts: int, width: int, n_pairs: int, ops):
    n_tiles = n_pairs // width + min(n_experts, n_pairs)  # an upper bound: one partial tile per expert
    expert, start = (ops.empty((n_tiles,), np.int32) for _ in range(2))
    ops.launch("moe_tiles", (1,), 256, first, expert, start, n_experts, n_tiles, width)
    return expert, start


def gate_up_swiglu(h, gate, up, probe=NO_PROBE, *, ops):
    """h [T,D], gate and up [F,D] -> [T,F]."""
    if _fusible(h, gate, up, ops):
        return _fused_gate_up(h, gate, up, None, ops)
    g = ops.linear(h, gate)
    probe("ffn_gate", g)
    u = ops.linear(h, up)
    probe("ffn_up", u)
    y = ops.swiglu(g, u)
    probe("ffn_swiglu", y)
    return y


def moe_gate_up_swiglu(h, gate, up, experts, probe=NO_PROBE, *, ops):
    """h [T,D], gate and up [E,G,D], experts int32 [T,K] -> [T,K,G]."""
    if _fusible(h, gate, up, ops):
        return _fused_gate_up(h, gate, up, experts, ops)
    g = ops.linear_experts(h, gate, experts)
    probe("ffn_moe_gate", g)
    u = ops.linear_experts(h, up, experts)
    probe("ffn_moe_up", u)
    y = ops.swiglu(g, u)
    probe("ffn_moe_swiglu", y)
    return y


def _fusible(h, gate, up, ops) -> bool:
    return ops.fused and gate.fast and gate.type == up.type and len(h) <= FEW_TOKENS


def _fused_gate_up(h, gate, up, experts, ops, settled=False):
    """settled: experts were not written by the last kernel, so that their weights may be fetched before it ends."""
    y = ops.empty(((len(h),) if experts is None else experts.shape) + (gate.n_out,), np.float32)
    n_pairs = y.size // gate.n_out
    a = round_activations(h, gate, ops)
    grid, variant = matvec_grid(gate, ROWS=GATE_ROWS[gate.type])
    args = (*gate.parts, *up.parts, *a, experts, y, gate.n_out, n_pairs // len(h), settled)
    ops.launch(f"matvec_gate_up_swiglu_{gate.type}", (grid, n_pairs), variant["BLOCK"], *args, **variant)
    return y


def combine_experts(y, weights, *, ops):
    """y [T,K,D], weights [T,K] -> [T,D], added up in the order of K."""
    out = ops.empty((y.shape[0], y.shape[2]), np.float32)
    ops.launch("combine_experts_f32", (-(-out.size // 256),), 256, y, weights, out, *y.shape)
    return out


def moe_down_combine(x, down, experts, weights, probe=NO_PROBE, *, ops):
    """x [T,K,G], down [E,D,G], experts int32 [T,K], weights [T,K] -> [T,D]."""
    if ops.fused:
        return _down_and_add(x, down, experts, weights, ops)
    y = ops.linear_experts(x, down, experts)  # [T,K,D]
    probe("ffn_moe_down", y)
    return ops.combine_experts(y, weights)


def _down_and_add(x, down, experts, weights, ops, beside=None, settled=False):
    """moe_down_combine, plus `beside` [T,D] if there is one. settled: see _fused_gate_up."""
    if not down.fast or len(x) > FEW_TOKENS:
        routed = ops.combine_experts(ops.linear_experts(x, down, experts), weights)
        return routed if beside is None else ops.add(routed, beside)
    out = ops.empty((len(x), down.n_out), np.float32)
    a = round_activations(x, down, ops)
    units = down.n_in // UNIT_VALUES[down.type]
    group = min(DOWN["GROUP"], max(4, 1 << units.bit_length() - 1))  # no more threads than there are units in a row
    _, variant = matvec_grid(down, **DOWN | {"GROUP": group}, CHOSEN=experts.shape[1])
    args = (*down.parts, *a, experts, weights, beside, out, down.n_out, settled)
    ops.launch(f"matvec_down_combine_{down.type}", (-(-down.n_out // DOWN["ROWS"]), len(x)), variant["BLOCK"], *args, **variant)
    return out


def dense_ffn(h, w, probe=NO_PROBE, *, ops):
    """h [T,D] -> [T,D]."""
    return ops.linear(ops.gate_up_swiglu(h, w.ffn_gate, w.ffn_up, probe=probe), w.ffn_down)


def moe_ffn(h, w, config, probe=NO_PROBE, *, ops):
    """h [T,D] -> [T,D]: routed experts + shared expert."""
    experts, weights = ops.route(h, w, config, probe=probe)
    return ops.moe_experts(h, w, experts, weights, probe=probe)


def local_experts(experts, first: int, count: int, *, ops):
    """experts int32 [T,K] -> int32 [T,K]: their places among the `count` experts that a rank holds from `first` on; -1: not here."""
    local = ops.empty(experts.shape, np.int32)
    ops.launch("local_experts", (-(-local.size // 256),), 256, experts, local, local.size, first, count)
    return local


def moe_experts(h, w, experts, weights, probe=NO_PROBE, *, ops):
    """h [T,D], experts int32 [T,K], weights [T,K] -> [T,D]: the part of moe_ffn after the router. An expert of -1 adds 0."""
    if ops.fused:
        before = ops.device.launches
        shared = ops.dense_ffn(h, shared_expert(w))  # [T,D]: first, as it need not wait for the router
        # What makes `settled` true below: a kernel of the shared expert stands between the one that writes experts and the routed
        # gate and up. It waits until experts are complete, and no kernel after it starts before.
        if ops.device.launches == before:
            raise LaunchError("moe_experts: the shared expert launches no kernel, so that experts may not be read early")
        gate, up = w.ffn_gate_exps, w.ffn_up_exps
        if _fusible(h, gate, up, ops):
            x = _fused_gate_up(h, gate, up, experts, ops, settled=True)  # [T,K,G]
        else:
            x = ops.moe_gate_up_swiglu(h, gate, up, experts)
        return _down_and_add(x, w.ffn_down_exps, experts, weights, ops, shared, settled=True)
    x = ops.moe_gate_up_swiglu(h, w.ffn_gate_exps, w.ffn_up_exps, experts, probe=probe)  # [T,K,G]
    routed = ops.moe_down_combine(x, w.ffn_down_exps, experts, weights, probe=probe)  # [T,D]
    probe("ffn_moe_out", routed)
    shared = ops.dense_ffn(h, shared_expert(w), probe=probe)
    probe("ffn_shexp", shared)
    return ops.add(routed, shared)


def shared_expert(w) -> SimpleNamespace:
    return SimpleNamespace(ffn_gate=w.ffn_gate_shexp, ffn_up=w.ffn_up_shexp, ffn_down=w.ffn_down_shexp)
