"""The shape of an error, for when no hypothesis fits: where it sits, and what it repeats."""

import numpy as np

from npglm.config import GlmConfig
from npglm.trace.graph import Step

PERIODS = (256, 64, 32)


def describe(step: Step, config: GlmConfig, values: np.ndarray, truth: np.ndarray) -> str:
    """One line: rows, heads or experts, columns, blocks; constant ratio; zeros; growth with position."""
    if values.shape != truth.shape:
        return f"shape {list(values.shape)} for {list(truth.shape)}"
    if step.kind == "choice":
        rows = [t for t in range(len(values)) if set(values[t].tolist()) != set(truth[t].tolist())]
        return f"rows {ranges(rows)} of {len(values)}" if rows else "no row"
    words = []
    bad = np.isfinite(values) != np.isfinite(truth)
    finite = np.isfinite(values) & np.isfinite(truth)
    with np.errstate(invalid="ignore"):
        error = np.where(finite, np.subtract(values, truth, dtype=np.float64), 0.0)
    size = np.abs(np.where(finite, truth, 0)).max(initial=0)
    off = bad | (np.abs(error) > max(0.05 * np.abs(error).max(initial=0), 1e-6 * size))
    if bad.any():
        words.append(f"{int(bad.sum())} NaN or inf")
    axes = ["rows", *{2: ["columns"], 3: ["heads", "columns"]}.get(values.ndim, [])]
    if step.probe.startswith("ffn_moe_") and values.ndim == 3:
        axes[1] = "expert slots"
    for axis, name in enumerate(axes):
        hit = np.flatnonzero(off.any(tuple(a for a in range(off.ndim) if a != axis)))
        if 0 < len(hit) < off.shape[axis]:
            words.append(f"{name} {ranges(hit)} of {off.shape[axis]}")
    if not words:
        words.append("all rows and columns")
    hit = off & finite
    if hit.any():
        theirs, ours = np.asarray(values, np.float64)[hit], np.asarray(truth, np.float64)[hit]
        if not theirs.any():
            words.append("zeros there")
        else:
            ratio = float(theirs @ ours / max(ours @ ours, 1e-300))
            rest = np.linalg.norm(theirs - ratio * ours) / max(np.linalg.norm(theirs), 1e-300)
            if rest < 0.01 and abs(ratio - 1) > 1e-3:
                words.append(f"constant ratio {ratio:.4g}")
    words += [w for w in (period(error), growth(error, np.where(finite, truth, 0))) if w]
    return ", ".join(words)


def ranges(indices) -> str:
    """0-3, 7, 9-12; at most four of them."""
    indices = [int(i) for i in indices]
    parts, start = [], None
    for i, n in enumerate(indices):
        start = n if start is None else start
        if i + 1 == len(indices) or indices[i + 1] != n + 1:
            parts.append(str(start) if start == n else f"{start}-{n}")
            start = None
    return ", ".join(parts[:4]) + (f", ... ({len(indices)})" if len(parts) > 4 else "")


def period(error: np.ndarray) -> str:
    """A period of the error's strength along the last axis that is far from even."""
    columns = np.sqrt(np.mean(error.reshape(-1, error.shape[-1]) ** 2, axis=0))
    for n in PERIODS:
        if len(columns) % n or len(columns) < 2 * n:
            continue
        folded = columns.reshape(-1, n)
        mean = folded.mean(0)
        if mean.max() > 4 * max(np.median(mean), 1e-300) and np.median(folded[:, mean.argmax()]) > 2 * np.median(columns):
            return f"repeats every {n} columns"
    return ""


def growth(error: np.ndarray, truth: np.ndarray) -> str:
    rows = np.linalg.norm(error.reshape(len(error), -1), axis=1) / np.maximum(
        np.linalg.norm(truth.reshape(len(truth), -1), axis=1), 1e-30
    )
    if len(rows) < 8 or not rows.any():
        return ""
    if rows[0] < 1e-3 * rows.max() and np.corrcoef(np.arange(len(rows)), rows)[0, 1] > 0.7:
        return "grows with position, none at position 0"
    return ""


def downsample(values: np.ndarray, truth: np.ndarray, n_rows: int = 48, n_columns: int = 96) -> list[list[float]]:
    """The largest |difference| in each cell of a grid over rows and all other axes, relative to the largest value; NaN where not finite."""
    flat = [np.asarray(a, np.float64).reshape(len(a), -1) for a in (values, truth)]
    with np.errstate(invalid="ignore"):
        error = np.abs(flat[0] - flat[1]) / (np.abs(flat[1][np.isfinite(flat[1])]).max(initial=0) or 1.0)
    error[np.isnan(error) & ~np.isfinite(flat[0]) & ~np.isfinite(flat[1])] = 0.0  # -inf on both sides
    for axis, n in ((0, n_rows), (1, n_columns)):
        edges = np.unique(np.linspace(0, error.shape[axis], min(n, error.shape[axis]), endpoint=False).astype(int))
        error = np.maximum.reduceat(error, edges, axis)
    return error.tolist()
