"""Everything that needs a GPU: the op cases (none may be skipped), end-to-end runs, compute-sanitizer, several ranks and the benchmark.

python scripts/gpu_check.py [--only cases,e2e,sanitizer,ranks,bench] [--models A.gguf,B.gguf] [--layers N] [--json FIGURES]
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

import npglm
import npglm.forward
import reference.forward
from npglm import cli
from npglm.cache import Cache
from npglm.checkpoint import Checkpoint
from npglm.gpu import op_set
from npglm.gpu.bench import bench
from npglm.gpu.device import open_gpu, visible
from npglm.gpu.indexer import LONG_ROW
from npglm.offload import OffloadOps
from reference.numerics import NUMERICS
from reference.ops import ReferenceOps

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "gpu"), str(ROOT / "tests")]
SMALL = ROOT / "tests" / "golden" / "small.Q2_K.gguf"
STEPS = ("e2e", "cases", "sanitizer", "ranks", "bench")
N_GREEDY = 24
F32_ERROR = 1e-4  # of a logit
SANITIZED = (
    "test_fused", "test_route", "test_expert_tiles", "test_norms", "test_rope", "test_sample", "test_select_top_k_ties",
    "test_select_top_k_of_long", "test_store", "test_padding", "test_many_tokens", "test_indexer_score", "test_quantize",
    "test_linear_heads", "test_linear_decoded", "test_linear_experts", "test_embed_and_store", "test_queries_and_latents",
    "test_projections", "test_an_indexer_after", "test_attend", "test_exchange", "test_sum_add_norm", "test_fetch_experts",
    "test_meeting",
)  # fmt: skip


def cases() -> bool:
    """tests/ops on the GPU. A skipped case is a failure."""
    passed, run, skipped = on_gpu("tests/ops", "slow or not slow")
    print(f"cases: {run} on the GPU, {skipped} skipped")
    return passed and not skipped


def ranks() -> bool:
    """tests/parallel on GPUs, a rank on each: logits against one rank's, every shard's bytes, the same bits twice."""
    n = len(visible())
    if n < 2:
        print("ranks: not run: one GPU")
        return True
    passed, run, skipped = on_gpu("tests/parallel", "parallel")
    print(f"ranks: {run} cases on {n} GPUs, {skipped} need more")
    return passed and run > skipped


def on_gpu(folder: str, marked: str) -> tuple[bool, int, int]:
    """The folder's cases on the GPU: whether all that ran have passed, how many there are, how many were skipped."""
    report = ROOT / "gpu-cases.xml"
    command = [sys.executable, "-m", "pytest", "-q", folder, "-k", "gpu", "-m", marked, f"--junitxml={report}"]
    code = subprocess.run([*command, "-p", "no:cacheprovider"], cwd=ROOT, check=False).returncode
    suite = list(ElementTree.parse(report).iter("testcase"))
    report.unlink()
    return code == 0 and bool(suite), len(suite), sum(case.find("skipped") is not None for case in suite)


def end_to_end(models: list[str]) -> bool:
    """These models, and a random one that runs the kernels of a wide model."""
    from synth import WIDE, write_model

    with tempfile.TemporaryDirectory() as folder:
        wide = write_model(Path(folder) / "wide.gguf", seed=1, shape=WIDE)
        return False not in [same_ids(Path(model)) for model in (*models, wide)]


def is_wide(config) -> bool:
    return config.q_rank % 256 == 0


def capacity(config) -> int:
    """Of the caches: a wide model's have so many rows that several blocks search them."""
    return LONG_ROW + 128 if is_wide(config) else 64


def same_ids(model: Path) -> bool:
    """Greedy tokens against the reference with the same numerics, both through forward() and through the captured decode loop.

    f32: logits within F32_ERROR, and ids may differ only where the reference's best two logits are closer than the error of that
    step's logits. ggml: the median distance of single tokens (of a wide model: of 24 steps) from f64 sums is no larger than three
    times the f32 twin's, since rounding to 8 bits lets whole texts part.
    """
    from test_end_to_end import strays, strays_of_steps

    checkpoint = Checkpoint.open(model)
    prompt = np.arange(80 if is_wide(checkpoint.config) else 12, dtype=np.int32) * 7 % checkpoint.config.vocab
    good = True
    for numerics in ("f32", "ggml"):
        ops, twin = op_set(numerics, "gpu"), ReferenceOps(NUMERICS[numerics])
        theirs = logits_of(twin, reference.forward.forward, checkpoint, prompt)
        mine = logits_of(ops, npglm.forward.forward, checkpoint, prompt, forced=[int(row.argmax()) for row in theirs])
        again = logits_of(ops, npglm.forward.forward, checkpoint, prompt, forced=[int(row.argmax()) for row in theirs])
        top = np.sort(theirs, axis=-1)
        gaps, errors = top[:, -1] - top[:, -2], np.abs(mine - theirs).max(-1)
        differ = np.flatnonzero(mine.argmax(-1) != theirs.argmax(-1))
        near = all(gaps[i] < errors[i] for i in differ)
        same_bits = mine.tobytes() == again.tobytes()
        good &= same_bits and (numerics == "ggml" or (near and errors.max() <= F32_ERROR))
        print(
            f"{model.name}, {numerics}: {N_GREEDY - len(differ)} of {N_GREEDY} ids equal, logit error {errors.max():.3g}, same bits twice: {same_bits}"
        )
        for i in differ:
            print(f"  step {i}: the reference's top two are {gaps[i]:.3g} apart, the logit error is {errors[i]:.3g}")
        decoded = decode_loop(ops, checkpoint, prompt, int(mine[0].argmax()))
        plain = greedy(ops, checkpoint, prompt)
        print(
            f"{model.name}, {numerics}: captured decode loop {'equals' if decoded == plain else 'DIFFERS from'} plain launches"
        )
        good &= decoded == plain
        offloaded = decode_loop(offloaded_half(ops.device, numerics), checkpoint, prompt, int(mine[0].argmax()))
        equal = sum(a == b for a, b in zip(offloaded, plain, strict=True))
        print(f"{model.name}, {numerics}: with the experts on the host {equal} of {len(plain)} ids equal")
        good &= numerics == "ggml" or equal == len(plain)
        if numerics == "ggml":
            for what, each in (("GPU", ops), ("GPU and host", offloaded_half(ops.device, numerics))):
                if is_wide(checkpoint.config):
                    here, there = map(np.median, strays_of_steps(checkpoint, each, N_GREEDY))
                else:
                    here, there = strays(checkpoint, each)
                print(f"{model.name}, ggml: logits are {here:.2g} from f64 sums on the {what}, the f32 twin's {there:.2g}")
                good &= here <= 3 * there + 1e-6
    return good


def offloaded_half(device, numerics: str) -> OffloadOps:
    """The GPU takes half of a token's experts, few as they are in these models."""
    ops = OffloadOps(device, numerics, "gpu")
    ops.fetched = 2
    return ops


def logits_of(ops, forward, checkpoint, prompt, forced=None) -> np.ndarray:
    """[N_GREEDY, Y]: logits of each step; forced: the ids to go on with (default: greedy)."""
    weights, config = ops.load(checkpoint), checkpoint.config
    cache, rows, new, at = Cache(config, capacity(config), ops), [], prompt, 0
    for i in range(N_GREEDY):
        pos = np.arange(at, at + len(new))
        y = forward(weights, config, cache, ops.array(new, np.int32), ops.array(pos, np.int32), ops, n_out=1)
        rows.append(np.array(ops.numpy(y)[0]))
        at += len(new)
        cache.length = at
        new = np.array([forced[i] if forced else rows[-1].argmax()], np.int32)
    return np.stack(rows)


def greedy(ops, checkpoint, prompt) -> list[int]:
    return [int(row.argmax()) for row in logits_of(ops, npglm.forward.forward, checkpoint, prompt)][1:]


def decode_loop(ops, checkpoint, prompt, first: int) -> list[int]:
    weights, config = ops.load(checkpoint), checkpoint.config
    cache = Cache(config, capacity(config), ops)
    decoder = ops.decode(npglm.forward.forward, weights, config, cache)
    tokens, pos = ops.array(prompt, np.int32), ops.array(range(len(prompt)), np.int32)
    npglm.forward.forward(weights, config, cache, tokens, pos, ops, n_out=1)
    decoder.start(first, len(prompt))
    return [decoder.next() for _ in range(N_GREEDY - 1)]


def sanitizer() -> bool:
    """memcheck and racecheck over cases of every family."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if not tool:
        print("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
        return False
    pick = "gpu and (" + " or ".join(SANITIZED) + ")"
    good = True
    for check in ("memcheck", "racecheck"):
        command = [
            tool,
            "--tool",
            check,
            "--error-exitcode",
            "9",
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-k",
            pick,
            "tests/ops",
        ]
        done = subprocess.run([*command, "-p", "no:cacheprovider"], cwd=ROOT, text=True, capture_output=True, check=False)
        print(
            f"{check}: exit {done.returncode}", *(done.stdout + done.stderr).strip().splitlines()[-12:], sep="\n  ", flush=True
        )
        good &= done.returncode == 0
    return good


def main(argv=None) -> int:
    parser = cli.Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(STEPS), help="comma-separated steps")
    parser.add_argument("--models", default=f"{SMALL},{npglm.embedded()}", help="of e2e, comma-separated")
    parser.add_argument("--layers", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the benchmark's figures here")
    args = parser.parse_args(argv)
    wanted = args.only.split(",")
    if unknown := [step for step in wanted if step not in STEPS]:
        parser.error(f"--only: {unknown[0]!r} is none of {', '.join(STEPS)}")
    open_gpu()  # or one line that says why not
    steps = {"cases": cases, "e2e": lambda: end_to_end(args.models.split(",")), "sanitizer": sanitizer, "ranks": ranks}
    failed = []
    for step in wanted:
        print(f"=== {step}", flush=True)
        if step == "bench":
            figures = bench(layers=args.layers)
            if args.json:
                args.json.write_text(json.dumps(figures, indent=1))
        elif not steps[step]():
            failed.append(step)
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(cli.run(main))
