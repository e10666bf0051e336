"""Benchmark of the GPU backend at full width: random weights made on the device, graph replay, medians.

bench("glm-5.2", layers) prints per op time, bytes, GB/s and share of the copy bandwidth measured in the same run, then decode
and prefill, each as ms per step and fitted to the model's 78 layers. scripts/bench.py calls it.
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np

import npglm.forward
from npglm.cache import Cache
from npglm.checkpoint import MODEL_TENSORS, layer_tensors
from npglm.config import GlmConfig
from npglm.gpu import attention, matmul, op_set
from npglm.gpu.weights import Weight, part_shapes

GLM52 = GlmConfig(
    name="glm-5.2", context_length=1048576, vocab=154880, hidden=6144, n_layers=78, n_mtp=0, n_dense=3,
    full=tuple(max(i - 2, 0) % 4 == 0 for i in range(78)), n_heads=64, nope=192, rope=64, v_dim=256, q_rank=2048, kv_rank=512,
    indexer_heads=32, indexer_dim=128, indexer_top_k=2048, ffn=12288, n_experts=256, n_chosen=8, n_shared=1, expert_ffn=2048,
    shared_ffn=2048, expert_scale=2.5, expert_norm=True, rms_eps=1e-5, indexer_eps=1e-6, rope_theta=8e6,
)  # fmt: skip
SHAPES = {"glm-5.2": GLM52}
REPLAYS = 50
ROTATED_BYTES = 1 << 30  # weights of one op that are read in turn, several times any cache


def kind_of(attribute: str, axes: str) -> str:
    """The type of a tensor in a Q2_K-routed GLM-5.2 file."""
    if len(axes.split()) == 1 or attribute == "ffn_gate_inp":
        return "f32"
    return "q2_k" if attribute.endswith("_exps") else "q8_0"


def cut(config: GlmConfig, n_layers: int) -> GlmConfig:
    """The first n_layers layers."""
    return replace(config, n_layers=n_layers, full=config.full[:n_layers], n_dense=min(config.n_dense, n_layers))


class Random:
    """Random weights on the device, in the types of a Q2_K-routed GLM-5.2 file."""

    def __init__(self, ops):
        self.ops, xp = ops, ops.device.cupy
        self.noise = xp.random.RandomState(1).randint(0, 256, 1 << 26, dtype=np.uint8)

    def bytes(self, shape):
        """Random bytes; large arrays repeat a random chunk whose length fits no row."""
        array = self.ops.device.empty(shape, np.uint8)
        flat, step = array.reshape(-1), len(self.noise) - 4096 - 16 * 7
        for first in range(0, flat.size, step):
            flat[first : first + step] = self.noise[: min(step, flat.size - first)]
        return array

    def vector(self, n: int):
        return self.ops.array(np.random.default_rng(n).normal(1, 0.1, n), np.float32)

    def weight(self, name: str, kind: str, shape) -> Weight:
        n_rows, n_in = int(np.prod(shape[:-1])), shape[-1]
        if kind == "f32":
            w = self.ops.device.cupy.random.RandomState(2).standard_normal((n_rows, n_in), np.float32) * np.float32(n_in**-0.5)
            return Weight(name, kind, tuple(shape), w.view(np.uint8))
        w, scales, d = part_shapes(kind, n_rows, n_in)
        scale = (1 / 74 if kind == "q8_0" else 1 / 9) * n_in**-0.5
        factors = self.ops.device.empty(d, np.float16)
        factors[...] = scale
        if kind == "q2_k":
            factors[..., 1] *= 1.5
        return Weight(name, kind, tuple(shape), self.bytes(w), scales and self.bytes(scales), factors, fast=True)

    def tensor(self, config, attribute: str, axes: str):
        shape = [config.axes[a] for a in axes.split()]
        if len(shape) == 1:
            return self.vector(*shape)
        return self.weight(attribute, kind_of(attribute, axes), shape)

    def layer(self, config, i: int) -> SimpleNamespace:
        return SimpleNamespace(**{a: self.tensor(config, a, axes) for a, (_, axes, _) in layer_tensors(config, i).items()})

    def model(self, config) -> SimpleNamespace:
        weights = SimpleNamespace(layers=[self.layer(config, i) for i in range(config.n_layers)])
        for attribute, (_, axes, _) in MODEL_TENSORS.items():
            setattr(weights, attribute, self.tensor(config, attribute, axes))
        native = self.bytes((config.vocab, config.hidden // 32, 34))  # the embedding table stays in the file's blocks
        native[..., :2] = self.ops.array(np.array([1 / 74], np.float16).view(np.uint8), np.uint8)
        weights.token_embd = Weight("token_embd", "q8_0", (config.vocab, config.hidden), native.reshape(config.vocab, -1))
        return weights


class Timer:
    def __init__(self, ops):
        self.ops, self.cupy = ops, ops.device.cupy

    def ms(self, run, replays: int = REPLAYS) -> float:
        """Median time of run()."""
        run()
        times = []
        for _ in range(replays):
            start, stop = self.cupy.cuda.Event(), self.cupy.cuda.Event()
            start.record()
            run()
            stop.record()
            stop.synchronize()
            times.append(self.cupy.cuda.get_elapsed_time(start, stop))
        return float(np.median(times))

    def copy_gbs(self) -> float:
        """GB/s, read + written, of a 4 GiB device-to-device copy."""
        a, b = (self.ops.device.empty((1 << 32,), np.uint8) for _ in range(2))
        a[...] = 1
        return 2 * a.nbytes / self.ms(lambda: self.cupy.copyto(b, a), 10) / 1e6


def op_rows(ops, config, random: Random, timer: Timer, layers, caches: dict):
    """(name, ms, bytes) of each op of a decoded token; each run goes over several layers' weights, so that none is in a cache."""
    c = config
    h, wide = ops.array(_normal(1, c.hidden), np.float32), ops.array(_normal(1, c.n_heads * c.v_dim), np.float32)
    q_a = ops.array(_normal(1, c.q_rank), np.float32)
    heads = {n: ops.array(_normal(1, c.n_heads, n), np.float32) for n in (c.nope, c.kv_rank)}
    experts = [ops.array(np.random.default_rng(i).permutation(c.n_experts)[None, : c.n_chosen], np.int32) for i in range(64)]
    mixed, x = ops.array(np.full((1, c.n_chosen), 0.3), np.float32), ops.array(_normal(1, c.n_chosen, c.expert_ffn), np.float32)
    moe = [w for w in layers if hasattr(w, "ffn_gate_exps")]
    chosen_share = c.n_chosen / c.n_experts

    def measure(name, call, per_call_bytes, n):
        """call(i) for i in range(n) is one graph."""
        replay = ops.repeat(lambda: [call(i) for i in range(n)])
        return name, timer.ms(replay) / n, per_call_bytes

    def weight_op(name, verb, x, weights, each=1):
        """verb(x, w, ...) with `each` weights a call, over ROTATED_BYTES of them: the layers' own and as many more as that takes."""
        first = weights[0]
        more = max(0, int(ROTATED_BYTES / first.nbytes) - len(weights))
        rotated = weights + [random.weight(name, first.type, first.shape) for _ in range(more)]
        n = len(rotated) // each
        return measure(name, lambda i: verb(x, *rotated[i * each : (i + 1) * each]), each * first.nbytes, n)

    for name, x_in, attribute in (("q_a", h, "attn_q_a"), ("kv_a", h, "attn_kv_a_mqa"), ("q_b", q_a, "attn_q_b")):
        yield weight_op(name, ops.linear, x_in, [getattr(w, attribute) for w in layers])
    names = ("attn_q_a", "attn_kv_a_mqa", "indexer_attn_k", "indexer_proj")  # one launch: what decoding makes of the first two
    size = sum(getattr(w, name).nbytes for w in layers for name in names if hasattr(w, name)) / len(layers)
    yield measure("q_a + kv_a", lambda i: attention.first_products(h, layers[i], ops), size, len(layers))
    yield weight_op("k_b", ops.linear_heads, heads[c.nope], [w.attn_k_b for w in layers])
    yield weight_op("v_b", ops.linear_heads, heads[c.kv_rank], [w.attn_v_b for w in layers])
    yield weight_op("attn_output", ops.linear, wide, [w.attn_output for w in layers])
    yield weight_op("router", ops.linear, h, [w.ffn_gate_inp for w in moe])
    yield weight_op("shared gate+up", ops.gate_up_swiglu, h, [m for w in moe for m in (w.ffn_gate_shexp, w.ffn_up_shexp)], 2)
    yield weight_op("shared down", ops.linear, ops.array(_normal(1, c.expert_ffn), np.float32), [w.ffn_down_shexp for w in moe])
    gate_up = lambda i: ops.moe_gate_up_swiglu(h, moe[i % len(moe)].ffn_gate_exps, moe[i % len(moe)].ffn_up_exps, experts[i])
    size = 2 * moe[0].ffn_gate_exps.nbytes * chosen_share
    yield measure("experts gate+up", gate_up, size, 64)
    down = lambda i: ops.moe_down_combine(x, moe[i % len(moe)].ffn_down_exps, experts[i], mixed)
    yield measure("experts down", down, size / 2, 64)
    q = ops.array(_normal(1, c.n_heads, c.kv_rank + c.rope), np.float32)
    qi = ops.array(_normal(1, c.indexer_heads, c.indexer_dim), np.float32)
    wi = ops.array(_normal(1, c.indexer_heads), np.float32)
    for context, cache in caches.items():
        pos = ops.array([context - 1], np.int32)
        n = min(c.indexer_top_k, context)
        top_k = ops.array(np.sort(np.random.default_rng(3).permutation(context)[:n])[None], np.int32)
        keys = next(k for k in cache.index_k if k is not None)
        score = ops.indexer_score(qi, keys, wi, pos, width=len(keys))
        attend = partial(ops.attention, q, top_k=top_k, pos=pos, rank=c.kv_rank, scale=0.06)
        rows = cache.kv
        yield measure(f"attention @{context}", lambda i, f=attend, kv=rows: f(cache=kv[i]), n * 2 * q.shape[-1], len(rows))
        search = partial(ops.indexer_score, qi, keys, wi, pos, width=len(keys))
        yield measure(f"indexer @{context}", lambda i, f=search: f(), keys.nbytes, 8)
        choose = partial(ops.select_top_k, score, pos, c.indexer_top_k)
        yield measure(f"top_k @{context}", lambda i, f=choose: f(), score.nbytes, 8)
    one = ops.array(_normal(1, c.hidden), np.float32)
    yield measure("rms_norm", lambda i: ops.rms_norm(one, layers[i % len(layers)].attn_norm, 1e-5), 4 * 3 * c.hidden, 64)
    yield measure("add", lambda i: ops.add(one, h), 4 * 3 * c.hidden, 64)


def switch_rows(ops, config, timer: Timer, layers):
    """(name, tokens, us as for few tokens, us as for many) around matmul.FEW_TOKENS."""
    c, switch, moe = config, matmul.FEW_TOKENS, [w for w in layers if hasattr(w, "ffn_gate_exps")]
    for n_tokens in (1, switch // 2, switch, 2 * switch):
        wide, h = (ops.array(_normal(n_tokens, n), np.float32) for n in (c.n_heads * c.v_dim, c.hidden))
        rng = np.random.default_rng(4)
        experts = ops.array([rng.permutation(c.n_experts)[: c.n_chosen] for _ in range(n_tokens)], np.int32)
        calls = {
            "attn_output": lambda x=wide: [ops.linear(x, w.attn_output) for w in layers],
            "experts' gate": lambda x=h, e=experts: [ops.linear_experts(x, w.ffn_gate_exps, e) for w in moe],
        }
        for name, call in calls.items():
            us = []
            for few in (n_tokens, 0):
                matmul.FEW_TOKENS = few
                us.append(1e3 * timer.ms(ops.repeat(call), 10) / (len(moe) if "experts" in name else len(layers)))
            matmul.FEW_TOKENS = switch
            yield name, n_tokens, *us


def _normal(*shape):
    return np.random.default_rng(7).normal(size=shape)


def make_cache(ops, config, capacity: int) -> Cache:
    cache = Cache(config, capacity, ops)
    state = ops.device.cupy.random.RandomState(3)
    for array in (*cache.kv, *(k for k in cache.index_k if k is not None)):
        array[...] = (
            state.standard_normal(min(1 << 20, array.size), np.float32)
            .astype(np.float16)[ops.device.cupy.arange(array.size, dtype=np.int64) % min(1 << 20, array.size)]
            .reshape(array.shape)
        )
    return cache


def bench(
    shape: str = "glm-5.2", layers: int = 15, contexts=(0, 4096, 32768, 131072), prefills=(512, 4096), say=print, ops_too=True
):
    """Print the tables; returns every figure as a dictionary. layers: 3 dense and a multiple of 4 MoE layers fit the sharing of top-k."""
    ops = op_set("ggml", "gpu")
    config, whole = cut(SHAPES[shape], layers), SHAPES[shape]
    small = cut(whole, layers - 4 * max(1, (layers - 3) // 8))
    timer, figures = Timer(ops), {"device": ops.device.name, "layers": layers}
    copy = figures["copy_gbs"] = timer.copy_gbs()
    ops.device.cupy.get_default_memory_pool().free_all_blocks()
    say(f"{ops.device.name}: copy {copy:.0f} GB/s (read + written)")
    random = Random(ops)
    weights = random.model(config)
    few = SimpleNamespace(**{**vars(weights), "layers": weights.layers[: small.n_layers]})
    ops.device.synchronize()
    forward = npglm.forward.forward

    if ops_too:
        say(f"{'op':>18} {'us':>8} {'MB':>8} {'GB/s':>7} {'of copy':>7}")
        two = cut(whole, 4)
        caches = {context: make_cache(ops, two, context) for context in (4096, 131072)}
        for name, ms, size in op_rows(ops, whole, random, timer, weights.layers, caches):
            gbs = size / ms / 1e6
            figures[name] = {"us": ms * 1e3, "bytes": size}
            say(f"{name:>18} {ms * 1e3:8.2f} {size / 1e6:8.2f} {gbs:7.0f} {gbs / copy:7.1%}")
        del caches
        say(f"\nmatrix-vector kernels up to {matmul.FEW_TOKENS} tokens; us with them and with tiles:")
        for name, n_tokens, few_us, tiles_us in switch_rows(ops, whole, timer, weights.layers):
            figures[f"{name}, {n_tokens} tokens"] = {"few_us": few_us, "tiles_us": tiles_us}
            say(f"{name:>18} {n_tokens:4} {few_us:8.1f} {tiles_us:8.1f}")
    say(
        f"\ndecode, graph replay, median of {REPLAYS}: ms per token with {layers} and {small.n_layers} layers, us per layer, 78 layers"
    )
    for context in contexts:
        capacity = context + 2 * REPLAYS
        times = []
        for c, w in ((config, weights), (small, few)):
            cache = make_cache(ops, c, capacity)
            before = ops.device.launches
            decoder = ops.decode(forward, w, c, cache)
            figures["launches"] = (ops.device.launches - before) // 2  # one run to warm up, one captured
            decoder.start(5, context)
            times.append(timer.ms(decoder.repeat, REPLAYS))
            del decoder, cache
            ops.device.cupy.get_default_memory_pool().free_all_blocks()
        per_layer = (times[0] - times[1]) / (config.n_layers - small.n_layers)
        total = times[0] + per_layer * (whole.n_layers - config.n_layers)
        figures[f"decode @{context}"] = {"ms": times, "us_per_layer": per_layer * 1e3, "tok_s_78": 1e3 / total}
        say(f"  @{context:<7} {times[0]:8.3f} {times[1]:8.3f} {per_layer * 1e3:8.1f} us/layer  {1e3 / total:6.1f} tok/s")
    say("\nprefill: ms with each number of layers, ms per layer")
    for n in prefills:
        times = []
        for c, w in ((config, weights), (small, few)):
            cache = Cache(c, n, ops)
            tokens = ops.array(np.random.default_rng(5).integers(0, c.vocab, n), np.int32)
            pos = ops.array(np.arange(n), np.int32)
            times.append(timer.ms(lambda c=c, w=w, k=cache, t=tokens, p=pos: forward(w, c, k, t, p, ops, n_out=1), 3))
            del cache
            ops.device.cupy.get_default_memory_pool().free_all_blocks()
        per_layer = (times[0] - times[1]) / (config.n_layers - small.n_layers)
        total = times[0] + per_layer * (whole.n_layers - config.n_layers)
        figures[f"prefill {n}"] = {"ms": times, "ms_per_layer": per_layer, "tok_s_78": n / total * 1e3}
        say(f"  {n:<7} {times[0]:8.1f} {times[1]:8.1f} {per_layer:8.2f} ms/layer  {n / total * 1e3:7.0f} tok/s")
    return figures
