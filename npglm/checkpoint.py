"""GGUF files over mmap: header, shards, and named, shape-checked tensors that are decoded where they are used.

`read_gguf` parses one file's header; `Checkpoint.open` joins shards, reads the config and checks every tensor against TENSORS.
Format: ggml's docs/gguf.md. Enums, block sizes and dequantisation come from the gguf package.
"""

import hashlib
import mmap
import re
import resource
import struct
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import _type_traits, dequantize

from npglm.config import ARCHITECTURE, GlmConfig
from npglm.errors import NpglmError

MAX_DIMS = 4  # GGML_MAX_DIMS
MAX_NESTING = 4
MAX_HEADER_BYTES = 64 << 20  # GLM-5.2's is 9.4 MB; without a limit a flipped bit makes a string of the whole file
DECODE_BYTES = 64 << 20  # of f32 output at a time; gguf.quants needs a few times as much while it works
FLOAT_TYPES = frozenset({GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16})
DECODABLE = FLOAT_TYPES | frozenset(_type_traits)
SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf$")
SCALARS = dict(zip(range(13), ("B", "b", "H", "h", "I", "i", "f", "?", None, None, "Q", "q", "d"), strict=True))
STRING, ARRAY = 8, 9


# --- one file's header ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tensor:
    """A tensor in the file. `shape` is row-major (ggml's ne reversed); `data` is uint8 [n_rows, row_bytes], memory-mapped."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    data: np.ndarray = field(repr=False, compare=False)
    source: str = field(default="", compare=False)

    @property
    def n_rows(self) -> int:
        return self.data.shape[0]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Decode rows [start, stop) to f32 [stop - start, shape[-1]]. The caller bounds how many; see row_blocks."""
        return dequantize(self.data[start:stop], self.type)

    def row_blocks(self, start: int = 0, stop: int | None = None):
        """Yield (first, last) row ranges whose decoded size stays below DECODE_BYTES (one row at least)."""
        stop = self.n_rows if stop is None else stop
        step = max(1, DECODE_BYTES // (4 * self.shape[-1]))
        for first in range(start, stop, step):
            yield first, min(first + step, stop)

    def decode(self) -> np.ndarray:
        """The whole tensor in f32, in its own shape. For vectors and small matrices."""
        return self.rows(0, self.n_rows).reshape(self.shape)


@dataclass(frozen=True)
class GgufFile:
    path: Path
    metadata: dict
    tensors: dict[str, Tensor]
    data_offset: int  # bytes before the tensor data
    header_sha256: str  # of those bytes


class _Reader:
    """A cursor over the mapped bytes; every count is checked against the bytes left before anything is allocated."""

    def __init__(self, buffer, name: str):
        self.buffer, self.name, self.at, self.end = buffer, name, 0, min(len(buffer), MAX_HEADER_BYTES)

    def error(self, what: str) -> NpglmError:
        text = "".join(c if c.isprintable() else "?" for c in f"{self.name}: {what}"[:300])  # names come from the file
        return NpglmError(text)

    def need(self, n_bytes: int, what: str) -> int:
        at = self.at
        if n_bytes > self.end - at:
            raise self.error(f"truncated or damaged: {what} needs {n_bytes} bytes at offset {at}, {self.end - at} are left")
        self.at = at + n_bytes
        return at

    def scalar(self, code: str, what: str):
        return struct.unpack_from("<" + code, self.buffer, self.need(struct.calcsize("<" + code), what))[0]

    def string(self, what: str) -> str:
        length = self.scalar("Q", what)
        at = self.need(length, what)
        try:
            return self.buffer[at : at + length].decode()
        except UnicodeDecodeError:
            raise self.error(f"damaged: {what} is not UTF-8") from None

    def value(self, type_id: int, what: str, depth: int = 0):
        if type_id == STRING:
            return self.string(what)
        if type_id == ARRAY:
            return self.array(what, depth + 1)
        if type_id not in SCALARS:
            raise self.error(f"{what}: metadata type {type_id} does not exist")
        return self.scalar(SCALARS[type_id], what)

    def array(self, what: str, depth: int) -> list:
        type_id, count = self.scalar("I", what), self.scalar("Q", what)
        if depth > MAX_NESTING:
            raise self.error(f"{what}: arrays nested deeper than {MAX_NESTING}")
        code = SCALARS.get(type_id)
        item_bytes = struct.calcsize("<" + code) if code else {STRING: 8, ARRAY: 12}.get(type_id)
        if item_bytes is None:
            raise self.error(f"{what}: metadata type {type_id} does not exist")
        if count * item_bytes > self.end - self.at:
            raise self.error(f"truncated or damaged: {what} claims {count} entries, {self.end - self.at} bytes are left")
        if code:
            return np.frombuffer(self.buffer, "<" + code, count, self.need(count * item_bytes, what)).tolist()
        if type_id == ARRAY:
            return [self.array(what, depth + 1) for _ in range(count)]
        return self.strings(count, what)

    def strings(self, count: int, what: str) -> list[str]:
        """The hot path: 322k merges. Same checks as string(), without its calls."""
        buffer, at, end, unpack, out = self.buffer, self.at, self.end, struct.Struct("<Q").unpack_from, []
        try:
            for _ in range(count):
                start = at + 8
                at = start + unpack(buffer, at)[0]
                if at > end:
                    raise self.error(f"truncated or damaged: a string of {what} runs past the end")
                out.append(buffer[start:at].decode())
        except UnicodeDecodeError:
            raise self.error(f"damaged: a string of {what} is not UTF-8") from None
        except struct.error:
            raise self.error(f"truncated or damaged: {what} runs past the end") from None
        self.at = at
        return out


def read_gguf(path) -> GgufFile:
    """Parse the header of one GGUF file (version 2 or 3, little endian) over mmap. Raises NpglmError."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise NpglmError(f"{path.name}: the file is empty") from None
    except OSError as error:
        raise NpglmError(f"{path}: {error.strerror}") from None
    reader = _Reader(buffer, path.name)
    if buffer[:4] != b"GGUF":
        raise reader.error("not a GGUF file (magic bytes missing)")
    reader.at = 4
    version = reader.scalar("I", "version")
    if version not in (2, 3):
        raise reader.error(f"GGUF version {version} is not supported, only 2 and 3" + " (big endian?)" * (version > 0xFFFF))
    n_tensors, n_keys = reader.scalar("Q", "tensor count"), reader.scalar("Q", "key count")
    for count, item_bytes, what in ((n_tensors, 24, "tensors"), (n_keys, 13, "keys")):  # the least that one takes
        if count * item_bytes > reader.end:
            raise reader.error(f"truncated or damaged: claims {count} {what} in {reader.end} bytes")
    metadata: dict = {}
    for _ in range(n_keys):
        key = reader.string("a key")
        if key in metadata:
            raise reader.error(f"key {key} occurs twice")
        metadata[key] = reader.value(reader.scalar("I", f"key {key}"), f"key {key}")
    infos = [_tensor_info(reader) for _ in range(n_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment > 1 << 20 or alignment & (alignment - 1):
        raise reader.error(f"key general.alignment: {str(alignment)[:40]} is not a power of two")
    data_offset = -(-reader.at // alignment) * alignment
    data = np.frombuffer(buffer, np.uint8)
    tensors: dict[str, Tensor] = {}
    for name, shape, kind, offset in infos:
        if name in tensors:
            raise reader.error(f"tensor {name} occurs twice")
        tensors[name] = _tensor(reader, data, alignment, data_offset + offset, name, shape, kind)
    digest = hashlib.sha256(buffer[:data_offset]).hexdigest()
    return GgufFile(path, metadata, tensors, data_offset, digest)


def _tensor_info(reader: _Reader) -> tuple:
    name = reader.string("a tensor's name")
    n_dims = reader.scalar("I", f"tensor {name}")
    if not 1 <= n_dims <= MAX_DIMS:
        raise reader.error(f"tensor {name}: {n_dims} dimensions, expected 1 to {MAX_DIMS}")
    ne = [reader.scalar("Q", f"tensor {name}") for _ in range(n_dims)]
    type_id, offset = reader.scalar("I", f"tensor {name}"), reader.scalar("Q", f"tensor {name}")
    try:
        return name, tuple(reversed(ne)), GGMLQuantizationType(type_id), offset
    except ValueError:
        raise reader.error(f"tensor {name}: type id {type_id} does not exist") from None


def _tensor(reader: _Reader, data: np.ndarray, alignment: int, at: int, name: str, shape: tuple, kind) -> Tensor:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    n_rows = 1
    for dim in shape[:-1]:
        n_rows *= dim
    if min(shape) < 1 or shape[-1] % block:
        raise reader.error(f"tensor {name}: shape {list(shape)} does not fit {kind.name} blocks of {block}")
    if at % alignment:
        raise reader.error(f"tensor {name}: offset {at} is not a multiple of the alignment {alignment}")
    row_bytes = shape[-1] // block * block_bytes
    if at + n_rows * row_bytes > len(data):
        missing = at + n_rows * row_bytes - len(data)
        raise reader.error(f"truncated or damaged: tensor {name} ends {missing} bytes past the end of the file")
    return Tensor(name, shape, kind, data[at : at + n_rows * row_bytes].reshape(n_rows, row_bytes), reader.name)


# --- the tensors of a glm-dsa model -----------------------------------------------------------------------------------------

# attribute: (name in the file, row-major shape in the axis names of config.py, float: stays unquantised)
MODEL_TENSORS = {
    "token_embd": ("token_embd.weight", "Y D", False),
    "output_norm": ("output_norm.weight", "D", True),
    "output": ("output.weight", "Y D", False),
}
ATTENTION_TENSORS = {
    "attn_norm": ("attn_norm.weight", "D", True),
    "attn_q_a": ("attn_q_a.weight", "Q D", False),
    "attn_q_a_norm": ("attn_q_a_norm.weight", "Q", True),
    "attn_q_b": ("attn_q_b.weight", "H*(N+P) Q", False),
    "attn_kv_a_mqa": ("attn_kv_a_mqa.weight", "R+P D", False),
    "attn_kv_a_norm": ("attn_kv_a_norm.weight", "R", True),
    "attn_k_b": ("attn_k_b.weight", "H R N", False),
    "attn_v_b": ("attn_v_b.weight", "H V R", False),
    "attn_output": ("attn_output.weight", "D H*V", False),
    "ffn_norm": ("ffn_norm.weight", "D", True),
}
INDEXER_TENSORS = {
    "indexer_attn_q_b": ("indexer.attn_q_b.weight", "I*J Q", False),
    "indexer_attn_k": ("indexer.attn_k.weight", "J D", False),
    "indexer_k_norm": ("indexer.k_norm.weight", "J", True),
    "indexer_k_norm_bias": ("indexer.k_norm.bias", "J", True),
    "indexer_proj": ("indexer.proj.weight", "I D", False),
}
DENSE_TENSORS = {
    "ffn_gate": ("ffn_gate.weight", "F D", False),
    "ffn_up": ("ffn_up.weight", "F D", False),
    "ffn_down": ("ffn_down.weight", "D F", False),
}
MOE_TENSORS = {
    "ffn_gate_inp": ("ffn_gate_inp.weight", "E D", False),
    "exp_probs_b": ("exp_probs_b.bias", "E", True),
    "ffn_gate_exps": ("ffn_gate_exps.weight", "E G D", False),
    "ffn_up_exps": ("ffn_up_exps.weight", "E G D", False),
    "ffn_down_exps": ("ffn_down_exps.weight", "E D G", False),
    "ffn_gate_shexp": ("ffn_gate_shexp.weight", "S*G D", False),
    "ffn_up_shexp": ("ffn_up_shexp.weight", "S*G D", False),
    "ffn_down_shexp": ("ffn_down_shexp.weight", "D S*G", False),
}
OPTIONAL = {"output", "exp_probs_b"}  # absent: tied to token_embd; a bias of zero

# How ranks share a model (npglm/parallel.py): attribute -> (axis that is cut, what is shared out along it). Every rank holds the
# rest whole: norms, router, indexer, the latent's projection. So too token_embd: a rank reads one row of it a token, and a sum
# over the ranks would cost more than its memory. A cut along the last axis is one through quantised blocks.
SPLITS = {
    "output": (0, "vocabulary rows"),
    "attn_q_b": (0, "heads"),
    "attn_k_b": (0, "heads"),
    "attn_v_b": (0, "heads"),
    "attn_output": (1, "heads"),
    "ffn_gate": (0, "FFN columns"),
    "ffn_up": (0, "FFN columns"),
    "ffn_down": (1, "FFN columns"),
    "ffn_gate_shexp": (0, "shared expert columns"),
    "ffn_up_shexp": (0, "shared expert columns"),
    "ffn_down_shexp": (1, "shared expert columns"),
}
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")  # only K of their E matrices are read for a token
EXPERT_SPLITS = {  # --experts
    "tensor": {
        "ffn_gate_exps": (1, "expert columns"),
        "ffn_up_exps": (1, "expert columns"),
        "ffn_down_exps": (2, "expert columns"),
    },
    "expert": dict.fromkeys(EXPERTS, (0, "experts")),
}


def layer_tensors(config: GlmConfig, layer: int) -> dict:
    """The table's part for one layer. Indexer tensors of shared layers are copies that no one uses, so they are not in it."""
    table = ATTENTION_TENSORS | (MOE_TENSORS if config.is_moe(layer) else DENSE_TENSORS)
    return table | INDEXER_TENSORS if config.full[layer] else table


def _bind(found: dict[str, Tensor], config: GlmConfig, table: dict, prefix: str, source: str) -> SimpleNamespace:
    """Look the table's tensors up and check shape and type. Missing optional ones become None."""
    bound = SimpleNamespace()
    for attribute, (suffix, axes, is_float) in table.items():
        name = prefix + suffix
        tensor = found.get(name)
        if tensor is None and attribute not in OPTIONAL:
            raise NpglmError(f"{source}: tensor {name} is missing")
        if tensor is not None:
            shape = tuple(config.axes[axis] for axis in axes.split())
            if tensor.shape != shape:
                raise NpglmError(f"{tensor.source}: tensor {name}: shape {list(tensor.shape)}, expected {list(shape)} [{axes}]")
            if tensor.type not in (FLOAT_TYPES if is_float else DECODABLE):
                raise NpglmError(f"{tensor.source}: tensor {name}: type {tensor.type.name} cannot be used here")
        setattr(bound, attribute, tensor)
    return bound


class Checkpoint:
    """A checkpoint that has been opened and checked.

    path, metadata, config; tensors: name -> Tensor of every shard; weights: the tensors of MODEL_TENSORS by attribute, and
    weights.layers[i] those of layer i; sha256: of the first shard's bytes before its tensor data; n_bytes: of all tensors.
    """

    ranks = None  # those that share it: npglm.parallel.RankCheckpoint

    def __init__(self, path: Path, files: list[GgufFile]):
        self.path, self.files, self.metadata = path, files, files[0].metadata
        self.tensors: dict[str, Tensor] = {}
        for file in files:
            for name, tensor in file.tensors.items():
                if name in self.tensors:
                    raise NpglmError(f"{file.path.name}: tensor {name!r:.80} is also in {self.tensors[name].source}")
                self.tensors[name] = tensor
        if not self.tensors:
            raise NpglmError(f"{path.name}: no tensors; a vocabulary alone cannot be run")
        self.config = GlmConfig.from_metadata(self.metadata, files[0].path.name)
        self.sha256 = files[0].header_sha256

    @classmethod
    def open(cls, path) -> "Checkpoint":
        paths = shard_paths(Path(path))
        _allow_open_files(len(paths))
        files = [read_gguf(p) for p in paths]
        _check_shards(files)
        checkpoint = cls(paths[0], files)
        checkpoint.weights  # noqa: B018 - every tensor is checked before anything runs
        return checkpoint

    @cached_property
    def weights(self) -> SimpleNamespace:
        config, source = self.config, self.path.name
        weights = _bind(self.tensors, config, MODEL_TENSORS, "", source)
        weights.output = weights.output or weights.token_embd  # tied
        weights.layers = [
            _bind(self.tensors, config, layer_tensors(config, i), f"blk.{i}.", source) for i in range(config.n_layers)
        ]
        self._refuse_unknown(weights)
        return weights

    def _refuse_unknown(self, weights: SimpleNamespace) -> None:
        """A bias that no op here adds, or an MTP layer run as an ordinary one, would give wrong numbers in silence."""
        used = {t.name for part in (weights, *weights.layers) for t in vars(part).values() if isinstance(t, Tensor)}
        for name, tensor in self.tensors.items():
            if name not in used and not self._may_ignore(name):
                raise NpglmError(f"{tensor.source}: tensor {name!r:.80} is not known here; the model cannot be run without it")

    def _may_ignore(self, name: str) -> bool:
        """MTP layers; k_b and v_b in one, as older files have them; a shared layer's copy of the indexer."""
        match = re.fullmatch(r"blk\.(\d{1,5})\.(.*)", name)
        if not match:
            return False
        layer, suffix = int(match[1]), match[2]
        if layer >= self.config.n_layers or suffix == "attn_kv_b.weight":
            return True
        return suffix.startswith("indexer.") and not self.config.full[layer]

    @property
    def paths(self) -> list[Path]:
        """The files, in order of their shards."""
        return [file.path for file in self.files]

    @property
    def n_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    def notes(self) -> list[str]:
        """What was assumed because the file does not say it, and what is in it but not run. One line each."""
        config, notes = self.config, []
        if config.n_mtp:
            there = any(name.startswith(f"blk.{config.n_layers}.") for name in self.tensors)
            notes.append(f"{config.n_mtp} MTP layer(s) {'are not run' if there else 'are named, but not in the file'}")
        if f"{ARCHITECTURE}.attention.indexer.types" not in self.metadata:
            how = "all full" if all(config.full) else "shared by GLM-5.2's table"
            notes.append(f"no {ARCHITECTURE}.attention.indexer.types; context length {config.context_length}: layers are {how}")
        return notes


# --- shards -----------------------------------------------------------------------------------------------------------------


def shard_paths(path: Path) -> list[Path]:
    """All files of the checkpoint that `path` names: a single file, any shard of a set, or a folder that holds one."""
    if path.is_dir():
        firsts = [p for p in sorted(path.glob("*.gguf")) if not (m := SHARD.match(p.name)) or int(m[2]) == 1]
        shards = sorted(p for p in path.glob("*.gguf") if SHARD.match(p.name))
        if len(firsts) > 1 or not (firsts or shards):
            raise NpglmError(f"{path}: expected one checkpoint in the folder, found {len(firsts)}")
        path = firsts[0] if firsts else shards[0]
    match = SHARD.match(path.name)
    if not match:
        return [path]
    stem, count = match[1], int(match[3])
    if not 1 <= int(match[2]) <= count:
        raise NpglmError(f"{path.name}: shard {int(match[2])} of {count} cannot be")
    paths = [path.with_name(f"{stem}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    for p in paths:
        if not p.exists():
            raise NpglmError(f"{p}: shard missing; the checkpoint has {count}")
    return paths


def _allow_open_files(count: int) -> None:
    """Python's mmap keeps a descriptor, and some sets have a shard for every tensor: raise the soft limit as far as it goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and count + 128 > soft:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (count + 128 if hard == resource.RLIM_INFINITY else min(count + 128, hard), hard)
        )


def _check_shards(files: list[GgufFile]) -> None:
    first = files[0]
    for i, file in enumerate(files):
        for key, expected in (("split.count", len(files)), ("split.no", i)):
            value = file.metadata.get(key, expected if len(files) == 1 and key == "split.no" else None)
            if value is None and len(files) == 1:
                continue
            if value != expected:
                hint = "; name it NAME-0000N-of-0000M.gguf and keep all shards in one folder" if len(files) == 1 else ""
                raise NpglmError(f"{file.path.name}: key {key}: expected {expected}, found {value!r:.40}{hint}")
        for key in ("general.architecture", "general.name", "split.tensors.count"):
            theirs, ours = file.metadata.get(key), first.metadata.get(key)
            if theirs is not None and theirs != ours:
                raise NpglmError(
                    f"{file.path.name}: shard of another checkpoint: key {key} is {theirs!r:.60}, "
                    f"{first.path.name} has {ours!r:.60}"
                )
    total, found = first.metadata.get("split.tensors.count"), sum(len(f.tensors) for f in files)
    if total is not None and total != found:
        raise NpglmError(f"{first.path.name}: key split.tensors.count: expected {total} tensors, the shards hold {found}")
