"""Which forward pass and op set a script runs, by name."""

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
        if args.threads < 1:
            raise NpglmError(f"--threads is {args.threads}, expected at least 1")
        from threadpoolctl import threadpool_limits

        threadpool_limits(args.threads)  # NumPy's BLAS
    if not 0 <= args.weight_cache < 1 << 20:
        raise NpglmError(f"--weight-cache is {args.weight_cache}, expected GiB >= 0")
    if args.backend in ("auto", "reference"):
        from reference.forward import forward
        from reference.numerics import NUMERICS as numerics
        from reference.ops import ReferenceOps

        return forward, ReferenceOps(numerics[args.numerics or "f32"], int(args.weight_cache * (1 << 30)))
    raise NpglmError(f"backend {args.backend} is not built yet; use --backend reference")
