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


@every_place
def test_rows_may_be_strided(place):
    op = Op(place)
    x = np.random.default_rng(3).normal(size=(3, 4, 160)).astype(np.float32)
    wide = op.there(x)
    q, d = op.ops.quantize_q8_0(wide[..., 32:128])
    expected_q, expected_d = op.twin.quantize_q8_0(np.ascontiguousarray(x[..., 32:128]))
    assert (op.ops.numpy(q) == expected_q).all()
    assert (op.ops.numpy(d) == expected_d).all()
