"""generate.py and golden.py as a person runs them, and the loop under them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import npglm
from npglm.errors import NpglmError
from npglm.generate import Conversation, Model, StopText, common_prefix, generate, raw_prompt
from npglm.sampler import Sampler
from npglm.tokenizer import Tokenizer
from npglm.trace.record import read_trace
from reference.forward import forward
from reference.numerics import F32
from reference.ops import ReferenceOps

GOLDEN = Path(__file__).parent / "golden"
SCRIPTS = Path(__file__).parents[1] / "scripts"
SMALL = str(GOLDEN / "small.Q2_K.gguf")


def run(script, *args, status=0, stdin=""):
    """Run a script, on the reference unless it says otherwise; returns stdout. Errors must be one line on stderr, without a traceback."""
    if script == "generate.py" and "--backend" not in args:
        args = (*args, "--backend", "reference")
    command = [sys.executable, str(SCRIPTS / script), *map(str, args)]
    done = subprocess.run(command, capture_output=True, input=stdin.encode(), timeout=120, check=False)
    stderr = done.stderr.decode()
    assert done.returncode == status, stderr
    assert "Traceback" not in stderr
    if status == 2:
        assert len(stderr.splitlines()) == 1, stderr
        assert not done.stdout
        return stderr
    run.stderr = stderr
    return done.stdout.decode("utf-8")


@pytest.fixture(scope="module")
def model():
    return Model(npglm.load(SMALL), forward, ReferenceOps(F32))


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_gguf(SMALL)


def test_json_holds_transformers_greedy_ids():
    golden = np.load(GOLDEN / "transformers.npz")
    ids = golden["ids_5"].tolist()
    # Behind eight tokens two indexer scores tie exactly and torch.topk takes the other one; test_golden_transformers.py goes on.
    out = json.loads(run("generate.py", "-m", SMALL, "--tokens", ",".join(map(str, ids)), "--max-tokens", 8, "--json"))
    assert out["prompt_ids"] == ids
    assert out["ids"] == golden["greedy_5"].tolist()[:8]
    assert out["finish"] == "length"
    assert len(out["logprobs"]) == len(out["ids"])
    assert all(p < 0 for p in out["logprobs"])
    assert out["backend"] == "reference"
    assert out["timings"].keys() == {"prompt_s", "decode_s"}


def test_stdout_is_the_text_and_stderr_the_figures():
    out = run("generate.py", "the island is", "-m", SMALL, "--max-tokens", 6)
    result = json.loads(run("generate.py", "the island is", "-m", SMALL, "--max-tokens", 6, "--json"))
    assert out.rstrip("\n") == result["text"].rstrip("\n")
    run("generate.py", "the island is", "-m", SMALL, "--max-tokens", 6)
    assert "prompt 6 tokens in" in run.stderr
    assert f"decode {len(result['ids']) - 1} tokens in" in run.stderr
    assert "backend reference f32, peak memory" in run.stderr


def test_seeded_sampling_repeats_and_differs_by_seed():
    def ids(seed):
        args = (
            "--temperature",
            1.5,
            "--top-k",
            50,
            "--top-p",
            0.95,
            "--min-p",
            0.01,
            "--seed",
            seed,
            "--json",
            "--max-tokens",
            12,
        )
        return json.loads(run("generate.py", "the", "-m", SMALL, *args))["ids"]

    assert ids(3) == ids(3)
    assert ids(3) != ids(4)


def test_trace_of_generate_is_golden_py_s(tmp_path):
    run("generate.py", "the island", "-m", SMALL, "--max-tokens", 2, "--trace", tmp_path / "a.safetensors")
    run("golden.py", SMALL, "--prompt", "the island", "-o", tmp_path / "b.safetensors")
    a, b = read_trace(tmp_path / "a.safetensors"), read_trace(tmp_path / "b.safetensors")
    assert list(a) == list(b)
    assert a.tokens == b.tokens
    assert all(np.array_equal(a[name], b[name]) for name in a)


def test_golden_stops_after_the_last_layer_asked_for(tmp_path):
    run(
        "golden.py",
        SMALL,
        "--tokens",
        "1,2,3",
        "-o",
        tmp_path / "t.safetensors",
        "--layers",
        "0-1,4",
        "--probes",
        "l_out",
        "result_*",
    )
    assert set(read_trace(tmp_path / "t.safetensors")) == {"l_out-0", "l_out-1", "l_out-4"}
    run(
        "golden.py",
        SMALL,
        "--tokens",
        "1,2,3",
        "-o",
        tmp_path / "t.safetensors",
        "--layers",
        "6",
        "--probes",
        "l_out",
        "result_*",
    )
    assert set(read_trace(tmp_path / "t.safetensors")) == {"l_out-6", "result_norm", "result_output"}


@pytest.mark.parametrize("numerics", ["f64", "ggml", "bf16"])
def test_golden_in_every_numerics(tmp_path, numerics):
    run(
        "golden.py",
        SMALL,
        "--tokens",
        "1,2,3",
        "-o",
        tmp_path / "t.safetensors",
        "--numerics",
        numerics,
        "--probes",
        "result_output",
    )
    trace = read_trace(tmp_path / "t.safetensors")
    assert trace.metadata["numerics"] == numerics
    assert trace["result_output"].dtype == (np.float64 if numerics == "f64" else np.float32)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["-m", SMALL], "either a prompt or --tokens"),
        (["x", "-m", SMALL, "--tokens", "1"], "either a prompt or --tokens"),
        (["", "-m", SMALL], "the prompt is empty"),
        (["-m", SMALL, "--tokens", "1,288"], "token id 288 is outside the vocabulary of 288"),
        (["-m", SMALL, "--tokens", "1,-1"], "token id -1 is outside"),
        (["-m", SMALL, "--tokens", "1,x"], "expected token ids"),
        (["x", "-m", "nowhere.gguf"], "nowhere.gguf"),
        (["x", "-m", str(GOLDEN / "vocab-151k.gguf")], "vocab-151k.gguf: no tensors"),
        (["x", "-m", str(GOLDEN / "tokens.json")], "tokens.json: not a GGUF file"),
        (["x", "-m", SMALL, "--max-tokens", "0"], "--max-tokens"),
        (["x", "-m", SMALL, "--temperature", "-1"], "temperature"),
        (["x", "-m", SMALL, "--top-p", "nan"], "top_p"),
        (["x", "-m", SMALL, "--ctx", "0"], "--ctx"),
        (["the island", "-m", SMALL, "--ctx", "3"], "context overflow"),
        (["x", "-m", SMALL, "--ctx", str(1 << 30)], "--ctx"),
        (["x", "-m", SMALL, "--chat"], "chat"),
        (["x", "-m", SMALL, "--system", "y"], "--system"),
        (["x", "-m", SMALL, "--backend", "cpu", "--numerics", "bf16"], "--numerics bf16 does not run on the cpu backend"),
        (["x", "-m", SMALL, "--backend", "tpu"], "--backend"),
        (["x", "-m", SMALL, "--numerics", "f16"], "--numerics"),
        (["x", "-m", SMALL, "--threads", "0"], "--threads"),
        (["x", "-m", SMALL, "--threads", "99999999999999999999"], "--threads"),
        (["-i", "-m", SMALL, "--tokens", "1"], "-i takes no --tokens"),
        (["x", "-m", SMALL, "--trace", "/nowhere/t.safetensors"], "/nowhere/t.safetensors: cannot be written"),
        (["x", "-m", SMALL, "--no-such-flag"], "--no-such-flag"),
    ],
)
def test_what_is_wrong_is_one_line(args, words):
    assert words in run("generate.py", *args, status=2)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--tokens", "1,2", "-o", "/nowhere/t.safetensors"], "/nowhere/t.safetensors: cannot be written"),
        (["--tokens", "1,2"], "-o"),
        (["-o", "t.safetensors"], "--tokens"),
        (["--tokens", "1", "-o", "t.safetensors", "--layers", "0-7"], "--layers: 7 is outside the model's 0-6"),
        (["--tokens", "1", "-o", "t.safetensors", "--layers", "3-1"], "--layers"),
        (["--tokens", "1", "-o", "t.safetensors", "--layers", "3-"], "--layers"),
        (["--tokens", "1", "-o", "t.safetensors", "--layers", "0-99999999999"], "--layers"),
        (["--tokens", "1", "-o", "t.safetensors", "--probes", "l_in"], "no probe matches l_in"),
        (["--tokens", "1", "-o", "/dev/full/x"], "/dev/full/x: cannot be written"),
    ],
)
def test_what_is_wrong_with_golden_is_one_line(args, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in run("golden.py", SMALL, *args, status=2)
    assert list(tmp_path.iterdir()) == []


def test_no_bos_unless_the_checkpoint_says_so(tokenizer):
    metadata = npglm.load(SMALL).metadata
    assert raw_prompt(tokenizer, "the") == tokenizer.encode("the")
    with_bos = Tokenizer.from_metadata(metadata | {"tokenizer.ggml.add_bos_token": True}, "x")
    assert raw_prompt(with_bos, "the<|user|>") == [with_bos.bos_id, *tokenizer.encode("the<|user|>")]
    assert len(tokenizer.encode("<|user|>")) == 1


def test_stop_text_never_shows_a_part_of_the_stop():
    stop = StopText(["END", "ENOUGH"])
    assert [stop.push(t) for t in ("a", "bE", "N", "x", " E", "NO", "UGH tail")] == ["a", "b", "", "ENx", " ", "", ""]
    assert stop.done
    assert stop.flush() == ""
    stop = StopText(["END"])
    assert stop.push("xEN") + stop.flush() == "xEN"
    assert StopText([]).push("abc") == "abc"


def test_generation_ends_at_a_stop_text_and_at_eog(model, tokenizer):
    def once(stops=(), eog=None):
        if eog is not None:
            tokenizer.eog, kept = frozenset(eog), tokenizer.eog
        try:
            return generate(model, tokenizer, model.cache(60), [5, 6, 7], Sampler(), 12, stops)
        finally:
            if eog is not None:
                tokenizer.eog = kept

    plain = once(eog=[])
    assert plain.finish == "length"
    assert len(plain.ids) == 12
    ended = once(eog=[plain.ids[3]])
    assert ended.finish == "stop"
    assert ended.ids == plain.ids[: plain.ids.index(plain.ids[3]) + 1]
    stopped = once([plain.text[4:6]], eog=[])
    assert stopped.finish == "stop"
    assert stopped.text == plain.text[: plain.text.find(plain.text[4:6])]


def test_a_second_turn_reuses_the_cache(model, tokenizer):
    cache = model.cache(40)
    first = generate(model, tokenizer, cache, [5, 6, 7, 8], Sampler(), 4)
    ids = [*first.prompt_ids, *first.ids, 30, 31]
    cache.length = min(common_prefix([*first.prompt_ids, *first.ids], ids), cache.length)
    assert cache.length == 7  # the last id was never run
    second = generate(model, tokenizer, cache, ids, Sampler(), 6)
    fresh = generate(model, tokenizer, model.cache(40), ids, Sampler(), 6)
    assert second.ids == fresh.ids
    assert second.n_cached == 7


def test_a_conversation_keeps_its_cache_and_doubles_it():
    model, tokenizer = Model(npglm.load(npglm.embedded()), forward, ReferenceOps(F32)), Tokenizer.from_gguf(npglm.embedded())
    chat = Conversation(model, tokenizer, system="Be brief.", think=False)
    texts, sizes = [], []
    for question in ("What is the capital of Italy?", "What is the capital of France?"):
        ids = chat.prompt_ids(question)
        cache = chat.cache_for(ids, 16)
        reused = cache.length
        result = generate(model, tokenizer, cache, ids, Sampler(), 16)
        fresh = generate(model, tokenizer, model.cache(len(ids) + 16), ids, Sampler(), 16)
        assert result.ids == fresh.ids
        chat.answered(result)
        texts.append(result.text)
        sizes.append((reused, cache.capacity))
    assert "Rome" in texts[0]
    assert sizes[0][0] == 0 < sizes[1][0]
    assert sizes[1][1] == 2 * sizes[0][1]
    with pytest.raises(NpglmError, match="context overflow"):
        chat.cache_for([5] * model.config.context_length, 1)


def test_a_nan_weight_is_recorded_and_then_one_line(tmp_path):
    """One NaN in a norm: golden.py writes what came of it, generate.py says that it cannot go on and still has the trace."""
    data = bytearray(Path(SMALL).read_bytes())
    tensor = npglm.load(SMALL).tensors["blk.1.ffn_norm.weight"]
    at = bytes(data).find(tensor.data.tobytes())
    data[at : at + 4] = np.float32("nan").tobytes()
    bad = tmp_path / "nan.gguf"
    bad.write_bytes(data)
    run("golden.py", bad, "--tokens", "1,2,3,4", "-o", tmp_path / "t.safetensors")
    assert np.isnan(read_trace(tmp_path / "t.safetensors")["result_output"]).all()
    assert "logits are not finite" in run(
        "generate.py", "--tokens", "1,2", "-m", bad, "--trace", tmp_path / "u.safetensors", status=2
    )
    assert (tmp_path / "u.safetensors").exists()


@pytest.mark.parametrize("script", ["golden.py", "generate.py"])
def test_outputs_never_take_the_place_of_something_else(tmp_path, script):
    """Neither the model that is read, nor a folder, a pipe or a device; a symlink's target is written, and the link stays."""
    model = tmp_path / "m.gguf"
    model.write_bytes(Path(SMALL).read_bytes())
    os.mkfifo(tmp_path / "pipe")
    out = "-o" if script == "golden.py" else "--trace"
    args = [model, "--tokens", "1,2"] if script == "golden.py" else ["-m", model, "--tokens", "1,2", "--max-tokens", 1]
    for name in (model, tmp_path, tmp_path / "pipe", "", "."):
        assert "cannot be written" in run(script, *args, out, name, status=2)
    assert model.read_bytes() == Path(SMALL).read_bytes()
    (tmp_path / "link").symlink_to(tmp_path / "t.safetensors")
    run(script, *args, out, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert read_trace(tmp_path / "t.safetensors").tokens == [1, 2]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(closed, tmp_path):
    command = (
        f"{sys.executable} {SCRIPTS / 'golden.py'} {SMALL} --tokens 1,2 -o {tmp_path}/t.safetensors --probes l_out {closed}"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert len(read_trace(tmp_path / "t.safetensors").names) == 7


def test_file_names_and_terminals_that_are_not_utf8(tmp_path):
    name = os.fsencode(tmp_path) + b"/\xff.safetensors"
    command = [sys.executable, str(SCRIPTS / "golden.py"), SMALL, "--tokens", "1,2", "--probes", "l_out", "-o", name]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0
    assert os.listdir(os.fsencode(tmp_path)) == [b"\xff.safetensors"]
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [
        sys.executable,
        str(SCRIPTS / "generate.py"),
        "\u65e5\u672c",
        "-m",
        SMALL,
        "--max-tokens",
        "8",
        "--backend",
        "reference",
    ]
    done = subprocess.run(command, capture_output=True, env=ascii_only, timeout=60, check=False)
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr


def test_a_terminated_run_leaves_nothing(tmp_path):
    ids = ",".join(str(i % 250) for i in range(20000))
    command = [sys.executable, str(SCRIPTS / "golden.py"), SMALL, "--tokens", ids, "-o", str(tmp_path / "t.safetensors")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    while not any(tmp_path.iterdir()):
        time.sleep(0.05)
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert list(tmp_path.iterdir()) == []


def test_rows_without_a_token_are_never_chosen(model, tokenizer):
    logits = model.run(model.cache(3), [5, 6, 7])[0]
    tokenizer_of_few = Tokenizer.from_gguf(SMALL)
    first = int(np.argsort(-logits)[0])
    tokenizer_of_few._tokens = tokenizer_of_few._tokens[:first]
    result = generate(model, tokenizer_of_few, model.cache(10), [5, 6, 7], Sampler(), 1)
    assert result.ids[0] == int(logits[:first].argmax())


def test_a_prompt_beyond_the_context_is_refused(tmp_path):
    ids = ",".join(["5"] * 2049)
    message = run("golden.py", npglm.embedded(), "--tokens", ids, "-o", tmp_path / "t.safetensors", status=2)
    assert "context overflow: 2049 tokens, the model's context is 2048" in message


def test_a_full_cache_is_an_error(model):
    with pytest.raises(NpglmError, match="context overflow: 4 tokens in a cache of 3"):
        model.run(model.cache(3), [1, 2, 3, 4])


def test_ctrl_c_ends_a_long_prompt_with_130_and_keeps_no_trace(tmp_path):
    ids = ",".join(str(i % 250) for i in range(20000))
    trace = tmp_path / "t.safetensors"
    command = [sys.executable, str(SCRIPTS / "generate.py"), "--tokens", ids, "-m", SMALL, "--json", "--trace", str(trace)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while not any(tmp_path.iterdir()):  # the trace has begun, so the prefill is about to
        time.sleep(0.05)
        assert process.poll() is None
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert b"Traceback" not in err
    assert re.search(rb"prompt \d{1,4} tokens in", err), err  # what was done of the 20000
    assert json.loads(out)["finish"] == "interrupt"
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_once_all_is_done_changes_nothing():
    code = "import os, signal, sys\nfrom npglm import cli\nstatus = cli.run(lambda argv: 3)\n"
    code += "os.kill(os.getpid(), signal.SIGINT)\nsys.exit(status)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (3, "")


def test_ctrl_c_while_decoding_keeps_what_there_is(model, tokenizer):
    seen = []

    def emit(text):
        seen.append(text)
        if len(seen) == 3:
            raise KeyboardInterrupt

    result = generate(model, tokenizer, model.cache(60), [5, 6, 7], Sampler(), 50, emit=emit)
    assert result.finish == "interrupt"
    assert result.text == "".join(seen)
    assert 3 <= len(result.ids) < 50


def test_a_closed_pipe_is_no_traceback():
    command = f"{sys.executable} {SCRIPTS / 'generate.py'} the -m {SMALL} --max-tokens 8 | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=60, check=False)
    assert b"Traceback" not in done.stderr


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    golden = [
        sys.executable,
        str(SCRIPTS / "golden.py"),
        SMALL,
        "--tokens",
        "1,2,3,4,5,6,7",
        "-o",
        str(tmp_path / "t.safetensors"),
    ]
    command = ["bash", "-c", 'ulimit -f 100; exec "$@"', "bash", *golden]  # files of at most 100 KiB
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.returncode == 2
    assert b"t.safetensors: cannot be written" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
    with open("/dev/full", "w") as full:
        command = [sys.executable, str(SCRIPTS / "generate.py"), "the", "-m", SMALL, "--max-tokens", "2"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=60, check=False)
    assert done.returncode == 2
    assert b"No space left on device" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("script", sorted(p.name for p in SCRIPTS.glob("*.py") if p.name not in ("backend.py",)))
def test_help(script):
    environment = os.environ | {"COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / script), "--help"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0
    assert done.stdout.startswith("usage:")
    assert not re.search(r"\(default:\s+(None|False)\)", done.stdout)
