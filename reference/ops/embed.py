"""Embedding rows."""

import numpy as np

from reference.numerics import F32, Numerics


def embed(tokens: np.ndarray, table, num: Numerics = F32) -> np.ndarray:
    """tokens int32 [T], table [Y,D] -> [T,D]. Decodes the chosen rows only."""
    rows = [table.rows(int(t), int(t) + 1) for t in tokens]
    return num.result(num.weights(np.concatenate(rows)))
