"""What an engine does throughout: its numerics, found from its numbers, and what rounding may therefore do to each op."""

from dataclasses import dataclass, field, replace

import numpy as np

from npglm.trace.graph import ATTENTION, CHOICE, ELEMENTWISE, GATHER, MATMUL, ROPE, SCORE, Model, Step, layer_steps, run
from npglm.trace.judge import ATTENTION_IN_F16, soften
from npglm.trace.metrics import BF16_FLOOR, F16_FLOOR, F32_FLOOR, errors
from npglm.trace.probes import PROBES
from npglm.trace.recording import Recording
from reference.numerics import BF16, F32, GGML, Numerics, round_bf16

U32 = 2.0**-24
NOISE_ATTENTION_F16 = 5e-4  # of the largest value: llama.cpp's flash attention against f64
CACHES = {"f16": np.float16, "f32": np.float32}
EPS_TRIED = (0.0, 1e-5, 1e-6)
FIRST_MATMULS = ("q_a", "q", "kv_cmpr_pe", "q_nope_absorbed")  # whose numerics are looked at: cheap, and on every layer
LARGE = 2048  # hidden size from which on a model's sums are made in f32


@dataclass
class Engine:
    """numerics: the roundings of inputs that it makes. stored: "bf16" or "f16" when all its values are such numbers.

    changes: fields of GlmConfig that it sees otherwise. words: all of this for a person.
    """

    numerics: Numerics = F32
    stored: str | None = None
    attention_f16: bool = False
    attention_noise: bool = False  # allow for f16 attention in what is computed on top of it
    hadamard: bool = False  # the indexer's keys are cached after a Hadamard transform
    changes: dict = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    exact: bool = True

    @property
    def truth(self) -> Numerics:
        """f64 sums; f32 in large models, where the bounds are wide enough for it and decoding alone takes long."""
        return self.numerics.truth() if self.exact else self.numerics

    def place(self, model: Model, layer: int | None, **changes):
        place = model.place(layer, self.truth, **(self.changes | changes))
        return replace(place, rotation=hadamard(model.config.indexer_dim)) if self.hadamard else place

    @property
    def floor(self) -> float:
        return {"bf16": BF16_FLOOR, "f16": F16_FLOOR}.get(self.stored, F32_FLOOR)

    @property
    def twin_scale(self) -> float:
        """The twin of an f16 engine is bf16's, whose unit is 8 times as large."""
        return 0.125 if self.stored == "f16" else 1.0

    @property
    def rounds_any(self) -> bool:
        return self.stored is not None or self.numerics.act is not None

    def rounds(self, step: Step) -> bool:
        """Whether this engine's own numerics show in this op."""
        if self.stored:
            return True
        if step.kind in (ATTENTION, SCORE):
            return self.numerics.cache is not np.float32 or self.attention_f16
        quantised = step.probe not in ("ffn_moe_logits",)
        return step.kind == MATMUL and self.numerics.act is not None and quantised

    def bound(self, step: Step, n_tokens: int) -> float:
        """The f32 accumulation bound of one op from recorded inputs, or the engine's own rounding where that is larger."""
        if step.kind in (GATHER, CHOICE):
            f32 = F32_FLOOR
        elif step.kind in (MATMUL, SCORE, ATTENTION):
            f32 = F32_FLOOR + 2 * U32 * step.length**0.5
        else:
            f32 = F32_FLOOR + 4 * U32
        if step.kind == ROPE or step.probe in ("indexer_q", "indexer_k"):
            f32 += 4 * U32 * n_tokens  # engines multiply angles up in f32
        if step.kind == SCORE and self.hadamard:
            f32 += 2.0**-12  # a transformed key may round to the f16 number beside ours
        if self.stored:
            unit = self.floor
            return f32 + unit * (1 if step.kind in (GATHER, ELEMENTWISE, CHOICE) else 1.5)
        return f32

    def twin(self, model: Model, step: Step, inputs: list, place) -> np.ndarray:
        """The op as rounding alone may leave it: plain f32, or the engine's own 16-bit format. place: of the truth."""
        numerics = replace(BF16, cache=self.numerics.cache) if self.stored else self.numerics
        out = run(step, replace(place, o=model.place(step.layer, numerics).o), inputs)[0]
        if step.kind == ATTENTION and self.attention_noise:
            noise = np.random.default_rng(step.layer).standard_normal(out.shape, np.float32)
            out = out + noise * np.float32(NOISE_ATTENTION_F16 / 3 * np.abs(out).max(initial=0))
        return out


def detect(model: Model, recording: Recording) -> Engine:
    """Vote over the first recorded layer's ops: which numerics reproduces each of them from the engine's own inputs."""
    stored = _stored(recording)
    layer = _first_layer(model, recording)
    exact = model.config.hidden < LARGE
    if layer is None or stored:
        return Engine(F32, stored, words=_words(F32, stored), exact=exact)
    some = any(f"{p}-{layer}" in recording.names for p in FIRST_MATMULS)
    voters = (lambda s: s.probe in FIRST_MATMULS) if some else (lambda s: s.kind != CHOICE)
    numerics = _vote(model, recording, layer, [Engine(F32), Engine(GGML)], voters, Engine(F32)).numerics
    candidates = [Engine(replace(numerics, cache=cache)) for cache in CACHES.values()]
    default = Engine(numerics)
    if hadamard(model.config.indexer_dim) is not None:
        candidates.append(Engine(replace(numerics, cache=np.float16), hadamard=True))
        default = candidates[-1] if numerics.act == "ggml" else default  # llama.cpp's way
    engine = _vote(model, recording, layer, candidates, lambda s: s.kind in (SCORE, ATTENTION), default)
    engine.words = _words(engine.numerics, None)
    engine.exact = exact
    engine.attention_noise = bool(recording.quantum) and numerics.act == "ggml"
    _indexer_eps(model, recording, layer, engine)
    return engine


def _words(numerics: Numerics, stored: str | None) -> list[str]:
    words = [f"{stored} throughout"] if stored else []
    if numerics.act == "ggml":
        words.append("8-bit activations before quantised matmuls")
    if numerics.cache is np.float16:
        words.append("f16 cache")
    return words


def _stored(recording: Recording) -> str | None:
    """The 16-bit format that (nearly) all fully recorded float values are numbers of."""
    seen = {"bf16": 0, "f16": 0, "all": 0}
    for name in recording.names[:60]:
        probe = PROBES.get(name.rsplit("-", 1)[0])
        trace = next(t for t in recording.traces if name in t)
        if probe is None or probe.dtype is np.int32 or name + "#known" in trace or recording.quantum or probe.name == "embd":
            continue
        values = np.asarray(trace[name], np.float32).ravel()[:4096]
        values = values[np.isfinite(values)]
        if not values.any():
            continue
        seen["all"] += 1
        seen["bf16"] += bool(np.array_equal(values, round_bf16(values)))
        with np.errstate(over="ignore"):
            seen["f16"] += bool(np.array_equal(values, values.astype(np.float16).astype(np.float32)))
    if not seen["all"]:
        return None
    return next((n for n in ("bf16", "f16") if seen[n] >= 0.7 * seen["all"]), None)


def _first_layer(model: Model, recording: Recording) -> int | None:
    """The first layer that holds recorded ops and can be computed: the first one, or one whose input was recorded."""
    for layer in range(model.config.n_layers):
        inside = any(f"{p}-{layer}" in recording.names for p in PROBES)
        if inside and (layer == 0 or f"l_out-{layer - 1}" in recording.names or f"attn_norm-{layer}" in recording.names):
            return layer
    return None


def _recomputed(model: Model, recording: Recording, layer: int, engine: Engine, wanted):
    """Yield (step, recorded, truth) of one layer's steps that are recorded and wanted(step), in the local view.

    Nothing else is computed, but for what a wanted step needs and nobody recorded.
    """
    steps = {s.name: s for s in layer_steps(model.config, layer).values()}
    before = "embd" if layer == 0 else f"l_out-{layer - 1}"
    steps |= {"embd": next(iter(model.steps()))} if layer == 0 else {}
    local: dict[str, np.ndarray] = {}

    def recorded(name):
        probe, _, number = name.rpartition("-")
        shape = PROBES[probe or name].shape(model.config, len(model.pos), int(number) if probe else None)
        joined = recording.joined(name, shape)
        return joined.whole if joined is not None else None

    def truth(step):
        return run(step, engine.place(model, step.layer), [value(n) for n in step.inputs])[0]

    def value(name):
        if name not in local:
            whole = recorded(name)
            if whole is not None and whole.full and not recording.quantum:
                local[name] = whole.values
            elif name in steps:
                local[name] = truth(steps[name])
            else:
                raise KeyError(name)  # of an earlier layer
        return local[name]

    for step in steps.values():
        if step.name == before or not wanted(step) or (whole := recorded(step.name)) is None:
            continue
        try:
            yield step, whole, truth(step)
        except KeyError:
            continue


def hadamard(n: int) -> np.ndarray | None:
    """The orthogonal Hadamard matrix [n,n] (Sylvester), or None where n is no power of two."""
    if n & (n - 1):
        return None
    parity = np.array([[(i & j).bit_count() & 1 for j in range(n)] for i in range(n)])
    return (1.0 - 2.0 * parity) * n**-0.5


def _vote(model, recording, layer, candidates: list[Engine], wanted, default: Engine) -> Engine:
    found: dict[str, list[float]] = {}
    for engine in candidates:
        for step, whole, truth in _recomputed(model, recording, layer, engine, wanted):
            if whole.values.shape == truth.shape and (whole.known is None or whole.known.any()):
                values = soften(whole.values, truth, recording.quantum)
                found.setdefault(step.name, []).append(errors(values, truth, whole.known).rms)
    votes = dict.fromkeys(range(len(candidates)), 0)
    for residuals in found.values():
        order = np.argsort(residuals)  # NaN last
        if len(residuals) == len(candidates) and residuals[order[0]] < 0.6 * residuals[order[1]] and residuals[order[0]] < 0.05:
            votes[int(order[0])] += 1
    best = max(votes, key=votes.get)
    return candidates[best] if votes[best] else default


def _indexer_eps(model: Model, recording: Recording, layer: int, engine: Engine) -> None:
    """The eps of the indexer's key norm moves less than the f32 bound sees in one value, but shows in the rms of all of them."""
    found = {}
    for eps in (model.config.indexer_eps, *EPS_TRIED):
        trial = replace(engine, changes={"indexer_eps": eps})
        for _, whole, truth in _recomputed(model, recording, layer, trial, lambda s: s.probe == "indexer_k"):
            if whole.known is None and whole.values.shape == truth.shape:
                found[eps] = errors(whole.values, truth).rms
    best = min(found, key=found.get, default=None)
    if best is not None and best != model.config.indexer_eps and found[best] < 0.5 * found[model.config.indexer_eps] < 1e-4:
        engine.changes["indexer_eps"] = best
        engine.words.append(f"k_norm eps {best:g} (the model's is {model.config.indexer_eps:g})")


def benign_throughout(report, engine: Engine) -> None:
    """Attention in f16 arithmetic on every layer is a numerics the engine runs throughout; on one layer it is a finding."""
    attention = [o for o in report.ops if o.op == "kqv"]
    marked = [o for o in attention if o.reason == ATTENTION_IN_F16]
    if marked and len(marked) >= 0.8 * len(attention):
        engine.attention_f16 = True
        report.numerics.append(ATTENTION_IN_F16)
        for op in marked:
            op.verdict, op.cause = "rounding", None


def tokens_from_embeddings(checkpoint, recording: Recording) -> np.ndarray | None:
    """The ids whose embedding rows are the ones printed, for dumps without token ids; None where that is not certain."""
    trace = next((t for t in recording.traces if "embd" in t), None)
    if trace is None or np.ndim(trace["embd"]) != 2 or np.shape(trace["embd"])[1] != checkpoint.config.hidden:
        return None
    values = np.asarray(trace["embd"], np.float32)
    known = trace["embd#known"].astype(bool) if "embd#known" in trace else np.ones(values.shape, bool)
    if not known.any(1).all():
        return None
    best, second = np.full(len(values), np.inf), np.full(len(values), np.inf)
    ids = np.zeros(len(values), np.int64)
    table = checkpoint.weights.token_embd
    for first, last in table.row_blocks():
        rows = table.rows(first, last)
        for t, row in enumerate(values):
            distance = np.abs(rows[:, known[t]] - row[known[t]]).max(1)
            order = np.argsort(distance)[:2]
            candidates = sorted([(best[t], ids[t]), (second[t], -1), *((distance[i], first + i) for i in order)])
            (best[t], ids[t]), (second[t], _) = candidates[0], candidates[1]
    limit = max(recording.quantum, BF16_FLOOR * float(np.abs(values).max()))
    return ids if (best <= 1.01 * limit).all() and (second > 2 * best + 1e-9).all() else None
