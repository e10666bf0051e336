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
from dataclasses import replace
from pathlib import Path

import numpy as np

from npglm import cli
from npglm.checkpoint import shard_paths
from npglm.errors import NpglmError

TESTS = Path(__file__).parents[1] / "tests"
sys.path += [str(TESTS), str(TESTS / "trace")]  # synth and fault_suite, where they are asked for
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "npglm"


def parse(argv):
    parser = cli.Parser(description=__doc__)
    parser.add_argument("--backend", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--faults", action="store_true", help="the confusion table of the fault suite, instead of a backend")
    parser.add_argument("--shape", default="glm-5.2", help="of --backend gpu")
    parser.add_argument("--layers", type=int, default=15, metavar="N", help="of --backend gpu: 3 dense and N - 3 MoE layers")
    parser.add_argument("--offload-experts", action="store_true", help="of --backend gpu: routed experts in host memory")
    parser.add_argument("--against", choices=["llama.cpp"], default="llama.cpp")
    parser.add_argument("--model", "-m", help="a GGUF file (default: made once, 2.4 GB, in ~/.cache/npglm)")
    parser.add_argument("--tier", help="instructions to compile for (default: the best here): avx512vnni, avxvnni, avx2, plain")
    parser.add_argument("--threads", type=cli.token_ids, metavar="1,2", help="thread counts (default: 1 and all cores)")
    parser.add_argument("--prompts", type=cli.token_ids, default=[64, 512, 2048], metavar="64,512")
    parser.add_argument("--depths", type=cli.token_ids, default=[0, 4096], metavar="0,4096")
    parser.add_argument("--rounds", type=int, default=3)
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
    if args.offload_experts and (ranks or args.faults or args.backend != "gpu"):
        raise NpglmError("--offload-experts goes with --backend gpu, on one rank")
    if args.kernels and (args.faults or args.backend != "cpu"):
        raise NpglmError("--kernels goes with --backend cpu")
    if args.model is not None and (args.kernels or args.faults or args.backend != "cpu"):
        raise NpglmError("--model goes with --backend cpu, without --kernels and --faults")
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
        write_model(path.with_suffix(".part"), 1, shape=GLM52, n_merges=64, **shape)
        path.with_suffix(".part").rename(path)
    return path


SAME = 1e-4  # relative L2 of a row of logits
FEW = 0.01  # share of 8-bit steps that may differ where numbers are near: a fault that small moves more
NEAR = 2e-3  # of a block's largest value: two ulps of f16, to which caches, and llama.cpp's attention weights, are rounded


def check(checkpoint, n_threads: int) -> dict:
    """Logits of 8 positions of ours and of llama.cpp against the reference. Raises NpglmError where they differ.

    The reference gets the other side's experts and, in ggml numerics, its 8-bit steps where both round nearly the same number: there an
    ulp becomes a step, so that without it any two orders of summation end as far apart as the rounding itself is. What it gets is
    judged too. How far the reference's f32 sums are from its f64 sums is printed for comparison.
    """
    import npglm.cpu
    from npglm.cache import Cache
    from npglm.forward import forward
    from npglm.trace.formats.llamacpp import map_graph
    from npglm.trace.inject import TOP_K, ChoosingOps, Roundings, flips, product_inputs
    from npglm.trace.llamacpp import record_nodes
    from npglm.trace.probes import NO_PROBE, Keep
    from reference.forward import forward as reference_forward
    from reference.numerics import F32, GGML
    from reference.ops import ReferenceOps

    ids = np.random.default_rng(1).integers(0, checkpoint.config.vocab, 8).astype(np.int32)
    pos = np.arange(8, dtype=np.int32)

    def logits(forward, ops, weights, probe):
        cache = Cache(checkpoint.config, 8, ops)
        return np.array(ops.numpy(forward(weights, checkpoint.config, cache, ids, pos, ops, probe)))

    def ours(numerics):
        """Logits, and every probe."""
        ops, probe = npglm.cpu.op_set(numerics, n_threads), Keep()
        weights = ops.load(checkpoint)
        fused = logits(forward, ops, weights, NO_PROBE)
        if not np.isfinite(fused).all():
            raise NpglmError(f"{checkpoint.path.name}: {numerics}: logits are not finite")
        if not np.array_equal(fused, logits(forward, ops.traced(), weights, probe)):
            raise NpglmError(f"{numerics}: logits with probes are others than without")
        return fused, probe.seen

    def llama():
        nodes = record_nodes(checkpoint, ids.tolist(), n_threads, flash_attn=False)
        seen = {m.name: m.take(m.node.value)[0] for m in map_graph(nodes, n_tokens=8)}
        return seen["result_output"], seen

    found, differ = {}, []

    def reference(numerics, seen, near=None):
        """Logits. near: 8-bit steps are put in too, and judged: all are near, few differ, and so do choices at near ties only."""
        rounding = near and Roundings(product_inputs(checkpoint.config, checkpoint.weights, seen), near)
        ops, gaps = ReferenceOps(replace(numerics, blocks=rounding), 0), []

        def choose(kind, layer, scores, ours):
            theirs = seen[f"{kind}-{layer}"][:, : ours.shape[1]]
            for flip in flips(scores, ours, theirs, pos if kind == TOP_K else None):
                row = scores[flip.row]
                gaps.append(flip.gap / np.abs(row[np.isfinite(row)]).max(initial=1e-30))
            return theirs

        weights = ops.load(checkpoint)
        y = logits(reference_forward, ChoosingOps(ops, weights, choose), weights, NO_PROBE)
        if near:
            worst, steps = np.max(gaps, initial=0), ""
            if rounding.values:
                steps = f"{rounding.moved} of {rounding.values} 8-bit steps (what is rounded differs by at most {rounding.away:.1e}; "
                steps += f"more than {near} in {rounding.kept} blocks), "
            print(f"  put into the reference: {steps}{len(gaps)} rows' choices (of scores at most {worst:.1e} apart)")
            if rounding.kept or rounding.moved > FEW * rounding.values or not worst <= near:
                differ.append(f"{numerics.name}: 8-bit steps or choices")
        return y

    def compare(what, a, b, judged=True):
        rms = [float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in zip(a, b, strict=True)]
        same = int((a.argmax(-1) == b.argmax(-1)).sum())
        found[what] = {"relative_l2": rms, "same_argmax": same}
        print(f"{what}: relative L2 {np.median(rms):.1e} ({min(rms):.1e} to {max(rms):.1e}), argmax {same}/8", flush=True)
        if judged and not (max(rms) <= SAME and same == 8):
            differ.append(what)

    mine, seen = ours("f32")
    compare("f32: cpu against reference", mine, reference(F32, seen, NEAR))
    mine, seen = ours("ggml")
    compare("ggml: cpu against reference, flips injected", mine, reference(GGML, seen, NEAR))
    theirs, their_seen = llama()
    compare("ggml: llama.cpp against reference, flips injected", theirs, reference(GGML, their_seen, NEAR))
    truth = reference(GGML.truth(), seen)
    compare("ggml: cpu against f64 sums", mine, truth, judged=False)
    compare("ggml: reference against f64 sums", reference(GGML, seen), truth, judged=False)
    compare("ggml: llama.cpp against f64 sums", theirs, truth, judged=False)
    if differ:
        raise NpglmError(f"further apart than roundings are: {'; '.join(differ)}")
    return found


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
        checked = {} if args.no_check else check(checkpoint, counts[-1])
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
    writes = args.json and (ranks is None or ranks.rank == 0)
    with cli.whole_file(args.json, shard_paths(Path(args.model)) if args.model else ()) if writes else nullcontext() as out:
        figures = on_gpu(args, ranks) if args.backend == "gpu" else on_cpu(args)
        if out:
            out.write(json.dumps(figures, indent=1).encode())
    return 0 if figures.get("same_bits", True) else 1


if __name__ == "__main__":
    sys.exit(cli.run(main, ranks=True))
