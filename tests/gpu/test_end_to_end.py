"""The whole pass in emulation against the reference with the same numerics."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from synth import WIDE, write_model
from test_device import SETTLED
from variants import NO_SPILL

import npglm.forward
import reference.forward
from npglm.cache import Cache
from npglm.checkpoint import Checkpoint
from npglm.errors import NpglmError
from npglm.generate import Model, generate
from npglm.gpu import op_set
from npglm.gpu.indexer import LONG_ROW
from npglm.sampler import Sampler
from npglm.tokenizer import Tokenizer
from npglm.trace.metrics import errors
from npglm.trace.probes import PROBES, Keep
from raw_kernels import KERNELS
from reference.numerics import NUMERICS
from reference.ops import ReferenceOps

GOLDEN = __file__.rsplit("gpu", 1)[0] + "golden/small.Q2_K.gguf"


def steps(ops, forward, checkpoint, prompt, n, forced=None, probe=None, capacity=None):
    """Logits [n, Y]: after the prompt, and after each id that follows: forced[i], or else the greedy one."""
    weights, config = ops.load(checkpoint), checkpoint.config
    cache, rows, new, at = Cache(config, capacity or len(prompt) + n, ops), [], prompt, 0
    for i in range(n):
        pos = np.arange(at, at + len(new), dtype=np.int32)
        args = (weights, config, cache, ops.array(new, np.int32), ops.array(pos, np.int32), ops)
        rows.append(np.array(ops.numpy(forward(*args, *((probe,) if probe else ()), n_out=1))[0]))
        at += len(new)
        cache.length, new = at, [int(rows[-1].argmax()) if forced is None else forced[i]]
    return np.stack(rows)


def strays(checkpoint, ops) -> tuple[float, float]:
    """Median distance of single tokens' logits from the reference with f64 sums, in ggml numerics: of `ops`, and of the f32 twin.

    Rounding to 8 bits makes a step of what was an ulp, for the reference's own f32 sums too: whole texts part, medians do not.
    """

    def rows(ops, forward):
        return [steps(ops, forward, checkpoint, [token], 1)[0] for token in range(5, 29)]

    truth = rows(ReferenceOps(NUMERICS["ggml"].truth()), reference.forward.forward)
    both = rows(ops, npglm.forward.forward), rows(ReferenceOps(NUMERICS["ggml"]), reference.forward.forward)
    here, there = (np.median([errors(x, z).rms for x, z in zip(rows, truth, strict=True)]) for rows in both)
    return float(here), float(there)


def strays_of_steps(checkpoint, ops, n) -> tuple[list[float], list[float]]:
    """As strays, of each of n steps in the numerics of `ops`: a prompt of more tokens than WIDE chooses, then single tokens, in a
    cache of which several blocks search a row."""
    twin, prompt = NUMERICS[ops.numerics.name], [(7 * i + 3) % 300 for i in range(80)]
    theirs = steps(ReferenceOps(twin), reference.forward.forward, checkpoint, prompt, n)
    ids = theirs.argmax(-1)
    truth = steps(ReferenceOps(twin.truth()), reference.forward.forward, checkpoint, prompt, n, ids)
    mine = steps(ops, npglm.forward.forward, checkpoint, prompt, n, ids, capacity=LONG_ROW + 5)
    return tuple([errors(x, z).rms for x, z in zip(rows, truth, strict=True)] for rows in (mine, theirs))


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [32, 64])
def test_greedy(lanes):
    """24 greedy ids of the golden model."""
    checkpoint, prompt = Checkpoint.open(GOLDEN), list(range(3, 15))
    theirs = steps(ReferenceOps(NUMERICS["f32"]), reference.forward.forward, checkpoint, prompt, 24)
    mine = steps(op_set("f32", "emulated", lanes), npglm.forward.forward, checkpoint, prompt, 24, theirs.argmax(-1))
    assert (mine.argmax(-1) == theirs.argmax(-1)).all()
    assert np.abs(mine - theirs).max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [32, 64])
def test_ggml_strays_no_further_than_the_reference(lanes):
    here, there = strays(Checkpoint.open(GOLDEN), op_set("ggml", "emulated", lanes))
    assert here <= 3 * there + 1e-6


# Launches of a decode step of WIDE, whose 3 layers are dense, MoE, and MoE with a shared choice of tokens.
WIDE_DECODE = {
    "matvec_projections_q8_0": 3, "matvec_queries_q8_0": 5, "indexer_score_f16": 2,
    "top_k_count": 6, "top_k_tally": 2, "top_k_place": 2, "attention_f16": 3, "matvec_merge_q8_0": 3,
    "matvec_gate_up_swiglu_q8_0": 3, "matvec_gate_up_swiglu_q2_k": 2, "matvec_down_combine_q2_k": 2, "rms_norm_blocks_f32": 7,
}  # fmt: skip


def is_settled(device, values: dict, name: str, marked) -> bool:
    """Whether a kernel that is told so may read early what it then does: nobody writes it, or does so in places that are marked."""
    early = next((names for kernel, names in SETTLED.items() if name.startswith(kernel)), ())
    arrays = [values[each] for each in early if values[each] is not marked]
    return not values.get("settled") or (bool(early) and device.settled(*arrays))


@pytest.mark.slow
@pytest.mark.parametrize(("numerics", "lanes", "n"), [("f32", 32, 3), ("ggml", 32, 6), ("ggml", 64, 6)])
def test_the_kernels_of_a_wide_model(tmp_path, numerics, lanes, n):
    """Each step's logits are about as far from the reference with f64 sums as the reference's own; and the kernels did run."""
    checkpoint = Checkpoint.open(write_model(tmp_path / "m.gguf", seed=1, shape=WIDE))
    ops, launched, early, marked = op_set(numerics, "emulated", lanes), [], [], None
    launch = ops.launch

    def noted(name, grid, block, *args, **more):
        nonlocal marked
        values = dict(zip((argument.name for argument in KERNELS[name].arguments), args, strict=True))
        assert is_settled(ops.device, values, name, marked)
        marked = values.get("pending", marked)
        if name == "indexer_score_f16" and args[-1]:  # OLD_ROWS
            assert (len(args[0]), launched[-1][0]) == (1, "matvec_queries_q8_0")
            early.append(name)
        launched.append((name, grid))
        launch(name, grid, block, *args, **more)

    ops.launch = noted
    here, there = strays_of_steps(checkpoint, ops, n)
    assert max(here) <= 2 * max(there), (here, there)
    assert np.median(here) <= 2 * np.median(there), (here, there)
    if numerics == "f32":  # decodes the weights in the tile
        return
    assert len(early) == WIDE_DECODE["indexer_score_f16"] * (n - 1)
    names = [name for name, _ in launched]
    last = launched[len(names) - 1 - names[::-1].index("embed_q8_0") :]
    counts = Counter(name for name, _ in last)
    assert {name: counts[name] for name in WIDE_DECODE} == WIDE_DECODE
    assert {"exchange_sum_f32", *counts} <= NO_SPILL  # that test_compile.py looks at: all of the decode graph, also of ranks
    grids = {grid for name, grid in last if name == "rms_norm_blocks_f32"}
    assert grids == {(1, 2)}  # several blocks share a row
    assert all(grid[0] > 1 for name, grid in last if name in ("attention_f16", "top_k_count"))  # splits, chunks


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return Checkpoint.open(write_model(tmp_path_factory.mktemp("model") / "m.gguf", seed=3, n_layers=4))


def test_traced_makes_every_probe(model):
    """All probes of the reference, in their shapes; fused and traced give the same logits."""
    ops, twin = op_set("f32", "emulated"), ReferenceOps(NUMERICS["f32"])
    prompt = [5, 9, 2, 200, 17, 3, 8, 100, 44, 45, 46]
    theirs, mine = Keep(), Keep()
    a = steps(twin, reference.forward.forward, model, prompt, 1, probe=theirs)
    b = steps(ops.traced(), npglm.forward.forward, model, prompt, 1, probe=mine)
    assert list(mine.seen) == list(theirs.seen)
    for name, array in theirs.seen.items():
        assert mine.seen[name].shape == array.shape, name
        assert mine.seen[name].dtype == PROBES[name.split("-")[0]].dtype, name
        if array.dtype == np.int32:
            assert (mine.seen[name] == array).all(), name
        else:
            finite = np.isfinite(array)
            assert (np.isfinite(mine.seen[name]) == finite).all(), name
            assert np.abs(mine.seen[name][finite] - array[finite]).max() <= 2e-5 * np.abs(array[finite]).max(), name
    c = steps(ops, npglm.forward.forward, model, prompt, 1)
    assert np.abs(a - b).max() < 2e-5 * np.abs(a).max()
    assert np.abs(a - c).max() < 2e-5 * np.abs(a).max()


def test_decode_loop(model):
    """The device's own loop gives the ids of plain forward calls, and stops where the cache ends."""
    ops, prompt = op_set("ggml", "emulated"), [5, 9, 2, 200]
    ids = [int(row.argmax()) for row in steps(ops, npglm.forward.forward, model, prompt, 4)]
    weights, config = ops.load(model), model.config
    cache = Cache(config, len(prompt) + 3, ops)
    decoder = ops.decode(npglm.forward.forward, weights, config, cache)
    tokens, pos = ops.array(prompt, np.int32), ops.array(range(len(prompt)), np.int32)
    npglm.forward.forward(weights, config, cache, tokens, pos, ops, n_out=1)
    decoder.start(ids[0], len(prompt))
    assert [decoder.next() for _ in range(3)] == ids[1:]
    with pytest.raises(NpglmError, match="context overflow"):
        decoder.next()


class Plain(Model):
    """Without the op set's own decode loop."""

    def decoder(self, *_):
        return None


@pytest.mark.parametrize(("temperature", "top_k"), [(0.0, 0), (0.9, 0), (0.9, 5)])
def test_generate_takes_the_decode_loop(model, temperature, top_k):
    """Ids and log probabilities of plain forward calls; a filter that the device lacks takes those."""
    ops, tokenizer, sampler = op_set("ggml", "emulated"), Tokenizer.from_gguf(model.path), Sampler(temperature, top_k, seed=3)
    a, b = (kind(model, npglm.forward.forward, ops) for kind in (Plain, Model))
    plain, looped = (generate(m, tokenizer, m.cache(12), [5, 9, 2, 200], sampler, 6) for m in (a, b))
    assert looped.ids == plain.ids
    assert looped.logprobs == plain.logprobs
    assert (b._decoder is None) == (top_k > 0)
    assert generate(b, tokenizer, b.cache(12), [5, 9, 2, 200], sampler, 6, logprobs=False).logprobs == []


def test_a_conversation_keeps_the_decode_loop_until_its_cache_moves(model):
    ops, tokenizer = op_set("ggml", "emulated"), Tokenizer.from_gguf(model.path)
    a, b = (kind(model, npglm.forward.forward, ops) for kind in (Plain, Model))
    caches, results, loops = [m.cache(13) for m in (a, b)], [], []
    for new in ([5, 9, 2, 200], [17, 3], [8]):
        for m, cache in zip((a, b), caches, strict=True):
            ids = (results[-2].prompt_ids + results[-2].ids if len(results) > 1 else []) + new
            if len(ids) + 3 > cache.capacity:
                cache.grow(2 * cache.capacity)
            results.append(generate(m, tokenizer, cache, ids, Sampler(), 3))
        loops.append(b._decoder)
        assert results[-1].ids == results[-2].ids
        assert caches[1].length == len(results[-1].prompt_ids) + 2
    assert loops[0] is loops[1]
    assert loops[1] is not loops[2]


def test_not_finite_weights_stop_generation(tmp_path):
    """One NaN in a norm shows through the 8-bit blocks, as in the reference."""
    data = bytearray(Path(GOLDEN).read_bytes())
    at = bytes(data).find(Checkpoint.open(GOLDEN).tensors["blk.1.ffn_norm.weight"].data.tobytes())
    data[at : at + 4] = np.float32("nan").tobytes()
    (tmp_path / "nan.gguf").write_bytes(data)
    bad = Checkpoint.open(tmp_path / "nan.gguf")
    model = Model(bad, npglm.forward.forward, op_set("ggml", "emulated"))
    with pytest.raises(NpglmError, match="logits are not finite"):
        generate(model, Tokenizer.from_gguf(bad.path), model.cache(8), [5, 9], Sampler(), 4)


def test_loading(model, monkeypatch):
    """Progress is told to the end; what does not fit is said before anything moves."""
    ops, told = op_set("ggml", "emulated"), []
    ops.load(model, lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] > told[0][0] > 0
    told.clear()
    monkeypatch.setattr(ops.device, "free_bytes", lambda: (model.n_bytes // 2, 0))
    with pytest.raises(NpglmError, match=r"the weights need .* GiB free; . of 4 layers would fit; --offload-experts needs"):
        ops.load(model, lambda *_: told.append(1))
    assert not told


def test_other_numerics_are_refused():
    with pytest.raises(NpglmError, match="bf16 does not run on the emulated backend"):
        op_set("bf16", "emulated")


def test_a_decoder_does_not_outlive_its_cache(model):
    ops = op_set("ggml", "emulated")
    cache = Cache(model.config, 8, ops)
    decoder = ops.decode(npglm.forward.forward, ops.load(model), model.config, cache)
    decoder.start(5, 0)
    decoder.next()
    cache.grow(16)
    with pytest.raises(NpglmError, match=r"^the cache has moved"):
        decoder.next()
