"""Latent attention: dense and gathered, split and not, rows that must not be read."""

from types import SimpleNamespace

import numpy as np
import pytest
from check import Op, both_numerics, every_place, tensor
from gguf import GGMLQuantizationType as T
from test_matmul import x_of

from npglm.gpu.matmul import round_activations


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
@both_numerics
@pytest.mark.parametrize("kind", [T.Q8_0, T.Q2_K])
@pytest.mark.parametrize(("n_tokens", "n"), [(1, 150), (2, 70), (1, 9), (17, 70)])
def test_attend(place, numerics, kind, n_tokens, n):
    """For few tokens one kernel puts the splits together and multiplies, with the bits of two; 9 rows are one split, Q2_K has other
    kernels. The blocks that the next product takes come with it."""
    op = Op(place, numerics)
    q, cache, top_k, pos, rank, scale = case(n_tokens, 5, 256, 16, 160, n, op.ops.cache_dtype)
    w = SimpleNamespace(attn_v_b=tensor(np.random.default_rng(2), kind, 5, 96, rank))
    config = SimpleNamespace(kv_rank=rank, attn_scale=scale)
    if n_tokens < 3:  # of more, some value lands on the other side of a rounding step
        op.check("attend", q, w, cache, top_k, pos, config)
    q, w, cache, top_k, pos = there = [op.there(v) for v in (q, w, cache, top_k, pos)]
    y = op.ops.attend(*there, config)
    expected = op.ops.linear_heads(op.ops.attention(q, cache, top_k, pos, rank, scale), w.attn_v_b)
    assert op.ops.numpy(y).tobytes() == op.ops.numpy(expected).tobytes()
    if place != "cpu" and numerics == "ggml":
        assert op.ops.recall(("q8_0",), y) or kind != T.Q8_0 or n_tokens > 2 or n < 10
        blocks = round_activations(y, SimpleNamespace(fast=True, type="q8_0"), op.ops)[:2]
        for mine, its in zip(blocks, op.ops.quantize_q8_0(y), strict=True):
            assert op.ops.numpy(mine).tobytes() == op.ops.numpy(its).tobytes()
    op.ops.device.verify()


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
