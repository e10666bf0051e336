"""What the device does of the routed experts that stay in host memory: npglm/offload.py."""

from types import SimpleNamespace

import numpy as np
import pytest
from check import Op, every_place, tensor
from gguf import GGMLQuantizationType as T

from npglm.checkpoint import EXPERTS
from npglm.offload import Meeting, OffloadOps, fetch_experts

N_EXPERTS, N_IN, N_OUT = 11, 512, 130


@every_place
@pytest.mark.parametrize("kind", [T.Q8_0, T.Q2_K])
@pytest.mark.parametrize("n", [1, 3])
def test_fetch_experts(place, kind, n):
    """Bit for bit what moving all experts gives for the last n of a token's."""
    device = Op(place).ops.device
    ops, rng = OffloadOps(device), np.random.default_rng(n)
    layer = SimpleNamespace(**{name: tensor(rng, kind, N_EXPERTS, N_OUT, N_IN) for name in EXPERTS}, in_place={})
    for name in EXPERTS:
        data = getattr(layer, name).data
        seen = device.in_place(data)
        layer.in_place[name] = data if seen is None else seen
    chosen = rng.permutation(N_EXPERTS)[None, :5].astype(np.int32)
    places = fetch_experts(layer, ops.array(chosen, np.int32), n, ops=ops)
    device.verify()
    for name, fetched in places.items():
        moved = ops.weight(getattr(layer, name))
        assert (fetched.shape, fetched.type, fetched.fast) == ((n, N_OUT, N_IN), moved.type, True)
        for mine, whole in zip(fetched.parts, moved.parts, strict=True):
            if mine is not None:
                each = ops.numpy(whole).view(np.uint8).reshape(N_EXPERTS, -1)
                assert (ops.numpy(mine).view(np.uint8).reshape(n, -1) == each[chosen[0, -n:]]).all()


@every_place
@pytest.mark.parametrize("n_tokens", [1, 7, 65])
def test_meeting(place, n_tokens):
    """Several calls: the host gets each one's values, the device adds what it gives back, NaN and inf too."""
    ops, rng = Op(place).ops, np.random.default_rng(n_tokens)
    meeting = Meeting(ops.device, (n_tokens, 96), (n_tokens, 3))
    for beside in (True, False, True):
        h, sums, shared = (rng.normal(size=(n_tokens, 96)).astype(np.float32) for _ in range(3))
        sums[0, :2] = np.nan, np.inf
        experts = rng.integers(-1, 9, (n_tokens, 3)).astype(np.int32)
        weights = rng.normal(size=experts.shape).astype(np.float32)
        seen = []

        def on_host(seen=seen, sums=sums):
            meeting.wait()
            seen += [meeting.h.copy(), meeting.experts.copy(), meeting.weights.copy()]
            meeting.give_back(sums)

        meeting.hand_over(*(ops.array(a, a.dtype) for a in (h, experts, weights)), ops)
        ops.device.host(on_host, meeting.release)
        out = ops.numpy(meeting.take_back(ops.array(shared, np.float32) if beside else None, ops))
        ops.device.verify()
        for mine, expected in zip(seen, (h, experts, weights), strict=True):
            assert (mine == expected).all()
        assert np.array_equal(out, sums + shared if beside else sums, equal_nan=True)


def called(place, number: int):
    """A meeting whose last call had this number, and the arguments of the next."""
    ops = Op(place).ops
    meeting, x = Meeting(ops.device, (1, 96), (1, 3)), np.ones((1, 96), np.float32)
    meeting.calls[...] = meeting.ready[...] = meeting.done[...] = number
    return ops, meeting, (ops.array(x, np.float32), ops.array([[1, 2, 0]], np.int32), ops.array(x[:, :3], np.float32), ops)


NUMBERS = pytest.mark.parametrize("number", [0, 2**31 - 2, -2])  # they wrap


@every_place
@NUMBERS
def test_what_is_raised_spoils_no_later_call(place, number):
    ops, meeting, args = called(place, number)

    def interrupted():
        with meeting:
            meeting.hand_over(*args)
            raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert meeting.ready == meeting.done == ops.numpy(meeting.calls)
        with meeting:
            meeting.hand_over(*args)
            ops.device.host(lambda: (meeting.wait(), meeting.give_back(2 * meeting.h)), meeting.release)
        assert (ops.numpy(meeting.take_back(None, ops)) == 2).all()


@every_place
@NUMBERS
def test_the_device_goes_on_once_released(place, number):
    """What waits for the host ends, though that gives nothing back."""
    ops, meeting, args = called(place, number)
    device, waited = ops.device, []

    def synchronize():
        waited.append(meeting.take_back(None, ops))
        device.synchronize()

    meeting.device = SimpleNamespace(hosts=None, synchronize=synchronize)
    meeting.hand_over(*args)
    meeting.release()
    assert len(waited) == 1
    assert meeting.ready == meeting.done == ops.numpy(meeting.calls)
