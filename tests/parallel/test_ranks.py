"""Several ranks under mpirun, on the cpu backend and on GPUs where there are several: the same answer as one, the same bits every time, and how they fail."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest
from greedy import PROMPT, greedy, op_set

import npglm
from npglm.errors import NpglmError
from npglm.forward import forward
from npglm.generate import Model
from npglm.gpu.device import visible
from npglm.parallel import started
from npglm.trace import metrics
from npglm.trace.record import read_trace
from reference.forward import forward as reference_forward
from reference.numerics import NUMERICS
from reference.ops import ReferenceOps

pytestmark = pytest.mark.parallel
ROOT = Path(__file__).parents[2]
SMALL = ROOT / "tests/golden/small.Q2_K.gguf"
MODELS = {"embedded": npglm.embedded(), "small": SMALL}
N = 24
CASES = [
    ("embedded", "tensor", 2),
    ("embedded", "expert", 2),
    ("embedded", "expert", 3),  # nothing divides by it
    ("embedded", "expert", 4),
    ("small", "expert", 2),
    ("small", "expert", 4),
]
try:
    N_GPUS = len(visible())
except NpglmError:
    N_GPUS = 0


def on_gpus(n: int, *case):
    return pytest.param("gpu", *case, marks=pytest.mark.skipif(n > N_GPUS, reason=f"needs a GPU for each of {n} ranks"))


THREADS = ("--backend", "cpu", "--threads", "1")


def command(n: int, *arguments) -> list[str]:
    beside = Path(sys.executable).with_name("mpirun")  # PyPI's mpich
    launcher = str(beside) if beside.exists() else shutil.which("mpirun")
    assert launcher, "needs mpirun: pip install 'npglm[mpi]' mpich"
    return [launcher, "-n", str(n), sys.executable, *map(str, arguments)]


def mpirun(n: int, *arguments, status: int = 0) -> subprocess.CompletedProcess:
    done = subprocess.run(command(n, *arguments), capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert done.returncode == status, done.stderr
    return done


def generate(n: int, *arguments, **options):
    return mpirun(n, ROOT / "scripts/generate.py", *arguments, *THREADS, **options)


@cache
def one_rank(place: str, model: str):
    """Greedy decoding by one rank, and the f64 logits along its ids."""
    checkpoint = npglm.load(MODELS[model])
    found = greedy(Model(checkpoint, forward, op_set(place, "f32")), N)
    reference = Model(checkpoint, reference_forward, ReferenceOps(NUMERICS["f64"]))
    kept = reference.cache(len(PROMPT) + N)
    truth = [reference.run(kept, piece)[0].copy() for piece in (PROMPT, *([i] for i in found["ids"][:-1].tolist()))]
    return found["logits"], found["ids"], truth


def same_bits(place, model, experts, n, tmp_path, numerics: str = "f32") -> dict:
    """What greedy.py found, the same on every rank, in both of two runs."""
    runs = []
    for run in ("a", "b"):
        out = tmp_path / f"{run}.npz"
        mpirun(n, ROOT / "tests/parallel/greedy.py", MODELS[model], experts, place, numerics, N, out)
        runs += [np.load(tmp_path / f"{run}.r{rank}.npz") for rank in range(n)]
    for run in runs:
        assert run["logits"].tobytes() == runs[0]["logits"].tobytes()
    return runs[0]


@pytest.mark.parametrize(("place", "model", "experts", "n"), [("cpu", *c) for c in CASES] + [on_gpus(c[-1], *c) for c in CASES])
def test_the_same_answer_as_one_rank(place, model, experts, n, tmp_path):
    run = same_bits(place, model, experts, n, tmp_path)
    logits, ids, truths = one_rank(place, model)
    assert run["ids"].tolist() == ids.tolist()
    for mine, twin, truth in zip(run["logits"], logits, truths, strict=True):
        metrics.check(mine, twin, truth, what=f"logits of {n} ranks, --experts {experts}")


@pytest.mark.parametrize(
    ("place", "model", "experts", "n"), [("cpu", "embedded", "tensor", 2), *(on_gpus(c[-1], *c) for c in CASES)]
)
def test_ggml_numerics_have_the_same_bits(place, model, experts, n, tmp_path):
    """Where a sum is left to the norm behind it. Rounding to 8 bits makes steps of what differs by an ulp, a part that is missing much more."""
    run = same_bits(place, model, experts, n, tmp_path, "ggml")
    alone = greedy(Model(npglm.load(MODELS[model]), forward, op_set(place, "ggml")), N)
    same = np.cumprod(run["ids"] == alone["ids"]).sum() + 1  # steps that have the same tokens before them
    away = np.linalg.norm(run["logits"] - alone["logits"], axis=-1) / np.linalg.norm(alone["logits"], axis=-1)
    assert same >= 3
    assert np.median(away[:same]) <= 0.2  # measured between backends: 0.005 and 0.05


@pytest.mark.parametrize(("backend", "n"), [("cpu", 12), ("reference", 6), ("emulated", 3), on_gpus(2, 12)])
def test_generate_prints_on_rank_0_what_one_rank_prints(backend, n):
    arguments = ("--tokens", "1,2,3,4,5", "-m", SMALL, "--max-tokens", n, "--numerics", "f32", "--backend", backend)
    alone = subprocess.run(
        [sys.executable, ROOT / "scripts/generate.py", *map(str, arguments)], capture_output=True, text=True, check=True
    )
    shared = mpirun(2, ROOT / "scripts/generate.py", *arguments, "--threads", "1", "--experts", "expert", "--check-shards")
    assert shared.stdout == alone.stdout
    lines = shared.stderr.splitlines()
    assert "each of 2 ranks holds its part of 134 tensors" in lines[-2]
    assert lines[-1].startswith("prompt 5 tokens")
    assert sum(line.startswith("prompt") for line in lines) == 1


def test_interactive_reads_on_rank_0():
    arguments = (ROOT / "scripts/generate.py", "-i", "--max-tokens", "4", *THREADS)
    said = [
        subprocess.run(how, input="Hello\nAnd?\n", capture_output=True, text=True, timeout=120, check=True).stdout
        for how in (command(2, *arguments), [sys.executable, *map(str, arguments)])
    ]
    assert said[0] == said[1] != ""


# --- traces -----------------------------------------------------------------------------------------------------------------


def compare(traces, model):
    arguments = [sys.executable, ROOT / "scripts/compare.py", *traces, "--model", model, "--json", "-"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    return done, report[0] if isinstance(report, list) else report


@pytest.mark.parametrize(
    ("model", "experts", "n"), [("embedded", "tensor", 2), ("embedded", "expert", 3), ("small", "expert", 4)]
)
def test_traces_of_ranks_are_joined(model, experts, n, tmp_path):
    ids = ",".join(map(str, PROMPT))
    arguments = ("--tokens", ids, "-o", tmp_path / "t.safetensors", "--experts", experts, "--numerics", "f32", *THREADS)
    mpirun(n, ROOT / "scripts/golden.py", MODELS[model], *arguments)
    traces = [tmp_path / f"t.r{rank}.safetensors" for rank in range(n)]
    for rank, path in enumerate(traces):
        metadata = read_trace(path).metadata
        assert (metadata["rank"], metadata["world"]) == (str(rank), str(n))
    done, report = compare(traces, MODELS[model])
    assert done.returncode == 0
    assert report["verdict"] == "equal"
    alone = tmp_path / "one.safetensors"
    golden = [sys.executable, ROOT / "scripts/golden.py", MODELS[model], "--tokens", ids, "-o", alone, "--numerics", "f32"]
    subprocess.run(golden, check=True, capture_output=True)
    folder = tmp_path / "ranks"
    folder.mkdir()
    for path in traces:
        path.rename(folder / path.name)
    pair = [sys.executable, ROOT / "scripts/compare.py", folder, alone]
    done = subprocess.run(pair, capture_output=True, text=True, check=False)  # without the model
    assert done.returncode == 0, done.stdout + done.stderr


# --- how they fail ----------------------------------------------------------------------------------------------------------


def one_line(done) -> str:
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stdout == ""
    return done.stderr


def test_a_split_that_cuts_a_block_is_refused():
    line = one_line(generate(2, "--tokens", "1", "-m", SMALL, status=2))
    assert "tensor blk.3.ffn_down_exps.weight: 2 ranks would cut its Q2_K blocks of 256" in line
    assert "--experts tensor works with 1 rank only, --experts expert works with 2 to 6 ranks" in line


def test_what_all_ranks_find_wrong_is_said_once():
    assert "nosuch.gguf: No such file" in one_line(generate(2, "--tokens", "1", "-m", "nosuch.gguf", status=2))
    assert "--nosuch" in one_line(generate(2, "--nosuch", status=2))
    refused = mpirun(2, ROOT / "scripts/bench.py", "--backend", "gpu", "--offload-experts", status=2)
    assert "--offload-experts goes with --backend gpu, on one rank" in one_line(refused)


def script(tmp_path, body: str) -> Path:
    path = tmp_path / "script.py"
    path.write_text(
        "import sys\nfrom npglm.cli import run\n" + textwrap.dedent(body) + "sys.exit(run(main, sys.argv[1:], ranks=True))\n"
    )
    return path


FAULTS = [
    ("raise NpglmError('disk')", 2, "script.py: error: disk\n"),
    ("1 / 0", 1, "ZeroDivisionError"),
    ("os.kill(os.getpid(), signal.SIGTERM)", 143, "script.py: terminated\n"),
    ("raise BrokenPipeError", 141, ""),
]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("fault", "status", "says"), FAULTS)
def test_one_rank_that_fails_ends_all(rank, fault, status, says, tmp_path):
    """The other waits for it in a sum."""
    body = f"""
        import os, signal
        import numpy as np
        from npglm.errors import NpglmError
        def main(argv, ranks):
            if ranks.rank == {rank}:
                {fault}
            ranks.sum(np.ones(3))
        """
    done = mpirun(2, script(tmp_path, body), status=status)
    assert done.stderr == says if status > 1 else done.stderr.count(says) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_waits_for_no_rank(rank, tmp_path):
    """The other two are outside MPI, as in a kernel that waits for this one, and do not listen."""
    body = f"""
        import os, signal, time
        from npglm.errors import NpglmError
        def main(argv, ranks):
            if ranks.rank == {rank}:
                raise NpglmError('disk')
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(60)
        """
    started = perf_counter()
    assert mpirun(3, script(tmp_path, body), status=2).stderr == "script.py: error: disk\n"
    assert perf_counter() - started < 12


@pytest.mark.parametrize("broken", ["012", "1"])
def test_ranks_without_mpi4py_end_all(broken, tmp_path):
    """All of them, which is said once; or one, for which the others wait in MPI."""
    body = f"""
        import os
        if os.environ["PMI_RANK"] in "{broken}":
            sys.modules["mpi4py"] = None
        main = None
        """
    says = "mpirun started 3 ranks, but mpi4py does not work: import of mpi4py halted"
    assert says in one_line(mpirun(3, script(tmp_path, body), status=2))


def test_ctrl_c_ends_all():
    arguments = (
        ROOT / "scripts/generate.py",
        "--tokens",
        "1,2,3",
        "-m",
        SMALL,
        "--experts",
        "expert",
        "--max-tokens",
        "100000",
        *THREADS,
    )
    process = subprocess.Popen(
        command(2, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    process.stdout.read(8)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr == "generate.py: interrupted\n"


PLANT = f"""
    sys.path.insert(0, {str(ROOT / "scripts")!r})
    import SCRIPT
    from npglm.parallel import Sharding
    part = Sharding.part
    def planted(self, tensor, attribute, rank):
        return part(self, tensor, attribute, 0 if tensor.name in ("blk.0.ffn_gate.weight", "blk.0.ffn_up.weight") else rank)
    Sharding.part = planted
    main = SCRIPT.main
    """


def test_a_planted_shard_is_named(tmp_path):
    """The loader takes rank 0 for granted, for gate and up of the first layer: where this project comes from."""
    planted = script(tmp_path, PLANT.replace("SCRIPT", "generate"))
    line = one_line(mpirun(2, planted, "--tokens", "1,2", "--check-shards", *THREADS, status=2))
    assert "rank 1 holds rank 0's half of tensor blk.0.ffn_gate.weight; 1 more tensor is wrong" in line


def test_compare_names_a_planted_shard(tmp_path):
    planted, ids = script(tmp_path, PLANT.replace("SCRIPT", "golden")), ",".join(map(str, PROMPT))
    mpirun(2, planted, npglm.embedded(), "--tokens", ids, "-o", tmp_path / "t.safetensors", "--numerics", "f32", *THREADS)
    done, report = compare(tmp_path.glob("t.r*.safetensors"), npglm.embedded())
    assert done.returncode == 1
    assert (report["guilty"]["op"], report["guilty"]["layer"], report["guilty"]["rank"]) == ("ffn_gate", 0, 1)
    op = next(o for o in report["ops"] if (o["op"], o["layer"], o["rank"]) == ("ffn_gate", 0, 1))
    assert "rank 1 holds rank 0's shard" in json.dumps(op)


def test_another_mpi_than_mpiruns_is_refused(tmp_path):
    """Every process would see itself alone, as rank 0 of 1, and run the whole model."""

    def started(**environment) -> str:
        arguments = [sys.executable, ROOT / "scripts/generate.py", "--tokens", "1"]
        done = subprocess.run(arguments, capture_output=True, text=True, check=False, env=os.environ | environment)
        assert done.returncode == 2
        return one_line(done)

    by_other = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
    assert "mpirun started 2 ranks, but mpi4py uses MPICH: this mpirun is of Open MPI" in started(**by_other)
    assert "mpirun started 2 ranks, but mpi4py sees 1: its MPICH is not the one" in started(PMI_SIZE="2", PMI_RANK="0")
    (tmp_path / "mpi4py.py").write_text("raise ImportError('no such thing')")
    says = started(**by_other, PYTHONPATH=str(tmp_path))
    assert "mpirun started 2 ranks, but mpi4py does not work: no such thing (pip install 'npglm[mpi]')" in says


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (("--max-tokens", "3"), "rank 0 has --max-tokens 2, rank 1 has 3: all ranks take the same"),
        (("--experts", "expert"), "rank 0 has --experts None, rank 1 has expert: all ranks take the same"),
        (("--seed", "x"), "argument --seed: invalid int value: 'x' (see --help)"),
        (("--model", MODELS["small"]), "rank 0 has a model with header "),
    ],
)
def test_ranks_with_other_arguments_are_refused(second, says):
    first = [str(a) for a in command(1, ROOT / "scripts/generate.py", "--tokens", "1,2,3", "--max-tokens", "2", *THREADS)]
    both = [*first, ":", *first[1:], *map(str, second)]
    done = subprocess.run(both, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"generate.py: error: {says}")
    assert done.stderr.count("\n") == 1
    assert not done.stdout


def test_half_set_launcher_variables_are_ignored(monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    assert started() is None
    monkeypatch.setenv("PMI_RANK", "x")
    assert started() is None
