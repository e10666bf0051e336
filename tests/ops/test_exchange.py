"""Sums over ranks through inboxes, as one rank of several, with what the others would have written put into its inbox."""

from functools import partial

import check
import numpy as np
import pytest
from check import Op, every_place, tensor
from gguf import GGMLQuantizationType as T

from npglm.gpu.elementwise import sum_add_norm

CAPACITY = 8192
EVERY_RANK = [(0, 2), (1, 2), (0, 3), (1, 3), (2, 3), (3, 4)]  # rank, world


class Inboxes:
    """Those of all ranks, on the place of one."""

    def __init__(self, ops, rank: int, world: int):
        self.ops, self.rank, self.world, self.others = ops, rank, world, set(range(world)) - {rank}
        self.arrays = [ops.array(np.zeros((2, world, CAPACITY // 2, 4)), np.int32) for _ in range(world)]
        self.addresses = ops.array([ops.device.address(a) for a in self.arrays], np.uint64)
        self.calls = ops.array(np.zeros(CAPACITY // 256), np.int32)

    def fill(self, parts, width: int = 256):
        """What the others write in the next call, of whose parts [world, n] this is. width: pairs that share a count of calls."""
        pairs = np.arange(-(-parts.shape[1] // 2))
        call = self.ops.numpy(self.calls)[pairs // width] + 1
        self.written = call & 1, pairs, call  # [half, ., pair], with this number
        inbox = self.ops.numpy(self.arrays[self.rank]).copy()
        for r in self.others:
            inbox[call & 1, r, pairs, 0::2] = np.pad(parts[r], (0, parts.shape[1] % 2)).view(np.int32).reshape(-1, 2)
            inbox[call & 1, r, pairs, 1::2] = call[:, None]
        self.arrays[self.rank][...] = self.ops.array(inbox, np.int32)
        self.before = [self.ops.numpy(a).copy() for a in self.arrays]

    def check_given(self, part):
        """This rank's part is in all the others' inboxes, and nothing else has changed."""
        half, pairs, call = self.written
        for r in self.others:
            self.before[r][half, self.rank, pairs, 0::2] = np.pad(part, (0, len(part) % 2)).view(np.int32).reshape(-1, 2)
            self.before[r][half, self.rank, pairs, 1::2] = call[:, None]
        for array, expected in zip(self.arrays, self.before, strict=True):
            assert (self.ops.numpy(array) == expected).all()


def parts_of(rng, world: int, n: int):
    return (rng.normal(size=(world, n)) * 10.0 ** rng.integers(-9, 9, (world, n))).astype(np.float32)


def added(parts):
    """In the order of ranks."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def exchange_sum(inboxes, part, **defines):
    ops, n = inboxes.ops, len(part)
    y, where = ops.empty((n,), np.float32), (n, CAPACITY, inboxes.rank, inboxes.world)
    args = ops.array(part, np.float32), y, inboxes.addresses, inboxes.calls, *where
    ops.launch("exchange_sum_f32", (-(-n // 512),), 256, *args, **defines)
    return ops.numpy(y)


@every_place
@pytest.mark.parametrize(("rank", "world"), EVERY_RANK)
def test_exchange_sum(place, rank, world):
    """Sums of many lengths through the same inboxes: every block of threads counts its own calls."""
    ops, rng = check.PLACES[place]("f32"), np.random.default_rng(rank)
    inboxes = Inboxes(ops, rank, world)
    for n in (1, 512, 2047, 2, 513, 1, 1, 511, 2047, 2048, 8192):
        parts = parts_of(rng, world, n)
        inboxes.fill(parts)
        assert exchange_sum(inboxes, parts[rank]).tobytes() == added(parts).tobytes()
        inboxes.check_given(parts[rank])
    ops.device.verify()


@every_place
@pytest.mark.parametrize(("n", "rank", "world"), [(256, 0, 3), (1280, 1, 3), (3072, 2, 3), (6144, 1, 2), (1280, 3, 4)])
def test_sum_add_norm(place, n, rank, world):
    """The same bits as the sum, and then add_norm; its 8-bit blocks too."""
    op, rng = Op(place), np.random.default_rng(n)
    ops, inboxes = op.ops, Inboxes(op.ops, rank, world)
    weight = op.there(tensor(rng, T.F32, n))
    for _ in range(3):
        parts, x = rng.normal(size=(world, n)).astype(np.float32), rng.normal(size=(1, n)).astype(np.float32)
        inboxes.fill(parts, CAPACITY)
        others = inboxes.addresses, inboxes.calls, CAPACITY, rank, world
        mine = ops.array(parts[rank : rank + 1], np.float32)
        total, y = sum_add_norm(ops.array(x, np.float32), mine, weight, 1e-5, others, ops=ops)
        whole = added(parts)[None]
        expected, z = ops.add_norm(ops.array(x, np.float32), ops.array(whole, np.float32), weight, 1e-5)
        assert ops.numpy(total).tobytes() == (x + whole).tobytes() == ops.numpy(expected).tobytes()
        assert ops.numpy(y).tobytes() == ops.numpy(z).tobytes()
        for kind in ("q8_0", "q8_k"):
            for a, b in zip(ops.recall((kind,), y), ops.recall((kind,), z), strict=True):
                assert (a is None and b is None) or ops.numpy(a).tobytes() == ops.numpy(b).tobytes()
        inboxes.check_given(parts[rank])
        ops.device.verify()


@every_place
@pytest.mark.parametrize("world", [2, 3])
def test_a_lost_rank_makes_nan(place, world):
    """One value of the last rank never comes. Its block of threads gives up, and then does not wait for what comes later."""
    ops, rng, n = check.PLACES[place]("f32"), np.random.default_rng(world), 1025
    inboxes = Inboxes(ops, 0, world)
    for _ in range(2):
        parts = parts_of(rng, world, n)
        inboxes.fill(parts)
        inboxes.arrays[0][inboxes.written[2][300] & 1, world - 1, 300, 3] = 77
        y, expected = exchange_sum(inboxes, parts[0], MAX_POLLS=5), added(parts)
        assert np.isnan(y[600:602]).all()
        assert y[:512].tobytes() == expected[:512].tobytes()
        assert y[1024:].tobytes() == expected[1024:].tobytes()
        assert ops.numpy(inboxes.calls)[:3].tolist() == [inboxes.written[2][0], -1, inboxes.written[2][0]]
    assert np.isnan(y[512:1024]).all()
    ops.device.verify()


@every_place
def test_a_lost_rank_makes_the_norm_nan(place):
    op, rng, n = Op(place), np.random.default_rng(1), 1280
    ops, inboxes = op.ops, Inboxes(op.ops, 1, 3)
    ops.launch = partial(ops.launch, MAX_POLLS=5)
    weight, others = op.there(tensor(rng, T.F32, n)), (inboxes.addresses, inboxes.calls, CAPACITY, 1, 3)
    for _ in range(2):
        x, mine = (ops.array(rng.normal(size=(1, n)), np.float32) for _ in range(2))
        total, y = sum_add_norm(x, mine, weight, 1e-5, others, ops=ops)
        assert np.isnan(ops.numpy(total)).all()
        assert np.isnan(ops.numpy(y)).all()
        assert (ops.numpy(inboxes.calls)[:5] == -1).all()
        ops.device.verify()
