#!/usr/bin/env python
"""Measure. --backend cpu: against llama.cpp in one run, on a full-width random checkpoint or one of yours; --backend gpu: every op, decode
and prefill at full width, with weights made on the device, or with mpirun decode of a model that several GPUs share; --faults: how well
compare.py finds and names planted faults."""

import json
import os
import platform
import resource
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from npglm import cli
from npglm.checkpoint import shard_paths
from npglm.errors import NpglmError

TESTS = Path(__file__).parents[1] / "tests"
sys.path += [str(TESTS), str(TESTS / "trace")]  # synth and fault_suite, where they are asked for
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "npglm"
OF_CPU = ("model", "kernels", "tier", "prompts", "depths", "rounds", "decode", "clock", "no_check")
OF_GPU = ("shape", "layers", "offload_experts")


def parse(argv):
    parser = cli.Parser(description=__doc__)
    parser.add_argument("--backend", choices=["cpu", "gpu"], default="cpu", help="what is measured")
    parser.add_argument(
        "--faults", action="store_true", help="the confusion table of the fault suite, instead of a backend: takes minutes"
    )
    parser.add_argument("--shape", default="glm-5.2", help="of --backend gpu")
    parser.add_argument("--layers", type=int, default=15, metavar="N", help="of --backend gpu: 3 dense and N - 3 MoE layers")
    parser.add_argument("--offload-experts", action="store_true", help="of --backend gpu: routed experts in host memory")
    parser.add_argument("--against", choices=["llama.cpp"], default="llama.cpp", help="of --backend cpu: the other engine")
    parser.add_argument("--model", "-m", help="a GGUF file (default: made once, 2.4 GB, in ~/.cache/npglm)")
    parser.add_argument("--tier", help="instructions to compile for (default: the best here): avx512vnni, avxvnni, avx2, plain")
    counts, lengths, depths = map(cli.integers, ("thread counts", "prompt lengths", "cached tokens"))
    parser.add_argument("--threads", type=counts, metavar="1,2", help="thread counts (default: 1 and all cores)")
    parser.add_argument("--prompts", type=lengths, default=[64, 512, 2048], metavar="64,512", help="prefill of so many tokens")
    parser.add_argument("--depths", type=depths, default=[0, 4096], metavar="0,4096", help="decode behind so many tokens")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of both in turns")
    parser.add_argument("--decode", type=int, default=16, metavar="N", help="tokens decoded a round")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: this process's CPU time; for 1 thread")
    parser.add_argument("--kernels", action="store_true", help="single products against ggml's, instead of the model")
    parser.add_argument("--no-check", action="store_true", help="do not compare logits first")
    parser.add_argument("--json", metavar="OUT", help="write the figures there")
    return parser.parse_args(argv)


def check_options(args, ranks) -> None:
    """Raises NpglmError for options that would do nothing."""
    if ranks and (args.faults or args.backend != "gpu"):
        raise NpglmError("several ranks are measured with --backend gpu only")
    usual = vars(parse([]))
    for backend, names in (("cpu", OF_CPU), ("gpu", OF_GPU)):
        for name in names:
            if getattr(args, name) != usual[name] and (args.faults or args.backend != backend):
                raise NpglmError(f"--{name.replace('_', '-')} goes with --backend {backend}, without --faults")
    if args.offload_experts and ranks:
        raise NpglmError("--offload-experts goes with --backend gpu, on one rank")
    if args.threads and (args.faults or (args.backend == "gpu" and not args.offload_experts)):
        raise NpglmError("--threads goes with --backend cpu, or with --offload-experts")
    if args.model is not None and args.kernels:
        raise NpglmError("--model goes with --backend cpu, without --kernels")
    if args.json is not None and args.faults:
        raise NpglmError("--faults prints a table and writes no --json")
    for name, least, most in (
        ("rounds", 1, 1000), ("decode", 1, 1 << 16), ("layers", 8, 1000), ("prompts", 1, 1 << 31), ("depths", 0, 1 << 31),
        ("threads", 1, 1024),
    ):  # fmt: skip
        given = getattr(args, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not least <= value <= most:
                raise NpglmError(f"--{name}: {value} is outside {least} to {most}")


def full_width() -> Path:
    """A checkpoint of real widths: 4 layers (1 dense), 32 experts, a vocabulary of 8192. Random blocks, always the same."""
    path = CACHE / "full-width-4x32.gguf"
    if not path.exists():
        from synth import GLM52, write_model

        CACHE.mkdir(parents=True, exist_ok=True)
        print(f"writing {path}", file=sys.stderr)
        shape = {
            "vocab": 8192,
            "n_layers": 4,
            "n_dense": 1,
            "full": (True, True, False, False),
            "n_experts": 32,
            "context": 16384,
        }
        with cli.whole_file(path) as file:
            write_model(Path(file.name), 1, shape=GLM52, n_merges=64, **shape)
    return path


def faults() -> int:
    """Prints the table; the status says whether the bars were reached."""
    from fault_suite import main_faults

    return main_faults([])


def on_gpu(args, ranks) -> dict:
    from npglm.gpu.bench import SHAPES, bench

    if args.shape not in SHAPES:
        raise NpglmError(f"--shape is {args.shape}, expected {' or '.join(SHAPES)}")
    if ranks:
        from npglm.gpu import bench_ranks

        return bench_ranks.bench(ranks, args.shape, args.layers)
    if args.offload_experts:
        from npglm.gpu.offload_bench import offload_bench

        return offload_bench(args.shape, args.layers, args.threads and args.threads[0])
    return bench(args.shape, args.layers)


def on_cpu(args) -> dict:
    import npglm.cpu

    if args.tier:
        npglm.cpu.select(args.tier)
    from npglm.cpu import bench, threads
    from npglm.trace.bench_check import check
    from npglm.trace.llamacpp import need_llama_cpp

    need_llama_cpp()
    cores = threads.physical_cores()
    counts = args.threads or sorted({1, cores})
    if max(counts) > threads.config.NUMBA_NUM_THREADS:
        raise NpglmError(f"--threads: {max(counts)} is more than the {threads.config.NUMBA_NUM_THREADS} of this process")
    if args.clock == "cpu" and counts != [1]:
        raise NpglmError("--clock cpu counts all threads' time together: use --threads 1")
    say = lambda text: print(text, flush=True)
    say(f"{platform.processor() or platform.machine()}, {cores} cores, tier {npglm.cpu.tier()}")
    if os.getloadavg()[0] > 0.5:
        print(
            f"note: the load is {os.getloadavg()[0]:.1f}; others use this machine, so only ratios mean something",
            file=sys.stderr,
        )
    checked, bandwidth, rows, checkpoint = {}, {}, [], None
    if not args.kernels:
        checkpoint = npglm.load(full_width() if args.model is None else args.model)
        longest = max(*args.prompts, *(depth + args.decode for depth in args.depths))
        if longest > checkpoint.config.context_length:
            raise NpglmError(
                f"{checkpoint.path.name}: its context is {checkpoint.config.context_length}, {longest} tokens are asked for"
            )
        say(checkpoint.path.name)
        checked = {} if args.no_check else check(checkpoint, counts[-1], say)
    for n in counts:
        bandwidth[n] = bench.read_bandwidth(n, args.clock)
        say(f"read bandwidth, {n} threads: {bandwidth[n] / 1e9:.1f} GB/s")
        if args.kernels:
            from synth import random_blocks

            rng = np.random.default_rng(1)
            rows += bench.measure_kernels(
                lambda *shape, rng=rng: random_blocks(*shape, rng), n, args.rounds, bandwidth[n], args.clock, say
            )
        else:
            rows += bench.measure(checkpoint, n, args.prompts, args.depths, args.rounds, args.decode, args.clock, say)
    if not args.kernels:
        say("\n" + bench.markdown(rows, bandwidth))
        rows = [vars(row) for row in rows]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    say(f"\npeak memory {peak:.0f} MiB, both engines and the mapped file")
    return {"bandwidth": bandwidth, "rows": rows, "logits": checked, "tier": npglm.cpu.tier()}


def main(argv=None, ranks=None) -> int:
    args = parse(argv)
    check_options(args, ranks)
    if ranks:
        ranks.agree(cli.options(args))
    if args.faults:
        return faults()
    writes = args.json is not None and (ranks is None or ranks.rank == 0)
    with cli.whole_file(args.json, shard_paths(Path(args.model)) if args.model else ()) if writes else nullcontext() as out:
        figures = on_gpu(args, ranks) if args.backend == "gpu" else on_cpu(args)
        if out:
            out.write(json.dumps(figures, indent=1).encode())
    return 0 if figures.get("same_bits", True) else 1


if __name__ == "__main__":
    sys.exit(cli.run(main, ranks=True))
