"""What llama.cpp recorded (golden/llamacpp.npz): its graph as our probes, and each op recomputed from llama.cpp's own inputs."""

import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from llamacpp_local import CHOICE, MATMUL, Layer, Recorded, attention_as_llamacpp, exact_attention, judge, table

import npglm
from npglm.errors import NpglmError
from npglm.trace.formats.llamacpp import Node, map_graph, split_graphs
from npglm.trace.inject import flips
from npglm.trace.metrics import errors
from npglm.trace.probes import PROBES, probe_names
from reference.numerics import F32, GGML
from reference.ops import ReferenceOps

GOLDEN = Path(__file__).parent / "golden"
OPS = {  # GGML_OP's numbers in the file, from golden/README.md
    2: "ADD", 7: "MUL", 8: "DIV", 15: "SUM_ROWS", 22: "CONCAT", 24: "NORM", 25: "RMS_NORM", 29: "MUL_MAT", 30: "MUL_MAT_ID", 32: "SCALE",
    35: "CONT", 36: "RESHAPE", 37: "VIEW", 38: "PERMUTE", 40: "GET_ROWS", 42: "SET_ROWS", 48: "ROPE", 50: "CLAMP", 69: "ARGSORT",
    70: "TOP_K", 73: "FILL", 74: "FLASH_ATTN_EXT", 87: "LIGHTNING_INDEXER", 91: "UNARY", 100: "GLU",
}  # fmt: skip
HEAD = re.compile(r"common_debug_cb_eval: *(?P<label>.*?) = \(\w+\) +(?P<op>\w+)\(.*\) = \{(?P<ne>[\d, ]+)\}")


@cache
def checkpoint():
    return npglm.load(GOLDEN / "small.Q2_K.gguf")


@cache
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / "llamacpp.npz"))


@cache
def nodes() -> tuple[Node, ...]:
    parts = ((key.split("|"), value) for key, value in golden().items() if "|" in key)
    return tuple(Node(int(order), OPS[int(op)], label, value.shape, value) for (order, op, label), value in parts)


@cache
def text_nodes(name: str) -> tuple[Node, ...]:
    """Order, op, label and shape from the heads of a text dump."""
    heads = [HEAD.match(line) for line in (GOLDEN / name).read_text().splitlines()]
    heads = [head for head in heads if head]
    shapes = [tuple(int(n) for n in reversed(head["ne"].split(","))) for head in heads]
    return tuple(Node(i, h["op"], h["label"].lstrip(), shape) for i, (h, shape) in enumerate(zip(heads, shapes, strict=True)))


@cache
def recorded() -> Recorded:
    return Recorded(checkpoint(), golden()["ids"], list(nodes()))


@cache
def ops(num) -> ReferenceOps:
    return ReferenceOps(num)


@cache
def layer(index: int) -> Layer:
    return Layer(recorded(), index, ops(GGML), ops(GGML).load(checkpoint()))


def full_layers() -> list[int]:
    return [i for i, full in enumerate(checkpoint().config.full) if full]


# --- the mapping ------------------------------------------------------------------------------------------------------------


def test_every_probe_is_found_with_its_shape():
    config, n = checkpoint().config, len(golden()["ids"])
    expected = probe_names(config)
    assert {m.name for m in recorded().mapped} == set(expected)
    assert len(recorded().mapped) == len(expected)
    for m in recorded().mapped:
        probe, index = expected[m.name]
        array = recorded().arrays[m.name]
        assert (m.probe, m.layer, m.rows) == (probe, index, None)
        assert array.shape == m.shape == probe.shape(config, n, index), m.name
        assert array.dtype == probe.dtype
        assert array.flags.c_contiguous
        if m.whole:
            assert np.array_equal(np.sort(array, axis=None), np.sort(m.node.value, axis=None)), m.name
    assert {m.probe.name for m in recorded().mapped if not m.whole} == {"indexer_score", "top_k"}
    assert np.array_equal(recorded().arrays["result_output"], golden()["logits_all"])


def test_labels_that_mislead():
    by_name = {m.name: m.node.order for m in recorded().mapped}
    label = {node.order: node.label for node in nodes()}
    assert label[195] == "top_k-5"  # made by layer 2
    assert by_name["top_k-2"] == 196
    assert by_name["top_k-5"] == 399
    assert [by_name[n] for n in ("q_a-0", "q_a_norm-0", "kqv-0", "attn_out-0")] == [12, 14, 58, 64]


@pytest.mark.parametrize("name", ["eval-callback.txt", "eval-callback-nofa.txt"])
def test_text_dumps_map_too(name):
    """With and without flash attention; the last layer has the output row only."""
    config, n = checkpoint().config, 5
    mapped = {m.name: m for m in map_graph(text_nodes(name))}
    assert set(mapped) == set(probe_names(config))
    one_row = {m.probe.name for m in mapped.values() if m.rows is not None}
    behind_attention = {p for p in PROBES if p.startswith(("ffn_", "result_"))} | {"l_out"}
    assert one_row == behind_attention
    for key, m in mapped.items():
        probe, index = probe_names(config)[key]
        assert m.rows in (None, (n - 1,))
        assert m.rows is None or index in (None, config.n_layers - 1)
        assert m.shape[1:] == probe.shape(config, n, index)[1:], key
    flash = name == "eval-callback.txt"
    assert (mapped["kqv-3"].node.op, mapped["kqv-3"].token_axis) == (("FLASH_ATTN_EXT", 1) if flash else ("MUL_MAT", 2))


def test_a_filtered_dump_maps_what_it_holds():
    wanted = re.compile(r"kqv_out|ffn_gate|qr|ffn_moe_topk|top_k")  # without attn_norm, which opens a layer
    kept = [node for node in nodes() if wanted.match(node.label)]
    mapped = {m.name: m.node.order for m in map_graph(kept)}
    full = {m.name: m.node.order for m in recorded().mapped}
    assert {name.split("-")[0] for name in mapped} == {"kqv_out", "ffn_gate", "q_a", "q_a_norm", "ffn_moe_topk", "top_k"}
    assert all(full[name] == order for name, order in mapped.items())


def test_masks_follow_their_values():
    rng = np.random.default_rng(5)
    for m in recorded().mapped:
        known = rng.random(m.node.shape) < 0.7
        values, mask = m.take(np.where(known, m.node.value, 0), known)
        assert values.shape == mask.shape == m.shape
        truth = recorded().arrays[m.name]
        if m.probe.name == "top_k":
            for row, (got, seen, whole) in enumerate(zip(values, mask.astype(bool), truth, strict=True)):
                assert (seen.sum() < len(seen)) == (not known[0, 0, row][m.node.value[0, 0, row] <= row].all())
                assert set(got[seen]) <= set(whole)
                assert (got[~seen] == 0).all()
        else:
            assert mask.sum() == (known.sum() if m.whole else known[..., : m.shape[-1]].sum())
            assert np.array_equal(values, np.where(mask, truth, 0)), m.name


def test_batches_are_told_apart_and_count_on():
    again = [replace(node, order=node.order + 1000) for node in nodes()]
    first, second = split_graphs([*nodes(), *again])
    assert (len(first), len(second)) == (len(nodes()), len(nodes()))
    no_embd = [node for node in [*nodes(), *again] if node.label != "embd" and not node.label.startswith("result_")]
    assert [len(g) for g in split_graphs(no_embd)] == [len(nodes()) - 3] * 2
    behind = {m.name: m for m in map_graph(second, n_past=12)}
    score = next(node for node in nodes() if node.op == "LIGHTNING_INDEXER")
    assert behind["indexer_score-0"].take(score.value)[0].shape == (12, 24)
    rows, _ = behind["top_k-0"].take(np.broadcast_to(np.arange(10, 18, dtype=np.int32), (1, 1, 12, 8)))
    assert rows[0].tolist() == [10, 11, 12, -1, -1, -1, -1, -1]  # row 0 stands at position 12


def test_a_node_of_another_shape_is_refused():
    bad = [replace(n, shape=(1, 2, 6, 128)) if (n.label, n.op) == ("q-3", "MUL_MAT") else n for n in nodes()]
    with pytest.raises(NpglmError, match=r"MUL_MAT 'q-3': shape \[1, 2, 6, 128\] does not fit q"):
        map_graph(bad)
    with pytest.raises(NpglmError, match="expected"):
        recorded().mapped[3].take(np.zeros((1, 1, 2, 3)))
    with pytest.raises(NpglmError, match="12 rows for 5 tokens"):
        map_graph(nodes(), n_tokens=5)


# --- each op from its own inputs ---------------------------------------------------------------------------------------------


def test_every_op_from_llamacpps_own_inputs():
    results = judge(recorded(), ops(GGML))
    print("\n" + table(results))
    assert {(r.probe, r.layer) for r in results} >= {(m.probe.name, m.layer) for m in recorded().mapped}
    for result in results:
        assert result.ok, result
    assert not any(r.ties for r in results)  # 12 tokens have none


def test_plain_f32_would_be_seen():
    """Without rounding the activations to 8 bits every product with quantised weights is off by 500 bars and more."""
    results = [r for r in judge(recorded(), ops(F32), only=(MATMUL,)) if r.weight_type != "F32"]
    worst, best = max(r.error for r in results), min(r.error for r in results)
    print(f"\nf32 against llama.cpp: {best:.1e} to {worst:.1e}")
    assert len({r.probe for r in results}) == 17  # all but the router's logits
    for result in results:
        assert result.error >= 1e-3, result


def test_keys_are_rounded_to_f16_behind_the_hadamard():
    """Exact to f32 with keys rotated, then rounded; three orders off with f32 keys, or with keys rounded but not rotated."""
    for i in full_layers():
        at, o = layer(i), ops(GGML)

        def off(q, keys, at=at, o=o):
            score = o.indexer_score(q, keys, at.indexer_weights, at.pos)
            assert np.array_equal(np.isinf(score), np.isinf(at.indexer_score))
            return errors(at.indexer_score, score).rms

        assert off(at.hadamard_q, at.hadamard_k.astype(np.float16)) <= 1e-6
        assert off(at.hadamard_q, at.hadamard_k) > 5e-5
        assert off(at.indexer_q, at.indexer_k.astype(np.float16)) > 5e-5


def test_sets_are_the_same_from_our_own_scores():
    """Scores and router probabilities recomputed by the reference; a flip is allowed only below their error, and printed."""
    config, o = checkpoint().config, ops(GGML)
    for i in range(config.n_layers):
        at = layer(i)
        if config.full[i]:
            score = o.indexer_score(at.hadamard_q, at.hadamard_k.astype(np.float16), at.indexer_weights, at.pos)
            found = flips(score, o.select_top_k(score, at.pos, config.indexer_top_k), at.top_k, at.pos)
            finite = np.isfinite(score)
            check_flips(i, found, np.abs(score[finite] - at.indexer_score[finite]).max())
        if config.is_moe(i):
            biased = o.sigmoid(o.linear(at.ffn_norm, at.w.ffn_gate_inp)) + at.w.exp_probs_b.decode()
            found = flips(biased, o.select_experts(biased, config.n_chosen), at.ffn_moe_topk)
            check_flips(i, found, np.abs(biased - at.ffn_moe_probs_biased).max())


def check_flips(index: int, found: list, error: float) -> None:
    for flip in found:
        print(f"layer {index}: {flip}, error {error:.1e}")
        assert flip.gap <= 2 * error


def test_k_norm_runs_at_eps_0():
    """llama.cpp never sets the eps of the indexer's LayerNorm; the model's is 1e-6 (transformers, nn.LayerNorm(eps=1e-6))."""
    for i in full_layers():
        at = layer(i)
        residual = {eps: errors(at.normed_k, at.k_norm(eps)).rms for eps in (0.0, 1e-6, 1e-5)}
        print(f"\nlayer {i}: " + ", ".join(f"eps {eps:g}: {r:.1e}" for eps, r in residual.items()))
        assert residual[0.0] <= 1e-7
        assert residual[1e-6] > 3 * residual[0.0]
        assert residual[1e-5] > 30 * residual[0.0]


def test_the_distance_of_attention_is_f16_arithmetic():
    """3e-4 to 6e-4 from f64 over the same f16 cache; 1e-5 and better from the same sums kept in f16."""
    for i in range(checkpoint().config.n_layers):
        at = layer(i)
        exact, f16 = (errors(at.kqv, f(at)).rms for f in (exact_attention, attention_as_llamacpp))
        print(f"\nlayer {i}: from f64 {exact:.1e}, from f16 arithmetic {f16:.1e}")
        assert 1e-4 <= exact <= 6e-4
        assert f16 <= 3e-5


def test_the_cache_holds_what_the_probes_say():
    """SET_ROWS of the latent row and of the rotated indexer key, in f16; the rows behind the tokens are zero."""
    n = len(golden()["ids"])
    for i in range(checkpoint().config.n_layers):
        of_layer = recorded().nodes[i]
        stored = [node.value[0, 0] for node in of_layer if node.op == "SET_ROWS" and node.label.startswith("cache_k")]
        wanted = ([layer(i).hadamard_k.astype(np.float16)] if i in full_layers() else []) + [layer(i).cached]
        assert len(stored) == len(wanted)
        for rows, want in zip(stored, wanted, strict=True):
            assert np.array_equal(rows[:n], want)
            assert not rows[n:].any()


def test_a_wrong_op_does_not_pass():
    """One value of one recorded node changed by 1e-4 of its row: that op and the one that reads it are found, by name."""
    changed = []
    for node in nodes():
        if node.label == "ffn_moe_up-4":
            value = node.value.copy()
            value[0, 7, 1, 100] += 1e-4 * np.linalg.norm(value[0, 7])
            node = replace(node, value=value)
        changed.append(node)
    bad = [r for r in judge(Recorded(checkpoint(), golden()["ids"], changed), ops(GGML)) if not r.ok]
    assert [(r.probe, r.layer) for r in bad] == [("ffn_moe_up", 4), ("ffn_moe_swiglu", 4)]
    order = next(node.order for node in nodes() if node.label == "top_k-0 (view)")
    changed = [replace(n, value=n.value[..., ::-1] // 2) if n.order == order else n for n in nodes()]
    bad = [r for r in judge(Recorded(checkpoint(), golden()["ids"], changed), ops(GGML), only=(CHOICE,)) if not r.ok]
    assert [(r.probe, r.layer) for r in bad] == [("top_k", 0)]


# --- the recorder ------------------------------------------------------------------------------------------------------------


def test_the_recorder_names_the_extra_when_llama_cpp_is_missing():
    script = Path(__file__).parents[1] / "scripts" / "record_llamacpp.py"
    argv = ["record_llamacpp.py", "m.gguf", "--tokens", "1", "-o", "x"]
    code = f"import sys, runpy; sys.modules['llama_cpp'] = None; sys.argv = {argv}; runpy.run_path({str(script)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "record_llamacpp.py: error: llama_cpp is not installed: pip install 'npglm[oracle]'\n"
