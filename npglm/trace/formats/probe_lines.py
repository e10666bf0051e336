"""Probe lines, as vLLM users print them: `r0 ffn_gate-0 SUM 1681.035858 width 6144 head= a b c tail= d e f shape=(5, 6144)`, a rank each."""

import re

import numpy as np

from npglm.errors import NpglmError
from npglm.trace.probes import PROBES
from npglm.trace.recording import ArrayTrace

LINE = re.compile(
    r"(?:^|\s)r(?P<rank>\d+)\s+(?P<name>[A-Za-z_]+(?:-\d+)?)(?:\s+SUM\s+(?P<sum>\S+))?(?P<rest>\s+.*=.*|\s+width\s+\d+.*)$"
)
WIDTH, SHAPE = re.compile(r"\bwidth\s*=?\s*(\d+)"), re.compile(r"\bshape\s*=\s*[(\[]([\d, ]+)[)\]]")
HEAD, TAIL = (re.compile(rf"\b{w}\s*=\s*([-+.\d\seE,\[\]()naif]*)") for w in ("head", "tail"))
NUMBER = re.compile(r"[-+]?(?:\d*\.\d+|\d+\.?)(?:[eE][-+]?\d+)?|nan|[-+]?inf")
ALIASES = {"qkv_lora": "q_a", "inp_embd": "embd"}  # names that differ from ours
MAX_VALUES = 1 << 31


def is_probe_lines(head: str) -> bool:
    return any(LINE.search(line) for line in head.splitlines())


def read_probe_lines(path, n_tokens: int | None = None) -> list[ArrayTrace]:
    """One trace per rank. n_tokens: rows of a probe whose line gives its width only."""
    ranks: dict[int, dict[str, np.ndarray]] = {}
    decimals = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            match = LINE.search(line)
            if not match:
                continue
            name = _name(match["name"])
            if name is None:
                continue
            arrays = ranks.setdefault(int(match["rank"]), {})
            if name in arrays:
                continue  # a later evaluation: the first prefill counts
            arrays |= _entry(path, name, match, n_tokens)
            decimals += [len(n.split(".")[1]) for n in NUMBER.findall(match["rest"]) if "." in n and "e" not in n.lower()]
    if not ranks:
        raise NpglmError(f"{path.name}: no probe line such as 'r0 ffn_gate-0 SUM 1681.03 width 6144' in it")
    shared = {"engine": "probe lines", "world": str(len(ranks))}
    if decimals:
        shared["decimals"] = str(max(set(decimals), key=decimals.count))
    return [
        ArrayTrace(arrays, shared | {"rank": str(rank)}, f"{path.name} rank {rank}") for rank, arrays in sorted(ranks.items())
    ]


def _name(text: str) -> str | None:
    base, dash, layer = text.partition("-")
    base = ALIASES.get(base, base)
    return base + dash + layer if base in PROBES else None


def _entry(path, name: str, match: re.Match, n_tokens: int | None) -> dict[str, np.ndarray]:
    rest = match["rest"]
    shape = SHAPE.search(rest)
    width = WIDTH.search(rest)
    if shape:
        dims = tuple(int(n) for n in shape[1].replace(" ", "").split(",") if n)
    elif width:
        dims = (n_tokens or 1, int(width[1]))
    else:
        raise NpglmError(f"{path.name}: the line of {name} has neither shape= nor width")
    if not dims or min(dims) < 1 or int(np.prod(dims, dtype=np.float64)) > MAX_VALUES:
        raise NpglmError(f"{path.name}: {name}: shape {list(dims)} cannot be")
    values, known = np.zeros(dims, np.float32), np.zeros(dims, bool)
    for pattern, end in ((HEAD, False), (TAIL, True)):
        found = pattern.search(rest)
        numbers = [float(n) for n in NUMBER.findall(found[1])][: values.size] if found else []
        place = slice(values.size - len(numbers), None) if end else slice(len(numbers))
        values.reshape(-1)[place], known.reshape(-1)[place] = numbers, True
    arrays = {name: values, f"{name}#known": known.astype(np.uint8)}
    if match["sum"] is not None:
        try:
            arrays[f"{name}#sum"] = np.array([float(match["sum"])])
        except ValueError:
            raise NpglmError(f"{path.name}: {name}: {match['sum']!r} is not a sum") from None
    return arrays
