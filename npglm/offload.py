"""Routed experts in host memory, all else on the GPU: `--offload-experts`.

The experts stay where the file is mapped. Few tokens: npglm.cpu's kernels read the chosen ones there, while the GPU runs the shared
expert. Of a single token's experts the GPU takes one in FETCHED, which it reads out of host memory itself: a fixed share, so that the
same command gives the same bits. From STREAM_TOKENS tokens on, which choose most of a layer's experts, those pass through the device instead,
if it has room for them. Host memory smaller than the file makes it slow, not fail: pages are read from the file again.
"""

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np

import npglm.cpu
from npglm.checkpoint import EXPERTS
from npglm.cpu import entries
from npglm.cpu.jit import compile_entry
from npglm.cpu.weights import Layer, Matrix
from npglm.describe import host_memory
from npglm.gpu import moe, weights
from npglm.gpu.device import LaunchError
from npglm.gpu.ops import GpuOps
from npglm.trace.probes import NO_PROBE
from raw_kernels import FAST_TYPES

STREAM_TOKENS = 192  # where moving a layer to the device becomes faster than computing on the host: npglm/gpu/offload_bench.py
FETCHED = 4  # where both ended at about the same time: npglm/gpu/offload_bench.py
FETCH_BLOCKS = 2  # of threads for each of the device's processors
KEPT = 0.9  # share of the host's free memory that experts may be kept in
POLLS = 20_000  # of the host before it asks whether the device still works: some milliseconds


class OffloadOps(GpuOps):
    """GpuOps whose weights' ffn_*_exps are npglm.cpu's. threads: of the host's part, default one per physical core.

    stream_from: so many tokens take the way through the device. fetched: the device takes one in so many of a single token's experts.
    note: after load(), why it takes none where memory is the reason.
    """

    def __init__(
        self, device, numerics: str = "ggml", backend: str = "gpu", threads: int | None = None, progress=lambda d, t: None
    ):
        """progress is told how many of npglm.cpu's kernels are compiled."""
        self.cpu, self.stream_from = npglm.cpu.op_set(numerics, threads, progress), STREAM_TOKENS
        self.fetched, self.note, self._places, self._meetings = FETCHED, None, {}, {}
        super().__init__(device, numerics, backend)

    def _bind(self) -> None:
        super()._bind()
        self.moe_experts = partial(moe_experts, ops=self)

    def load(self, checkpoint, progress=None):
        """npglm.checkpoint.Checkpoint -> its weights; the routed experts are not moved. progress(done, total): bytes moved, then those
        of experts that from here on stay in the host's memory."""
        free = available_bytes()
        loaded = weights.load(checkpoint, self.device, fast=self.rounds, progress=progress, leave=EXPERTS)
        layers = [pair for pair in zip(loaded.layers, checkpoint.weights.layers, strict=True) if hasattr(pair[1], EXPERTS[0])]
        total = sum(getattr(here, name).nbytes for _, here in layers for name in EXPERTS)
        stay = total <= KEPT * free
        if self.rounds and not stay:
            self.note = f"{total / 1e9:.1f} GB of experts, {free / 1e9:.1f} GB of host memory free: the GPU takes none of them"
        for i, (there, here) in enumerate(layers, 1):
            self.attach(there, {name: getattr(here, name) for name in EXPERTS}, stay)
            if progress and there.in_place:
                progress(total * i // len(layers), total)
        self.compile()
        return loaded

    def attach(self, layer: SimpleNamespace, tensors: dict, stay: bool) -> None:
        """Give a layer its routed experts, npglm.checkpoint.Tensor by attribute. stay: host memory has room for all layers' experts."""
        layer.routed = Layer(**{name: self.cpu.weight(tensor) for name, tensor in tensors.items()})
        vars(layer).update({name: getattr(layer.routed, name) for name in EXPERTS})
        # raw_kernels/fetch.hip reads words of up to 4 bytes, and a file's alignment may be less.
        fast = self.rounds and all(t.type.name.lower() in FAST_TYPES and t.data.ctypes.data % 4 == 0 for t in tensors.values())
        seen = {name: self.device.in_place(tensor.data) for name, tensor in tensors.items()} if stay and fast else {}
        whole = bool(seen) and all(array is not None for array in seen.values())
        layer.in_place = seen if whole else None  # uint8 [E * rows, row_bytes] by attribute

    def places(self, layer, n: int) -> dict:
        """Weights [n,out,in] on the device for n of a layer's experts, by attribute. Layers of the same shapes share them."""
        shapes = {name: (w.type.name.lower(), (n, *w.shape[1:])) for name, w in ((e, getattr(layer, e)) for e in EXPERTS)}
        key = tuple(shapes.values())
        if key not in self._places:
            self._places[key] = {
                name: weights.Weight(
                    name, kind, shape, *weights.empty_parts(kind, n * shape[1], shape[2], self.device), fast=True
                )
                for name, (kind, shape) in shapes.items()
            }
        return self._places[key]

    def placed(self, n_chosen: int, n: int):
        """int32 [1,K]: the last n choices stand at their places, the others are not here."""
        if (n_chosen, n) not in self._places:
            self._places[n_chosen, n] = self.array([[-1] * (n_chosen - n) + list(range(n))], np.int32)
        return self._places[n_chosen, n]

    def meeting(self, h, experts) -> "Meeting":
        """For so many tokens. That of one token stays, as captured steps know it; of others the last one."""
        one = len(h) == 1
        last = self._meetings.get(one)
        if last is None or (last.h.shape, last.experts.shape) != (h.shape, experts.shape):
            self.device.synchronize()  # kernels may still read the last one, whose memory may be taken again
            last = self._meetings[one] = Meeting(self.device, h.shape, experts.shape)
        return last

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


def available_bytes() -> int:
    """Host memory that can be had without taking it from a program: what the page cache holds counts."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError):
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(free, host_memory())


class Meeting:
    """Where the host takes a layer's tokens from the device and gives their sums back: raw_kernels/host.hip.

    h [T,D], experts [T,K], weights [T,K], sums [T,D], ready and done [1] are the host's memory. One layer after another uses it: `with` it,
    so that what is raised in between spoils no later call.
    """

    def __init__(self, device, shape, chosen):
        self.device, self.calls = device, device.array([0], np.int32)
        shapes = {"h": (shape, np.float32), "experts": (chosen, np.int32), "weights": (chosen, np.float32)}
        shapes |= {"sums": (shape, np.float32), "ready": ((1,), np.int32), "done": ((1,), np.int32)}
        both = {name: device.shared(*s) for name, s in shapes.items()}
        vars(self).update({name: host for name, (host, _) in both.items()})
        self.there = SimpleNamespace(**{name: array for name, (_, array) in both.items()})  # as the device sees them
        self.ready[0] = self.done[0] = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, *_) -> None:
        if kind:
            self.release()

    def hand_over(self, h, experts, weights, ops) -> None:
        there = self.there
        to = there.h, there.experts, there.weights, self.calls, there.ready
        ops.launch("hand_over", (1,), 1024, h, experts, weights, *to, h.size, experts.size)

    def wait(self) -> None:
        """Until the device has handed over."""
        polls = 0
        while self.ready[0] == self.done[0]:
            polls += 1
            if polls % POLLS == 0 and self.device.idle() and self.ready[0] == self.done[0]:
                raise LaunchError("the device has ended without handing experts over")

    def give_back(self, sums) -> None:
        self.sums[...] = sums
        self.done[0] = self.ready[0]

    def release(self) -> None:
        """Let the device go on to the end of what was launched, with whatever is there."""
        if self.device.hosts is not None:
            return  # a step is captured: nothing was launched
        self.done += 1 << 30  # as host.hip compares them, all calls to come
        try:
            self.device.synchronize()
        finally:
            self.done[0] = self.ready[0]

    def take_back(self, beside, ops):
        """-> [T,D]: what the host gives back, plus `beside` [T,D] if there is one."""
        out = ops.empty(self.sums.shape, np.float32)
        args = self.there.sums, self.there.done, self.calls, beside, out, out.size
        ops.launch("take_back_f32", (-(-out.size // 256),), 256, *args)
        return out


def fetch_experts(w, experts, n: int, *, ops) -> dict:
    """The last n of experts int32 [1,K], out of host memory -> Weights [n,out,in] on the device, by attribute. Down comes last: the kernel
    after may read gate and up before it waits, as it may all weights."""
    places = ops.places(w, n)
    for name, place in places.items():
        defines = weights.type_defines(place.type)
        n_blocks = place.n_out * place.n_in // defines["BLOCK_VALUES"]
        grid = -(-FETCH_BLOCKS * ops.device.n_processors // n)
        args = (w.in_place[name], experts, *place.parts, experts.size - n, n_blocks)
        ops.launch(f"fetch_experts_{place.type}", (grid, n), 256, *args, **defines)
    return places


def moe_experts(h, w, experts, mixed, probe=NO_PROBE, *, ops):
    """h [T,D], experts int32 [T,K], mixed (their weights) [T,K] -> [T,D]: the part of moe_ffn after the router."""
    if len(h) >= ops.stream_from and _fits(w, ops.device):
        moved = {name: ops.weight(getattr(w, name)) for name in EXPERTS}
        return moe.moe_experts(h, SimpleNamespace(**vars(w) | moved), experts, mixed, probe, ops=ops)
    n_chosen, shared = experts.shape[1], None
    alone = len(h) == 1 and ops.fused and probe is NO_PROBE
    n = n_chosen // ops.fetched if alone and w.in_place else 0  # the last n choices are the device's
    meeting = ops.meeting(h, experts)

    def on_host():
        meeting.wait()
        if probe is NO_PROBE:
            meeting.experts[:, n_chosen - n :] = -1
            meeting.give_back(ops.cpu.moe_experts(meeting.h, w.routed, meeting.experts, meeting.weights))
        else:
            x = ops.cpu.moe_gate_up_swiglu(meeting.h, w.ffn_gate_exps, w.ffn_up_exps, meeting.experts, probe)  # [T,K,G]
            meeting.give_back(ops.cpu.moe_down_combine(x, w.ffn_down_exps, meeting.experts, meeting.weights, probe))

    with meeting:
        meeting.hand_over(h, experts, mixed, ops)
        if n:
            there = SimpleNamespace(**vars(w) | fetch_experts(w, experts, n, ops=ops))
            shared = moe.moe_experts(h, there, ops.placed(n_chosen, n), mixed, ops=ops)  # [T,D], with the device's routed ones
        elif ops.fused:  # nobody sees the order: the GPU works while the host does
            shared = ops.dense_ffn(h, moe.shared_expert(w))  # [T,D]
        ops.device.host(on_host, meeting.release)
    if ops.fused:
        return meeting.take_back(shared, ops)
    routed = meeting.take_back(None, ops)
    probe("ffn_moe_out", routed)
    shared = ops.dense_ffn(h, moe.shared_expert(w), probe=probe)
    probe("ffn_shexp", shared)
    return ops.add(routed, shared)
