"""Decoders and activation blocks: bit for bit."""

import numpy as np
import pytest
from check import Op, every_place, tensor
from gguf import GGMLQuantizationType as T

from raw_kernels import DECODED_TYPES

OFTEN = ("q8_0", "q2_k", "iq3_s")  # the others are slow tests: a compiler run each


@every_place
@pytest.mark.parametrize("name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in DECODED_TYPES])
def test_decoders(place, name):
    op, kind = Op(place), T[name.upper()]
    table, tokens = tensor(np.random.default_rng(int(kind)), kind, 11, 512), np.array([10, 0, 3, 3, 7], np.int32)
    y = op.ops.embed(op.there(tokens), op.ops.weight(table, fast=False))
    expected = np.concatenate([table.rows(t, t + 1) for t in tokens])
    assert op.ops.numpy(y).tobytes() == expected.tobytes()
    op.ops.device.verify()


@every_place
@pytest.mark.parametrize("shape", [(1, 32), (3, 96), (2, 5, 192), (7, 2048)])
def test_quantize_q8_0(place, shape):
    x = np.random.default_rng(1).normal(0, 3, shape).astype(np.float32)
    x.reshape(-1)[:32] = 0  # a block of zeros
    Op(place).check("quantize_q8_0", x)


@every_place
@pytest.mark.parametrize("shape", [(1, 256), (3, 768), (2, 5, 512)])
def test_quantize_q8_k(place, shape):
    rng = np.random.default_rng(2)
    x = rng.normal(0, 3, shape).astype(np.float32)
    flat = x.reshape(-1, 256)
    flat[0] = 0
    flat[-1, 17], flat[-1, 200], flat[-1, 201] = -20, 20, -20  # equal magnitudes: the first one's sign counts
    op = Op(place)
    op.check("quantize_q8_k", x)


NOT_FINITE = pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])


@every_place
@NOT_FINITE
@pytest.mark.filterwarnings("ignore:divide by zero")  # as cli.run has it
@pytest.mark.parametrize("verb", ["quantize_q8_0", "quantize_q8_k"])
def test_scales_show_what_is_not_finite(place, bad, verb):
    """8-bit integers cannot hold NaN or inf: the scale of their block is not finite, and no other one."""
    x = np.random.default_rng(4).normal(0, 3, (3, 1024)).astype(np.float32)
    for row, column in ((0, 0), (0, 300), (1, 767), (2, 1023)):
        x[row, column] = bad
    op = Op(place)
    q, d = op.run(verb, x)
    with np.errstate(invalid="ignore"):
        expected_q, expected_d = getattr(op.twin, verb)(x)
    finite = np.isfinite(expected_d)
    assert finite.sum() == finite.size - 4
    assert (np.isfinite(d) == finite).all()
    assert (d[finite] == expected_d[finite]).all()
    assert (q[finite] == expected_q[finite]).all()


@every_place
@NOT_FINITE
@pytest.mark.filterwarnings("ignore:divide by zero")  # as cli.run has it
@pytest.mark.parametrize("kind", [T.Q8_0, T.Q2_K, T.IQ3_S, T.F16])
def test_products_show_what_is_not_finite(place, bad, kind):
    """Few and many tokens, plain and after a norm, which writes the blocks itself where verbs are fused."""
    op, rng = Op(place), np.random.default_rng(5)
    w, gain = tensor(rng, kind, 33, 768), tensor(rng, T.F32, 768)
    for n_tokens in (1, 9):
        x = np.random.default_rng(6).normal(0, 3, (n_tokens, 768)).astype(np.float32)
        x[n_tokens // 2, 700] = bad
        with np.errstate(invalid="ignore"):
            op.check("linear", x, w)
            h = op.ops.rms_norm(op.there(x), op.there(gain), 1e-5)
            y = op.ops.numpy(op.ops.linear(h, op.there(w)))
        assert (np.isnan(y).all(-1) == (np.arange(n_tokens) == n_tokens // 2)).all()
        assert np.isfinite(np.delete(y, n_tokens // 2, 0)).all()


@every_place
def test_rows_may_be_strided(place):
    op = Op(place)
    x = np.random.default_rng(3).normal(size=(3, 4, 160)).astype(np.float32)
    wide = op.there(x)
    q, d = op.ops.quantize_q8_0(wide[..., 32:128])
    expected_q, expected_d = op.twin.quantize_q8_0(np.ascontiguousarray(x[..., 32:128]))
    assert (op.ops.numpy(q) == expected_q).all()
    assert (op.ops.numpy(d) == expected_d).all()
