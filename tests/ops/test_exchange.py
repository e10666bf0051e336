"""Sums over ranks through inboxes, as one rank of several, with what the others would have written put into its inbox."""

from functools import partial
from threading import Timer
from types import SimpleNamespace

import check
import numpy as np
import pytest
from check import Op, every_place, tensor
from gguf import GGMLQuantizationType as T
from synth import write_model
from test_matmul import x_of

import npglm.forward
from npglm.checkpoint import Checkpoint
from npglm.generate import Model
from npglm.gpu import moe, op_set
from npglm.gpu.collective import Collective, Outbox
from npglm.gpu.elementwise import sum_add_norm
from npglm.gpu.matmul import ROUNDED_VALUES
from npglm.parallel import RankOps, Sharding

CAPACITY = 8192
LONG = ROUNDED_VALUES + 32  # values of a row whose product does not round them itself
EVERY_RANK = [(0, 2), (1, 2), (0, 3), (1, 3), (2, 3), (3, 4)]  # rank, world


class Inboxes:
    """Those of all ranks, on the place of one."""

    def __init__(self, ops, rank: int, world: int):
        self.ops, self.rank, self.world = ops, rank, world
        self.arrays = [ops.array(np.zeros((2, world, CAPACITY, 2)), np.int32) for _ in range(world)]
        self.addresses = ops.array([ops.device.address(a) for a in self.arrays], np.uint64)
        self.calls = ops.array(np.zeros(CAPACITY // 256), np.int32)
        self.where = self.addresses, self.calls, CAPACITY, rank, world

    def fill(self, parts, width: int = 256):
        """What the others write in the next call, of whose parts [world, n] this is. width: values that share a count of calls."""
        at = np.arange(parts.shape[1])
        call = self.ops.numpy(self.calls)[at // width] + 1
        self.written = call & 1, at, call  # [half, ., value], with this number
        inbox = self.ops.numpy(self.arrays[self.rank]).copy()
        for r in set(range(self.world)) - {self.rank}:
            inbox[call & 1, r, at] = np.stack([parts[r].view(np.int32), call], -1)
        self.arrays[self.rank][...] = self.ops.array(inbox, np.int32)
        self.before = [self.ops.numpy(a).copy() for a in self.arrays]

    def check_given(self, part):
        """This rank's part is in all inboxes, and nothing else has changed."""
        half, at, call = self.written
        for array, before in zip(self.arrays, self.before, strict=True):
            before[half, self.rank, at] = np.stack([part.view(np.int32), call], -1)
            assert (self.ops.numpy(array) == before).all()


def parts_of(rng, world: int, n: int):
    return (rng.normal(size=(world, n)) * 10.0 ** rng.integers(-9, 9, (world, n))).astype(np.float32)


def added(parts):
    """In the order of ranks."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def exchange_sum(inboxes, part, first: int = 0, n: int | None = None, **defines):
    ops, n = inboxes.ops, len(part) if n is None else n
    y, where = ops.empty((n,), np.float32), (n, first, len(part), CAPACITY, inboxes.rank, inboxes.world)
    args = ops.array(part, np.float32), y, inboxes.addresses, inboxes.calls, *where
    ops.launch("exchange_sum_f32", (-(-n // 256),), 256, *args, **defines)
    return ops.numpy(y)


@every_place
@pytest.mark.parametrize(("rank", "world"), EVERY_RANK)
def test_exchange_sum(place, rank, world):
    """Sums of many lengths through the same inboxes: every block of threads counts its own calls."""
    ops, rng = check.PLACES[place]("f32"), np.random.default_rng(rank)
    inboxes = Inboxes(ops, rank, world)
    for n in (1, 256, 1023, 2, 257, 1, 1, 255, 1023, 1024, 8192):
        parts = parts_of(rng, world, n)
        inboxes.fill(parts)
        assert exchange_sum(inboxes, parts[rank]).tobytes() == added(parts).tobytes()
        inboxes.check_given(parts[rank])
    ops.device.verify()


@every_place
@pytest.mark.parametrize(("n", "first", "stop"), [(1023, 0, 512), (1023, 300, 301), (513, 256, 513), (300, 0, 300)])
def test_exchange_of_columns(place, n, first, stop):
    """Of all n values a rank has some: what it gives of the others is 0."""
    ops, rng = check.PLACES[place]("f32"), np.random.default_rng(n)
    inboxes = Inboxes(ops, 1, 3)
    for _ in range(2):
        parts = parts_of(rng, 3, n)
        parts[1, :first] = parts[1, stop:] = 0
        inboxes.fill(parts)
        assert exchange_sum(inboxes, parts[1, first:stop], first, n).tobytes() == added(parts).tobytes()
        inboxes.check_given(parts[1])
    ops.device.verify()


def product_of(op, n: int, rng, n_in: int = LONG):
    """A product of one token that gives itself to all ranks, if it is called with an Outbox."""
    x, w = op.there(x_of(n, 1, n_in)), op.there(tensor(rng, T.Q8_0, n, n_in))
    return lambda to=None: op.ops.linear(x, w, to=to)


def short_product_of(op, n: int, rng):
    """Of a row that a product alone would round itself: the ranks' rows may differ in length, but all do the same."""
    return product_of(op, n, rng, ROUNDED_VALUES)


def experts_of(op, n: int, rng):
    """The last product of the routed experts, with another one added."""
    experts, weights = op.there(np.array([[1, 3, 0]], np.int32)), op.there(x_of(1, 1, 3))
    x, w, beside = op.there(x_of(n, 1, 3, 256)), op.there(tensor(rng, T.Q2_K, 4, n, 256)), op.there(x_of(n + 1, 1, n))
    return lambda to=None: moe._down_and_add(x, w, experts, weights, op.ops, beside, to=to)


@every_place
@pytest.mark.parametrize("make", [product_of, short_product_of, experts_of])
@pytest.mark.parametrize(("n", "rank", "world"), [(256, 0, 3), (1280, 1, 3), (6144, 1, 2), (6400, 2, 3)])
def test_sum_add_norm(place, n, rank, world, make):
    """The kernel that makes this rank's part gives it, the norm takes all: the same bits as the sum, and then add_norm; its blocks too."""
    op, rng = Op(place), np.random.default_rng(n)
    ops, inboxes = op.ops, Inboxes(op.ops, rank, world)
    weight, call = op.there(tensor(rng, T.F32, n)), make(op, n, rng)
    for _ in range(3):
        parts, x = rng.normal(size=(world, n)).astype(np.float32), rng.normal(size=(1, n)).astype(np.float32)
        parts[rank] = ops.numpy(call())[0]
        inboxes.fill(parts, CAPACITY)
        outbox, there = Outbox(inboxes.where), ops.array(x, np.float32)
        assert ops.numpy(call(outbox))[0].tobytes() == parts[rank].tobytes()
        assert outbox.sent
        total, y = sum_add_norm(there, weight, 1e-5, inboxes.where, ops=ops)
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
def test_what_an_outbox_does_not_take(place):
    """Sums that add_norm() leaves to sum(): of several tokens, of other lengths, or made by a kernel that gives nothing."""
    op, rng = Op(place), np.random.default_rng(1)
    inboxes = Inboxes(op.ops, 0, 2)
    for n_tokens, kind, n_out, n_in in (
        (2, T.Q8_0, 256, LONG),
        (1, T.Q8_0, 250, LONG),
        (1, T.F16, 256, 64),
    ):
        outbox = Outbox(inboxes.where)
        op.ops.linear(op.there(x_of(2, n_tokens, n_in)), op.there(tensor(rng, kind, n_out, n_in)), to=outbox)
        assert not outbox.sent
    assert not any(op.ops.numpy(array).any() for array in inboxes.arrays)
    op.ops.device.verify()


@every_place
@pytest.mark.parametrize("world", [2, 3])
def test_a_lost_rank_makes_nan(place, world):
    """One value of the last rank never comes. Its block of threads gives up, and then does not wait for what comes later."""
    ops, rng, n = check.PLACES[place]("f32"), np.random.default_rng(world), 513
    inboxes = Inboxes(ops, 0, world)
    for _ in range(2):
        parts = parts_of(rng, world, n)
        inboxes.fill(parts)
        inboxes.arrays[0][inboxes.written[2][300] & 1, world - 1, 300, 1] = 77
        y, expected = exchange_sum(inboxes, parts[0], MAX_POLLS=5), added(parts)
        assert np.isnan(y[300])
        assert y[:256].tobytes() == expected[:256].tobytes()
        assert y[512:].tobytes() == expected[512:].tobytes()
        assert ops.numpy(inboxes.calls)[:3].tolist() == [inboxes.written[2][0], -1, inboxes.written[2][0]]
    assert np.isnan(y[256:512]).all()
    ops.device.verify()


@every_place
def test_a_lost_rank_makes_the_norm_nan(place):
    op, rng, n = Op(place), np.random.default_rng(1), 1280
    ops, inboxes = op.ops, Inboxes(op.ops, 1, 3)
    ops.launch = partial(ops.launch, MAX_POLLS=5)
    weight = op.there(tensor(rng, T.F32, n))
    for _ in range(2):
        x = ops.array(rng.normal(size=(1, n)), np.float32)
        total, y = sum_add_norm(x, weight, 1e-5, inboxes.where, ops=ops)
        assert np.isnan(ops.numpy(total)).all()
        assert np.isnan(ops.numpy(y)).all()
        assert (ops.numpy(inboxes.calls)[:5] == -1).all()
        ops.device.verify()


@pytest.mark.parametrize("experts", ["tensor", "expert"])
def test_a_step_over_inboxes(tmp_path, experts):
    """The only rank of a world of one: what goes through its inboxes comes out as if it had stayed."""
    checkpoint, ops = Checkpoint.open(write_model(tmp_path / "m.gguf", seed=2, n_layers=4)), op_set("ggml", "emulated")
    collective = object.__new__(Collective)
    sums, norms = Inboxes(ops, 0, 1), Inboxes(ops, 0, 1)
    vars(collective).update(
        ops=ops, inboxes=True, ranks=SimpleNamespace(barrier=lambda: None), _sums=sums.where, _norms=norms.where
    )
    over = RankOps(ops, collective, checkpoint.config, Sharding(checkpoint, 1, experts), 0)

    def logits(ops):
        model = Model(checkpoint, npglm.forward.forward, ops)
        cache = model.cache(8)
        return [model.run(cache, ids) for ids in ([5, 9, 2], [7], [8])]

    for mine, alone in zip(logits(over), logits(ops), strict=True):
        assert mine.tobytes() == alone.tobytes()
    assert norms.calls[0] == 2 * 2 * 4  # of each layer of two single tokens, both sums
    assert sums.calls[0] == 2 * 4 + 3  # of the prompt; and the logits


@pytest.mark.parametrize("first", ["own", "next"])
@pytest.mark.parametrize(("n", "rank", "world"), [(1280, 0, 2), (1280, 2, 3), (6400, 1, 3)])
def test_whichever_part_comes_first(first, n, rank, world):
    """Parts come while the norm runs: this rank's own, the next one's, then the others'. The same sum, in the order of ranks."""
    op, rng = Op("emulated-32"), np.random.default_rng(n)
    ops, inboxes, parts = op.ops, Inboxes(op.ops, rank, world), rng.normal(size=(world, n)).astype(np.float32)
    weight, x = op.there(tensor(rng, T.F32, n)), ops.array(rng.normal(size=(1, n)), np.float32)
    place, come = inboxes.arrays[rank], np.stack([parts.view(np.int32), np.ones((world, n), np.int32)], -1)
    order = sorted(range(world), key=lambda r: (r != (rank if first == "own" else (rank + 1) % world), r))
    timers = [Timer(0.2 * (i + 1), place[1, r, :n].__setitem__, (..., come[r])) for i, r in enumerate(order)]
    for timer in timers:
        timer.start()
    total, _ = sum_add_norm(x, weight, 1e-5, inboxes.where, ops=ops)
    assert total.tobytes() == (x + added(parts)[None]).tobytes()


@pytest.mark.parametrize(("n", "rank", "world"), [(1000, 1, 3), (1000, 0, 1)])
def test_join(n, rank, world):
    """Columns of one row go through the inboxes to where they belong."""
    ops, rng, columns = check.PLACES["emulated-32"]("f32"), np.random.default_rng(n), slice(300 * rank, 300 * rank + 300)
    collective, inboxes = object.__new__(Collective), Inboxes(ops, rank, world)
    vars(collective).update(ops=ops, inboxes=True, _sums=inboxes.where)
    parts = parts_of(rng, world, n)
    parts[rank, : columns.start] = parts[rank, columns.stop :] = 0
    inboxes.fill(parts)
    whole = collective.join(ops.array(parts[rank : rank + 1, columns], np.float32), columns.start, n)
    assert ops.numpy(whole).tobytes() == added(parts)[None].tobytes()


@every_place
def test_one_value_that_never_comes(place):
    """Lanes of a warp that have given up go on with those that have not: a row of more values than are taken at a time."""
    op, rng, n = Op(place), np.random.default_rng(1), 7168
    ops, inboxes = op.ops, Inboxes(op.ops, 0, 2)
    ops.launch = partial(ops.launch, MAX_POLLS=5)
    parts, weight = rng.normal(size=(2, n)).astype(np.float32), op.there(tensor(rng, T.F32, n))
    come = np.stack([parts.view(np.int32), np.ones((2, n), np.int32)], -1)
    come[1, 20, 1] = 0
    inboxes.arrays[0][1, :, :n] = ops.array(come, np.int32)
    total, _ = sum_add_norm(ops.array(rng.normal(size=(1, n)), np.float32), weight, 1e-5, inboxes.where, ops=ops)
    assert np.isnan(ops.numpy(total)[0, 20])
