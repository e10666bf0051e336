"""What another engine recorded, rank by rank, behind one view: values, which of them are known, and how the ranks join."""

import json
from dataclasses import dataclass, replace

import numpy as np

from npglm.errors import NpglmError
from npglm.trace.probes import PROBES

COMPANIONS = ("#rows", "#known", "#sum")
MOST_RANKS = 1 << 16
# Metadata in which the ranks of a run agree.
SHARED = {
    "model_sha256": "another model", "numerics": "other numerics", "world": "another number of ranks", "experts": "another --experts",
    "engine": "another engine",
}  # fmt: skip
# What ranks add up; the last three where they hold whole experts and 0 stands for those of others.
SUMMED = frozenset(
    {"attn_out", "ffn_out", "ffn_shexp", "ffn_moe_out", "ffn_moe_down", "ffn_moe_gate", "ffn_moe_up", "ffn_moe_swiglu"}
)
ALONE, REPLICATED, COLUMNS, PARTIAL = "alone", "replicated", "columns", "partial sums"


class ArrayTrace:
    """A trace in memory: the same reading as npglm.trace.record.Trace."""

    def __init__(self, arrays: dict[str, np.ndarray], metadata: dict[str, str], source: str):
        self.arrays, self.metadata, self.source = arrays, metadata, source
        self.names = list(arrays)

    def __iter__(self):
        return iter(self.names)

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]


@dataclass(frozen=True)
class Known:
    """values: of the probe's full shape, 0 where unknown. known: bool mask, None = all. total: the engine's own sum, or None.

    rows: whether the unknown values are whole token rows (the others are then as good as recorded). summed: the token rows that the
    total is over, None = all. error: what is wrong, or "".
    """

    values: np.ndarray
    known: np.ndarray | None = None
    total: float | None = None
    rows: bool = False
    summed: np.ndarray | None = None
    error: str = ""

    @property
    def full(self) -> bool:
        return self.known is None and not self.error


@dataclass(frozen=True)
class Joined:
    """One probe over all ranks. whole: joined by the op's rule, or None when that cannot be done. parts: (rank, its own values).

    axis: of the columns. error: why there is no whole.
    """

    whole: Known | None
    kind: str
    parts: tuple[tuple[int, Known], ...]
    axis: int | None = None
    error: str = ""


class Recording:
    """The traces of one engine's ranks. `tokens`: the ids, or None where no rank holds them."""

    def __init__(self, traces: list):
        if not traces:
            raise NpglmError("no recording")
        self.traces = _ordered(traces)
        _one_run(traces)
        self.world = len(traces)
        self.metadata = traces[0].metadata
        self.names = list(dict.fromkeys(n for t in traces for n in t if not n.endswith(COMPANIONS)))
        self.tokens = _tokens(traces)
        self.quantum = 0.5 * 10.0 ** -int(self.metadata["decimals"]) if "decimals" in self.metadata else 0.0

    def source(self) -> str:
        return ", ".join(map(_name, self.traces))

    def require_all_ranks(self) -> None:
        """Raises NpglmError, which names a rank that the others speak of and that is not here."""
        world = self.metadata.get("world", "")
        here = {_rank(t, i) for i, t in enumerate(self.traces)}
        missing = set(range(int(world) if world.isdecimal() and int(world) <= MOST_RANKS else 0)) - here
        if missing:
            raise NpglmError(f"{self.source()}: rank {min(missing)} of {world} is missing")

    @staticmethod
    def _companion(trace, name: str) -> np.ndarray | None:
        return trace[name] if name in trace else None  # noqa: SIM401 - a Trace has no get()

    def read(self, trace, name: str, shape: tuple[int, ...] | None) -> Known | None:
        """One rank's values spread to T rows; shape: the full one, None = as recorded."""
        if name not in trace:
            return None
        values = np.asarray(trace[name])
        rows, known, total = (self._companion(trace, name + c) for c in COMPANIONS)
        known = None if known is None else known.astype(bool)
        total = None if total is None else float(total[0])
        if known is not None and known.shape != values.shape:
            return Known(values, error=f"its #known mask has shape {list(known.shape)}, the values {list(values.shape)}")
        if shape is None or (rows is None and values.shape[:1] == shape[:1]):
            return Known(values, None if known is None or known.all() else known, total)
        if rows is None and len(values) < shape[0] and values.ndim == len(shape):
            rows = np.arange(shape[0] - len(values), shape[0])  # an engine that keeps output rows only keeps the last ones
        if rows is None or len(rows) != len(values) or rows.min(initial=0) < 0 or rows.max(initial=0) >= shape[0]:
            return Known(values, error=f"shape {list(values.shape)}, expected {list(shape)}")
        spread = np.zeros((shape[0], *values.shape[1:]), values.dtype)
        mask = np.zeros(spread.shape, bool)
        spread[rows] = values
        mask[rows] = True if known is None else known
        return Known(spread, None if mask.all() else mask, total, known is None, rows)

    def joined(self, name: str, shape: tuple[int, ...]) -> Joined | None:
        """The probe `name`, whose full shape is `shape`."""
        parts = [(r, k) for r, t in enumerate(self.traces) if (k := self.read(t, name, shape)) is not None]
        if not parts:
            return None
        for rank, part in parts:
            if part.error:
                return Joined(None, ALONE, tuple(parts), error=f"rank {rank}: {part.error}" if self.world > 1 else part.error)
        probe = name.rsplit("-", 1)[0]
        if probe == "top_k":
            parts = [(r, _fit_top_k(k, shape)) for r, k in parts]
        return join(probe, tuple(parts), shape, self.world)


def join(probe: str, parts: tuple, shape: tuple[int, ...], world: int) -> Joined:
    """Join by the op's own rule: shapes say columns; equal or summed ranks otherwise."""
    first = parts[0][1]
    if world == 1:
        if probe == "indexer_score" and first.values.ndim == 2 and first.values.shape[1] > shape[1]:
            first = Known(first.values[:, : shape[1]], None if first.known is None else first.known[:, : shape[1]])
        if first.values.shape == shape or first.values.size == np.prod(shape):
            known = None if first.known is None else first.known.reshape(shape)
            whole = Known(first.values.reshape(shape), known, first.total, first.rows, first.summed)
            return Joined(whole, ALONE, ((parts[0][0], whole),))
        return Joined(None, ALONE, parts, error=f"shape {list(first.values.shape)}, expected {list(shape)}")
    shapes = {p.values.shape for _, p in parts}
    axis = _split_axis([p.values.shape for _, p in parts], shape) if len(parts) == world else None
    if axis is not None:
        known = None if all(p.known is None for _, p in parts) else [_mask(p) for _, p in parts]
        whole = Known(
            np.concatenate([p.values for _, p in parts], axis),
            None if known is None else np.concatenate(known, axis),
            None if any(p.total is None for _, p in parts) else sum(p.total for _, p in parts),
        )
        return Joined(whole, COLUMNS, parts, axis)
    if shapes != {shape}:
        found = " and ".join(sorted(str(list(s)) for s in shapes))
        return Joined(None, ALONE, parts, error=f"ranks hold {found} of {list(shape)}, {len(parts)} of {world} ranks")
    if all(_equal(p, first) for _, p in parts) or probe not in SUMMED:
        return Joined(first, REPLICATED, parts)
    known = None if all(p.known is None for _, p in parts) else np.logical_and.reduce([_mask(p) for _, p in parts])
    return Joined(Known(sum(p.values.astype(np.float64) for _, p in parts), known), PARTIAL, parts)


def _mask(known: Known) -> np.ndarray:
    return np.ones(known.values.shape, bool) if known.known is None else known.known


def _equal(a: Known, b: Known) -> bool:
    """Within what two reductions of the same sum may differ by."""
    size = np.abs(b.values).max(initial=0)
    with np.errstate(invalid="ignore"):
        return bool(
            np.array_equal(a.values, b.values, equal_nan=True) or np.abs(a.values - b.values).max(initial=0) <= 2**-7 * size
        )


def _split_axis(parts: list[tuple], shape: tuple[int, ...]) -> int | None:
    """The axis whose sizes add up to the full one, when the other axes are equal."""
    if any(len(part) != len(shape) for part in parts):
        return None
    different = [a for a, size in enumerate(shape) if any(part[a] != size for part in parts)]
    return different[0] if len(different) == 1 and sum(part[different[0]] for part in parts) == shape[different[0]] else None


def _fit_top_k(choice: Known, shape: tuple[int, ...]) -> Known:
    """Any width: padding (-1, future positions) is dropped, the rest is ascending and filled up with -1."""
    if choice.known is not None or choice.values.ndim != 2 or len(choice.values) != shape[0]:
        return choice
    out = np.full(shape, -1, np.int32)
    for t, row in enumerate(choice.values):
        chosen = np.unique(row[(row >= 0) & (row <= t)])[: shape[1]]
        out[t, : len(chosen)] = chosen
    return replace(choice, values=out)


def _name(trace) -> str:
    return str(getattr(trace, "source", None) or trace.path.name)


def _rank(trace, index: int) -> int:
    try:
        return int(trace.metadata.get("rank", index))
    except ValueError:
        raise NpglmError(f"{_name(trace)}: metadata 'rank' is not a number") from None


def _ordered(traces: list) -> list:
    ranks = [_rank(t, i) for i, t in enumerate(traces)]
    for rank in ranks:
        if ranks.count(rank) > 1:
            both = [_name(t) for t, r in zip(traces, ranks, strict=True) if r == rank]
            raise NpglmError(f"{' and '.join(both)} both say that they are rank {rank}")
    return [trace for _, trace in sorted(zip(ranks, traces, strict=True), key=lambda pair: pair[0])]


def _one_run(traces: list) -> None:
    for key, what in SHARED.items():
        first = next((t for t in traces if key in t.metadata), None)
        for trace in traces:
            if key in trace.metadata and trace.metadata[key] != first.metadata[key]:
                raise NpglmError(f"{_name(trace)} is of {what} than {_name(first)}; they are not one run")


def _tokens(traces: list) -> np.ndarray | None:
    found = []
    for trace in traces:
        if "tokens" in trace.metadata:
            try:
                ids = json.loads(trace.metadata["tokens"])
                found.append([int(i) for i in ids])
            except (ValueError, TypeError):
                raise NpglmError("metadata 'tokens' is not a JSON list of token ids") from None
    if any(ids != found[0] for ids in found):
        raise NpglmError(f"{', '.join(map(_name, traces))}: the ranks ran different token ids; they are not one run")
    return np.asarray(found[0], np.int64) if found else None


def is_choice(probe: str) -> bool:
    return PROBES[probe].dtype is np.int32
