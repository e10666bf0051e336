"""Numerics: how the reference computes. Nothing else decides a precision or a rounding.

f32   dequantised weights, f32 activations, f32 accumulation
f64   the same in f64
ggml  llama.cpp's x86 CPU path: activations rounded to ggml's blocks before a quantised matmul, f16 caches
bf16  weights, inputs and every op's output rounded to bf16, f32 accumulation
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np


def round_bf16(x: np.ndarray) -> np.ndarray:
    """Round to the nearest bf16, ties to even; values stay in x's dtype. NaN and inf are kept."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isfinite(x), rounded, x).astype(x.dtype)


@dataclass(frozen=True)
class Numerics:
    """acc: dtype of every sum and of the arrays between ops. act: rounding of a matmul's activations, None, "ggml" or "bf16".

    weight, out: "bf16" rounds decoded weights, or every op's output. cache: dtype of the cached rows. table: dtype of the rope table.
    blocks: has the last word on 8-bit blocks, blocks(weight's name, quantiser, x) -> (q, d): npglm/trace/inject.py.
    """

    name: str
    acc: type = np.float32
    act: str | None = None
    weight: str | None = None
    out: str | None = None
    cache: type = np.float32
    table: type = np.float32
    blocks: Callable | None = None

    def truth(self) -> "Numerics":
        """The same roundings of inputs, with f64 accumulation and an unrounded output: what an op is judged against."""
        return replace(self, name=f"{self.name} in f64", acc=np.float64, out=None)

    def result(self, y: np.ndarray) -> np.ndarray:
        """An op's output as the next op sees it."""
        return round_bf16(y) if self.out == "bf16" else y

    def weights(self, w: np.ndarray) -> np.ndarray:
        """Decoded f32 weights as a sum sees them."""
        return (round_bf16(w) if self.weight == "bf16" else w).astype(self.acc, copy=False)


F32 = Numerics("f32")
F64 = Numerics("f64", acc=np.float64, cache=np.float64, table=np.float64)
GGML = Numerics("ggml", act="ggml", cache=np.float16)
BF16 = Numerics("bf16", act="bf16", weight="bf16", out="bf16")
NUMERICS = {n.name: n for n in (F32, F64, GGML, BF16)}
