"""Discrete choices made by someone else: the same forward pass with another engine's top-k, experts and 8-bit steps, where the scores allow it.

A choice between scores that differ by less than their errors says nothing, and everything after it does. So the other side's
choice is put in for such a row, and the rest can be judged:

    ops = ChoosingOps(ReferenceOps(F32), weights, choose)   # choose(kind, layer, scores, ours) -> the choice to go on with
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from npglm.trace.graph import MATMUL, layer_steps, model_steps
from npglm.trace.probes import NO_PROBE

TOP_K, EXPERTS = "top_k", "ffn_moe_topk"  # the two kinds of choice, by their probes' names


class ChoosingOps:
    """An op set like the ReferenceOps `ops`, except that `choose` has the last word on top-k and experts.

    choose(kind, layer, scores, ours) gets TOP_K with indexer_score [T,S], or EXPERTS with ffn_moe_probs_biased [T,E], and the int32
    choice made from them; it returns a choice of the same rows. weights: what ops.load gave and forward() gets.
    """

    def __init__(self, ops, weights, choose: Callable[[str, int, np.ndarray, np.ndarray], np.ndarray]):
        self.ops, self.choose = ops, choose
        self._layers = {id(w): i for i, w in enumerate(weights.layers)}

    def __getattr__(self, name: str):
        return getattr(self.ops, name)

    def _choose(self, kind: str, w, scores, ours):
        numpy = self.ops.numpy
        return self.ops.array(self.choose(kind, self._layers[id(w)], numpy(scores), numpy(ours)), np.int32)

    def indexer(self, h, q_a, w, cache, table, pos, config, probe=NO_PROBE):
        """The indexer; keys are stored as ever."""
        seen = _Seen(probe)
        top_k = self.ops.indexer(h, q_a, w, cache, table, pos, config, seen)
        return self._choose(TOP_K, w, seen["indexer_score"], top_k)

    def moe_ffn(self, h, w, config, probe=NO_PROBE):
        """reference.ops.moe.moe_ffn, with the choice between route() and the experts."""
        o = self.ops
        seen = _Seen(probe, hide=(EXPERTS, "ffn_moe_weights", "ffn_moe_weights_norm", "ffn_moe_weights_scaled"))
        ours, _ = o.route(h, w, config, seen)
        experts = self._choose(EXPERTS, w, seen["ffn_moe_probs_biased"], ours)  # [T,K]
        probe(EXPERTS, experts)
        weights = o.route_weights(seen["ffn_moe_probs"], experts, config, probe)  # [T,K]
        return o.moe_experts(h, w, experts, weights, probe)


class _Seen(dict):
    """A probe that keeps what it sees and passes it on, but for the names in `hide`."""

    def __init__(self, probe, hide=()):
        super().__init__()
        self.probe, self.hide = probe, hide

    def __call__(self, name: str, array) -> None:
        self[name] = array
        if name not in self.hide:
            self.probe(name, array)


@dataclass(frozen=True)
class Flip:
    """A row in which two sides chose differently. gap: by how much the scores prefer the worst swap; 0 is an exact tie, NaN invalid."""

    row: int
    ours: tuple[int, ...]  # that theirs lacks
    theirs: tuple[int, ...]  # that ours lacks
    gap: float


def flips(scores: np.ndarray, ours: np.ndarray, theirs: np.ndarray, pos: np.ndarray | None = None) -> list[Flip]:
    """Rows in which the sets differ. scores [T,n]; ours, theirs int [T,k] in any order; entries < 0 or > pos[row] are padding.

    A row in which theirs has too few entries, one twice or one that does not exist is a flip with gap NaN.
    """
    found = []
    for row, (score, a, b) in enumerate(zip(scores, ours, theirs, strict=True)):
        last = len(score) - 1 if pos is None else int(pos[row])
        a, b = ([int(i) for i in x if 0 <= i <= last] for x in (a, b))
        lost, won = sorted(set(a) - set(b)), sorted(set(b) - set(a))
        if lost or won or len(b) != len(a):
            valid = len(a) == len(b) == len(set(b))
            gap = float(score[lost].max() - score[won].min()) if valid else float("nan")
            found.append(Flip(row, tuple(lost), tuple(won), gap))
    return found


def inject(ours: np.ndarray, theirs: np.ndarray, tied: list[Flip]) -> np.ndarray:
    """`ours` with the rows of `tied` taken from `theirs`; both int [T,k]."""
    rows = [flip.row for flip in tied]
    out = np.array(ours, np.int32)
    out[rows] = theirs[rows]
    return out


class Roundings:
    """Numerics.blocks with another engine's 8-bit blocks, where the two round nearly the same numbers: an ulp there becomes a step.

    inputs: by weight's name, what the engine multiplied it with, f32 (product_inputs). A block goes over to the engine's side if none of
    its values is further than `within` from ours, in units of the largest one; below 1/254 a value moves by a step at most. moved: 8-bit
    values that differ in such blocks, of `values`; away: the largest distance in them. kept: blocks that are further apart; ours stay.
    """

    def __init__(self, inputs: dict[str, np.ndarray], within: float):
        self.inputs, self.within = inputs, within
        self.values, self.moved, self.kept, self.away = 0, 0, 0, 0.0

    def __call__(self, name: str, quantize, x: np.ndarray):
        q, d = quantize(x)  # [..., blocks, width], [..., blocks]
        theirs = self.inputs[name].reshape(x.shape)
        their_q, their_d = quantize(theirs)
        x, theirs = (np.asarray(v, np.float64).reshape(q.shape) for v in (x, theirs))
        largest = np.maximum(np.abs(x), np.abs(theirs)).max(-1)
        away = np.abs(x - theirs).max(-1) / np.where(largest > 0, largest, 1)
        near = away <= self.within
        self.values += q.size
        self.moved += int((q != their_q)[near].sum())
        self.kept += int((~near).sum())
        self.away = max(self.away, float(away[near].max(initial=0)))
        return np.where(near[..., None], their_q, q), np.where(near, their_d, d)


def product_inputs(config, weights, probes) -> dict[str, np.ndarray]:
    """What each weight is multiplied with, by its name, from an engine's probes: {probe-layer: array}, as in a trace."""
    inputs = {}
    for layer, w in [*enumerate(weights.layers), (None, weights)]:
        steps = model_steps(config) if layer is None else layer_steps(config, layer)
        for step in steps.values():
            if step.kind != MATMUL:
                continue
            x = probes[step.inputs[0]]
            if step.probe == "q_nope_absorbed":
                x = x.reshape(len(x), config.n_heads, -1)[..., : config.nope]
            inputs |= {getattr(w, name).name: x for name in step.weights}
    return inputs
