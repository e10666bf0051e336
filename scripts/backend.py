"""Which forward pass and op set a script runs, by name."""

import sys
from importlib.util import find_spec
from time import perf_counter

from npglm import parallel
from npglm.checkpoint import EXPERT_SPLITS
from npglm.errors import NpglmError
from npglm.generate import Model
from npglm.progress import LoadProgress

BACKENDS = ("auto", "reference", "cpu", "gpu", "emulated")
NUMERICS = ("f32", "f64", "ggml", "bf16")


def add_arguments(parser, backend="auto"):
    parser.add_argument("--backend", choices=BACKENDS, default=backend, help="what computes; auto takes the fastest there is")
    parser.add_argument("--numerics", choices=NUMERICS, help="how it rounds (default: f32 on reference, ggml elsewhere)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all)")
    parser.add_argument(
        "--offload-experts",
        action="store_true",
        help="with a GPU: leave the routed experts in host memory, where the CPU computes them; what does not fit there is read from "
        "the file each time, which is slow (describe.py says what fits where)",
    )
    parser.add_argument("--weight-cache", type=float, default=1.0, metavar="GIB", help="decoded weights that reference keeps")


def add_rank_arguments(parser):
    how = "with mpirun: cut every routed expert, or deal them out whole (default: tensor)"
    parser.add_argument("--experts", choices=EXPERT_SPLITS, help=how)
    proof = "with mpirun: prove that every rank holds its slice of the file"
    parser.add_argument("--check-shards", action="store_true", help=proof)


def open_model(args, checkpoint, ranks, traced: bool = False) -> Model:
    """Parsed arguments and a checkpoint -> the model, or with `ranks` (npglm.parallel) this rank's part of it."""
    if ranks is None and (args.experts or args.check_shards):
        raise NpglmError("--experts and --check-shards are for several ranks: mpirun -n 2 python ...")
    if ranks and args.offload_experts:
        raise NpglmError("--offload-experts is for one rank: several ranks hold the experts among them")
    forward, ops = pick(args, ranks)
    if ranks:
        checkpoint, ops = parallel.share(checkpoint, ops, ranks, args.experts or "tensor")
    with LoadProgress() as progress:
        model = Model(checkpoint, forward, ops.traced() if traced else ops, progress)
    if getattr(ops, "note", None):
        print(f"note: {ops.note}", file=sys.stderr)
    if args.check_shards:
        n = parallel.check_shards(model.weights, checkpoint, ops)
        print(f"note: each of {ranks.world} ranks holds its part of {n} tensors, byte for byte", file=sys.stderr)
    return model


def pick(args, ranks=None):
    """Parsed arguments -> (forward, op set). Raises NpglmError for a backend that this build does not have."""
    if args.threads is not None:
        if not 1 <= args.threads <= 1024:
            raise NpglmError(f"--threads is {args.threads}, expected 1 to 1024")
        from threadpoolctl import threadpool_limits

        threadpool_limits(args.threads)  # NumPy's BLAS
    if not 0 <= args.weight_cache < 1 << 20:
        raise NpglmError(f"--weight-cache is {args.weight_cache}, expected GiB >= 0")
    if args.backend in ("gpu", "emulated"):
        return _gpu(args, args.backend, ranks)
    if args.backend == "auto" and args.numerics in (None, "ggml", "f32") and find_spec("cupy"):
        try:
            return _gpu(args, "gpu", ranks)
        except NpglmError as error:
            print(f"note: {error}", file=sys.stderr)
    if args.offload_experts:
        raise NpglmError("--offload-experts needs --backend gpu or emulated")
    if args.backend == "cpu" or (args.backend == "auto" and args.numerics in (None, "ggml", "f32")):
        import npglm.cpu
        from npglm.forward import forward

        return forward, npglm.cpu.op_set(args.numerics or "ggml", _n_threads(args, ranks), _CompileLine())
    from reference.forward import forward
    from reference.numerics import NUMERICS as numerics
    from reference.ops import ReferenceOps

    return forward, ReferenceOps(numerics[args.numerics or "f32"], int(args.weight_cache * (1 << 30)))


def _gpu(args, device: str, ranks):
    import npglm.gpu
    from npglm.forward import forward

    if args.numerics not in (None, "ggml", "f32"):
        raise NpglmError(
            f"--numerics {args.numerics} does not run on the {device} backend; ggml and f32 do, reference runs all"
        )
    index = None
    if ranks and device == "gpu":
        from npglm.gpu.collective import own_gpu

        index = own_gpu(ranks)
    ops = npglm.gpu.op_set(args.numerics or "ggml", device, index=index)
    if args.offload_experts:
        from npglm.offload import OffloadOps

        ops = OffloadOps(ops.device, ops.numerics.name, device, _n_threads(args, ranks), _CompileLine())
    return forward, ops


def _n_threads(args, ranks) -> int:
    """As asked for, or this process's share of the host's cores."""
    from npglm.cpu.threads import physical_cores

    return args.threads or max(1, physical_cores() // (ranks.local_world if ranks else 1))


class _CompileLine:
    """Says on stderr that kernels are being compiled, once it takes longer than loading them would."""

    def __init__(self):
        self.started, self.said = perf_counter(), False

    def __call__(self, done: int, total: int) -> None:
        seconds = perf_counter() - self.started
        if seconds < 2 and not self.said:
            return
        if sys.stderr.isatty():
            sys.stderr.write(f"\rcompiling kernels, only once: {done} of {total}" + ("\n" if done == total else ""))
        elif not self.said or done == total:
            sys.stderr.write(f"compiling kernels, only once: {done} of {total} after {seconds:.0f} s\n")
        sys.stderr.flush()
        self.said = True
