"""Readers and what is wrong with files: every hostile file ends in one sentence that names it."""

import json
import pickle
import signal

import numpy as np
import pytest
from compare import main  # scripts/compare.py

from npglm import cli
from npglm.errors import NpglmError
from npglm.trace.formats.arrays import named, read_npz
from npglm.trace.formats.names import read_names
from npglm.trace.formats.probe_lines import read_probe_lines
from npglm.trace.formats.recordings import open_engine
from npglm.trace.record import write_trace
from npglm.trace.recording import SHARED, Recording


def test_probe_lines_give_a_trace_per_rank(tmp_path):
    path = tmp_path / "probes.log"
    path.write_text(
        "INFO 11-29 worker.py r0 ffn_gate-0 SUM 10.5 width 4 head= 1.0 -2.5 3.0 tail= 0.5 shape=(2, 4)\n"
        "noise\nr1 ffn_gate-0 SUM -3 shape=(2, 4) head=[1, 2]\nr0 ffn_gate-0 SUM 99 shape=(2, 4)\nr0 qkv_lora-3 SUM 1 width 6\n"
    )
    first, second = read_probe_lines(path)
    assert first["ffn_gate-0"].tolist() == [[1, -2.5, 3, 0], [0, 0, 0, 0.5]]
    assert first["ffn_gate-0#known"].tolist() == [[1, 1, 1, 0], [0, 0, 0, 1]]
    assert first["ffn_gate-0#sum"].tolist() == [10.5]  # the first prefill's
    assert second["ffn_gate-0#known"].sum() == 2
    assert first["q_a-3"].shape == (1, 6)
    assert (first.metadata["rank"], second.metadata["rank"], first.metadata["world"]) == ("0", "1", "2")


def test_a_name_table_maps_slices_scales_and_reorders(tmp_path):
    (tmp_path / "t.toml").write_text(
        "[ffn_up]\nmodule = 'l(?P<layer>\\d+)/gu'\ncolumns = [0.5, 1.0]\nscale = 2.0\n"
        "[q_pe]\nmodule = 'l(?P<layer>\\d+)/qpe'\naxes = 'H T P'\n[l_out]\nmodule = 'l(?P<layer>\\d+)/in'\noffset = -1\n"
    )
    arrays = {
        "l2/gu": np.arange(12.0).reshape(1, 2, 6),
        "l2/qpe": np.arange(24.0).reshape(3, 2, 4),
        "l2/in": np.ones((2, 5)),
        "x": np.ones(1),
    }
    trace = named(tmp_path / "a.npz", arrays, read_names(tmp_path / "t.toml"))
    assert trace["ffn_up-2"].tolist() == [[6, 8, 10], [18, 20, 22]]
    assert trace["q_pe-2"].shape == (2, 3, 4)
    assert trace["q_pe-2"][1, 2].tolist() == [20, 21, 22, 23]
    assert trace["l_out-1"].shape == (2, 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[nonsense]\nmodule = 'x'\n", "no probe"),
        ("[q_a]\nmodul = 'x'\n", "needs module"),
        ("[q_a]\nmodule = 'x('\n", "q_a"),
        ("[q_a]\nmodule = 'x'\n", "layer"),
        ("[q_a", "t.toml"),
    ],
)
def test_a_wrong_name_table_is_named(tmp_path, text, message):
    (tmp_path / "t.toml").write_text(text)
    with pytest.raises(NpglmError, match=message):
        read_names(tmp_path / "t.toml")


@pytest.mark.parametrize("name", ["transformers", "vllm"])
def test_shipped_name_tables_read(name):
    probes = {p.probe for p in read_names(name)}
    assert {"embd", "attn_norm", "q_a", "kqv_out", "ffn_gate", "ffn_up", "l_out", "result_output"} <= probes


class Bomb:
    def __reduce__(self):
        return (exec, ("raise SystemExit('code in the file ran')",))


def hostile(kind: str, folder, golden) -> str:
    """Write the file; returns what its error must say."""
    path = folder / {
        "pickle": "x.pkl",
        "pt": "x.pt",
        "object npz": "x.npz",
        "bad npz": "x.npz",
        "bad trace": "x.safetensors",
    }.get(kind, "x.txt")
    if kind == "empty":
        path.write_bytes(b"")
        return "x.txt: the file is empty"
    if kind in ("pickle", "pt"):
        path.write_bytes(pickle.dumps({"embd": Bomb()}, protocol=2))
        return "pickles are not read" if kind == "pickle" else "weights_only|torch is not installed"
    if kind == "object npz":
        np.savez(path, ids=np.array([Bomb()], object))
        return "x.npz"
    if kind == "bad npz":
        path.write_bytes((golden / "transformers.npz").read_bytes()[:5000])
        return "x.npz: not an .npz"
    if kind == "bad trace":
        path.write_bytes(b"\xff" * 64)
        return "x.safetensors: not a trace"
    if kind == "other text":
        path.write_text("hello\n" * 50)
        return "neither llama-eval-callback"
    if kind == "binary":
        path.write_bytes(bytes(range(256)) * 20)
        return "neither a trace nor text"
    if kind == "another model":
        text = (golden / "eval-callback.txt").read_text()
        path.write_text(text.replace("{256, 5", "{384, 5"))
        return "embd|another model|printed"
    if kind == "not our graph":
        path.write_text("ggml_debug: conv-0 = (f32) IM2COL(a{1, 1, 1, 1}, }) = {4, 1, 1, 1}\n[[[1, 2, 3, 4]]]\n")
        return "none of a glm-dsa model's ops"
    assert kind == "mixed runs"
    text = (golden / "eval-callback.txt").read_text()
    path.write_text(text.replace("tokens = 5", "tokens = 7").replace("I   269\n", "I   269\n0.0.0.0 I   1\n0.0.0.0 I   2\n", 1))
    return "no graph of 7 tokens|two runs"


KINDS = [
    "empty",
    "pickle",
    "pt",
    "object npz",
    "bad npz",
    "bad trace",
    "other text",
    "binary",
    "another model",
    "not our graph",
    "mixed runs",
]


def status_of(path, golden) -> int:
    """Of compare.py, run here: Ctrl-C works on."""
    try:
        return cli.run(lambda argv: main(["--model", str(golden / "small.Q2_K.gguf"), str(path)]))
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_files_end_in_one_line_and_status_2(tmp_path, golden, capsys, kind):
    message = hostile(kind, tmp_path, golden)
    path = next(tmp_path.iterdir())
    status = status_of(path, golden)
    out, err = capsys.readouterr()
    assert status == 2, out
    assert err.count("\n") == 1
    assert any(part in err for part in message.split("|")), err


def trace_file(path, golden, **metadata):
    z = np.load(golden / "transformers.npz")
    write_trace(
        path, {"embd": z["hidden_5"][0], "l_out-0": z["hidden_5"][1]}, {"tokens": json.dumps(z["ids_5"].tolist()), **metadata}
    )


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"model_sha256": "0" * 64}, "another model"),
        ({"tokens": "[1, 2, 3000, 4, 5]"}, "outside the model's vocabulary"),
        ({"tokens": "five"}, "not a JSON list"),
        ({"tokens": "[]"}, "empty"),
        ({"rank": "two"}, "rank"),
    ],
)
def test_identity_comes_before_any_tensor(tmp_path, golden, capsys, metadata, message):
    trace_file(tmp_path / "t.safetensors", golden, **metadata)
    assert status_of(tmp_path / "t.safetensors", golden) == 2
    assert message in capsys.readouterr().err


def test_two_ranks_of_other_runs_are_no_engine(tmp_path, golden):
    trace_file(tmp_path / "a.safetensors", golden, rank="0")
    trace_file(tmp_path / "b.safetensors", golden, rank="1", tokens="[1, 2, 3, 4, 5]")
    with pytest.raises(NpglmError, match="not one run"):
        open_engine([tmp_path])
    for key, what in SHARED.items():
        trace_file(tmp_path / "a.safetensors", golden, rank="0", **{key: "2"})
        trace_file(tmp_path / "b.safetensors", golden, rank="1", **{key: "3"})
        with pytest.raises(NpglmError, match=rf"^b\.safetensors is of {what} than a\.safetensors; they are not one run$"):
            open_engine([tmp_path])
    trace_file(tmp_path / "b.safetensors", golden, rank="0")
    with pytest.raises(NpglmError, match=r"^a\.safetensors and b\.safetensors both say that they are rank 0$"):
        open_engine([tmp_path / "a.safetensors", tmp_path / "b.safetensors"])


def test_a_missing_rank_is_named(tmp_path, golden, capsys):
    for rank in "02":
        trace_file(tmp_path / f"{rank}.safetensors", golden, rank=rank, world="3")
    assert status_of(tmp_path, golden) == 2
    assert "0.safetensors, 2.safetensors: rank 1 of 3 is missing" in capsys.readouterr().err


def test_without_a_model_exactly_two(golden):
    with pytest.raises(NpglmError, match="exactly two"):
        main([str(golden / "origin" / "llama.txt")])


def test_top_k_padding_is_dropped_in_whatever_form():
    from npglm.trace.recording import ArrayTrace

    recorded = np.array([[0, 5, 3], [1, 0, 9], [2, -1, 0]])
    joined = Recording([ArrayTrace({"top_k-0": recorded}, {}, "x")]).joined("top_k-0", (3, 3))
    assert joined.whole.values.tolist() == [[0, -1, -1], [0, 1, -1], [0, 2, -1]]


def test_npz_runs_are_recognised_by_their_keys(golden, tmp_path):
    assert [t.source for t in read_npz(golden / "transformers.npz")] == [f"transformers.npz[{n}]" for n in (5, 12, 100)]
    np.savez(tmp_path / "o.npz", something=np.ones(3))
    with pytest.raises(NpglmError, match="--names"):
        read_npz(tmp_path / "o.npz")
