"""Routed experts in host memory, in emulation: the same results as with all weights on the device."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from synth import write_model
from test_end_to_end import steps, strays

import npglm
import npglm.forward
from npglm import offload
from npglm.checkpoint import Checkpoint
from npglm.errors import NpglmError
from npglm.gpu import offload_bench, op_set
from npglm.trace.metrics import errors
from npglm.trace.probes import Keep

ROOT = Path(__file__).parents[2]
MODELS = {"embedded": npglm.embedded(), "small": ROOT / "tests/golden/small.Q2_K.gguf"}
PROMPT = [5, 9, 2, 200, 17, 3]


def offloaded(numerics: str) -> offload.OffloadOps:
    return offload.OffloadOps(op_set(numerics, "emulated").device, numerics, "emulated", threads=2)


def both(checkpoint, numerics: str, n: int, prompt=PROMPT):
    """Logits [n, Y] with all weights on the device and with the experts on the host, along the same greedy ids."""
    plain = steps(op_set(numerics, "emulated"), npglm.forward.forward, checkpoint, prompt, n)
    return plain, steps(offloaded(numerics), npglm.forward.forward, checkpoint, prompt, n, plain.argmax(-1))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return Checkpoint.open(write_model(tmp_path_factory.mktemp("model") / "m.gguf", seed=3, n_layers=4))


@pytest.mark.parametrize("name", ["embedded", pytest.param("small", marks=pytest.mark.slow)])
def test_same_ids(name):
    plain, mine = both(Checkpoint.open(MODELS[name]), "f32", 24 if name == "small" else 2)
    assert (mine.argmax(-1) == plain.argmax(-1)).all()
    assert errors(mine, plain).max < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_ggml_strays_no_further_than_the_reference(name):
    here, there = strays(Checkpoint.open(MODELS[name]), offloaded("ggml"))
    assert here <= 3 * there + 1e-6


def test_many_tokens_pass_through_the_device(model, monkeypatch):
    """From STREAM_TOKENS on, unless the device has no room for a layer's experts."""
    calls, inner = [], offload.moe.moe_experts
    monkeypatch.setattr(offload, "STREAM_TOKENS", len(PROMPT))
    monkeypatch.setattr(offload.moe, "moe_experts", lambda *args, **more: calls.append(args) or inner(*args, **more))
    for numerics in ("f32", "ggml"):
        plain, mine = both(model, numerics, 2)
        assert errors(mine, plain).max < (2e-5 if numerics == "f32" else 0.05)
    assert len(calls) == 2 * sum(map(model.config.is_moe, range(4)))
    ops = offloaded("f32")
    weights = ops.load(model)
    monkeypatch.setattr(ops.device, "free_bytes", lambda: (1 << 16, 0))
    monkeypatch.setattr(ops, "load", lambda checkpoint: weights)
    on_host = steps(ops, npglm.forward.forward, model, PROMPT, 2, plain.argmax(-1))
    assert len(calls) == 2 * sum(map(model.config.is_moe, range(4)))  # no more than before
    assert np.isfinite(on_host).all()


@pytest.mark.parametrize("fetched", [1, 2])  # of 4
def test_the_device_takes_some_experts(model, monkeypatch, fetched):
    """Of one token's; what the host computes is the others. The same bits every time."""
    ops, host = offloaded("ggml"), []
    monkeypatch.setattr(ops.device, "in_place", lambda data: data, raising=False)
    monkeypatch.setattr(ops, "fetched", 4 // fetched)
    inner = ops.cpu.moe_experts
    monkeypatch.setattr(
        ops.cpu, "moe_experts", lambda h, w, experts, *more: host.append(experts.copy()) or inner(h, w, experts, *more)
    )
    plain = steps(op_set("ggml", "emulated"), npglm.forward.forward, model, PROMPT, 3)
    mine = steps(ops, npglm.forward.forward, model, PROMPT, 3, plain.argmax(-1))
    assert errors(mine, plain).max < 0.05
    assert [(one < 0).sum(-1).max() for one in host] == [0 if len(one) > 1 else fetched for one in host]
    assert (mine == steps(ops, npglm.forward.forward, model, PROMPT, 3, plain.argmax(-1))).all()
    everything = [experts for experts in host if len(experts) == 1]
    assert len(everything) == 2 * 2 * sum(map(model.config.is_moe, range(4)))


def test_memory_that_does_not_suffice_stays_pageable(model, monkeypatch):
    """Nothing is kept in memory for the device to read then."""
    ops = offloaded("ggml")
    monkeypatch.setattr(ops.device, "in_place", lambda data: pytest.fail("kept in memory"), raising=False)
    monkeypatch.setattr(offload, "available_bytes", lambda: 1000)
    assert all(w.in_place is None for w in ops.load(model).layers if hasattr(w, "in_place"))
    assert ops.note.endswith("0.0 GB of host memory free: the GPU takes none of them")


def test_the_benchmark_says_that_memory_is_short(monkeypatch):
    monkeypatch.setattr(offload_bench, "open_gpu", lambda: None)
    monkeypatch.setattr(offload, "available_bytes", lambda: 26 * 10**9)
    with pytest.raises(NpglmError, match="the experts of 8 layers need 25 GB, 26 GB of memory are free"):
        offload_bench.offload_bench(layers=11)


def test_words_of_the_file_that_are_not_aligned(model, monkeypatch):
    """A file may align its tensors to 1 byte: the device does not read such experts in place."""
    ops = offloaded("ggml")
    monkeypatch.setattr(ops.device, "in_place", lambda data: data, raising=False)
    layer, tensors = SimpleNamespace(), {name: getattr(model.weights.layers[3], name) for name in offload.EXPERTS}
    ops.attach(layer, tensors, stay=True)
    assert layer.in_place
    down = tensors["ffn_down_exps"]
    apart = np.zeros(down.data.size + 2, np.uint8)[2:].reshape(down.data.shape)
    ops.attach(layer, tensors | {"ffn_down_exps": replace(down, data=apart)}, stay=True)
    assert layer.in_place is None


def test_what_interrupts_a_launch_spoils_no_later_step(model, monkeypatch):
    """The host's number and the device's are the same again, also where the host had not begun to wait."""
    ops = offloaded("ggml")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(ops, "dense_ffn", interrupted)
    w, h = ops.load(model).layers[3], ops.array(np.ones((1, model.config.hidden)), np.float32)
    with pytest.raises(KeyboardInterrupt):
        ops.moe_ffn(h, w, model.config)
    assert ops._meetings[True].ready == ops._meetings[True].done == 1


def test_only_the_rest_is_moved(model, monkeypatch):
    ops, totals = offloaded("ggml"), set()
    for one in (ops, op_set("ggml", "emulated")):
        one.load(model, lambda done, total: totals.add(total))
    assert max(totals) - min(totals) == sum(t.nbytes for name, t in model.tensors.items() if "_exps" in name)
    monkeypatch.setattr(ops.device, "free_bytes", lambda: (1000, 0))
    with pytest.raises(NpglmError, match=r"0 of 4 layers would fit$"):
        ops.load(model)


def test_traced_makes_every_probe(model):
    """The same ones in the same order; the experts' come from the host."""
    plain, mine = op_set("f32", "emulated"), offloaded("f32")
    theirs, ours = Keep(), Keep()
    steps(plain.traced(), npglm.forward.forward, model, PROMPT, 1, probe=theirs)
    steps(mine.traced(), npglm.forward.forward, model, PROMPT, 1, probe=ours)
    assert list(ours.seen) == list(theirs.seen)
    for name, array in theirs.seen.items():
        assert errors(ours.seen[name], array).max < 2e-5, name


def test_bytes_of_the_file(model):
    """What --check-shards asks for, of weights on the device and on the host."""
    ops = offloaded("ggml")
    loaded = ops.load(model).layers[3]
    for name, tensor in vars(model.weights.layers[3]).items():
        expected = tensor.decode() if len(tensor.shape) == 1 else tensor.data
        assert (ops.file_bytes(getattr(loaded, name)) == expected).all(), name


def test_the_scripts(tmp_path):
    """generate.py and golden.py take it, with a GPU backend only."""

    def run(script, backend, *args):
        command = [
            sys.executable,
            ROOT / "scripts" / script,
            *args,
            "--tokens",
            "5,9,2",
            "--backend",
            backend,
            "--offload-experts",
        ]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = run("generate.py", "emulated", "-m", MODELS["small"], "--max-tokens", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["ids"]) == 2
    done = run("golden.py", "emulated", MODELS["small"], "-o", tmp_path / "t.safetensors")
    assert done.returncode == 0, done.stderr
    done = run("generate.py", "cpu", "--max-tokens", "2")
    assert (done.returncode, done.stderr) == (2, "generate.py: error: --offload-experts needs --backend gpu or emulated\n")
