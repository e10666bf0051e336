"""Arrays by name: .npz of llama.cpp's nodes, of transformers' hidden states, or of anything with a name table; .pt likewise."""

import json
import pickle
import re
import zipfile

import numpy as np

from npglm.errors import NpglmError
from npglm.trace.formats.llamacpp import Node, map_graph, split_graphs
from npglm.trace.formats.names import Place, trace_name
from npglm.trace.probes import PROBES
from npglm.trace.recording import ArrayTrace

NODE_KEY = re.compile(r"(\d+)\|(\d+)\|(.*)", re.DOTALL)
# GGML_OP numbers of ggml as of llama-cpp-python 0.3.36; shared/golden/README.md
GGML_OPS = {
    2: "ADD", 7: "MUL", 8: "DIV", 15: "SUM_ROWS", 22: "CONCAT", 24: "NORM", 25: "RMS_NORM", 29: "MUL_MAT", 30: "MUL_MAT_ID",
    32: "SCALE", 35: "CONT", 36: "RESHAPE", 37: "VIEW", 38: "PERMUTE", 40: "GET_ROWS", 42: "SET_ROWS", 48: "ROPE", 50: "CLAMP",
    69: "ARGSORT", 70: "TOP_K", 73: "FILL", 74: "FLASH_ATTN_EXT", 87: "LIGHTNING_INDEXER", 91: "UNARY", 100: "GLU",
}  # fmt: skip


def read_npz(path, names: list[Place] | None = None) -> list[ArrayTrace]:
    """The runs in the file: several when it holds ids_n for several n."""
    try:
        arrays = np.load(path, allow_pickle=False)
    except (ValueError, zipfile.BadZipFile, EOFError, pickle.UnpicklingError):
        raise NpglmError(f"{path.name}: not an .npz file (pickles are not read)") from None
    if not isinstance(arrays, np.lib.npyio.NpzFile):
        raise NpglmError(f"{path.name}: one bare array; an .npz with names is needed")
    keys = list(arrays)
    if not keys:
        raise NpglmError(f"{path.name}: the file holds no arrays")
    try:
        if sum(bool(NODE_KEY.fullmatch(k)) for k in keys) > 1:
            return [_nodes(path, arrays)]
        lengths = sorted(int(k[4:]) for k in keys if re.fullmatch(r"ids_\d+", k))
        if lengths:
            return [_hidden(path, arrays, n) for n in lengths]
        return [named(path, {k: arrays[k] for k in keys}, names)]
    except (ValueError, zipfile.BadZipFile, EOFError, OSError) as error:
        raise NpglmError(f"{path.name}: damaged: {error}") from None


def _nodes(path, arrays) -> ArrayTrace:
    nodes = []
    for key in arrays:
        match = NODE_KEY.fullmatch(key)
        if match:
            array = arrays[key]
            shape = (1,) * (4 - array.ndim) + array.shape
            nodes.append(Node(int(match[1]), GGML_OPS.get(int(match[2]), match[2]), match[3], shape, key))
    nodes.sort(key=lambda node: node.order)
    graphs = split_graphs(nodes)
    ids = [int(i) for i in arrays["ids"]] if "ids" in arrays else None
    mapped = map_graph(graphs[0], n_tokens=len(ids) if ids else None)
    if not mapped:
        raise NpglmError(f"{path.name}: {len(nodes)} nodes, none of a glm-dsa model's ops among them; another model's dump?")
    found = {}
    for m in mapped:
        found[m.name], _ = m.take(arrays[m.node.value].reshape(m.node.shape))
        if m.rows is not None:
            found[m.name + "#rows"] = np.asarray(m.rows, np.int32)
    notes = [f"{len(graphs)} evaluations in {path.name}: only the first is compared"] if len(graphs) > 1 else []
    metadata = {"engine": "llama.cpp", "notes": json.dumps(notes)}
    return ArrayTrace(found, metadata | ({"tokens": json.dumps(ids)} if ids else {}), path.name)


def _hidden(path, arrays, n: int) -> ArrayTrace:
    """ids_n, logits_n, hidden_n: the embedding, each layer's output; the last entry is after the final norm."""
    ids = [int(i) for i in arrays[f"ids_{n}"]]
    found: dict[str, np.ndarray] = {}
    if f"hidden_{n}" in arrays:
        embd, *layers, last = arrays[f"hidden_{n}"]
        found["embd"] = embd
        found |= {f"l_out-{i}": hidden for i, hidden in enumerate(layers)}
        found["result_norm"] = last
    if f"logits_{n}" in arrays:
        found["result_output"] = arrays[f"logits_{n}"]
    if not found:
        raise NpglmError(f"{path.name}: ids_{n} without hidden_{n} or logits_{n}")
    return ArrayTrace(found, {"engine": "transformers", "tokens": json.dumps(ids)}, f"{path.name}[{n}]")


def named(path, arrays: dict[str, np.ndarray], names: list[Place] | None) -> ArrayTrace:
    """Arrays that bear our probes' names, or those that the table maps to them."""
    found: dict[str, np.ndarray] = {}
    metadata = {"engine": "unknown"}
    for key, array in arrays.items():
        base = key.rsplit("-", 1)[0] if "-" in key else key
        if names is None:
            if base.split("#")[0] in PROBES or key.split("#")[0] in PROBES:
                found[key] = array
        else:
            for place in names:
                match = place.module.fullmatch(key)
                if match and trace_name(place, match) not in found:
                    found[trace_name(place, match)] = shaped(array, place)
    if "tokens" in arrays or "ids" in arrays:
        ids = np.asarray(arrays.get("tokens", arrays.get("ids"))).ravel()
        metadata["tokens"] = json.dumps([int(i) for i in ids])
    if not found:
        hint = "no key matches the name table" if names else "give a name table: --names TABLE.toml (or transformers, vllm)"
        raise NpglmError(f"{path.name}: {len(arrays)} arrays, none under a probe's name; {hint}")
    return ArrayTrace(found, metadata, path.name)


def shaped(array: np.ndarray, place: Place) -> np.ndarray:
    """An engine's array -> rows of tokens: a batch of one is dropped, axes put in the probe's order, columns cut, scaled."""
    array = np.asarray(array)
    axes = place.axes.split() if place.axes else None
    while array.ndim > (len(axes) if axes else 1 + len(PROBES[place.probe].axes.split())) and array.shape[0] == 1:
        array = array[0]
    if axes and len(axes) == array.ndim and axes[0] != "T" and "T" in axes:
        array = np.moveaxis(array, axes.index("T"), 0)
    if place.columns is not None:
        width = array.shape[-1]
        array = array[..., slice(*(round(c * width) if isinstance(c, float) else c for c in place.columns))]
    return array * array.dtype.type(place.scale) if place.scale != 1.0 else array


def read_pt(path, names: list[Place] | None = None) -> ArrayTrace:
    """A torch.save'd dict of tensors, loaded with weights_only so that no code in the file runs."""
    from npglm.trace.torch_model import need_torch

    torch, _ = need_torch()
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0][:100] if str(error) else type(error).__name__
        raise NpglmError(f"{path.name}: not a dict of tensors that loads with weights_only: {reason}") from None
    if not isinstance(loaded, dict):
        raise NpglmError(f"{path.name}: holds {type(loaded).__name__}, expected a dict of tensors")
    arrays = {}
    for key, value in loaded.items():
        if isinstance(key, str) and isinstance(value, torch.Tensor):
            value = value.detach()
            arrays[key] = (value.float() if value.is_floating_point() and value.dtype != torch.float64 else value).numpy()
    if not arrays:
        raise NpglmError(f"{path.name}: no tensors under names")
    return named(path, arrays, names)
