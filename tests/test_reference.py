"""The reference: what its ops must equal by other routes, and that chunks and single tokens give what a whole prefill gives."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

import npglm
from npglm.generate import Model
from npglm.trace.probes import NoProbe, probe_names
from reference.forward import forward
from reference.numerics import BF16, F32, F64, GGML, NUMERICS, round_bf16
from reference.ops import ReferenceOps
from reference.ops.attention import attention
from reference.ops.indexer import indexer_score, select_top_k
from reference.ops.matmul import linear, linear_experts, linear_heads
from reference.ops.moe import select_experts
from reference.ops.quant import quantize_q8_0, quantize_q8_k, round_activations
from reference.ops.rope import rope, rope_table

GOLDEN = Path(__file__).parent / "golden"
FLOOR = 4 * 2.0**-24


class Weight:
    """What the ops ask of a tensor, over an array."""

    name = "w"

    def __init__(self, array, type=Type.F32):
        self.array, self.type, self.shape = np.asarray(array, np.float32), type, array.shape
        self.flat = self.array.reshape(-1, self.shape[-1])
        self.n_rows = len(self.flat)

    def rows(self, start, stop):
        return self.flat[start:stop]

    def row_blocks(self, start=0, stop=None):
        stop = self.n_rows if stop is None else stop
        return [(i, min(i + 3, stop)) for i in range(start, stop, 3)]

    def decode(self):
        return self.array


class Keep(NoProbe):
    """Keeps every array that forward() shows."""

    def __init__(self):
        self.arrays, self.suffix = {}, ""

    def layer(self, index):
        self.suffix = f"-{index}"
        return self

    def __call__(self, name, array):
        suffix = "" if name in ("embd", "result_norm", "result_output") else self.suffix
        self.arrays.setdefault(name + suffix, []).append(np.array(array))


@pytest.fixture(scope="module")
def checkpoint():
    return npglm.load(GOLDEN / "small.Q2_K.gguf")


@pytest.fixture(scope="module")
def ids():
    return np.load(GOLDEN / "transformers.npz")["ids_100"].astype(np.int32)


def rng(seed=0):
    return np.random.default_rng(seed)


def close(x, y, tol=FLOOR):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    assert x.shape == y.shape
    assert np.abs(x - y).max() <= tol * np.abs(y).max()


def test_rope_is_a_complex_rotation_of_neighbours():
    x, pos = rng().normal(size=(5, 3, 8)).astype(np.float32), np.array([0, 3, 4, 1000, 130000], np.int32)
    z = x[..., 0::2] + 1j * x[..., 1::2]
    angle = pos[:, None] * 8e6 ** (-np.arange(4) / 4)
    turned = z * np.exp(1j * angle)[:, None]
    y = rope(x, rope_table(pos, 8, 8e6))
    close(y[..., 0::2], turned.real)
    close(y[..., 1::2], turned.imag)
    assert np.array_equal(y[0], x[0])  # position 0


def test_attention_over_a_choice_is_masked_attention():
    q, cache = rng().normal(size=(4, 3, 10)), rng(1).normal(size=(9, 10))
    cache[7:] = np.nan  # rows past the last position
    pos = np.array([3, 4, 5, 6], np.int32)
    top_k = np.array([[0, 3, -1], [1, 2, 4], [0, 5, 6], [2, 6, 7]], np.int32)  # 6 > 5 and 7 > 6 are padding too
    score = np.einsum("thn,sn->ths", q, cache[:7]) * 0.3
    allowed = np.array([[s in row and s <= p for s in range(7)] for row, p in zip(top_k.tolist(), pos, strict=True)])
    score[~allowed[:, None].repeat(3, 1)] = -np.inf
    p = np.exp(score)
    want = np.einsum("ths,sr->thr", p / p.sum(-1, keepdims=True), cache[:7, :6])
    close(attention(q.astype(np.float32), cache.astype(np.float32), top_k, pos, 6, 0.3), want, 16 * FLOOR)


def test_indexer_score_is_causal_and_reads_no_row_past_the_position():
    q, weights, cache = rng().normal(size=(3, 2, 5)), rng(1).normal(size=(3, 2)), rng(2).normal(size=(8, 5))
    cache[6:] = np.nan
    pos = np.array([3, 4, 5], np.int32)
    score = indexer_score(q, cache, weights, pos, num=F64)
    want = np.einsum("tis,ti->ts", np.maximum(np.einsum("tij,sj->tis", q, cache[:6]), 0), weights)
    future = np.arange(6) > pos[:, None]
    assert np.array_equal(np.isneginf(score), future)
    close(score[~future], want[~future])


def test_top_k_breaks_ties_by_index_and_never_takes_nan_or_the_future():
    score = np.array([[1, 5, 5, 9, 9, 9], [0, np.nan, 2, 2, 2, 7], [np.nan, np.nan, 1, -np.inf, 0, 3]], np.float32)
    assert select_top_k(score, np.array([2, 4, 5], np.int32), 3).tolist() == [[0, 1, 2], [2, 3, 4], [2, 4, 5]]
    assert select_top_k(score, np.array([0, 1, 1], np.int32), 3).tolist() == [[0, -1, -1], [0, -1, -1], [-1, -1, -1]]
    assert select_top_k(np.full((1, 4), 2, np.float32), np.array([3], np.int32), 2).tolist() == [[0, 1]]


def test_experts_come_by_score_then_by_index():
    assert select_experts(np.array([[1, 3, 3, 2.0], [np.nan, 0, 1, 1]]), 3).tolist() == [[1, 2, 3], [2, 3, 1]]


def test_per_head_and_per_expert_products_are_slices_of_plain_ones():
    w, x = Weight(rng().normal(size=(5, 7, 4))), rng(1).normal(size=(3, 5, 4)).astype(np.float32)
    close(linear_heads(x, w), np.einsum("thi,hoi->tho", x, w.array.astype(np.float64)), 8 * FLOOR)
    experts = np.array([[4, 0], [0, 2], [4, 3]], np.int32)
    want = np.einsum("ti,tkoi->tko", x[:, 0], w.array.astype(np.float64)[experts])
    close(linear_experts(x[:, 0], w, experts), want, 8 * FLOOR)
    close(
        linear_experts(x[:, :2], w, experts),
        np.einsum("tki,tkoi->tko", x[:, :2], w.array.astype(np.float64)[experts]),
        8 * FLOOR,
    )


@pytest.mark.parametrize(("quantize", "block"), [(quantize_q8_0, 32), (quantize_q8_k, 256)])
def test_activation_blocks(quantize, block):
    x = rng().normal(size=(3, 2 * block)).astype(np.float32) * 10.0 ** np.arange(-2, 1)[:, None].astype(np.float32)
    x[1, :block] = 0
    q, d = quantize(x)
    assert q.dtype == np.int8
    assert q.shape == (3, 2, block)
    assert d.shape == (3, 2)
    assert not q[1, 0].any()
    assert d[1, 0] == 0
    scale = np.abs(x.reshape(3, 2, block)).max(-1)
    error = np.abs(q * d[..., None].astype(np.float64) - x.reshape(3, 2, block)).max(-1)
    assert (error <= scale / 127 * 0.51 + scale * 2**-11).all()  # half a step, and the scale's own rounding to f16
    assert (np.abs(q).max(-1)[scale > 0] == 127).all()


def test_q8_k_takes_the_sign_of_the_first_of_equal_magnitudes():
    x = np.zeros((1, 256), np.float32)
    x[0, 3], x[0, 9] = 2.0, -2.0
    q, d = quantize_q8_k(x)
    assert d[0, 0] < 0
    assert (q[0, 0, 3], q[0, 0, 9]) == (-127, 127)


def test_which_rounding_a_weight_type_asks_for():
    x = rng().normal(size=(2, 512)).astype(np.float32)
    q, d = quantize_q8_k(x)
    assert np.array_equal(round_activations(x, Type.Q2_K, GGML), (q * d[..., None]).reshape(x.shape))
    q, d = quantize_q8_0(x)
    assert np.array_equal(round_activations(x, Type.Q8_0, GGML), (q * d[..., None].astype(np.float32)).reshape(x.shape))
    assert np.array_equal(round_activations(x, Type.F16, GGML), x.astype(np.float16).astype(np.float32))
    assert np.array_equal(round_activations(x, Type.F32, GGML), x)
    assert np.array_equal(round_activations(x, Type.Q2_K, F32), x)
    assert np.array_equal(round_activations(x, Type.F32, BF16), round_bf16(x))


def test_bf16_rounds_to_nearest_even():
    ulp = 2.0**-7
    x = np.array([1 + ulp / 2, 1 + 1.5 * ulp, 1 + 0.51 * ulp, -1 - ulp / 2, 3.4e38, np.inf, 0.0], np.float32)
    assert round_bf16(x).tolist() == [1.0, 1 + 2 * ulp, 1 + ulp, -1.0, np.inf, np.inf, 0.0]
    assert np.isnan(round_bf16(np.array([np.nan], np.float32)))[0]


def test_f32_sums_stay_f32_and_f64_is_f64():
    w, x = Weight(rng().normal(size=(6, 4))), rng(1).normal(size=(2, 4)).astype(np.float32)
    assert linear(x, w, num=F32).dtype == np.float32
    assert linear(x, w, num=F64).dtype == np.float64
    assert linear(x, w, num=GGML.truth()).dtype == np.float64


@pytest.mark.parametrize("name", NUMERICS)
def test_arrays_between_ops_have_the_numerics_dtype(checkpoint, ids, name):
    """One stray float64 would promote everything behind it, so every probe is looked at."""
    probe, ops = Keep(), ReferenceOps(NUMERICS[name])
    model = Model(checkpoint, forward, ops)
    model.run(model.cache(9), ids[:9], probe, every_row=True)
    wanted = probe_names(checkpoint.config)
    assert list(probe.arrays) == [n for n in wanted if n in probe.arrays]  # graph order is the table's order
    assert probe.arrays.keys() == wanted.keys()
    for trace_name, (entry, layer) in wanted.items():
        (array,) = probe.arrays[trace_name]
        assert array.shape == entry.shape(checkpoint.config, 9, layer)
        assert array.dtype == (np.int32 if entry.dtype is np.int32 else NUMERICS[name].acc), trace_name
        if name == "bf16" and array.dtype == np.float32:
            assert np.array_equal(array, round_bf16(array), equal_nan=True), trace_name


def logits_by(checkpoint, numerics, ids, chunk):
    model, probe = Model(checkpoint, forward, ReferenceOps(numerics)), Keep()
    model.run(model.cache(len(ids)), ids, probe, every_row=True, chunk=chunk)
    return np.concatenate(probe.arrays["result_output"]), [np.concatenate([set_of(r) for r in rows]) for rows in top_ks(probe)]


def top_ks(probe):
    return [rows for name, rows in probe.arrays.items() if name.startswith("top_k")]


def set_of(rows):
    """top_k rows of any width -> [T, 100] booleans."""
    out = np.zeros((len(rows), 100), bool)
    for t, row in enumerate(rows):
        out[t, row[row >= 0]] = True
    return out


@pytest.mark.parametrize("chunk", [1, 7, 33])
def test_chunks_and_single_tokens_agree_with_the_whole_prefill(checkpoint, ids, chunk):
    truth, sets = logits_by(checkpoint, F64, ids, 100)
    whole, whole_sets = logits_by(checkpoint, F32, ids, 100)
    parts, part_sets = logits_by(checkpoint, F32, ids, chunk)
    assert all(np.array_equal(a, b) for a, b in zip(sets, whole_sets, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(sets, part_sets, strict=True))
    scale = np.abs(truth).max()
    assert np.abs(parts - truth).max() / scale <= 2 * np.abs(whole - truth).max() / scale + FLOOR
    assert np.array_equal(parts.argmax(-1), whole.argmax(-1))


@pytest.mark.parametrize("name", NUMERICS)
def test_same_run_same_bits_and_same_greedy_ids_by_any_chunking(checkpoint, ids, name):
    def greedy(chunk):
        model = Model(checkpoint, forward, ReferenceOps(NUMERICS[name]))
        cache, out, rows = model.cache(40), [], []
        y = model.run(cache, ids[:20], chunk=chunk)
        for _ in range(20):
            out.append(int(y[0].argmax()))
            rows.append(y)
            y = model.run(cache, out[-1:])
        return out, np.concatenate(rows)

    first, again, chunked = greedy(20), greedy(20), greedy(6)
    assert np.array_equal(first[1], again[1])
    if name in ("f32", "f64"):  # under coarse roundings a last bit may decide a block's rounding, and a random model's choices
        assert chunked[0] == first[0]


def test_the_cache_grows_and_keeps_its_rows(checkpoint, ids):
    model = Model(checkpoint, forward, ReferenceOps(F32))
    cache, large = model.cache(12), model.cache(30)
    model.run(cache, ids[:12])
    model.run(large, ids[:12])
    cache.grow(30)
    assert cache.capacity == 30
    assert np.array_equal(model.run(cache, ids[12:30]), model.run(large, ids[12:30]))


@pytest.mark.parametrize("budget", [0, 200_000, 1 << 30])
def test_the_weight_cache_keeps_to_its_budget_and_changes_no_bit(checkpoint, ids, budget):
    def run(budget):
        model = Model(checkpoint, forward, ReferenceOps(F32, weight_cache=budget))
        y = model.run(model.cache(9), ids[:9])
        store = model.weights.token_embd.cache
        assert store.used == sum(rows.nbytes for rows in store.rows.values()) <= budget
        return y

    assert np.array_equal(run(budget), run(1 << 30))
