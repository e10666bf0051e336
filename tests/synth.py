"""Random `glm-dsa` GGUF files of any shape, written with the gguf package's GGUFWriter. Shares no code with npglm.

    path = write_model(tmp_path / "m.gguf", seed=1)                         # the default Shape: no two axes are equal
    path = write_model(path, hidden=512, n_experts=16)                      # any field of Shape by name
    path = write_model(path, types={"ffn_*_exps": T.IQ2_XS, "output": T.Q6_K})

Everything is a function of (seed, tensor name, shape, type): a tensor does not change when others are dropped, retyped or
sharded.

shape and **overrides: a Shape, and fields of it by name.
types: pattern -> GGMLQuantizationType, first match wins, before the default (routed experts Q2_K, matrices Q8_0, vectors and
    router F32). A pattern is matched with the full name, and with the name without `blk.N.` and `.weight`. Vectors ignore types
    that are no float type; a matrix whose rows do not fit the type's blocks falls back to Q8_0, then F16, as llama.cpp's
    quantiser does. A full name without wildcards is obeyed to the letter (to write files that are wrong).
shards, metadata_shard: the file becomes `-0000N-of-0000M`; metadata_shard: the first one holds no tensors. The first path is
    returned.
mtp: this many MTP blocks after the layers (block_count grows, nextn_predict_layers is written); mtp_tensors=False leaves theirs
    out.
indexer_types: "bool", "int", "str" or None (key left out: give `context` and `full` that agree). indexer_types_blocks: one
    entry for every block, MTP included. indexer_on_shared: shared layers hold (other, useless) indexer tensors, as Unsloth's
    files do.
tied: no `output.weight`. bias: `exp_probs_b.bias` is there. tokenizer: its keys are there; n_merges: see `vocabulary`.
metadata: full key -> value, (value, GGUFValueType) or None (left out). drop: patterns of tensor names or keys to leave out.
shapes: full tensor name -> another row-major shape (to write files that are wrong).
values: full tensor name -> its values (the tensor must be of a float type).
fill: "random"; "sparse" writes no tensor data at all: zeros that take no space on disk; or a function of a tensor's full name
    that returns the ranges of rows to write, [(first, last), ...], or None for all of them. What is not written is zeros
    without space.
tile_bytes: a tensor larger than this repeats one random chunk of rows (an odd number of them), so that writing big files is
    fast.

Weights are scaled so that the forward pass stays finite and activations O(1). The router's bias lies around 7, far above the
sigmoid scores; its spread is about theirs, so that both decide. `random_blocks(type, rows, cols, rng, scale)` makes the encoded
rows, for every type that gguf.quants decodes; `vocabulary(n_tokens, n_merges)` the tokens; GLM52 is the shape of the real model
(use fill="sparse"), WIDE a small one for its kernels.
"""

import re
import zlib
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import chain, cycle, islice
from math import prod
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUFValueType, GGUFWriter
from gguf import GGMLQuantizationType as T
from gguf.quants import _type_traits, dequantize, quantize

ARCH = "glm-dsa"
FLOATS = (T.F32, T.F16, T.BF16)
ALL_TYPES = tuple(dict.fromkeys((*FLOATS, *_type_traits)))  # all that gguf.quants decodes
SPECIALS = (
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>",
    "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
)  # fmt: skip
WORD_MERGES = ("Ġ t", "h e", "Ġt he", "i n", "a n", "e r", "Ġ a", "r e", "o n", "i s", "Ġ is", "o f", "Ġ of", "an d", "Ġ and")


@dataclass(frozen=True)
class Shape:
    """Axis letters as in npglm/config.py. By default no two axes are equal, and D, F and G fit 256-wide blocks."""

    vocab: int = 307  # Y
    hidden: int = 256  # D
    n_layers: int = 6
    n_dense: int = 2
    full: tuple[bool, ...] | None = (True, True, False, False, True, False)  # None: all of them
    n_heads: int = 5  # H
    nope: int = 96  # N
    rope: int = 16  # P
    v_dim: int = 32  # V
    q_rank: int = 224  # Q
    kv_rank: int = 128  # R
    indexer_heads: int = 3  # I
    indexer_dim: int = 64  # J
    indexer_top_k: int = 8
    ffn: int = 768  # F
    n_experts: int = 17  # E
    n_chosen: int = 4  # K
    n_shared: int = 1
    expert_ffn: int = 512  # G
    context: int = 4096
    expert_scale: float = 2.5
    rms_eps: float = 1e-5
    rope_theta: float = 8e6

    @property
    def full_layers(self) -> tuple[bool, ...]:
        """`full`, cut or continued with its last entry to n_layers entries."""
        full = self.full or (True,)
        return (full + full[-1:] * self.n_layers)[: self.n_layers]


# A small one that decodes with the kernels that GLM52 decodes with: widths are multiples of 256, attention is split.
WIDE = Shape(
    hidden=512, n_layers=3, n_dense=1, full=(True, True, False), n_heads=20, nope=64, q_rank=512, indexer_top_k=72, ffn=512,
    n_experts=6, n_chosen=2, expert_ffn=256, context=1 << 15,
)  # fmt: skip
GLM52 = Shape(
    vocab=154880, hidden=6144, n_layers=78, n_dense=3, full=tuple(i < 3 or (i - 2) % 4 == 0 for i in range(78)), n_heads=64,
    nope=192, rope=64, v_dim=256, q_rank=2048, kv_rank=512, indexer_heads=32, indexer_dim=128, indexer_top_k=2048, ffn=12288,
    n_experts=256, n_chosen=8, expert_ffn=2048, context=1048576,
)  # fmt: skip
GLM52_MERGES = 321649


def write_model(
    path,
    seed: int = 0,
    *,
    shape: Shape | None = None,
    types: dict | None = None,
    shards: int = 1,
    metadata_shard: bool = False,
    mtp: int = 0,
    mtp_tensors: bool = True,
    indexer_types: str | None = "bool",
    indexer_types_blocks: bool = False,
    indexer_on_shared: bool = True,
    tied: bool = False,
    bias: bool = True,
    tokenizer: bool = True,
    n_merges: int | None = None,
    metadata: dict | None = None,
    drop: tuple[str, ...] = (),
    shapes: dict | None = None,
    values: dict | None = None,
    fill="random",
    tile_bytes: int = 32 << 20,
    **overrides,
) -> Path:
    """Write the model; see the module's docstring. Returns the path of the file, or of its first shard."""
    s = replace(shape or Shape(), **overrides)
    keys = model_metadata(s, mtp, indexer_types, indexer_types_blocks)
    if tokenizer:
        keys |= tokenizer_metadata(s.vocab, n_merges)
    keys |= metadata or {}
    tensors = model_tensors(s, mtp if mtp_tensors else 0, indexer_on_shared, tied, bias) | (shapes or {})

    def dropped(name):
        return any(fnmatchcase(name, pattern) for pattern in drop)

    tensors = {name: tuple(dims) for name, dims in tensors.items() if not dropped(name)}
    per_shard = -(-len(tensors) // (shards - metadata_shard)) if shards > 1 else 0
    writer = GGUFWriter(Path(path), ARCH, split_max_tensors=per_shard, small_first_shard=metadata_shard)
    writer.kv_data = [{}]
    for key, value in keys.items():
        if value is not None and not dropped(key):
            writer.add_key_value(key, *_typed(value))
    plan = {}
    for name, dims in tensors.items():
        kind = _tensor_type(name, dims, types or {})
        block, block_bytes = GGML_QUANT_SIZES[kind]
        row_bytes = dims[-1] // block * block_bytes
        n_bytes = prod(dims[:-1]) * row_bytes
        plan[name] = (kind, dims, n_bytes)
        writer.add_tensor_info(name, dims, np.dtype(np.float32), n_bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    files = list(writer.fout)
    for name, (kind, dims, n_bytes) in plan.items():
        writer.write_tensor_data(_Data(name, kind, dims, n_bytes, seed, s, fill, tile_bytes, (values or {}).get(name)))
    for file in files:
        file.truncate(file.tell())  # a sparse file's last hole
    names = writer.format_shard_names(Path(path)) if shards > 1 else [Path(path)]
    writer.close()
    return names[0]


# --- metadata ---------------------------------------------------------------------------------------------------------------


def model_metadata(s: Shape, mtp: int = 0, indexer_types: str | None = "bool", indexer_types_blocks: bool = False) -> dict:
    """The keys of a real file, in its order; indexer_types as in write_model."""
    keys = {
        "general.architecture": ARCH,
        "general.name": "synthetic",
        "general.quantization_version": 2,
        f"{ARCH}.block_count": s.n_layers + mtp,
        f"{ARCH}.context_length": s.context,
        f"{ARCH}.embedding_length": s.hidden,
        f"{ARCH}.feed_forward_length": s.ffn,
        f"{ARCH}.attention.head_count": s.n_heads,
        f"{ARCH}.attention.head_count_kv": 1,
        f"{ARCH}.attention.layer_norm_rms_epsilon": s.rms_eps,
        f"{ARCH}.attention.key_length": s.kv_rank + s.rope,
        f"{ARCH}.attention.value_length": s.kv_rank,
        f"{ARCH}.attention.key_length_mla": s.nope + s.rope,
        f"{ARCH}.attention.value_length_mla": s.v_dim,
        f"{ARCH}.attention.q_lora_rank": s.q_rank,
        f"{ARCH}.attention.kv_lora_rank": s.kv_rank,
        f"{ARCH}.attention.indexer.head_count": s.indexer_heads,
        f"{ARCH}.attention.indexer.key_length": s.indexer_dim,
        f"{ARCH}.attention.indexer.top_k": s.indexer_top_k,
        f"{ARCH}.rope.freq_base": s.rope_theta,
        f"{ARCH}.rope.dimension_count": s.rope,
        f"{ARCH}.expert_count": s.n_experts,
        f"{ARCH}.expert_used_count": s.n_chosen,
        f"{ARCH}.expert_shared_count": s.n_shared,
        f"{ARCH}.expert_feed_forward_length": s.expert_ffn,
        f"{ARCH}.leading_dense_block_count": s.n_dense,
        f"{ARCH}.expert_weights_scale": s.expert_scale,
        f"{ARCH}.expert_weights_norm": True,
        f"{ARCH}.expert_gating_func": 2,
        f"{ARCH}.vocab_size": s.vocab,
    }
    if mtp:
        keys[f"{ARCH}.nextn_predict_layers"] = mtp
    if indexer_types:
        full = s.full_layers + (True,) * (mtp if indexer_types_blocks else 0)
        write = {"bool": bool, "int": int, "str": lambda f: "full" if f else "shared"}[indexer_types]
        keys[f"{ARCH}.attention.indexer.types"] = [write(f) for f in full]
    return keys


def tokenizer_metadata(vocab: int, n_merges: int | None = None) -> dict:
    tokens, types, merges = vocabulary(vocab, n_merges)
    ids = {text: i for i, text in enumerate(tokens)}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "glm4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": ids["<|endoftext|>"],
        "tokenizer.ggml.eot_token_id": ids["<|user|>"],
        "tokenizer.ggml.bos_token_id": ids["[gMASK]"],
        "tokenizer.ggml.unknown_token_id": ids["<|endoftext|>"],
        "tokenizer.ggml.padding_token_id": ids["<|endoftext|>"],
    }


def vocabulary(n_tokens: int, n_merges: int | None = None) -> tuple[list[str], list[int], list[str]]:
    """Tokens, their types and merges: 256 byte symbols, what the merges make, GLM's special tokens, then unused padding.

    n_merges None: some English pairs. Else that many: all splits of all two- and three-letter words, as far as tokens go.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols = [chr(b) for b in printable] + [chr(0x100 + i) for i in range(256 - len(printable))]  # GPT-2's names of the bytes
    room = n_tokens - 256 - len(SPECIALS)
    if room < 0:
        raise ValueError(f"{n_tokens} tokens are too few for the bytes and the special tokens; write tokenizer=False")
    if n_merges is None:
        merges = list(WORD_MERGES[:room])
        words = [m.replace(" ", "") for m in merges]
    else:
        letters = [*"ĠabcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", *symbols[94:200]]
        words = (a + b for a in letters for b in letters)
        words = [*islice(chain(words, (a + b + c for a in letters for b in letters for c in letters)), room)]
        merges = [f"{w[:i]} {w[i:]}" for w in words for i in range(1, len(w))]
        merges = [*islice(cycle(merges), n_merges)]  # the same pair again changes nothing: the first one counts
    tokens = symbols + words + list(SPECIALS)
    types = [1] * (256 + len(words)) + [3] * len(SPECIALS)
    padding = range(len(tokens), n_tokens)
    return tokens + [f"[PAD{i}]" for i in padding], types + [5] * len(padding), merges


def _typed(value) -> tuple:
    """A Python value -> (value, GGUF type, element type)."""
    if isinstance(value, tuple):
        return (*value, None)[:3]
    if isinstance(value, bool):
        return value, GGUFValueType.BOOL, None
    if isinstance(value, int):
        return value, GGUFValueType.UINT32, None
    if isinstance(value, float):
        return value, GGUFValueType.FLOAT32, None
    if isinstance(value, str):
        return value, GGUFValueType.STRING, None
    return value, GGUFValueType.ARRAY, None


# --- tensors ----------------------------------------------------------------------------------------------------------------


def model_tensors(s: Shape, mtp: int = 0, indexer_on_shared: bool = True, tied: bool = False, bias: bool = True) -> dict:
    """Name -> row-major shape of every tensor, as ggml-org's converter writes them."""
    out = {"token_embd.weight": (s.vocab, s.hidden), "output_norm.weight": (s.hidden,)}
    if not tied:
        out["output.weight"] = (s.vocab, s.hidden)
    full = s.full_layers
    for i in range(s.n_layers + mtp):
        layer = {
            "attn_norm.weight": (s.hidden,),
            "attn_q_a.weight": (s.q_rank, s.hidden),
            "attn_q_a_norm.weight": (s.q_rank,),
            "attn_q_b.weight": (s.n_heads * (s.nope + s.rope), s.q_rank),
            "attn_kv_a_mqa.weight": (s.kv_rank + s.rope, s.hidden),
            "attn_kv_a_norm.weight": (s.kv_rank,),
            "attn_k_b.weight": (s.n_heads, s.kv_rank, s.nope),
            "attn_v_b.weight": (s.n_heads, s.v_dim, s.kv_rank),
            "attn_output.weight": (s.hidden, s.n_heads * s.v_dim),
            "ffn_norm.weight": (s.hidden,),
        }
        if i >= s.n_layers or full[i] or indexer_on_shared:
            layer |= {
                "indexer.attn_q_b.weight": (s.indexer_heads * s.indexer_dim, s.q_rank),
                "indexer.attn_k.weight": (s.indexer_dim, s.hidden),
                "indexer.k_norm.weight": (s.indexer_dim,),
                "indexer.k_norm.bias": (s.indexer_dim,),
                "indexer.proj.weight": (s.indexer_heads, s.hidden),
            }
        if i < s.n_dense:
            layer |= {
                "ffn_gate.weight": (s.ffn, s.hidden),
                "ffn_up.weight": (s.ffn, s.hidden),
                "ffn_down.weight": (s.hidden, s.ffn),
            }
        else:
            shared = s.n_shared * s.expert_ffn
            layer |= {
                "ffn_gate_inp.weight": (s.n_experts, s.hidden),
                "exp_probs_b.bias": (s.n_experts,),
                "ffn_gate_exps.weight": (s.n_experts, s.expert_ffn, s.hidden),
                "ffn_up_exps.weight": (s.n_experts, s.expert_ffn, s.hidden),
                "ffn_down_exps.weight": (s.n_experts, s.hidden, s.expert_ffn),
                "ffn_gate_shexp.weight": (shared, s.hidden),
                "ffn_up_shexp.weight": (shared, s.hidden),
                "ffn_down_shexp.weight": (s.hidden, shared),
            }
            if not bias:
                del layer["exp_probs_b.bias"]
        if i >= s.n_layers:
            layer |= {
                "nextn.eh_proj.weight": (s.hidden, 2 * s.hidden),
                "nextn.enorm.weight": (s.hidden,),
                "nextn.hnorm.weight": (s.hidden,),
                "nextn.shared_head_norm.weight": (s.hidden,),
            }
        out |= {f"blk.{i}.{suffix}": dims for suffix, dims in layer.items()}
    return out


def _short(name: str) -> str:
    return re.sub(r"^blk\.\d+\.", "", name).removesuffix(".weight")


def _tensor_type(name: str, dims: tuple[int, ...], types: dict) -> T:
    if name in types:
        return types[name]
    default = T.Q2_K if _short(name).endswith("_exps") else T.Q8_0
    if len(dims) == 1 or _short(name) == "ffn_gate_inp":
        default = T.F32
    chosen = next((t for p, t in types.items() if fnmatchcase(name, p) or fnmatchcase(_short(name), p)), default)
    if len(dims) == 1:
        return chosen if chosen in FLOATS else T.F32
    return next(t for t in (chosen, T.Q8_0, T.F16) if dims[-1] % GGML_QUANT_SIZES[t][0] == 0)


class _Data:
    """What GGUFWriter.write_tensor_data needs of an array: nbytes and tofile. Nothing is made before it is written."""

    def __init__(self, name, kind, dims, nbytes, seed, s: Shape, fill, tile_bytes, values):
        self.name, self.kind, self.dims, self.nbytes, self.fill, self.tile_bytes = name, kind, dims, nbytes, fill, tile_bytes
        self.rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(name.encode())]))
        self.shape, self.values = s, values

    def tofile(self, file) -> None:
        start, n_rows = file.tell(), prod(self.dims[:-1])
        row_bytes = self.nbytes // n_rows
        if self.values is not None:
            file.write(_encode_floats(self.values, self.kind).tobytes())
        elif self.fill != "sparse":
            ranges = self.fill(self.name) if callable(self.fill) else None
            tile = n_rows if self.nbytes <= self.tile_bytes else min(n_rows, self.tile_bytes // row_bytes | 1)
            data = memoryview(self.rows(tile)).cast("B")
            for first, last in [(0, n_rows)] if ranges is None else ranges:
                file.seek(start + first * row_bytes)
                while first < last:  # row i holds the chunk's row i % tile
                    at = first % tile
                    n = min(tile - at, last - first)
                    file.write(data[at * row_bytes : (at + n) * row_bytes])
                    first += n
        file.seek(start + self.nbytes)

    def rows(self, n_rows: int) -> np.ndarray:
        short, n_cols, s = _short(self.name), self.dims[-1], self.shape
        if short.endswith("norm"):
            values = 1 + 0.1 * self.rng.standard_normal((n_rows, n_cols), np.float32)
        elif short == "exp_probs_b.bias":
            values = 7 + 0.2 * self.rng.standard_normal((n_rows, n_cols), np.float32)
        elif short.endswith(".bias"):
            values = 0.1 * self.rng.standard_normal((n_rows, n_cols), np.float32)
        else:
            scale = 0.25 if short == "token_embd" else n_cols**-0.5
            if short in ("ffn_down", "ffn_down_exps", "ffn_down_shexp", "attn_output"):
                scale *= 2  # SwiGLU and attention make small values of O(1) ones
            if short == "ffn_down_exps":
                scale *= (s.n_chosen**0.5) / s.expert_scale  # weights are about scale / K each
            return random_blocks(self.kind, n_rows, n_cols, self.rng, scale)
        if self.kind in FLOATS:
            return _encode_floats(values, self.kind)
        return random_blocks(self.kind, n_rows, n_cols, self.rng, 1.0)  # an error on purpose


# --- random valid blocks ----------------------------------------------------------------------------------------------------

# Where a block holds its f16 scale, and then: the f16 offset, as a multiple of the scale that makes the mean zero.
SCALE_AT = {
    T.Q4_0: (0,), T.Q4_1: (0, 2, -7.5), T.Q5_0: (0,), T.Q5_1: (0, 2, -15.5), T.Q8_0: (0,), T.Q2_K: (80, 82, 1.5),
    T.Q3_K: (108,),
    T.Q4_K: (0, 2, 7.5), T.Q5_K: (0, 2, 15.5), T.Q6_K: (208,), T.TQ1_0: (52,), T.TQ2_0: (64,), T.IQ2_XXS: (0,), T.IQ2_XS: (0,),
    T.IQ2_S: (0,), T.IQ3_XXS: (0,), T.IQ3_S: (0,), T.IQ1_S: (0,), T.IQ4_NL: (0,), T.IQ4_XS: (0,),
}  # fmt: skip


def random_blocks(kind: T, n_rows: int, n_cols: int, rng: np.random.Generator, scale: float = 1.0) -> np.ndarray:
    """Encoded random rows, uint8 [n_rows, row_bytes]: valid blocks, finite, of mean about 0 and deviation about `scale`.

    All bits but the scales' are uniformly random; scales differ from block to block by up to a third.
    """
    if kind in FLOATS:
        return _encode_floats(rng.standard_normal((n_rows, n_cols), np.float32) * np.float32(scale), kind)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if n_cols % block:
        raise ValueError(f"rows of {n_cols} do not fit {kind.name} blocks of {block}")
    n_blocks = n_rows * (n_cols // block)
    blocks = np.frombuffer(rng.bytes(n_blocks * block_bytes), np.uint8).reshape(n_blocks, block_bytes).copy()
    _set_scales(blocks, kind, rng.uniform(0.75, 1.25, n_blocks) * (scale / _unit(kind)), rng.uniform(0.9, 1.1, n_blocks))
    return blocks.reshape(n_rows, -1)


def _encode_floats(values: np.ndarray, kind: T) -> np.ndarray:
    return quantize(np.ascontiguousarray(values, np.float32), kind).view(np.uint8)


@cache
def _unit(kind: T) -> float:
    """The standard deviation of decoded random blocks whose scale is 1 (2^-7 for NVFP4, whose scale is a byte)."""
    rng = np.random.Generator(np.random.SFC64([1]))
    _, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = np.frombuffer(rng.bytes(512 * block_bytes), np.uint8).reshape(512, block_bytes).copy()
    _set_scales(blocks, kind, np.full(512, 0.125), np.ones(512))
    return float(dequantize(blocks, kind).std()) * 8


def _set_scales(blocks: np.ndarray, kind: T, d: np.ndarray, wobble: np.ndarray) -> None:
    if kind == T.MXFP4:  # a byte 2^(e-127)
        blocks[:, 0] = np.clip(np.rint(np.log2(d)) + 127, 1, 254)
    elif kind == T.NVFP4:  # one E4M3 byte for 16 weights, 0x7f is NaN
        grid = np.arange(1, 0x7F)
        value = np.where(grid < 8, grid * 2.0**-9, (1 + (grid & 7) / 8) * 2.0 ** ((grid >> 3) - 7))
        blocks[:, :4] = grid[np.abs(np.log2(value) - np.log2(d)[:, None]).argmin(-1), None]
    elif kind == T.IQ1_M:  # the f16's nibbles are the top ones of four u16, low nibble first
        bits = d.astype(np.float16).view(np.uint16)
        words = blocks[:, 48:].view(np.uint16)
        for i in range(4):
            words[:, i] = words[:, i] & 0x0FFF | ((bits >> 4 * i) & 0xF) << 12
    else:
        at, *offset = SCALE_AT[kind]
        blocks[:, at : at + 2] = d.astype(np.float16).view(np.uint8).reshape(-1, 2)
        if offset:
            at, ratio = offset
            blocks[:, at : at + 2] = (d * ratio * wobble).astype(np.float16).view(np.uint8).reshape(-1, 2)
    if kind == T.Q8_0:
        quants = blocks[:, 2:].view(np.int8)
        np.maximum(quants, -127, out=quants)  # -128 is never written by a quantiser
    elif kind == T.TQ1_0:  # bytes are 5 (the last 4: 4) base-3 digits, scaled to 0..255
        digits = blocks[:, :52].astype(np.uint16) * 243 >> 8
        digits[:, 48:] -= digits[:, 48:] % 3
        blocks[:, :52] = (digits * 256 + 242) // 243
    elif kind == T.TQ2_0:  # 0, 1, 2; 3 becomes 1, which stands for 0
        quants = blocks[:, :64]
        quants &= ~(quants & quants << 1 & 0xAA)
