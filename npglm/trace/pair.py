"""Two recordings without the model: what is equal, what differs more than rounding explains, and shards that hold the wrong columns.

Nothing is recomputed here, so an op can only be convicted where the values convict themselves; the model says the rest (--model).
"""

import json

import numpy as np

from npglm.errors import NpglmError
from npglm.trace.compare import OpResult, Report, clip_list
from npglm.trace.judge import EQUAL, NOT_COMPARABLE, ROUNDING, SEVERITY, WRONG
from npglm.trace.metrics import F32_FLOOR
from npglm.trace.probes import MODEL, PROBES
from npglm.trace.recording import PARTIAL, Known, Recording, join

CHAIN_BF16 = (
    2.0**-5
)  # of the largest value: what bf16 has come to after some layers of an engine that is right (origin.md: 3.2 %)
TYPICAL_BF16 = 0.0087  # its median per element there
SUM_SIGMAS = 12


def compare_pair(first: Recording, second: Recording) -> Report:
    """Compare the second with the first. Of the two, the one with more ranks is the one under test; ranks are judged one by one."""
    if first.world > second.world:
        first, second = second, first
    if first.world > 1:
        raise NpglmError("without --model, one of the two recordings must be of a single rank")
    notes = [n for r in (first, second) for t in r.traces for n in json.loads(t.metadata.get("notes", "[]"))]
    report = Report(
        identity={"model": first.source(), "recording": second.source(), "ranks": second.world, "tokens": [], "pair": True},
        notes=notes,
    )
    if first.tokens is not None and second.tokens is not None and list(first.tokens) != list(second.tokens):
        raise NpglmError(f"other tokens: {clip_list(first.tokens)} and {clip_list(second.tokens)}; nothing else compared")
    tokens = first.tokens if first.tokens is not None else second.tokens
    report.identity["tokens"] = [] if tokens is None else [int(i) for i in tokens]
    names = [n for n in _in_order(first.names) if n in second.names]
    if not names:
        raise NpglmError(f"{first.source()} and {second.source()} have no probe in common")
    for name in names:
        _judge(name, first, second, report)
    _summarise(report)
    return report


def _in_order(names: list[str]) -> list[str]:
    order = {p: i for i, p in enumerate(PROBES)}

    def key(name):
        base, layer = split(name)
        if PROBES[base].where == MODEL:
            return (-1 if base == "embd" else 1 << 30, order[base])
        return (layer, order[base])

    return sorted((n for n in names if split(n)[0] in PROBES), key=key)


def split(name: str) -> tuple[str, int | None]:
    base, dash, layer = name.rpartition("-")
    return (base, int(layer)) if dash and layer.isdigit() else (name, None)


def _judge(name: str, first: Recording, second: Recording, report: Report) -> None:
    base, layer = split(name)
    mine = first.read(first.traces[0], name, None)
    parts = [
        (int(t.metadata.get("rank", r)), k)
        for r, t in enumerate(second.traces)
        if (k := second.read(t, name, None)) is not None
    ]
    axes = {a for _, p in parts for a in _narrow_axes(p, mine)}
    if any(p.error or p.values.ndim != mine.values.ndim for _, p in parts) or len(axes) > 1:
        shapes = " and ".join(str(list(p.values.shape)) for _, p in parts)
        report.ops.append(OpResult(base, layer, parts[0][0], WRONG, reason=f"shape {shapes} for {list(mine.values.shape)}"))
        return
    axis = axes.pop() if axes else None
    if axis is None and len(parts) == second.world > 1:
        joined = join(base, tuple(parts), mine.values.shape, second.world)
        if joined.kind == PARTIAL:
            parts = [(parts[0][0], joined.whole)]
    twins = _duplicates(parts) if axis is not None else {}
    start = 0
    for rank, part in parts:
        cut = [slice(None)] * mine.values.ndim
        if axis is not None:
            cut[axis] = slice(start, start := start + part.values.shape[axis])
        report.ops.append(_compare(base, layer, rank, mine, part, tuple(cut), first.quantum + second.quantum))
        if rank in twins:
            _duplicate(report.ops[-1], name, twins[rank], mine, parts)
    totals = [p.total for _, p in parts]
    if axis is not None and len(parts) == second.world and None not in totals and mine.total is not None and not twins:
        _check_sum(report.ops[-1], mine, sum(totals))


def _narrow_axes(part: Known, whole: Known) -> list[int]:
    return [a for a, (p, w) in enumerate(zip(part.values.shape, whole.values.shape, strict=False)) if p != w]


def _compare(base: str, layer: int | None, rank: int, mine: Known, part: Known, cut: tuple, quantum: float) -> OpResult:
    """Values that both know; the scale is the largest of them."""
    ours = mine.values[cut]
    result = OpResult(base, layer, rank, NOT_COMPARABLE, reason="no value is known on both sides")
    if ours.shape != part.values.shape:
        result.verdict, result.reason = WRONG, f"shape {list(part.values.shape)} for {list(ours.shape)}"
        return result
    both = np.ones(ours.shape, bool)
    for known in (mine.known, part.known):
        if known is not None:
            both &= known[cut] if known.shape != both.shape else known
    if not both.any():
        return result
    a, b = np.asarray(ours[both], np.float64), np.asarray(part.values[both], np.float64)
    if PROBES[base].dtype is np.int32:
        same = float(np.mean(a == b))
        result.err_chained, result.verdict, result.reason = (
            1 - same,
            EQUAL if same == 1 else WRONG,
            f"{same:.0%} of the choices agree",
        )
        return result
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        result.verdict, result.reason = WRONG, "NaN or inf on one side only"
        return result
    finite = np.isfinite(a)
    scale = np.abs(a[finite]).max(initial=0) or 1.0
    off = np.maximum(np.abs(a - b)[finite] - quantum, 0).max(initial=0) / scale
    result.err_chained, result.bound = float(off), CHAIN_BF16
    result.verdict = EQUAL if off <= 16 * F32_FLOOR else ROUNDING if off <= CHAIN_BF16 else WRONG
    result.reason = (
        ""
        if result.verdict != WRONG
        else f"{int(both.sum())} values known on both sides differ by up to {off:.2g} of the largest"
    )
    if axis_is_whole(cut) and mine.total is not None and part.total is not None and result.verdict != WRONG:
        _check_sum(result, mine, part.total)
    return result


def axis_is_whole(cut: tuple) -> bool:
    return all(c == slice(None) for c in cut)


def _check_sum(result: OpResult, mine: Known, total: float) -> None:
    """A sum over n values that each are off by bf16's typical error is off by about that times the values' size times sqrt(n)."""
    known = mine.values if mine.known is None else mine.values[mine.known]
    size = float(np.sqrt(np.mean(np.asarray(known, np.float64) ** 2))) if known.size else 0.0
    allowed = SUM_SIGMAS * TYPICAL_BF16 * size * np.sqrt(mine.values.size) + 0.01 * abs(mine.total)
    if abs(total - mine.total) > allowed:
        result.verdict = WRONG
        result.reason = f"sum {total:.6f} for {mine.total:.6f}; bf16 would move it by about {allowed:.2g} at most"


def _duplicates(parts: list) -> dict[int, int]:
    """Rank -> the earlier rank whose columns it repeats: the same sum to the last digit, and the same values where both are known."""
    found = {}
    for i, (rank, part) in enumerate(parts):
        for other, earlier in parts[:i]:
            if part.values.shape != earlier.values.shape:
                continue
            both = np.ones(part.values.shape, bool)
            for p in (part, earlier):
                both &= True if p.known is None else p.known
            same_sum = part.total is not None and part.total == earlier.total and part.total != 0
            proof = same_sum or (both.sum() >= 16 and part.values[both].any())
            if proof and np.array_equal(part.values[both], earlier.values[both]):
                found.setdefault(rank, other)
    return found


def _duplicate(result: OpResult, name: str, other: int, mine: Known, parts: list) -> None:
    result.verdict = WRONG
    result.cause = {
        "name": f"rank {result.rank} holds rank {other}'s {name} shard",
        "residual": 0.0,
        "runner_up": None,
        "baseline": None,
    }
    totals = [p.total for _, p in parts]
    words = [f"ranks {other} and {result.rank} hold the same numbers where they should hold different columns"]
    if None not in totals and mine.total is not None:
        together = sum(totals)
        off = abs(together - mine.total) / abs(mine.total)
        result.cause["baseline"] = off
        result.err_chained = off
        words.append(
            f"their sums are both {totals[0]:.6f}, together {together:.6f} for {mine.total:.6f} ({100 * off:.2g} % off)"
        )
        words.append("bf16 cannot make two different shards sum to the same number: not bf16")
    result.reason = "; ".join(words)


def _summarise(report: Report) -> None:
    report.verdict = max((o.verdict for o in report.ops), key=SEVERITY.index)
    bad = [o for o in report.ops if o.verdict == WRONG]
    if bad:
        first = next((o for o in bad if o.cause), bad[0]) if bad[0].cause is None and _same_layer(bad) else bad[0]
        report.guilty = {"op": first.op, "layer": first.layer, "rank": first.rank}
        report.first_divergence = {
            "op": bad[0].op,
            "layer": bad[0].layer,
            "rank": bad[0].rank,
            "err_chained": bad[0].err_chained,
        }
        report.cause = first.cause
        shards = [o for o in bad if o.cause and o.rank == first.rank]
        if first.cause and len(shards) > 1:
            names = "/".join(dict.fromkeys(o.op.removeprefix("ffn_") for o in shards))
            held = first.cause["name"].split("holds rank ")[1].split("'")[0]
            report.cause = first.cause | {"name": f"rank {first.rank} holds rank {held}'s {names} shard"}
            report.notes.append("the differences after it follow from it: a sum over ranks adds one right and one wrong part")
    else:
        report.notes.append("equal or rounding by the values known on both sides; without --model no op can be recomputed")


def _same_layer(bad: list[OpResult]) -> bool:
    """Whether the first convicted shard is in the layer of the first difference."""
    convicted = next((o for o in bad if o.cause), None)
    return convicted is not None and convicted.layer == bad[0].layer
