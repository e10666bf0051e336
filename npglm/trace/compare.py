"""Is another engine right, where does it first go wrong, which op is guilty, and why.

    report = compare(checkpoint, Recording(traces))

Two views. Chained: the reference runs beside the other from the tokens on, with the other's expert and top-k choices injected.
Local, the one that convicts: each op recomputed from the other's own inputs, in the other's numerics as far as they are known. Where
a probe was not recorded, the reference's own value stands in, and the op's span names the probes passed over.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from npglm.config import GlmConfig
from npglm.errors import NpglmError
from npglm.trace import engine as engines
from npglm.trace.faults import Case, find_cause, find_span_cause
from npglm.trace.graph import CHOICE, MATMUL, Model, Place, Step, layer_steps, run
from npglm.trace.judge import (
    ATTENTION_IN_F16,
    EQUAL,
    NOT_COMPARABLE,
    PRECISION,
    ROUNDING,
    SEVERITY,
    TWIN_FACTOR,
    WRONG,
    choice_gap,
    classify,
    soften,
)
from npglm.trace.metrics import worst_row
from npglm.trace.probes import PROBES
from npglm.trace.recording import ALONE, COLUMNS, PARTIAL, Joined, Known, Recording
from npglm.trace.structure import describe, downsample
from npglm.trace.ties import settle
from npglm.trace.weights import MappedWeight, rank_weights, with_weights

MAX_SPAN_SEARCHES = 1
MAX_SEARCHES = 4  # ops whose cause is searched among all hypotheses; later ones only try the causes already found


@dataclass
class OpResult:
    """err_chained, err_local: npglm.trace.metrics.worst_row against the two views, None where there is nothing to compare."""

    op: str
    layer: int | None
    rank: int
    verdict: str
    err_chained: float | None = None
    err_local: float | None = None
    bound: float | None = None
    reason: str = ""
    span: tuple[str, ...] = ()
    cause: dict | None = None
    structure: str = ""
    error_map: list | None = None  # npglm.trace.structure.downsample

    @property
    def name(self) -> str:
        return self.op if self.layer is None else f"{self.op}-{self.layer}"


@dataclass(frozen=True)
class Piece:
    """One thing to judge: what a rank recorded, and what it should be, from where.

    chained: None for one rank's share of a sum. cut: the whole op's output -> this part.
    """

    rank: int
    part: Known
    place: Place
    inputs: list
    truth: np.ndarray
    chained: np.ndarray | None
    cut: Callable = field(default=lambda a: a, repr=False)


@dataclass
class Report:
    identity: dict
    verdict: str = NOT_COMPARABLE
    first_divergence: dict | None = None
    guilty: dict | None = None
    cause: dict | None = None
    ops: list[OpResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    numerics: list[str] = field(default_factory=list)  # what the engine does throughout, in words

    @property
    def status(self) -> int:
        """Exit status: 0 equal or rounding, 1 precision or wrong, 2 nothing comparable."""
        return {EQUAL: 0, ROUNDING: 0, PRECISION: 1, WRONG: 1}.get(self.verdict, 2)

    @property
    def guilty_op(self) -> OpResult | None:
        g = self.guilty
        return next((o for o in self.ops if g and (o.op, o.layer, o.rank) == (g["op"], g["layer"], g["rank"])), None)


def compare(checkpoint, recording: Recording, tokens=None, causes: bool = True, skip: frozenset[str] = frozenset()) -> Report:
    """Judge every op that `recording` holds against the checkpoint.

    tokens: ids to use where the recording has none. causes: search a cause for failing ops. skip: hypotheses left out, by name.
    Raises NpglmError when the two cannot be of one run (other tokens, another model).
    """
    recording.require_all_ranks()
    return _Comparison(checkpoint, recording, tokens, causes, skip).run()


class _Comparison:
    def __init__(self, checkpoint, recording: Recording, tokens, causes: bool, skip: frozenset[str]):
        self.recording, self.causes, self.skip = recording, causes, skip
        self.config: GlmConfig = checkpoint.config
        self.report = Report(identity={})
        ids = self._identity(checkpoint, tokens)
        self.model = Model(checkpoint, ids)
        self.engine = engines.detect(self.model, recording)
        self.report.numerics = list(self.engine.words)
        self.local: dict[str, np.ndarray] = {}  # the other's values, ours where it has none
        self.chain: dict[str, np.ndarray] = {}  # ours throughout, with the other's choices
        self.twin: dict[str, np.ndarray] = {}  # as local, in plain f32 (or the engine's own rounding): what rounding may do
        self.span: dict[str, tuple[str, ...]] = {}
        self.joined: dict[str, Joined] = {}
        self.found: list[str] = []  # names of causes found so far
        self.searches = self.span_searches = 0
        self.flips: dict[str, list[str]] = {}
        self.ties: list[tuple[str, int]] = []

    # --- before any tensor ---

    def _identity(self, checkpoint, tokens) -> np.ndarray:
        recording, config = self.recording, self.config
        ids = recording.tokens
        if ids is None:
            ids = tokens if tokens is not None else engines.tokens_from_embeddings(checkpoint, recording)
        elif tokens is not None and list(tokens) != list(ids):
            raise NpglmError(
                f"other tokens: the recording ran {clip_list(ids)}, --tokens says {clip_list(tokens)}; nothing else compared"
            )
        if ids is None:
            raise NpglmError(f"{recording.source()}: holds no token ids; give them with --tokens 1,2,3")
        if not len(ids):
            raise NpglmError(f"{recording.source()}: the list of token ids is empty")
        if min(ids) < 0 or max(ids) >= config.vocab:
            raise NpglmError(f"{recording.source()}: token id {max(ids)} is outside the model's vocabulary of {config.vocab}")
        for name, width in (("embd", config.hidden), ("result_output", config.vocab)):
            shapes = {np.shape(t[name])[-1] for t in recording.traces if name in t}
            if len(shapes) == 1 and (found := shapes.pop()) not in (width, width / recording.world):
                raise NpglmError(
                    f"another model: {name} is {found} wide in {recording.source()}, {width} in {checkpoint.path.name}"
                )
        metadata = recording.metadata
        theirs = metadata.get("model_sha256")
        if theirs and theirs != checkpoint.sha256:
            raise NpglmError(
                f"another model: the recording's model_sha256 is {theirs[:12]}..., {checkpoint.path.name} has {checkpoint.sha256[:12]}..."
            )
        for trace in recording.traces:
            self.report.notes += json.loads(trace.metadata.get("notes", "[]"))
        if metadata.get("model") and metadata["model"] != config.name:
            self.report.notes.append(f"the recording calls the model {metadata['model']!r}, the file {config.name!r}")
        self.report.identity = {
            "model": checkpoint.path.name,
            "recording": recording.source(),
            "engine": metadata.get("engine", "unknown"),
            "tokens": [int(i) for i in ids],
            "ranks": recording.world,
            "sha256": "equal" if theirs else "not recorded",
        }
        return np.asarray(ids, np.int32)

    # --- the walk ---

    def run(self) -> Report:
        names = set(self.recording.names)
        layers = [int(n.rsplit("-", 1)[1]) for n in names if "-" in n and n.rsplit("-", 1)[1].isdigit()]
        outside = names & {"result_norm", "result_output"}
        last = self.config.n_layers - 1 if outside else max(layers, default=-1)
        unknown = [
            n for n in self.recording.names if n.rsplit("-", 1)[0] not in PROBES and "|" not in n
        ]  # | : llama.cpp's others
        if unknown:
            self.report.notes.append(
                f"{len(unknown)} arrays are none of our probes and were left aside, for example {unknown[0]}"
            )
        known = sum(n.rsplit("-", 1)[0] in PROBES for n in names)
        self.eager = self.recording.quantum > 0 or known < 0.6 * sum(
            1 for s in self.model.steps() if s.layer is None or s.layer <= last
        )
        for step in self.model.steps():
            if step.layer is not None and step.layer > last:
                continue
            if step.layer is None and step.probe != "embd" and not outside:
                continue
            self._step(step)
            if step.probe == "l_out" and step.layer < self.config.n_layers - 1:
                self._forget(step.layer)
        self._summarise()
        return self.report

    def _forget(self, layer: int) -> None:
        for values in (self.local, self.chain, self.twin, self.joined):
            for name in [n for n in values if n != f"l_out-{layer}" and not n.startswith("top_k-")]:
                del values[name]

    def _step(self, step: Step) -> None:
        place = self.engine.place(self.model, step.layer)
        inputs = [self.local[n] for n in step.inputs]
        truth, chained = run(step, place, inputs, [self.chain[n] for n in step.inputs])
        joined = self.recording.joined(step.name, PROBES[step.probe].shape(self.config, len(place.pos), step.layer))
        passed = tuple(dict.fromkeys(n for i in step.inputs for n in self.span[i]))
        if joined is not None:
            self.joined[step.name] = joined
            if joined.whole is None:
                self._add(OpResult(step.probe, step.layer, 0, WRONG, reason=joined.error, span=passed))
            elif step.kind == CHOICE:
                self._judge_choice(step, joined, truth, chained, passed)
            else:
                self._judge(step, place, inputs, joined, truth, chained, passed)
        whole = joined.whole if joined is not None else None
        mine = self._taken(step, whole, truth)
        self.local[step.name] = mine
        self.chain[step.name] = mine if step.kind == CHOICE and whole is not None else chained
        self.span[step.name] = () if self._as_recorded(step, whole) else (*passed, step.name)
        if self.eager:
            twin = self.engine.twin(self.model, step, [self.twin[n] for n in step.inputs], place)
            self.twin[step.name] = mine if mine is not truth else twin

    def _taken(self, step: Step, whole: Known | None, truth: np.ndarray) -> np.ndarray:
        """The value that later ops are recomputed from."""
        if self._as_recorded(step, whole) and whole.known is None:
            return whole.values
        if step.kind == CHOICE:
            return truth if whole is None else merge_choice(truth, whole)
        if self._as_recorded(step, whole):
            return np.where(whole.known, whole.values, truth)
        return truth

    def _as_recorded(self, step: Step, whole: Known | None) -> bool:
        """Whether later ops can start from the recorded values: all of them, or whole rows, and not as a few printed digits."""
        exact = step.kind == CHOICE or not self.recording.quantum
        return whole is not None and exact and (whole.full or whole.rows)

    # --- one op ---

    def _judge(self, step: Step, place, inputs, joined: Joined, truth, chained, passed) -> None:
        for piece in self._pieces(step, place, inputs, joined, truth, chained):
            part = piece.part
            twin = lambda piece=piece: piece.cut(self._twin(step, piece))
            rule = partial(classify, step, self.engine, part)
            about = (lambda piece=piece: products(step, piece), passed, self.recording.quantum, len(place.pos))
            ruling = rule(piece.truth, twin, *about)
            if ruling.verdict == WRONG and passed and part.known is None and piece.truth.ndim == 2:
                settled, ties = settle(
                    self.model, self.engine, self.local, step, passed, part.values, piece.truth, ruling.bound
                )
                if ties:
                    self.ties += ties
                    piece = replace(piece, truth=settled)
                    ruling = rule(settled, twin, *about)
            result = OpResult(
                step.probe, step.layer, piece.rank, ruling.verdict, None, ruling.error, ruling.bound, ruling.reason, passed
            )
            if piece.chained is not None and part.values.shape == piece.chained.shape:
                values = soften(part.values, piece.chained, self.recording.quantum)
                result.err_chained = worst_row(values, piece.chained, part.known)
            if ruling.verdict in (WRONG, PRECISION) and part.known is None and ruling.reason != ATTENTION_IN_F16:
                self._explain(result, step, piece, ruling.bound)
            self._add(result)

    def _twin(self, step: Step, piece: "Piece") -> np.ndarray:
        """The op as rounding may leave it, with the roundings of the whole span behind it."""
        span = {n for i in step.inputs for n in self.span[i]}
        if not span:
            return self.engine.twin(self.model, step, piece.inputs, piece.place)
        made = self.twin if self.eager else self._span_twin(span)
        inputs = [made.get(n, a) for n, a in zip(step.inputs, piece.inputs, strict=True)]
        return self.engine.twin(self.model, step, inputs, piece.place)

    def _span_twin(self, span: set[str]) -> dict[str, np.ndarray]:
        """The unrecorded probes of one layer, with rounding, from the recorded ones."""
        made: dict[str, np.ndarray] = {}
        layer = next((int(n.rsplit("-", 1)[1]) for n in span if "-" in n), None)
        for step in [] if layer is None else layer_steps(self.config, layer).values():
            if step.name in span and all(n in self.local for n in step.inputs) and step.kind != CHOICE:
                inputs = [made.get(n, self.local[n]) for n in step.inputs]
                made[step.name] = self.engine.twin(self.model, step, inputs, self.engine.place(self.model, layer))
        return made

    def _pieces(self, step: Step, place, inputs, joined: Joined, truth, chained):
        """What there is to judge: the whole, each rank's columns, each rank's share of a sum."""
        if joined.kind == COLUMNS:
            start = 0
            for rank, part in joined.parts:
                cut = [slice(None)] * truth.ndim
                cut[joined.axis] = slice(start, start + part.values.shape[joined.axis])
                start, cut = cut[joined.axis].stop, tuple(cut)
                yield Piece(rank, part, place, inputs, truth[cut], chained[cut], lambda a, cut=cut: a[cut])
        elif joined.kind == PARTIAL:
            for rank, part in joined.parts:
                mine = self._share(step, place, inputs, rank)
                if mine is not None:
                    share = run(step, *mine)[0]
                    yield Piece(rank, part, *mine, share, None)
            yield Piece(0, joined.whole, place, inputs, truth, chained)
        elif joined.kind == ALONE:
            yield Piece(joined.parts[0][0], joined.whole, place, inputs, truth, chained)
        else:
            first = joined.parts[0][1]
            for rank, part in joined.parts:
                if part is first or not np.array_equal(part.values, first.values, equal_nan=True):
                    yield Piece(rank, part, place, inputs, truth, chained)

    def _share(self, step: Step, place, inputs, rank: int):
        """Place and inputs of this rank's share of a sum, from its own shard; None where the shards were not recorded."""
        mine, columns = [], None
        for name, whole in zip(step.inputs, inputs, strict=True):
            joined = self.joined.get(name)
            if joined is None or joined.kind not in (COLUMNS, PARTIAL):
                mine.append(whole)
                continue
            mine.append(dict(joined.parts)[rank].values)
            if joined.kind == COLUMNS:
                start = sum(part.values.shape[-1] for r, part in joined.parts if r < rank)
                columns = slice(start, start + mine[-1].shape[-1])
        if all(a is b for a, b in zip(mine, inputs, strict=True)):
            return None
        return rank_weights(place, step.weights, columns), mine

    def _judge_choice(self, step: Step, joined: Joined, truth, chained, passed) -> None:
        whole, layer = joined.whole, step.layer
        shared = step.probe == "top_k" and not self.config.full[layer]
        score = None if shared else self.local[step.inputs[0]]
        tolerance = self.engine.bound(step, len(self.model.pos))
        if passed and score is not None:
            name = step.inputs[0]
            twin = self.twin[name] if self.eager else self._span_twin(set(passed)).get(name, score)
            tolerance += 2 * TWIN_FACTOR * self.engine.twin_scale * worst_row(twin, score)
        gap, flips = choice_gap(whole, truth, score)
        result = OpResult(step.probe, step.layer, joined.parts[0][0], EQUAL, None, gap, tolerance, span=passed)
        if score is not None and np.isnan(score).any():
            result.verdict, result.reason = WRONG, f"{int(np.isnan(score).sum())} of the scores are NaN"
        elif gap > tolerance:
            other = "the last full layer's" if shared else "those of its own scores"
            result.verdict = WRONG
            result.reason = f"{len(flips)} rows hold other choices than {other}, the first is row {flips[0]}"
            if whole.known is None:
                place = self.engine.place(self.model, layer)
                self._explain(
                    result, step, Piece(0, whole, place, [self.local[n] for n in step.inputs], truth, chained), tolerance
                )
        elif flips:
            result.verdict = ROUNDING
            how = f"within {gap:.1e} of the scores" if gap else "between equal scores"
            result.reason = f"near tie: {len(flips)} rows chose otherwise {how}"
            self.report.notes.append(f"near tie: {step.name}, rows {clip_list(flips)}: the choice differs {how}")
        _, far = choice_gap(whole, chained, None)
        if far and not flips:
            self.flips.setdefault(step.probe, []).append(f"{step.name} ({len(far)} rows)")
        result.err_chained = len(far) / max(1, len(truth))
        self._add(result)

    def _explain(self, result: OpResult, step: Step, piece: "Piece", bound: float) -> None:
        result.structure = describe(step, self.config, piece.part.values, piece.truth)
        if step.kind != CHOICE and piece.part.values.shape == piece.truth.shape:
            result.error_map = downsample(piece.part.values, piece.truth)
        if not self.causes:
            return
        only = frozenset(self.found) if self.searches >= MAX_SEARCHES else None
        self.searches += only is None
        case = Case(
            step, piece.place, piece.inputs, piece.part.values, piece.truth, bound, piece.cut, piece.rank, self.recording.world,
            self.model, self._recorded, self.local,
        )  # fmt: skip
        cause = find_cause(case, self.skip, only)
        if (
            cause is None
            and self.span_searches < MAX_SPAN_SEARCHES
            and result.span
            and piece.truth.shape == self.local_shape(step)
        ):
            self.span_searches += 1
            path = [s for s in layer_steps(self.config, self._layer_of(result)).values() if s.name in result.span]
            cause = find_span_cause(case, path, self.engine, self.skip)
        if cause is not None:
            result.cause = cause.as_dict()
            self.found.append(cause.family)
            result.verdict = PRECISION if cause.precision else WRONG

    def local_shape(self, step: Step) -> tuple[int, ...]:
        return PROBES[step.probe].shape(self.config, len(self.model.pos), step.layer)

    def _layer_of(self, result: OpResult) -> int:
        return self.config.n_layers - 1 if result.layer is None else result.layer

    def _recorded(self, name: str) -> np.ndarray | None:
        """Another probe as the engine has it, in full."""
        probe, _, layer = name.rpartition("-")
        shape = PROBES[probe or name].shape(self.config, len(self.model.pos), int(layer) if probe else None)
        joined = self.recording.joined(name, shape)
        return joined.whole.values if joined is not None and joined.whole is not None and joined.whole.full else None

    def _add(self, result: OpResult) -> None:
        self.report.ops.append(result)

    # --- the whole ---

    def _summarise(self) -> None:
        report = self.report
        engines.benign_throughout(report, self.engine)
        wrong = any(o.verdict == WRONG for o in report.ops)
        for probe, where in self.flips.items():
            report.notes.append(
                f"{'choices' if wrong else 'near-tie flips'}: {probe} differs from the reference's own run in {', '.join(where[:4])}{' ...' * (len(where) > 4)}; "
                "each follows from the engine's own scores, and the other's choice was injected"
            )
        if self.ties:
            rows = ", ".join(f"{name} row {row}" for name, row in self.ties[:4]) + " ..." * (len(self.ties) > 4)
            report.notes.append(
                f"near ties in choices that were not recorded ({rows}): the engine broke them otherwise, as its values show"
            )
        compared = [o for o in report.ops if o.verdict != NOT_COMPARABLE]
        report.verdict = max((o.verdict for o in compared), key=SEVERITY.index, default=NOT_COMPARABLE)
        bad = [o for o in compared if o.verdict in (PRECISION, WRONG)]
        worst = [o for o in bad if o.verdict == report.verdict]
        if worst:
            first = worst[0]
            report.guilty = {"op": first.op, "layer": first.layer, "rank": first.rank}
            report.cause = first.cause
        visible = [o for o in compared if o.err_chained is not None and not o.err_chained <= 10 * (o.bound or 0)]
        if visible or bad:
            first = min(visible[:1] + bad[:1], key=report.ops.index)
            report.first_divergence = {
                "op": first.op, "layer": first.layer, "rank": first.rank, "err_chained": first.err_chained,
            }  # fmt: skip
        if len(self.model.pos) <= self.config.indexer_top_k:
            report.notes.append(
                f"indexer faults not exercised: needs more than top_k = {self.config.indexer_top_k} tokens, has {len(self.model.pos)}"
            )


def products(step: Step, piece: Piece) -> np.ndarray | None:
    """sqrt(x^2 . w^2) of each of the op's sums of products: what the rounding of their operands is measured in."""
    if step.kind != MATMUL or len(step.weights) != 1 or step.probe.startswith("indexer"):
        return None
    name = step.weights[0]
    squares = with_weights(piece.place, **{name: MappedWeight(getattr(piece.place.w, name), lambda w, first: w * w)})
    inputs = [a.astype(np.float64) ** 2 if a.dtype.kind == "f" else a for a in piece.inputs]
    return np.sqrt(np.abs(piece.cut(run(step, squares, inputs)[0])))


def merge_choice(truth: np.ndarray, whole: Known) -> np.ndarray:
    """A partly known choice [T,K]: the known entries where they stand, the rest filled with the truth's best others."""
    merged = np.array(truth)
    for t, known in enumerate(whole.known):
        if known.any():
            mine = whole.values[t][known]
            rest = [e for e in truth[t] if e not in set(mine.tolist())]
            merged[t, known] = mine
            merged[t, ~known] = rest[: int((~known).sum())]
    return merged


def clip_list(values) -> str:
    """1, 2, 3, ... (count)"""
    values = [int(v) for v in values]
    return ", ".join(map(str, values[:6])) + (f", ... ({len(values)})" if len(values) > 6 else "")
