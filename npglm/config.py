"""GlmConfig: the shape of a GLM-5 model, read from GGUF keys, and the axis letters used in every comment.

T new tokens        S cached tokens     D hidden            Y vocabulary
H attention heads   N nope dims a head  P rope dims a head  V value dims a head
Q query rank        R key/value rank    I indexer heads     J indexer dims a head
F dense FFN         E experts           K chosen experts    G expert FFN
"""

from dataclasses import dataclass

from npglm.errors import NpglmError

ARCHITECTURE = "glm-dsa"
INDEXER_NORM_EPS = 1e-6  # nn.LayerNorm of the indexer's keys in transformers' glm_moe_dsa; no GGUF key holds it
GLM52_CONTEXT = 1048576  # files of GLM-5.2 without indexer.types share top-k by GLM-5.2's table; older models are all full


@dataclass(frozen=True)
class GlmConfig:
    """Sizes are counts of elements; `full[i]` says whether layer i runs its own indexer or takes the last top-k."""

    name: str
    context_length: int
    vocab: int  # Y
    hidden: int  # D
    n_layers: int  # layers that run; the file may hold n_mtp more
    n_mtp: int
    n_dense: int  # the first n_dense layers have a dense FFN
    full: tuple[bool, ...]
    n_heads: int  # H
    nope: int  # N
    rope: int  # P
    v_dim: int  # V
    q_rank: int  # Q
    kv_rank: int  # R
    indexer_heads: int  # I
    indexer_dim: int  # J
    indexer_top_k: int
    ffn: int  # F
    n_experts: int  # E
    n_chosen: int  # K
    n_shared: int
    expert_ffn: int  # G
    shared_ffn: int  # S*G, the shared experts together
    expert_scale: float
    expert_norm: bool
    rms_eps: float
    indexer_eps: float
    rope_theta: float

    @property
    def axes(self) -> dict[str, int]:
        """Axis name -> size, for the axes that a model fixes; "S*G" is the width of the shared experts together."""
        c = self
        return {
            "Y": c.vocab, "D": c.hidden, "H": c.n_heads, "N": c.nope, "P": c.rope, "V": c.v_dim, "Q": c.q_rank, "R": c.kv_rank,
            "I": c.indexer_heads, "J": c.indexer_dim, "F": c.ffn, "E": c.n_experts, "K": c.n_chosen, "G": c.expert_ffn,
            "H*(N+P)": c.n_heads * (c.nope + c.rope), "H*V": c.n_heads * c.v_dim, "R+P": c.kv_rank + c.rope,
            "I*J": c.indexer_heads * c.indexer_dim, "S*G": c.shared_ffn,
        }  # fmt: skip

    @property
    def attn_scale(self) -> float:
        return (self.nope + self.rope) ** -0.5

    @property
    def indexer_scale(self) -> float:
        return (self.indexer_heads * self.indexer_dim) ** -0.5

    def is_moe(self, layer: int) -> bool:
        return layer >= self.n_dense

    def check_tokens(self, tokens: list[int]) -> None:
        """Raise NpglmError for an empty prompt, one longer than the model's context, or an id outside the vocabulary."""
        if not tokens:
            raise NpglmError("the prompt is empty")
        if len(tokens) > self.context_length:
            raise NpglmError(f"context overflow: {len(tokens)} tokens, the model's context is {self.context_length}")
        for token in tokens:
            if not 0 <= token < self.vocab:
                raise NpglmError(f"token id {token} is outside the vocabulary of {self.vocab}")

    @classmethod
    def from_metadata(cls, metadata: dict, source: str) -> "GlmConfig":
        """Read the `glm-dsa.*` keys. Raises NpglmError that names `source` and the key."""
        return _read(cls, Keys(metadata, source))


class Keys:
    """Typed look-ups in GGUF metadata, so that a wrong key is an error that names it."""

    def __init__(self, metadata: dict, source: str):
        self.metadata, self.source = metadata, source

    def error(self, key: str, what: str) -> NpglmError:
        return NpglmError(f"{self.source}: key {key}: {what}")

    def get(self, key: str, kind: type, default=None):
        value = self.metadata.get(key, default)
        if value is None:
            raise self.error(key, "missing")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise self.error(key, f"expected {kind.__name__}, found {type(value).__name__}")
        return value

    def size(self, name: str, default: int | None = None, low: int = 1, high: int = 1 << 24) -> int:
        key = f"{ARCHITECTURE}.{name}"
        value = self.get(key, int, default)
        if not low <= value <= high:
            raise self.error(key, f"{value} is outside {low}..{high}")
        return value

    def number(self, name: str, low: float, high: float) -> float:
        key = f"{ARCHITECTURE}.{name}"
        value = self.get(key, float)
        if not low <= value <= high:  # also true for NaN
            raise self.error(key, f"{value} is outside {low:g}..{high:g}")
        return value


def _read(cls, keys: Keys) -> GlmConfig:
    architecture = keys.get("general.architecture", str)
    if architecture != ARCHITECTURE:
        raise NpglmError(f"{keys.source}: architecture {architecture!r:.40} is not supported; npglm runs {ARCHITECTURE!r} only")
    blocks, n_mtp = keys.size("block_count", high=4096), keys.size("nextn_predict_layers", 0, low=0, high=4095)
    if n_mtp >= blocks:
        raise keys.error(f"{ARCHITECTURE}.nextn_predict_layers", f"{n_mtp} leaves none of {blocks} blocks to run")
    n_layers = blocks - n_mtp
    n_dense = min(keys.size("leading_dense_block_count", 0, low=0), n_layers)
    moe = n_dense < n_layers
    key_mla, rope = keys.size("attention.key_length_mla"), keys.size("rope.dimension_count")
    rank = keys.size("attention.kv_lora_rank")
    n_experts = keys.size("expert_count", None if moe else 1)
    n_shared = keys.size("expert_shared_count", None if moe else 1)
    expert_ffn = keys.size("expert_feed_forward_length", None if moe else 1)
    context = keys.size("context_length", high=1 << 31)
    config = cls(
        name=keys.get("general.name", str, ""),
        context_length=context,
        vocab=_vocab(keys),
        hidden=keys.size("embedding_length"),
        n_layers=n_layers,
        n_mtp=n_mtp,
        n_dense=n_dense,
        full=_indexer_types(keys, n_layers, blocks, context),
        n_heads=keys.size("attention.head_count"),
        nope=key_mla - rope,
        rope=rope,
        v_dim=keys.size("attention.value_length_mla"),
        q_rank=keys.size("attention.q_lora_rank"),
        kv_rank=rank,
        indexer_heads=keys.size("attention.indexer.head_count"),
        indexer_dim=keys.size("attention.indexer.key_length"),
        indexer_top_k=keys.size("attention.indexer.top_k"),
        ffn=keys.size("feed_forward_length", None if n_dense else 1),
        n_experts=n_experts,
        n_chosen=keys.size("expert_used_count", None if moe else 1, high=n_experts),
        n_shared=n_shared,
        expert_ffn=expert_ffn,
        shared_ffn=n_shared * expert_ffn,
        expert_scale=keys.number("expert_weights_scale", 1e-6, 1e6) if moe else 1.0,
        expert_norm=keys.get(f"{ARCHITECTURE}.expert_weights_norm", bool, None if moe else True),
        rms_eps=keys.number("attention.layer_norm_rms_epsilon", 0.0, 1.0),
        rope_theta=keys.number("rope.freq_base", 1.0, 1e12),
        indexer_eps=INDEXER_NORM_EPS,
    )
    if config.nope < 1:
        raise keys.error(f"{ARCHITECTURE}.attention.key_length_mla", f"{key_mla} leaves no room beside {rope} rope dimensions")
    if rope % 2 or rope > config.indexer_dim:
        raise keys.error(
            f"{ARCHITECTURE}.rope.dimension_count", f"{rope} must be even and at most the indexer's {config.indexer_dim}"
        )
    for name, expected in (
        ("attention.key_length", rank + rope),
        ("attention.value_length", rank),
        ("attention.head_count_kv", 1),
    ):
        if keys.size(name, expected) != expected:
            raise keys.error(f"{ARCHITECTURE}.{name}", f"expected {expected}, found {keys.size(name)}")
    _refuse_other_maths(keys, moe)
    return config


def _refuse_other_maths(keys: Keys, moe: bool) -> None:
    """Keys that would change the arithmetic in a way that no glm-dsa file uses and that we do not run."""
    for name, expected in (("expert_gating_func", 2), ("expert_group_count", 1), ("expert_group_used_count", 1)):
        value = keys.size(name, expected, low=0)
        if value not in (0, expected) and moe:  # 0: not said
            raise keys.error(f"{ARCHITECTURE}.{name}", f"expected {expected}, found {value}")
    for name, plain in (("type", ("none",)), ("factor", (0.0, 1.0))):
        value = keys.metadata.get(f"{ARCHITECTURE}.rope.scaling.{name}", plain[0])
        if value not in plain:
            raise keys.error(f"{ARCHITECTURE}.rope.scaling.{name}", f"rope scaling {value!r:.40} is not supported")


def _vocab(keys: Keys) -> int:
    tokens = keys.metadata.get("tokenizer.ggml.tokens")
    n_tokens = len(tokens) if isinstance(tokens, list) else 0
    vocab = keys.size("vocab_size", n_tokens or None)
    if n_tokens > vocab:
        raise keys.error("tokenizer.ggml.tokens", f"{n_tokens} tokens, {ARCHITECTURE}.vocab_size is {vocab}")
    return vocab


def _indexer_types(keys: Keys, n_layers: int, blocks: int, context: int) -> tuple[bool, ...]:
    """Which layers run their own indexer; llama.cpp#25407 writes booleans, other converters integers or "full"/"shared"."""
    key = f"{ARCHITECTURE}.attention.indexer.types"
    types = keys.metadata.get(key)
    if types is None:  # period 4 from layer 2 on: 0 1 2 6 10 ... (transformers: index_topk_freq 4, offset 3)
        return tuple(context < GLM52_CONTEXT or max(i - 2, 0) % 4 == 0 for i in range(n_layers))
    if not isinstance(types, list) or len(types) not in (n_layers, blocks):
        found = f"{len(types)} entries" if isinstance(types, list) else type(types).__name__
        raise keys.error(key, f"expected an array of {n_layers} entries (or {blocks}), found {found}")
    words = {"full": True, "shared": False, True: True, False: False}  # 1 == True, 0 == False
    if any(type(t) not in (bool, int, str) or t not in words for t in types):
        raise keys.error(key, "entries must be booleans, 0/1, or 'full'/'shared'")
    full = tuple(words[t] for t in types[:n_layers])
    if not full[0]:
        raise keys.error(key, "the first layer shares a top-k, but no layer before it makes one")
    return full
