"""Indexer scores and the choice of the top-k."""

import numpy as np
import pytest
from check import Op, both_numerics, every_place
from test_matmul import x_of

from npglm.gpu import indexer


@every_place
@both_numerics
@pytest.mark.parametrize("shape", [(1, 3, 64, 1), (2, 5, 32, 127), (3, 4, 64, 130), (9, 2, 128, 257), (4, 18, 32, 64)])
def test_indexer_score(place, numerics, shape):
    n_tokens, heads, dim, used = shape
    op = Op(place, numerics)
    used = max(used, n_tokens)
    keys = np.full((used + 5, dim), np.nan, op.ops.cache_dtype)
    keys[:used] = x_of(1, used, dim)
    pos = np.arange(used - n_tokens, used, dtype=np.int32)
    op.check("indexer_score", x_of(2, n_tokens, heads, dim), keys, x_of(3, n_tokens, heads), pos)


@every_place
@pytest.mark.parametrize("used", [1, 2, 64, 65, 130, 700])
def test_indexer_score_of_one_token(place, used):
    """Whether the keys before its own are read before the kernel waits makes no difference; keys after it are not read."""
    ops = Op(place).ops
    keys = np.full((used + 70, 64), np.nan, np.float16)
    keys[:used] = x_of(1, used, 64)
    q, keys, weights = (ops.array(a, a.dtype) for a in (x_of(2, 1, 5, 64), keys, x_of(3, 1, 5)))
    pos = ops.array([used - 1], np.int32)
    late, early = (ops.numpy(indexer._score(q, keys, weights, pos, used + 70, 1.0, ops, one)) for one in (False, True))
    assert (late == early).all()
    assert np.isfinite(late[0, :used]).all()
    assert np.isneginf(late[0, used:]).all()


@every_place
@pytest.mark.parametrize("used", [1, 7, 1023, 1024, 1025, 2048, 2051, 4097, 8193])
@pytest.mark.parametrize("k", [1, 8, 1024])
def test_select_top_k(place, used, k):
    """Also around 4, 8 and 16 scores for each of 512 threads."""
    n_tokens = min(used, 3)
    pos = np.arange(used - n_tokens, used, dtype=np.int32)
    score = x_of(used, n_tokens, used)
    for t, last in enumerate(pos):
        score[t, last + 1 :] = np.nan  # must not be read
    Op(place).check("select_top_k", score, pos, k)


@every_place
def test_select_top_k_ties(place):
    """Equal scores, both zeros, infinities and NaN; few distinct values, so that every radix pass meets ties."""
    rng = np.random.default_rng(4)
    score = rng.integers(-2, 3, (6, 1500)).astype(np.float32)
    score[1] = 0.5
    score[2, ::2], score[2, 1::2] = 0.0, -0.0
    score[3, 100:900] = np.nan
    score[4, 5], score[4, 6] = np.inf, -np.inf
    score[5] = np.nan
    pos = np.full(6, 1499, np.int32)
    op = Op(place)
    for k in (8, 700, 1499, 1600):
        op.check("select_top_k", score, pos, k)


@every_place
@pytest.mark.parametrize("blocks", ["several", "one"])
def test_select_top_k_of_long_rows(place, blocks, monkeypatch):
    """Several blocks a row, and one, which makes the keys anew each time: ties across borders, NaN, rows that end before a border, at it
    and after it."""
    if blocks == "one":
        monkeypatch.setattr(indexer, "LONG_ROW", 1 << 20)
    rng, width = np.random.default_rng(6), 16384 + 5
    score = rng.integers(-2, 3, (6, width)).astype(np.float32)
    score[1] = rng.normal(size=width)
    score[2] = 0.5
    score[3, 4000:8300] = np.nan
    score[4, 4095], score[4, 4096], score[5, 8192] = np.inf, np.inf, -np.inf
    pos = np.array([width - 1, width - 1, 12287, 12288, 8191, 90], np.int32)
    for t, last in enumerate(pos):
        score[t, last + 1 :] = np.nan  # must not be read
    op = Op(place)
    for k in (1, 700, 5000):
        op.check("select_top_k", score, pos, k)


@pytest.mark.slow
@every_place
def test_select_top_k_of_many(place):
    Op(place).check("select_top_k", x_of(5, 1, 200_000), np.array([199_999], np.int32), 2048)
