"""Router, sorting by expert, FFNs; fused verbs against composed ones."""

from threading import Timer
from types import SimpleNamespace

import numpy as np
import pytest
from check import Op, both_numerics, every_place, tensor
from gguf import GGMLQuantizationType as T
from test_matmul import experts_of, x_of

from npglm.gpu import matmul
from npglm.trace.probes import NO_PROBE
from raw_kernels import KERNELS

CONFIG = SimpleNamespace(n_chosen=3, expert_norm=True, expert_scale=2.5)


def ffn_weights(seed=1, d=256, g=512, f=768, experts=11):
    rng = np.random.default_rng(seed)
    return SimpleNamespace(
        ffn_gate_inp=tensor(rng, T.F32, experts, d), exp_probs_b=tensor(rng, T.F32, experts),
        ffn_gate_exps=tensor(rng, T.Q2_K, experts, g, d), ffn_up_exps=tensor(rng, T.Q2_K, experts, g, d),
        ffn_down_exps=tensor(rng, T.Q2_K, experts, d, g), ffn_gate_shexp=tensor(rng, T.Q8_0, g, d),
        ffn_up_shexp=tensor(rng, T.Q8_0, g, d), ffn_down_shexp=tensor(rng, T.Q8_0, d, g), ffn_gate=tensor(rng, T.Q8_0, f, d),
        ffn_up=tensor(rng, T.Q8_0, f, d), ffn_down=tensor(rng, T.Q8_0, d, f),
    )  # fmt: skip


@every_place
@pytest.mark.parametrize("n_experts", [5, 64, 257])
def test_select_experts(place, n_experts):
    score = x_of(1, 7, n_experts)
    score[0, 2] = score[0, 4] = score[0].max() + 1  # ties go to the lower index
    score[1] = 0.0
    score[1, 1] = -0.0
    score[2, 0] = np.nan
    op = Op(place)
    for k in (1, 3, n_experts if n_experts == 5 else 8):
        op.check("select_experts", score, k)


@every_place
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_route(place, traced, bias):
    w = ffn_weights()
    if not bias:
        w.exp_probs_b = None
    op = Op(place, traced=traced)
    for n_tokens in (1, 9, 17):  # 17: each kernel by itself
        for held in (None, (0, 5), (5, 6), (10, 1)):
            op.check("route", x_of(2, n_tokens, 256), w, CONFIG, NO_PROBE, held)


@every_place
@pytest.mark.parametrize(("n_tokens", "n_experts", "n_chosen", "width"), [(1, 5, 3, 64), (43, 300, 3, 32), (200, 7, 2, 64)])
def test_expert_tiles(place, n_tokens, n_experts, n_chosen, width):
    """Every pair in exactly one tile, of its own expert, for any tile width over one layout."""
    op = Op(place)
    experts = experts_of(n_tokens, n_experts, n_chosen)
    order, tile_expert, tile_first, first = op.run("expert_tiles", experts, n_experts, width)
    flat = experts.reshape(-1)
    assert (order == np.argsort(flat, kind="stable")).all()
    assert (first == np.concatenate([[0], np.cumsum(np.bincount(flat, minlength=n_experts))])).all()
    seen = []
    for e, start in zip(tile_expert, tile_first, strict=True):
        if e >= 0:
            run = order[start : min(start + width, first[e + 1])]
            assert len(run)
            assert (flat[run] == e).all()
            seen.extend(run)
    assert sorted(seen) == list(range(flat.size))


@every_place
def test_combine(place):
    Op(place).check("combine_experts", x_of(3, 5, 3, 257), np.abs(x_of(4, 5, 3)))


@every_place
@both_numerics
@pytest.mark.parametrize("n_tokens", [1, 3, 9])
def test_ffn(place, numerics, n_tokens):
    """Composed: each small verb on its own inputs is judged elsewhere; here the product before it feeds the rounding after it, so
    the factor is wider: one value may land on the other side of a rounding step."""
    op, w, h = Op(place, numerics, traced=True), ffn_weights(), x_of(5, n_tokens, 256)
    op.check("gate_up_swiglu", h, w.ffn_gate, w.ffn_up)
    op.check("moe_gate_up_swiglu", h, w.ffn_gate_exps, w.ffn_up_exps, experts_of(n_tokens, 11, 3))
    if numerics == "f32":
        op.check("dense_ffn", h, w)
        op.check("moe_ffn", h, w, CONFIG)


@every_place
@pytest.mark.parametrize(("n_tokens", "d"), [(1, 256), (5, 256), (2, 512)])
def test_fused_equals_composed(place, n_tokens, d):
    fused, composed = Op(place), Op(place, traced=True)
    w, h, experts = ffn_weights(d=d), x_of(6, n_tokens, d), experts_of(n_tokens, 11, 3)
    for op in (fused, composed):
        op.check("gate_up_swiglu", h, w.ffn_gate, w.ffn_up)
        op.check("moe_gate_up_swiglu", h, w.ffn_gate_exps, w.ffn_up_exps, experts)
        op.check("moe_down_combine", x_of(7, n_tokens, 3, 512), w.ffn_down_exps, experts, np.abs(x_of(8, n_tokens, 3)))


def some_away(experts):
    """The same with about a third of the experts on other ranks, all of the last token's among them."""
    away = experts.copy()
    away[np.random.default_rng(10).random(away.shape) < 0.3] = -1
    away[-1] = -1
    return away


@every_place
@pytest.mark.parametrize("d", [256, 512])
def test_blocks_that_come_with_others(place, d):
    """What a norm, and the shared expert's last product, round beside their own: rows of two and of three Q8_K blocks."""
    op = Op(place)
    w, x, norm = ffn_weights(d=d, g=768), x_of(5, 1, d), tensor(np.random.default_rng(1), T.F32, d)
    h = op.ops.rms_norm(op.there(x), op.there(norm), 1e-5)
    q, k = op.there(x_of(6, 1, 768)), op.there(x_of(7, 1, 3, 768))
    matmul.linear_beside(q, op.there(w.ffn_down_shexp), k, op.there(w.ffn_down_exps), op.ops)
    for made in (h, k):
        blocks, again = op.ops.recall(("q8_k",), made), matmul._q8_k(made, op.ops)
        for a, b in zip(blocks, again, strict=True):
            assert op.ops.numpy(a).tobytes() == op.ops.numpy(b).tobytes()


@every_place
@pytest.mark.parametrize(("n_tokens", "n_chosen"), [(1, 1), (1, 8), (9, 3), (129, 2)])
def test_local_experts(place, n_tokens, n_chosen):
    op, experts = Op(place), experts_of(n_tokens, 11, n_chosen)
    for first, count in ((0, 5), (5, 6), (10, 1)):
        op.check("local_experts", experts, first, count)


@every_place
@both_numerics
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("n_tokens", [1, 3, 9, 65])
def test_experts_that_are_not_here(place, numerics, traced, n_tokens):
    """Expert -1 adds exactly 0, whether all are away or some."""
    op, w, h = Op(place, numerics, traced=traced), ffn_weights(), x_of(5, n_tokens, 256)
    for experts in (some_away(experts_of(n_tokens, 11, 3)), experts_of(n_tokens, 11, 3)):
        weights = np.abs(x_of(8, n_tokens, 3))
        x, y = x_of(6, n_tokens, 3, 512), x_of(7, n_tokens, 3, 512)
        op.check("linear_experts", h, w.ffn_gate_exps, experts)
        op.check("linear_experts", x, w.ffn_down_exps, experts)
        op.check("moe_down_combine", y, w.ffn_down_exps, experts, weights)
        if numerics == "f32" or n_tokens == 1:
            op.check("moe_experts", h, w, experts, weights)
        made = op.run("linear_experts", h, w.ffn_gate_exps, experts)
        assert not made[experts < 0].any()


@pytest.mark.parametrize("router", [T.F32, T.Q8_0])
def test_experts_are_read_early_only_where_they_are_settled(router):
    """The routed products fetch weights before the kernel before them ends; where that one makes the choice, an f32 router's product
    has marked the places that it fills."""
    op, launched, marked = Op("emulated-32"), [], []
    ops, launch = op.ops, op.ops.launch

    def noted(name, grid, block, *args, **more):
        given = dict(zip((argument.name for argument in KERNELS[name].arguments), args, strict=True))
        if name.endswith("q2_k") and "settled" in given:
            launched.append((name[:12], given["settled"]))
        launch(name, grid, block, *args, **more)
        if name == "matvec_f32_f32":
            marked.append((given["pending"], ops.numpy(given["pending"]).tolist()))

    ops.launch = noted
    weights = ffn_weights()
    weights.ffn_gate_inp = tensor(np.random.default_rng(2), router, 11, 256)
    w, norm = op.there(weights), op.there(tensor(np.random.default_rng(1), T.F32, 256))
    h, other = (ops.rms_norm(op.there(x_of(seed, 1, 256)), norm, 1e-5) for seed in (5, 6))  # with their 8-bit blocks
    chosen = ops.route(h, w, CONFIG)
    ops.moe_experts(h, w, *chosen)
    ops.moe_experts(other, w, *chosen)  # its shared expert's gate and up come between
    first = router is T.F32
    assert launched == [("matvec_gate_", first), ("matvec_down_", True), ("matvec_gate_", True), ("matvec_down_", True)]
    assert [places for _, places in marked] == ([[[-2] * CONFIG.n_chosen]] if first else [])
    assert all(array is chosen[0] for array, _ in marked)


@pytest.mark.parametrize("lanes", [32, pytest.param(64, marks=pytest.mark.slow)])
def test_experts_that_are_not_there_yet(lanes):
    """A routed product that starts early waits for the choice itself: here it comes from another thread while the kernel runs."""
    op, h = Op(f"emulated-{lanes}"), x_of(5, 1, 256)
    w, chosen = op.there(ffn_weights()), experts_of(1, 11, 3)
    pending, there = op.there(np.full(chosen.shape, -2, np.int32)), op.there(h)
    expected = op.run_on("moe_gate_up_swiglu", there, w.ffn_gate_exps, w.ffn_up_exps, op.there(chosen))
    op.ops.remembered[("pending",)] = [(pending, True)]
    fill = Timer(0.2, pending.__setitem__, (..., chosen))
    fill.start()
    found = op.run_on("moe_gate_up_swiglu", there, w.ffn_gate_exps, w.ffn_up_exps, pending)
    fill.join()
    assert found.tobytes() == expected.tobytes()
