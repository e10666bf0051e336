"""describe: the figures of a real model's shape, files that cannot be run, and the search for NaN and inf."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as T
from synth import ALL_TYPES, ARCH, GLM52, Shape, write_model

import npglm
from npglm.checkpoint import DECODABLE, Tensor
from npglm.describe import F16_SCALES, GROUPS, check, describe, finite_rows, host_memory, page, ranges, size

ROOT = Path(__file__).parents[1]
SMALL = ROOT / "tests/golden/small.Q2_K.gguf"
SCRIPT = [sys.executable, ROOT / "scripts/describe.py"]
TINY = Shape(
    vocab=270, hidden=64, n_layers=3, n_dense=1, full=(True, False, True), ffn=160, n_experts=6, n_chosen=2, expert_ffn=192
)


def run(*args, status=0) -> subprocess.CompletedProcess:
    done = subprocess.run([*SCRIPT, *args], check=False, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    return done


@pytest.fixture(scope="module")
def glm52(tmp_path_factory):
    """GLM-5.2's sizes, tokens and types (routed experts Q2_K, router F32, the rest Q8_0), without its data."""
    path = tmp_path_factory.mktemp("glm52") / "glm.gguf"
    return write_model(path, shape=GLM52, mtp=1, indexer_types=None, tokenizer=False, fill="sparse")


def test_bytes_of_a_decoded_token_of_glm52(glm52):
    """The table in performance.md, section 1, made by hand from the shapes."""
    facts = describe(glm52)
    gigabytes = {group: round(n / 1e9, 2) for group, n in facts["per_token"]["weights"].items()}
    assert gigabytes == {
        "attention projections": 12.46, "absorbed MLA": 1.22, "indexer": 0.21, "dense FFN": 0.72, "routed experts": 7.43,
        "shared experts": 3.01, "router": 0.47, "output head": 1.01, "norms, embedding row": 0.0,
    }  # fmt: skip
    assert round(facts["per_token"]["weights_total"] / 1e9, 2) == 26.53
    assert round(facts["per_token"]["latent_kv"] / 1e9, 3) == 0.184
    assert round(facts["per_token"]["indexer_keys"] / 1e9, 3) == 0.022
    far = describe(glm52, context=1 << 17)["per_token"]
    assert far["latent_kv"] == facts["per_token"]["latent_kv"]
    assert round(far["indexer_keys"] / 1e9, 3) == 0.705
    assert round((far["weights_total"] + far["latent_kv"] + far["indexer_keys"]) / 1e9, 2) == 27.42
    assert facts["memory"]["cache_bytes_per_token_f16"] == 95232
    assert facts["memory"]["context"] == 4096


def test_what_fits_where_of_glm52(glm52):
    """One 80 GB GPU takes all but the routed experts; its own memory is what host memory is compared with."""
    p = describe(glm52, device=("Some GPU", int(80e9)))["placement"]
    assert (p["device"], p["device_memory"], p["context"]) == ("Some GPU", 80_000_000_000, 4096)
    assert round(p["offloaded_host_bytes"] / 1e9, 2) == round(75 * 3 * 256 * 6144 * 2048 / 256 * 84 / 1e9, 2) == 237.82
    assert p["device_bytes"] - p["offloaded_device_bytes"] == p["offloaded_host_bytes"]
    assert round(p["offloaded_device_bytes"] / 1e9, 2) == 20.50
    text = run(glm52, "--memory", "80").stdout
    assert "\nOn a GPU, 4096 tokens cached\n  all weights and the cache          258.32 GB  does not fit in 80.00 GB\n" in text
    assert "\n  --offload-experts: on the GPU       20.50 GB  fits in 80.00 GB\n" in text
    facts = describe(glm52)
    facts["placement"]["host_memory"] = int(128e9)
    assert "  237.82 GB  does not fit in 128.00 GB: slow, as experts are read from the file again\n" in page(facts)


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/a/b", {"a/memory.max": "3000", "a/b/memory.max": "max"}, 3000),
        ("0::/", {"memory.max": "2000"}, 2000),
        (
            "5:cpu,memory:/x\n0::/y",
            {"memory/memory.limit_in_bytes": "9223372036854771712", "memory/x/memory.limit_in_bytes": "77"},
            77,
        ),
        ("4:cpu:/x", {"memory/x/memory.limit_in_bytes": "77"}, None),
        (None, {}, None),
    ],
)
def test_host_memory_is_what_control_groups_leave(tmp_path, groups, limits, expected):
    for name, text in {
        **({"proc/self/cgroup": groups} if groups else {}),
        **{f"sys/fs/cgroup/{n}": t for n, t in limits.items()},
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert host_memory(tmp_path) == expected or (expected is None and host_memory(tmp_path) > 1 << 28)


def test_what_each_rank_holds_of_glm52(glm52):
    """Halves of heads, FFNs, experts and head; embedding, q_a, kv_a, router, indexer and the cache whole."""
    facts = describe(glm52, ranks=2)
    both = facts["ranks"]["bytes"]["tensor"] * 2
    assert facts["ranks"]["bytes"]["expert"] * 2 == both
    twice = (154880 + 78 * (2048 + 576) + 21 * (128 + 32)) * 6144 * 34 / 32 + 21 * 4096 * 2048 * 34 / 32 + 75 * 256 * 6144 * 4
    cache = 4096 * 2 * (78 * 576 + 21 * 128)
    assert round((both - facts["placement"]["device_bytes"]) / 1e9, 2) == round((twice + cache) / 1e9, 2) == 3.42
    page = run(glm52, "--ranks", "2", "--memory", "144").stdout
    assert "\nEach of 2 ranks, 4096 tokens cached\n  --experts tensor  130.87 GB  fits in 144.00 GB\n" in page
    page = run(SMALL, "--ranks", "2").stdout
    assert "small.Q2_K.gguf: tensor blk.3.ffn_down_exps.weight: 2 ranks would cut its Q2_K blocks of 256" in page


def test_layer_plan_of_glm52(glm52):
    facts = describe(glm52)
    layers = facts["layers"]
    assert (layers["run"], layers["dense"], layers["mtp"], layers["mtp_in_file"]) == (78, [0, 1, 2], [78], [78])
    assert layers["full"] == [0, 1, 2, *range(6, 75, 4)]
    assert len(layers["shared"]) == 57
    assert "  shared top-k  the other 57\n  MTP           78 (in the file; not run)\n" in page(facts)
    assert {kind: t["tensors"] for kind, t in facts["tensors"].items()} == {"Q2_K": 228, "Q8_0": 951, "F32": 630}
    assert len(facts["notes"]) == 2  # MTP, and no indexer.types


def test_every_weight_that_runs_is_counted_once(tmp_path):
    path = write_model(tmp_path / "m.gguf", shape=TINY, n_chosen=6, mtp=1)
    checkpoint = npglm.load(path)
    unused = [n for n in checkpoint.tensors if n.startswith(("blk.3.", "blk.1.indexer", "token_embd"))]
    total = sum(t.nbytes for n, t in checkpoint.tensors.items() if n not in unused) + 64 // 32 * 34  # and one embedding row
    assert describe(path)["per_token"]["weights_total"] == total
    fewer = describe(write_model(tmp_path / "k.gguf", shape=TINY, n_chosen=2))["per_token"]["weights"]
    assert fewer["routed experts"] * 3 == describe(path)["per_token"]["weights"]["routed experts"]
    tied = describe(write_model(tmp_path / "t.gguf", shape=TINY, tied=True))["per_token"]["weights"]
    assert tied == fewer
    assert set(fewer) == set(GROUPS)


def test_config_and_tokenizer_of_the_golden_model():
    facts = describe(SMALL)
    assert facts["config"]["hidden"] == 256
    assert facts["config"]["full"] == (True, True, True, False, False, False, True)
    t = facts["tokenizer"]
    assert (t["model"], t["pre"], t["tokens"], t["merges"], t["add_bos"], t["chat_template"]) == (
        "gpt2",
        "glm4",
        288,
        15,
        False,
        False,
    )
    assert t["special"]["bos"] == [273, "[gMASK]"]
    assert [text for _, text in t["end_of_generation"]] == ["<|endoftext|>", "<|user|>", "<|observation|>"]
    assert facts["notes"] == facts["cannot"] == []


def test_shards_are_one_model(tmp_path):
    whole = describe(write_model(tmp_path / "w.gguf", shape=TINY))
    facts = describe(write_model(tmp_path / "s.gguf", shape=TINY, shards=4, metadata_shard=True))
    assert facts["file"]["files"] == [f"s-0000{i}-of-00004.gguf" for i in range(1, 5)]
    assert "file              s-00001-of-00004.gguf and 3 more\n" in page(facts)
    for key in ("config", "layers", "tensors", "tokenizer", "per_token", "memory"):
        assert facts[key] == whole[key]


# --- what cannot be run -----------------------------------------------------------------------------------------------------


def test_a_vocabulary_alone():
    facts = describe(ROOT / "tests/golden/vocab-151k.gguf")
    assert facts["cannot"] == ["this model: vocab-151k.gguf: no tensors; a vocabulary alone cannot be run"]
    assert facts["tokenizer"]["tokens"] == 151675
    assert "config" not in facts
    assert "  151675 (151387 merges)" in page(facts)


@pytest.mark.parametrize(
    ("options", "reason", "has_config"),
    [
        ({"metadata": {"general.architecture": "glm5next"}}, "architecture 'glm5next' is not supported", False),
        ({"drop": (f"{ARCH}.rope.freq_base",)}, "key glm-dsa.rope.freq_base: missing", False),
        ({"drop": ("blk.1.ffn_norm.weight",)}, "tensor blk.1.ffn_norm.weight is missing", True),
        ({"types": {"output.weight": T.I32}}, "tensor output.weight: type I32 cannot be used here", True),
    ],
)
def test_a_model_that_cannot_be_run_is_described_as_far_as_it_goes(tmp_path, options, reason, has_config):
    facts = describe(write_model(tmp_path / "m.gguf", shape=TINY, fill="sparse", **options))
    assert len(facts["cannot"]) == 1
    assert facts["cannot"][0].startswith("this model: m.gguf: ")
    assert reason in facts["cannot"][0]
    assert ("config" in facts, "layers" in facts, "per_token" in facts) == (has_config, has_config, False)
    text = page(facts)
    assert f"Cannot run here\n  {facts['cannot'][0]}\n" in text
    assert ("cannot be decoded" in text) == ("I32" in reason)


@pytest.mark.parametrize("key", ["tokenizer.ggml.pre", "tokenizer.*"])
def test_a_tokenizer_that_does_not_load(tmp_path, key):
    facts = describe(write_model(tmp_path / "m.gguf", shape=TINY, drop=(key,)))
    assert facts["tokenizer"]["problem"].startswith("m.gguf: ")
    assert f"  problem        {facts['tokenizer']['problem']}\n" in page(facts)
    assert facts["per_token"]["weights_total"] > 0


# --- NaN and inf ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL_TYPES, ids=lambda kind: kind.name)
def test_finite_rows_equals_decoding(kind):
    """Over bytes of every kind, scales included: a row is called finite exactly if it decodes to finite values."""
    rng = np.random.Generator(np.random.SFC64([4]))
    block, block_bytes = GGML_QUANT_SIZES[kind]
    n_rows, n_blocks = 3000, 512 // block if block > 1 else 16
    data = np.frombuffer(rng.bytes(n_rows * n_blocks * block_bytes), np.uint8).reshape(n_rows, -1)
    tensor = Tensor("t", (n_rows, n_blocks * block), kind, data)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = np.isfinite(tensor.rows(0, n_rows)).all(-1)
    np.testing.assert_array_equal(finite_rows(tensor, 0, n_rows), expected)
    np.testing.assert_array_equal(finite_rows(tensor, 5, 1000), expected[5:1000])
    assert kind == T.NVFP4 or 0.01 < expected.mean() < 0.999  # NVFP4 has no NaN
    assert set(F16_SCALES) <= DECODABLE


def planted(path, seed=0) -> tuple[Path, dict]:
    """A model with NaN and inf, and what check() must say of it."""
    write_model(
        path,
        seed,
        shape=TINY,
        hidden=256,
        mtp=1,
        types={"ffn_up": T.BF16, "attn_q_a": T.F16, "blk.3.ffn_up_exps.weight": T.IQ1_M},
    )
    at = {n: t for n, t in npglm.load(path).tensors.items()}
    file = np.memmap(path, np.uint8, "r+")

    def put(name, row, offset, value: bytes):
        start = at[name].data[row].ctypes.data - at["output.weight"].data.ctypes.data
        base = file.tobytes().index(at["output.weight"].data.tobytes())
        file[base + start + offset : base + start + offset + len(value)] = np.frombuffer(value, np.uint8)

    f16_inf, f16_nan = b"\x00\x7c", b"\x01\xfe"
    put("blk.0.attn_norm.weight", 0, 4 * 17, np.float32(-np.inf).tobytes())
    put("blk.2.ffn_gate_exps.weight", 300, 82, f16_nan)  # dmin of a Q2_K block
    put("blk.2.attn_output.weight", 5, 34, f16_inf)  # the second Q8_0 block
    put("blk.2.attn_output.weight", 9, 0, f16_nan)
    put("blk.0.ffn_up.weight", 159, 2, b"\xc0\x7f")  # BF16 NaN
    put("blk.1.attn_q_a.weight", 0, 6, f16_inf)
    put("blk.3.nextn.hnorm.weight", 0, 0, np.float32(np.nan).tobytes())
    file.flush()
    zeros = int((at["blk.2.attn_output.weight"].data[5, 36:68] == 0).sum())  # inf * 0
    return path, {
        "blk.0.attn_norm.weight": (0, 1, 1, 0),
        "blk.0.ffn_up.weight": (1, 0, 1, 159),
        "blk.1.attn_q_a.weight": (0, 1, 1, 0),
        "blk.2.attn_output.weight": (32 + zeros, 32 - zeros, 2, 5),
        "blk.2.ffn_gate_exps.weight": (256, 0, 1, 300),
        "blk.3.nextn.hnorm.weight": (1, 0, 1, 0),
    }


def test_check_names_every_tensor_with_nan_or_inf(tmp_path):
    path, expected = planted(tmp_path / "m.gguf")
    tensors, read = npglm.load(path).tensors, []
    bad = list(check(tensors.values(), read.append))
    assert {b["tensor"]: (b["nan"], b["inf"], b["rows"], b["first_row"]) for b in bad} == expected
    assert {b["type"] for b in bad} == {"F32", "Q2_K", "Q8_0", "BF16", "F16"}
    assert sum(read) == sum(t.nbytes for t in tensors.values())


def test_check_reads_blocks_of_rows(monkeypatch, tmp_path):
    path, expected = planted(tmp_path / "m.gguf")
    monkeypatch.setattr("npglm.checkpoint.DECODE_BYTES", 4 * 256 * 7)
    bad = {b["tensor"]: (b["nan"], b["inf"], b["rows"], b["first_row"]) for b in check(npglm.load(path).tensors.values())}
    assert bad == expected


def test_check_finds_nothing_in_sound_files(tmp_path):
    assert list(check(npglm.load(SMALL).tensors.values())) == []
    mixed = {f"blk.{i}.ffn_up.weight": kind for i, kind in enumerate(ALL_TYPES)}
    n = len(ALL_TYPES)
    path = write_model(tmp_path / "m.gguf", shape=TINY, hidden=256, n_layers=n, n_dense=n, full=None, types=mixed)
    assert {t.type for t in npglm.load(path).tensors.values()} == set(ALL_TYPES)
    assert list(check(npglm.load(path).tensors.values())) == []


# --- the script -------------------------------------------------------------------------------------------------------------


def test_the_page_is_plain_text():
    done = run(SMALL, "--check", "--ctx", "100")
    assert done.stderr == ""
    assert done.stdout.startswith(
        "hidden-small-11: glm-dsa\n  file              small.Q2_K.gguf\n  bytes             7.32 MB\n"
    )
    assert done.stdout.endswith("\nCheck\n  none of 134 tensors with NaN or inf\n")
    assert "  latent KV, f16, 100 cached " in done.stdout
    assert all(line.rstrip() == line and (line.isprintable() or not line) for line in done.stdout.split("\n"))
    assert max(map(len, done.stdout.split("\n"))) <= 128


def test_json_is_one_object_and_a_bad_tensor_is_status_1(tmp_path):
    path, expected = planted(tmp_path / "m.gguf")
    facts = json.loads(run(path, "--check", "--json", status=1).stdout)
    assert sorted(b["tensor"] for b in facts["check"]["bad"]) == sorted(expected)
    described = json.loads(json.dumps(describe(path)))
    assert {key: facts[key] for key in described if key != "cannot"} == {k: v for k, v in described.items() if k != "cannot"}
    text = run(path, "--check", status=1).stdout
    assert "  blk.0.ffn_up.weight (BF16, m.gguf): 1 NaN, 0 inf in 1 rows from 159\n" in text
    assert text.endswith("\n  6 of 94 tensors with NaN or inf\n")


def test_errors_are_one_line_and_status_2(tmp_path):
    damaged = tmp_path / "m.gguf"
    damaged.write_bytes(SMALL.read_bytes()[:5000])
    for args in ([damaged], [tmp_path / "no.gguf"], [SMALL, "--ctx", "0"], [SMALL, "--memory", "0"], []):
        done = run(*args, status=2)
        assert done.stdout == ""
        assert done.stderr.startswith("describe.py: error: ")
        assert done.stderr.count("\n") == 1


def test_an_interrupted_check_ends_with_one_line(glm52):
    process = subprocess.Popen([*SCRIPT, glm52, "--check"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "synthetic: glm-dsa\n"  # the page is there; 262 GB are left to read
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "describe.py: interrupted\n")


def test_numbers_as_text():
    assert [size(n) for n in (0, 999, 1000, 1234567, 26.53e9, 3.02e12)] == [
        "0 B",
        "999 B",
        "1.00 kB",
        "1.23 MB",
        "26.53 GB",
        "3.02 TB",
    ]
    assert [ranges(n) for n in ([], [4], [0, 1, 2, 6, 8, 9])] == ["", "4", "0-2, 6, 8-9"]
