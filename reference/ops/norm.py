"""RMSNorm and LayerNorm over the last axis."""

import numpy as np

from reference.numerics import F32, Numerics
from reference.ops.elementwise import add


def rms_norm(x: np.ndarray, weight, eps: float, num: Numerics = F32) -> np.ndarray:
    """x [..., n], weight [n] -> [..., n]: x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich, arXiv:1910.07467)."""
    x, w = x.astype(num.acc, copy=False), num.weights(weight.decode())
    mean_square = np.mean(x * x, axis=-1, keepdims=True, dtype=num.acc)
    return num.result(x / np.sqrt(mean_square + num.acc(eps)) * w)


def add_norm(x: np.ndarray, y: np.ndarray, weight, eps: float, num: Numerics = F32) -> tuple[np.ndarray, np.ndarray]:
    """x and y [T,n], weight [n] -> x + y [T,n] and its RMSNorm [T,n]."""
    x = add(x, y, num=num)
    return x, rms_norm(x, weight, eps, num=num)


def layer_norm(x: np.ndarray, weight, bias, eps: float, num: Numerics = F32) -> np.ndarray:
    """x [..., n], weight and bias [n] -> [..., n]: (x - mean) / sqrt(variance + eps) * weight + bias (Ba et al., arXiv:1607.06450)."""
    x, w, b = x.astype(num.acc, copy=False), num.weights(weight.decode()), num.weights(bias.decode())
    centred = x - np.mean(x, axis=-1, keepdims=True, dtype=num.acc)
    variance = np.mean(centred * centred, axis=-1, keepdims=True, dtype=num.acc)
    return num.result(centred / np.sqrt(variance + num.acc(eps)) * w + b)
