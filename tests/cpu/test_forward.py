"""The whole model on the cpu op set against the reference; chunks, threads, tiers, memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from check import Guarded
from gguf import GGMLQuantizationType as T
from synth import write_model

import npglm
import npglm.cpu
from npglm.cpu import workspace
from npglm.cpu.host import Host
from npglm.cpu.ops import CpuOps
from npglm.forward import forward
from npglm.generate import Model
from npglm.trace.metrics import errors
from reference.forward import forward as reference_forward
from reference.numerics import NUMERICS
from reference.ops import ReferenceOps

SMALL = Path(__file__).parents[1] / "golden/small.Q2_K.gguf"
N = 40  # more than top_k


def reference(checkpoint, numerics):
    return Model(checkpoint, reference_forward, ReferenceOps(numerics))


def logits(model, n=N, chunk=512, steps=4):
    """[steps + 1, Y]: after the prompt, then along the prompt's own continuation."""
    ids = np.random.default_rng(1).integers(0, model.config.vocab, n + steps).tolist()
    cache = model.cache(n + steps)
    rows = [model.run(cache, ids[:n], chunk=chunk)[0].copy()]
    rows += [model.run(cache, [token])[0].copy() for token in ids[n:]]
    return np.array(rows)


@pytest.fixture(scope="module")
def small():
    return npglm.load(SMALL)


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    """Every kind of weight in one model; no two axes are equal."""
    types = {
        "blk.2.ffn_gate_exps.weight": T.IQ2_XS, "blk.2.ffn_up_exps.weight": T.IQ2_XS, "blk.3.ffn_down_exps.weight": T.IQ3_XXS,
        "ffn_*_shexp": T.Q6_K, "attn_q_a": T.Q5_K, "attn_k_b": T.IQ4_NL, "attn_output": T.Q4_0, "output": T.Q4_K, "token_embd": T.IQ4_XS,
    }  # fmt: skip
    path = tmp_path_factory.mktemp("cpu") / "m.gguf"
    return npglm.load(write_model(path, 3, types=types, shards=2))


@pytest.mark.parametrize("which", ["small", "synthetic"])
def test_f32_is_the_reference(which, request):
    checkpoint = request.getfixturevalue(which)
    mine = logits(Model(checkpoint, forward, npglm.cpu.op_set("f32")))
    twin, truth = (logits(reference(checkpoint, NUMERICS[n])) for n in ("f32", "f64"))
    for x, y, z in zip(mine, twin, truth, strict=True):
        assert errors(x, z).rms <= 3 * errors(y, z).rms + 1e-6
        assert x.argmax() == y.argmax()


@pytest.mark.parametrize("which", ["small", "synthetic"])
def test_ggml_strays_no_further_than_the_reference(which, request):
    """Rounding to 8 bits makes a step of what was an ulp, for the reference's own f32 sums too; so single tokens, and their median."""
    checkpoint = request.getfixturevalue(which)

    def rows(model):
        return [model.run(model.cache(1), [token])[0].copy() for token in range(5, 29)]

    mine = rows(Model(checkpoint, forward, npglm.cpu.op_set("ggml")))
    twin, truth = (rows(reference(checkpoint, n)) for n in (NUMERICS["ggml"], NUMERICS["ggml"].truth()))
    here, there = ([errors(x, z).rms for x, z in zip(rows, truth, strict=True)] for rows in (mine, twin))
    assert np.median(here) <= 3 * np.median(there) + 1e-6, (here, there)


def test_chunks_threads_and_probes_change_nothing(synthetic):
    model = Model(synthetic, forward, npglm.cpu.op_set("f32", 2))
    whole = logits(model)
    for chunk in (1, 7):
        assert errors(logits(model, chunk=chunk), whole).rms <= 1e-5
    for numerics in ("f32", "ggml"):
        two = logits(Model(synthetic, forward, npglm.cpu.op_set(numerics, 2)))
        assert (logits(Model(synthetic, forward, npglm.cpu.op_set(numerics, 1))) == two).all()
        assert (logits(Model(synthetic, forward, npglm.cpu.op_set(numerics, 2))) == two).all()
        assert (logits(Model(synthetic, forward, npglm.cpu.op_set(numerics, 2).traced())) == two).all()


def test_outputs_are_written_whole_and_only_they(small):
    """Arrays between canaries that start as NaN; so do the cache's unused rows."""
    ops = CpuOps("ggml", 2, device=Guarded(Host()))
    got = logits(Model(small, forward, ops))
    ops.device.verify()
    assert (got == logits(Model(small, forward, npglm.cpu.op_set("ggml", 2)))).all()


def test_decoding_allocates_nothing(small):
    model = Model(small, forward, npglm.cpu.op_set("ggml"))
    cache = model.cache(64)
    for token in range(12):
        model.run(cache, [token])
    pool = model.ops.device.pool
    held = {key: len(arrays) for key, arrays in pool.items() if key[0][-1] != 8}  # top_k's width is that of the cache at first
    space = model.ops._workspace[workspace.TOP]
    for token in range(30):
        model.run(cache, [token])
    assert {key: len(arrays) for key, arrays in pool.items() if key[0][-1] != 8} == held
    assert model.ops._workspace[workspace.TOP] == space == model.ops._workspace[workspace.BASE]
    assert not model.ops._workspace[workspace.FAILED]


@pytest.mark.parametrize(
    ("given", "spins"), [({}, "30000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")]
)
def test_threads_wait_as_asked(given, spins):
    """They sleep soon where other programs run too, unless the environment says how to wait."""
    code = "import os, npglm.cpu.threads; print(os.environ.get('GOMP_SPINCOUNT'))"
    clean = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    run = subprocess.run([sys.executable, "-c", code], env=clean | given, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == spins


def test_tiers_are_known():
    assert npglm.cpu.tier() in npglm.cpu.tiers()
    assert npglm.cpu.tiers()[-1] == "plain"


CODE = """
import json, sys
import numpy as np
sys.path[:0] = json.loads(sys.argv[2])
import npglm, npglm.cpu
npglm.cpu.select(sys.argv[1])
import test_forward, pytest
out = {n: test_forward.logits(test_forward.Model(npglm.load(p), test_forward.forward, npglm.cpu.op_set(n, 2))).tolist()
       for n, p in (("f32", test_forward.SMALL),)}
out["ops"] = int(pytest.main(["-q", "-p", "no:cacheprovider", str(test_forward.SMALL.parents[1] / "cpu/test_ops.py")]))
out["tier"] = npglm.cpu.simd.TIER
print("RESULT" + json.dumps(out))
"""


@pytest.mark.slow
@pytest.mark.parametrize("tier", [t for t in npglm.cpu.tiers() if t != npglm.cpu.tier()])
def test_every_tier(tier, small):
    """All cases of test_ops, and the model, in a process that compiles for the tier."""
    here = Path(__file__).parent
    paths = json.dumps([str(here), str(here.parent), str(here.parent / "ops"), os.getcwd()])
    run = subprocess.run([sys.executable, "-c", CODE, tier, paths], capture_output=True, text=True, timeout=900, check=False)
    assert "RESULT" in run.stdout, run.stdout[-3000:] + run.stderr[-3000:]
    out = json.loads(run.stdout.split("RESULT")[1])
    assert out["tier"] == tier
    assert out["ops"] == 0, run.stdout[-3000:]
    twin = logits(Model(small, forward, npglm.cpu.op_set("f32", 2)))
    assert errors(np.array(out["f32"]), twin).rms <= 1e-5
