"""The reference's ops, one file per family; ReferenceOps binds them to one Numerics and is the op set that forward() takes."""

from functools import partial
from types import SimpleNamespace

import numpy as np

from reference.numerics import F32, Numerics
from reference.ops.attention import attend, attention, latents, projections, queries
from reference.ops.elementwise import add, sigmoid, swiglu
from reference.ops.embed import embed
from reference.ops.indexer import indexer, indexer_score, select_top_k
from reference.ops.matmul import linear, linear_experts, linear_heads
from reference.ops.moe import (
    combine_experts,
    dense_ffn,
    gate_up_swiglu,
    local_experts,
    moe_down_combine,
    moe_experts,
    moe_ffn,
    moe_gate_up_swiglu,
    route,
    route_weights,
    select_experts,
)
from reference.ops.norm import add_norm, layer_norm, rms_norm
from reference.ops.quant import quantize_q8_0, quantize_q8_k
from reference.ops.rope import rope, rope_table
from reference.ops.store import store
from reference.weights import WeightCache

VERBS = (
    embed, rms_norm, add_norm, layer_norm, rope_table, rope, linear, linear_heads, linear_experts, store, queries, latents, projections,
    indexer_score, select_top_k, indexer, attention, attend, add, sigmoid, swiglu, select_experts, route, gate_up_swiglu, moe_gate_up_swiglu,
    combine_experts, moe_down_combine, dense_ffn, local_experts, moe_experts, moe_ffn,
)  # fmt: skip
PARTS = (route_weights,)  # of route, for going on with another engine's experts; no twin of its own
EXACT = (quantize_q8_0, quantize_q8_k)  # the same in every Numerics


class ReferenceOps:
    """Every verb of VERBS as an attribute, computing as `numerics` says. `load` gives the weights that the verbs take."""

    backend = "reference"

    def __init__(self, numerics: Numerics = F32, weight_cache: int = 1 << 30):
        """weight_cache: bytes of decoded weights to keep; what does not fit is decoded again at each use."""
        self.numerics, self.weight_cache, self.cache_dtype = numerics, weight_cache, numerics.cache
        for verb in VERBS + PARTS:
            setattr(self, verb.__name__, partial(verb, num=numerics))
        for verb in EXACT:
            setattr(self, verb.__name__, verb)

    def load(self, checkpoint, progress=None) -> SimpleNamespace:
        """npglm.checkpoint.Checkpoint -> its weights, decoded on first use. Nothing is read yet, of which progress could tell."""
        return WeightCache(self.weight_cache).wrap(checkpoint.weights)

    def traced(self) -> "ReferenceOps":
        """The op set with every verb written as its small verbs, each probed: this one always is."""
        return self

    def file_bytes(self, weight) -> np.ndarray:
        """What `load` made of a tensor: uint8 [n_rows, row_bytes], or a vector's f32 [n]."""
        return weight.decode() if len(weight.shape) == 1 else weight.tensor.data

    def empty(self, shape: tuple[int, ...], dtype) -> np.ndarray:
        return np.empty(shape, dtype)

    def array(self, values, dtype) -> np.ndarray:
        """Host values -> an array where this op set computes."""
        return np.asarray(values, dtype)

    def numpy(self, array) -> np.ndarray:
        """An array of this op set -> NumPy."""
        return array
