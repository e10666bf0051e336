"""Putting another engine's choices into a forward pass."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import npglm
from npglm.cache import Cache
from npglm.trace.inject import EXPERTS, TOP_K, ChoosingOps, Roundings, flips, inject, product_inputs
from npglm.trace.probes import NO_PROBE, Keep, probe_names
from reference.forward import forward
from reference.numerics import F32, GGML
from reference.ops import ReferenceOps
from reference.ops.quant import quantize_q8_0

GOLDEN = Path(__file__).parent / "golden"
TOKENS = np.array([3, 141, 59, 26, 53, 58, 97, 93, 238, 46, 264, 33], np.int32)


@pytest.fixture(scope="module")
def loaded():
    checkpoint, ops = npglm.load(GOLDEN / "small.Q2_K.gguf"), ReferenceOps(F32)
    return checkpoint.config, ops, ops.load(checkpoint)


def run(loaded, choose=None):
    config, ops, weights = loaded
    probe, pos = Keep(), np.arange(len(TOKENS), dtype=np.int32)
    ops = ChoosingOps(ops, weights, choose) if choose else ops
    forward(weights, config, Cache(config, len(TOKENS), ops), TOKENS, pos, ops, probe)
    return probe.seen


def test_our_own_choice_changes_nothing(loaded):
    config = loaded[0]
    asked = []

    def choose(kind, layer, scores, ours):
        asked.append((kind, layer))
        assert scores.shape == (12, 12)  # 12 tokens, 12 experts
        return ours

    plain, through = run(loaded), run(loaded, choose)
    assert list(plain) == list(through) == list(probe_names(config))
    for name, array in plain.items():
        assert np.array_equal(array, through[name]), name
    expected = [(TOP_K, i) for i in range(7) if config.full[i]] + [(EXPERTS, i) for i in range(7) if config.is_moe(i)]
    assert sorted(asked) == sorted(expected)


def test_experts_are_replaced_with_their_weights(loaded):
    """The same experts in another order: all that is in their order turns around, what comes out stays."""
    plain = run(loaded)
    turned = run(loaded, lambda kind, layer, scores, ours: ours[:, ::-1] if (kind, layer) == (EXPERTS, 3) else ours)
    for name in ("topk", "weights", "weights_norm", "weights_scaled", "gate", "up", "swiglu", "down"):
        assert np.allclose(turned[f"ffn_moe_{name}-3"], plain[f"ffn_moe_{name}-3"][:, ::-1], rtol=1e-5, atol=1e-6), name
    assert np.allclose(turned["ffn_moe_out-3"], plain["ffn_moe_out-3"], rtol=1e-5, atol=1e-5)
    assert np.array_equal(turned["ffn_moe_probs_biased-3"], plain["ffn_moe_probs_biased-3"])


def test_another_top_k_reaches_the_layers_that_share_it(loaded):
    first = np.array([[0] + [-1] * 7] * 12, np.int32)  # the first token alone, for everyone

    def choose(kind, layer, scores, ours):
        return first if (kind, layer) == (TOP_K, 2) else ours

    plain, other = run(loaded), run(loaded, choose)
    for layer in (2, 3, 4, 5):
        assert np.array_equal(other[f"top_k-{layer}"], first)
        assert np.allclose(
            other[f"kqv-{layer}"], other[f"kv_cmpr-{layer}"][0], rtol=1e-6
        )  # so its value is what every head takes
    assert np.array_equal(other["indexer_score-2"], plain["indexer_score-2"])
    assert np.array_equal(other["l_out-1"], plain["l_out-1"])
    assert not np.allclose(other["kqv-2"], plain["kqv-2"])


def test_flips_tell_ties_from_faults():
    inf = np.inf
    scores = np.array([[0.5, -inf, -inf, -inf], [0.5, 0.0, -inf, -inf], [0.5, 0.0, 0.0, -inf], [0.9, 0.3, 0.2999, 0.1]])
    pos, ours = np.arange(4), np.array([[0, -1], [0, 1], [0, 1], [0, 1]])
    assert flips(scores, ours, np.array([[3, 0], [1, 0], [1, 0], [1, 0]]), pos) == []  # order and future positions mean nothing
    tie, near = flips(scores, ours, np.array([[0, -1], [0, 1], [0, 2], [2, 0]]), pos)
    assert (tie.row, tie.ours, tie.theirs, tie.gap) == (2, (1,), (2,), 0)
    assert (near.row, near.ours, near.theirs) == (3, (1,), (2,))
    assert near.gap == pytest.approx(1e-4)
    (far,) = flips(scores, ours, np.array([[0, -1], [0, 1], [0, 1], [3, 2]]), pos)
    assert far.gap == pytest.approx(0.9 - 0.1)  # the worst swap
    assert inject(ours, np.array([[0, -1], [0, 1], [0, 2], [2, 3]]), [tie]).tolist() == [[0, -1], [0, 1], [0, 2], [0, 1]]


@pytest.mark.parametrize("row", [[0, 0], [0, 3], [-1, 0], [7, 1]])
def test_an_invalid_choice_is_no_tie(row):
    """One entry twice, of the future, missing, or out of range."""
    (flip,) = flips(np.zeros((3, 4)), np.array([[0, 1]] * 3), np.array([[1, 0], [0, 1], row]), np.array([2, 2, 2]))
    assert flip.row == 2
    assert np.isnan(flip.gap)
    assert not flip.gap <= 1e9


def test_a_step_moves_only_where_the_numbers_are_near():
    x = np.zeros((1, 64), np.float32)
    x[0, [0, 32]], x[0, [1, 33]] = 127, 63.4999
    theirs = x.copy()
    theirs[0, 1], theirs[0, 33] = 63.5001, 64.5
    near = Roundings({"w": theirs}, within=1e-3)
    q, d = near("w", quantize_q8_0, x)
    assert q[0, :, :2].tolist() == [[127, 64], [127, 63]]  # theirs, then ours
    assert d.tolist() == [[1, 1]]
    assert (near.values, near.moved, near.kept) == (64, 1, 1)
    assert near.away == pytest.approx(2e-4 / 127, rel=0.05)
    theirs[0, 1] = np.nan
    with np.errstate(invalid="ignore"):
        assert near("w", quantize_q8_0, x)[0][0, 0, 1] == 63


def test_with_the_same_steps_sums_in_f64_end_where_sums_in_f32_do():
    checkpoint, pos = npglm.load(GOLDEN / "small.Q2_K.gguf"), np.arange(len(TOKENS), dtype=np.int32)

    def logits(numerics, probe=NO_PROBE, choose=None):
        ops = ReferenceOps(numerics)
        weights = ops.load(checkpoint)
        ops = ChoosingOps(ops, weights, choose) if choose else ops
        return forward(weights, checkpoint.config, Cache(checkpoint.config, len(TOKENS), ops), TOKENS, pos, ops, probe)

    def away(x):
        return np.linalg.norm(x - theirs, axis=-1).max() / np.linalg.norm(theirs, axis=-1).min()

    engine = Keep()
    theirs = logits(GGML.truth(), engine)
    inputs = product_inputs(checkpoint.config, checkpoint.weights, engine.seen)
    choose = lambda kind, layer, scores, ours: engine.seen[f"{kind}-{layer}"]
    same = Roundings(inputs, within=2e-3)
    assert away(logits(GGML, choose=choose)) > 1e-3
    assert away(logits(replace(GGML, blocks=same), choose=choose)) <= 1e-5
    assert 0 < same.moved < 1e-2 * same.values
    assert same.kept == 0
    fault = Roundings(inputs | {"blk.3.attn_output.weight": 1.01 * inputs["blk.3.attn_output.weight"]}, within=2e-3)
    logits(replace(GGML, blocks=fault), choose=choose)
    assert fault.kept >= 0.9 * inputs["blk.3.attn_output.weight"].size / 256
