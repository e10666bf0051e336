"""Rotary position embedding, interleaved: pair i is (x[2i], x[2i+1]) and stays in place."""

import numpy as np

from reference.numerics import F32, Numerics


def rope_table(pos: np.ndarray, n_dims: int, theta: float, num: Numerics = F32) -> tuple[np.ndarray, np.ndarray]:
    """pos int32 [T] -> cos, sin [T, n_dims/2] of pos * theta^(-2i/n_dims), made in f64 (Su et al., arXiv:2104.09864)."""
    frequency = np.float64(theta) ** (-np.arange(0, n_dims, 2, dtype=np.float64) / n_dims)
    angle = pos.astype(np.float64)[:, None] * frequency
    return num.result(np.cos(angle).astype(num.table)), num.result(np.sin(angle).astype(num.table))  # round: f32, once


def rope(x: np.ndarray, table: tuple[np.ndarray, np.ndarray], num: Numerics = F32) -> np.ndarray:
    """x [T, ..., n_dims], table of its T positions -> the same shape, each pair turned by its angle."""
    x = x.astype(num.acc, copy=False)
    cos, sin = (t.astype(num.acc, copy=False).reshape(len(x), *(1,) * (x.ndim - 2), -1) for t in table)
    even, odd = x[..., 0::2], x[..., 1::2]
    return num.result(np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape))
