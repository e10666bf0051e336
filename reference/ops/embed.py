"""Embedding rows."""

import numpy as np

from npglm.errors import NpglmError
from reference.numerics import F32, Numerics


def embed(tokens: np.ndarray, table, num: Numerics = F32) -> np.ndarray:
    """tokens int32 [T], table [Y,D] -> [T,D]. Decodes the chosen rows only. NpglmError for an id outside 0..Y-1."""
    if len(outside := tokens[(tokens < 0) | (tokens >= table.n_rows)]):
        raise NpglmError(f"token id {outside[0]} is outside the vocabulary of {table.n_rows}")
    rows = [table.rows(int(t), int(t) + 1) for t in tokens]
    return num.result(num.weights(np.concatenate(rows)))
