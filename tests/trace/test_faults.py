"""Planted faults: the guilty op is found and its cause named. A plant per family here; all of them, at all lengths, under `slow`."""

import pytest
from fault_suite import CLEAN, LENGTHS, clean_ranks, clean_runs, judge, judge_ranks, model_file, recording, tokens_of
from plant import PLANTS
from plant_ranks import RANK_PLANTS

from npglm.checkpoint import Checkpoint
from npglm.trace.compare import compare
from npglm.trace.faults import HYPOTHESES
from npglm.trace.graph import Model
from reference.numerics import NUMERICS

ONE_PER_FAMILY = list({p.families: p for p in PLANTS.values() if p.tokens <= 9}.values())


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="session")
def checkpoint(folder):
    return Checkpoint.open(model_file(folder))


def check(outcome):
    assert outcome.found, f"{outcome.verdict}, guilty {outcome.guilty}"
    assert outcome.verdict in ("wrong", "precision")
    assert outcome.named, outcome.cause


@pytest.mark.parametrize("broken", ONE_PER_FAMILY, ids=lambda p: p.name)
def test_a_planted_fault_is_found_and_named(checkpoint, broken):
    check(judge(checkpoint, broken, 9))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "n"),
    [pytest.param(p, n, id=f"{p.name}-{n}") for p in PLANTS.values() for n in LENGTHS if n >= p.tokens],
)
def test_every_planted_fault_at_every_length(checkpoint, broken, n):
    check(judge(checkpoint, broken, n))


@pytest.mark.slow
def test_a_hundred_clean_runs_are_never_wrong(tmp_path):
    runs = list(clean_runs(tmp_path))
    assert len(runs) >= 100
    assert {verdict for _, verdict, _ in runs} <= {"equal", "rounding"}


@pytest.mark.parametrize("broken", RANK_PLANTS, ids=lambda p: p.name)
def test_a_broken_rank_is_found_and_named(folder, broken):
    check(judge_ranks(folder, broken, 9))


def test_a_wrong_shard_shows_behind_an_all_reduce_too(folder):
    check(judge_ranks(folder, RANK_PLANTS[0], 9, reduced=True))


@pytest.mark.parametrize("reduced", [False, True])
def test_right_ranks_join(folder, reduced):
    assert clean_ranks(folder, 7, reduced) == "equal"


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_run_is_never_wrong(checkpoint, name):
    report = compare(checkpoint, recording(CLEAN[name](Model(checkpoint, tokens_of(12)), 3), tokens_of(12)))
    assert report.verdict == ("equal" if name in ("f32", "ulp jitter") else "rounding"), report.guilty_op
    words = {"bf16": "bf16 throughout", "f16": "f16 throughout", "8-bit": "8-bit activations before quantised matmuls"}
    assert report.numerics[:1] == ([words[name]] if name in words else [])


@pytest.mark.parametrize("name", ["q_pe half-split", "routed factor dropped", "shared expert x 0.4"])
def test_without_its_hypothesis_a_fault_has_no_cause_but_a_structure(checkpoint, name):
    outcome = judge(checkpoint, PLANTS[name], 9, alone=True)
    assert outcome.alone is None


@pytest.mark.parametrize("numerics", ["ggml", "bf16"])
@pytest.mark.parametrize(
    "name", ["q_pe theta 1e6", "swiglu with gate and up swapped", "shared expert x 0.4", "router bias left out"]
)
def test_faults_show_in_engines_that_round(checkpoint, numerics, name):
    broken = PLANTS[name]
    outcome = judge(checkpoint, broken, max(12, broken.tokens), numerics=NUMERICS[numerics])
    assert outcome.found, outcome.guilty
    assert outcome.named, outcome.cause


def test_every_family_of_hypotheses_has_a_plant_or_is_listed():
    planted = {f for p in [*PLANTS.values(), *RANK_PLANTS] for f in p.families}
    assert {h.family for h in HYPOTHESES} - planted <= {"slots from another token"}
