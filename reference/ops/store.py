"""Writing rows into the cache."""

import numpy as np

from reference.numerics import F32, Numerics


def store(cache: np.ndarray, rows: np.ndarray, pos: np.ndarray, num: Numerics = F32) -> None:
    """cache [capacity, n], rows [T, n], pos int32 [T]: cache[pos] = rows, in place."""
    cache[pos] = rows.astype(num.cache)  # round: f16 under ggml numerics, as the cache stores it
