"""Checkpoint: headers equal to GGUFReader's, shards, and every tensor's presence, shape, type and values."""

import hashlib
import resource
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from gguf.quants import dequantize
from synth import ALL_TYPES, ARCH, GLM52, GLM52_MERGES, Shape, model_tensors, random_blocks, vocabulary, write_model

import npglm
import npglm.checkpoint
from npglm.checkpoint import DECODABLE, FLOAT_TYPES, Checkpoint, Tensor, read_gguf, shard_paths
from npglm.errors import NpglmError

GOLDEN = Path(__file__).parent / "golden"
TINY = Shape(
    vocab=50, hidden=64, n_layers=3, n_dense=1, full=(True, False, True), n_heads=2, nope=32, rope=8, v_dim=48, q_rank=96,
    kv_rank=128, indexer_heads=3, indexer_dim=24, ffn=160, n_experts=6, n_chosen=2, n_shared=2, expert_ffn=192,
)  # fmt: skip


def tiny(path, **options) -> Path:
    return write_model(path / "tiny.gguf", shape=TINY, **{"tokenizer": False, **options})


def refused(path) -> str:
    with pytest.raises(NpglmError) as error:
        npglm.load(path)
    assert "\n" not in str(error.value)
    return str(error.value)


# --- the header -------------------------------------------------------------------------------------------------------------


def assert_equals_gguf_reader(path):
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    metadata = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == metadata
    assert [type(v) for v in ours.metadata.values()] == [type(v) for v in metadata.values()]
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert mine.type == tensor.tensor_type
        assert mine.nbytes == tensor.n_bytes
        assert mine.data.tobytes() == tensor.data.tobytes()
        assert mine.data.shape == (mine.n_rows, mine.nbytes // mine.n_rows)
    assert ours.data_offset == theirs.data_offset
    assert ours.header_sha256 == hashlib.sha256(path.read_bytes()[: theirs.data_offset]).hexdigest()


def test_golden_model_equals_gguf_reader():
    assert_equals_gguf_reader(GOLDEN / "small.Q2_K.gguf")


@pytest.mark.slow
def test_golden_vocabulary_equals_gguf_reader():  # GGUFReader takes 10 s on it
    assert_equals_gguf_reader(GOLDEN / "vocab-151k.gguf")


def test_there_are_no_other_golden_files():
    assert sorted(p.name for p in GOLDEN.glob("*.gguf")) == ["small.Q2_K.gguf", "vocab-151k.gguf"]


def test_every_metadata_type_equals_gguf_reader(tmp_path):
    V = gguf.GGUFValueType
    scalars = {
        V.UINT8: 255, V.INT8: -128, V.UINT16: 65535, V.INT16: -32768, V.UINT32: 2**32 - 1, V.INT32: -(2**31),
        V.UINT64: 2**64 - 1, V.INT64: -(2**63), V.FLOAT32: 0.1, V.FLOAT64: 0.1, V.BOOL: True, V.STRING: "a\u0141\U0001f40d\n",
    }  # fmt: skip
    values = {f"x.{kind.name}": (value, kind) for kind, value in scalars.items()}
    values |= {f"x.array.{kind.name}": ([value, value], V.ARRAY, kind) for kind, value in scalars.items()}
    path = tiny(tmp_path, metadata=values)
    assert_equals_gguf_reader(path)
    assert read_gguf(path).metadata["x.STRING"] == "a\u0141\U0001f40d\n"
    assert read_gguf(path).metadata["x.array.UINT64"] == [2**64 - 1] * 2


def test_other_alignment_equals_gguf_reader(tmp_path, monkeypatch):
    monkeypatch.setattr("gguf.gguf_writer.GGUF_DEFAULT_ALIGNMENT", 128)
    path = tiny(tmp_path, metadata={"general.alignment": 128})
    assert read_gguf(path).data_offset % 128 == 0
    assert_equals_gguf_reader(path)
    monkeypatch.undo()
    assert "multiple of the alignment 128" in refused(tiny(tmp_path, metadata={"general.alignment": 128}))


@pytest.mark.parametrize("alignment", [0, 3, 1 << 40, -32, 32.0, "32", [32]])
def test_alignment_that_is_no_power_of_two(tmp_path, alignment):
    kind = (alignment, gguf.GGUFValueType.INT64) if type(alignment) is int else alignment
    assert "key general.alignment: " in refused(tiny(tmp_path, metadata={"general.alignment": kind}))


def test_a_real_size_header(tmp_path):
    path = write_model(
        tmp_path / "glm.gguf",
        shape=GLM52,
        mtp=1,
        indexer_types=None,
        n_merges=GLM52_MERGES,
        types={"*_exps": T.Q2_K},
        fill="sparse",
    )
    checkpoint = npglm.load(path)
    assert len(checkpoint.tensors) == 1809
    assert checkpoint.metadata["tokenizer.ggml.tokens"] == vocabulary(154880, GLM52_MERGES)[0]
    assert len(checkpoint.metadata["tokenizer.ggml.merges"]) == GLM52_MERGES
    assert checkpoint.n_bytes == sum(t.nbytes for t in checkpoint.tensors.values()) > 250e9
    assert checkpoint.tensors["blk.77.ffn_down_exps.weight"].data.shape == (256 * 6144, 672)
    assert not checkpoint.tensors["blk.78.ffn_down_exps.weight"].rows(256 * 6144 - 1, 256 * 6144).any()


def test_a_header_without_end_is_refused_before_it_is_read(tmp_path):
    """A flipped bit in a string's length, in a file large enough to hold such a string."""
    path = tiny(tmp_path)
    data = bytearray(path.read_bytes())
    at = data.index(b"general.name") + len(b"general.name") + 4
    data[at : at + 8] = (1 << 36).to_bytes(8, "little")
    with open(path, "wb") as file:
        file.write(data)
        file.truncate(1 << 37)
    assert "tiny.gguf: truncated or damaged: key general.name needs 68719476736 bytes" in refused(path)


# --- paths and shards -------------------------------------------------------------------------------------------------------


def shards(path, **options) -> list[Path]:
    path.mkdir(exist_ok=True)
    first = tiny(path, **{"shards": 3, **options})
    assert first.name == "tiny-00001-of-00003.gguf"
    return sorted(path.glob("*.gguf"))


@pytest.mark.parametrize("metadata_shard", [False, True])
def test_any_shard_and_the_folder_open_the_whole(tmp_path, metadata_shard):
    paths = shards(tmp_path, metadata_shard=metadata_shard)
    (tmp_path / "whole").mkdir()
    whole = npglm.load(tiny(tmp_path / "whole"))
    assert bool(read_gguf(paths[0]).tensors) != metadata_shard
    for named in (*paths, tmp_path, str(paths[1])):
        checkpoint = npglm.load(named)
        assert checkpoint.path == paths[0]
        assert [f.path for f in checkpoint.files] == paths
        assert checkpoint.config == whole.config
        assert checkpoint.sha256 == read_gguf(paths[0]).header_sha256
        assert {n: t.data.tobytes() for n, t in checkpoint.tensors.items()} == {
            n: t.data.tobytes() for n, t in whole.tensors.items()
        }


def test_a_missing_shard_is_named(tmp_path):
    paths = shards(tmp_path)
    for gone in (1, 0):
        paths[gone].unlink()
        for named in (paths[2], tmp_path):
            assert refused(named) == f"{paths[gone]}: shard missing; the checkpoint has 3"


def test_a_truncated_shard_is_named(tmp_path):
    paths = shards(tmp_path)
    data = paths[1].read_bytes()
    for size in (len(data) - 1, len(data) // 2, 30, 0):
        paths[1].write_bytes(data[:size])
        assert refused(paths[0]).startswith("tiny-00002-of-00003.gguf: ")


def test_a_duplicated_shard_is_named(tmp_path):
    paths = shards(tmp_path)
    shutil.copy(paths[1], paths[2])
    assert refused(paths[0]) == "tiny-00003-of-00003.gguf: key split.no: expected 2, found 1"


def test_shards_in_the_wrong_order_are_named(tmp_path):
    paths = shards(tmp_path)
    shutil.copy(paths[0], tmp_path / "kept")
    shutil.copy(paths[1], paths[0])
    assert refused(paths[0]) == "tiny-00001-of-00003.gguf: key split.no: expected 0, found 1"


def test_a_shard_of_another_split_is_named(tmp_path):
    paths, others = shards(tmp_path / "a"), shards(tmp_path / "b", tied=True)
    shutil.copy(others[1], paths[1])
    message = refused(paths[0])
    assert message.startswith("tiny-00002-of-00003.gguf: shard of another checkpoint: key split.tensors.count is ")
    two = tiny(tmp_path / "b", shards=2)
    shutil.copy(two, paths[0])
    assert refused(paths[0]) == "tiny-00001-of-00003.gguf: key split.count: expected 3, found 2"


def test_a_shard_of_a_model_of_another_name_is_named(tmp_path):
    paths = shards(tmp_path)
    split = {"split.count": 3, "split.no": 1, "split.tensors.count": read_gguf(paths[0]).metadata["split.tensors.count"]}
    for key, value in (("general.name", "x" * 500), ("general.architecture", "deepseek2")):
        foreign = write_model(tmp_path / "foreign", shape=TINY, tokenizer=False, metadata={**split, key: value})
        shutil.move(foreign, paths[1])
        message = refused(paths[0])
        assert message.startswith(f"tiny-00002-of-00003.gguf: shard of another checkpoint: key {key} is ")
        assert len(message) < 300


def test_a_shard_of_a_model_of_another_shape_is_named(tmp_path):
    paths = shards(tmp_path / "a")
    other = write_model(tmp_path / "b.gguf", shape=TINY, shards=3, tokenizer=False, hidden=32)
    shutil.copy(other.with_name("b-00002-of-00003.gguf"), paths[1])
    assert refused(paths[0]).startswith("tiny-00002-of-00003.gguf: tensor ")


def test_a_tensor_in_two_shards_is_named(tmp_path):
    n_tensors = len(model_tensors(TINY)) + 1
    for i, drop in enumerate(((), ("blk.*", "token_embd.*", "output.*"))):  # the second one holds output_norm.weight alone
        metadata = {"split.count": 2, "split.no": i, "split.tensors.count": n_tensors}
        path = write_model(tmp_path / f"a-0000{i + 1}-of-00002.gguf", shape=TINY, tokenizer=False, metadata=metadata, drop=drop)
    assert refused(path) == "a-00002-of-00002.gguf: tensor 'output_norm.weight' is also in a-00001-of-00002.gguf"


def test_a_renamed_shard_says_what_is_missing(tmp_path):
    paths = shards(tmp_path)
    assert "keep all shards in one folder" in refused(paths[0].rename(tmp_path / "model.gguf"))


def test_shard_numbers_that_cannot_be(tmp_path):
    path = tiny(tmp_path)
    for name in ("a-00000-of-00003.gguf", "a-00004-of-00003.gguf", "a-00001-of-00000.gguf"):
        assert refused(shutil.copy(path, tmp_path / name)).startswith(f"{name}: shard ")


def test_folders_and_files_that_hold_no_checkpoint(tmp_path):
    assert refused(tmp_path) == f"{tmp_path}: expected one checkpoint in the folder, found 0"
    assert refused(tmp_path / "no.gguf") == f"{tmp_path / 'no.gguf'}: No such file or directory"
    shutil.copy(tiny(tmp_path), tmp_path / "second.gguf")
    assert refused(tmp_path) == f"{tmp_path}: expected one checkpoint in the folder, found 2"
    empty = tmp_path / "empty.gguf"
    empty.touch()
    assert refused(empty) == "empty.gguf: the file is empty"
    empty.write_bytes(b"PK\3\4" * 100)
    assert refused(empty) == "empty.gguf: not a GGUF file (magic bytes missing)"


@pytest.mark.parametrize(("version", "hint"), [(1, ""), (4, ""), (3 << 24, " (big endian?)")])
def test_other_versions(tmp_path, version, hint):
    path = tiny(tmp_path)
    data = bytearray(path.read_bytes())
    data[4:8] = version.to_bytes(4, "little")
    path.write_bytes(data)
    assert refused(path) == f"tiny.gguf: GGUF version {version} is not supported, only 2 and 3{hint}"


def test_a_vocabulary_without_a_model():
    assert refused(GOLDEN / "vocab-151k.gguf") == "vocab-151k.gguf: no tensors; a vocabulary alone cannot be run"


# --- which tensors, of which shape and type -----------------------------------------------------------------------------------


REQUIRED = [n for n in model_tensors(TINY, indexer_on_shared=False) if n != "output.weight" and "exp_probs_b" not in n]


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_tensor_is_named(tmp_path, name):
    assert refused(tiny(tmp_path, drop=(name,), fill="sparse")) == f"tiny.gguf: tensor {name} is missing"


@pytest.mark.parametrize("name", [*REQUIRED, "output.weight", "blk.1.exp_probs_b.bias"])
def test_a_wrong_shape_is_named(tmp_path, name):
    dims = model_tensors(TINY)[name]
    wrong = [(dims[0] + 1, *dims[1:]), (1, *dims), (*dims[:-1], dims[-1] * 2)]
    if len(set(dims)) > 1:
        wrong.append(dims[::-1])
    for found in wrong:
        message = refused(tiny(tmp_path, shapes={name: found}, types={name: T.F32}, fill="sparse"))
        assert message.startswith(f"tiny.gguf: tensor {name}: shape {list(found)}, expected {list(dims)} [")


@pytest.mark.parametrize("name", [n for n, dims in model_tensors(TINY, indexer_on_shared=False).items() if len(dims) == 1])
def test_vectors_are_floats(tmp_path, name):
    n = model_tensors(TINY)[name][0]
    for kind in (T.F32, T.F16, T.BF16):
        assert npglm.load(tiny(tmp_path, types={name: kind}, fill="sparse")).tensors[name].type == kind
    quantised = T.Q8_0 if n % 32 == 0 else T.I32
    message = refused(tiny(tmp_path, types={name: quantised}, fill="sparse"))
    assert message == f"tiny.gguf: tensor {name}: type {quantised.name} cannot be used here"


@pytest.mark.parametrize("kind", [T.I8, T.I32, T.F64])
def test_types_that_no_one_decodes(tmp_path, kind):
    name = "blk.2.attn_output.weight"
    message = refused(tiny(tmp_path, types={name: kind}, fill="sparse"))
    assert message == f"tiny.gguf: tensor {name}: type {kind.name} cannot be used here"


def test_weights_are_the_tensors_by_name(tmp_path):
    checkpoint = npglm.load(tiny(tmp_path))
    tensors, weights = checkpoint.tensors, checkpoint.weights
    assert weights.token_embd is tensors["token_embd.weight"]
    assert weights.output is tensors["output.weight"]
    assert [sorted(vars(layer)) for layer in weights.layers] == [
        sorted(
            n.split(".", 2)[2]
            .removesuffix(".weight")
            .replace("k_norm.bias", "k_norm_bias")
            .removesuffix(".bias")
            .replace(".", "_")
            for n in model_tensors(TINY, indexer_on_shared=False)
            if n.startswith(f"blk.{i}.")
        )
        for i in range(3)
    ]
    assert weights.layers[2].indexer_k_norm_bias is tensors["blk.2.indexer.k_norm.bias"]
    assert weights.layers[1].exp_probs_b is tensors["blk.1.exp_probs_b.bias"]
    assert weights.layers[0].ffn_down is tensors["blk.0.ffn_down.weight"]


def test_tied_output_and_no_bias(tmp_path):
    weights = npglm.load(tiny(tmp_path, tied=True, bias=False)).weights
    assert weights.output is weights.token_embd
    assert [layer.exp_probs_b for layer in weights.layers[1:]] == [None, None]


def test_indexer_tensors_of_shared_layers_are_of_no_interest(tmp_path):
    without = npglm.load(tiny(tmp_path, indexer_on_shared=False))
    assert "blk.1.indexer.proj.weight" not in without.tensors
    wrong = {"blk.1.indexer.proj.weight": (1, 2)}
    for checkpoint in (without, npglm.load(tiny(tmp_path, shapes=wrong))):
        assert not hasattr(checkpoint.weights.layers[1], "indexer_proj")
        assert hasattr(checkpoint.weights.layers[2], "indexer_proj")


@pytest.mark.parametrize("mtp_tensors", [True, False])
def test_mtp_blocks_present_or_absent(tmp_path, mtp_tensors):
    checkpoint = npglm.load(tiny(tmp_path, mtp=2, mtp_tensors=mtp_tensors))
    assert ("blk.4.nextn.eh_proj.weight" in checkpoint.tensors) == mtp_tensors
    assert (checkpoint.config.n_mtp, len(checkpoint.weights.layers)) == (2, 3)


def test_notes_say_what_was_assumed(tmp_path):
    assert npglm.load(tiny(tmp_path)).notes() == []
    short = npglm.load(tiny(tmp_path, mtp=1, indexer_types=None)).notes()
    assert len(short) == 2
    assert "1 MTP layer" in short[0]
    assert short[1].endswith("context length 4096: layers are all full")
    long = npglm.load(tiny(tmp_path, indexer_types=None, context=1048576, n_layers=5)).notes()
    assert long[0].endswith("context length 1048576: layers are shared by GLM-5.2's table")


def test_an_mtp_block_is_never_run_as_a_layer(tmp_path):
    path = tiny(tmp_path, mtp=1, indexer_types_blocks=True, metadata={f"{ARCH}.nextn_predict_layers": None})
    assert "tensor 'blk.3.nextn.eh_proj.weight' is not known here" in refused(path)


@pytest.mark.parametrize(
    "name",
    ["blk.0.attn_q_a.bias", "blk.1.ffn_down_exps.scale", "output.bias", "rope_freqs.weight", "blk.x", "blk.1.a\nb" + "c" * 999],
)
def test_a_tensor_that_no_op_uses_is_not_passed_over(tmp_path, name):
    message = refused(tiny(tmp_path, shapes={name: (8,)}))
    assert message.startswith(f"tiny.gguf: tensor {name!r:.80} is not known here")
    assert len(message) < 200


def test_kv_b_beside_its_halves_is_passed_over(tmp_path):
    name = "blk.1.attn_kv_b.weight"
    assert name in npglm.load(tiny(tmp_path, shapes={name: (160, 128)})).tensors


# --- values -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL_TYPES, ids=lambda kind: kind.name)
def test_random_blocks_are_finite_and_of_the_scale_asked_for(kind):
    rng = np.random.Generator(np.random.SFC64([3]))
    values = dequantize(random_blocks(kind, 200, 512, rng, 0.05), kind)
    assert values.shape == (200, 512)
    assert np.isfinite(values).all()
    assert 0.04 < values.std() < 0.06
    assert abs(values.mean()) < 0.006
    assert len(np.unique(values)) > 3


def test_every_type_that_gguf_decodes_loads_and_decodes(tmp_path):
    assert set(ALL_TYPES) == DECODABLE
    types = {f"blk.{i}.ffn_up.weight": kind for i, kind in enumerate(ALL_TYPES)}
    path = tiny(tmp_path, hidden=256, n_layers=len(ALL_TYPES), n_dense=len(ALL_TYPES), full=None, types=types)
    weights, reader = npglm.load(path).weights, {t.name: t for t in gguf.GGUFReader(path).tensors}
    for i, kind in enumerate(ALL_TYPES):
        tensor = weights.layers[i].ffn_up
        assert (tensor.type, tensor.shape, tensor.n_rows) == (kind, (160, 256), 160)
        expected = dequantize(np.array(reader[tensor.name].data), kind).reshape(160, 256)
        assert np.isfinite(expected).all()
        assert expected.std() > 0.01
        for first, last in ((0, 160), (7, 9), (159, 160), (31, 98)):
            rows = tensor.rows(first, last)
            assert rows.dtype == np.float32
            np.testing.assert_array_equal(rows, expected[first:last])
        np.testing.assert_array_equal(tensor.decode(), expected)


def test_expert_rows_lie_behind_each_other(tmp_path):
    tensor = npglm.load(tiny(tmp_path)).weights.layers[1].ffn_down_exps
    assert tensor.shape == (6, 64, 192)
    np.testing.assert_array_equal(tensor.rows(3 * 64, 4 * 64), tensor.decode()[3])


def fake(n_rows, n_cols) -> Tensor:
    return Tensor("t", (n_rows, n_cols), T.F32, np.empty((n_rows, 0), np.uint8))


def test_row_blocks_cover_all_rows_within_the_bound(monkeypatch):
    assert npglm.checkpoint.DECODE_BYTES <= 256 << 20
    monkeypatch.setattr(npglm.checkpoint, "DECODE_BYTES", 4 * 70)
    for n_rows, n_cols, start, stop in (
        (23, 10, 0, None),
        (23, 10, 5, 20),
        (1, 10, 0, None),
        (9, 71, 0, None),
        (21, 10, 0, 21),
    ):
        blocks = list(fake(n_rows, n_cols).row_blocks(start, stop))
        rows = [row for first, last in blocks for row in range(first, last)]
        assert rows == list(range(start, n_rows if stop is None else stop))
        assert all((last - first) * n_cols <= 70 or last - first == 1 for first, last in blocks)
        assert len(blocks) == -(-len(rows) // max(1, 70 // n_cols))


def test_row_blocks_of_the_real_head():
    blocks = list(fake(154880, 6144).row_blocks())
    assert max(last - first for first, last in blocks) * 6144 * 4 <= 256 << 20
    assert blocks[-1][1] == 154880
    assert list(fake(3, 1 << 28).row_blocks()) == [(0, 1), (1, 2), (2, 3)]


def test_nothing_is_decoded_or_copied_on_opening(tmp_path):
    checkpoint = npglm.load(tiny(tmp_path))
    for tensor in checkpoint.tensors.values():
        assert not tensor.data.flags.writeable
        assert not tensor.data.flags.owndata
    assert FLOAT_TYPES < DECODABLE
    assert isinstance(checkpoint, Checkpoint)
    assert shard_paths(checkpoint.path) == [checkpoint.path]


def test_more_shards_than_the_limit_of_open_files(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    first = write_model(tmp_path / "m.gguf", shards=90)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, hard))
        assert len(npglm.load(first).files) == len(list(tmp_path.iterdir())) > 40
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
