"""Weights on the device: quantised as in the file, Q8_0 and Q2_K with their parts apart so that every read is aligned."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf import quants as gguf_quants

from npglm.checkpoint import EXPERTS
from npglm.describe import FULL
from npglm.errors import NpglmError
from npglm.gpu.device import STAGE_BYTES
from raw_kernels import DECODED_TYPES, FAST_TYPES

CHUNK_BYTES = STAGE_BYTES  # read from the file and moved at a time


@dataclass
class Weight:
    """shape row-major as in the file. Fast: w, scales (Q2_K), d as raw_kernels/dots.hip says. Otherwise w is uint8
    [rows, row_bytes] and `grid` the type's table of gguf.quants, or None."""

    name: str
    type: str
    shape: tuple[int, ...]
    w: object
    scales: object = None
    d: object = None
    grid: object = None
    fast: bool = False

    @property
    def n_in(self) -> int:
        return self.shape[-1]

    @property
    def n_out(self) -> int:
        return self.shape[-2]

    @property
    def n_matrices(self) -> int:
        return self.shape[0] if len(self.shape) == 3 else 1

    @property
    def parts(self) -> tuple:
        return self.w, self.scales, self.d

    @property
    def defines(self) -> dict:
        return type_defines(self.type)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts if part is not None)


def type_defines(kind: str) -> dict:
    """The -D set that tells decoding kernels a type: its decoder, values and bytes of a block."""
    values, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]
    return {"TYPE": kind, "DECODE": f"decode_{kind}", "BLOCK_VALUES": values, "BLOCK_BYTES": size}


def part_shapes(kind: str, n_rows: int, n_in: int) -> tuple[tuple, tuple | None, tuple]:
    """Shapes of w uint8, scales uint8 and d float16 of a fast weight."""
    if kind == "q8_0":
        return (n_rows, n_in), None, (n_rows, n_in // 32)
    return (n_rows, n_in // 4), (n_rows, n_in // 16), (n_rows, n_in // 256, 2)


def empty_parts(kind: str, n_rows: int, n_in: int, device) -> list:
    """Room for a fast weight."""
    shapes = part_shapes(kind, n_rows, n_in)
    return [s and device.empty(s, t) for s, t in zip(shapes, (np.uint8, np.uint8, np.float16), strict=True)]


def split(raw, kind: str, w, scales, d) -> None:
    """Native blocks uint8 [rows, row_bytes] into the parts, on whatever device they are."""
    for native, part in _views(raw, kind, w, scales, d):
        part[...] = native


def joined(weight: Weight, device):
    """Native blocks uint8 [rows, row_bytes] of a weight: what was split, put together again."""
    if not weight.fast:
        return weight.w
    n_rows, (values, size) = len(weight.w), GGML_QUANT_SIZES[GGMLQuantizationType[weight.type.upper()]]
    raw = device.empty((n_rows, weight.n_in // values * size), np.uint8)
    for native, part in _views(raw, weight.type, *weight.parts):
        native[...] = part
    return raw


def _views(raw, kind: str, w, scales, d) -> tuple:
    """Pairs of views: a piece of every native block, and where its part has it."""
    n_rows, d = len(raw), d.view(np.uint8)
    if kind == "q8_0":
        blocks = raw.reshape(n_rows, -1, 34)
        return (blocks[..., :2], d.reshape(n_rows, -1, 2)), (blocks[..., 2:], w.reshape(n_rows, -1, 32))
    blocks = raw.reshape(n_rows, -1, 84)
    pairs = (blocks[..., :16], scales.reshape(n_rows, -1, 16)), (blocks[..., 16:80], w.reshape(n_rows, -1, 64))
    return *pairs, (blocks[..., 80:], d.reshape(n_rows, -1, 4))


def grid_of(kind: str) -> np.ndarray | None:
    """The look-up table that gguf.quants uses for a type, int8, or None."""
    quant = getattr(gguf_quants, kind.upper(), None)
    if kind in ("iq4_nl", "iq4_xs"):
        return np.array(gguf_quants.IQ4_NL.kvalues, np.int8)
    if getattr(quant, "grid_hex", None) is None:
        return None
    quant.init_grid()
    return np.ascontiguousarray(quant.grid, np.int8).reshape(-1)


def upload(tensor, device, fast: bool, done=lambda n_bytes: None):
    """npglm.checkpoint.Tensor -> Weight, or an f32 array for a vector. `done` is told the bytes moved."""
    if len(tensor.shape) == 1:
        done(tensor.nbytes)
        return device.array(tensor.decode(), np.float32)
    kind = tensor.type.name.lower()
    if kind not in DECODED_TYPES:
        raise NpglmError(f"{tensor.source}: tensor {tensor.name}: type {tensor.type.name} does not run on the GPU backend")
    data = tensor.data
    n_rows, row_bytes = data.shape
    fast = fast and kind in FAST_TYPES
    step = max(1, CHUNK_BYTES // row_bytes)
    if fast:
        parts = empty_parts(kind, n_rows, tensor.shape[-1], device)
    else:
        parts = [device.empty((n_rows, row_bytes), np.uint8), None, None]
    for first in range(0, n_rows, step):
        rows = slice(first, min(first + step, n_rows))
        raw = device.upload(data[rows])
        if fast:
            split(raw, kind, *(None if p is None else p[rows] for p in parts))
        else:
            parts[0][rows] = raw
        done(raw.nbytes)
    grid = None if fast else grid_of(kind)
    return Weight(tensor.name, kind, tensor.shape, *parts, None if grid is None else device.array(grid, np.int8), fast)


def load(checkpoint, device, fast: bool, progress=None, leave: tuple[str, ...] = ()) -> SimpleNamespace:
    """The weights tree of a Checkpoint on the device: vectors as f32 arrays, matrices as Weight, layers as a list.

    leave: attributes of layers that are not moved and not in the tree. progress(done, total): bytes, told after each chunk. Raises
    NpglmError before anything is moved if memory does not suffice.
    """
    weights, config = checkpoint.weights, checkpoint.config
    layers = [{name: tensor for name, tensor in vars(layer).items() if name not in leave} for layer in weights.layers]
    tensors = [weights.token_embd, weights.output, weights.output_norm, *(t for layer in layers for t in layer.values() if t)]
    total = sum(t.nbytes for t in tensors)
    free, _ = device.free_bytes()
    if total > free * FULL:
        layer_bytes = [sum(t.nbytes for t in layer.values() if t) for layer in layers]
        fits, left = 0, free * FULL - (total - sum(layer_bytes))
        while fits < len(layers) and left >= layer_bytes[fits]:
            left -= layer_bytes[fits]
            fits += 1
        rest = total - sum(t.nbytes for layer in layers for name, t in layer.items() if name in EXPERTS)
        raise NpglmError(
            f"{checkpoint.path.name}: the weights need {total / 2**30:.1f} GiB, {device.name} has {free / 2**30:.1f} GiB free; "
            f"{fits} of {config.n_layers} layers would fit"
            + (f"; --offload-experts needs {rest / 2**30:.1f} GiB" if rest < total else "")
        )
    done = 0

    def moved(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        if progress:
            progress(done, total)

    def put(tensor, fast=fast):
        return None if tensor is None else upload(tensor, device, fast, moved)

    loaded = SimpleNamespace(
        token_embd=put(weights.token_embd, fast=False),
        output_norm=put(weights.output_norm),
        output=put(weights.output),
        layers=[SimpleNamespace(**{name: put(tensor) for name, tensor in layer.items()}) for layer in layers],
    )
    device.synchronize()  # kernels may read weights without waiting for the one before them
    return loaded
