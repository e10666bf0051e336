"""Products: both sides of the switch from matrix-vector to tiles, sizes around every tile."""

import numpy as np
import pytest
from check import Op, both_numerics, every_place, tensor
from gguf import GGMLQuantizationType as T

from raw_kernels import DECODED_TYPES

TOKENS = [1, 2, 7, 8, 9, 33, 63, 64, 65, 127, 129]


def x_of(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@every_place
@pytest.mark.parametrize("kind", [T.Q8_0, T.Q2_K])
@pytest.mark.parametrize("n_tokens", TOKENS)
def test_linear(place, kind, n_tokens):
    n_in, n_out = (768 if kind == T.Q2_K else 544), (65 if n_tokens % 2 else 131)
    w = tensor(np.random.default_rng(n_tokens), kind, n_out, n_in)
    Op(place).check("linear", x_of(n_tokens, n_tokens, n_in), w)


@every_place
@pytest.mark.parametrize(
    "shape",
    [
        (64, 32),
        (1, 288),
        (5, 16384),
        pytest.param((129, 2080), marks=pytest.mark.slow),
        pytest.param((33, 8192), marks=pytest.mark.slow),
    ],
)
def test_linear_q8_0_shapes(place, shape):
    w = tensor(np.random.default_rng(1), T.Q8_0, *shape)
    op = Op(place)
    for n_tokens in (1, 9):
        op.check("linear", x_of(2, n_tokens, shape[1]), w)


@every_place
@both_numerics
@pytest.mark.parametrize("kind", [T.F32, T.F16, T.BF16, T.Q8_0, T.IQ3_S])
def test_linear_decoded(place, numerics, kind):
    if place == "emulated-64" and kind == T.IQ3_S:
        return
    op = Op(place, numerics)
    for n_tokens, n_in, n_out in ((1, 256, 31), (9, 512, 33), (67, 256, 70)):
        w = tensor(np.random.default_rng(3), kind, n_out, n_in)
        op.check("linear", x_of(4, n_tokens, n_in), w)


@pytest.mark.slow
@every_place
@pytest.mark.parametrize("kind", DECODED_TYPES)
def test_linear_every_type(place, kind):
    w = tensor(np.random.default_rng(5), T[kind.upper()], 37, 512)
    Op(place).check("linear", x_of(6, 35, 512), w)
    Op(place).check(
        "linear_experts", x_of(6, 35, 512), tensor(np.random.default_rng(5), T[kind.upper()], 5, 37, 512), experts_of(35, 5, 2)
    )


@every_place
@pytest.mark.parametrize("n_tokens", [1, 5, 9, 70])
def test_linear_heads(place, n_tokens):
    op, n_heads = Op(place), 5
    op.check("linear_heads", x_of(7, n_tokens, n_heads, 192), tensor(np.random.default_rng(7), T.Q8_0, n_heads, 66, 192))
    op.check("linear_heads", x_of(8, n_tokens, n_heads, 64), tensor(np.random.default_rng(8), T.F16, n_heads, 34, 64))


@every_place
def test_blocks_of_many_tokens(place):
    """As many heads as leave a block of 128 tokens for every processor; a long depth and short ones (96: a part has fewer pieces than
    a block of 64 lanes a warp has threads)."""
    op, n_heads = Op(place), 70
    for n_in, n_tokens in ((64, 130), (96, 130), (256, 177)):
        w = tensor(np.random.default_rng(n_in), T.Q8_0, n_heads, 34, n_in)
        op.check("linear_heads", x_of(n_in, n_tokens, n_heads, n_in), w)


def experts_of(n_tokens, n_experts, n_chosen, seed=9):
    """Uneven on purpose: low experts are chosen more often, some never."""
    rng = np.random.default_rng(seed)
    p = 1 / np.arange(1, n_experts + 1) ** 1.5
    return np.stack([rng.choice(n_experts, n_chosen, replace=False, p=p / p.sum()) for _ in range(n_tokens)]).astype(np.int32)


@every_place
@pytest.mark.parametrize("kind", [T.Q2_K, T.Q8_0])
@pytest.mark.parametrize(("n_tokens", "n_experts"), [(1, 12), (9, 5), (65, 7), (130, 300)])
def test_linear_experts(place, kind, n_tokens, n_experts):
    op, n_chosen, rng = Op(place), 3, np.random.default_rng(n_tokens)
    w = tensor(rng, kind, n_experts, 70, 256)
    experts = experts_of(n_tokens, n_experts, n_chosen)
    op.check("linear_experts", x_of(1, n_tokens, 256), w, experts)
    op.check("linear_experts", x_of(2, n_tokens, n_chosen, 256), w, experts)
