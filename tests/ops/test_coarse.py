"""Embedding rows, cache rows, and the verbs of several small ones: queries, latents, the indexer."""

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from check import Op, both_numerics, every_place, tensor
from gguf import GGMLQuantizationType as T
from test_matmul import x_of

CONFIG = SimpleNamespace(
    n_heads=3, nope=96, rope=16, q_rank=224, kv_rank=128, indexer_heads=5, indexer_dim=64, indexer_top_k=4, rms_eps=1e-5,
    indexer_eps=1e-6, indexer_scale=(5 * 64) ** -0.5,
)  # fmt: skip
HIDDEN, POS = 256, np.arange(2, 36, dtype=np.int32)


def config_of(q_rank: int) -> SimpleNamespace:
    return SimpleNamespace(**vars(CONFIG) | {"q_rank": q_rank})


def weights(c=CONFIG) -> SimpleNamespace:
    rng = np.random.default_rng(11)
    return SimpleNamespace(
        attn_q_a=tensor(rng, T.Q8_0, c.q_rank, HIDDEN), attn_q_a_norm=tensor(rng, T.F32, c.q_rank),
        attn_q_b=tensor(rng, T.Q8_0, c.n_heads * (c.nope + c.rope), c.q_rank),
        attn_k_b=tensor(rng, T.Q8_0, c.n_heads, c.kv_rank, c.nope),
        attn_kv_a_mqa=tensor(rng, T.Q8_0, c.kv_rank + c.rope, HIDDEN), attn_kv_a_norm=tensor(rng, T.F32, c.kv_rank),
        indexer_attn_q_b=tensor(rng, T.Q8_0, c.indexer_heads * c.indexer_dim, c.q_rank),
        indexer_attn_k=tensor(rng, T.Q8_0, c.indexer_dim, HIDDEN), indexer_k_norm=tensor(rng, T.F32, c.indexer_dim),
        indexer_k_norm_bias=tensor(rng, T.F32, c.indexer_dim), indexer_proj=tensor(rng, T.Q8_0, c.indexer_heads, HIDDEN),
    )  # fmt: skip


@every_place
@both_numerics
def test_embed_and_store(place, numerics):
    op = Op(place, numerics)
    table, tokens = tensor(np.random.default_rng(1), T.Q8_0, 37, 96), np.array([5, 0, 36, 5], np.int32)
    stored_plain = {"fast": False} if hasattr(op.ops, "rounds") else {}  # a GPU rearranges matrices, but not an embedding table
    assert np.array_equal(
        op.run_on("embed", op.there(tokens), op.ops.weight(table, **stored_plain)), op.twin.embed(tokens, table)
    )
    cache = np.full((41, 80), np.nan, op.ops.cache_dtype)
    rows, there = x_of(3, len(POS), 80), op.there(cache)
    op.run_on("store", there, op.there(rows), op.there(POS))
    op.twin.store(cache, rows, POS)
    assert np.array_equal(op.ops.numpy(there), cache, equal_nan=True)


@every_place
@both_numerics
@pytest.mark.parametrize("n_tokens", [1, 9, 34])
@pytest.mark.parametrize("q_rank", [224, 512])
def test_queries_and_latents(place, numerics, n_tokens, q_rank):
    """512: for few tokens the first products share kernels. Composed and 8-bit: a value may land on the other side of a rounding step."""
    op, config, h = Op(place, numerics), config_of(q_rank), x_of(12, n_tokens, HIDDEN)
    table = op.twin.rope_table(POS[:n_tokens], config.rope, 8e6)
    op.check("queries", h, weights(config), table, config)
    op.check("latents", h, weights(config), table, config)


@every_place
@both_numerics
@pytest.mark.parametrize("n_tokens", [1, 34])
@pytest.mark.parametrize("q_rank", [224, 512])
def test_projections(place, numerics, n_tokens, q_rank):
    """The queries, and the rows that it stores: the latents, nothing else."""
    op, config, h = Op(place, numerics), config_of(q_rank), x_of(12, n_tokens, HIDDEN)
    table, pos = op.twin.rope_table(POS[:n_tokens], config.rope, 8e6), POS[:n_tokens][::-1].copy()
    empty = np.full((41, config.kv_rank + config.rope), np.nan, op.ops.cache_dtype)
    before, after, mine, twin = (h, weights(config)), (table, pos, config), empty.copy(), empty.copy()
    op.check("projections", *before, mine, *after, twin_args=(*before, twin, *after))
    there = op.there(empty)
    op.run_on("projections", *map(op.there, (h, weights(config))), there, *map(op.there, (table, pos)), config)
    empty[pos] = op.run("latents", h, weights(config), table, config).astype(empty.dtype)
    assert op.ops.numpy(there).tobytes() == empty.tobytes()


@every_place
@both_numerics
@pytest.mark.parametrize("n_tokens", [1, 9, 34])
@pytest.mark.parametrize("q_rank", [224, 512])
def test_indexer(place, numerics, n_tokens, q_rank):
    """The rows that the cache holds before POS count, the NaN behind them does not. 512: as above."""
    op, config = Op(place, numerics), config_of(q_rank)
    cache = np.full((41, config.indexer_dim), np.nan, op.ops.cache_dtype)
    cache[:2] = x_of(6, 2, config.indexer_dim)
    pos = POS[:n_tokens]
    table = op.twin.rope_table(pos, config.rope, 8e6)
    args = (x_of(7, n_tokens, HIDDEN), x_of(8, n_tokens, config.q_rank), weights(config), cache, table, pos, config)
    fused = op.run("indexer", *args)  # may be as wide as the cache allows
    top_k = Op(place, numerics, traced=True).check("indexer", *args)
    assert top_k.shape == (n_tokens, min(config.indexer_top_k, pos[-1] + 1))
    assert [{i for i in row if i >= 0} for row in fused.tolist()] == [{i for i in row if i >= 0} for row in top_k.tolist()]


class BesideFirst:
    """Launches after a mark() wait for those beside() it: of the orders that a captured step allows the one furthest from the usual."""

    def __init__(self, ops):
        self.now, self.late = ops.launch, None
        ops.launch, ops.device.mark, ops.device.beside = self.launch, self.mark, self.beside

    def launch(self, *args, **more):
        if self.late is None:
            self.now(*args, **more)
        else:
            self.late.append(partial(self.now, *args, **more))

    def mark(self):
        self.make_up()
        self.late = []
        return self

    def make_up(self):
        late, self.late = self.late or (), None
        for launch in late:
            launch()

    @contextmanager
    def beside(self, mark):
        late, self.late = self.late, None if mark else self.late
        yield
        self.late = late
        self.make_up()


@every_place
@pytest.mark.parametrize("n_tokens", [1, 3])
@pytest.mark.parametrize("dim", [64, 192])
def test_an_indexer_after_projections(place, dim, n_tokens):
    """As in a forward pass: it goes on from what projections has made, and needs nothing that was launched beside it. 192: more values
    than one block of threads has."""
    op, pos, h = Op(place), POS[:n_tokens], x_of(7, n_tokens, HIDDEN)
    if place != "cpu":
        BesideFirst(op.ops)
    config = SimpleNamespace(**vars(config_of(512)) | {"indexer_dim": dim, "indexer_top_k": 2})
    w, table = weights(config), op.twin.rope_table(pos, config.rope, 8e6)
    found = []
    for ops, there in ((op.ops, op.there), (op.twin, lambda value: value)):
        cache, keys = np.zeros((41, config.kv_rank + config.rope), op.ops.cache_dtype), np.zeros((41, dim), op.ops.cache_dtype)
        keys[:2] = x_of(6, 2, dim)
        on, layer, angles, at, cache, keys = (there(v) for v in (h, w, table, pos, cache, keys))
        q_a, _ = ops.projections(on, layer, cache, angles, at, config)
        top_k = ops.indexer(on, q_a, layer, keys, angles, at, config)
        found.append([op.ops.numpy(v) if ops is op.ops else v for v in (keys, top_k)])
    (keys, top_k), (twin_keys, twin_top_k) = found
    assert [{i for i in row if i >= 0} for row in top_k.tolist()] == [{i for i in row if i >= 0} for row in twin_top_k.tolist()]
    assert np.abs(keys.astype(np.float32) - twin_keys.astype(np.float32)).max() < 2e-3
    op.ops.device.verify()


@every_place
@pytest.mark.parametrize("other", ["indexer_attn_k", "indexer_proj"])
def test_an_indexer_of_mixed_types(place, other):
    """Only one of its first products can share the kernel of attention's."""
    op, config, pos = Op(place), config_of(512), POS[:1]
    w, cache, table = weights(config), np.zeros((41, config.indexer_dim), np.float16), op.twin.rope_table(pos, config.rope, 8e6)
    for kind in (T.F16, T.Q2_K):
        setattr(w, other, tensor(np.random.default_rng(12), kind, *getattr(w, other).shape))
        args = (x_of(7, 1, HIDDEN), x_of(8, 1, config.q_rank), w, cache, table, pos, config)
        fused, composed = op.run("indexer", *args), Op(place, traced=True).run("indexer", *args)
        assert {i for i in fused[0].tolist() if i >= 0} == {i for i in composed[0].tolist() if i >= 0}


@every_place
def test_latents_of_another_place(place):
    """The same hidden rows at other positions, or with another layer's weights, are made anew, and one of each is kept."""
    op, config, h = Op(place), config_of(512), x_of(12, 1, HIDDEN)
    tables = [tuple(map(op.there, op.twin.rope_table(POS[i : i + 1], config.rope, 8e6))) for i in (0, 5)]
    there, layers = op.there(h), [op.there(weights(config)) for _ in range(2)]
    made = [op.ops.numpy(op.ops.latents(there, w, t, config)) for w, t in ((layers[0], t) for t in tables)]
    fresh = [
        op.run("latents", h, weights(config), op.twin.rope_table(POS[i : i + 1], config.rope, 8e6), config) for i in (0, 5)
    ]
    assert all(np.array_equal(a, b) for a, b in zip(made, fresh, strict=True))
    assert not np.array_equal(*made)
    if place == "cpu":  # keeps nothing
        return
    first = op.ops.latents(there, layers[0], tables[0], config)
    assert op.ops.latents(there, layers[0], tables[0], config) is first
    assert op.ops.latents(there, layers[1], tables[0], config) is not first
    starts = [entry for key, entries in op.ops.remembered.items() if key[0] == "start" for entry in entries]
    assert len(starts) == 1


@every_place
@pytest.mark.parametrize("q_rank", [512, 768])
def test_queries_of_two_bits(place, q_rank):
    """Rows of two and three Q8_K blocks that the products of queries make themselves."""
    op, config, h = Op(place), config_of(q_rank), x_of(12, 1, HIDDEN)
    w, table, pos = weights(config), op.twin.rope_table(POS[:1], config.rope, 8e6), POS[:1]
    w.attn_q_b = tensor(np.random.default_rng(13), T.Q2_K, *w.attn_q_b.shape)
    empty = np.full((41, config.kv_rank + config.rope), np.nan, op.ops.cache_dtype)
    before, after = (h, w), (table, pos, config)
    op.check("projections", *before, empty.copy(), *after, twin_args=(*before, empty.copy(), *after))
