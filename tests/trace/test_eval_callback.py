"""llama-eval-callback's text in its four eras, printed here from the full values in llamacpp.npz."""

import json

import numpy as np
import pytest

from npglm.errors import NpglmError
from npglm.trace.formats.arrays import GGML_OPS, read_npz
from npglm.trace.formats.eval_callback import read_eval_callback

ERAS = {
    "A": {"prefix": "ggml_debug: ", "number": "%8.4f", "behind": 0, "total": None, "indent": " " * 37},
    "B before 2025-08": {"prefix": "ggml_debug: ", "number": "%12.4f", "behind": 3, "total": "printed", "indent": " " * 37},
    "B": {"prefix": "ggml_debug: ", "number": "%12.4f", "behind": 3, "total": "all", "indent": " " * 37},
    "C": {"prefix": "common_debug_cb_eval: ", "number": "%12.4f", "behind": 3, "total": "all", "indent": " " * 37},
    "D": {"prefix": "0.04.635.059 I common_debug_cb_eval: ", "number": "%12.4f", "behind": 3, "total": "all", "indent": "    "},
}


def shown(n: int, behind: int) -> list[int]:
    if not behind:
        return list(range(min(n, 3)))
    return list(range(n)) if n <= 6 else [0, 1, 2, *range(n - 3, n)]


def print_node(out: list, era: dict, label: str, op: int, array: np.ndarray) -> None:
    ne = ", ".join(str(n) for n in reversed(array.shape))
    kind = {"float32": "f32", "float16": "f16", "int32": "i32"}[array.dtype.name]
    out.append(f"{era['prefix']}{label:>24} = ({kind}) {GGML_OPS[op]:>10}(src0{{1, 1, 1, 1}}, }}) = {{{ne}}}")
    pad, total = era["indent"], 0.0
    for block in array:
        out.append(pad + "[")
        for j in shown(len(block), era["behind"]):
            if era["behind"] and len(block) > 6 and j == len(block) - 3:
                out.append(pad + " ...,")
            out.append(pad + " [")
            for k in shown(len(block[j]), era["behind"]):
                row = block[j][k]
                if era["behind"] and len(block[j]) > 6 and k == len(block[j]) - 3:
                    out.append(pad + "  ...,")
                places = shown(len(row), era["behind"])
                words = [era["number"] % row[i] for i in places]
                total += sum(float(row[i]) for i in places)
                if era["behind"] and len(row) > 6:
                    words.insert(3, "...")
                out.append(pad + "  [" + ", ".join(words) + (", ...]," if not era["behind"] and len(row) > 3 else "],"))
            out.append(pad + " ],")
        out.append(pad + "]")
    if era["total"]:
        with np.errstate(invalid="ignore"):
            out.append(f"{pad}sum = {total if era['total'] == 'printed' else array.astype(np.float64).sum():f}")


def dump(path, golden, era: str, evaluations: int = 1) -> None:
    arrays = np.load(golden / "llamacpp.npz")
    out = ["0.04.635.059 I number of input tokens = 12", *(f"0.04.635.066 I   {i}" for i in arrays["ids"])]
    nodes = [k.split("|", 2) for k in arrays if "|" in k]
    for _ in range(evaluations):
        for order, op, label in nodes:
            print_node(out, ERAS[era], label, int(op), arrays[f"{order}|{op}|{label}"])
    path.write_text("\n".join(out) + "\n")


@pytest.mark.parametrize("era", ERAS)
def test_each_era_reads_as_the_values_that_were_printed(golden, tmp_path, era):
    dump(tmp_path / "dump.txt", golden, era)
    text, whole = read_eval_callback(tmp_path / "dump.txt"), read_npz(golden / "llamacpp.npz")[0]
    assert json.loads(text.metadata["tokens"]) == json.loads(whole.metadata["tokens"])
    names = [n for n in text if "#" not in n]
    assert set(names) == {n for n in whole if "#" not in n}
    for name in names:
        values, truth = text[name], whole[name]
        known = text[name + "#known"].astype(bool) if name + "#known" in text else np.ones(values.shape, bool)
        assert known.any(), name
        assert (values[~known] == 0).all()
        if not name.startswith("top_k"):  # sorted: unknown entries move
            same = np.isfinite(truth) & known
            np.testing.assert_allclose(values[same], truth[same], atol=5.1e-5)
            assert np.array_equal(np.isinf(values[known]), np.isinf(truth[known]))
    assert not text["q_a-0#known"].all()
    totals = [n for n in text if n.endswith("#sum")]
    assert bool(totals) == (ERAS[era]["total"] == "all")
    if totals:
        assert text["q_a-0#sum"][0] == pytest.approx(whole["q_a-0"].sum(dtype=np.float64), abs=1e-3)


def test_three_values_of_row_0_leave_everything_else_unknown(golden, tmp_path):
    dump(tmp_path / "a.txt", golden, "A")
    known = read_eval_callback(tmp_path / "a.txt")["q_a-0#known"].astype(bool)
    assert known.sum() == 9  # 3 rows, 3 values
    assert known[:3, :3].all()


def test_of_several_evaluations_the_first_prefill_is_read_and_that_is_said(golden, tmp_path):
    dump(tmp_path / "two.txt", golden, "C", evaluations=2)
    trace = read_eval_callback(tmp_path / "two.txt")
    assert "only the first prefill" in trace.metadata["notes"]
    assert trace["embd"].shape == (12, 256)


@pytest.mark.parametrize("share", [0.02, 0.3, 0.77])
def test_a_dump_that_breaks_off_keeps_what_it_printed(golden, tmp_path, share):
    text = (golden / "eval-callback.txt").read_text()
    (tmp_path / "cut.txt").write_text(text[: int(len(text) * share)])
    whole, cut = read_eval_callback(golden / "eval-callback.txt"), read_eval_callback(tmp_path / "cut.txt")
    names = [n for n in cut if "#" not in n]
    assert 0 < len(names) < len([n for n in whole if "#" not in n])
    for name in names[:-2]:
        assert np.array_equal(cut[name], whole[name])


def test_log_lines_between_nodes_are_no_values(golden, tmp_path):
    text = (golden / "eval-callback.txt").read_text()
    noisy = text.replace("    sum =", "0.05.000.001 I llama_context: n_ctx = 4096\n    12 layers\n    sum =")
    (tmp_path / "noisy.txt").write_text(noisy)
    plain, read = read_eval_callback(golden / "eval-callback.txt"), read_eval_callback(tmp_path / "noisy.txt")
    assert list(plain) == list(read)
    assert all(np.array_equal(plain[n], read[n], equal_nan=True) for n in plain)


def test_more_entries_than_the_shape_holds_is_an_error(tmp_path):
    head = "ggml_debug: embd = (f32) GET_ROWS(a{1, 1, 1, 1}, }) = {2, 1, 1, 1}\n"
    (tmp_path / "bad.txt").write_text(head + "[[[ 1.0, 2.0, 3.0 ]]]\n")
    with pytest.raises(NpglmError, match="3 entries"):
        read_eval_callback(tmp_path / "bad.txt")
    (tmp_path / "huge.txt").write_text(head.replace("{2, 1", "{99999999, 99999999") + "[[[ 1.0 ]]]\n")
    with pytest.raises(NpglmError, match="too large"):
        read_eval_callback(tmp_path / "huge.txt")
