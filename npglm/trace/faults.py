"""Why an op is wrong: hypotheses, each computed and held against what the engine made.

A hypothesis is a generator: case -> (name, what would then come out). What comes out is an array, or a Change: the op run again with
other inputs, weights, verbs or config. The one that reproduces the engine's values within the op's bound is named; none that comes
merely close is. Numbers in comments are those of shared/field/faults.md.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import combinations, islice

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from npglm.checkpoint import INDEXER_TENSORS
from npglm.trace.graph import (
    ATTENTION,
    CHOICE,
    ELEMENTWISE,
    GATHER,
    MATMUL,
    NORM,
    ROPE,
    SCORE,
    Step,
    layer_steps,
    model_steps,
    run,
)
from npglm.trace.judge import choice_gap
from npglm.trace.metrics import errors, worst_row
from npglm.trace.probes import MODEL, PROBES
from npglm.trace.recording import Known
from npglm.trace.structure import ranges
from npglm.trace.weights import ArrayWeight, ColumnSlice, MappedWeight, with_weights
from reference.numerics import round_bf16
from reference.ops import quantize_q8_0, quantize_q8_k

ACCEPT = 2.0  # times the op's bound: the hypothesis is computed in f64, the engine was not
MAX_PAIRS = 200
PAIRS_OF_FAMILY = 8
SPAN_TIE = 1e-4  # of the scores: which choices are as good as ours
SPAN_ROWS = 0.02  # share of rows whose choice may differ still


@dataclass(frozen=True)
class Cause:
    """residual, baseline: worst_row of the hypothesis, and of the reference as it is, against the engine's values."""

    name: str
    family: str
    residual: float
    baseline: float
    runner_up: tuple[str, float] | None = None
    precision: bool = False

    def as_dict(self) -> dict:
        other = None if self.runner_up is None else {"name": self.runner_up[0], "residual": self.runner_up[1]}
        return {
            "name": self.name, "residual": self.residual, "runner_up": other, "baseline": self.baseline, "family": self.family,
        }  # fmt: skip


@dataclass(frozen=True)
class Change:
    """How to run a step otherwise. inputs: index -> array; post: of the output. Two changes of different parts can be combined."""

    inputs: dict = field(default_factory=dict)
    weights: dict = field(default_factory=dict)
    verbs: dict = field(default_factory=dict)
    config: dict = field(default_factory=dict)
    table: tuple | None = None
    pos: np.ndarray | None = None
    post: Callable | None = None

    def __or__(self, other: "Change") -> "Change | None":
        for part in ("inputs", "weights", "verbs", "config"):
            if set(getattr(self, part)) & set(getattr(other, part)):
                return None
        if any(getattr(self, p) is not None and getattr(other, p) is not None for p in ("table", "pos", "post")):
            return None
        return Change(
            self.inputs | other.inputs, self.weights | other.weights, self.verbs | other.verbs, self.config | other.config,
            self.table or other.table, other.pos if self.pos is None else self.pos, self.post or other.post,
        )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One failing op. values: what the engine has (one rank's part); truth: what it should be; cut: whole op -> that part.

    place, inputs: what the truth was computed from. recorded(name) -> another probe as the engine has it, or None.
    """

    step: Step
    place: object
    inputs: list
    values: np.ndarray
    truth: np.ndarray
    bound: float
    cut: Callable
    rank: int
    world: int
    model: object
    recorded: Callable
    local: dict

    @property
    def c(self):
        return self.place.c

    def run(self, change: Change) -> np.ndarray:
        place = self.place
        if change.config:
            place = replace(place, c=replace(place.c, **change.config))
        if change.weights:
            place = with_weights(place, **change.weights)
        if change.verbs:
            ops = copy(place.o)
            for name, verb in change.verbs.items():
                setattr(ops, name, verb)
            place = replace(place, o=ops)
        if change.table is not None:
            place = replace(place, table=change.table)
        if change.pos is not None:
            place = replace(place, pos=change.pos)
        inputs = [change.inputs.get(i, a) for i, a in enumerate(self.inputs)]
        out = run(self.step, place, inputs)[0]
        return self.cut(out if change.post is None else change.post(out))

    def weight(self, name: str | None = None):
        return getattr(self.place.w, name or self.step.weights[0])

    def input(self, probe: str) -> int | None:
        """Index of the input that is this probe."""
        return next((i for i, n in enumerate(self.step.inputs) if n.rsplit("-", 1)[0] == probe), None)


@dataclass(frozen=True)
class Hypothesis:
    family: str
    kinds: tuple[str, ...]
    probes: tuple[str, ...]
    make: Callable
    precision: bool

    def applies(self, step: Step) -> bool:
        return step.kind in self.kinds or step.probe in self.probes


HYPOTHESES: list[Hypothesis] = []


def hypothesis(family: str, *kinds: str, probes: str = "", precision: bool = False):
    def register(make):
        HYPOTHESES.append(Hypothesis(family, kinds, tuple(probes.split()), make, precision))
        return make

    return register


def find_cause(case: Case, skip: frozenset[str] = frozenset(), only: frozenset[str] | None = None) -> Cause | None:
    """Compute every hypothesis that applies; the best that reproduces the engine's values, or None.

    skip: families left out. only: families to try, None = all.
    """
    if case.values.shape != case.truth.shape:
        return None
    residual_of = choice_distance if case.step.kind == CHOICE else worst_row
    baseline = residual_of(case.values, case.truth)
    limit = ACCEPT * case.bound if case.step.kind != CHOICE else 0.0
    wrong = wrong_rows(case)
    tried: list[tuple] = []  # (residual, order, name, hypothesis, what it made, rms of what fits)
    for i, h in enumerate(HYPOTHESES):
        if h.family in skip or (only is not None and h.family not in only) or not h.applies(case.step):
            continue
        with np.errstate(all="ignore"):
            for name, result in predictions(h, case):
                made = computed(case, result)
                residual, name = residual_in(case, made, wrong, name, residual_of) if made is not None else (np.inf, name)
                close = rms(case.values, made) if residual <= limit else 0.0
                tried.append((residual, i, name, h, result, close))
    tried = [t for t in tried if np.isfinite(t[0])]
    tried.sort(key=lambda t: (t[0] > limit, t[1] if t[0] <= limit else 0, t[5], t[0]))  # of what fits, the more specific first
    if not any(t[0] <= limit for t in tried) and case.step.kind != CHOICE and only is None:
        tried = _combined(case, tried, limit) + tried
    if not tried or tried[0][0] > limit:
        return None
    residual, _, name, h, *_ = tried[0]
    other = next(((t[2], float(t[0])) for t in sorted(tried[1:], key=lambda t: t[0]) if t[3].family != h.family), None)
    return Cause(name, h.family, float(residual), float(baseline), other, h.precision)


def find_span_cause(case: Case, path: list[Step], engine, skip: frozenset[str] = frozenset()) -> Cause | None:
    """As find_cause, where the ops of `path` before case.step were not recorded: a hypothesis about any of them, carried on to the step.

    A change of verbs, config, rope table or inputs is also tried on all ops of the span at once. What is solved from an op's own output
    cannot be tried here.
    """
    choice = case.step.kind == CHOICE
    residual_of = choice_distance if choice else worst_row
    limit = SPAN_ROWS if choice else ACCEPT * case.bound
    baseline = residual_of(case.values, case.truth)
    tried: list[tuple] = []
    for at, step in enumerate(path):
        inputs = [case.local[n] for n in step.inputs]
        here = case.local[step.name]
        sub = replace(case, step=step, place=engine.place(case.model, step.layer), inputs=inputs, values=here, truth=here)
        for i, h in enumerate(HYPOTHESES):
            if h.family in skip or not h.applies(step):
                continue
            with np.errstate(all="ignore"):
                for name, result in predictions(h, sub):
                    value = computed(sub, result)
                    if value is None or value.shape != here.shape:
                        continue
                    tried.append(
                        (_residual(case, path, engine, {step.name: value}, None, residual_of), i, f"{step.name}: {name}", h)
                    )
                    if isinstance(result, Change) and not result.weights and at + 1 < len(path):
                        made = _residual(case, path, engine, {}, (step, h, result), residual_of)
                        tried.append((made, i, f"from {step.name} on: {name}", h))
    tried = sorted((t for t in tried if np.isfinite(t[0])), key=lambda t: t[0])
    if not tried or tried[0][0] > limit or tried[0][0] > 0.25 * baseline:
        return None
    residual, _, name, h = tried[0]
    other = next(((t[2], float(t[0])) for t in tried if t[3].family != h.family), None)
    return Cause(name, h.family, float(residual), float(baseline), other, h.precision)


def _residual(case: Case, path: list[Step], engine, given: dict, everywhere, residual_of) -> float:
    """Carry `given` values, or a change on all ops of the span that it applies to, on to the failing step."""
    made = dict(given)
    try:
        for step in [*path, case.step]:
            if step.name in given:
                continue
            place = engine.place(case.model, step.layer)
            inputs = [made.get(n, case.local[n]) for n in step.inputs]
            change = None
            if everywhere is not None:
                first, h, result = everywhere
                moved = {first.inputs[i]: a for i, a in result.inputs.items()}
                again = {i: moved[n] for i, n in enumerate(step.inputs) if n in moved}
                same = h.applies(step) and not result.inputs
                change = replace(result, inputs=again, post=None) if again or same else None
            if change is not None:
                made[step.name] = replace(case, step=step, place=place, inputs=inputs, cut=lambda a: a).run(change)
            elif any(n in made for n in step.inputs):
                made[step.name] = run(step, place, inputs)[0]
    except (IndexError, ValueError):
        return np.inf
    out = made.get(case.step.name)
    if case.step.kind == CHOICE and out is not None:
        score = made.get(case.step.inputs[0], case.local[case.step.inputs[0]])
        _, off = choice_gap(Known(case.values), out, score, SPAN_TIE)
        return len(off) / len(out)
    return residual_of(case.values, out) if out is not None and out.shape == case.values.shape else np.inf


def _combined(case: Case, tried: list, limit: float) -> list:
    """Two hypotheses together, and one with a constant factor on top."""
    found = []
    for residual, i, name, h, result, _ in tried[:12]:
        made = computed(case, result)
        if made is None or made.shape != case.values.shape:
            continue
        factor = best_factor(case.values, made)
        if residual < 1 and factor is not None and abs(factor - 1) > 1e-3:
            left = worst_row(case.values, factor * made)
            if left <= limit:
                found.append((left, i, f"{name}, times {factor:.4g}", h, result, 0.0))
    changes = [t for t in tried if isinstance(t[4], Change)]
    best: dict[str, list] = {}
    for t in changes:
        best.setdefault(t[3].family, []).append(t)
    some = [t for family in best.values() for t in family[:PAIRS_OF_FAMILY]]
    pairs = ((a, b) for a, b in combinations(some, 2) if a[3].family != b[3].family)
    for a, b in islice(pairs, MAX_PAIRS):
        both = a[4] | b[4]
        if both is None:
            continue
        made = computed(case, both)
        left = worst_row(case.values, made) if made is not None and made.shape == case.values.shape else np.inf
        if left <= limit:
            found.append((left, a[1], f"{a[2]} and {b[2]}", a[3], both, 0.0))
    return sorted((f for f in found if np.isfinite(f[0])), key=lambda f: f[0])


def predictions(h: Hypothesis, case: Case):
    """What the hypothesis yields, up to where this recording's shapes do not allow it: one hypothesis must not end the report."""
    try:
        yield from h.make(case)
    except (ValueError, IndexError, KeyError, TypeError, np.linalg.LinAlgError):
        return


def computed(case: Case, result) -> np.ndarray | None:
    """The array that a hypothesis predicts; None where its change does not fit this model's shapes."""
    try:
        return case.run(result) if isinstance(result, Change) else np.asarray(result)
    except (IndexError, ValueError):
        return None


def wrong_rows(case: Case) -> np.ndarray | None:
    """The token rows that are wrong, when some are right; None otherwise."""
    if case.step.kind == CHOICE:
        return None
    rows = np.array([worst_row(v[None], t[None]) for v, t in zip(case.values, case.truth, strict=True)])
    wrong = ~(rows <= 2 * case.bound)
    return wrong if 0 < wrong.sum() < len(wrong) else None


def residual_in(case: Case, made: np.ndarray, wrong, name: str, residual_of) -> tuple[float, str]:
    """The residual; if only some rows are wrong, the hypothesis may hold for those alone."""
    if made.shape != case.values.shape:
        return np.inf, name
    residual = residual_of(case.values, made)
    if wrong is None or residual <= ACCEPT * case.bound:
        return residual, name
    partly = case.truth.copy()
    partly[wrong] = made[wrong]
    inside = residual_of(case.values, partly)
    return (inside, f"{name}, rows {ranges(np.flatnonzero(wrong))}") if not residual <= inside else (residual, name)


def rms(values: np.ndarray, made: np.ndarray) -> float:
    """Tells near neighbours apart, such as two values of eps, better than the largest error does."""
    return errors(values, made).rms if values.shape == made.shape else 0.0


def choice_distance(values: np.ndarray, made: np.ndarray) -> float:
    """Share of rows whose sets differ."""
    same = [set(a[a >= 0].tolist()) == set(b[b >= 0].tolist()) for a, b in zip(values, made, strict=True)]
    return 1 - float(np.mean(same)) if same else 0.0


def best_factor(values: np.ndarray, made: np.ndarray) -> float | None:
    """Least squares c of values = c * made."""
    ok = np.isfinite(values) & np.isfinite(made)
    a, b = np.asarray(made, np.float64)[ok], np.asarray(values, np.float64)[ok]
    return float(a @ b / (a @ a)) if a.size and a @ a > 0 else None


def raw(weight):
    """The checkpoint's own tensor behind caches and slices."""
    while hasattr(weight, "tensor"):
        weight = weight.tensor
    return weight


# --- tensor parallel: shards and ranks (faults 1-4) -------------------------------------------------------------------------


@hypothesis("wrong shard", MATMUL, ELEMENTWISE, ATTENTION, ROPE)
def other_ranks_shard(case):
    """1, 2: this rank holds what another should hold."""
    if case.world < 2:
        return
    whole = run(case.step, case.place, case.inputs)[0]
    axis = next((a for a in range(1, whole.ndim) if whole.shape[a] != case.values.shape[a]), None)
    if axis is None:
        return
    width = case.values.shape[axis]
    for other in range(case.world):
        if other != case.rank:
            yield (
                f"rank {case.rank} holds rank {other}'s shard",
                np.take(whole, range(other * width, (other + 1) * width), axis),
            )


@hypothesis("wrong shard", MATMUL)
def other_ranks_columns(case):
    """1: this rank's part of the inputs meets the weights of another rank's."""
    for name in case.step.weights:
        columns = getattr(case.weight(name), "columns", None)
        if columns is None:
            continue
        width = columns.stop - columns.start
        for other in range(case.world):
            if other != case.rank:
                cut = ColumnSlice(case.weight(name).tensor, slice(other * width, (other + 1) * width))
                yield f"rank {case.rank} holds rank {other}'s shard of {name}", Change(weights={name: cut})


@hypothesis("split inside a block", MATMUL)
def split_inside_block(case):
    """3, 4: the row's bytes were cut where no block begins."""
    for name in case.step.weights:
        weight = case.weight(name)
        columns = getattr(weight, "columns", None)
        if columns is None:
            continue
        tensor = raw(weight)
        block, block_bytes = GGML_QUANT_SIZES[tensor.type]
        row_bytes, width = tensor.data.shape[-1], columns.stop - columns.start
        for label, start in (
            ("cut at the byte", row_bytes * columns.start // tensor.shape[-1]),
            ("start rounded down to a block", columns.start // block * block_bytes),
            ("start rounded up to a block", -(-columns.start // block) * block_bytes),
        ):
            stop = start + -(-width // block) * block_bytes

            def change(rows, first, tensor=tensor, start=start, stop=stop, width=width):
                data = tensor.data[first : first + len(rows), start:stop]
                data = np.pad(data, ((0, 0), (0, stop - start - data.shape[1])))
                return dequantize(np.ascontiguousarray(data), tensor.type)[:, :width]

            yield (
                f"{name} split inside a block of {block}: {label}",
                Change(weights={name: MappedWeight(tensor, change, width)}),
            )


# --- rope (8-16) ------------------------------------------------------------------------------------------------------------


def half_split(x, table):
    """Pairs (x[i], x[i + n/2])."""
    n = x.shape[-1] // 2
    cos, sin = (t.reshape(len(x), *(1,) * (x.ndim - 2), -1) for t in table)
    a, b = x[..., :n], x[..., n:]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def half_split_of_pairs(x, table):
    """Half-split turning, written back in pairs."""
    y = half_split(x, table)
    n = x.shape[-1] // 2
    return np.stack([y[..., :n], y[..., n:]], axis=-1).reshape(x.shape)


ROPED = "q_pe k_pe indexer_q indexer_k"


@hypothesis("rope pairs half-split", probes=ROPED)
def rope_half_split(case):
    """8, 9, 10, 14"""
    yield "rope turns half-split pairs (i, i + n/2) instead of neighbours", Change(verbs={"rope": half_split})
    yield "half-split rope written back as pairs", Change(verbs={"rope": half_split_of_pairs})
    order = lambda x: np.concatenate([x[..., 0::2], x[..., 1::2]], -1)
    verb = case.place.o.rope
    yield "rope's output de-interleaved", Change(verbs={"rope": lambda x, t: order(verb(x, t))})


@hypothesis("rope base or dims", probes=ROPED)
def rope_frequencies(case):
    """12, 13, 15: another theta, or frequencies over another number of dims."""
    c, table = case.c, case.place.o.rope_table
    thetas = sorted({1e4, 1e5, 5e5, 1e6, 5e6, 8e6, 1e7, solved_theta(case)} - {c.rope_theta, None})
    for theta in thetas:
        yield f"rope theta {theta:g} instead of {c.rope_theta:g}", Change(table=table(case.place.pos, c.rope, theta))
    for n in sorted({c.nope + c.rope, c.nope, 2 * c.rope, c.indexer_dim, c.v_dim, c.kv_rank + c.rope, 64, 128, 192} - {c.rope}):
        frequency = np.float64(c.rope_theta) ** (-np.arange(0, c.rope, 2) / n)
        angle = case.place.pos[:, None] * frequency
        yield f"rope frequencies over {n} dims instead of {c.rope}", Change(table=(np.cos(angle), np.sin(angle)))


def solved_theta(case) -> float | None:
    """theta from the angle of the second pair at position 1, where the values allow it."""
    c = case.c
    if len(case.values) < 2 or c.rope < 4:
        return None
    plain = case.run(Change(verbs={"rope": lambda x, t: x}))
    start = slice(0, c.rope)
    before, after = (np.asarray(a, np.float64)[1].reshape(-1, a.shape[-1])[:, start] for a in (plain, case.values))
    z = np.sum((after[:, 2] + 1j * after[:, 3]) * (before[:, 2] - 1j * before[:, 3]))
    angle = np.angle(z)
    return float(np.float32(f"{angle ** (-c.rope / 2):.3g}")) if 1e-6 < angle < 1 else None


@hypothesis("rope positions", probes=ROPED)
def rope_positions(case):
    c, pos, table = case.c, case.place.pos, case.place.o.rope_table
    cos, sin = case.place.table
    yield "rope turns the other way", Change(table=(cos, -sin))
    yield "no rope", Change(verbs={"rope": lambda x, t: x})
    for shift in (1, -1):
        yield f"rope positions off by {shift:+d}", Change(table=table(pos + shift, c.rope, c.rope_theta))
    yield "every token at position 0 + 1", Change(table=table(np.ones_like(pos), c.rope, c.rope_theta))
    for n in (8, 16, 32, 64, 128, 256, 512):
        if n < len(pos):
            yield f"rope positions start anew every {n} tokens", Change(table=table(pos % n, c.rope, c.rope_theta))
    for factor in (0.25, 0.5, 2, 4):
        yield f"rope positions times {factor:g}", Change(table=table(pos * np.float64(factor), c.rope, c.rope_theta))
    if case.step.probe.startswith("indexer"):
        verb, n = case.place.o.rope, c.rope
        flip = lambda x, t: x

        def last_dims(out):
            raw = run(case.step, replace(case.place, o=_with(case.place.o, rope=flip)), case.inputs)[0]
            return np.concatenate([raw[..., :-n], verb(raw[..., -n:], case.place.table)], -1)

        yield "the indexer's last dims are turned instead of its first", Change(post=last_dims)


def _with(ops, **verbs):
    ops = copy(ops)
    for name, verb in verbs.items():
        setattr(ops, name, verb)
    return ops


# --- norms (17, 18, and q_a/kv_a at another eps) -----------------------------------------------------------------------------


@hypothesis("norm eps", NORM, probes="indexer_k")
def norm_eps(case):
    key = "indexer_eps" if case.step.probe == "indexer_k" else "rms_eps"
    now = getattr(case.c, key)
    for eps in (0.0, 1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 5e-6, 2e-5):
        if eps != now:
            yield f"norm eps {eps:g} instead of {now:g}", Change(config={key: eps})


@hypothesis("another norm", NORM, probes="indexer_k")
def other_norm(case):
    """17: RMSNorm for LayerNorm and the like."""
    eps = case.c.indexer_eps if case.step.probe == "indexer_k" else case.c.rms_eps
    ops = case.place.o

    def rms_for_layer(x, w, b, e):
        return ops.rms_norm(x, w, e)

    def rms_with_bias(x, w, b, e):
        return ops.rms_norm(x, w, e) + b.decode()

    def layer_for_rms(x, w, e):
        zero = ArrayWeight(np.zeros(w.shape, np.float32), w)
        return ops.layer_norm(x, w, zero, e)

    if case.step.probe == "indexer_k":
        yield "RMSNorm without bias instead of LayerNorm", Change(verbs={"layer_norm": rms_for_layer})
        yield "RMSNorm with the bias instead of LayerNorm", Change(verbs={"layer_norm": rms_with_bias})
        yield (
            "LayerNorm's bias left out",
            Change(verbs={"layer_norm": lambda x, w, b, e: ops.layer_norm(x, w, b, e) - b.decode()}),
        )
        yield "no norm of the indexer's keys", Change(verbs={"layer_norm": lambda x, w, b, e: np.asarray(x, np.float64)})
        return
    yield "LayerNorm instead of RMSNorm", Change(verbs={"rms_norm": layer_for_rms})
    yield "no norm", Change(verbs={"rms_norm": lambda x, w, e: np.asarray(x, np.float64)})
    yield "norm without its weight", Change(verbs={"rms_norm": lambda x, w, e: ops.rms_norm(x, w, e) / w.decode()})
    yield (
        "norm with weight + 1",
        Change(verbs={"rms_norm": lambda x, w, e: ops.rms_norm(x, w, e) / w.decode() * (1 + w.decode())}),
    )
    weight = case.weight().decode()
    x = case.inputs[0].astype(np.float64)
    n = case.truth.shape[-1]
    if x.shape[-1] > n:
        over_all = x[:, :n] / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight
        yield f"the mean square is taken over all {x.shape[-1]} values", over_all
    lanes = x[:, :n]
    for count in (n // 2, 64, 32):
        if 0 < count < n:
            mean = np.sum(lanes[:, :count] ** 2, -1, keepdims=True)
            yield f"the mean square sums the first {count} values only", lanes / np.sqrt(mean / n + eps) * weight
            yield f"the mean square is that of the first {count} values", lanes / np.sqrt(mean / count + eps) * weight
    for block, keep in ((64, 32), (32, 16)):  # 70: half of the lanes
        if n % block == 0:
            some = lanes.reshape(len(x), -1, block)[..., :keep]
            mean = np.sum(some**2, (-1, -2))[:, None]
            yield f"the sum of squares counts {keep} of every {block} values", lanes / np.sqrt(mean / n + eps) * weight


# --- indexer: scores and choices (21-31) -------------------------------------------------------------------------------------


@hypothesis("indexer score", SCORE)
def score_variants(case):
    q, k, weights = (a.astype(np.float64) for a in case.inputs)
    causal = np.tril(np.ones(case.truth.shape, bool))

    def score(q=q, k=k, weights=weights, relu=True):
        dots = np.einsum("tij,sj->tis", q, k)
        return np.where(causal, np.einsum("ti,tis->ts", weights, np.maximum(dots, 0) if relu else dots), -np.inf)

    yield "no relu in the indexer's score", score(relu=False)
    yield "the heads' weights left out", score(weights=np.ones_like(weights))
    yield (
        "the absolute value instead of relu",
        np.where(causal, np.einsum("ti,tis->ts", weights, np.abs(np.einsum("tij,sj->tis", q, k))), -np.inf),
    )
    p = case.c.rope
    yield "only the rope dims are scored", score(q=q[..., :p], k=k[..., :p])
    yield "the rope dims are left out", score(q=q[..., p:], k=k[..., p:])
    for first in range(1, weights.shape[1]):
        yield (
            f"only the first {first} heads are summed",
            score(weights=np.where(np.arange(weights.shape[1]) < first, weights, 0)),
        )
    for page in (8, 16, 32, 64, 128, 256, 512, 1024):  # 21, 24: paged keys
        if page < len(k):
            yield f"keys past {page} are read from position mod {page}", score(k=k[np.arange(len(k)) % page])
            stop = np.arange(len(k)) < page
            yield f"scores past column {page} are zero", np.where(stop | ~causal, score(), 0.0)
    yield "keys shifted by one position", score(k=np.roll(k, 1, 0))
    full = np.einsum("ti,tis->ts", weights, np.maximum(np.einsum("tij,sj->tis", q, k), 0))
    yield "the causal mask is missing", full
    yield "a token does not see itself", np.where(np.tril(causal, -1), full, -np.inf)


@hypothesis("indexer score precision", SCORE, precision=True)
def score_precision(case):
    """28"""
    for name, cast in ROUND.items():
        yield f"indexer score rounded to {name}", cast(case.truth)
        q, k, _ = case.inputs
        for what, inputs in (("keys", {1: cast(k)}), ("queries and keys", {0: cast(q), 1: cast(k)}), ("queries", {0: cast(q)})):
            yield f"the indexer's {what} rounded to {name}", Change(inputs=inputs)


@hypothesis("top-k", probes="top_k")
def top_k_variants(case):
    """24-31: what else the set may have been taken from."""
    layer, c = case.step.layer, case.c
    pos, width = case.place.pos, case.values.shape[1]
    select = case.place.o.select_top_k
    n = len(pos)
    for other in range(max(0, layer - 8), layer):
        theirs = case.local.get(f"top_k-{other}")
        if theirs is not None and not np.array_equal(theirs, case.truth):
            yield f"top-k of layer {other} carried on", theirs
    if c.full[layer]:
        score = case.inputs[0]
        for name, cast in ROUND.items():
            yield f"top-k chosen from scores in {name}", select(cast(score), pos, c.indexer_top_k)
        yield "the smallest scores are chosen", select(np.where(np.isfinite(score), -score, score), pos, c.indexer_top_k)
        yield "chosen by magnitude", select(np.abs(score), pos, c.indexer_top_k)
        everywhere = np.argsort(-score, axis=-1, kind="stable")[:, :width]
        yield "future tokens take places", np.where(everywhere <= pos[:, None], everywhere, -1)
        for less in (1, 2):
            yield (
                f"{less} of the top-k missing",
                select(score, pos, c.indexer_top_k - less)[:, :width] if width > less else case.truth,
            )
        itself = np.eye(*score.shape, dtype=bool)
        yield "a token cannot choose itself", select(np.where(itself & (pos > 0)[:, None], np.nan, score), pos, c.indexer_top_k)
        for page in (8, 16, 32, 64, 128, 256):
            if page < n:
                cut = np.where(np.arange(n) < page, score, -np.inf)
                chosen = select(cut, np.minimum(pos, page - 1), c.indexer_top_k)
                yield f"only the first {page} tokens can be chosen", chosen
    recent = [np.arange(max(0, t + 1 - width), t + 1) for t in range(n)]
    yield "the most recent tokens", np.array([np.pad(r, (0, width - len(r)), constant_values=-1) for r in recent])
    first = [np.arange(min(width, t + 1)) for t in range(n)]
    yield "the first tokens", np.array([np.pad(r, (0, width - len(r)), constant_values=-1) for r in first])
    yield "each token chooses itself alone", np.where(np.arange(width) == 0, pos[:, None], -1)
    own = own_top_k(case)
    if own is not None:
        yield "a shared layer ran its own indexer", own


def own_top_k(case) -> np.ndarray | None:
    """29: top-k of a shared layer from the indexer tensors that the file holds for it all the same."""
    model, layer = case.model, case.step.layer
    tensors = model.checkpoint.tensors
    named = {a: tensors.get(f"blk.{layer}.{suffix}") for a, (suffix, *_) in INDEXER_TENSORS.items()}
    if case.c.full[layer] or any(t is None for t in named.values()):
        return None
    place = with_weights(case.place, **named)
    full = list(case.c.full)
    full[layer] = True
    steps = layer_steps(replace(case.c, full=tuple(full)), layer)
    values = dict(case.local)
    for name in ("indexer_k", "indexer_q", "indexer_weights", "indexer_score", "top_k"):
        step = steps[name]
        if any(i not in values for i in step.inputs):
            return None
        values[step.name] = run(step, place, [values[i] for i in step.inputs])[0]
    return values[f"top_k-{layer}"]


# --- attention (5, 16, 24-26, 50, 55, 58) ------------------------------------------------------------------------------------


@hypothesis("attention scale", ATTENTION)
def attention_scale(case):
    """16: mscale, or the scale of other dims."""
    c = case.c
    now = c.attn_scale
    known = {
        f"1/sqrt({c.nope})": c.nope**-0.5, f"1/sqrt({c.kv_rank + c.rope})": (c.kv_rank + c.rope) ** -0.5,
        f"1/sqrt({c.kv_rank})": c.kv_rank**-0.5, f"1/sqrt({c.v_dim})": c.v_dim**-0.5, "1": 1.0, f"1/sqrt({c.rope})": c.rope**-0.5,
        "applied twice": now**2,
    }  # fmt: skip
    for name, scale in known.items():
        yield f"attention scale {name} instead of 1/sqrt({c.nope + c.rope})", scaled_attention(case, scale / now)
    for factor in (2, 4, 8, 16, 32, 40, 64):
        mscale = 0.1 * np.log(factor) + 1
        for power in (1, 2, 4):
            yield (
                f"attention scale x {mscale**power:.4g} (YaRN mscale of {factor}, power {power})",
                scaled_attention(case, mscale**power),
            )
    factor = solve(lambda f: worst_row(case.values, case.run(scaled_attention(case, f))), 0.3, 3.0)
    yield f"attention scale x {factor:.4g}", scaled_attention(case, factor)


def scaled_attention(case, factor: float) -> Change:
    verb = case.place.o.attention
    return Change(verbs={"attention": lambda q, k, top, pos, rank, s: verb(q, k, top, pos, rank, s * factor)})


def solve(error: Callable, low: float, high: float, steps: int = 40) -> float:
    """Golden section over log(factor)."""
    a, b, g = np.log(low), np.log(high), (5**0.5 - 1) / 2
    for _ in range(steps):
        c, d = b - g * (b - a), a + g * (b - a)
        a, b = (a, d) if error(np.exp(c)) < error(np.exp(d)) else (c, b)
    return float(np.exp((a + b) / 2))


@hypothesis("attended tokens", ATTENTION)
def attended_tokens(case):
    """24, 26, 29, 55: another set of rows, or rows from elsewhere."""
    top, pos, n = case.inputs[4], case.place.pos, len(case.place.pos)
    causal = np.where(np.tril(np.ones((n, n), bool)), np.arange(n), -1)
    yield "dense attention: the top-k is not used", Change(inputs={4: causal})
    yield "-1 in the top-k is read as the last token", Change(inputs={4: np.where(top < 0, n - 1, top)}, pos=np.full(n, n))
    yield "-1 in the top-k is read as token 0", Change(verbs={"attention": repeated(case, 0)})
    yield "-1 in the top-k is read as the newest token", Change(verbs={"attention": repeated(case, None)})
    for name in (f"top_k-{i}" for i in range(max(0, case.step.layer - 4), case.step.layer)):
        other = case.local.get(name)
        if other is not None and not np.array_equal(other, top):
            yield f"attends with {name}", Change(inputs={4: other})
    for size in (8, 16, 32, 64, 128, 256, 512):  # 55: a ubatch's mask; 24: wrapped indices
        if size >= n:
            break
        yield f"rows past {size} use the mask of position mod {size}", Change(pos=pos % size)
        wrapped = [a[np.arange(n) % size] for a in case.inputs[2:4]]
        yield f"cache rows past {size} are read from row mod {size}", Change(inputs={2: wrapped[0], 3: wrapped[1]})
        late = top.copy()
        late[(late >= size)] = -1
        yield f"tokens past {size} are not attended", Change(inputs={4: late}) if (late >= 0).any(1).all() else case.truth
        ubatch = np.where(top // size == (pos // size)[:, None], top, -1)
        none = ~((ubatch >= 0) & (ubatch <= pos[:, None])).any(1)
        ubatch[none, 0] = pos[none]
        yield f"tokens of earlier batches of {size} are not attended", Change(inputs={4: ubatch})
    yield "a token does not attend to itself", Change(inputs={4: np.where(top == pos[:, None], -1, top)})
    yield (
        "cache rows are one position late",
        Change(inputs={2: np.roll(case.inputs[2], 1, 0), 3: np.roll(case.inputs[3], 1, 0)}),
    )


def repeated(case, token: int | None):
    """Attention that takes each -1 as one more occurrence of `token` (None: the row's own)."""
    verb = case.place.o.attention

    def attention(q, cache, top_k, pos, rank, scale):
        chosen = np.where(top_k < 0, pos[:, None] if token is None else token, top_k)
        return verb(q, cache, chosen, np.full_like(pos, len(cache)), rank, scale)

    return attention


@hypothesis("attention operands", ATTENTION)
def attention_operands(case):
    """50, 58 and rope left out: what attention was given."""
    absorbed, q_pe, latent, *_ = case.inputs
    yield "the rope part of the scores is left out", Change(inputs={1: np.zeros_like(q_pe)})
    yield "the latent part of the scores is left out", Change(inputs={0: np.zeros_like(absorbed)})
    raw_q, raw_kv, c = case.local.get(f"q-{case.step.layer}"), case.local.get(f"kv_cmpr_pe-{case.step.layer}"), case.c
    if raw_kv is not None:
        yield "keys before rope", Change(inputs={3: raw_kv[:, c.kv_rank :]})
        yield "the latent before its norm", Change(inputs={2: raw_kv[:, : c.kv_rank]})
    if raw_q is not None:
        yield "queries before rope", Change(inputs={1: raw_q.reshape(*q_pe.shape[:2], -1)[..., c.nope :]})
    half = latent.copy()
    half[:, c.kv_rank // 2 :] = 0
    yield "the latent's second half is zero", Change(inputs={2: half})
    for count in (2, 4):
        yield f"partial softmax of {count} context shards averaged without their weights", merged(case, count)
        yield f"partial softmax of {count} context shards added up", merged(case, count) * count
    yield "values in the order of the next head", np.roll(case.truth, 1, 1) if case.truth.shape[1] > 1 else case.truth


def merged(case, count: int) -> np.ndarray:
    """5: each context shard normalised by itself, then averaged over the shards that hold any token of the row."""
    top, n = case.inputs[4], len(case.place.pos)
    size = -(-n // count)
    total, used = np.zeros(np.shape(case.run(Change()))), np.zeros(n)
    for shard in range(count):
        mine = np.where(top // size == shard, top, -1)
        has = (mine >= 0).any(1)
        mine[~has, 0] = 0
        part = case.run(Change(inputs={4: mine}))
        total[has] += part[has]
        used += has
    return total / used[:, None, None]


@hypothesis("cache precision", ATTENTION, SCORE, precision=True)
def cache_precision(case):
    """58: the cache held in fewer bits."""
    which = (2, 3) if case.step.kind == ATTENTION else (1,)
    for name, cast in (ROUND | {"q8_0": q8_0, "q4_0": q4_0, "fp8 e4m3": fp8}).items():
        yield f"cache rounded to {name}", Change(inputs={i: cast(case.inputs[i]) for i in which})
        if case.step.kind == ATTENTION:
            yield f"the latents in the cache rounded to {name}", Change(inputs={2: cast(case.inputs[2])})
            row = np.concatenate([case.inputs[2], case.inputs[3]], -1)
            both = cast(row)
            yield f"cache rows rounded to {name}", Change(inputs={2: both[:, : case.c.kv_rank], 3: both[:, case.c.kv_rank :]})
            queries = {0: cast(case.inputs[0]), 1: cast(case.inputs[1])}
            yield f"queries rounded to {name}", Change(inputs=queries)
            yield (
                f"queries and cache rounded to {name}",
                Change(inputs=queries | {2: cast(case.inputs[2]), 3: cast(case.inputs[3])}),
            )


# --- router and experts (36-45, 56, 63) --------------------------------------------------------------------------------------


@hypothesis("router bias precision", probes="ffn_moe_probs_biased", precision=True)
def bias_precision(case):
    """36, 37"""
    if case.place.w.exp_probs_b is None:
        return
    bias = case.place.w.exp_probs_b.decode()
    for name, cast in ROUND.items():
        yield f"the router's bias in {name}", cast(bias) + case.inputs[0]
        yield f"the router's bias and sum in {name}", cast(cast(bias) + cast(case.inputs[0]))
        yield f"the router's biased scores in {name}", cast(case.truth)


@hypothesis("router", probes="ffn_moe_probs ffn_moe_probs_biased ffn_moe_weights ffn_moe_weights_norm ffn_moe_weights_scaled")
def router_variants(case):
    """39-41"""
    c, layer, name = case.c, case.step.layer, case.step.probe
    local = lambda probe: case.local.get(f"{probe}-{layer}")
    x = case.inputs[0].astype(np.float64)
    if name == "ffn_moe_probs":
        softmax = np.exp(x - x.max(-1, keepdims=True))
        yield "softmax instead of sigmoid", softmax / softmax.sum(-1, keepdims=True)
        yield "no sigmoid", x
        yield "softplus square root instead of sigmoid", np.sqrt(np.log1p(np.exp(x)))
    if name == "ffn_moe_probs_biased" and case.place.w.exp_probs_b is not None:
        bias = case.place.w.exp_probs_b.decode()
        yield "the router's bias left out", x
        yield "the router's bias subtracted", x - bias
        yield "the bias added to the logits", local("ffn_moe_logits") + bias
        yield "the bias added before the sigmoid", 1 / (1 + np.exp(-(local("ffn_moe_logits") + bias)))
    chosen = local("ffn_moe_topk")
    take = lambda a: np.take_along_axis(a, chosen, -1)
    if name == "ffn_moe_weights":
        yield "weights taken from the biased scores", take(local("ffn_moe_probs_biased"))
        yield "weights taken from the logits", take(local("ffn_moe_logits"))
        yield "weights already normalised", x[:, : c.n_chosen] * 0 + take(x) / take(x).sum(-1, keepdims=True)
        yield "weights sorted, not in the order of the chosen experts", -np.sort(-take(x), -1)
        every = np.exp(local("ffn_moe_logits") - local("ffn_moe_logits").max(-1, keepdims=True))
        yield "softmax weights", take(every / every.sum(-1, keepdims=True))
    if name == "ffn_moe_weights_norm":
        yield "weights not normalised", x
        yield "normalised over all experts", x / local("ffn_moe_probs").sum(-1, keepdims=True)
        yield "normalised by the biased scores", x / take(local("ffn_moe_probs_biased")).sum(-1, keepdims=True)
        yield "softmax instead of normalisation", np.exp(x) / np.exp(x).sum(-1, keepdims=True)
        yield "normalised by the largest", x / x.max(-1, keepdims=True)
    if name == "ffn_moe_weights_scaled":
        yield f"the factor {c.expert_scale:g} is left out", x
        yield f"the factor {c.expert_scale:g} is applied twice", x * c.expert_scale**2
        yield f"divided by {c.expert_scale:g}", x / c.expert_scale
        yield "the unnormalised weights are scaled", local("ffn_moe_weights") * c.expert_scale


@hypothesis("expert choice", probes="ffn_moe_topk")
def expert_choices(case):
    """36, 39: chosen from other scores."""
    layer, k = case.step.layer, case.values.shape[1]
    select = case.place.o.select_experts
    bias = None if case.place.w.exp_probs_b is None else case.place.w.exp_probs_b.decode()
    probs = case.local[f"ffn_moe_probs-{layer}"]
    yield "experts chosen without the bias", select(probs, k)
    for name, cast in ROUND.items():
        if bias is not None:
            yield f"experts chosen with the bias in {name}", select(probs + cast(bias), k)
            yield f"experts chosen with bias and sum in {name}", select(cast(cast(probs) + cast(bias)), k)
        yield f"experts chosen from scores in {name}", select(cast(case.inputs[0]), k)
    yield "the smallest scores are chosen", select(-case.inputs[0], k)
    if bias is not None:
        yield "experts chosen by the bias alone", select(np.broadcast_to(bias, probs.shape), k)
    for groups in (2, 4, 8):
        if probs.shape[1] % groups == 0:
            yield f"experts limited to the best {groups // 2} of {groups} groups", select(grouped(case.inputs[0], groups), k)
            yield (
                f"experts limited to the first of {groups} groups",
                select(np.where(np.arange(probs.shape[1]) < probs.shape[1] // groups, case.inputs[0], -np.inf), k),
            )


def grouped(scores: np.ndarray, groups: int) -> np.ndarray:
    """DeepSeek-V3's group mask, which GLM does not use: the best half of the groups by their two best scores."""
    parts = scores.reshape(len(scores), groups, -1)
    best = np.sort(parts, -1)[..., -2:].sum(-1)
    keep = np.argsort(-best, -1)[:, : groups // 2]
    mask = np.zeros(best.shape, bool)
    np.put_along_axis(mask, keep, True, -1)
    return np.where(mask[..., None], parts, -np.inf).reshape(scores.shape)


EXPERT_OPS = "ffn_moe_gate ffn_moe_up ffn_moe_down"


@hypothesis("wrong expert", probes=EXPERT_OPS)
def wrong_expert(case):
    """44, 45, 63: slots computed with another expert's weights, or not at all; found slot by slot."""
    index = case.input("ffn_moe_topk")
    chosen = np.asarray(case.inputs[index])
    for shift in (1, -1):
        yield f"each expert is the one {shift:+d} further on", Change(inputs={index: (chosen + shift) % case.c.n_experts})
    wrong = slots_off(case)
    if not wrong.any() or wrong.sum() > 4096:
        return
    used = chosen.copy()
    missing = wrong & ~np.abs(np.where(np.isfinite(case.values), case.values, 1)).any(-1)
    left = wrong & ~missing
    n_experts = case.c.n_experts
    candidates = range(n_experts) if n_experts <= 64 else [0, n_experts - 1, *np.unique(chosen).tolist()]
    for expert in candidates:
        if not left.any():
            break
        made = case.run(Change(inputs={index: np.where(left, expert, used)}))
        hit = left & (row_errors(case.values, made) <= ACCEPT * 4 * case.bound)
        used[hit] = expert
        left &= ~hit
    if left.any():
        return
    made = case.run(Change(inputs={index: used}))
    made[missing] = 0
    moved = wrong & ~missing
    words = []
    if missing.any():
        words.append(f"experts {ranges(sorted(set(chosen[missing].tolist())))} are skipped (zeros)")
    if moved.any():
        words.append(expert_words(chosen, used, moved, n_experts))
    yield "; ".join(words), made


def expert_words(chosen, used, moved, n_experts: int) -> str:
    shift = set(((used - chosen) % n_experts)[moved].tolist())
    if len(shift) == 1:
        return f"each wrong slot uses the expert {shift.pop()} further on"
    if len(set(used[moved].tolist())) == 1:
        return f"{int(moved.sum())} slots use expert {used[moved][0]} instead of their own"
    pairs = sorted({(int(a), int(b)) for a, b in zip(chosen[moved], used[moved], strict=True)})
    return f"{int(moved.sum())} slots use another expert's weights (for example {pairs[0][1]} instead of {pairs[0][0]})"


@hypothesis("NaN in an expert", probes=EXPERT_OPS + " ffn_moe_swiglu ffn_moe_out")
def nan_expert(case):
    """56: all and only the slots of some experts are not finite."""
    chosen = case.local.get(f"ffn_moe_topk-{case.step.layer}")
    bad = ~np.isfinite(case.values)
    if not bad.any() or chosen is None or case.values.ndim != 3:
        return
    slots = bad.any(-1)
    experts = sorted(set(chosen[slots].tolist()))
    if np.array_equal(np.isin(chosen, experts), slots):
        yield f"NaN or inf from expert {ranges(experts)}", np.where(bad, case.values, case.truth)


@hypothesis("slots from another token", probes=EXPERT_OPS + " ffn_moe_swiglu")
def slots_of_other_tokens(case):
    """44, 45: slots that hold another token's result, by the expert that both chose."""
    wrong = slots_off(case)
    if not wrong.any() or wrong.sum() > 1024:
        return
    flat = case.truth.reshape(-1, case.truth.shape[-1])
    made, count = case.truth.copy(), 0
    for t, k in np.argwhere(wrong):
        distance = np.abs(flat - case.values[t, k]).max(-1)
        best = int(np.argmin(distance))
        if distance[best] > 8 * case.bound * np.abs(flat).max():
            return
        made[t, k] = flat[best]
        count += 1
    yield f"{count} slots hold another token's slot", made


def slots_off(case) -> np.ndarray:
    """[T,K]: which expert slots are wrong."""
    return ~(row_errors(case.values, case.truth) <= 4 * case.bound)


def row_errors(values, truth) -> np.ndarray:
    """Per leading index: max|difference| / max|truth| over the last axis."""
    size = np.maximum(np.abs(truth).max(-1), 1e-3 * np.abs(truth).max())
    return np.abs(np.subtract(values, truth, dtype=np.float64)).max(-1) / np.maximum(size, 1e-30)


@hypothesis("activation", probes="ffn_swiglu ffn_moe_swiglu")
def activations(case):
    g, u = (a.astype(np.float64) for a in case.inputs)
    sigmoid = lambda x: 1 / (1 + np.exp(-x))
    yield "gate and up swapped", u * sigmoid(u) * g
    yield "no activation", g * u
    yield "silu without the gate's product", g * sigmoid(g)
    yield "sigmoid instead of silu", sigmoid(g) * u
    yield "relu instead of silu", np.maximum(g, 0) * u
    yield "gelu (tanh) instead of silu", 0.5 * g * (1 + np.tanh(0.7978845608 * (g + 0.044715 * g**3))) * u
    yield "quick gelu instead of silu", g * sigmoid(1.702 * g) * u
    for limit in (7.0, 10.0):
        yield f"clamped at {limit:g}", np.minimum(g, limit) * sigmoid(np.minimum(g, limit)) * np.clip(u, -limit, limit)


@hypothesis("expert weights", probes="ffn_moe_out")
def combination(case):
    """The sum over experts with other weights, or over fewer experts."""
    y, w = (a.astype(np.float64) for a in case.inputs)
    total = lambda w: np.einsum("tkd,tk->td", y, w)
    for probe in ("ffn_moe_weights", "ffn_moe_weights_norm"):
        other = case.local.get(f"{probe}-{case.step.layer}")
        if other is not None:
            yield f"experts summed with {probe}", total(other)
    yield "experts summed without weights", total(np.ones_like(w))
    yield "experts averaged", total(np.ones_like(w) / w.shape[1])
    yield "weights in reverse order", total(w[:, ::-1])
    for k in range(1, w.shape[1]):
        yield f"only the first {k} experts summed", total(np.where(np.arange(w.shape[1]) < k, w, 0))
        yield f"weights shifted by {k}", total(np.roll(w, k, 1))
        yield f"expert slot {k} left out", total(np.where(np.arange(w.shape[1]) == k, 0, w))
    yield "expert slot 0 left out", total(np.where(np.arange(w.shape[1]) == 0, 0, w))
    chosen = case.local.get(f"ffn_moe_topk-{case.step.layer}")
    if chosen is not None:
        for limit in range(1, case.c.n_experts):
            yield f"experts from {limit} on are skipped", total(np.where(chosen < limit, w, 0))
        ranked = np.argsort(np.argsort(chosen, -1), -1)
        yield "weights in ascending order of the experts", total(np.take_along_axis(w, ranked, -1))


# --- sums of two (35, 42) and constant factors (40-42) -----------------------------------------------------------------------


@hypothesis("sum of two", probes="ffn_inp ffn_out l_out")
def weighted_sum(case):
    """35, 42: a*x + b*y, solved for a and b."""
    if len(case.inputs) != 2:
        return
    x, y = (case.cut(a).astype(np.float64).ravel() for a in case.inputs)
    ok = np.isfinite(case.values.ravel()) & np.isfinite(x) & np.isfinite(y)
    basis = np.stack([x, y])[:, ok]
    (a, b), *_ = np.linalg.lstsq(basis.T, case.values.ravel()[ok].astype(np.float64), rcond=None)
    a, b = nice(a), nice(b)
    names = [n.rsplit("-", 1)[0] for n in case.step.inputs]
    if (a, b) != (1, 1):
        made = (a * x + b * y).reshape(case.truth.shape)
        parts = [f"{n} {'left out' if f == 0 else f'x {f:.4g}'}" for n, f in zip(names, (a, b), strict=True) if f != 1]
        yield " and ".join(parts), made


def nice(x: float) -> float:
    """Round to a plain number when it is one within 1e-3."""
    for candidate in (0.0, 0.4, 0.5, 1.0, 2.0, 2.5, -1.0, 3.0, 4.0, 0.25, 6.25, 0.16):
        if abs(x - candidate) <= 2e-3 * max(1.0, abs(candidate)):
            return candidate
    return float(x)


@hypothesis("constant factor", MATMUL, NORM, ELEMENTWISE, GATHER, ROPE, ATTENTION, SCORE)
def constant_factor(case):
    """16, 40-42, 68: every value times one number."""
    factor = best_factor(case.values, case.truth)
    if factor is not None and abs(factor - 1) > 1e-4 and np.isfinite(factor):
        factor = nice(factor)
        yield f"times {factor:.4g}", case.truth * factor


# --- rows and columns (45, 53, 6, 76) ----------------------------------------------------------------------------------------


@hypothesis("mutated after capture", MATMUL, NORM, ELEMENTWISE, GATHER, ATTENTION, ROPE)
def mutated(case):
    """6, 76: the next op did not work with these numbers but with the right ones; perhaps they are another stage's."""
    if not next_op_used_the_truth(case):
        return
    layer = case.step.layer or 0
    for where in (layer, layer + 1):
        for probe in PROBES.values():
            name = probe.name if probe.where == MODEL else f"{probe.name}-{where}"
            other = case.recorded(name) if probe.dtype is np.float32 and name != case.step.name else None
            if other is not None and other.shape == case.truth.shape:
                yield f"holds {name}: the buffer was overwritten after it was captured", other
                yield f"mutated after capture: {name} was added in place", case.truth + other
    yield "mutated after capture: the next op used the right values", case.values


def next_op_used_the_truth(case) -> bool:
    """Whether a recorded op that reads this probe follows from the truth and not from what was recorded."""
    model, layer, name = case.model, case.step.layer or 0, case.step.name
    whole = case.recorded(name)
    if whole is None or whole.shape != case.truth.shape:
        return False  # one rank's part
    steps = [*model_steps(model.config).values()]
    for where in range(layer, min(layer + 2, model.config.n_layers)):
        steps += layer_steps(model.config, where).values()
    for step in steps:
        made = case.recorded(step.name) if name in step.inputs and step.rowwise and step.kind != CHOICE else None
        if made is None:
            continue
        others = [case.truth if n == name else case.recorded(n) for n in step.inputs]
        if any(o is None for o in others):
            continue
        place = replace(case.place, w=model.weights if step.layer is None else model.weights.layers[step.layer])
        right = worst_row(made, run(step, place, others)[0])
        theirs = worst_row(
            made, run(step, place, [case.values if n == name else o for n, o in zip(step.inputs, others, strict=True)])[0]
        )
        return bool(right < 0.1 * theirs and right < 0.02)
    return False


@hypothesis("moved or missing rows", MATMUL, NORM, ELEMENTWISE, GATHER, ATTENTION, ROPE)
def moved_rows(case):
    """45, 53: token rows that are zero, or hold another token's."""
    truth, values = case.truth.reshape(len(case.truth), -1), case.values.reshape(len(case.values), -1)
    if len(truth) < 2:
        return
    source = np.arange(len(truth))
    wrong = wrong_rows(case)
    wrong = np.ones(len(truth), bool) if wrong is None else wrong
    size = np.abs(truth).max()
    for t in np.flatnonzero(wrong):
        if not values[t].any():
            source[t] = -1
            continue
        distance = np.abs(truth - values[t]).max(-1)
        source[t] = int(np.argmin(distance)) if distance.min() < 0.05 * size else t
    made = np.where((source >= 0).reshape(-1, *[1] * (case.truth.ndim - 1)), case.truth[source], 0)
    zero, moved = np.flatnonzero(source < 0), np.flatnonzero((source >= 0) & (source != np.arange(len(source))))
    if len(zero) or len(moved):
        words = [f"rows {ranges(zero)} are zero"] if len(zero) else []
        if len(moved):
            words.append(f"rows {ranges(moved)} hold other tokens' rows ({ranges(source[moved])})")
        yield "; ".join(words), made


@hypothesis("moved or missing columns", MATMUL, NORM, ELEMENTWISE, GATHER, ATTENTION, ROPE)
def moved_columns(case):
    """2, 48, 53: columns that are zero or stand elsewhere, the same for every token."""
    truth, values = (np.asarray(a, np.float64).reshape(len(a), -1) for a in (case.truth, case.values))
    n = truth.shape[1]
    if len(truth) < 4 or n > 8192 or n < 2:
        return
    limit = 8 * case.bound * np.maximum(np.abs(truth).max(-1), 1e-30)
    wrong = np.flatnonzero((np.abs(values - truth) > limit[:, None]).any(0))
    if not len(wrong) or not np.isfinite(values).all():
        return
    source = np.arange(n)
    norms = (truth**2).sum(0)
    for start in range(0, len(wrong), 512):
        some = wrong[start : start + 512]
        distance = norms[None] - 2 * values[:, some].T @ truth + (values[:, some] ** 2).sum(0)[:, None]
        source[some] = distance.argmin(1)
        source[some[~values[:, some].any(0)]] = -1
    made = np.where(source >= 0, truth[:, source], 0).reshape(case.truth.shape)
    zero, moved = np.flatnonzero(source < 0), np.flatnonzero((source >= 0) & (source != np.arange(n)))
    words = [f"columns {ranges(zero)} are zero"] if len(zero) else []
    if len(moved):
        shift = set(((source[moved] - moved) % n).tolist())
        words.append(
            f"columns {ranges(moved)} are shifted by {shift.pop()}"
            if len(shift) == 1
            else f"columns {ranges(moved)} are permuted"
        )
    yield "; ".join(words), made


# --- weights from elsewhere (7, 48, 62, 65, 67) ------------------------------------------------------------------------------


@hypothesis("wrong tensor", MATMUL, NORM, GATHER)
def other_tensor(case):
    """7: another tensor of the same shape."""
    layers, mine = case.model.weights.layers, case.step.layer
    if mine is None:
        for name in case.step.weights:
            for other in ("token_embd", "output", "output_norm"):
                tensor = getattr(case.model.weights, other)
                if other != name and tensor.shape == case.weight(name).shape and tensor.name != case.weight(name).name:
                    yield f"{other} instead of {name}", Change(weights={name: tensor})
        return
    near = sorted(range(len(layers)), key=lambda i: abs(i - mine))[:13]
    for name in case.step.weights:
        weight = case.weight(name)
        if weight is None:
            continue
        for layer in near:
            for other, tensor in vars(layers[layer]).items():
                if tensor is None or tensor.shape != weight.shape or tensor.name == weight.name:
                    continue
                if layer != mine and other != name:
                    continue
                yield f"{tensor.name} used instead of {weight.name}", Change(weights={name: tensor})


@hypothesis("wrong input", MATMUL, NORM, ELEMENTWISE, ROPE)
def other_input(case):
    """The op run on another probe of the same shape: a norm skipped, a stale buffer."""
    for i, (name, array) in enumerate(zip(case.step.inputs, case.inputs, strict=True)):
        if array.dtype.kind != "f":
            continue
        for other, values in case.local.items():
            if other not in case.step.inputs and values.shape == array.shape and values.dtype.kind == "f":
                yield f"computed from {other} instead of {name}", Change(inputs={i: values})


@hypothesis("transposed or permuted weights", MATMUL)
def permuted_weights(case):
    """48, 62, 65: the same numbers in another order."""
    for name in case.step.weights:
        weight = case.weight(name)
        if len(weight.shape) < 2:
            continue
        *_, n_out, n_in = weight.shape
        if len(weight.shape) == 3 and case.step.probe in ("q_nope_absorbed", "kqv_out"):
            values = weight.decode()
            turned = values.reshape(-1, n_in, n_out).swapaxes(1, 2)
            yield f"{name} transposed", Change(weights={name: ArrayWeight(np.ascontiguousarray(turned), weight)})
            if values.shape[0] * n_out % n_in == 0 and values.shape[0] > 1:
                flat = values.reshape(n_out, values.shape[0], n_in).swapaxes(0, 1)
                yield (
                    f"{name} with heads and rows swapped",
                    Change(weights={name: ArrayWeight(np.ascontiguousarray(flat), weight)}),
                )
        elif n_out == n_in and len(weight.shape) == 2:
            yield f"{name} transposed", Change(weights={name: ArrayWeight(weight.decode().T.copy(), weight)})
        for block in (256, 128, 64, 32):
            if n_in % block:
                continue
            for rows in (2, 4, 8, 16, 32, 64, 128):
                if rows < block:

                    def change(w, first, block=block, rows=rows):
                        return w.reshape(len(w), -1, rows, block // rows).swapaxes(-1, -2).reshape(w.shape)

                    yield (
                        f"{name}: blocks of {block} read as {block // rows} x {rows} interleaved",
                        Change(weights={name: MappedWeight(weight, change)}),
                    )
            half = lambda w, first, b=block: np.roll(w.reshape(len(w), -1, b), b // 2, -1).reshape(w.shape)
            yield f"{name}: halves of each block of {block} swapped", Change(weights={name: MappedWeight(weight, half)})
        if len(weight.shape) == 2 and n_out * n_in <= 1 << 24:
            values = weight.decode()
            for a, b in ((16, 16), (16, 32), (32, 16), (8, 16), (64, 16), (32, 32)):
                if n_out % a == 0 and n_in % b == 0:
                    tiled = values.reshape(n_out // a, a, n_in // b, b).swapaxes(1, 2).reshape(n_out, n_in)
                    back = values.reshape(n_out // a, n_in // b, a, b).swapaxes(1, 2).reshape(n_out, n_in)
                    for what, w in (("still in", tiled), ("read back from", back)):
                        yield f"{name} {what} tiles of {a} x {b}", Change(weights={name: ArrayWeight(w, weight)})


@hypothesis("block layout", MATMUL, GATHER)
def block_layouts(case):
    """65, 67: a block's scales, minima or quants read from the wrong place."""
    for name in case.step.weights:
        weight = case.weight(name)
        if weight is None or weight.type not in LAYOUTS or raw(weight).shape != weight.shape:
            continue
        tensor = raw(weight)
        _, block_bytes = GGML_QUANT_SIZES[weight.type]
        for what, edit in LAYOUTS[weight.type]:

            def change(rows, first, tensor=tensor, edit=edit, block_bytes=block_bytes):
                data = np.array(tensor.data[first : first + len(rows)]).reshape(len(rows), -1, block_bytes)
                return dequantize(np.ascontiguousarray(edit(data)).reshape(len(rows), -1), tensor.type)

            yield f"{weight.type.name} blocks of {name}: {what}", Change(weights={name: MappedWeight(weight, change)})


def _zeroed(start, stop):
    def edit(blocks):
        blocks[..., start:stop] = 0
        return blocks

    return edit


def _nibbles(start, stop):
    def edit(blocks):
        part = blocks[..., start:stop]
        blocks[..., start:stop] = part << 4 | part >> 4
        return blocks

    return edit


def _moved(start, stop, order):
    """Bytes start..stop in another order, as order(number of bytes) says."""

    def edit(blocks):
        blocks[..., start:stop] = blocks[..., start:stop][..., order(stop - start)]
        return blocks

    return edit


PAIRED = lambda n: np.arange(n) // 2 * 2
SWAPPED = lambda n: np.roll(np.arange(n), n // 2)
NEIGHBOURS = lambda n: np.arange(n) ^ 1
HALVED = lambda n: np.arange(n) // 2
INTERLEAVED = lambda n: np.arange(n).reshape(2, -1).T.ravel()


def _across(order_of_blocks, start, stop):
    """Bytes start..stop of each block taken from another block of the row."""

    def edit(blocks):
        source = np.minimum(order_of_blocks(blocks.shape[1]), blocks.shape[1] - 1)
        blocks[..., start:stop] = blocks[:, source, start:stop]
        return blocks

    return edit


def _byte_orders(start, stop, what):
    return [
        (f"one {what} for two groups", _moved(start, stop, PAIRED)),
        (f"{what}: group size twice as large", _moved(start, stop, HALVED)),
        (f"{what}: halves swapped", _moved(start, stop, SWAPPED)),
        (f"{what}: neighbours swapped", _moved(start, stop, NEIGHBOURS)),
        (f"{what}: halves interleaved", _moved(start, stop, INTERLEAVED)),
    ]


T = GGMLQuantizationType
LAYOUTS = {
    T.Q2_K: [
        ("minima left out", _zeroed(82, 84)),
        ("scale and minimum nibbles swapped", _nibbles(0, 16)),
        *_byte_orders(0, 16, "scales"),
        *_byte_orders(16, 80, "quants"),
    ],
    T.Q4_K: [
        ("minima left out", _zeroed(2, 4)),
        ("low and high nibbles swapped", _nibbles(16, 144)),
        *_byte_orders(4, 16, "scales"),
        *_byte_orders(16, 144, "quants"),
    ],
    T.Q5_K: [
        ("minima left out", _zeroed(2, 4)),
        ("fifth bits left out", _zeroed(16, 48)),
        ("low and high nibbles swapped", _nibbles(48, 176)),
        *_byte_orders(4, 16, "scales"),
        *_byte_orders(48, 176, "quants"),
    ],
    T.Q6_K: [
        ("upper bits left out", _zeroed(128, 192)),
        ("low and high nibbles swapped", _nibbles(0, 128)),
        *_byte_orders(0, 128, "low bits"),
        *_byte_orders(128, 192, "upper bits"),
        *_byte_orders(192, 208, "scales"),
    ],
    T.Q3_K: [
        ("high bits left out", _zeroed(0, 32)),
        *_byte_orders(32, 96, "quants"),
        *_byte_orders(96, 108, "scales"),
    ],
    T.IQ3_XXS: [*_byte_orders(2, 98, "grid and signs"), *_byte_orders(2, 66, "grid"), *_byte_orders(66, 98, "signs")],
    T.IQ2_XXS: [*_byte_orders(2, 66, "grid and signs")],
    T.IQ4_XS: [("low and high nibbles swapped", _nibbles(8, 136)), *_byte_orders(8, 136, "quants")],
    T.Q4_0: [("low and high nibbles swapped", _nibbles(2, 18)), *_byte_orders(2, 18, "quants")],
    T.Q8_0: [
        ("one scale for two blocks", _across(PAIRED, 0, 2)),
        ("scales of neighbouring blocks swapped", _across(NEIGHBOURS, 0, 2)),
        ("group size twice as large", _across(HALVED, 0, 2)),
        ("scales one block late", _across(lambda n: np.maximum(np.arange(n) - 1, 0), 0, 2)),
        *_byte_orders(2, 34, "quants"),
    ],
}


# --- parts of a sum (53, 54, 61, 70, 71) -------------------------------------------------------------------------------------


@hypothesis("parts of the sum", MATMUL)
def parts_of_sum(case):
    """54, 61, 70: how often each 32 terms of the sum count, solved; 0 = left out, 2 = twice."""
    name = case.step.weights[0]
    weight, n = case.weight(name), case.weight(name).shape[-1]
    if case.step.probe.startswith("indexer") or n % 16:
        return
    for size in (32, 16):
        if n % size or n // size > 1024 or n // size < 2:
            continue
        counts = solved_counts(case, name, weight, n, size)
        if counts is None or (counts == counts[0]).all():
            continue  # a constant factor, if anything
        factor = np.repeat(counts, size).astype(np.float32)
        change = lambda w, first, f=factor: w * f
        yield counts_words(counts, size, n), Change(weights={name: MappedWeight(weight, change)})


def counts_words(counts, size: int, n: int) -> str:
    groups = []
    for value in sorted(set(counts.tolist()) - {1}):
        where = np.flatnonzero(counts == value)
        for period in (2, 4, 8):
            if len(counts) % period == 0 and len(where) and set(where.tolist()) == {
                int(i) for i in range(len(counts)) if i % period in set((where % period).tolist())
            } and len(set((where % period).tolist())) < period:  # fmt: skip
                at = [int(i) * size for i in sorted(set((where % period).tolist()))]
                spans = ", ".join(f"{a}-{a + size - 1}" for a in at)
                groups.append(f"terms {spans} of every {period * size} {times(value)}")
                break
        else:
            spans = [f"{a * size}-{b * size + size - 1}" for a, b in runs(where)]
            groups.append(f"terms {', '.join(spans[:3])}{' ...' * (len(spans) > 3)} of {n} {times(value)}")
    return "; ".join(groups)


def times(value: float) -> str:
    return "are left out" if value == 0 else f"count {value:g} times"


def runs(indices) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for i in map(int, indices):
        if out and out[-1][1] == i - 1:
            out[-1] = (out[-1][0], i)
        else:
            out.append((i, i))
    return out


def solved_counts(case, name: str, weight, n: int, size: int) -> np.ndarray | None:
    """Least squares over some rows: values = sum over chunks of count * (this chunk's part of the sum). None where that does not fit."""
    wrong = wrong_rows(case)
    rows = np.flatnonzero(wrong)[:16] if wrong is not None else np.arange(min(len(case.values), 16))
    columns = []
    for chunk in range(n // size):
        keep = np.zeros(n, np.float32)
        keep[chunk * size : (chunk + 1) * size] = 1
        change = Change(weights={name: MappedWeight(weight, lambda w, first, keep=keep: w * keep)})
        if n // size * weight.n_rows * n > 1 << 32:
            return None  # too large to take apart
        columns.append(case.run(change)[rows].ravel())
    basis = np.stack(columns, -1)
    target = np.asarray(case.values, np.float64)[rows].ravel()
    ok = np.isfinite(target)
    if ok.sum() < 2 * basis.shape[1]:
        return None
    counts, *_ = np.linalg.lstsq(basis[ok], target[ok], rcond=None)
    rounded = np.rint(2 * counts) / 2
    return rounded if np.abs(counts - rounded).max() < 0.05 else None


# --- precision (36, 46, 58, 71, 72) ------------------------------------------------------------------------------------------


def bf16(x):
    return round_bf16(np.asarray(x, np.float32))


def f16(x):
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(np.float16).astype(np.float32)


def bf16_truncated(x):
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def fp8(x):
    """To e4m3, saturating: 3 bits of mantissa, smallest step 2^-9, largest 448."""
    x = np.clip(np.asarray(x, np.float64), -448, 448)
    exponent = np.floor(np.log2(np.maximum(np.abs(x), 2.0**-6)))
    step = 2.0 ** (exponent - 3)
    return np.rint(x / step) * step


def fp8_scaled(x, axis=None):
    scale = np.maximum(np.abs(x).max(axis=axis, keepdims=axis is not None), 1e-30) / 448
    return (fp8(x / scale) * scale).astype(np.float32)


def in_squares(w, size: int, cast):
    """Each size x size square of the last two axes by itself."""
    out = np.empty_like(w, np.float32)
    for matrix, to in zip(w.reshape(-1, *w.shape[-2:]), out.reshape(-1, *w.shape[-2:]), strict=True):
        for i in range(0, matrix.shape[0], size):
            for j in range(0, matrix.shape[1], size):
                to[i : i + size, j : j + size] = cast(matrix[i : i + size, j : j + size])
    return out


def integers(x, bits: int, axis=None):
    """Symmetric integers with one scale per tensor, or per slice along `axis`."""
    limit = 2 ** (bits - 1) - 1
    scale = np.maximum(np.abs(x).max(axis=axis, keepdims=axis is not None), 1e-30) / limit
    return (np.rint(x / scale) * scale).astype(np.float32)


def in_blocks(size: int):
    """Rounding of rows that are cut into blocks; NaN, which fits nothing, where they cannot be."""

    def wrap(cast):
        return lambda x: cast(x) if np.shape(x)[-1] % size == 0 else np.full(np.shape(x), np.nan, np.float32)

    return wrap


@in_blocks(32)
def q8_0(x):
    q, d = quantize_q8_0(np.asarray(x, np.float32))
    return (q * d[..., None].astype(np.float32)).reshape(np.shape(x))


@in_blocks(256)
def q8_k(x):
    q, d = quantize_q8_k(np.asarray(x, np.float32))
    return (q * d[..., None]).reshape(np.shape(x))


@in_blocks(32)
def q4_0(x):
    """ggml's Q4_0: the value of largest magnitude becomes -8."""
    blocks = np.asarray(x, np.float32).reshape(-1, 32)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[:, None], -1)
    d = largest / -8
    q = np.clip(np.trunc(np.divide(blocks, d, out=np.zeros_like(blocks), where=d != 0) + 8.5), 0, 15) - 8
    return (q * d.astype(np.float16).astype(np.float32)).reshape(np.shape(x))


ROUND = {"bf16": bf16, "f16": f16, "truncated bf16": bf16_truncated}
WEIGHT_ROUND = {
    "fp8 e4m3, one scale": fp8_scaled,
    "fp8 e4m3, one scale a row": lambda w: fp8_scaled(w, -1),
    "fp8 e4m3 without a scale": fp8,
    "fp8 e4m3, one scale for 128 x 128": lambda w: in_squares(w, 128, fp8_scaled),
    "fp8 e4m3, one scale for 128 of a row": lambda w: fp8_scaled(
        w.reshape(*w.shape[:-1], -1, min(128, w.shape[-1])), -1
    ).reshape(w.shape),
    "bf16": bf16,
    "f16": f16,
    "8-bit integers, one scale": lambda w: integers(w, 8),
    "8-bit integers, one scale a row": lambda w: integers(w, 8, -1),
    "4-bit integers, one scale a row": lambda w: integers(w, 4, -1),
    "Q8_0": q8_0,
    "Q4_0": q4_0,
}
INPUT_ROUND = {
    "bf16": bf16, "f16": f16, "truncated bf16": bf16_truncated, "8-bit blocks of 32": q8_0, "8-bit blocks of 256": q8_k,
    "fp8 e4m3, one scale": fp8_scaled, "fp8 e4m3, one scale a token": lambda x: fp8_scaled(x, -1), "fp8 e4m3 without a scale": fp8,
    "8-bit integers, one scale a token": lambda x: integers(x, 8, -1),
}  # fmt: skip


@hypothesis("precision of the weights", MATMUL, NORM, GATHER, precision=True)
def weight_precision(case):
    """46: requantised weights."""
    for name in case.step.weights:
        weight = case.weight(name)
        if weight is None or np.prod(weight.shape) > 1 << 26:
            continue
        values = weight.decode()
        for what, cast in WEIGHT_ROUND.items():
            if (values.ndim < 2 and "x" in what) or (values.shape[-1] % 128 and "of a row" in what):
                continue
            rounded = np.asarray(cast(values), np.float32)
            yield f"{name} rounded to {what}", Change(weights={name: ArrayWeight(rounded, weight)})
            if what.startswith("fp8") and values.ndim == 3:
                heads = np.stack([fp8_scaled(v) for v in values])
                yield f"{name} rounded to fp8 e4m3, one scale a head", Change(weights={name: ArrayWeight(heads, weight)})


@hypothesis("precision of the inputs", MATMUL, NORM, ELEMENTWISE, ROPE, precision=True)
def input_precision(case):
    if case.place.o.numerics.act is not None and case.step.kind == MATMUL:
        plain = copy(case.place)
        exact = replace(case.place.o.numerics, act=None)
        ops = case.model.place(case.step.layer, exact).o
        yield "activations not rounded to 8 bits as elsewhere", case.cut(run(case.step, replace(plain, o=ops), case.inputs)[0])
    for what, cast in INPUT_ROUND.items():
        if case.step.kind == MATMUL or what in ROUND:
            changed = {i: np.asarray(cast(a)) for i, a in enumerate(case.inputs) if a.dtype.kind == "f"}
            yield f"inputs rounded to {what}", Change(inputs=changed)


@hypothesis("precision of the output", MATMUL, NORM, ELEMENTWISE, ROPE, ATTENTION, GATHER, precision=True)
def output_precision(case):
    """71, 72: also where f16 overflows to inf."""
    for what, cast in (ROUND | {"fp8 e4m3, one scale": fp8_scaled}).items():
        yield f"output rounded to {what}", cast(case.truth)
    for what, cast in ROUND.items():
        if case.step.kind == MATMUL:
            name = case.step.weights[0]
            inputs = {i: cast(a) for i, a in enumerate(case.inputs) if a.dtype.kind == "f"}
            weight = MappedWeight(case.weight(name), lambda w, first, cast=cast: cast(w))
            yield f"weights and inputs in {what}", Change(inputs=inputs, weights={name: weight})
            yield f"weights, inputs and output in {what}", Change(inputs=inputs, weights={name: weight}, post=cast)
