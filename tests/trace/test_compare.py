"""The report: its JSON, verdicts on single ops, partly known arrays."""

import json

import numpy as np
import pytest
from compare import main  # scripts/compare.py

from npglm.cache import Cache
from npglm.errors import NpglmError
from npglm.trace.compare import compare
from npglm.trace.graph import Model, run
from npglm.trace.probes import Keep
from npglm.trace.record import write_trace
from npglm.trace.recording import ArrayTrace, Recording
from reference.forward import forward
from reference.numerics import F32
from reference.ops import ReferenceOps

TOKENS = [116, 257, 266, 108, 269, 7, 33, 90, 12, 200, 41]


@pytest.fixture(scope="module")
def own(small):
    """The reference's own forward pass, probed."""
    ops, keep = ReferenceOps(F32), Keep()
    pos = np.arange(len(TOKENS), dtype=np.int32)
    forward(ops.load(small), small.config, Cache(small.config, len(TOKENS), ops), np.array(TOKENS), pos, ops, keep)
    return keep.seen


def judged(small, arrays):
    return compare(small, Recording([ArrayTrace(arrays, {"tokens": json.dumps(TOKENS)}, "x")]))


def test_the_graph_of_ops_is_the_forward_pass(small, own):
    """Every step from the forward pass's own inputs gives its own output, bit for bit: the table is reference/forward.py."""
    model = Model(small, TOKENS)
    steps = list(model.steps())
    assert [s.name for s in steps] == list(own)
    for step in steps:
        made = run(step, model.place(step.layer, F32), [own[n] for n in step.inputs])[0]
        assert np.array_equal(made, own[step.name]), step.name


def test_our_own_trace_is_equal(small, own):
    report = judged(small, own)
    assert report.verdict == "equal"
    assert report.status == 0
    assert len(report.ops) == len(own)


def test_what_is_read_is_not_overwritten(own, tmp_path, golden):
    model, trace = tmp_path / "m.gguf", tmp_path / "t.safetensors"
    model.write_bytes((golden / "small.Q2_K.gguf").read_bytes())
    write_trace(trace, own, {"tokens": json.dumps(TOKENS)})
    before = {path: path.read_bytes() for path in (model, trace)}
    for words in (
        ["--model", model, tmp_path, "--html", model],
        ["--model", model, tmp_path, "--json", trace],
        [trace, trace, "--json", trace],
    ):
        with np.errstate(all="ignore"), pytest.raises(NpglmError, match="cannot be written: it is being read"):
            main([str(word) for word in words])
    assert {path: path.read_bytes() for path in (model, trace)} == before


def test_the_json_has_the_promised_keys(small, own, tmp_path, golden, capsys):
    broken = dict(own) | {"ffn_up-1": own["ffn_up-1"] * 2}
    write_trace(tmp_path / "t.safetensors", broken, {"tokens": json.dumps(TOKENS), "engine": "mine"})
    argv = [
        "--model",
        str(golden / "small.Q2_K.gguf"),
        str(tmp_path / "t.safetensors"),
        "--json",
        "-",
        "--html",
        str(tmp_path / "p.html"),
    ]
    assert main(argv) == 1
    report = json.loads(capsys.readouterr().out)
    assert {"identity", "verdict", "first_divergence", "guilty", "cause", "ops", "notes"} <= set(report)
    assert report["guilty"] == {"op": "ffn_up", "layer": 1, "rank": 0}
    assert report["first_divergence"]["op"] == "ffn_up"
    assert {"name", "residual", "runner_up", "baseline"} <= set(report["cause"])
    assert report["cause"]["name"] == "times 2"
    assert report["cause"]["baseline"] == pytest.approx(0.5, rel=0.01) or report["cause"]["baseline"] == pytest.approx(
        1, rel=0.01
    )
    for op in report["ops"]:
        assert {"op", "layer", "rank", "verdict", "err_chained", "err_local", "bound", "reason"} <= set(op)
    page = (tmp_path / "p.html").read_text()
    assert "ffn_up-1" in page
    assert "http" not in page  # nothing is loaded from elsewhere


def test_one_ops_nan_or_shape_is_that_ops_verdict_and_the_rest_is_judged(small, own):
    nan = dict(own)
    nan["kv_cmpr-2"] = own["kv_cmpr-2"].copy()
    nan["kv_cmpr-2"][4, 7] = np.nan
    report = judged(small, nan)
    assert report.guilty == {"op": "kv_cmpr", "layer": 2, "rank": 0}
    assert "1 values are NaN" in report.guilty_op.reason
    shape = dict(own) | {"kv_cmpr-2": own["kv_cmpr-2"][:, :-1]}
    report = judged(small, shape)
    assert [o.name for o in report.ops if o.verdict == "wrong"] == ["kv_cmpr-2"]
    assert "shape [11, 63], expected [11, 64]" in report.guilty_op.reason


def test_scores_of_nan_are_a_finding(small, own):
    broken = dict(own)
    broken["indexer_score-1"] = own["indexer_score-1"].copy()
    broken["indexer_score-1"][9, 2] = np.nan
    assert judged(small, broken).guilty == {"op": "indexer_score", "layer": 1, "rank": 0}


def test_only_output_rows_on_the_last_layer(small, own):
    last = small.config.n_layers - 1
    cut = {
        n: a[-1:] if n in (f"ffn_inp-{last}", f"l_out-{last}", "result_norm", "result_output") else a for n, a in own.items()
    }
    assert judged(small, cut).verdict == "equal"
    cut["l_out-6"] = cut["l_out-6"] * 1.01
    assert judged(small, cut).guilty == {"op": "l_out", "layer": 6, "rank": 0}


def test_unknown_values_count_for_nothing_and_a_sum_counts(small, own):
    known = np.zeros(own["ffn_gate-0"].shape, np.uint8)
    known[:, :3] = 1
    part = dict(own) | {"ffn_gate-0": own["ffn_gate-0"] * known, "ffn_gate-0#known": known}
    assert judged(small, part).verdict == "equal"
    part["ffn_gate-0#sum"] = np.array([own["ffn_gate-0"].sum(dtype=np.float64)])
    assert judged(small, part).verdict == "equal"
    part["ffn_gate-0#sum"] = part["ffn_gate-0#sum"] + 40
    report = judged(small, part)
    assert report.guilty == {"op": "ffn_gate", "layer": 0, "rank": 0}
    assert "sum" in report.guilty_op.reason


def test_a_wide_span_still_convicts_a_layer(small, own):
    few = {n: a for n, a in own.items() if n == "embd" or n.startswith("l_out") or n == "result_output"}
    assert judged(small, few).verdict == "equal"
    few["l_out-4"] = few["l_out-3"] + (few["l_out-4"] - few["l_out-3"]) * 1.02
    report = compare(small, Recording([ArrayTrace(few, {"tokens": json.dumps(TOKENS)}, "x")]), causes=False)
    assert (report.guilty["op"], report.guilty["layer"]) == ("l_out", 4)
    assert "ffn_moe_down-4" in report.guilty_op.span


def test_short_prompts_say_what_they_cannot_show(small, own):
    short = {n: a[:5] for n, a in own.items() if n in ("embd", "attn_norm-0")}
    report = compare(small, Recording([ArrayTrace(short, {"tokens": json.dumps(TOKENS[:5])}, "x")]))
    assert "indexer faults not exercised: needs more than top_k = 8 tokens, has 5" in report.notes


def test_token_ids_come_from_the_embedding_where_nothing_else_has_them(small, own):
    report = compare(small, Recording([ArrayTrace({"embd": own["embd"], "attn_norm-0": own["attn_norm-0"]}, {}, "x")]))
    assert report.identity["tokens"] == TOKENS


def test_without_trace_arrays_nothing_is_comparable(small):
    assert compare(small, Recording([ArrayTrace({"lm_loss": np.ones(3)}, {"tokens": "[1, 2]"}, "x")])).status == 2


def bf16(x):
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) + 0x8000 & np.uint32(0xFFFF0000)).view(np.float32)


def first_two_layers(own, ffn_out):
    """A trace of two layers whose last op but one made `ffn_out`."""
    kept = {n: a for n, a in own.items() if n == "embd" or n.endswith(("-0", "-1"))}
    return kept | {"ffn_out-1": ffn_out, "l_out-1": own["ffn_inp-1"] + ffn_out}


def test_sums_kept_in_bf16_on_one_op_are_precision_by_the_size_of_that_very_sum(small, own):
    """Not reproducible to the digit by any hypothesis: the order of the sum is the engine's own."""
    x, w = own["ffn_swiglu-1"], small.weights.layers[1].ffn_down.decode()
    total = np.zeros((len(x), len(w)), np.float32)
    for start in range(0, x.shape[1], 64):
        total = bf16(total + x[:, start : start + 64] @ w[:, start : start + 64].T)
    report = judged(small, first_two_layers(own, total))
    assert (report.verdict, report.guilty["op"]) == ("precision", "ffn_out")
    assert report.guilty_op.reason.startswith("bf16: noise")


def test_an_error_of_that_size_in_a_few_columns_is_wrong(small, own):
    wrong = own["ffn_out-1"].copy()
    wrong[:, 5:9] *= 1.004
    report = judged(small, first_two_layers(own, wrong))
    assert (report.verdict, report.guilty["op"]) == ("wrong", "ffn_out")
    assert "columns 5-8 of 256" in report.guilty_op.structure
