"""Routed experts in host memory, all else on the GPU: `--offload-experts`.

The experts stay where the file is mapped. Few tokens: npglm.cpu's kernels read the chosen ones there, while the GPU runs
the shared expert. From STREAM_TOKENS tokens on, which choose most of a layer's experts, those pass through the device instead,
if it has room for them. Host memory smaller than the file makes it slow, not fail: pages are read from the file again.
"""

from functools import partial
from types import SimpleNamespace

import numpy as np

import npglm.cpu
from npglm.checkpoint import EXPERTS
from npglm.cpu import entries
from npglm.cpu.jit import compile_entry
from npglm.cpu.weights import Layer, Matrix
from npglm.gpu import moe, weights
from npglm.gpu.ops import GpuOps
from npglm.trace.probes import NO_PROBE

STREAM_TOKENS = 192  # where moving a layer to the device becomes faster than computing on the host: npglm/gpu/offload_bench.py


class OffloadOps(GpuOps):
    """GpuOps whose weights' ffn_*_exps are npglm.cpu's. threads: of the host's part, default one per physical core.

    stream_from: so many tokens take the way through the device.
    """

    def __init__(
        self, device, numerics: str = "ggml", backend: str = "gpu", threads: int | None = None, progress=lambda d, t: None
    ):
        """progress is told how many of npglm.cpu's kernels are compiled."""
        self.cpu, self.stream_from = npglm.cpu.op_set(numerics, threads, progress), STREAM_TOKENS
        super().__init__(device, numerics, backend)

    def _bind(self) -> None:
        super()._bind()
        self.moe_experts = partial(moe_experts, ops=self)

    def load(self, checkpoint, progress=None):
        """npglm.checkpoint.Checkpoint -> its weights; the routed experts are not moved. progress(done, total): bytes moved."""
        loaded = weights.load(checkpoint, self.device, fast=self.rounds, progress=progress, leave=EXPERTS)
        for there, here in zip(loaded.layers, checkpoint.weights.layers, strict=True):
            if hasattr(here, EXPERTS[0]):
                self.attach(there, {name: getattr(here, name) for name in EXPERTS})
        self.compile()
        return loaded

    def attach(self, layer: SimpleNamespace, tensors: dict) -> None:
        """Give a layer its routed experts, npglm.checkpoint.Tensor by attribute."""
        layer.routed = Layer(**{name: self.cpu.weight(tensor) for name, tensor in tensors.items()})
        vars(layer).update({name: getattr(layer.routed, name) for name in EXPERTS})

    def file_bytes(self, weight) -> np.ndarray:
        """As GpuOps and CpuOps have it."""
        return (self.cpu if isinstance(weight, Matrix) else super()).file_bytes(weight)

    def compile(self) -> None:
        """Start the host's threads and compile its kernels, so that no token waits for them."""
        self.cpu.ws  # noqa: B018 - does the first, and compiles what the entry calls
        compile_entry(entries.moe_experts)


def _fits(w, device) -> bool:
    """Whether the device has room for a layer's experts and the arrays of a chunk."""
    return 1.5 * sum(getattr(w, name).data.nbytes for name in EXPERTS) <= device.free_bytes()[0]


def moe_experts(h, w, experts, mixed, probe=NO_PROBE, *, ops):
    """h [T,D], experts int32 [T,K], mixed (their weights) [T,K] -> [T,D]: the part of moe_ffn after the router."""
    if len(h) >= ops.stream_from and _fits(w, ops.device):
        moved = {name: ops.weight(getattr(w, name)) for name in EXPERTS}
        return moe.moe_experts(h, SimpleNamespace(**vars(w) | moved), experts, mixed, probe, ops=ops)
    device, routed = ops.device, ops.empty(h.shape, np.float32)  # [T,D]
    rows, chosen, weights = (device.to_host(array) for array in (h, experts, mixed))  # on their way
    copied, sums = device.event(), device.pinned(routed.shape, routed.dtype)
    if ops.fused:  # nobody sees the order: the GPU works while the host does
        shared = ops.dense_ffn(h, moe.shared_expert(w))  # [T,D]

    def on_host():
        copied()
        if probe is NO_PROBE:
            sums[...] = ops.cpu.moe_experts(rows, w.routed, chosen, weights)
        else:
            x = ops.cpu.moe_gate_up_swiglu(rows, w.ffn_gate_exps, w.ffn_up_exps, chosen, probe)  # [T,K,G]
            sums[...] = ops.cpu.moe_down_combine(x, w.ffn_down_exps, chosen, weights, probe)
        device.fill(routed, sums)

    device.between(on_host)
    probe("ffn_moe_out", routed)
    if not ops.fused:
        shared = ops.dense_ffn(h, moe.shared_expert(w), probe=probe)
    probe("ffn_shexp", shared)
    return ops.add(routed, shared)
