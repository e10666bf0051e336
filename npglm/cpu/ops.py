"""CpuOps: every verb of reference.ops.VERBS over Numba kernels. It is the op set that npglm.forward takes.

A coarse verb runs as one compiled function where nobody probes, else as its small verbs.
"""

import copy
from functools import cached_property, partial
from types import SimpleNamespace

import numpy as np

from npglm.cpu import attention as attention_kernels
from npglm.cpu import entries, products, threads, tier, workspace
from npglm.cpu import indexer as indexer_kernels
from npglm.cpu import weights as cpu_weights
from npglm.cpu.host import Host, address_of, address_space
from npglm.cpu.jit import collection_paused, compile_entry
from npglm.errors import NpglmError
from npglm.trace.probes import NO_PROBE

CACHE_DTYPES = {"ggml": np.dtype(np.float16), "f32": np.dtype(np.float32)}
KERNELS = products.KERNELS + attention_kernels.KERNELS + indexer_kernels.KERNELS
N_COMPILED = len(KERNELS) + len(entries.FORWARD)
F32, I32 = np.dtype(np.float32), np.dtype(np.int32)


class CpuOps:
    """numerics: "ggml" (8-bit activation blocks, f16 cache) or "f32". device: gives arrays (host.Host). fused: see the module."""

    backend, fused = "cpu", True

    def __init__(self, numerics: str = "ggml", n_threads: int | None = None, device=None, progress=lambda done, total: None):
        """progress is told how many functions are compiled, or loaded from Numba's cache, while load() does it."""
        if numerics not in CACHE_DTYPES:
            raise NpglmError(f"--numerics {numerics} does not run on the cpu backend, only {' and '.join(CACHE_DTYPES)}")
        self.device, self.numerics, self.tier = device or Host(), SimpleNamespace(name=numerics), tier()
        self.cache_dtype = CACHE_DTYPES[numerics]
        self.empty, self.array, self.numpy = self.device.empty, self.device.array, self.device.numpy
        self._threads, self._progress = n_threads, progress
        self._frequencies: dict = {}
        self._bind()

    @cached_property
    def ws(self) -> int:
        """Address of the workspace. The first look at it starts the threads and compiles the kernels."""
        self.n_threads = threads.start(self._threads)
        self._space = address_space()
        start, size, is_f32 = self._space.ctypes.data, self._space.nbytes, int(self.numerics.name == "f32")
        self._workspace = np.zeros(workspace.FIELDS, np.int64)
        self._workspace[: workspace.FAILED + 1] = start, start, size, self.n_threads, is_f32, 0
        for i, kernel in enumerate(KERNELS):
            self._progress(i, N_COMPILED)
            self._workspace[workspace.KERNELS + i] = kernel.address
        return self._workspace.ctypes.data

    def _bind(self) -> None:
        for verb in VERBS:
            setattr(self, verb.__name__, partial(verb, self))

    def traced(self) -> "CpuOps":
        """The same op set with every fused verb written as its small verbs, each probed."""
        self.ws  # noqa: B018 - which both share
        ops = copy.copy(self)
        ops.fused = False
        ops._bind()
        return ops

    def load(self, checkpoint, progress=None) -> SimpleNamespace:
        """npglm.checkpoint.Checkpoint -> its weights: the mapped bytes, in place. Raises NpglmError for a type without a kernel.

        progress: has nothing to tell, as no bytes are moved.
        Compiles what forward() calls, so that no token waits for it.
        """
        with collection_paused():
            self.ws  # noqa: B018
            for i, entry in enumerate(entries.FORWARD):
                self._progress(len(KERNELS) + i, N_COMPILED)
                compile_entry(entry)
        self._progress(N_COMPILED, N_COMPILED)
        return cpu_weights.load(checkpoint.weights)

    def weight(self, tensor, **_) -> cpu_weights.Matrix:
        """One npglm.checkpoint.Tensor as `load` would make it."""
        return cpu_weights.Matrix(tensor)

    def file_bytes(self, weight) -> np.ndarray:
        """What `load` made of a tensor: uint8 [n_rows, row_bytes], or a vector's f32 [n]."""
        return weight.data[0] if len(weight.shape) == 1 else weight.data


def _whole(x):
    """x, C-contiguous."""
    return x if x.flags.c_contiguous else np.ascontiguousarray(x)


def _layer(w):
    """The address of a layer's table, also of a namespace that is no Layer."""
    if not isinstance(w, cpu_weights.Layer):
        w = _layer.last = cpu_weights.Layer(**vars(w))  # kept, as the address is used after this returns
    return w.at


# --- elementwise ------------------------------------------------------------------------------------------------------------


def rope_table(ops, pos, n_dims: int, theta: float):
    """pos int32 [T] -> cos, sin [T, n_dims/2], made in f64."""
    frequency = ops._frequencies.get((n_dims, theta))
    if frequency is None:
        frequency = np.float64(theta) ** (-np.arange(0, n_dims, 2, dtype=np.float64) / n_dims)
        ops._frequencies[n_dims, theta] = frequency
    shape = (len(pos), n_dims // 2)
    cos, sin = ops.empty(shape, F32), ops.empty(shape, F32)
    entries.rope_table(address_of(pos), address_of(frequency), *shape, address_of(cos), address_of(sin))
    return cos, sin


def embed(ops, tokens, table):
    """tokens int32 [T], table [Y,D] -> [T,D]."""
    y = ops.empty((len(tokens), table.n_in), F32)
    entries.embed(ops.ws, address_of(tokens), len(tokens), table.at, address_of(y))
    return y


def rms_norm(ops, x, weight, eps: float):
    """x [..., n], weight [n] -> [..., n]."""
    x, y = _whole(x), ops.empty(x.shape, F32)
    entries.rms_norm(address_of(x), x.size // weight.n_in, weight.at, eps, address_of(y))
    return y


def add_norm(ops, x, y, weight, eps: float):
    """x and y [T,n], weight [n] -> x + y [T,n] and its RMSNorm [T,n]."""
    x = ops.add(x, y)
    return x, ops.rms_norm(x, weight, eps)


def layer_norm(ops, x, weight, bias, eps: float):
    """x [..., n], weight and bias [n] -> [..., n]."""
    x, y = _whole(x), ops.empty(x.shape, F32)
    entries.layer_norm(address_of(x), x.size // weight.n_in, weight.at, bias.at, eps, address_of(y))
    return y


def rope(ops, x, table):
    """x [T, ..., n_dims], table of its T positions -> the same shape."""
    x, y, (cos, sin) = _whole(x), ops.empty(x.shape, F32), table
    n_tokens, n = x.shape[0], x.shape[-1]
    entries.rope(address_of(x), address_of(cos), address_of(sin), n_tokens, x.size // (n_tokens * n), n, address_of(y))
    return y


def add(ops, x, y):
    """x + y, of one shape."""
    x, y, out = _whole(x), _whole(y), ops.empty(x.shape, F32)
    entries.add(address_of(x), address_of(y), x.size, address_of(out))
    return out


def sigmoid(ops, x):
    """1 / (1 + exp(-x))."""
    x, y = _whole(x), ops.empty(x.shape, F32)
    entries.sigmoid(address_of(x), x.size, address_of(y))
    return y


def swiglu(ops, gate, up):
    """gate and up [..., n] -> gate * sigmoid(gate) * up."""
    gate, up, y = _whole(gate), _whole(up), ops.empty(gate.shape, F32)
    entries.swiglu(address_of(gate), address_of(up), gate.size, address_of(y))
    return y


def store(ops, cache, rows, pos) -> None:
    """cache [capacity, n], rows [T, n], pos int32 [T]: cache[pos] = rows, in place."""
    rows = _whole(rows)
    entries.store(address_of(cache), address_of(rows), address_of(pos), *rows.shape, cache.itemsize)


def quantize_q8_0(ops, x):
    """x [..., n] -> q int8 [..., n/32, 32], d f16 [..., n/32]."""
    q, d = _quantize(ops, x, 32)
    return q, d.astype(np.float16)


def quantize_q8_k(ops, x):
    """x [..., n] -> q int8 [..., n/256, 256], d f32 [..., n/256]."""
    return _quantize(ops, x, 256)


def _quantize(ops, x, block: int):
    x = _whole(x)
    q = ops.empty((*x.shape[:-1], x.shape[-1] // block, block), np.dtype(np.int8))
    d = ops.empty(q.shape[:-1], F32)
    entries.quantize(ops.ws, address_of(x), d.size, block, address_of(q), address_of(d))
    return q, d


# --- products ---------------------------------------------------------------------------------------------------------------


def linear(ops, x, w):
    """x [T,in], w [out,in] -> [T,out]."""
    x, y = _whole(x), ops.empty((len(x), w.n_out), F32)
    entries.linear(ops.ws, address_of(x), len(x), w.at, address_of(y))
    return y


def linear_heads(ops, x, w):
    """x [T,H,in], w [H,out,in] -> [T,H,out]."""
    x, n_heads = _whole(x), w.shape[0]
    y = ops.empty((len(x), n_heads, w.n_out), F32)
    entries.linear_heads(ops.ws, address_of(x), len(x), n_heads, w.at, address_of(y))
    return y


def linear_experts(ops, x, w, experts):
    """x [T,in] or [T,K,in], w [E,out,in], experts int32 [T,K] -> [T,K,out]."""
    x, experts = _whole(x), _whole(experts)
    y = ops.empty((*experts.shape, w.n_out), F32)
    n_experts = w.shape[0]
    per_pair, shape = int(x.ndim == 3), experts.shape
    entries.linear_experts(ops.ws, address_of(x), per_pair, w.at, n_experts, address_of(experts), *shape, address_of(y))
    return y


# --- attention --------------------------------------------------------------------------------------------------------------


def queries(ops, h, w, table, config, probe=NO_PROBE):
    """h [T,D] normed hidden -> q_a [T,Q] normed, q [T,H,R+P]: absorbed nope part, then the rope part."""
    c = config
    if ops.fused and probe is NO_PROBE:
        h, n_tokens, (cos, sin) = _whole(h), len(h), table
        q_a, q = ops.empty((n_tokens, c.q_rank), F32), ops.empty((n_tokens, c.n_heads, c.kv_rank + c.rope), F32)
        sizes = (c.n_heads, c.nope, c.rope, c.kv_rank, c.rms_eps)
        angles = address_of(cos), address_of(sin)
        entries.queries(ops.ws, address_of(h), n_tokens, _layer(w), *angles, *sizes, address_of(q_a), address_of(q))
        return q_a, q
    q_a = ops.linear(h, w.attn_q_a)
    probe("q_a", q_a)
    q_a = ops.rms_norm(q_a, w.attn_q_a_norm, c.rms_eps)
    probe("q_a_norm", q_a)
    q = ops.linear(q_a, w.attn_q_b)
    probe("q", q)
    q = q.reshape(len(h), c.n_heads, c.nope + c.rope)  # [T,H,N+P]
    q_pe = ops.rope(q[..., c.nope :], table)  # [T,H,P]
    probe("q_pe", q_pe)
    absorbed = ops.linear_heads(q[..., : c.nope], w.attn_k_b)  # [T,H,R]
    probe("q_nope_absorbed", absorbed)
    return q_a, np.concatenate([absorbed, q_pe], axis=-1)


def latents(ops, h, w, table, config, probe=NO_PROBE):
    """h [T,D] normed hidden -> [T,R+P]: normed latent, then k_pe after rope."""
    c = config
    if ops.fused and probe is NO_PROBE:
        h, (cos, sin), y = _whole(h), table, ops.empty((len(h), c.kv_rank + c.rope), F32)
        angles = address_of(cos), address_of(sin)
        entries.latents(ops.ws, address_of(h), len(h), _layer(w), *angles, c.kv_rank, c.rope, c.rms_eps, address_of(y))
        return y
    kv = ops.linear(h, w.attn_kv_a_mqa)
    probe("kv_cmpr_pe", kv)
    latent = ops.rms_norm(kv[:, : c.kv_rank], w.attn_kv_a_norm, c.rms_eps)  # [T,R]
    probe("kv_cmpr", latent)
    k_pe = ops.rope(kv[:, c.kv_rank :], table)  # [T,P]
    probe("k_pe", k_pe)
    return np.concatenate([latent, k_pe], axis=-1)


def projections(ops, h, w, cache, table, pos, config, probe=NO_PROBE):
    """h [T,D] normed hidden -> queries' q_a and q. Stores this call's latents in cache [capacity,R+P]."""
    q_a, q = ops.queries(h, w, table, config, probe)
    ops.store(cache, ops.latents(h, w, table, config, probe), pos)
    return q_a, q


def attention(ops, q, cache, top_k, pos, rank: int, scale: float, **_):
    """q [T,H,R+P], cache [capacity,R+P], top_k int32 [T,n], pos int32 [T] -> [T,H,R]."""
    q, top_k = _whole(q), _whole(top_k)
    n_tokens, n_heads, width = q.shape
    out = ops.empty((n_tokens, n_heads, rank), F32)
    keys = address_of(cache), cache.itemsize, address_of(top_k), address_of(pos)
    scale_bits = int(np.float32(scale).view(np.int32))
    sizes = (n_tokens, n_heads, rank, width, top_k.shape[1], scale_bits)
    entries.attention(ops.ws, address_of(q), *keys, address_of(out), *sizes)
    return out


def attend(ops, q, w, cache, top_k, pos, config, probe=NO_PROBE):
    """q [T,H,R+P], cache [capacity,R+P], top_k int32 [T,n], pos int32 [T] -> [T,H*V]: attention, and its values from the latents."""
    kqv = ops.attention(q, cache, top_k, pos, config.kv_rank, config.attn_scale)  # [T,H,R]
    probe("kqv", kqv)
    kqv = ops.linear_heads(kqv, w.attn_v_b).reshape(len(q), -1)
    probe("kqv_out", kqv)
    return kqv


def indexer_score(ops, q, cache, weights, pos):
    """q [T,I,J], cache [capacity,J], weights [T,I], pos int32 [T] ascending -> [T,S]."""
    q, weights = _whole(q), _whole(weights)
    score = ops.empty((len(q), int(pos[-1]) + 1), F32)
    keys = address_of(cache), cache.itemsize, address_of(weights), address_of(pos)
    entries.indexer_score(ops.ws, address_of(q), *keys, address_of(score), *q.shape, score.shape[1])
    return score


def select_top_k(ops, score, pos, k: int):
    """score [T,S], pos int32 [T] -> int32 [T, min(k,S)]: ascending, then -1."""
    score = _whole(score)
    chosen = ops.empty((len(score), min(k, score.shape[1])), I32)
    entries.select_top_k(ops.ws, address_of(score), address_of(pos), address_of(chosen), *score.shape, chosen.shape[1])
    return chosen


def indexer(ops, h, q_a, w, cache, table, pos, config, probe=NO_PROBE):
    """h [T,D] normed hidden, q_a [T,Q] normed -> top_k int32 [T, min(top_k,S)]. Stores this call's keys in cache first."""
    c, p = config, config.rope
    if ops.fused and probe is NO_PROBE:
        h, q_a, n_tokens, n_cached, (cos, sin) = _whole(h), _whole(q_a), len(h), int(pos[-1]) + 1, table
        width = min(c.indexer_top_k, n_cached)
        chosen = ops.empty((n_tokens, width), I32)
        inputs = address_of(h), address_of(q_a), n_tokens, _layer(w), address_of(cache), cache.itemsize
        angles = address_of(cos), address_of(sin), address_of(pos)
        sizes = c.indexer_heads, c.indexer_dim, p, c.indexer_eps, c.indexer_scale, n_cached, width
        entries.index(ops.ws, *inputs, *angles, *sizes, address_of(chosen))
        return chosen
    k = ops.layer_norm(ops.linear(h, w.indexer_attn_k), w.indexer_k_norm, w.indexer_k_norm_bias, c.indexer_eps)  # [T,J]
    k = np.concatenate([ops.rope(k[:, :p], table), k[:, p:]], axis=-1)  # [T,J]
    probe("indexer_k", k)
    ops.store(cache, k, pos)
    q = ops.linear(q_a, w.indexer_attn_q_b).reshape(len(h), c.indexer_heads, c.indexer_dim)  # [T,I,J]
    q = np.concatenate([ops.rope(q[..., :p], table), q[..., p:]], axis=-1)  # [T,I,J]
    probe("indexer_q", q)
    weights = ops.linear(h, w.indexer_proj) * np.float32(c.indexer_scale)  # [T,I]
    probe("indexer_weights", weights)
    score = ops.indexer_score(q, cache, weights, pos)  # [T,S]
    probe("indexer_score", score)
    return ops.select_top_k(score, pos, c.indexer_top_k)


# --- FFNs -------------------------------------------------------------------------------------------------------------------


def select_experts(ops, biased, k: int):
    """biased [T,E] -> int32 [T,k]: score descending, then index ascending. NaN comes last."""
    biased, chosen = _whole(biased), ops.empty((len(biased), k), I32)
    entries.select_experts(address_of(biased), *biased.shape, k, address_of(chosen))
    return chosen


def route(ops, h, w, config, probe=NO_PROBE, held=None):
    """h [T,D] -> experts int32 [T,K], weights [T,K]. held: (first, count) of local_experts(), which is then applied."""
    c = config
    logits = ops.linear(h, w.ffn_gate_inp)  # [T,E]
    if ops.fused and probe is NO_PROBE:
        shape, bias = (len(h), c.n_chosen), w.exp_probs_b
        experts, weights = ops.empty(shape, I32), ops.empty(shape, F32)
        bias = 0 if bias is None else int(bias.fields[0])
        sizes = (*logits.shape, c.n_chosen, int(c.expert_norm), c.expert_scale)
        entries.route(ops.ws, address_of(logits), bias, *sizes, address_of(experts), address_of(weights))
        return ops.local_experts(experts, *held) if held else experts, weights
    probe("ffn_moe_logits", logits)
    probs = ops.sigmoid(logits)
    probe("ffn_moe_probs", probs)
    biased = probs if w.exp_probs_b is None else ops.add(probs, np.broadcast_to(w.exp_probs_b.data.view(F32), probs.shape))
    probe("ffn_moe_probs_biased", biased)
    experts = ops.select_experts(biased, c.n_chosen)  # [T,K]
    probe("ffn_moe_topk", experts)
    weights = np.take_along_axis(probs, experts, axis=-1)  # [T,K]
    probe("ffn_moe_weights", weights)
    if c.expert_norm:
        total = np.cumsum(weights, -1)[:, -1:]  # in order, as entries.route adds them up
        weights = weights / np.maximum(total, entries.moe.MIN_WEIGHT_SUM)
    probe("ffn_moe_weights_norm", weights)
    weights = weights * np.float32(c.expert_scale)
    probe("ffn_moe_weights_scaled", weights)
    return ops.local_experts(experts, *held) if held else experts, weights


def gate_up_swiglu(ops, h, gate, up, probe=NO_PROBE):
    """h [T,D], gate and up [F,D] -> [T,F]."""
    if ops.fused and probe is NO_PROBE:
        h, y = _whole(h), ops.empty((len(h), gate.n_out), F32)
        entries.gate_up_swiglu(ops.ws, address_of(h), len(h), gate.at, up.at, address_of(y))
        return y
    g = ops.linear(h, gate)
    probe("ffn_gate", g)
    u = ops.linear(h, up)
    probe("ffn_up", u)
    y = ops.swiglu(g, u)
    probe("ffn_swiglu", y)
    return y


def moe_gate_up_swiglu(ops, h, gate, up, experts, probe=NO_PROBE):
    """h [T,D], gate and up [E,G,D], experts int32 [T,K] -> [T,K,G]."""
    g = ops.linear_experts(h, gate, experts)
    probe("ffn_moe_gate", g)
    u = ops.linear_experts(h, up, experts)
    probe("ffn_moe_up", u)
    y = ops.swiglu(g, u)
    probe("ffn_moe_swiglu", y)
    return y


def combine_experts(ops, y, weights):
    """y [T,K,D], weights [T,K] -> [T,D], added up in the order of K."""
    y, weights = _whole(y), _whole(weights)
    out = ops.empty((y.shape[0], y.shape[2]), F32)
    entries.combine_experts(address_of(y), address_of(weights), *y.shape, address_of(out))
    return out


def moe_down_combine(ops, x, down, experts, weights, probe=NO_PROBE):
    """x [T,K,G], down [E,D,G], experts int32 [T,K], weights [T,K] -> [T,D]."""
    y = ops.linear_experts(x, down, experts)  # [T,K,D]
    probe("ffn_moe_down", y)
    return ops.combine_experts(y, weights)


def dense_ffn(ops, h, w, probe=NO_PROBE):
    """h [T,D] -> [T,D]."""
    if ops.fused and probe is NO_PROBE:
        h, out = _whole(h), ops.empty(h.shape, F32)
        entries.dense_ffn(ops.ws, address_of(h), len(h), _layer(w), address_of(out))
        return out
    return ops.linear(ops.gate_up_swiglu(h, w.ffn_gate, w.ffn_up, probe), w.ffn_down)


def local_experts(ops, experts, first: int, count: int):
    """experts int32 [T,K] -> int32 [T,K]: their places among the `count` experts that a rank holds from `first` on; -1: not here."""
    local = ops.numpy(experts) - np.int32(first)
    return ops.array(np.where((local >= 0) & (local < count), local, np.int32(-1)), I32)


def moe_experts(ops, h, w, experts, weights, probe=NO_PROBE):
    """h [T,D], experts int32 [T,K], weights [T,K] -> [T,D]: the part of moe_ffn after the router. An expert of -1 adds 0."""
    if ops.fused and probe is NO_PROBE:
        h, experts, weights, out = _whole(h), _whole(experts), _whole(weights), ops.empty(h.shape, F32)
        chosen = w.ffn_gate_exps.shape[0], address_of(experts), address_of(weights), experts.shape[1]
        entries.moe_experts(ops.ws, address_of(h), len(h), _layer(w), *chosen, address_of(out))
        return out
    x = ops.moe_gate_up_swiglu(h, w.ffn_gate_exps, w.ffn_up_exps, experts, probe)  # [T,K,G]
    routed = ops.moe_down_combine(x, w.ffn_down_exps, experts, weights, probe)  # [T,D]
    probe("ffn_moe_out", routed)
    x = ops.gate_up_swiglu(h, w.ffn_gate_shexp, w.ffn_up_shexp, probe)  # [T,G]
    shared = ops.linear(x, w.ffn_down_shexp)  # [T,D]
    probe("ffn_shexp", shared)
    return ops.add(routed, shared)


def moe_ffn(ops, h, w, config, probe=NO_PROBE):
    """h [T,D] -> [T,D]: routed experts + shared expert."""
    return ops.moe_experts(h, w, *ops.route(h, w, config, probe), probe)


VERBS = (
    embed, rms_norm, add_norm, layer_norm, rope_table, rope, linear, linear_heads, linear_experts, store, queries, latents, projections,
    indexer_score, select_top_k, indexer, attention, attend, add, sigmoid, swiglu, select_experts, route, gate_up_swiglu, moe_gate_up_swiglu,
    combine_experts, moe_down_combine, dense_ffn, local_experts, moe_experts, moe_ffn, quantize_q8_0, quantize_q8_k,
)  # fmt: skip
