"""Benchmark of --offload-experts at full width: random routed experts in host memory, random weights of all else on the device.

offload_bench("glm-5.2", layers) prints the bytes of experts that a token reads in host memory (the device keeps none), the bandwidth
of as many threads that only read, right before and after, decode and its share of what that allows, and how long a layer's
experts take for more tokens, on the host and through the device (npglm/offload.py: STREAM_TOKENS). scripts/bench.py calls it.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from math import inf
from types import SimpleNamespace

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as T

import npglm.forward
from npglm import offload
from npglm.checkpoint import EXPERTS, Tensor
from npglm.errors import NpglmError
from npglm.gpu.bench import SHAPES, Random, cut, make_cache
from npglm.gpu.device import open_gpu

KIND = T.Q2_K
VALUES, BLOCK_BYTES = GGML_QUANT_SIZES[KIND]
NOISE_BLOCKS = 999_983  # a prime: no two rows begin alike
CONTEXT, TOKENS = 4096, 40
PREFILLS = (32, 64, 128, 256, 512)


class WithHostExperts(Random):
    """Random weights, the routed experts as npglm.cpu's in host memory."""

    def __init__(self, ops, n_bytes: int):
        """n_bytes: of all experts together."""
        super().__init__(ops)
        blocks = np.random.default_rng(1).integers(0, 256, (NOISE_BLOCKS, BLOCK_BYTES), np.uint8)
        blocks[:, 80:].view(np.float16)[:] = np.array([1, 1.5]) / 9 * 2048**-0.5  # d and dmin, for rows of norm about 1
        noise, self.memory, self.used = blocks.reshape(-1), np.empty(n_bytes, np.uint8), 0
        with ThreadPoolExecutor() as pool:  # the first touch of memory is what takes time
            fill = lambda i: np.copyto(self.memory[i : i + noise.size], noise[: n_bytes - i])
            list(pool.map(fill, range(0, n_bytes, noise.size)))

    def tensor(self, config, attribute: str, axes: str):
        if attribute not in EXPERTS:
            return super().tensor(config, attribute, axes)
        shape = tuple(config.axes[a] for a in axes.split())
        rows, row_bytes = shape[0] * shape[1], shape[2] // VALUES * BLOCK_BYTES
        data = self.memory[self.used : self.used + rows * row_bytes].reshape(rows, row_bytes)
        self.used += data.size
        return Tensor(attribute, shape, KIND, data, "bench")

    def layer(self, config, i: int) -> SimpleNamespace:
        layer = super().layer(config, i)
        if config.is_moe(i):
            self.ops.attach(layer, {name: getattr(layer, name) for name in EXPERTS}, stay=True)
        return layer


def offload_bench(shape: str = "glm-5.2", layers: int = 11, threads: int | None = None, say=print) -> dict:
    """Print the table; returns every figure as a dictionary. layers: 3 dense, and 8 or more MoE, whose experts no cache can hold."""
    from npglm.cpu.bench import read_bandwidth

    open_gpu()  # or one line that says why not
    whole, config = SHAPES[shape], cut(SHAPES[shape], layers)
    n_moe, one_layer = layers - config.n_dense, 3 * whole.n_experts * whole.expert_ffn * whole.hidden // VALUES * BLOCK_BYTES
    here = offload.available_bytes()
    if n_moe * one_layer > offload.KEPT * here:
        raise NpglmError(
            f"the experts of {n_moe} layers need {n_moe * one_layer / 1e9:.0f} GB, {here / 1e9:.0f} GB of memory are free"
        )
    ops = offload.OffloadOps(open_gpu(), "ggml", "gpu", threads)
    ops.compile()
    n_threads = ops.cpu.n_threads
    token_bytes = one_layer * whole.n_chosen // whole.n_experts  # of a layer
    random = WithHostExperts(ops, n_moe * one_layer)
    weights = random.model(config)
    fetched = config.n_chosen // ops.fetched if weights.layers[-1].in_place else 0
    say(f"{ops.device.name}, {n_threads} threads; of a token's {config.n_chosen} experts the GPU takes {fetched}")
    figures = {"device": ops.device.name, "threads": n_threads, "layers": layers, "fetched": fetched}
    read = read_bandwidth(n_threads, data=random.memory)

    few = cut(config, layers - n_moe // 2)
    ms = []
    for c in (config, few):
        w = SimpleNamespace(**{**vars(weights), "layers": weights.layers[: c.n_layers]})
        cache = make_cache(ops, c, CONTEXT + 2 * TOKENS)
        decoder, times = ops.decode(npglm.forward.forward, w, c, cache), []
        for i, token in enumerate(np.random.default_rng(2).integers(0, c.vocab, TOKENS)):  # other tokens choose other experts
            decoder.start(int(token), CONTEXT + i)
            started = time.perf_counter()
            decoder.next()
            times.append(time.perf_counter() - started)
        ms.append(float(np.median(times)) * 1e3)
        del decoder, cache
    read = max(read, read_bandwidth(n_threads, data=random.memory))  # others use the host too
    figures["read_gbs"] = read / 1e9
    takes = f"{token_bytes / read * 1e3:.3f} ms at {read / 1e9:.0f} GB/s"
    say(f"a token reads {token_bytes / 1e6:.1f} MB of experts per layer: {takes}, what as many threads reach that only read")
    per_layer = (ms[0] - ms[1]) / (config.n_layers - few.n_layers)
    total = ms[0] + per_layer * (whole.n_layers - layers)
    allowed = read / (n_moe * token_bytes)
    share = 1e3 / ms[0] / allowed
    figures |= {"ms": ms, "ms_per_moe_layer": per_layer, "tok_s": 1e3 / ms[0], "share": share, "tok_s_78": 1e3 / total}
    say(f"decode @{CONTEXT}, {layers} layers: {ms[0]:.2f} ms, {1e3 / ms[0]:.1f} tok/s, {share:.0%} of what host memory allows")
    say(f"one more MoE layer: {per_layer:.3f} ms, so {whole.n_layers} layers: {1e3 / total:.1f} tok/s")

    say(f"{'tokens':>8} {'on the host':>12} {'through the device':>19}  ms of a layer's experts")
    layer, rng = weights.layers[-1], np.random.default_rng(3)
    for n in PREFILLS:
        h = ops.array(rng.normal(size=(n, whole.hidden)), np.float32)
        chosen, mixed = ops.route(h, layer, config)
        for_each = []
        for ops.stream_from in (inf, 0):
            taken = []
            for _ in range(3):
                ops.device.synchronize()
                started = time.perf_counter()
                ops.moe_experts(h, layer, chosen, mixed)
                ops.device.synchronize()
                taken.append(time.perf_counter() - started)
            for_each.append(min(taken) * 1e3)
        figures[f"prefill {n}"] = for_each
        say(f"{n:>8} {for_each[0]:>12.1f} {for_each[1]:>19.1f}")
    started = time.perf_counter()
    ops.weight(layer.ffn_gate_exps)
    ops.device.synchronize()
    figures["upload_gbs"] = layer.ffn_gate_exps.data.nbytes / (time.perf_counter() - started) / 1e9
    say(f"moving to the device: {figures['upload_gbs']:.1f} GB/s")
    return figures
