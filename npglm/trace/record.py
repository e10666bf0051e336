"""Writing and reading traces: one .safetensors file, header first, then the arrays, C-contiguous. The only writer of traces.

Names, shapes and dtypes are npglm.trace.probes'. Metadata values are strings: `tokens` (a JSON list; all that a foreign trace
must have), `engine`, `engine_version`, `model`, `model_sha256`, `numerics`, `rank`, `world`, `created_by`.
"""

import json
import os
import struct
import sys
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

import npglm
from npglm.cli import whole_file
from npglm.errors import NpglmError
from npglm.trace.probes import NoProbe, probe_names

DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8"}  # fmt: skip


def without_folders(argv: list[str]) -> str:
    """A command line in which file names have lost their folders: words (or what follows a word's `=`) that name an existing file, or
    a new one in an existing folder, with no white space in them."""
    words = []
    for word in argv:
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        path = Path(value)
        if os.sep in value and not any(c.isspace() for c in value) and path.parent.is_dir():
            value = path.name
        words.append(option + equals + value)
    return " ".join(words).encode("utf-8", "replace").decode()  # a file name need not be UTF-8


def describe_run(checkpoint, tokens, numerics: str, argv=None) -> dict[str, str]:
    """The metadata of a trace that npglm makes. `argv`: the command (default: sys.argv). Rank and world are the checkpoint's."""
    ranks = checkpoint.ranks
    return {
        "tokens": json.dumps([int(t) for t in tokens]),
        "engine": "npglm",
        "engine_version": npglm.__version__,
        "model": checkpoint.config.name,
        "model_sha256": checkpoint.sha256,
        "numerics": numerics,
        "rank": str(ranks.rank if ranks else 0),
        "world": str(ranks.world if ranks else 1),
        "created_by": without_folders(sys.argv if argv is None else argv),
    } | ({"experts": checkpoint.experts} if ranks else {})


def _header(entries: dict[str, tuple[np.dtype, tuple[int, ...]]], metadata: dict[str, str]) -> tuple[bytes, dict[str, int]]:
    """safetensors header bytes, and where each array starts in the file."""
    table, at = {"__metadata__": metadata}, 0
    for name, (dtype, shape) in entries.items():
        n_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        table[name] = {"dtype": DTYPES[dtype.name], "shape": list(shape), "data_offsets": [at, at + n_bytes]}
        at += n_bytes
    text = json.dumps(table, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # safetensors wants the data aligned to 8 bytes
    start = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, {name: start + table[name]["data_offsets"][0] for name in entries}


def write_trace(path, arrays: dict[str, np.ndarray], metadata: dict[str, str], inputs=()) -> None:
    """Write whole arrays that are at hand. Raises NpglmError when `path` cannot be written; see whole_file."""
    arrays = {name: np.ascontiguousarray(a) for name, a in sorted(arrays.items(), key=lambda item: -item[1].itemsize)}
    head, _ = _header({name: (a.dtype, a.shape) for name, a in arrays.items()}, metadata)
    with whole_file(path, inputs) as file:
        file.write(head)
        for array in arrays.values():
            file.write(array.data if array.size else b"")


class Recorder(NoProbe):
    """A probe that streams what forward() shows it to `file`, a call's rows behind those of the calls before (chunks join on T).

    Only names of `wanted` (from probe_names) are kept. A chunk's indexer_score and top_k are padded to the whole prompt's width
    with -inf and -1. finish() raises if a wanted array did not come in full.
    """

    def __init__(self, file, config, n_tokens: int, wanted: dict, metadata: dict[str, str], dtype=np.float32):
        """file: binary, at its start. n_tokens: T of all calls together. dtype: of the arrays that are not int32."""
        self.file, self.n_tokens, self.suffix = file, n_tokens, ""
        self.entries = {}
        self.widened = {name for name, (probe, _) in wanted.items() if probe.axes in ("S", "top_k")}
        for name, (probe, layer) in wanted.items():
            kind = np.dtype(dtype if probe.dtype is np.float32 else probe.dtype)
            self.entries[name] = (kind, probe.shape(config, n_tokens, layer))
        self.entries = dict(
            sorted(self.entries.items(), key=lambda item: -item[1][0].itemsize)
        )  # stable; keeps the data aligned
        head, self.starts = _header(self.entries, metadata)
        self.rows = dict.fromkeys(self.entries, 0)  # written so far
        file.write(head)

    def layer(self, index: int) -> "Recorder":
        self.suffix = f"-{index}"
        return self

    def __call__(self, name: str, array) -> None:
        name = name + self.suffix if name + self.suffix in self.entries else name
        if name not in self.entries:
            return
        dtype, shape = self.entries[name]
        rows = np.asarray(array.get() if hasattr(array, "get") else array, dtype)  # get: an array on a GPU
        if name in self.widened and rows.shape[1] < shape[1]:
            fill = -1 if dtype.kind == "i" else -np.inf
            rows = np.pad(rows, ((0, 0), (0, shape[1] - rows.shape[1])), constant_values=fill)
        if rows.shape[1:] != shape[1:] or self.rows[name] + len(rows) > self.n_tokens:
            raise NpglmError(
                f"probe {name}: shape {list(rows.shape)} after {self.rows[name]} rows, expected {list(shape)} in all"
            )
        row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
        self.file.seek(self.starts[name] + self.rows[name] * row_bytes)
        self.file.write(np.ascontiguousarray(rows).data)
        self.rows[name] += len(rows)

    @property
    def complete(self) -> bool:
        return all(rows == self.n_tokens for rows in self.rows.values())

    def finish(self) -> None:
        for name, rows in self.rows.items():
            if rows != self.n_tokens:
                raise NpglmError(f"probe {name}: {rows} of {self.n_tokens} rows recorded")


class Trace:
    """A trace that is read lazily: `trace[name]` -> array, `name in trace`, iteration over names, `.metadata`, `.tokens`."""

    def __init__(self, path):
        self.path = Path(path)
        try:
            open(self.path, "rb").close()  # safe_open says of any failure that there is no such file
            self._file = safe_open(self.path, framework="numpy")
        except (SafetensorError, ValueError) as error:
            raise NpglmError(f"{self.path.name}: not a trace (.safetensors): {error}") from None
        except OSError as error:
            raise NpglmError(f"{path}: {error.strerror or error}") from None
        self.metadata = self._file.metadata() or {}
        self.names = list(self._file.keys())

    def __iter__(self):
        return iter(self.names)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.names:
            raise NpglmError(f"{self.path.name}: no array {name}")
        return self._file.get_tensor(name)

    @property
    def tokens(self) -> list[int]:
        try:
            tokens = json.loads(self.metadata["tokens"])
        except (KeyError, json.JSONDecodeError):
            tokens = None
        if not isinstance(tokens, list) or not all(type(t) is int for t in tokens):
            raise NpglmError(f"{self.path.name}: metadata has no list of token ids under 'tokens'")
        return tokens


def read_trace(path) -> Trace:
    """Open the trace at `path`. Raises NpglmError when it is none."""
    return Trace(path)


def recorder(file, checkpoint, tokens, numerics: str, layers=None, patterns=None, dtype=np.float32) -> Recorder:
    """A Recorder for a prefill of `tokens` on `checkpoint`. Raises NpglmError when nothing matches."""
    wanted = probe_names(checkpoint.config, layers, patterns)
    if not wanted:
        raise NpglmError(f"no probe matches {' '.join(patterns)}; for example: --probes 'ffn_*' l_out")
    return Recorder(file, checkpoint.config, len(tokens), wanted, describe_run(checkpoint, tokens, numerics), dtype)


def torch_recorder(model, names="transformers"):
    """npglm.trace.torch_record.torch_recorder: hook a torch module tree by a name table. Needs torch."""
    from npglm.trace import torch_record

    return torch_record.torch_recorder(model, names)
