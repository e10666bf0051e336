"""GpuOps: every verb of reference.ops.VERBS over a Device. It is the op set that npglm.forward takes."""

import copy
from functools import partial
from types import SimpleNamespace

import numpy as np

from npglm.errors import NpglmError
from npglm.gpu import attention, elementwise, indexer, matmul, moe, sample, weights

VERBS = (
    elementwise.embed, elementwise.rms_norm, elementwise.add_norm, elementwise.layer_norm, elementwise.rope_table, elementwise.rope,
    matmul.linear, matmul.linear_heads, matmul.linear_experts, elementwise.store, attention.queries, attention.latents, attention.projections,
    indexer.indexer_score, indexer.select_top_k, indexer.indexer, attention.attention, attention.attend, elementwise.add, elementwise.scale, elementwise.sigmoid,
    elementwise.swiglu, moe.select_experts, moe.route, moe.expert_tiles, moe.gate_up_swiglu, moe.moe_gate_up_swiglu,
    moe.combine_experts, moe.moe_down_combine, moe.dense_ffn, moe.local_experts, moe.moe_experts, moe.moe_ffn, matmul.quantize_q8_0,
    matmul.quantize_q8_k, sample.sample,
)  # fmt: skip
CACHE_DTYPES = {"ggml": np.float16, "f32": np.float32}


class GpuOps:
    """numerics: "ggml" (8-bit activation blocks, f16 cache) or "f32". fused: fewer kernels, nothing between them to probe."""

    fused = True

    def __init__(self, device, numerics: str = "ggml", backend: str = "gpu"):
        if numerics not in CACHE_DTYPES:
            raise NpglmError(f"--numerics {numerics} does not run on the {backend} backend, only {' and '.join(CACHE_DTYPES)}")
        self.device, self.numerics, self.backend = device, SimpleNamespace(name=numerics), backend
        self.cache_dtype, self.rounds = CACHE_DTYPES[numerics], numerics == "ggml"
        self.array, self.numpy, self.launch = device.array, device.numpy, device.launch
        self.constants: dict = {}
        self.kept: list | None = None  # arrays of a captured step stay where they are
        self._bind()

    def _bind(self) -> None:
        self.remembered: dict = {}
        for verb in VERBS:
            setattr(self, verb.__name__, partial(verb, ops=self))

    def traced(self) -> "GpuOps":
        """The same op set with every fused verb written as its small verbs, each probed."""
        ops = copy.copy(self)
        ops.fused = False
        ops._bind()
        return ops

    def load(self, checkpoint, progress=None):
        """npglm.checkpoint.Checkpoint -> its weights on the device. progress(done, total) is told the bytes moved."""
        return weights.load(checkpoint, self.device, fast=self.rounds, progress=progress)

    def repeat(self, function):
        """A callable that does function()'s launches again and returns its result; a graph where the device can capture.

        The arrays of a graph stay where they are: each call writes the same ones.
        """
        held = {}

        def run():
            self.remembered.clear()
            self.kept = held["arrays"] = []
            try:
                held["result"] = function()
            finally:
                self.kept = None

        again = self.device.capture(run)
        self.remembered.clear()

        def repeat():
            again()
            return held["result"]

        return repeat

    def decode(self, forward, weights, config, cache, temperature: float = 0.0, seed: int = 0, vocab: int | None = None):
        """The decode loop on the device: a Decoder, whose start(token, pos) sets where it is and next() gives one id after the other.

        vocab: only the first so many ids are chosen (default: all).
        """
        return Decoder(forward, weights, config, cache, self, {"temperature": temperature, "seed": seed, "vocab": vocab})

    def weight(self, tensor, fast: bool = True):
        """One npglm.checkpoint.Tensor as `load` would put it. fast: may be taken apart; not for the embedding table."""
        loaded = weights.upload(tensor, self.device, fast and self.rounds)
        self.device.synchronize()
        return loaded

    def file_bytes(self, weight) -> np.ndarray:
        """What `load` made of a tensor, back on the host: uint8 [n_rows, row_bytes] as in the file, or a vector's f32 [n]."""
        return self.numpy(weights.joined(weight, self.device) if isinstance(weight, weights.Weight) else weight)

    def empty(self, shape: tuple[int, ...], dtype):
        array = self.device.empty(shape, dtype)
        if self.kept is not None:
            self.kept.append(array)
        return array

    def constant(self, key, make):
        """A small array that is computed on the host once."""
        if key not in self.constants:
            self.constants[key] = self.device.array(make(), np.float64)
        return self.constants[key]

    def remember(self, key: tuple, array, make):
        """What was made of an array under this key (its 8-bit blocks, its sorted order), so that it is made once. The last 4 are kept."""
        made = self.recall(key, array)
        if made is None:
            made = make()
            self.remembered[key] = [*self.remembered.get(key, ())[-3:], (array, made)]
        return made

    def recall(self, key: tuple, array):
        """What is remembered of an array, or of one that is another view of all its values; None if nothing."""
        for seen, made in self.remembered.get(key, ()):
            if seen is array or (
                seen.size == array.size
                and seen.flags.c_contiguous
                and array.flags.c_contiguous
                and self.device.address(seen) == self.device.address(array)
            ):
                return made
        return None


class Decoder:
    """One token a step: forward, sample and the step to the next position, all on the device, repeated as one graph.

    A cache that moves (Cache.grow) needs a new one. logits: [1,Y] of the last step, on the device. chooses: how, see GpuOps.decode.
    """

    def __init__(self, forward, weights, config, cache, ops, chooses: dict):
        self.ops, self.cache, self.steps, self.chooses = ops, cache, 0, chooses
        self._rows, vocab = (cache.kv, cache.index_k), chooses["vocab"]  # kept: the graph knows their addresses
        free = min(cache.length, cache.capacity - 1)  # capturing runs a token in this row: it is written again before it counts
        self.token, self.pos = ops.array([0], np.int32), ops.array([free], np.int32)
        self.step = ops.array([0], np.int64)

        def step():
            logits = forward(weights, config, cache, self.token, self.pos, ops)  # [1,Y]
            chosen = ops.sample(logits[0, :vocab], self.step, temperature=chooses["temperature"], seed=chooses["seed"])
            ops.launch("next_step", (1,), 64, chosen, self.token, self.pos, self.step)
            return logits, chosen

        self.repeat = ops.repeat(step)

    @property
    def moved(self) -> bool:
        """Whether the cache's rows are elsewhere now."""
        return self.cache.kv is not self._rows[0]

    def start(self, token: int, pos: int, step: int = 0) -> None:
        """The next step runs `token` at `pos`; step: its number for the sampler."""
        ops = self.ops
        self.token[...], self.pos[...], self.step[...] = (
            ops.array([v], t) for v, t in ((token, np.int32), (pos, np.int32), (step, np.int64))
        )
        self.cache.length, self.steps = pos, step

    def next(self) -> int:
        """Run one step and return the id it chose. Raises NpglmError when the cache is full or has moved, or logits are not finite."""
        if self.moved:
            raise NpglmError("the cache has moved since this decoder was made: make a new one")
        if self.cache.length >= self.cache.capacity:
            raise NpglmError(f"context overflow: {self.cache.length + 1} tokens in a cache of {self.cache.capacity}")
        self.logits, chosen = self.repeat()
        self.cache.length += 1
        self.steps += 1
        return sample.checked(int(self.ops.numpy(chosen)[0]), self.steps - 1)
