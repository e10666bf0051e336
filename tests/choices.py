"""Running the reference with another engine's discrete choices put in where scores tie, and measuring the rest."""

import numpy as np

from npglm.cache import Cache
from npglm.trace.inject import TOP_K, ChoosingOps, flips, inject
from npglm.trace.metrics import errors
from npglm.trace.probes import NO_PROBE, Keep
from reference.forward import forward
from reference.numerics import F32, F64
from reference.ops import ReferenceOps

SCORES = {TOP_K: "indexer_score", "ffn_moe_topk": "ffn_moe_probs_biased"}  # what each kind of choice is made from


class Theirs:
    """ChoosingOps' choose: ours, except that rows in which scores tie to within `tolerance[kind, layer]` get theirs.

    choices: {(kind, layer): int [T,k]}; a kind that is not there stays ours. Without a tolerance theirs is taken everywhere, unjudged.
    tied and wrong: (kind, layer, Flip) of rows that differ, where scores tie and where they do not.
    """

    def __init__(self, choices: dict, pos: np.ndarray, tolerance: dict | None = None):
        self.choices, self.pos, self.tolerance, self.tied, self.wrong = choices, pos, tolerance, [], []

    def __call__(self, kind, layer, scores, ours):
        if (kind, layer) not in self.choices:
            return ours
        theirs = self.choices[kind, layer][:, : ours.shape[1]].astype(np.int32)
        if self.tolerance is None:
            return theirs
        found = flips(scores, ours, theirs, self.pos if kind == TOP_K else None)
        tied = [flip for flip in found if flip.gap <= self.tolerance[kind, layer]]
        self.tied += [(kind, layer, flip) for flip in tied]
        self.wrong += [(kind, layer, flip) for flip in found if not flip.gap <= self.tolerance[kind, layer]]
        return inject(ours, theirs, tied)

    @property
    def rows(self) -> int:
        return len(self.tied)


class Runner:
    """A checkpoint in several numerics over one set of decoded weights: what an op set's load() gave."""

    def __init__(self, checkpoint, weights=None):
        self.config, self.ops = checkpoint.config, {num: ReferenceOps(num) for num in (F32, F64)}
        self.weights = weights or self.ops[F32].load(checkpoint)

    def cache(self, capacity: int, num=F32) -> Cache:
        return Cache(self.config, capacity, self.ops[num])

    def run(self, tokens, choices, tolerance=None, num=F32, start=0, kv=None, config=None, probe=NO_PROBE, n_out=None):
        """(logits, Theirs) of one forward pass behind `start` cached tokens; fails if sets differ where scores do not tie."""
        ops, weights = self.ops[num], self.weights
        kv = kv or self.cache(len(tokens), num)
        pos = np.arange(start, start + len(tokens), dtype=np.int32)
        theirs = Theirs(choices, pos, tolerance)
        choosing = ChoosingOps(ops, weights, theirs)
        y = forward(weights, config or self.config, kv, np.asarray(tokens, np.int32), pos, choosing, probe, n_out)
        assert not theirs.wrong, f"choices differ where scores do not tie: {theirs.wrong}"
        return y, theirs

    def tolerance(self, tokens, choices) -> dict:
        """Twice the largest error of our f32 scores by kind and layer, measured against f64 on the same choices: ours, and theirs."""
        seen = {}
        for num in (F32, F64):
            probe = Keep()
            self.run(tokens, choices, num=num, probe=probe)
            seen[num] = probe.seen
        kind_of = {score: kind for kind, score in SCORES.items()}
        out = {}
        for name, truth in seen[F64].items():
            score, _, layer = name.partition("-")
            if score not in kind_of:
                continue
            f32, finite = seen[F32][name], np.isfinite(truth)
            assert np.array_equal(np.isfinite(f32), finite)
            error = float(np.abs(f32[finite] - truth[finite]).max())
            assert error <= 2e-5 * np.abs(truth[finite]).max(), "scores are not exact to f32: nothing would be left to judge"
            out[kind_of[score], int(layer)] = 2 * error
        return out


def hidden_states(seen: dict) -> list[np.ndarray]:
    """Of Keep.seen, as transformers gives them: the embedding, l_out of all layers but the last, result_norm."""
    states = [array for name, array in seen.items() if name.partition("-")[0] in ("embd", "l_out", "result_norm")]
    return states[:-2] + states[-1:]


def worst_row_l2(x: np.ndarray, truth: np.ndarray) -> float:
    """Largest relative L2 error of a row; NaN if one is."""
    assert len(x) == len(truth)
    return float(np.max([errors(a, b).rms for a, b in zip(x, truth, strict=True)]))
