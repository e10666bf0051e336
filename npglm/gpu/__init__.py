"""The GPU op set: HIP kernels of raw_kernels/ through CuPy, or the same kernels emulated on the CPU."""

from npglm.errors import NpglmError


def op_set(numerics: str = "ggml", device: str = "gpu", lanes: int = 32, index: int | None = None):
    """The op set that npglm.forward takes. device: "gpu" or "emulated" (with warps of `lanes` threads, 32 or 64).

    index: which of the host's GPUs (default: the one that CuPy has taken).

    Raises NpglmError in one line when there is no working CuPy, no device, or no g++.
    """
    from npglm.gpu.ops import GpuOps

    if device == "gpu":
        from npglm.gpu.device import open_gpu

        return GpuOps(open_gpu(index), numerics, "gpu")
    if device != "emulated" or lanes not in (32, 64):
        raise NpglmError(f"device {device!r} with {lanes} lanes: expected gpu, or emulated with 32 or 64")
    from npglm.gpu.emulate import Emulated

    return GpuOps(Emulated(lanes), numerics, "emulated")
