"""Sums over ranks through inboxes, as one rank of three, with what the others would have written put into its inbox."""

import check
import numpy as np
import pytest
from check import Op, every_place, tensor
from gguf import GGMLQuantizationType as T

from npglm.gpu.elementwise import sum_add_norm

WORLD, CAPACITY = 3, 4096


class Inboxes:
    """Those of all ranks, on the place of one."""

    def __init__(self, ops, rank: int):
        self.ops, self.rank, self.call = ops, rank, 0
        self.arrays = [ops.array(np.zeros((2, WORLD, CAPACITY // 2, 4)), np.int32) for _ in range(WORLD)]
        self.addresses = ops.array([ops.device.address(a) for a in self.arrays], np.uint64)
        self.calls = ops.array(np.zeros(CAPACITY // 256), np.int32)

    def fill(self, parts):
        """What the others write in the next call, of whose parts [world, n] this is."""
        self.call += 1
        n_pairs, inbox = -(-parts.shape[1] // 2), self.ops.numpy(self.arrays[self.rank]).copy()
        for r in set(range(WORLD)) - {self.rank}:
            inbox[self.call & 1, r, :n_pairs, 1::2] = self.call
            inbox[self.call & 1, r, :n_pairs, 0::2] = np.pad(parts[r], (0, parts.shape[1] % 2)).view(np.int32).reshape(-1, 2)
        self.arrays[self.rank][...] = self.ops.array(inbox, np.int32)

    def check_given(self, part):
        """This rank's part is in all the others' inboxes, and nothing else."""
        n_pairs = -(-len(part) // 2)
        for r in set(range(WORLD)) - {self.rank}:
            got = self.ops.numpy(self.arrays[r])[self.call & 1, self.rank]
            assert got[:n_pairs, ::2].reshape(-1)[: len(part)].tobytes() == part.tobytes()
            assert (got[:n_pairs, 1::2] == self.call).all()
            assert not got[n_pairs:].any()


def parts_of(rng, n: int):
    return (rng.normal(size=(WORLD, n)) * 10.0 ** rng.integers(-9, 9, (WORLD, n))).astype(np.float32)


@every_place
@pytest.mark.parametrize("n", [1, 2, 511, 512, 513, 2047])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_exchange_sum(place, n, rank):
    ops, rng = check.PLACES[place]("f32"), np.random.default_rng(n)
    inboxes = Inboxes(ops, rank)
    for _ in range(3):
        parts, y = parts_of(rng, n), ops.empty((n,), np.float32)
        inboxes.fill(parts)
        where = n, CAPACITY, rank, WORLD
        mine = ops.array(parts[rank], np.float32)
        ops.launch("exchange_sum_f32", (-(-n // 512),), 256, mine, y, inboxes.addresses, inboxes.calls, *where)
        assert ops.numpy(y).tobytes() == (parts[0] + parts[1] + parts[2]).tobytes()
        inboxes.check_given(parts[rank])
        ops.device.verify()


@every_place
@pytest.mark.parametrize(("n", "rank"), [(256, 0), (1280, 1), (3072, 2)])
def test_sum_add_norm(place, n, rank):
    """The same bits as the sum, and then add_norm; its 8-bit blocks too."""
    op, rng = Op(place), np.random.default_rng(n)
    ops, inboxes = op.ops, Inboxes(op.ops, rank)
    weight = op.there(tensor(rng, T.F32, n))
    for _ in range(3):
        parts, x = rng.normal(size=(WORLD, n)).astype(np.float32), rng.normal(size=(1, n)).astype(np.float32)
        inboxes.fill(parts)
        others = inboxes.addresses, inboxes.calls, CAPACITY, rank, WORLD
        mine = ops.array(parts[rank : rank + 1], np.float32)
        total, y = sum_add_norm(ops.array(x, np.float32), mine, weight, 1e-5, others, ops=ops)
        whole = (parts[0] + parts[1] + parts[2])[None]
        expected, z = ops.add_norm(ops.array(x, np.float32), ops.array(whole, np.float32), weight, 1e-5)
        assert ops.numpy(total).tobytes() == (x + whole).tobytes() == ops.numpy(expected).tobytes()
        assert ops.numpy(y).tobytes() == ops.numpy(z).tobytes()
        for kind in ("q8_0", "q8_k"):
            for a, b in zip(ops.recall((kind,), y), ops.recall((kind,), z), strict=True):
                assert (a is None and b is None) or ops.numpy(a).tobytes() == ops.numpy(b).tobytes()
        inboxes.check_given(parts[rank])
        ops.device.verify()
