"""The sampler: its random numbers against the published algorithm, its filters against their definitions."""

import math

import numpy as np
import pytest

from npglm.errors import NpglmError
from npglm.sampler import Sampler, uniform

INF = float("inf")


# --- random numbers ---------------------------------------------------------------------------------------------------------


def philox_4x64_10(counter: list[int], key: list[int]) -> list[int]:
    """Random123's philox4x64 with ten rounds, written from the paper: what a kernel has to do."""
    mask = 2**64 - 1
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(p1 >> 64) ^ c[1] ^ k[0], p1 & mask, (p0 >> 64) ^ c[3] ^ k[1], p0 & mask]
        k = [(k[0] + 0x9E3779B97F4A7C15) & mask, (k[1] + 0xBB67AE8584CAA73B) & mask]
    return c


def test_philox_known_answers():
    """Random123's kat_vectors, philox4x64 10: zeros, and ones."""
    zeros = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    ones = [0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0]
    assert philox_4x64_10([0] * 4, [0] * 2) == zeros
    assert philox_4x64_10([2**64 - 1] * 4, [2**64 - 1] * 2) == ones


@pytest.mark.parametrize(("seed", "step"), [(0, 0), (0, 1), (1, 0), (7, 12345), (2**64 - 1, 3), (5, 2**64 - 2), (2**63, 2**32)])
def test_uniform_is_the_documented_philox(seed, step):
    x0 = philox_4x64_10([step + 1, 0, 0, 0], [seed, 0])[0]
    u = uniform(seed, step)
    assert u == (x0 >> 40) / 2**24
    assert u == float(np.float32(u))
    assert 0 <= u < 1


def test_uniform_is_uniform():
    draws = np.array([uniform(seed, step) for seed in range(7) for step in range(601)])
    counts = np.histogram(draws, bins=16, range=(0, 1))[0]
    expected = len(draws) / 16
    assert ((counts - expected) ** 2 / expected).sum() < 45  # chi-square, 15 degrees of freedom: p = 8e-5
    assert len(set(draws)) > 0.99 * len(draws)


# --- choices ----------------------------------------------------------------------------------------------------------------


def row(*values) -> np.ndarray:
    return np.array(values, np.float32)


def from_probabilities(*p) -> np.ndarray:
    return np.log(np.array(p)).astype(np.float32)


def support(sampler: Sampler, logits: np.ndarray, steps: int = 400) -> set[int]:
    return {sampler.sample(logits, step) for step in range(steps)}


def test_greedy_takes_the_lowest_of_equal_ids():
    assert Sampler().sample(row(1, 5, 3, 5, 5), 0) == 1
    assert Sampler(top_k=2, top_p=0.1, min_p=0.5, seed=9).sample(row(-1, -INF, 4, 4), 3) == 2
    assert Sampler().sample(row(-INF, -7, -INF), 0) == 1


def test_frequencies_are_the_probabilities():
    p = np.array([0.5, 0.05, 0.3, 0.15])
    sampler, n = Sampler(temperature=1.0, seed=3), 6000
    counts = np.bincount([sampler.sample(from_probabilities(*p), step) for step in range(n)], minlength=4)
    assert np.abs(counts / n - p).max() < 4 * math.sqrt(0.25 / n)


def test_temperature_divides_the_logits():
    p, temperature, n = np.array([0.6, 0.3, 0.1]), 0.5, 6000
    sampler = Sampler(temperature=temperature, seed=4)
    counts = np.bincount([sampler.sample(from_probabilities(*p), step) for step in range(n)], minlength=3)
    expected = p ** (1 / temperature) / (p ** (1 / temperature)).sum()
    assert np.abs(counts / n - expected).max() < 4 * math.sqrt(0.25 / n)
    assert support(Sampler(temperature=1e-30), row(1.0, 1.0001, 0.0)) == {1}


def test_the_choice_is_the_inverse_of_the_cumulative_sum():
    logits = from_probabilities(0.125, 0.5, 0.25, 0.125)  # in order of choice: 1, 2, 0, 3
    sampler = Sampler(temperature=1.0, seed=21)
    for step in range(200):
        u = uniform(21, step)
        assert sampler.sample(logits, step) == (1 if u < 0.5 else 2 if u < 0.75 else 0 if u < 0.875 else 3)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.75}, {1, 3, 0}),  # 0.4 + 0.3 is short of it
        ({"top_p": 0.65}, {1, 3}),
        ({"top_p": 0.3}, {1}),
        ({"top_p": 1e-9}, {1}),
        ({"min_p": 0.45}, {1, 3, 0}),  # 0.2 / 0.4 = 0.5
        ({"min_p": 0.55}, {1, 3}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 3, "top_p": 0.75}, {1, 3}),
    ],
)
def test_filters(settings, kept):
    logits = from_probabilities(0.2, 0.4, 0.06, 0.3, 0.04)
    assert support(Sampler(temperature=1.0, seed=1, **settings), logits) == kept


def test_top_p_looks_at_what_top_k_left_renormalised():
    logits = from_probabilities(0.2, 0.4, 0.06, 0.3, 0.04)  # of the three best: 0.444, 0.333, 0.222
    assert support(Sampler(1.0, top_k=3, top_p=0.72), logits) == {1, 3}
    assert support(Sampler(1.0, top_k=0, top_p=0.72), logits) == {0, 1, 3}


def test_top_p_and_min_p_look_at_the_probabilities_before_temperature():
    logits = from_probabilities(0.2, 0.4, 0.06, 0.3, 0.04)
    assert support(Sampler(100.0, top_p=0.65), logits) == {1, 3}
    assert support(Sampler(100.0, min_p=0.55), logits) == {1, 3}


@pytest.mark.parametrize("settings", [{"top_k": 3}, {"top_p": 0.35}])
def test_ties_at_a_filters_edge_keep_the_lowest_ids(settings):
    assert support(Sampler(1.0, seed=2, **settings), np.zeros(7, np.float32) + 3) == {0, 1, 2}


def test_min_p_keeps_ties():
    assert support(Sampler(1.0, min_p=1.0), row(0, 2, 1, 2)) == {1, 3}


def test_masked_tokens_are_never_chosen():
    logits = row(-INF, 1, -INF, 1.5, -INF)
    for settings in ({}, {"top_k": 4}, {"top_p": 0.999999}, {"min_p": 1e-9}):
        assert support(Sampler(1.0, seed=5, **settings), logits) == {1, 3}


def test_the_choice_depends_on_seed_and_step_only():
    logits = np.random.default_rng(0).normal(size=1021).astype(np.float32)
    sampler = Sampler(1.3, top_k=60, top_p=0.95, seed=8)
    forwards = [sampler.sample(logits, step) for step in range(40)]
    assert forwards == [Sampler(1.3, top_k=60, top_p=0.95, seed=8).sample(logits, step) for step in reversed(range(40))][::-1]
    assert forwards != [Sampler(1.3, top_k=60, top_p=0.95, seed=9).sample(logits, step) for step in range(40)]


def test_a_shift_of_all_logits_changes_nothing():
    logits = np.round(np.random.default_rng(1).normal(size=257) * 8).astype(np.float32) / 8
    for settings in ({}, {"top_k": 9}, {"top_p": 0.7}, {"min_p": 0.1}):
        sampler = Sampler(0.8, seed=6, **settings)
        assert [sampler.sample(logits + 1024, s) for s in range(60)] == [sampler.sample(logits, s) for s in range(60)]


# --- logprob ----------------------------------------------------------------------------------------------------------------


def test_logprob():
    p = (0.5, 0.05, 0.3, 0.15)
    for id, expected in enumerate(p):
        assert abs(Sampler(0.2, top_k=1).logprob(from_probabilities(*p), id) - math.log(expected)) < 1e-6
    assert Sampler().logprob(row(3.0), 0) == 0.0
    assert Sampler().logprob(row(1, -INF), 1) == -INF


def test_logprob_is_stable():
    logits = row(10000, 9999, -10000)
    assert abs(Sampler().logprob(logits, 1) - (-1 - math.log1p(math.exp(-1)))) < 1e-12
    assert Sampler().logprob(logits, 2) == pytest.approx(-20000 - math.log1p(math.exp(-1)), abs=1e-9)


# --- bad input --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logits", [row(1, np.nan, 2), row(1, INF), row(-INF, -INF), row(np.nan)])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logits_that_are_not_finite(logits, temperature):
    with pytest.raises(NpglmError, match=r"^logits are not finite at step 17$"):
        Sampler(temperature).sample(logits, 17)
    with pytest.raises(NpglmError, match=r"^logits are not finite$"):
        Sampler(temperature).logprob(logits, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1, expected a finite number >= 0"),
        ({"temperature": math.nan}, "temperature is nan, expected a finite number >= 0"),
        ({"temperature": INF}, "temperature is inf, expected a finite number >= 0"),
        ({"top_k": -1}, "top_k is -1, expected an integer >= 0"),
        ({"top_k": 1.5}, "top_k is 1.5, expected an integer >= 0"),
        ({"top_p": 0.0}, "top_p is 0.0, expected 0 < top_p <= 1"),
        ({"top_p": 1.01}, "top_p is 1.01, expected 0 < top_p <= 1"),
        ({"top_p": math.nan}, "top_p is nan, expected 0 < top_p <= 1"),
        ({"min_p": -0.2}, "min_p is -0.2, expected 0 <= min_p <= 1"),
        ({"min_p": 1.2}, "min_p is 1.2, expected 0 <= min_p <= 1"),
        ({"seed": -1}, "seed is -1, expected an integer, 0 <= seed < 2^64"),
        ({"seed": 2**64}, f"seed is {2**64}, expected an integer, 0 <= seed < 2^64"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(NpglmError) as error:
        Sampler(**settings)
    assert str(error.value).startswith(message)


def test_arguments_that_make_no_sense():
    for step in (-1, 2**64 - 1, 0.5):
        with pytest.raises(NpglmError, match=f"^step is {step}, expected an integer"):
            Sampler().sample(row(1, 2), step)
    for logits in (np.zeros((2, 3), np.float32), np.zeros(0, np.float32)):
        with pytest.raises(NpglmError, match=r"^logits have shape"):
            Sampler().sample(logits, 0)
    for id in (-1, 3):
        with pytest.raises(NpglmError, match=f"^token id {id} is outside the 3 logits$"):
            Sampler().logprob(row(1, 2, 3), id)


@pytest.mark.parametrize(
    ("options", "filters"),
    [
        ({}, False),
        ({"top_k": 3}, True),
        ({"top_p": 0.9}, True),
        ({"min_p": 0.1}, True),
        ({"top_k": 3, "temperature": 0}, False),
    ],
)
def test_filters_are_what_temperature_alone_does_not_do(options, filters):
    """Where there are none, an op set may sample with temperature alone; greedy ignores them."""
    assert Sampler(**{"temperature": 1.0} | options).filters == filters
