"""scripts/bench.py as a person runs it, on a model that takes no time."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from synth import random_blocks

import npglm
from npglm.cpu import bench
from npglm.cpu.ops import CpuOps
from npglm.errors import NpglmError
from npglm.trace.bench_check import check

ROOT = Path(__file__).parents[2]
SMALL = ROOT / "tests/golden/small.Q2_K.gguf"


@pytest.mark.parametrize(
    "options",
    [
        "--offload-experts", "--kernels --backend gpu", "--kernels --faults", "--model M --kernels",
        "--no-check --backend gpu", "--threads 1 --backend gpu", "--layers 20",
    ],
)  # fmt: skip
def test_options_that_would_do_nothing_are_refused(options):
    command = [sys.executable, str(ROOT / "scripts/bench.py"), *options.split()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 2
    assert run.stderr.startswith(f"bench.py: error: {options.split()[0]} goes with --backend")
    assert run.stderr.count("\n") == 1


@pytest.mark.parametrize(("option", "takes"), [("--threads", "thread counts"), ("--depths", "cached tokens")])
def test_lists_of_numbers_say_what_they_take(option, takes):
    command = [sys.executable, str(ROOT / "scripts/bench.py"), option, "1,a"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 2
    assert run.stderr == f"bench.py: error: argument {option}: expected {takes} such as 1,2,3, found '1,a' (see --help)\n"


@pytest.mark.oracle
def test_bench_compares_with_llama_cpp(tmp_path):
    out = tmp_path / "figures.json"
    sizes = ["--prompts", "8,40", "--depths", "0,20", "--rounds", "2", "--decode", "4", "--threads", "1"]
    command = [sys.executable, ROOT / "scripts/bench.py", "--model", SMALL, *sizes, "--json", out]
    run = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr
    assert "| decode at 20 | 1 |" in run.stdout
    figures = json.loads(out.read_text())
    for what in (
        "f32: cpu against reference",
        *(f"ggml: {it} against reference, flips injected" for it in ("cpu", "llama.cpp")),
    ):
        assert max(figures["logits"][what]["relative_l2"]) <= 1e-5
        assert figures["logits"][what]["same_argmax"] == 8
    assert [row["what"] for row in figures["rows"]] == ["decode at 0", "decode at 20", "prefill of 8", "prefill of 40"]
    assert all(len(row["ours"]) == len(row["theirs"]) == 2 for row in figures["rows"])


@pytest.mark.oracle
def test_other_experts_are_no_rounding(tmp_path, monkeypatch):
    """The reference follows our choice, so that logits alone do not show what a router does wrong."""
    checkpoint, load, file = npglm.load(SMALL), CpuOps.load, SMALL.read_bytes()
    for layer in checkpoint.weights.layers:
        if hasattr(layer, "exp_probs_b"):
            bias = layer.exp_probs_b.data.tobytes()
            file = file.replace(bias, bytes(len(bias)))
    other = tmp_path / "no-bias.gguf"
    other.write_bytes(file)
    monkeypatch.setattr(CpuOps, "load", lambda self, checkpoint, progress=None: load(self, npglm.load(other)))
    with pytest.raises(NpglmError, match="f32: 8-bit steps or choices; ggml: 8-bit steps or choices"):
        check(checkpoint, 1)


@pytest.mark.oracle
@pytest.mark.parametrize(("kind", "n_tokens"), [(T.Q8_0, 1), (T.Q2_K, 1), (T.Q2_K, 16), (T.Q8_0, 64), (T.IQ3_XXS, 1)])
def test_products_are_ggmls(monkeypatch, kind, n_tokens):
    rng, lines = np.random.default_rng(3), []
    monkeypatch.setattr(bench, "KERNELS", [("gate", kind, 512, 96, n_tokens, 3)])
    [cells] = bench.measure_kernels(lambda *shape: random_blocks(*shape, rng), 1, 2, 1e9, "wall", lines.append)
    assert cells[:3] == [f"gate 512 to 96, {n_tokens} token{'s' * (n_tokens > 1)}", kind.name, "1"]
    assert float(cells[-1]) <= 1e-6
    assert len(lines) == 2  # the head, then one row
