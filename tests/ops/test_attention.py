"""Latent attention: dense and gathered, split and not, rows that must not be read."""

import numpy as np
import pytest
from check import Op, both_numerics, every_place, tensor
from gguf import GGMLQuantizationType as T
from test_matmul import x_of


def case(n_tokens, heads, rank, rope, capacity, n, dtype, seed=1):
    """Positions at the end of `capacity - 3` rows; rows after the last position, and rows that nobody chose, hold NaN."""
    rng = np.random.default_rng(seed)
    used = capacity - 3
    pos = np.arange(used - n_tokens, used, dtype=np.int32)
    cache = np.full((capacity, rank + rope), np.nan, dtype)
    top_k = np.full((n_tokens, n), -1, np.int32)
    for t, last in enumerate(pos):
        count = min(n - t % 3, last + 1)  # padding of different lengths
        top_k[t, :count] = np.sort(rng.choice(last + 1, count, replace=False))
    chosen = np.unique(top_k[top_k >= 0])
    cache[chosen] = rng.normal(size=(len(chosen), rank + rope))
    return x_of(seed, n_tokens, heads, rank + rope), cache, top_k, pos, rank, 0.3 / (rank + rope) ** 0.5


@every_place
@both_numerics
@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize("shape", [(1, 5, 128, 16, 90, 70), (3, 17, 64, 24, 20, 9), (2, 6, 40, 12, 150, 130)])
def test_attention(place, numerics, splits, shape):
    op = Op(place, numerics)
    op.check("attention", *case(*shape, op.ops.cache_dtype), splits=splits)


@every_place
def test_many_tokens(place):
    """As many as make one block take more heads."""
    op = Op(place)
    op.check("attention", *case(135, 18, 32, 16, 150, 40, np.float16))


@every_place
def test_padding_after_the_position(place):
    """Entries past the row's position are padding, like those below 0."""
    q, cache, top_k, pos, *rest = case(2, 5, 32, 16, 40, 20, np.float16)
    top_k[0, -3:], top_k[1, 5] = [38, 39, 37], -1
    Op(place).check("attention", q, cache, top_k, pos, *rest)


@every_place
@both_numerics
@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_shows(place, numerics, splits, bad):
    """A query, NaN in a row (its latent or its rope part), a token without any row; and the blocks made of them."""
    op = Op(place, numerics)
    q, cache, top_k, pos, *rest = case(4, 5, 64, 16, 150, 130, op.ops.cache_dtype)
    cache[np.isnan(cache)] = 0  # the rows that nobody chose
    q[0, 2, 70] = bad
    cache[top_k[1, 7], 3], cache[top_k[2, 100], 70] = np.nan, np.nan
    top_k[3] = -1
    with np.errstate(invalid="ignore"):
        op.check("attention", q, cache, top_k, pos, *rest, splits=splits)
    v = tensor(np.random.default_rng(2), T.Q8_0, 5, 33, 64)
    there = op.ops.attention(*map(op.there, (q, cache, top_k, pos)), *rest, splits=splits)
    y = op.ops.numpy(op.ops.linear_heads(there, op.there(v)))
    assert (np.isnan(y).all(-1) == np.isnan(op.ops.numpy(there)).any(-1)).all()


@every_place
def test_one_huge_score(place):
    q, cache, top_k, pos, *rest = case(1, 5, 64, 16, 90, 70, np.float16)
    q[0, 2] *= 300
    Op(place).check("attention", q, cache, top_k, pos, *rest)
