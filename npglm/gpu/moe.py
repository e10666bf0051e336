"""The FFNs: dense (also the shared expert), router, routed experts and their combination. Twins: reference/ops/moe.py.

Each coarse verb has two ways: its small verbs, each probed, and where `ops.fused` allows fewer kernels.
"""

from types import SimpleNamespace

import numpy as np

from npglm.gpu.matmul import FEW_TOKENS, NOWHERE, UNIT_VALUES, is_few_f32, linear_beside, matvec_grid, round_activations
from npglm.trace.probes import NO_PROBE

GATE = {"q8_0": {"BLOCK": 256}, "q2_k": {"ROWS": 2}}  # of matvec_gate_up_swiglu
# Of matvec_down_combine, whose groups share a block's rows.
DOWN = {
    "q8_0": {"BLOCK": 256, "GROUP": 32, "ROWS": 4}, "q2_k": {"BLOCK": 256, "GROUP": 32, "ROWS": 8, "RING": 4, "REFILL": 2},
}  # fmt: skip
MIN_WEIGHT_SUM = 6.103515625e-5  # reference/ops/moe.py
NO_ROUTE = (None,) * 4 + (0,) * 7  # of matvec_gate_up_swiglu: no token is routed meanwhile


def select_experts(biased, k: int, *, ops):
    """biased [T,E] -> int32 [T,k]: score descending, then index ascending. NaN comes last."""
    experts = ops.empty((len(biased), k), np.int32)
    shared = _candidate_bytes(biased.shape[1], k, ops)
    ops.launch("select_experts_f32", (len(biased),), 256, biased, experts, biased.shape[1], k, shared=shared)
    return experts


def _candidate_bytes(n: int, k: int, ops) -> int:
    """Shared memory in which k of n are chosen: raw_kernels/router.hip."""
    lanes = ops.device.lanes
    return 8 * -(-n // lanes) * min(k, lanes)


def route(h, w, config, probe=NO_PROBE, held=None, *, ops):
    """h [T,D] -> experts int32 [T,K], weights [T,K]. held: (first, count) of local_experts(), which is then applied.

    Fused, the shared expert's gate_up_swiglu() comes with it, and is remembered.
    """
    c, n_tokens, n = config, len(h), w.ffn_gate_inp.n_out
    experts, scaled = (ops.empty((n_tokens, c.n_chosen), t) for t in (np.int32, np.float32))
    gate, up = getattr(w, "ffn_gate_shexp", None), getattr(w, "ffn_up_shexp", None)
    fusible = gate and _fusible(h, gate, up, ops)
    pending = experts if fusible and is_few_f32(h, w.ffn_gate_inp) and c.n_chosen <= 256 else None
    logits = ops.linear(h, w.ffn_gate_inp, pending=pending)  # [T,E]
    probe("ffn_moe_logits", logits)
    probs = biased = weights = norm = None
    if not ops.fused:
        probs, biased = (ops.empty(logits.shape, np.float32) for _ in range(2))
        weights, norm = (ops.empty(experts.shape, np.float32) for _ in range(2))
    shared = _candidate_bytes(n, c.n_chosen, ops) + 8 * n + 4 * c.n_chosen
    outputs = (probs, biased, experts, weights, norm, scaled)
    limits = (n, c.n_chosen, c.expert_norm, MIN_WEIGHT_SUM, c.expert_scale)
    limits += held if held and ops.fused else (0, n)
    if fusible:
        x = _fused_gate_up(h, gate, up, None, ops, (logits, w.exp_probs_b, experts, scaled, *limits), shared)
        ops.remembered[("gate_up",)] = [(h, (gate, x))]
        if pending is not None:
            ops.remembered[("pending",)] = [(pending, True)]
        return experts, scaled
    ops.launch("route_f32", (n_tokens,), 256, logits, w.exp_probs_b, *outputs, *limits, shared=shared)
    if not ops.fused:
        probe("ffn_moe_probs", probs)
        probe("ffn_moe_probs_biased", biased)
        probe("ffn_moe_topk", experts)
        probe("ffn_moe_weights", weights)
        probe("ffn_moe_weights_norm", norm)
        probe("ffn_moe_weights_scaled", scaled)
        experts = ops.local_experts(experts, *held) if held else experts
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
        known, x = ops.recall(("gate_up",), h) or (None, None)
        return x if known is gate else _fused_gate_up(h, gate, up, None, ops)
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


def _fused_gate_up(h, gate, up, experts, ops, routing=NO_ROUTE, shared=0):
    """routing: the arguments with which each token is routed meanwhile, shared: the bytes of shared memory that this takes."""
    y = ops.empty(((len(h),) if experts is None else experts.shape) + (gate.n_out,), np.float32)
    n_pairs = y.size // gate.n_out
    a = round_activations(h, gate, ops)
    n_chosen = n_pairs // len(h)
    grid, variant = matvec_grid(gate, **GATE[gate.type])
    # Their weights may be fetched before the last kernel ends.
    settled = experts is not None and bool(ops.recall(("pending",), experts) or ops.device.settled(experts))
    args = (*gate.parts, *up.parts, *a, experts, y, gate.n_out, n_chosen, settled, *routing)
    grid = (grid + (routing is not NO_ROUTE), n_chosen, len(h))
    ops.launch(f"matvec_gate_up_swiglu_{gate.type}", grid, variant["BLOCK"], *args, shared=shared, **variant)
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


def _down_and_add(x, down, experts, weights, ops, beside=None, to=None):
    """moe_down_combine, plus `beside` [T,D] if there is one. to: a npglm.gpu.collective.Outbox."""
    if not down.fast or len(x) > FEW_TOKENS:
        routed = ops.combine_experts(ops.linear_experts(x, down, experts), weights)
        return routed if beside is None else ops.add(routed, beside)
    out = ops.empty((len(x), down.n_out), np.float32)
    a = round_activations(x, down, ops)
    units = down.n_in // UNIT_VALUES[down.type]
    shape, n_chosen = DOWN[down.type], experts.shape[1]
    group = min(shape["GROUP"], max(4, 1 << units.bit_length() - 1))  # no more threads than there are units in a row
    block = min(shape["BLOCK"], -(-n_chosen * group // 64) * 64)  # nor groups than choices
    _, variant = matvec_grid(down, **shape | {"GROUP": group, "BLOCK": block}, CHOSEN=n_chosen)
    settled = ops.device.settled(experts)
    args = (*down.parts, *a, experts, weights, beside, out, down.n_out, settled, *(to.send(out) if to else NOWHERE))
    grid = (-(-down.n_out // variant["ROWS"]), len(x))
    ops.launch(f"matvec_down_combine_{down.type}", grid, variant["BLOCK"], *args, **variant)
    return out


def dense_ffn(h, w, probe=NO_PROBE, *, ops, to=None):
    """h [T,D] -> [T,D]. to: see linear."""
    return ops.linear(ops.gate_up_swiglu(h, w.ffn_gate, w.ffn_up, probe=probe), w.ffn_down, to=to)


def moe_ffn(h, w, config, probe=NO_PROBE, *, ops):
    """h [T,D] -> [T,D]: routed experts + shared expert."""
    experts, weights = ops.route(h, w, config, probe=probe)
    return ops.moe_experts(h, w, experts, weights, probe=probe)


def local_experts(experts, first: int, count: int, *, ops):
    """experts int32 [T,K] -> int32 [T,K]: their places among the `count` experts that a rank holds from `first` on; -1: not here."""
    local = ops.empty(experts.shape, np.int32)
    ops.launch("local_experts", (-(-local.size // 256),), 256, experts, local, local.size, first, count)
    return local


def moe_experts(h, w, experts, weights, probe=NO_PROBE, *, ops, to=None):
    """h [T,D], experts int32 [T,K], weights [T,K] -> [T,D]: the part of moe_ffn after the router. An expert of -1 adds 0. to: see linear."""
    if ops.fused:
        x_shared = ops.gate_up_swiglu(h, w.ffn_gate_shexp, w.ffn_up_shexp)  # [T,F]: of few tokens route() has made it
        x = ops.moe_gate_up_swiglu(h, w.ffn_gate_exps, w.ffn_up_exps, experts)  # [T,K,G]
        shared = linear_beside(x_shared, w.ffn_down_shexp, x, w.ffn_down_exps, ops)  # [T,D]
        return _down_and_add(x, w.ffn_down_exps, experts, weights, ops, shared, to)
    x = ops.moe_gate_up_swiglu(h, w.ffn_gate_exps, w.ffn_up_exps, experts, probe=probe)  # [T,K,G]
    routed = ops.moe_down_combine(x, w.ffn_down_exps, experts, weights, probe=probe)  # [T,D]
    probe("ffn_moe_out", routed)
    shared = ops.dense_ffn(h, shared_expert(w), probe=probe)
    probe("ffn_shexp", shared)
    return ops.add(routed, shared)


def shared_expert(w) -> SimpleNamespace:
    return SimpleNamespace(ffn_gate=w.ffn_gate_shexp, ffn_up=w.ffn_up_shexp, ffn_down=w.ffn_down_shexp)
