"""Other engines' real recordings, and the story of origin.md, through the command line."""

import json

import pytest
from compare import main  # scripts/compare.py


def compare(capsys, *argv) -> tuple[int, dict]:
    status = main([*map(str, argv), "--json", "-"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", ["llamacpp.npz", "eval-callback.txt", "eval-callback-nofa.txt"])
def test_llama_cpp_is_right_and_its_rounding_is_named(golden, capsys, name):
    status, report = compare(capsys, "--model", golden / "small.Q2_K.gguf", golden / name)
    assert status == 0
    assert report["verdict"] == "rounding"
    assert not [o for o in report["ops"] if o["verdict"] in ("wrong", "precision")]
    expected = ["8-bit activations before quantised matmuls", "f16 cache"]
    if name == "llamacpp.npz":
        expected += ["k_norm eps 0 (the model's is 1e-06)", "f16 arithmetic in attention"]
        assert any(n.startswith("near-tie flips: ffn_moe_topk") for n in report["notes"])
    assert report["numerics"] == expected
    assert len(report["ops"]) == 211
    assert report["guilty"] is None
    assert report["cause"] is None


def test_transformers_is_equal_at_every_length(golden, capsys):
    status, report = compare(capsys, "--model", golden / "small.Q2_K.gguf", golden / "transformers.npz")
    assert status == 0
    assert [r["verdict"] for r in report["runs"]] == ["equal"] * 3
    assert all(o["verdict"] == "equal" and o["err_local"] < 1e-5 for r in report["runs"] for o in r["ops"])
    assert any("row 18" in n for n in report["runs"][2]["notes"])  # 13 tokens tie at score 0


def test_the_origin_is_a_shard_and_not_bf16(golden, capsys):
    """All that origin.md says was seen at the time, and no model."""
    status, report = compare(capsys, golden / "origin" / "llama.txt", golden / "origin" / "fork.txt")
    assert status == 1
    assert report["guilty"] == {"op": "ffn_gate", "layer": 0, "rank": 1}
    assert report["cause"]["name"] == "rank 1 holds rank 0's gate/up shard"
    wrong = {(o["op"], o["rank"]) for o in report["ops"] if o["verdict"] == "wrong"}
    assert wrong == {("ffn_gate", 1), ("ffn_up", 1), ("ffn_out", 0)}
    main([str(golden / "origin" / "llama.txt"), str(golden / "origin" / "fork.txt")])
    page = capsys.readouterr().out
    assert "not bf16" in page
    assert len(page.splitlines()) <= 24


def test_after_the_fix_the_origin_is_rounding(golden, capsys, tmp_path):
    fixed = (golden / "origin" / "fork.txt").read_text()
    fixed = fixed.replace("r1 ffn_gate-0 SUM 1681.035858", "r1 ffn_gate-0 SUM 1693.9")
    fixed = fixed.replace("r1 ffn_up-0 SUM -10.594030", "r1 ffn_up-0 SUM -3.736383").replace(
        "-0.0043 -0.0029 -0.0043", "-0.0067 -0.0014 -0.0030"
    )
    (tmp_path / "fixed.txt").write_text(fixed)
    status, report = compare(capsys, golden / "origin" / "llama.txt", tmp_path / "fixed.txt")
    assert status == 0
    assert report["verdict"] == "rounding"
