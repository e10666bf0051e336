"""transformers recorded through hooks, and faults planted in its modules. Live: needs the extra [oracle]."""

import json

import numpy as np
import pytest

from npglm.errors import NpglmError

pytestmark = pytest.mark.oracle


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from fault_suite import model_file

    from npglm.checkpoint import Checkpoint

    return Checkpoint.open(model_file(tmp_path_factory.mktemp("torch")))


def pytest_generate_tests(metafunc):
    if "broken" in metafunc.fixturenames:
        try:
            from plant_torch import TORCH_PLANTS
        except ImportError:  # without the extra these tests are not run, but they are collected
            TORCH_PLANTS = []
        metafunc.parametrize("broken", TORCH_PLANTS, ids=lambda p: p.name)


def test_faults_in_transformers_modules(checkpoint, broken):
    from fault_suite import recording, tokens_of
    from plant_torch import record

    from npglm.trace.compare import compare

    tokens = tokens_of(min(max(9, broken.tokens), broken.most))
    report = compare(checkpoint, recording(record(checkpoint, tokens, broken), tokens))
    assert (report.guilty["op"], report.guilty["layer"]) == (broken.op, broken.layer)
    assert (report.cause["family"] in broken.families) if broken.families else report.cause is None


def test_clean_transformers(checkpoint):
    from fault_suite import recording, tokens_of
    from plant_torch import record

    from npglm.trace.compare import compare

    for n in (5, 12, 65):
        report = compare(checkpoint, recording(record(checkpoint, tokens_of(n)), tokens_of(n)))
        assert report.status == 0
        assert {o.verdict for o in report.ops if o.op != "top_k"} == {"equal"}


def test_record_torch_finds_the_eps_that_transformers_leaves_behind(golden, tmp_path, capsys):
    import record_torch
    from compare import main

    ids = ",".join(map(str, np.load(golden / "transformers.npz")["ids_12"]))
    model = str(golden / "small.Q2_K.gguf")
    assert not record_torch.main([model, "--tokens", ids, "-o", str(tmp_path / "a.safetensors")])
    assert main(["--model", model, str(tmp_path / "a.safetensors"), "--json", "-"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["guilty"] == {"op": "q_a_norm", "layer": 0, "rank": 0}
    assert report["cause"]["name"] == "norm eps 1e-06 instead of 1e-05"
    assert {o["op"] for o in report["ops"] if o["verdict"] == "wrong"} == {"q_a_norm", "kv_cmpr"}
    assert not record_torch.main([model, "--tokens", ids, "--fix-eps", "-o", str(tmp_path / "b.safetensors")])
    assert main(["--model", model, str(tmp_path / "b.safetensors")]) == 0


def test_record_torch_refuses_in_one_line(golden, tmp_path):
    import record_torch

    model = tmp_path / "m.gguf"
    model.write_bytes((golden / "small.Q2_K.gguf").read_bytes())
    with pytest.raises(NpglmError, match="token id 999 is outside the vocabulary of 288"):
        record_torch.main([str(model), "--tokens", "1,999", "-o", str(tmp_path / "t.safetensors")])
    with pytest.raises(NpglmError, match="cannot be written: it is being read"):
        record_torch.main([str(model), "--tokens", "1,2", "-o", str(model)])


def test_the_recorder_clones_keeps_the_first_call_and_slices(tmp_path):
    import torch

    from npglm.trace.formats.names import read_names
    from npglm.trace.record import read_trace
    from npglm.trace.torch_record import torch_recorder

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up = torch.nn.Linear(3, 8, bias=False)

        def forward(self, x):
            y = self.gate_up(x)
            kept = y.clone()
            y.zero_()  # as a fused op that works in place
            return kept

    model = torch.nn.ModuleDict({"0": Block(), "1": Block()})
    (tmp_path / "t.toml").write_text(
        "[[ffn_gate]]\nmodule = '(?P<layer>\\d+)\\.gate_up'\ncolumns = [0.0, 0.5]\n[ffn_up]\nmodule = '(?P<layer>\\d+)\\.gate_up'\ncolumns = [0.5, 1.0]\n"
    )
    x = torch.randn(1, 5, 3)
    with torch.no_grad(), torch_recorder(model, read_names(tmp_path / "t.toml")) as recorder:
        outputs = [model[n](x) for n in ("0", "1")]
        model["0"](torch.randn(1, 1, 3))
    recorder.save(tmp_path / "o.r1.safetensors", [1, 2, 3, 4, 5], rank=1, world=2, engine="mine")
    trace = read_trace(tmp_path / "o.r1.safetensors")
    assert np.array_equal(trace["ffn_gate-0"], outputs[0][0, :, :4].numpy())
    assert np.array_equal(trace["ffn_up-1"], outputs[1][0, :, 4:].numpy())
    assert trace.metadata["rank"] == "1"
    assert not model["0"].gate_up._forward_hooks
