"""Live llama.cpp against the reference, op by op."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from llamacpp_local import MATMUL, TILE, Layer, Recorded, exact_attention, judge, table
from shapes import LENGTHS

import npglm
from npglm.trace.llamacpp import engine_version, record_nodes
from npglm.trace.metrics import errors
from npglm.trace.probes import probe_names
from npglm.trace.record import read_trace
from reference.numerics import F32, GGML
from reference.ops import ReferenceOps

pytestmark = pytest.mark.oracle
ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden"


def absent(checkpoint) -> set[str]:
    """Probes for which llama.cpp has no node."""
    c, w = checkpoint.config, checkpoint.weights
    found = {"ffn_moe_weights_scaled"} if c.expert_scale == 1 else set()
    found |= set() if c.expert_norm else {"ffn_moe_weights_norm"}
    return found | ({"ffn_moe_probs_biased"} if w.layers[-1].exp_probs_b is None else set())


@pytest.mark.parametrize("flash", [True, False], ids=["flash", "no-flash"])
def test_every_op_from_llamacpps_own_inputs(model, prompt, flash):
    seed, checkpoint, ops = model.seed, model.checkpoint, ReferenceOps(GGML)
    for n in LENGTHS[seed]:
        tokens = prompt(checkpoint, n)
        recorded = Recorded(checkpoint, tokens, record_nodes(checkpoint, tokens, threads=2, flash_attn=flash))
        assert recorded.flash == flash
        expected = {name: v for name, v in probe_names(checkpoint.config).items() if v[0].name not in absent(checkpoint)}
        assert set(recorded.arrays) == set(expected)
        for name, (probe, layer) in expected.items():
            assert recorded.arrays[name].shape == probe.shape(checkpoint.config, n, layer), name
        results = judge(recorded, ops, weights=model.weights)
        print(f"\nseed {seed}, {n} tokens, {'flash attention' if flash else 'no flash attention'}\n{table(results)}")
        for r in results:
            for flip in r.flips + r.ties:
                print(f"{r.probe}-{r.layer}: {flip}")
        for result in results:
            assert result.ok, result
        exact = [distance(recorded, layer, model.weights) for layer in range(checkpoint.config.n_layers)]
        print(f"attention from f64: {min(exact):.1e} to {max(exact):.1e}")
        for e in exact:
            if n > 1:  # f16 arithmetic, which flash attention leaves from 64 tokens on
                assert (e <= 1e-6) if flash and n >= TILE else (5e-5 <= e <= 1e-3)


def distance(recorded: Recorded, layer: int, weights) -> float:
    """Of attention from f64 over the f16 cache: relative L2."""
    at = Layer(recorded, layer, ReferenceOps(GGML), weights)
    return errors(at.kqv, exact_attention(at)).rms


def test_f32_would_be_seen(model, prompt):
    tokens = prompt(model.checkpoint, 9)
    recorded = Recorded(model.checkpoint, tokens, record_nodes(model.checkpoint, tokens))
    results = judge(recorded, ReferenceOps(F32), only=(MATMUL,), weights=model.weights)
    results = [r for r in results if r.weight_type not in ("F32", "F16", "BF16")]
    assert results or model.seed == 4  # floats only
    for result in results:
        assert result.error >= 1e-3, result


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """(trace, nodes of the same prompt in this process) of one run of scripts/record_llamacpp.py"""
    out = tmp_path_factory.mktemp("script") / "out.safetensors"
    model, tokens = GOLDEN / "small.Q2_K.gguf", np.load(GOLDEN / "llamacpp.npz")["ids"].tolist()
    words = [model, "--tokens", ",".join(map(str, tokens)), "-o", out, "--threads", "1"]
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/record_llamacpp.py", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert done.stderr == "out.safetensors: 211 probes, 347 other nodes of 12 tokens\n"
    return read_trace(out), record_nodes(npglm.load(model), tokens)


def test_the_script_records_every_node(script):
    trace, nodes = script
    golden = np.load(GOLDEN / "llamacpp.npz")
    keys = [key for key in golden.files if "|" in key]
    assert [n.label for n in nodes] == [key.split("|")[2] for key in keys]
    assert [n.shape for n in nodes] == [golden[key].shape for key in keys]
    recorded = Recorded(npglm.load(GOLDEN / "small.Q2_K.gguf"), golden["ids"], nodes)
    names = set(recorded.arrays)
    kept = {m.node.order for m in recorded.mapped if m.whole}
    names |= {f"ggml|{n.order:05}|{n.op}|{n.label}" for n in nodes if n.order not in kept}
    assert set(trace) == names
    for node in nodes:
        if node.order not in kept:
            array = trace[f"ggml|{node.order:05}|{node.op}|{node.label}"]
            assert array.dtype == node.value.dtype
            assert np.array_equal(array, node.value, equal_nan=True), node
    for name, array in recorded.arrays.items():
        assert np.array_equal(trace[name], array), name
    for result in judge(recorded, ReferenceOps(GGML)):
        assert result.ok, result


def test_the_scripts_metadata(script):
    trace, _ = script
    checkpoint = npglm.load(GOLDEN / "small.Q2_K.gguf")
    tokens = np.load(GOLDEN / "llamacpp.npz")["ids"].tolist()
    assert trace.metadata == {
        "tokens": json.dumps(tokens),
        "engine": "llama.cpp",
        "engine_version": engine_version(),
        "model": checkpoint.config.name,
        "model_sha256": checkpoint.sha256,
        "numerics": "ggml",
        "rank": "0",
        "world": "1",
        "created_by": f"record_llamacpp.py small.Q2_K.gguf --tokens {','.join(map(str, tokens))} -o out.safetensors --threads 1",
    }
    assert trace.tokens == tokens


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["small.Q2_K.gguf", "--tokens", "1,999"], "token id 999 is outside the vocabulary of 288"),
        (["small.Q2_K.gguf", "--tokens", ""], "argument --tokens: expected token ids such as 1,2,3, found '' (see --help)"),
        (["none.gguf", "--tokens", "1"], "No such file or directory"),
        (["vocab-151k.gguf", "--tokens", "1"], "no tensors"),
        (["small.Q2_K.gguf", "--tokens", "1", "-o", "nowhere/x"], "nowhere/x: cannot be written: No such file or directory"),
        (["small.Q2_K.gguf", "--tokens", "1", "--threads", "0"], "--threads: expected 1 to 512, found 0"),
    ],
)
def test_bad_input_is_one_line(words, message, tmp_path):
    out = [] if "-o" in words else ["-o", tmp_path / "x.safetensors"]
    command = [sys.executable, ROOT / "scripts/record_llamacpp.py", *words, *out]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=GOLDEN)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("record_llamacpp.py: error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kib", [1, 400])
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, kib):
    """In the callback, or afterwards."""
    out = tmp_path / "x.safetensors"
    command = [sys.executable, ROOT / "scripts/record_llamacpp.py", GOLDEN / "small.Q2_K.gguf", "--tokens", "1,2,3", "-o", out]
    words = ["bash", "-c", f'ulimit -f {kib}; exec "$@"', "bash", *command]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stderr == f"record_llamacpp.py: error: {out}: cannot be written: File too large\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_what_happens_in_the_callback_comes_out(error):
    """Ctrl-C or a full disk: ctypes alone would swallow it."""
    seen = []

    def keep(array):
        seen.append(array)
        if len(seen) == 20:
            raise error
        return array

    with pytest.raises(error):
        record_nodes(npglm.load(GOLDEN / "small.Q2_K.gguf"), [1, 2, 3], keep=keep)
    assert len(seen) == 20


def test_llamacpp_giving_up_is_one_line(tmp_path):
    """ggml aborts the process on a failed assertion, here on an indexer whose keys no Hadamard matrix fits."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from synth import write_model; import npglm; "
        "from npglm.trace.llamacpp import record_nodes; "
        "record_nodes(npglm.load(write_model(sys.argv[2], indexer_dim=96)), [1, 2])"
    )
    words = [sys.executable, "-c", code, ROOT / "tests", tmp_path / "m.gguf"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: llama.cpp gave up: ")
    assert done.stderr.count("\n") == 1


def test_ctrl_c_leaves_no_trace(tmp_path):
    """The signal may arrive while Python is in a callback, where an exception would be lost."""
    script, model = (
        Path(__file__).parents[2] / "scripts" / "record_llamacpp.py",
        Path(__file__).parents[1] / "golden" / "small.Q2_K.gguf",
    )
    ids = ",".join(str(i % 250) for i in range(250))
    for delay in (0.3, 0.7):
        command = [sys.executable, str(script), str(model), "--tokens", ids, "-o", str(tmp_path / "t.safetensors")]
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        while not any("llama" in line and ".so" in line for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines()):
            time.sleep(0.02)  # until llama.cpp is loaded
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
        assert b"Traceback" not in stderr
        assert process.returncode in (0, 130)
        assert (tmp_path / "t.safetensors").exists() == (process.returncode == 0)
        if process.returncode == 0:
            assert b"211 probes" in stderr
            (tmp_path / "t.safetensors").unlink()
