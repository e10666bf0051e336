"""What each rank holds, without any ranks: parts of tensors on quantised bytes, the table, refusals, and the proof by bytes."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from gguf.quants import dequantize

import npglm
import npglm.cpu
import npglm.gpu
from npglm.checkpoint import EXPERT_SPLITS, SPLITS, Tensor, layer_tensors
from npglm.errors import NpglmError
from npglm.gpu import collective
from npglm.parallel import Part, RankCheckpoint, Sharding, check_shards, share
from reference.ops import ReferenceOps

SMALL = Path(__file__).parents[1] / "golden/small.Q2_K.gguf"
MODELS = {"embedded": npglm.embedded(), "small": SMALL}


def rank(r: int, world: int) -> SimpleNamespace:
    """One of several ranks that has nobody to ask."""
    return SimpleNamespace(rank=r, world=world, gather=lambda value: [value])


def blocks(rows: int, cols: int) -> np.ndarray:
    """Q2_K rows that are all different."""
    data = np.random.default_rng(rows).integers(0, 256, (rows, cols // 256, 84), np.uint8)
    data[..., 80:] = np.array([0.1, 0.2], np.float16).view(np.uint8)
    return data.reshape(rows, -1)


@pytest.mark.parametrize(
    ("shape", "axis", "start", "stop"),
    [((5, 512), 0, 1, 4), ((5, 768), 1, 256, 768), ((4, 7, 512), 0, 1, 3), ((4, 7, 512), 1, 2, 5), ((4, 7, 768), 2, 512, 768)],
)
def test_part(shape, axis, start, stop):
    whole = Tensor("w", shape, T.Q2_K, blocks(int(np.prod(shape[:-1])), shape[-1]))
    part = Part(whole, axis, start, stop)
    expected = np.take(whole.decode(), np.arange(start, stop), axis)
    assert part.shape == expected.shape
    assert (part.decode() == expected).all()
    assert part.data.shape[0] == part.n_rows == int(np.prod(expected.shape[:-1]))
    assert part.data.nbytes == part.nbytes
    assert (dequantize(part.data, T.Q2_K) == expected.reshape(part.n_rows, -1)).all()
    for first in range(part.n_rows):
        for last in range(first + 1, part.n_rows + 1):
            assert (part.rows(first, last) == expected.reshape(part.n_rows, -1)[first:last]).all()
    assert np.shares_memory(part.view, whole.data)
    assert np.shares_memory(part.data, whole.data) == (axis == 0)  # mapped where it is one run of the file


@pytest.mark.parametrize(
    ("model", "experts", "worlds"),
    [("embedded", "tensor", [2]), ("embedded", "expert", [2, 3, 8]), ("small", "expert", [2, 4, 6])],
)
def test_parts_make_the_whole(model, experts, worlds):
    checkpoint = npglm.load(MODELS[model])
    splits = SPLITS | EXPERT_SPLITS[experts]
    for world in worlds:
        parts = [RankCheckpoint(checkpoint, rank(r, world), experts) for r in range(world)]
        for i, layer in enumerate(checkpoint.weights.layers):
            for attribute, tensor in vars(layer).items():
                mine = [getattr(p.weights.layers[i], attribute) for p in parts]
                if attribute in splits:
                    assert (np.concatenate([m.decode() for m in mine], splits[attribute][0]) == tensor.decode()).all()
                    assert sum(m.nbytes for m in mine) == tensor.nbytes
                else:
                    assert all(m is tensor for m in mine)
        assert (np.concatenate([p.weights.output.decode() for p in parts]) == checkpoint.weights.output.decode()).all()
        for p in parts:  # the shapes are those of the rank's own config, but for what the router sees of experts
            for i, layer in enumerate(p.weights.layers):
                for attribute, (_, axes, _) in layer_tensors(p.config, i).items():
                    tensor = getattr(layer, attribute)
                    if tensor is not None and not (experts == "expert" and attribute.endswith("_exps")):
                        assert tensor.shape == tuple(p.config.axes[a] for a in axes.split())


def test_refusals_name_what_works():
    small, embedded = npglm.load(SMALL), npglm.load(npglm.embedded())
    works = "--experts tensor works with 1 rank only, --experts expert works with 2 to 6 ranks"
    with pytest.raises(NpglmError, match="blk.3.ffn_down_exps.weight: 2 ranks would cut its Q2_K blocks of 256 .*; " + works):
        Sharding(small, 2, "tensor")
    with pytest.raises(NpglmError, match="6 heads cannot be shared by 7 ranks; " + works):
        Sharding(small, 7, "expert")
    works = "--experts tensor works with 2 ranks, --experts expert works with 2 to 8 ranks"
    with pytest.raises(NpglmError, match="would cut its Q2_K blocks of 256 .*; " + works):
        Sharding(embedded, 3, "tensor")


def test_ranks_on_different_backends_are_refused():
    """As when a host has fewer GPUs than ranks, and --backend auto takes what there is."""
    some = SimpleNamespace(rank=1, world=2, gather=lambda value: ["gpu", value])
    with pytest.raises(NpglmError, match="some ranks would run on gpu and some on reference: name one with --backend"):
        share(npglm.load(npglm.embedded()), ReferenceOps(), some, "tensor")


def test_each_rank_has_its_own_device():
    assert [collective.choose([["a", "b", "c"]] * 2, r) for r in range(2)] == [0, 1]
    assert [collective.choose([["a"], ["b"]], r) for r in range(2)] == [0, 0]  # a wrapper shows each its own
    assert collective.choose([["a"], ["a"]], 0) == 0
    with pytest.raises(NpglmError, match="2 or more ranks on a host with 1 GPU: each rank needs its own"):
        collective.choose([["a"], ["a"]], 1)


def test_devices_of_other_hosts_do_not_count(monkeypatch):
    monkeypatch.setattr(collective, "visible", lambda: ["b"])
    ranks = SimpleNamespace(host=1, local_rank=1, gather=lambda value: [(0, ["b"]), (1, ["a"]), value])
    assert collective.own_gpu(ranks) == 0


def test_a_rank_without_devices_leaves_nobody_waiting(monkeypatch):
    """It takes part in what all ranks call, and raises then."""
    gathered = []

    def nothing():
        raise NpglmError("CuPy sees no device")

    monkeypatch.setattr(collective, "visible", nothing)
    with pytest.raises(NpglmError, match="sees no device"):
        collective.own_gpu(SimpleNamespace(host=0, local_rank=0, gather=lambda value: gathered.append(value) or gathered))
    assert gathered == [(0, [])]


class NoAccess(Exception):
    pass


@pytest.mark.parametrize(
    ("visible", "near", "opens", "inboxes"),
    [
        (["a", "b"], True, True, True),
        (["a", "b"], False, True, False),
        (["a"], False, True, True),  # the other is not visible here: opening shows whether it is near
        (["a"], False, False, False),
    ],
)
def test_inboxes_are_opened_where_devices_are_near(monkeypatch, visible, near, opens, inboxes):
    def open_handle(handle):
        if not opens:
            raise NoAccess
        return 4096

    runtime = SimpleNamespace(
        deviceCanAccessPeer=lambda here, there: near, malloc=lambda n: 8192, memset=lambda *args: None, CUDARuntimeError=NoAccess,
        ipcGetMemHandle=lambda address: b"handle", ipcOpenMemHandle=open_handle,
    )  # fmt: skip
    device = SimpleNamespace(
        hip=False, id=0, cupy=SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)), synchronize=lambda: None
    )
    two = SimpleNamespace(
        rank=0, world=2, local_world=2, barrier=lambda: None, gather=lambda value: [value, "b" if value == "a" else value]
    )
    monkeypatch.setattr(collective, "visible", lambda: visible)
    mine = object.__new__(collective.Collective)
    mine.ops, mine.ranks = SimpleNamespace(device=device, array=np.array), two
    assert mine._open_inboxes() == inboxes


@pytest.mark.parametrize("kind", ["cpu", "emulated", "reference"])
@pytest.mark.parametrize("numerics", ["ggml", "f32"])
def test_check_shards(kind, numerics):
    """What is loaded is the slice of the file, and another rank's half is named."""
    if kind == "reference":
        ops = ReferenceOps()
    else:
        ops = npglm.cpu.op_set(numerics, 1) if kind == "cpu" else npglm.gpu.op_set(numerics, "emulated")
    checkpoint = npglm.load(npglm.embedded())
    shards = [RankCheckpoint(checkpoint, rank(r, 2), "tensor") for r in range(2)]
    loaded = [ops.load(shard) for shard in shards]
    for weights, shard in zip(loaded, shards, strict=True):
        assert check_shards(weights, shard, ops) == len(checkpoint.tensors)
    loaded[1].layers[0].ffn_gate = loaded[0].layers[0].ffn_gate
    loaded[1].layers[4].ffn_down_exps = loaded[0].layers[4].ffn_down_exps
    with pytest.raises(
        NpglmError, match=r"^rank 1 holds rank 0's half of tensor blk.0.ffn_gate.weight; 1 more tensor is wrong$"
    ):
        check_shards(loaded[1], shards[1], ops)
    loaded[0].layers[0].attn_norm = loaded[0].layers[1].attn_norm
    with pytest.raises(NpglmError, match=r"^rank 0 holds bytes that are no rank's of tensor blk.0.attn_norm.weight$"):
        check_shards(loaded[0], shards[0], ops)
