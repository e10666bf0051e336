"""Live transformers in f32 against the f32 reference."""

from pathlib import Path

import numpy as np
import pytest
from choices import Runner, hidden_states, worst_row_l2
from shapes import LENGTHS

import npglm
from npglm.trace.inject import EXPERTS, TOP_K
from npglm.trace.probes import Keep
from npglm.trace.torch_model import glm_from_checkpoint, need_torch

pytestmark = pytest.mark.oracle
GOLDEN = Path(__file__).parents[1] / "golden"
BOUND = 1.5e-5  # relative L2 of a row
DECODE = 6


class Transformers:
    """The model, and what it chose in its last pass: {(kind, layer): int [T,k]}."""

    def __init__(self, checkpoint, **options):
        self.torch, _ = need_torch()
        self.model, self.choices = glm_from_checkpoint(checkpoint, **options), {}
        for i, layer in enumerate(self.model.model.layers):
            if layer.self_attn.indexer is not None:
                layer.self_attn.indexer.register_forward_hook(self._keep(TOP_K, i, lambda out: out[0]))
            if checkpoint.config.is_moe(i):
                layer.mlp.gate.register_forward_hook(self._keep(EXPERTS, i, lambda out: out[2]))

    def _keep(self, kind, layer, pick):
        def hook(module, args, output):
            self.choices[kind, layer] = pick(output).numpy()

        return hook

    def __call__(self, tokens, cache=None):
        """(logits [T,Y], hidden [layers+1,T,D], cache)"""
        with self.torch.no_grad():
            out = self.model(self.torch.tensor(tokens)[None], use_cache=True, cache=cache, output_hidden_states=True)
        return out.logits[0].numpy(), np.stack([h[0].numpy() for h in out.hidden_states]), out.cache


def test_logits_hidden_states_and_decoding(model, prompt):
    seed, checkpoint = model.seed, model.checkpoint
    theirs, runner = Transformers(checkpoint), Runner(checkpoint, model.weights)
    for n in LENGTHS[seed]:
        tokens = prompt(checkpoint, n)
        logits, hidden, their_cache = theirs(tokens)
        choices = dict(theirs.choices)
        tolerance = runner.tolerance(tokens, choices)
        probe, kv = Keep(), runner.cache(n + DECODE)
        y, settled = runner.run(tokens, choices, tolerance, kv=kv, probe=probe)
        flips = list(settled.tied)
        errs = [worst_row_l2(a, b) for a, b in zip(hidden_states(probe.seen), hidden, strict=True)] + [worst_row_l2(y, logits)]
        for step in range(DECODE):
            token = int(y[-1].argmax())
            assert token == int(logits[-1].argmax()), f"seed {seed}, {n} tokens, step {step}"
            logits, _, their_cache = theirs([token], their_cache)
            y, settled = runner.run([token], dict(theirs.choices), tolerance, start=n + step, kv=kv)
            flips += settled.tied
            errs.append(worst_row_l2(y, logits))
        print(f"\nseed {seed}, {n} tokens + {DECODE}: worst row {max(errs):.1e}, {len(flips)} rows tied")
        for kind, layer, flip in flips:
            print(f"  {kind}-{layer}: {flip}")
        for e in errs:
            assert e <= BOUND


def test_transformers_own_eps_shows(prompt):
    """5.24.0 runs the q_a and kv_a norms at 1e-6 whatever the config says (hf#48762); the golden model has 1e-5."""
    checkpoint = npglm.load(GOLDEN / "small.Q2_K.gguf")
    tokens = np.load(GOLDEN / "transformers.npz")["ids_5"].tolist()
    runner, right = Runner(checkpoint), Transformers(checkpoint)
    logits, _, _ = right(tokens)
    y, _ = runner.run(tokens, right.choices, runner.tolerance(tokens, right.choices))
    assert worst_row_l2(y, logits) <= 3e-6
    wrong, _, _ = Transformers(checkpoint, low_rank_eps=1e-6)(tokens)
    assert worst_row_l2(y, wrong) > 5e-6
