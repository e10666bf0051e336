"""From numbers to a verdict on one op: equal, rounding, precision, wrong, or not comparable."""

from dataclasses import dataclass

import numpy as np

from npglm.trace.graph import ATTENTION, Step
from npglm.trace.metrics import worst_row
from npglm.trace.recording import Known

EQUAL, ROUNDING, NOT_COMPARABLE, PRECISION, WRONG = "equal", "rounding", "not_comparable", "precision", "wrong"
SEVERITY = [NOT_COMPARABLE, EQUAL, ROUNDING, PRECISION, WRONG]
TWIN_FACTOR = 4.0  # other engines add up in another order than our f32 twin does
ATTENTION_IN_F16 = "f16 arithmetic in attention"
ATTENTION_F16 = 2.0**-9  # llama.cpp's flash attention is 3e-4 to 5e-4 from f64
# What rounding the operands of a sum of products to a format does to it, as rms in units of sqrt(x^2 . w^2) of that very sum.
UNITS = {"f16": 2.0**-11, "bf16": 2.0**-8, "8-bit": 0.02}


@dataclass(frozen=True)
class Ruling:
    verdict: str
    error: float
    bound: float
    reason: str = ""


def classify(
    step: Step, engine, part: Known, truth: np.ndarray, twin, scale, passed: tuple, quantum: float, n_tokens: int
) -> Ruling:
    """The verdict on one recorded array. twin() -> what rounding alone may make of it. passed: probes that were not recorded.

    scale() -> sqrt(x^2 . w^2) of each sum, None where the op is no sum of products. quantum: half of the last printed digit of a text dump.
    """
    fine = ROUNDING if engine.rounds(step) or (passed and engine.rounds_any) else EQUAL
    if part.values.shape != truth.shape:
        return Ruling(WRONG, float("nan"), 0.0, f"shape {list(part.values.shape)}, expected {list(truth.shape)}")
    if part.known is not None and not part.known.any() and part.total is None:
        return Ruling(NOT_COMPARABLE, float("nan"), 0.0, "no value is known")
    values = soften(part.values, truth, quantum)
    error = worst_row(values, truth, part.known)
    bound = engine.bound(step, n_tokens)
    if np.isnan(error):
        bad = (np.isfinite(values) != np.isfinite(truth)) & (True if part.known is None else part.known)
        rows = sorted(set(np.argwhere(bad)[:, 0].tolist()))
        return Ruling(WRONG, error, bound, f"{int(bad.sum())} values are NaN or inf where they should not be (rows {rows[:6]})")
    likely = None
    if passed or error > bound:
        likely = twin()
        bound = max(bound, TWIN_FACTOR * engine.twin_scale * worst_row(likely, truth, part.known) + engine.floor)
    if error <= bound:
        off = sum_off(part, truth, likely)
        if off:
            return Ruling(WRONG, error, bound, off)
        return Ruling(fine, error, bound)
    if step.kind == ATTENTION and error <= ATTENTION_F16 and engine.stored is None:
        return Ruling(PRECISION, error, bound, ATTENTION_IN_F16)
    if part.known is None and not passed:
        name = noise_name(part.values, truth, scale())
        if name:
            return Ruling(PRECISION, error, bound, f"{name}: noise of the size that {name} rounding gives this very sum")
    return Ruling(WRONG, error, bound, f"differs by {error:.2g}, rounding allows {bound:.2g}")


def soften(values: np.ndarray, truth: np.ndarray, quantum: float) -> np.ndarray:
    """values moved towards truth by what printing may have cut off."""
    if not quantum:
        return values
    with np.errstate(invalid="ignore"):
        difference = values - truth
        return np.where(
            np.isfinite(difference), truth + np.sign(difference) * np.maximum(np.abs(difference) - quantum, 0), values
        )


def sum_off(part: Known, truth: np.ndarray, likely: np.ndarray | None) -> str:
    """A sentence if the engine's own sum cannot be that of these values, else ""."""
    if part.total is None or part.known is None or not np.isfinite(truth).all() or not np.isfinite(part.total):
        return ""
    if part.summed is not None:
        truth = truth[part.summed]
        likely = None if likely is None else likely[part.summed]
    noise = 0.0 if likely is None else np.sqrt(np.mean((likely - truth) ** 2, dtype=np.float64))
    total = float(truth.sum(dtype=np.float64))
    allowed = 12 * noise * np.sqrt(truth.size) + 1e-5 * float(np.abs(truth).sum(dtype=np.float64)) + 1e-6
    if likely is not None:
        allowed += 8 * abs(float(likely.sum(dtype=np.float64)) - total)
    if abs(part.total - total) <= allowed:
        return ""
    return f"its sum is {part.total:.6g}, should be {total:.6g} within {allowed:.2g}, though the printed values agree"


def noise_name(values: np.ndarray, truth: np.ndarray, scale: np.ndarray | None) -> str:
    """Which format's rounding the error looks like, or "": unbiased, spread evenly, and as large as that format's unit.

    scale: sqrt(x^2 . w^2) of each value's sum; None: rounding is relative to the values themselves.
    """
    finite = np.isfinite(truth)
    truth64 = np.where(finite, truth, 0).astype(np.float64).reshape(len(truth), -1)
    error = np.where(finite, values, 0).reshape(truth64.shape) - truth64
    rms = np.sqrt(np.mean(truth64**2))
    if not error.any() or abs(np.mean(error * truth64)) > 0.3 * np.sqrt(np.mean(error**2)) * rms:
        return ""
    size = np.maximum(np.abs(truth64), 0.1 * rms) if scale is None else np.maximum(scale.reshape(truth64.shape), 1e-30)
    z = error / size
    rows, columns = np.sqrt(np.mean(z**2, axis=1)), np.sqrt(np.mean(z**2, axis=0))
    if rows.max() > 6 * np.median(rows) or columns.max() > 12 * np.median(columns):
        return ""
    typical = np.sqrt(np.mean(z**2))
    return next((name for name, unit in UNITS.items() if typical <= 1.5 * unit and np.abs(z).max() <= 12 * unit), "")


def choice_gap(whole: Known, truth: np.ndarray, score: np.ndarray | None, tie: float = -1.0) -> tuple[float, list[int]]:
    """How much score the other's choices gave up, relative to the row's largest |score| (inf without scores), and the differing rows.

    Entries < 0 are padding. Order means nothing. Of a partly known row only the known entries count.
    tie: a row that gave up no more than this does not count as differing.
    """
    worst, rows = 0.0, []
    for t, row in enumerate(whole.values):
        known = row if whole.known is None else row[whole.known[t]]
        theirs, ours = set(known[known >= 0].tolist()), set(truth[t][truth[t] >= 0].tolist())
        extra = theirs - ours
        missing = ours - theirs if whole.known is None else set()
        if not extra and not missing:
            continue
        if score is None or not ours or len(missing) > len(extra) or max(extra, default=0) >= score.shape[1]:
            worst = float("inf")
            rows.append(t)
            continue
        line = np.asarray(score[t], np.float64)
        finite = line[np.isfinite(line)]
        taken = min((line[i] for i in extra), default=np.nan)
        given_up = max((line[i] for i in (missing or ours)), default=np.nan) if missing else min(line[i] for i in ours)
        gap = (given_up - taken) / max(np.abs(finite).max(initial=0), 1e-30)
        gap = gap if np.isfinite(gap) else float("inf")
        worst = max(worst, gap)
        if gap > tie:
            rows.append(t)
    return worst, rows
