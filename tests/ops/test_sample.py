"""Sampling on the device against npglm/sampler.py."""

import numpy as np
import pytest
from check import Op, every_place

from npglm.sampler import Sampler


@every_place
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
def test_sample(place, temperature):
    op, rng = Op(place), np.random.default_rng(1)
    for n in (1, 1000, 4096, 4097, 9001):  # parts of 4096
        logits = rng.normal(0, 2, n).astype(np.float32)
        logits[:: max(1, n // 7)] = 1.25  # equal logits
        logits[n // 2 + 1 : n // 2 + 4] = -np.inf
        for seed, step in ((0, 0), (7, 3), (2**63, 12345)):
            expected = Sampler(temperature, seed=seed).sample(logits, step)
            mine = op.run("sample", logits, np.array([step], np.int64), temperature=temperature, seed=seed)
            assert mine[0] == expected, (n, seed, step)


@every_place
def test_not_finite(place):
    op = Op(place)
    for n in (70, 5000):
        for bad in (np.nan, np.inf):
            logits = np.zeros(n, np.float32)
            logits[n - 1] = bad
            for temperature in (0.0, 1.0):
                assert op.run("sample", logits, np.array([0], np.int64), temperature=temperature)[0] == -1
        logits = np.full(n, -np.inf, np.float32)
        assert op.run("sample", logits, np.array([0], np.int64))[0] == -1
        logits[n - 1] = -1e30
        assert op.run("sample", logits, np.array([0], np.int64))[0] == n - 1
