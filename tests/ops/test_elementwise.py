"""Norms, rope, sums, activations, writing into the cache."""

import numpy as np
import pytest
from check import Op, both_numerics, every_place, tensor
from gguf import GGMLQuantizationType as T


def normal(seed, *shape, scale=1.0):
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


@every_place
@pytest.mark.parametrize("shape", [(1, 33), (3, 255), (2, 256), (5, 257), (1, 6144)])
def test_norms(place, shape):
    op, rng = Op(place), np.random.default_rng(1)
    w, b = tensor(rng, T.F32, shape[-1]), tensor(rng, T.F32, shape[-1])
    op.check("rms_norm", normal(1, *shape), w, 1e-5)
    op.check("layer_norm", normal(2, *shape) + 2, w, b, 1e-6)
    op.check("add_norm", normal(1, *shape), normal(3, *shape), w, 1e-5)


@every_place
def test_rope(place):
    op = Op(place)
    pos = np.array([0, 1, 77, 1048575], np.int32)
    table = op.twin.rope_table(pos, 64, 8e6)
    op.check("rope_table", pos, 64, 8e6)
    op.check("rope", normal(3, 4, 3, 64), table)
    op.check("rope", normal(4, 4, 64), table)


@every_place
@pytest.mark.parametrize("shape", [(1, 255), (3, 257), (2, 3, 130)])
def test_sums_and_activations(place, shape):
    op = Op(place)
    x, y = normal(5, *shape, scale=4), normal(6, *shape)
    op.check("add", x, y, exact=True)
    op.check("sigmoid", x)
    op.check("swiglu", x, y)
    op.check("sigmoid", np.array([[-200, -90, 0, 90, 200]], np.float32))
    op.check("swiglu", np.array([[-200, -90, 0, 90, 200]], np.float32), np.ones((1, 5), np.float32))


@every_place
@both_numerics
def test_store(place, numerics):
    op = Op(place, numerics)
    cache, rows, pos = normal(7, 9, 40).astype(op.ops.cache_dtype), normal(8, 3, 40), np.array([8, 2, 5], np.int32)
    there = op.there(cache)
    op.ops.store(there, op.there(rows), op.there(pos))
    op.twin.store(cache, rows, pos)
    assert (op.ops.numpy(there) == cache).all()
    op.ops.device.verify()
