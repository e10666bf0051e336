"""llama.cpp's compute graph of a glm-dsa model, as our probes.

Its labels repeat (`qr-0` before and after a norm), carry another layer's number (`top_k-5` made by layer 2) or are missing, so a
node is found by its op and its place in the graph. How the values came does not matter: `map_graph` needs order, op, label and
shape of each node; `Mapped.take` turns an array of the node's shape, and its mask of known values, into the probe's array.

    for graph in split_graphs(nodes):
        for m in map_graph(graph):
            values, known = m.take(array, mask)  # trace entries m.name and m.name#known; m.rows -> m.name#rows
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from npglm.errors import NpglmError
from npglm.trace.probes import PROBES, Probe

LABEL = re.compile(r"(?P<base>\w+)-(?P<layer>\d+)(?P<rest>(?: \(\w+\))*)")
UNLABELLED = re.compile(r"(?:node_\d+)?(?: \(\w+\))*")
EMBD = ("embd", "inp_embd")


@dataclass(frozen=True)
class Node:
    """One node of the graph.

    order: nodes ran in ascending order. op: GGML_OP's name, or of a UNARY or GLU node ggml's name of the function: MUL_MAT, SIGMOID,
    SWIGLU. label: as llama.cpp gives it, ` (view)` and the like included. shape: four sizes, row-major (ggml's ne reversed).
    value: whatever the caller keeps there.
    """

    order: int
    op: str
    label: str
    shape: tuple[int, ...]
    value: Any = field(default=None, compare=False, repr=False)

    @property
    def base(self) -> str:
        """`q_pe` of `q_pe-3`; "" of a label of another form, or one that goes on (`q_pe-3 (view)`)."""
        match = LABEL.fullmatch(self.label)
        return match["base"] if match and not match["rest"] else ""

    def __str__(self) -> str:
        return f"node {self.order} {self.op} {self.label!r}"


@dataclass(frozen=True)
class Mapped:
    """A probe and the node that holds it.

    layer: by the node's place. rows: the token rows that the node has, or None for all of them. shape: of the probe's array, with
    those rows. whole: whether each of the node's values is in the probe once, so that the node's sum is the probe's.
    """

    probe: Probe
    layer: int | None
    node: Node
    rows: tuple[int, ...] | None
    shape: tuple[int, ...]
    whole: bool
    token_axis: int  # of the node's shape
    n_past: int

    @property
    def name(self) -> str:
        """In a trace."""
        return self.probe.name if self.layer is None else f"{self.probe.name}-{self.layer}"

    def take(self, values: np.ndarray, known: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray | None]:
        """Arrays of the node's shape -> C-contiguous arrays of the probe's: values in the probe's dtype, 0 where known is false."""
        for array in (values, known):
            if array is not None and array.shape != self.node.shape:
                raise NpglmError(f"{self.node}: values of shape {list(array.shape)}, expected {list(self.node.shape)}")
        if self.probe.name == "top_k":
            return self._take_top_k(values, known)
        values = self._move(values).astype(self.probe.dtype)
        if known is None:
            return np.ascontiguousarray(values), None
        known = np.ascontiguousarray(self._move(known))
        return np.where(known, values, self.probe.dtype(0)), known

    def _move(self, x: np.ndarray) -> np.ndarray:
        """[1,1,T,n] or [1,H,T,n] (token_axis 2), [1,T,H,n] (1) -> [T,n] or [T,H,n]. Of the scores, only cells that hold a token."""
        x = np.moveaxis(x, self.token_axis, 0)
        if self.probe.name == "indexer_score":
            x = x[..., : self.shape[-1]]
        return x.reshape(self.shape)

    def _take_top_k(self, values: np.ndarray, known: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        """[1,1,T,k] in any order, filled up with future positions -> [T, min(k,S)], ascending, then -1.

        Of a partly known row: what is known, then as many unknown entries as are missing, then -1.
        """
        n_rows, width = self.shape
        out, mask = np.full(self.shape, -1, np.int32), np.ones(self.shape, np.uint8)
        for i, row in enumerate(range(n_rows) if self.rows is None else self.rows):
            last = self.n_past + row
            chosen = values[0, 0, i] if known is None else values[0, 0, i][known[0, 0, i].astype(bool)]
            chosen = np.sort(chosen[(chosen >= 0) & (chosen <= last)])[:width]
            out[i, : len(chosen)] = chosen
            if known is not None:
                missing = slice(len(chosen), max(len(chosen), min(width, last + 1)))
                out[i, missing], mask[i, missing] = 0, 0
        return out, None if known is None else mask


# --- which node is which probe ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """base: the label's, "" for any. ops: in order of preference; the last node of the first op that occurs is taken."""

    probe: str
    base: str
    ops: tuple[str, ...]
    token_axis: int


def _rules(*rows) -> tuple[Rule, ...]:
    return tuple(Rule(probe, base, tuple(ops.split()), token_axis) for probe, base, ops, token_axis in rows)


# token_axis 2: [1,1,T,n], or [1,H,T,n] with heads first; 1: [1,T,H,n], [1,T,1,n] or [1,T,K,1].
# For kqv, two rules: with flash attention, and without.
LAYER_RULES = _rules(
    ("attn_norm", "attn_norm", "MUL", 2),
    ("q_a", "qr", "MUL_MAT", 2),
    ("q_a_norm", "qr", "MUL", 2),
    ("q", "q", "MUL_MAT", 2),
    ("q_pe", "q_pe", "ROPE", 1),
    ("q_nope_absorbed", "q_nope_absorbed", "MUL_MAT", 2),
    ("kv_cmpr_pe", "kv_cmpr_pe", "MUL_MAT", 2),
    ("kv_cmpr", "kv_cmpr", "MUL", 2),
    ("k_pe", "k_pe", "ROPE", 1),
    ("indexer_k", "indexer_k", "ROPE CONCAT", 1),  # CONCAT: versions that rope a view of it. A Hadamard MUL_MAT may follow
    ("indexer_q", "indexer_q", "ROPE CONCAT", 1),
    ("indexer_weights", "indexer_weights", "SCALE", 2),
    ("indexer_score", "indexer_score", "LIGHTNING_INDEXER ADD", 2),  # ADD of the mask where the indexer is not one op
    ("kqv", "", "FLASH_ATTN_EXT", 1),
    ("kqv", "kqv", "MUL_MAT", 2),
    ("kqv_out", "kqv_out", "RESHAPE CONT", 2),
    ("ffn_inp", "ffn_inp", "ADD", 2),
    ("ffn_norm", "ffn_norm", "MUL", 2),
    ("ffn_moe_logits", "ffn_moe_logits", "MUL_MAT", 2),
    ("ffn_moe_probs", "ffn_moe_probs", "SIGMOID UNARY", 2),
    ("ffn_moe_probs_biased", "ffn_moe_probs_biased", "ADD", 2),
    ("ffn_moe_topk", "ffn_moe_topk", "VIEW TOP_K", 2),
    ("ffn_moe_weights", "ffn_moe_weights", "GET_ROWS", 1),
    ("ffn_moe_weights_norm", "ffn_moe_weights_norm", "DIV", 2),
    ("ffn_moe_weights_scaled", "ffn_moe_weights_scaled", "SCALE", 1),
    ("ffn_moe_gate", "ffn_moe_gate", "MUL_MAT_ID", 1),
    ("ffn_moe_up", "ffn_moe_up", "MUL_MAT_ID", 1),
    ("ffn_moe_swiglu", "ffn_moe_swiglu", "SWIGLU GLU", 1),
    ("ffn_moe_down", "ffn_moe_down", "MUL_MAT_ID", 1),
    ("ffn_moe_out", "ffn_moe_out", "ADD CONT", 2),  # CONT where one expert is chosen
    ("ffn_gate", "ffn_gate", "MUL_MAT", 2),
    ("ffn_up", "ffn_up", "MUL_MAT", 2),
    ("ffn_swiglu", "ffn_swiglu", "SWIGLU GLU", 2),
    ("ffn_shexp", "ffn_shexp", "MUL_MAT", 2),
    ("ffn_out", "ffn_out", "ADD MUL_MAT", 2),  # MUL_MAT on dense layers
    ("l_out", "l_out", "ADD", 2),
)
MODEL_RULES = (
    ("embd", EMBD, "GET_ROWS"),
    ("result_norm", ("result_norm",), "MUL"),
    ("result_output", ("result_output",), "MUL_MAT"),
)


def split_graphs(nodes: Iterable[Node]) -> list[list[Node]]:
    """Cut where another graph begins (a further batch, a decode step): at the embedding, or where the layers start anew."""
    graphs: list[list[Node]] = []
    last = np.inf
    for node in nodes:
        layer = -1 if node.label in EMBD else np.inf if node.label.startswith("result_") else _label_layer(node)
        if not graphs or (layer is not None and (layer < last or layer == last == -1)):
            graphs.append([])
        graphs[-1].append(node)
        last = last if layer is None else layer
    return graphs


def map_graph(nodes: Iterable[Node], n_past: int = 0, n_tokens: int | None = None) -> list[Mapped]:
    """The probes that one graph holds, in its order.

    n_past: tokens in the cache before this graph. n_tokens: T if known, else the most rows that any probe here has. A node with fewer
    rows is taken to hold the last ones: the last layer goes on with the output rows only.
    """
    nodes = list(nodes)
    found: list[tuple[str, int | None, Node, int]] = []
    for probe, labels, op in MODEL_RULES:
        found += [(probe, None, node, 2) for node in nodes if node.label in labels and node.op == op][-1:]
    for layer, members in _by_layer(nodes).items():
        in_layer: dict[str, tuple] = {}
        for rule in LAYER_RULES:
            if (node := _pick(members, rule.ops, rule.base)) is not None:
                in_layer.setdefault(rule.probe, (rule.probe, layer, node, rule.token_axis))
        for probe, node in (("attn_out", _attn_out(members)), ("top_k", _top_k(members))):
            if node is not None:
                in_layer[probe] = (probe, layer, node, 2)
        found += in_layer.values()
    sizes = [_sizes(PROBES[probe], node, token_axis) for probe, _, node, token_axis in found]
    n_tokens = n_tokens or max((n_rows for n_rows, *_ in sizes), default=0)
    mapped = []
    for (name, layer, node, token_axis), (n_rows, *tail) in zip(found, sizes, strict=True):
        if n_rows > n_tokens:
            raise NpglmError(f"{node}: {n_rows} rows for {n_tokens} tokens")
        whole = name != "top_k"
        if name in ("indexer_score", "top_k") and tail[0] > n_past + n_tokens:
            tail, whole = [n_past + n_tokens], False
        rows = None if n_rows == n_tokens else tuple(range(n_tokens - n_rows, n_tokens))
        mapped.append(Mapped(PROBES[name], layer, node, rows, (n_rows, *tail), whole, token_axis, n_past))
    return sorted(mapped, key=lambda m: m.node.order)


def _label_layer(node: Node) -> int | None:
    """The layer that the label tells, where it can be trusted: `top_k` is relabelled by each layer that shares it."""
    match = LABEL.fullmatch(node.label)
    return int(match["layer"]) if match and (match["base"], match["rest"]) != ("top_k", "") else None


def _by_layer(nodes: list[Node]) -> dict[int, list[Node]]:
    """A node without a label to trust belongs to the layer of the one before it."""
    layers: dict[int, list[Node]] = {}
    current = None
    for node in nodes:
        layer = _label_layer(node)
        current = current if layer is None else layer
        if current is not None:
            layers.setdefault(current, []).append(node)
    return layers


def _pick(members: list[Node], ops: Iterable[str], base: str) -> Node | None:
    for op in ops:
        hits = [node for node in members if node.op == op and base in ("", node.base)]
        if hits:
            return hits[-1]
    return None


def _attn_out(members: list[Node]) -> Node | None:
    """The unlabelled MUL_MAT that follows kqv_out."""
    after = False
    for node in members:
        if after and node.op == "MUL_MAT":
            return node if node.base == "attn_out" or UNLABELLED.fullmatch(node.label) else None
        after = after or node.base == "kqv_out"
    return None


def _top_k(members: list[Node]) -> Node | None:
    """A view on every layer, with its own number; on full layers also what TOP_K made."""
    views = [node for node in members if node.op == "VIEW" and re.fullmatch(r"top_k-\d+ \(view\)", node.label)]
    return views[-1] if views else _pick(members, ("CONT", "TOP_K", "VIEW"), "top_k")


def _sizes(probe: Probe, node: Node, token_axis: int) -> tuple[int, ...]:
    """[T, ...] of the probe that the node holds, before columns are cut."""
    n_axes = len(probe.axes.split())
    rest = list(node.shape)
    n_rows = rest.pop(token_axis) if len(rest) == 4 else 0
    if len(rest) != 3 or rest[0] != 1 or (n_axes == 1 and min(rest[1:]) != 1):
        raise NpglmError(f"{node}: shape {list(node.shape)} does not fit {probe.name} [T {probe.axes}]")
    return n_rows, *(rest[1:] if n_axes == 2 else (rest[1] * rest[2],))
