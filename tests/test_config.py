"""GlmConfig from GGUF keys: what real files say, in all the ways they say it, and what must be refused by name."""

import math

import pytest
from synth import ARCH, GLM52, Shape, model_metadata

from npglm.config import GlmConfig
from npglm.errors import NpglmError

TABLE = [0, 1, 2, *range(6, 75, 4)]  # GLM-5.2's full layers
REQUIRED = [
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.layer_norm_rms_epsilon", "attention.key_length_mla", "attention.value_length_mla", "attention.q_lora_rank",
    "attention.kv_lora_rank", "attention.indexer.head_count", "attention.indexer.key_length", "attention.indexer.top_k",
    "rope.freq_base", "rope.dimension_count", "expert_count", "expert_used_count", "expert_shared_count",
    "expert_feed_forward_length", "expert_weights_scale", "expert_weights_norm", "vocab_size",
]  # fmt: skip


def keys(changes=None, **options) -> dict:
    """The default shape's metadata with `changes`: key without the architecture -> value, or None to leave it out."""
    metadata = model_metadata(options.pop("shape", Shape()), **options)
    for name, value in (changes or {}).items():
        name = name if "general" in name or "tokenizer" in name else f"{ARCH}.{name}"
        metadata[name] = value
        if value is None:
            del metadata[name]
    return metadata


def config(changes=None, **options) -> GlmConfig:
    return GlmConfig.from_metadata(keys(changes, **options), "m.gguf")


def refused(changes, **options) -> str:
    with pytest.raises(NpglmError) as error:
        config(changes, **options)
    assert str(error.value).startswith("m.gguf: ")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300
    return str(error.value)


def test_every_field_comes_from_its_key():
    c, s = config({"general.name": "a name"}), Shape()
    assert (c.name, c.vocab, c.hidden, c.context_length) == ("a name", s.vocab, s.hidden, s.context)
    assert (c.n_layers, c.n_mtp, c.n_dense, c.full) == (6, 0, 2, s.full)
    assert (c.n_heads, c.nope, c.rope, c.v_dim, c.q_rank, c.kv_rank) == (5, 96, 16, 32, 224, 128)
    assert (c.indexer_heads, c.indexer_dim, c.indexer_top_k, c.ffn) == (3, 64, 8, 768)
    assert (c.n_experts, c.n_chosen, c.n_shared, c.expert_ffn) == (17, 4, 1, 512)
    assert (c.expert_scale, c.expert_norm, c.rms_eps, c.indexer_eps, c.rope_theta) == (2.5, True, 1e-5, 1e-6, 8e6)
    assert (c.attn_scale, c.indexer_scale) == (112**-0.5, 192**-0.5)
    assert [c.is_moe(i) for i in range(6)] == [False] * 2 + [True] * 4


def test_the_real_model():
    c = GlmConfig.from_metadata(model_metadata(GLM52, mtp=1, indexer_types=None), "m")
    assert (c.n_layers, c.n_mtp, c.n_dense) == (78, 1, 3)
    assert [i for i, full in enumerate(c.full) if full] == TABLE
    assert (c.attn_scale, c.indexer_scale) == (1 / 16, 1 / 64)
    assert c.axes["H*(N+P)"] == 16384
    assert c.axes["R+P"] == 576


def test_no_two_axes_of_the_synthetic_shape_are_equal():
    axes = config().axes
    del axes["S*G"]  # one shared expert: G
    assert len(set(axes.values())) == len(axes)


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_key_is_named(name):
    assert refused({name: None}) == f"m.gguf: key {ARCH}.{name}: missing"


def test_a_file_without_an_architecture():
    assert refused({"general.architecture": None}) == "m.gguf: key general.architecture: missing"


@pytest.mark.parametrize("name", ["glm5next", "deepseek2", "deepseek32", "glm4moe", "clip", "GLM-DSA", "x" * 9999])
def test_other_architectures_are_refused_by_name(name):
    message = refused({"general.architecture": name})
    assert f"architecture {name!r:.40} is not supported" in message
    assert "npglm runs 'glm-dsa' only" in message


@pytest.mark.parametrize(
    "name",
    ["general.name", "attention.head_count_kv", "attention.key_length", "attention.value_length", "expert_gating_func"],
)
def test_keys_that_may_be_absent(name):
    full_name = name if name == "general.name" else f"{ARCH}.{name}"
    assert full_name in keys()
    c = config({name: None})
    assert (c.name, c.full) == ("" if name == "general.name" else "synthetic", Shape().full)
    assert c == config({"general.name": c.name})


def test_a_dense_model_needs_no_expert_keys():
    moe = {name: None for name in REQUIRED if name.startswith("expert")}
    c = config({**moe, "leading_dense_block_count": 6})
    assert c.n_dense == 6
    assert "expert_count: missing" in refused({**moe, "leading_dense_block_count": 5})


def test_leading_dense_blocks_beyond_the_last_layer():
    assert config({"leading_dense_block_count": 99}).n_dense == 6
    assert config({"leading_dense_block_count": None}).n_dense == 0
    assert config({"leading_dense_block_count": 0, "feed_forward_length": None}).n_dense == 0


# --- which layers have an indexer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every_block", [False, True])
@pytest.mark.parametrize("kind", ["bool", "int", "str"])
def test_indexer_types_in_every_form(kind, every_block):
    c = config(mtp=1, indexer_types=kind, indexer_types_blocks=every_block)
    assert c.full == Shape().full
    assert all(type(full) is bool for full in c.full)


def test_indexer_types_absent():
    shape = Shape(n_layers=12)
    long = config({"context_length": 1048576}, shape=shape, indexer_types=None)
    assert long.full == tuple(i in TABLE for i in range(12))
    short = config({"context_length": 1048575}, shape=shape, indexer_types=None)
    assert short.full == (True,) * 12


@pytest.mark.parametrize(
    ("types", "message"),
    [
        ([True] * 5, "expected an array of 6 entries (or 6), found 5 entries"),
        ([True] * 7, "found 7 entries"),
        ([], "found 0 entries"),
        (True, "found bool"),
        ("full", "found str"),
        ([0, 1, 1, 1, 1, 1], "the first layer shares a top-k"),
        ([1, 2, 1, 1, 1, 1], "entries must be booleans, 0/1, or 'full'/'shared'"),
        ([1.0, 0.0, 1.0, 1.0, 1.0, 1.0], "entries must be booleans"),
        (["full", "Full", "full", "full", "full", "full"], "entries must be booleans"),
        ([[True], [True], [True], [True], [True], [True]], "entries must be booleans"),
    ],
)
def test_indexer_types_that_make_no_sense(types, message):
    text = refused({"attention.indexer.types": types})
    assert f"key {ARCH}.attention.indexer.types: " in text
    assert message in text


def test_mtp_blocks_do_not_run():
    c = config(mtp=2)
    assert (c.n_layers, c.n_mtp, len(c.full)) == (6, 2, 6)
    assert "leaves none of 6 blocks to run" in refused({"nextn_predict_layers": 6})


# --- values that cannot be, or that mean other arithmetic ---------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in REQUIRED if n not in ("expert_weights_norm", "expert_weights_scale")])
@pytest.mark.parametrize("value", [0, -1, 1 << 62, "8", True, [8], math.nan, math.inf, None, 0.0, -1e30, 1e300])
def test_a_hostile_value_is_an_error_that_names_its_key(name, value):
    if name == "attention.layer_norm_rms_epsilon" and value == 0:
        assert config({name: value}).rms_eps == 0
    else:
        assert f"key {ARCH}.{name}: " in refused({name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": 5000}, "block_count: 5000 is outside 1..4096"),
        ({"attention.layer_norm_rms_epsilon": math.nan}, "layer_norm_rms_epsilon: nan is outside 0..1"),
        ({"attention.layer_norm_rms_epsilon": 1.5}, "layer_norm_rms_epsilon: 1.5 is outside"),
        ({"rope.freq_base": math.inf}, "rope.freq_base: inf is outside"),
        ({"expert_weights_scale": math.nan}, "expert_weights_scale: nan is outside"),
        ({"expert_weights_scale": 0.0}, "expert_weights_scale: 0.0 is outside"),
        ({"expert_weights_norm": 1}, "expert_weights_norm: expected bool, found int"),
        ({"general.name": ["x"] * 1000}, "general.name: expected str, found list"),
        ({"expert_used_count": 18}, "expert_used_count: 18 is outside 1..17"),
        ({"rope.dimension_count": 112}, "key_length_mla: 112 leaves no room beside 112 rope dimensions"),
        ({"rope.dimension_count": 15}, "rope.dimension_count: 15 must be even"),
        ({"rope.dimension_count": 66, "attention.key_length": None}, "66 must be even and at most the indexer's 64"),
        ({"attention.key_length": 143}, "attention.key_length: expected 144, found 143"),
        ({"attention.value_length": 127}, "attention.value_length: expected 128, found 127"),
        ({"attention.head_count_kv": 5}, "attention.head_count_kv: expected 1, found 5"),
        ({"attention.head_count": [5, 5]}, "attention.head_count: expected int, found list"),
        ({"expert_gating_func": 1}, "expert_gating_func: expected 2, found 1"),
        ({"expert_group_count": 8}, "expert_group_count: expected 1, found 8"),
        ({"expert_group_used_count": 4}, "expert_group_used_count: expected 1, found 4"),
        ({"rope.scaling.type": "yarn"}, "rope scaling 'yarn' is not supported"),
        ({"rope.scaling.factor": 40.0}, "rope scaling 40.0 is not supported"),
        ({"rope.scaling.type": ["yarn"] * 999}, "rope scaling ['yarn', "),
        ({"tokenizer.ggml.tokens": ["a"] * 308}, "tokenizer.ggml.tokens: 308 tokens, glm-dsa.vocab_size is 307"),
        ({"tokenizer.ggml.tokens": "abc", "vocab_size": None}, "vocab_size: missing"),
    ],
)
def test_refused_values(changes, message):
    assert message in refused(changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope.scaling.type": "none", "rope.scaling.factor": 1.0},
        {"expert_group_count": 1, "expert_group_used_count": 1},
        {"expert_group_count": 0, "expert_group_used_count": 0, "expert_gating_func": 0},
        {"tokenizer.ggml.tokens": ["a"] * 300},
    ],
)
def test_values_that_say_nothing_new(changes):
    assert config(changes) == config()


def test_the_vocabulary_counts_where_no_key_does():
    assert config({"vocab_size": None, "tokenizer.ggml.tokens": ["a"] * 99}).vocab == 99
