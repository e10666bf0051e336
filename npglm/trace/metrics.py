"""The judging rule, in one place: tests, comparisons and reports use these numbers.

err = max|x - truth| / max|truth|, and the rms alike. An op passes if err(x) <= factor * err(twin) + floor, where truth is the
same op in f64 with the same named roundings of its inputs, and twin the same op in plain f32. Non-finite values must sit in
the same places first; then magnitudes count, then where.
"""

from dataclasses import dataclass

import numpy as np

F32_FLOOR = 4 * 2.0**-24
F16_FLOOR = 2.0**-11
BF16_FLOOR = 2.0**-8
FLOORS = {"f32": F32_FLOOR, "f16": F16_FLOOR, "bf16": BF16_FLOOR}
FACTOR = 2.0


@dataclass(frozen=True)
class Errors:
    """max, rms: relative to truth's max and rms; NaN when non-finite values sit in different places (`misplaced` of them).

    where: index of the largest difference, or of the first misplaced non-finite value; None when nothing was compared.
    """

    max: float
    rms: float
    where: tuple[int, ...] | None
    misplaced: int = 0

    def within(self, bound_max: float, bound_rms: float) -> bool:
        """False for NaN."""
        return self.max <= bound_max and self.rms <= bound_rms


@dataclass(frozen=True)
class Judgement:
    ok: bool
    errors: Errors
    bound_max: float
    bound_rms: float

    def __str__(self) -> str:
        e = self.errors
        if e.misplaced:
            return f"{e.misplaced} values are NaN or inf where truth is not, or the other way round; first at {list(e.where)}"
        return f"max {e.max:.3g} (bound {self.bound_max:.3g}), rms {e.rms:.3g} (bound {self.bound_rms:.3g}), worst at {e.where}"


def relative(part: float, whole: float) -> float:
    """part / whole, where 0 / 0 is 0."""
    if part == 0:
        return 0.0
    return float(part / whole) if whole else float("inf")


def errors(x: np.ndarray, truth: np.ndarray, known: np.ndarray | None = None) -> Errors:
    """x and truth of one shape; known: bool mask of the values to look at. Raises ValueError when the shapes differ."""
    x, truth = np.asarray(x), np.asarray(truth)
    if x.shape != truth.shape:
        raise ValueError(f"shapes differ: {list(x.shape)} and {list(truth.shape)}")
    if x.dtype.kind != "f":
        x, truth = x.astype(np.float64), truth.astype(np.float64)
    finite = np.isfinite(truth)
    same = np.isfinite(x) == finite
    same &= finite | ~same | (x == truth) | (np.isnan(x) & np.isnan(truth))
    look = np.ones(x.shape, bool) if known is None else known
    misplaced = look & ~same
    if misplaced.any():
        where = np.unravel_index(int(misplaced.argmax()), x.shape)
        return Errors(float("nan"), float("nan"), tuple(map(int, where)), int(misplaced.sum()))
    look = look & finite
    count = int(look.sum())
    if not count:
        return Errors(0.0, 0.0, None)
    with np.errstate(invalid="ignore"):
        difference = np.where(look, np.subtract(x, truth, dtype=np.float64), 0.0)
    size = np.where(look, truth, 0).astype(np.float64, copy=False)
    where = np.unravel_index(int(np.abs(difference).argmax()), x.shape)
    largest = relative(np.abs(difference).max(), np.abs(size).max())
    rms = relative(np.linalg.norm(difference), np.linalg.norm(size))
    return Errors(largest, rms, tuple(map(int, where)))


def worst_row(x: np.ndarray, truth: np.ndarray, known: np.ndarray | None = None) -> float:
    """The larger of errors().rms and of max|x - truth| / max|truth| over one row of the first axis, whichever row is worst.

    A fault in a quiet row shows here and not in errors().max. Rows quieter than 1e-3 of the loudest count as that loud. NaN as there.
    """
    whole = errors(x, truth, known)
    if not len(x) or not np.isfinite(whole.rms):
        return whole.rms
    look = np.isfinite(truth) if known is None else np.isfinite(truth) & known
    with np.errstate(invalid="ignore"):
        difference = np.where(look, np.subtract(x, truth, dtype=np.float64), 0.0)
    size = np.abs(np.where(look, truth, 0)).reshape(len(x), -1).max(-1)
    size = np.maximum(size, 1e-3 * size.max())
    rows = np.abs(difference).reshape(len(x), -1).max(-1)
    return max(whole.rms, max(relative(d, s) for d, s in zip(rows, size, strict=True)))


def judge(x, twin, truth, floor: float = F32_FLOOR, factor: float = FACTOR) -> Judgement:
    """The rule. x is the op's output; twin and truth as in the module's head. NaN in x, or in twin where truth has none, fails."""
    mine, allowed = errors(x, truth), errors(twin, truth)
    bound_max, bound_rms = factor * allowed.max + floor, factor * allowed.rms + floor
    return Judgement(mine.within(bound_max, bound_rms), mine, bound_max, bound_rms)


def check(x, twin, truth, floor: float = F32_FLOOR, factor: float = FACTOR, what: str = "op") -> None:
    """judge() as an assertion."""
    judgement = judge(x, twin, truth, floor, factor)
    assert judgement.ok, f"{what}: {judgement}"
