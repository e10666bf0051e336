"""Are logits right before scripts/bench.py measures them? Ours and llama.cpp's of one checkpoint against the reference.

The reference gets the other side's experts and, in ggml numerics, its 8-bit steps where both round nearly the same number: there an
ulp becomes a step, so that without it any two orders of summation end as far apart as the rounding itself is. What it gets is
judged too. How far the reference's f32 sums are from its f64 sums is printed for comparison.
"""

from dataclasses import replace

import numpy as np

import npglm.cpu
from npglm.cache import Cache
from npglm.errors import NpglmError
from npglm.forward import forward
from npglm.trace.formats.llamacpp import map_graph
from npglm.trace.inject import TOP_K, ChoosingOps, Roundings, flips, product_inputs
from npglm.trace.llamacpp import record_nodes
from npglm.trace.probes import NO_PROBE, Keep
from reference.forward import forward as reference_forward
from reference.numerics import F32, GGML
from reference.ops import ReferenceOps

N_TOKENS = 8
SAME = 1e-4  # relative L2 of a row of logits
FEW = 0.01  # share of 8-bit steps that may differ where numbers are near: a fault that small moves more
NEAR = 2e-3  # of a block's largest value: two ulps of f16, to which caches, and llama.cpp's attention weights, are rounded


def check(checkpoint, n_threads: int, say=print) -> dict:
    """{comparison: relative_l2 of each position's logits, and how many have the same_argmax}. Raises NpglmError where they differ."""
    return _Check(checkpoint, n_threads, say).run()


class _Check:
    def __init__(self, checkpoint, n_threads: int, say):
        self.checkpoint, self.config, self.n_threads, self.say = checkpoint, checkpoint.config, n_threads, say
        self.ids = np.random.default_rng(1).integers(0, self.config.vocab, N_TOKENS).astype(np.int32)
        self.pos = np.arange(N_TOKENS, dtype=np.int32)
        self.found, self.differ = {}, []

    def run(self) -> dict:
        mine, seen = self.ours("f32")
        self.compare("f32: cpu against reference", mine, self.judged_reference(F32, seen))
        mine, seen = self.ours("ggml")
        self.compare("ggml: cpu against reference, flips injected", mine, self.judged_reference(GGML, seen))
        theirs, their_seen = self.llama()
        self.compare("ggml: llama.cpp against reference, flips injected", theirs, self.judged_reference(GGML, their_seen))
        truth = self.reference(GGML.truth(), seen)
        self.compare("ggml: cpu against f64 sums", mine, truth, judged=False)
        self.compare("ggml: reference against f64 sums", self.reference(GGML, seen), truth, judged=False)
        self.compare("ggml: llama.cpp against f64 sums", theirs, truth, judged=False)
        if self.differ:
            raise NpglmError(f"further apart than roundings are: {'; '.join(self.differ)}")
        return self.found

    def compare(self, what: str, a, b, judged: bool = True) -> None:
        """Logits [T,Y] of two sides."""
        rms = [float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in zip(a, b, strict=True)]
        same = int((a.argmax(-1) == b.argmax(-1)).sum())
        self.found[what] = {"relative_l2": rms, "same_argmax": same}
        self.say(f"{what}: relative L2 {np.median(rms):.1e} ({min(rms):.1e} to {max(rms):.1e}), argmax {same}/{N_TOKENS}")
        if judged and not (max(rms) <= SAME and same == N_TOKENS):
            self.differ.append(what)

    def ours(self, numerics: str) -> tuple[np.ndarray, dict]:
        """Logits [T,Y], and every probe by its name in a trace."""
        ops, probe = npglm.cpu.op_set(numerics, self.n_threads), Keep()
        weights = ops.load(self.checkpoint)
        fused = self._logits(forward, ops, weights)
        if not np.isfinite(fused).all():
            raise NpglmError(f"{self.checkpoint.path.name}: {numerics}: logits are not finite")
        if not np.array_equal(fused, self._logits(forward, ops.traced(), weights, probe)):
            raise NpglmError(f"{numerics}: logits with probes are others than without")
        return fused, probe.seen

    def llama(self) -> tuple[np.ndarray, dict]:
        """As ours()."""
        nodes = record_nodes(self.checkpoint, self.ids.tolist(), self.n_threads, flash_attn=False)
        seen = {m.name: m.take(m.node.value)[0] for m in map_graph(nodes, n_tokens=N_TOKENS)}
        return seen["result_output"], seen

    def judged_reference(self, numerics, seen: dict) -> np.ndarray:
        """reference() with 8-bit steps put in too, and judged: all are near, few differ, and so do choices at near ties only."""
        gaps, put = [], Roundings(product_inputs(self.config, self.checkpoint.weights, seen), NEAR)
        y = self.reference(replace(numerics, blocks=put), seen, gaps)
        worst, steps = np.max(gaps, initial=0), ""
        if put.values:
            steps = f"{put.moved} of {put.values} 8-bit steps (what is rounded differs by at most {put.away:.1e}; "
            steps += f"more than {NEAR} in {put.kept} blocks), "
        self.say(f"  put into the reference: {steps}{len(gaps)} rows' choices (of scores at most {worst:.1e} apart)")
        if put.kept or put.moved > FEW * put.values or not worst <= NEAR:
            self.differ.append(f"{numerics.name}: 8-bit steps or choices")
        return y

    def reference(self, numerics, seen: dict, gaps=None) -> np.ndarray:
        """Logits [T,Y] with the choices in `seen`. gaps: how far apart scores of other choices are, of the largest score, are added."""
        gaps, ops = [] if gaps is None else gaps, ReferenceOps(numerics, 0)

        def choose(kind, layer, scores, ours):
            theirs = seen[f"{kind}-{layer}"][:, : ours.shape[1]]
            for flip in flips(scores, ours, theirs, self.pos if kind == TOP_K else None):
                row = scores[flip.row]
                gaps.append(flip.gap / np.abs(row[np.isfinite(row)]).max(initial=1e-30))
            return theirs

        weights = ops.load(self.checkpoint)
        return self._logits(reference_forward, ChoosingOps(ops, weights, choose), weights)

    def _logits(self, forward, ops, weights, probe=NO_PROBE) -> np.ndarray:
        """[T,Y]"""
        cache = Cache(self.config, N_TOKENS, ops)
        return np.array(ops.numpy(forward(weights, self.config, cache, self.ids, self.pos, ops, probe)))
