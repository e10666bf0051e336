"""Residual additions and activations."""

import numpy as np

from reference.numerics import F32, Numerics


def add(x: np.ndarray, y: np.ndarray, num: Numerics = F32) -> np.ndarray:
    """x + y, of one shape."""
    return num.result(x.astype(num.acc, copy=False) + y.astype(num.acc, copy=False))


def sigmoid(x: np.ndarray, num: Numerics = F32) -> np.ndarray:
    """1 / (1 + exp(-x)); exp may overflow to inf, which gives the right 0."""
    with np.errstate(over="ignore"):
        return num.result(1 / (1 + np.exp(-x.astype(num.acc, copy=False))))


def swiglu(gate: np.ndarray, up: np.ndarray, num: Numerics = F32) -> np.ndarray:
    """gate and up [..., n] -> gate * sigmoid(gate) * up (Shazeer, arXiv:2002.05202)."""
    gate, up = gate.astype(num.acc, copy=False), up.astype(num.acc, copy=False)
    with np.errstate(over="ignore"):
        return num.result(gate / (1 + np.exp(-gate)) * up)
