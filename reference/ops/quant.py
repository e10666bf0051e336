"""ggml's 8-bit activation blocks, and which of them a weight type asks for. Computed in f32, bit for bit."""

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from reference.numerics import Numerics, round_bf16


def quantize_q8_0(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x f32 [..., n], n a multiple of 32 -> q int8 [..., n/32, 32], d f16 [..., n/32]. ggml's x86 quantize_row_q8_0."""
    blocks = np.asarray(x, np.float32).reshape(*x.shape[:-1], -1, 32)
    amax = np.abs(blocks).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), amax, out=np.zeros_like(amax), where=amax != 0)
    return np.rint(blocks * inverse).astype(np.int8), (amax[..., 0] / np.float32(127)).astype(np.float16)  # round: f16 scale


def quantize_q8_k(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x f32 [..., n], n a multiple of 256 -> q int8 [..., n/256, 256], d f32 [..., n/256]. ggml's quantize_row_q8_K.

    The factor is -127 / (the value of largest magnitude, the first of equals, with its sign); d is its inverse.
    """
    blocks = np.asarray(x, np.float32).reshape(*x.shape[:-1], -1, 256)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)
    factor = np.divide(np.float32(-127), largest, out=np.zeros_like(largest), where=largest != 0)
    d = np.divide(np.float32(1), factor, out=np.zeros_like(factor), where=largest != 0)
    return np.minimum(np.rint(blocks * factor), 127).astype(np.int8), d[..., 0]


def round_activations(x: np.ndarray, weight_type: GGMLQuantizationType, num: Numerics, name: str = "") -> np.ndarray:
    """x [..., n] as a matmul with weights of this type, and this name, sees it, in num.acc."""
    if num.act == "bf16" or (num.act == "ggml" and weight_type == GGMLQuantizationType.BF16):
        x = round_bf16(x)
    elif num.act == "ggml" and weight_type == GGMLQuantizationType.F16:
        x = x.astype(np.float16)
    elif num.act == "ggml" and weight_type != GGMLQuantizationType.F32:
        quantize = quantize_q8_k if GGML_QUANT_SIZES[weight_type][0] == 256 else quantize_q8_0
        q, d = num.blocks(name, quantize, x) if num.blocks else quantize(x)
        return (q * d[..., None].astype(num.acc)).reshape(x.shape)  # round: 8-bit blocks
    return x.astype(num.acc, copy=False)
