"""Traces: what is written is what was shown, in any chunking, whole or not at all."""

import json
from pathlib import Path

import numpy as np
import pytest

import npglm
from npglm.cli import whole_file
from npglm.errors import NpglmError
from npglm.generate import Model
from npglm.trace.probes import PROBES, probe_names
from npglm.trace.record import describe_run, read_trace, recorder, write_trace
from reference.forward import forward
from reference.numerics import F32
from reference.ops import ReferenceOps

GOLDEN = Path(__file__).parent / "golden"
IDS = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]


@pytest.fixture(scope="module")
def model():
    return Model(npglm.load(GOLDEN / "small.Q2_K.gguf"), forward, ReferenceOps(F32))


def record(model, path, chunk=512, ids=IDS, **filters):
    with whole_file(path) as file:
        probe = recorder(file, model.checkpoint, ids, "f32", **filters)
        logits = model.run(model.cache(len(ids)), ids, probe, every_row=True, chunk=chunk)
        probe.finish()
    return read_trace(path), logits


def test_every_probe_is_there_with_its_shape(model, tmp_path):
    trace, logits = record(model, tmp_path / "t.safetensors")
    wanted = probe_names(model.config)
    assert set(trace) == set(wanted)
    for name, (probe, layer) in wanted.items():
        assert trace[name].shape == probe.shape(model.config, len(IDS), layer)
        assert trace[name].dtype == probe.dtype
    assert np.array_equal(trace["result_output"][-1:], logits)
    assert trace.tokens == IDS
    assert {"engine", "engine_version", "model", "model_sha256", "numerics", "rank", "world", "created_by"} <= set(
        trace.metadata
    )


def test_which_layers_have_which_probes(model):
    names = probe_names(model.config)
    assert "ffn_moe_out-3" in names
    assert "ffn_moe_out-2" not in names
    assert "ffn_gate-2" in names
    assert "ffn_gate-3" in names  # the shared expert's
    assert "indexer_q-6" in names
    assert "indexer_q-3" not in names  # shared
    assert "top_k-3" in names
    assert {name.rpartition("-")[0] or name for name in names} == set(PROBES)


@pytest.mark.parametrize("chunk", [1, 5, 11])
def test_chunks_join(model, tmp_path, chunk):
    whole, _ = record(model, tmp_path / "a.safetensors")
    parts, _ = record(model, tmp_path / "b.safetensors", chunk)
    assert list(whole) == list(parts)
    assert np.array_equal(whole["indexer_score-0"] == -np.inf, parts["indexer_score-0"] == -np.inf)
    for name in whole:
        a, b = whole[name], parts[name]
        if a.dtype == np.int32:
            assert np.array_equal(a, b), name
        else:
            finite = np.isfinite(a)
            assert np.array_equal(finite, np.isfinite(b)), name
            assert np.abs(a[finite] - b[finite]).max() <= 1e-5 * np.abs(a[finite]).max(), name


def test_top_k_is_ascending_padded_and_causal(model, tmp_path):
    trace, _ = record(model, tmp_path / "t.safetensors", patterns=["top_k"])
    for name in trace:
        for t, row in enumerate(trace[name]):
            chosen = row[row >= 0]
            assert len(chosen) == min(t + 1, model.config.indexer_top_k)
            assert (np.diff(chosen) > 0).all()
            assert chosen[-1] <= t
            assert (row[len(chosen) :] == -1).all()
    assert np.array_equal(trace["top_k-2"], trace["top_k-5"])  # layers 3 to 5 share layer 2's


def test_filters(model, tmp_path):
    trace, _ = record(model, tmp_path / "t.safetensors", layers=[2, 4], patterns=["l_out", "ffn_*-4", "result_*", "embd"])
    moe = {f"{n}-4" for n in PROBES if n.startswith("ffn_") and n != "ffn_inp"} | {"ffn_inp-4"}
    assert set(trace) == {"embd", "l_out-2", "l_out-4"} | moe
    with pytest.raises(NpglmError, match="no probe matches"):
        record(model, tmp_path / "none.safetensors", patterns=["nothing*"])
    assert not (tmp_path / "none.safetensors").exists()


def test_an_interrupted_trace_leaves_nothing(model, tmp_path):
    path = tmp_path / "t.safetensors"
    path.write_bytes(b"old")

    def interrupted():
        with whole_file(path) as file:
            recorder(file, model.checkpoint, IDS, "f32")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_missing_rows_are_an_error(model, tmp_path):
    with whole_file(tmp_path / "t.safetensors") as file:
        probe = recorder(file, model.checkpoint, IDS, "f32")
        model.run(model.cache(12), IDS[:3], probe, every_row=True)
        with pytest.raises(NpglmError, match=r"probe .*: 3 of 12 rows"):
            probe.finish()


def test_a_wrong_shape_is_an_error(model, tmp_path):
    with whole_file(tmp_path / "t.safetensors") as file:
        probe = recorder(file, model.checkpoint, IDS, "f32")
        with pytest.raises(NpglmError, match="probe embd: shape"):
            probe("embd", np.zeros((12, 7), np.float32))


def test_same_command_same_bytes(model, tmp_path):
    record(model, tmp_path / "a.safetensors")
    record(model, tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_metadata_names_no_folder(model, tmp_path):
    argv = [
        str(tmp_path / "golden.py"),
        str(tmp_path / "m.gguf"),
        f"--out={tmp_path}/t.safetensors",
        "--prompt",
        "tests/and a / b",
    ]
    words = describe_run(model.checkpoint, IDS, "f32", argv)["created_by"]
    assert words == "golden.py m.gguf --out=t.safetensors --prompt tests/and a / b"


def test_write_trace_round_trips_any_array(tmp_path):
    arrays = {
        "a": np.arange(6, dtype=np.float64).reshape(2, 3).T,
        "b#mask": np.array([1, 0], np.uint8),
        "c": np.zeros((0, 3), np.int32),
        "d": np.arange(3, dtype=np.float16),
    }
    write_trace(tmp_path / "t.safetensors", arrays, {"tokens": json.dumps([1, 2])})
    trace = read_trace(tmp_path / "t.safetensors")
    assert trace.tokens == [1, 2]
    for name, array in arrays.items():
        assert trace[name].dtype == array.dtype
        assert np.array_equal(trace[name], array)


@pytest.mark.parametrize("content", [b"", b"\x10\0\0\0\0\0\0\0{}", b"\xff" * 64, b"PK\x03\x04"])
def test_what_is_no_trace_is_refused_by_name(tmp_path, content):
    path = tmp_path / "broken.safetensors"
    path.write_bytes(content)
    with pytest.raises(NpglmError, match="broken"):
        read_trace(path)
    with pytest.raises(NpglmError, match="nowhere"):
        read_trace(tmp_path / "nowhere.safetensors")
    with pytest.raises(NpglmError, match=r"Is a directory$"):
        read_trace(tmp_path)


def test_tokens_must_be_a_list(tmp_path):
    write_trace(tmp_path / "t.safetensors", {"a": np.zeros(1, np.float32)}, {"tokens": "7"})
    trace = read_trace(tmp_path / "t.safetensors")
    with pytest.raises(NpglmError, match="no list of token ids"):
        _ = trace.tokens
