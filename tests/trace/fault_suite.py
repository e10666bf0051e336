"""The fault suite: every planted fault at several lengths; was the guilty op found, and its cause named? `main_faults()` prints the table."""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from threadpoolctl import threadpool_limits

threadpool_limits(1)

import synth
from plant import PLANTS, Plant, run_planted
from plant_ranks import RANK_PLANTS, RankPlant, run_ranks

from npglm.checkpoint import Checkpoint
from npglm.progress import LoadProgress
from npglm.trace.compare import compare
from npglm.trace.graph import Model
from npglm.trace.recording import ArrayTrace, Recording
from reference.numerics import F32, NUMERICS

TOP_K = 8
LENGTHS = (5, 64, 65, 83, TOP_K - 1, TOP_K + 1)
SHAPE = {
    "n_layers": 4, "n_dense": 1, "full": (True, True, False, True), "n_experts": 16, "n_chosen": 4, "ffn": 512, "expert_ffn": 256,
    "nope": 96, "indexer_top_k": TOP_K, "n_heads": 4, "q_rank": 192, "v_dim": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """found: the guilty op is the planted one. cause: family named, or None. alone: cause named when the true families are left out."""

    plant: object  # Plant, RankPlant or TorchPlant
    tokens: int
    verdict: str
    guilty: dict
    found: bool
    cause: str | None
    named: bool
    tried_alone: bool
    alone: str | None
    seconds: float


def model_file(folder, seed: int = 0) -> Path:
    return synth.write_model(Path(folder) / f"faults{seed}.gguf", seed, **SHAPE)


def tokens_of(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, n)


def recording(ranks, tokens) -> Recording:
    """ranks: the arrays of one engine, or a list of those of its ranks."""
    ranks = ranks if isinstance(ranks, list) else [ranks]
    ids = {"tokens": json.dumps([int(t) for t in tokens])}
    return Recording([ArrayTrace(values, ids | {"rank": str(r)}, f"planted, rank {r}") for r, values in enumerate(ranks)])


def judge(checkpoint, broken: Plant, n: int, alone: bool = False, numerics=F32) -> Outcome:
    """Plant, compare, and say what came out. alone: also compare with the true hypotheses left out."""
    tokens = tokens_of(n)
    return outcome(checkpoint, broken, n, recording(run_planted(Model(checkpoint, tokens), numerics, broken), tokens), alone)


def judge_ranks(folder, broken: RankPlant, n: int, reduced: bool = False) -> Outcome:
    """As judge(), of two ranks. reduced: sums were recorded after the all-reduce."""
    types = {"ffn_down": getattr(synth.T, broken.types)} if broken.types else None
    shape = SHAPE | ({"ffn": 768} if broken.types else {})
    path = synth.write_model(Path(folder) / f"ranks{broken.types}.gguf", 0, types=types, **shape)
    checkpoint, tokens = Checkpoint.open(path), tokens_of(n)
    ranks = run_ranks(Model(checkpoint, tokens), F32, broken, reduced)
    return outcome(checkpoint, broken, n, recording(ranks, tokens), False)


def outcome(checkpoint, broken, n: int, planted: Recording, alone: bool) -> Outcome:
    start = time.perf_counter()
    report = compare(checkpoint, planted)
    seconds = time.perf_counter() - start
    guilty, cause = report.guilty or {}, report.cause
    expected = {"op": broken.op, "layer": broken.layer, "rank": getattr(broken, "rank", 0)}
    family = cause["family"] if cause else None
    named = family in broken.families if broken.families else cause is None
    tried_alone, left = alone and bool(broken.families), None
    if tried_alone:
        without = compare(checkpoint, planted, skip=frozenset(broken.families)).cause
        left = f"{without['family']}: {without['name']}" if without else None
    said = f"{family}: {cause['name']}" if cause else None
    return Outcome(broken, n, report.verdict, guilty, guilty == expected, said, named, tried_alone, left, seconds)


def clean_ranks(folder, n: int, reduced: bool) -> str:
    checkpoint, tokens = Checkpoint.open(model_file(folder)), tokens_of(n)
    return compare(checkpoint, recording(run_ranks(Model(checkpoint, tokens), F32, None, reduced), tokens)).verdict


def clean_runs(folder, seeds=5, lengths=(5, 64, 83, 9, 65)):
    """Runs without a fault: f32 with ulp jitter, bf16, f16, 8-bit. Yields (what, verdict, the first op that is not fine)."""
    for seed in range(seeds):
        checkpoint = Checkpoint.open(model_file(folder, seed))
        for n in lengths:
            tokens = tokens_of(n, seed)
            for name, make in CLEAN.items():
                report = compare(checkpoint, recording(make(Model(checkpoint, tokens), seed), tokens))
                yield f"seed {seed}, {n} tokens, {name}", report.verdict, report.guilty_op


def jittered(model: Model, seed: int) -> dict:
    """Each float moved by up to an ulp, before the next op sees it."""
    rng = np.random.default_rng(seed)
    return _stepwise(model, F32, lambda a: np.nextafter(a, a + rng.choice([-1, 0, 1], a.shape).astype(np.float32)))


def _stepwise(model: Model, numerics, after) -> dict:
    from npglm.trace.graph import run

    values: dict[str, np.ndarray] = {}
    for step in model.steps():
        made = run(step, model.place(step.layer, numerics), [values[i] for i in step.inputs])[0]
        values[step.name] = after(made.astype(np.float32)) if made.dtype.kind == "f" else made
    return values


CLEAN = {
    "f32": lambda m, seed: run_planted(m, F32),
    "ulp jitter": jittered,
    "bf16": lambda m, seed: run_planted(m, NUMERICS["bf16"]),
    "f16": lambda m, seed: _stepwise(m, F32, lambda a: a.astype(np.float16).astype(np.float32)),
    "8-bit": lambda m, seed: run_planted(m, NUMERICS["ggml"]),
}


def main_faults(argv=None) -> int:
    """Plant every fault, print the confusion table and the clean runs; exit status 1 when a bar of the project is missed."""
    parser = argparse.ArgumentParser(description=main_faults.__doc__)
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="tokens of the prompts")
    parser.add_argument("--only", default="", help="part of a plant's name; leaves the clean runs out")
    parser.add_argument("--torch", action="store_true", help="also in transformers' own modules (extra [oracle])")
    args = parser.parse_args(argv)
    lengths = [int(n) for n in args.lengths.split(",")]
    outcomes, clean = [], Counter()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Checkpoint.open(model_file(folder))
        runs = [
            partial(judge, checkpoint, p, n, alone=True)
            for p in PLANTS.values()
            if args.only in p.name
            for n in lengths
            if n >= p.tokens
        ]
        runs += [partial(judge_ranks, folder, p, n) for p in RANK_PLANTS if args.only in p.name for n in lengths]
        with LoadProgress("faults") as progress:
            for i, run in enumerate(runs, 1):
                outcomes.append(run())
                progress(i, len(runs))
        if args.torch:
            outcomes += [o for o in torch_outcomes(checkpoint, lengths) if args.only in o.plant.name]
        table(outcomes)
        if not args.only:
            for what, verdict, op in clean_runs(folder):
                clean[verdict] += 1
                if verdict in ("wrong", "precision"):
                    print(f"  clean, {what}: {verdict} {op.name} {op.reason}")
            print(f"clean runs: {dict(clean)}")
    return int(not bars_met(outcomes, clean))


def torch_outcomes(checkpoint, lengths):
    from plant_torch import TORCH_PLANTS, record

    for broken in TORCH_PLANTS:
        for n in lengths:
            if broken.tokens <= n <= broken.most:
                tokens = tokens_of(n)
                yield outcome(checkpoint, broken, n, recording(record(checkpoint, tokens, broken), tokens), False)


def share(outcomes: list[Outcome], good) -> tuple[int, int]:
    return sum(bool(good(o)) for o in outcomes), len(outcomes)


def bars_met(outcomes: list[Outcome], clean: Counter) -> bool:
    found, n = share(outcomes, lambda o: o.found)
    named, _ = share(outcomes, lambda o: o.named)
    alone, m = share([o for o in outcomes if o.tried_alone], lambda o: o.alone is None)
    return found >= 0.99 * n and named >= 0.9 * n and alone >= 0.95 * m and not clean["wrong"]


def table(outcomes: list[Outcome]) -> None:
    """One line a plant: op found, cause named, no cause without its hypothesis; then what was said instead, and the shares."""
    rows = defaultdict(list)
    for o in outcomes:
        rows[type(o.plant).__name__, o.plant.name].append(o)
    kinds = {"Plant": "reference", "RankPlant": "2 ranks", "TorchPlant": "transformers"}
    print(f"{'planted in':<14}{'fault':<54}{'op':<26}{'op found':>9}{'named':>8}{'alone':>8}{'s':>6}")
    for (kind, name), some in rows.items():
        op = some[0].plant.op if some[0].plant.layer is None else f"{some[0].plant.op}-{some[0].plant.layer}"
        found, named = (f"{a}/{b}" for a, b in (share(some, lambda o: o.found), share(some, lambda o: o.named)))
        alone = share([o for o in some if o.tried_alone], lambda o: o.alone is None)
        alone = f"{alone[0]}/{alone[1]}" if alone[1] else ""
        print(f"{kinds[kind]:<14}{name:<54}{op:<26}{found:>9}{named:>8}{alone:>8}{np.mean([o.seconds for o in some]):>6.1f}")
    for o in outcomes:
        if not (o.found and o.named) or o.alone:
            print(f"  {o.plant.name}, {o.tokens} tokens: {o.verdict} {o.guilty}, {o.cause}, alone {o.alone}")
    found, named = share(outcomes, lambda o: o.found), share(outcomes, lambda o: o.named)
    alone = share([o for o in outcomes if o.tried_alone], lambda o: o.alone is None)
    print(
        f"guilty op {found[0]}/{found[1]}, cause named {named[0]}/{named[1]}, no hypothesis fits without its own {alone[0]}/{alone[1]}"
    )


if __name__ == "__main__":
    sys.exit(main_faults())
