"""Which forward pass and op set a script runs, by name."""

import sys
from importlib.util import find_spec
from time import perf_counter

from npglm.errors import NpglmError

BACKENDS = ("auto", "reference", "cpu", "gpu", "emulated")
NUMERICS = ("f32", "f64", "ggml", "bf16")


def add_arguments(parser, backend="auto"):
    parser.add_argument("--backend", choices=BACKENDS, default=backend, help="what computes; auto takes the fastest there is")
    parser.add_argument("--numerics", choices=NUMERICS, help="how it rounds (default: f32 on reference, ggml elsewhere)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all)")
    parser.add_argument("--weight-cache", type=float, default=1.0, metavar="GIB", help="decoded weights that reference keeps")


def pick(args):
    """Parsed arguments -> (forward, op set). Raises NpglmError for a backend that this build does not have."""
    if args.threads is not None:
        if not 1 <= args.threads <= 1024:
            raise NpglmError(f"--threads is {args.threads}, expected 1 to 1024")
        from threadpoolctl import threadpool_limits

        threadpool_limits(args.threads)  # NumPy's BLAS
    if not 0 <= args.weight_cache < 1 << 20:
        raise NpglmError(f"--weight-cache is {args.weight_cache}, expected GiB >= 0")
    if args.backend in ("gpu", "emulated"):
        return _gpu(args.numerics, args.backend)
    if args.backend == "auto" and args.numerics in (None, "ggml", "f32") and find_spec("cupy"):
        try:
            return _gpu(args.numerics, "gpu")
        except NpglmError as error:
            print(f"note: no GPU: {error}", file=sys.stderr)
    if args.backend == "cpu" or (args.backend == "auto" and args.numerics in (None, "ggml", "f32")):
        import npglm.cpu
        from npglm.forward import forward

        return forward, npglm.cpu.op_set(args.numerics or "ggml", args.threads, _CompileLine())
    from reference.forward import forward
    from reference.numerics import NUMERICS as numerics
    from reference.ops import ReferenceOps

    return forward, ReferenceOps(numerics[args.numerics or "f32"], int(args.weight_cache * (1 << 30)))


def _gpu(numerics: str | None, device: str):
    import npglm.gpu
    from npglm.forward import forward

    if numerics not in (None, "ggml", "f32"):
        raise NpglmError(f"--numerics {numerics} does not run on the {device} backend; ggml and f32 do, reference runs all")
    return forward, npglm.gpu.op_set(numerics or "ggml", device)


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
