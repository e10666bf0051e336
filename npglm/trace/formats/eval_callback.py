"""llama-eval-callback's text, of all its eras, as a trace.

Since 2024: `ggml_debug:` or `common_debug_cb_eval:`, then NAME = (type) OP(sources}) = {ne}, nested brackets with `...` where values are
left out, and from 2024-04 on a sum: of the printed values until 2025-08, of the whole tensor since. Values that were not printed are
unknown. Only the first prefill is read.
"""

import json
import re

import numpy as np

from npglm.errors import NpglmError
from npglm.trace.formats.llamacpp import Node, map_graph, split_graphs
from npglm.trace.recording import ArrayTrace

HEADER = re.compile(
    r"(?:ggml_debug|common_debug_cb_eval):\s*(?P<label>.*?) = \((?P<type>\w+)\)\s+(?P<op>\w+)\(.*= \{(?P<ne>\d+(?:, \d+)*)\}"
)
LOG_PREFIX = re.compile(r"^\d+\.\d+\.\d+\.\d+ [A-Z] ")
TOKEN = re.compile(r"\[|\]|\.\.\.|[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|inf|nan)", re.IGNORECASE)
SUM = re.compile(r"^\s*sum = *(\S+)")
N_TOKENS = re.compile(r"number of input tokens = (\d+)")
TOKEN_LINE = re.compile(r"^\s*(\d+)$")
VALUE_STARTS = ("[", "]", ".")
DECIMALS = 4
MAX_VALUES = 1 << 31
PRINTED_ONLY = 0.9  # share of nodes whose sum is that of the printed values, from which on all sums are taken to be such


class _Block:
    """One node's header and the lines below it."""

    def __init__(self, order: int, match: re.Match):
        ne = [int(n) for n in match["ne"].split(", ")]
        ne += [1] * (4 - len(ne))
        self.shape = tuple(reversed(ne[:4]))
        self.node = Node(order, match["op"], match["label"].strip(), self.shape, self)
        self.text: list[str] = []
        self.total: float | None = None

    def values(self) -> tuple[np.ndarray, np.ndarray]:
        """float64 values and the mask of printed ones. Raises NpglmError when more is printed than the shape holds."""
        if int(np.prod(self.shape, dtype=np.float64)) > MAX_VALUES:
            raise NpglmError(f"node {self.node.label}: shape {list(self.shape)} is too large to be true")
        values, known = np.zeros(self.shape), np.zeros(self.shape, bool)
        self._place(_nested(self.text), values, known)
        return values, known

    def _place(self, items: list, values: np.ndarray, known: np.ndarray) -> None:
        gap = items.index(...) if ... in items else len(items)
        behind = [i for i in items[gap:] if i is not ...]
        places = [*enumerate(items[:gap]), *((len(values) - len(behind) + i, item) for i, item in enumerate(behind))]
        if len(places) > len(values):
            raise NpglmError(
                f"node {self.node.label}: {len(places)} entries printed where its shape {list(self.shape)} has {len(values)}"
            )
        for i, item in places:
            if isinstance(item, list) != (values.ndim > 1):
                return  # cut off in the middle of a bracket
            if isinstance(item, list):
                self._place(item, values[i], known[i])
            else:
                values[i], known[i] = item, True


def _nested(lines: list[str]) -> list:
    """The bracketed text as nested lists; brackets that a cut file never closes are closed at its end."""
    root: list = []
    stack = [root]
    for line in lines:
        for token in TOKEN.findall(line):
            if token == "[":
                stack[-1].append([])
                stack.append(stack[-1][-1])
            elif token == "]":
                if len(stack) > 1:
                    stack.pop()
            else:
                stack[-1].append(... if token == "..." else float(token))
    return root


def is_eval_callback(head: str) -> bool:
    return HEADER.search(head) is not None


def read_eval_callback(path) -> ArrayTrace:
    """The first prefill of the dump. Raises NpglmError when there is none."""
    blocks, ids = _scan(path)
    if not blocks:
        raise NpglmError(f"{path.name}: no node of llama-eval-callback in it")
    graphs = split_graphs([b.node for b in blocks])
    n_tokens = len(ids) if ids else None
    chosen = next((g for g in graphs if n_tokens is None or _rows(g) == n_tokens), None)
    if chosen is None:
        raise NpglmError(f"{path.name}: no graph of {n_tokens} tokens, though the log names that many; are two runs mixed?")
    mapped = map_graph(chosen, n_tokens=n_tokens)
    if not mapped:
        raise NpglmError(f"{path.name}: {len(chosen)} nodes, none of a glm-dsa model's ops among them; another model's dump?")
    arrays: dict[str, np.ndarray] = {}
    sums: dict[str, tuple[float, float, int]] = {}
    for m in mapped:
        block = m.node.value
        values, known = block.values()
        if not known.any() and block.total is None:
            continue  # quantised tensors print their header only
        if block.total is not None and not known.all():
            sums[m.name] = (block.total, float(values[known].sum()), int(known.sum()))
        values, mask = m.take(values, known)
        arrays[m.name] = values
        if mask is not None and not np.all(mask):
            arrays[m.name + "#known"] = np.asarray(mask, np.uint8)
        if m.rows is not None:
            arrays[m.name + "#rows"] = np.asarray(m.rows, np.int32)
        if m.name in sums and not m.whole:
            del sums[m.name]
    partial = [abs(total - printed) <= 1e-4 * count for total, printed, count in sums.values()]
    if partial and np.mean(partial) < PRINTED_ONLY:
        arrays |= {f"{name}#sum": np.array([total]) for name, (total, _, _) in sums.items()}
    if not arrays:
        raise NpglmError(f"{path.name}: {len(chosen)} nodes but no values; was the dump cut off?")
    notes = []
    if len(graphs) > 1:
        notes.append(f"{len(graphs)} evaluations in {path.name}: only the first prefill is compared")
    if partial and np.mean(partial) >= PRINTED_ONLY:
        notes.append(f"the sums in {path.name} are of the printed values only (before llama.cpp#15637) and were left aside")
    metadata = {"engine": "llama.cpp", "decimals": str(DECIMALS), "notes": json.dumps(notes)}
    if ids:
        metadata["tokens"] = json.dumps(ids)
    return ArrayTrace(arrays, metadata, path.name)


def _rows(graph: list[Node]) -> int:
    """Tokens of a graph, from its first node that has rows."""
    return max((m.shape[0] for m in map_graph(graph)), default=0)


def _scan(path) -> tuple[list[_Block], list[int]]:
    blocks: list[_Block] = []
    ids: list[int] = []
    expected = 0
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            line = LOG_PREFIX.sub("", line.rstrip("\n"))
            match = HEADER.search(line)
            if match:
                blocks.append(_Block(len(blocks), match))
            elif not blocks and (count := N_TOKENS.search(line)):
                expected, ids = int(count[1]), []
            elif not blocks and len(ids) < expected and (token := TOKEN_LINE.match(_last_word(line))):
                ids.append(int(token[1]))
            elif blocks and (total := SUM.match(line)):
                blocks[-1].total = _number(total[1])
            elif blocks and line.strip()[:1] in VALUE_STARTS:
                blocks[-1].text.append(line)
    return blocks, ids if len(ids) == expected else []


def _last_word(line: str) -> str:
    """The log prints `I   116`, with or without its time stamp."""
    return line.split("I", 1)[-1] if line.lstrip().startswith("I ") else line


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
