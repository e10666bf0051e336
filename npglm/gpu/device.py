"""Where kernels run. The only file that imports cupy; emulate.py has the other Device.

A Device owns arrays (empty, array, numpy) and launch(), which checks every argument against the typed table of raw_kernels.
"""

import contextlib
from functools import cache

import numpy as np

from npglm.errors import NpglmError
from raw_kernels import DTYPES, KERNELS, Argument, source

MAX_BLOCK = 1024
BLOCK_MULTIPLE = 64  # the widest warp
GRID_LIMITS = (2**31 - 1, 65535, 65535)


class LaunchError(TypeError):
    """A launch that does not fit the kernel's line in raw_kernels.TABLE: a bug of the caller, not of the input."""


class Device:
    """What GPU and emulation share. Subclasses have: name, lanes, max_shared (bytes), array_type, empty, array, numpy, _run."""

    name: str
    lanes: int
    max_shared: int
    array_type: type
    launches = 0  # counted for the benchmark

    def launch(self, name: str, grid: tuple[int, ...], block: int, *values, shared: int = 0, **defines) -> None:
        """Run kernel `name` on grid (x, y, z) of blocks of `block` threads. shared: bytes of dynamic shared memory.

        defines: the -D set of the variant. A grid with a 0 in it is no launch. Raises LaunchError.
        """
        kernel = KERNELS[name]
        grid = (*grid, 1, 1)[:3]
        if 0 in grid:
            return
        if block % BLOCK_MULTIPLE or not 0 < block <= MAX_BLOCK:
            raise LaunchError(f"{name}: {block} threads in a block, expected a multiple of {BLOCK_MULTIPLE} up to {MAX_BLOCK}")
        if any(not 0 < n <= limit for n, limit in zip(grid, GRID_LIMITS, strict=True)):
            raise LaunchError(f"{name}: grid {grid} is outside {GRID_LIMITS}")
        if shared > self.max_shared:
            raise LaunchError(f"{name}: {shared} bytes of shared memory, {self.name} has {self.max_shared}")
        if len(values) != len(kernel.arguments):
            raise LaunchError(f"{name}: {len(values)} arguments, expected {len(kernel.arguments)}")
        values = [self._check(name, argument, value) for argument, value in zip(kernel.arguments, values, strict=True)]
        self.launches += 1
        self._run(kernel, tuple(sorted(defines.items())), grid, block, shared, values)

    def _check(self, kernel: str, argument: Argument, value):
        where = f"{kernel}: argument {argument.name}"
        if argument.axes is None:
            if isinstance(value, self.array_type) or value is None:
                raise LaunchError(f"{where} is a number, found {type(value).__name__}")
            number = DTYPES[argument.dtype](value)
            if number != value and argument.dtype[0] != "f":
                raise LaunchError(f"{where}: {value} does not fit {argument.dtype}")
            return number
        if value is None:
            if not argument.optional:
                raise LaunchError(f"{where} is missing")
            return None
        if not isinstance(value, self.array_type):
            raise LaunchError(f"{where} is an array on {self.name}, found {type(value).__name__}")
        if argument.dtype != "any" and value.dtype != DTYPES[argument.dtype]:
            raise LaunchError(f"{where} is {argument.dtype}, found {value.dtype}")
        if not (rows_contiguous(value) if argument.strided else value.flags.c_contiguous):
            raise LaunchError(f"{where}: shape {value.shape} with strides {value.strides} is not contiguous")
        self._check_place(where, value)
        return value

    def _check_place(self, where: str, value) -> None:
        pass

    def capture(self, function):
        """A callable that repeats the launches that function() makes. Here it is function itself."""
        return function

    def beside(self):
        """A context whose launches may run beside those after it, until join()."""
        return contextlib.nullcontext()

    def join(self) -> None:
        pass

    def _run(self, kernel, defines, grid, block, shared, values) -> None:
        raise NotImplementedError


def rows_contiguous(array) -> bool:
    """Whether the last axis is contiguous and the others walk over rows of one stride."""
    strides, shape, item = array.strides, array.shape, array.itemsize
    if not array.size or not array.ndim or (strides[-1] != item and shape[-1] > 1):
        return not array.size
    expected = None
    for size, stride in zip(shape[-2::-1], strides[-2::-1], strict=True):
        if size > 1 and expected is not None and stride != expected:
            return False
        expected = (stride if size > 1 or expected is None else expected) * size
    return True


def row_stride(array) -> int:
    """Elements from one row to the next; rows are the last axis. See rows_contiguous."""
    for size, stride in zip(array.shape[-2::-1], array.strides[-2::-1], strict=True):
        if size > 1:
            return stride // array.itemsize
    return array.shape[-1]


def options(defines: tuple, lanes: int) -> tuple[str, ...]:
    return (f"-DLANES={lanes}", *(f"-D{key}={value}" for key, value in defines))


class Gpu(Device):
    """The current CuPy device: CUDA, or ROCm with CuPy's ROCm build. Kernels are compiled at first use, one module per family and -D set."""

    def __init__(self):
        self.cupy = cupy = _cupy()
        self.hip = cupy.cuda.runtime.is_hip
        self.id = cupy.cuda.Device().id
        properties = cupy.cuda.runtime.getDeviceProperties(self.id)
        self.name = properties["name"].decode()
        self.lanes = int(properties["warpSize"])
        self.n_processors = int(properties["multiProcessorCount"])
        self.max_shared = 65536 if self.hip else int(cupy.cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"])
        self.array_type = cupy.ndarray
        self.kernels: dict = {}
        self.side, self.forked = cupy.cuda.Stream(non_blocking=True), False

    def empty(self, shape, dtype):
        return self.cupy.empty(shape, dtype)

    def array(self, values, dtype):
        return self.cupy.asarray(values, dtype)

    def numpy(self, array) -> np.ndarray:
        return self.cupy.asnumpy(array)

    def free_bytes(self) -> tuple[int, int]:
        """(free, total) bytes of device memory; what CuPy's pool keeps counts as free."""
        free, total = self.cupy.cuda.runtime.memGetInfo()
        return free + self.cupy.get_default_memory_pool().free_bytes(), total

    def synchronize(self) -> None:
        self.cupy.cuda.get_current_stream().synchronize()

    def capture(self, function):
        """A CUDA graph of what function() launches; on ROCm, where CuPy cannot capture, function itself."""
        if self.hip:
            return function
        stream = self.cupy.cuda.Stream(non_blocking=True)
        self.synchronize()
        with stream:
            function()  # compiles, and leaves the memory that the captured run takes in the pool
            stream.synchronize()
            stream.begin_capture()
            function()
            graph = stream.end_capture()
        stream.synchronize()
        current = self.cupy.cuda.get_current_stream
        return lambda: graph.launch(current())

    @contextlib.contextmanager
    def beside(self):
        main = self.cupy.cuda.get_current_stream()
        if main == self.side:
            yield
            return
        self._wait(self.side, main)
        self.forked = True
        with self.side:
            yield

    def join(self) -> None:
        main = self.cupy.cuda.get_current_stream()
        if self.forked and main != self.side:
            self._wait(main, self.side)
            self.forked = False

    def _wait(self, later, earlier) -> None:
        event = self.cupy.cuda.Event(disable_timing=True)
        event.record(earlier)
        later.wait_event(event)

    def _check_place(self, where, value) -> None:
        if value.device.id != self.id:
            raise LaunchError(f"{where} is on device {value.device.id}, expected {self.id}")

    def _kernel(self, kernel, defines):
        key = kernel.name, defines
        if key not in self.kernels:
            module = self._module(kernel.family, defines)
            self.kernels[key] = module.get_function(kernel.name)
        return self.kernels[key]

    @cache  # noqa: B019 - a Gpu lives as long as the process
    def _module(self, family, defines):
        no_fma = "-ffp-contract=off" if self.hip else "-fmad=false"
        return self.cupy.RawModule(code=source(family), options=(no_fma, *options(defines, self.lanes)))

    def _run(self, kernel, defines, grid, block, shared, values) -> None:
        function = self._kernel(kernel, defines)
        if shared > 48 << 10 and not self.hip and function.max_dynamic_shared_size_bytes < shared:
            function.max_dynamic_shared_size_bytes = shared
        function(grid, (block,), tuple(np.uintp(0) if v is None else v for v in values), shared_mem=shared)


@cache
def open_gpu() -> Gpu:
    """The GPU that CuPy sees. Raises NpglmError, in one line, where there is none or CuPy does not work."""
    return Gpu()


def _cupy():
    try:
        import cupy
    except ModuleNotFoundError:
        raise NpglmError(
            "no GPU backend: CuPy is not installed (pip install 'npglm[cuda13]', or cuda12, rocm5, rocm7)"
        ) from None
    except ImportError as error:  # a wheel built for another CUDA or ROCm
        raise NpglmError(f"no GPU backend: CuPy cannot be loaded: {str(error).strip().splitlines()[-1]}") from None
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise NpglmError(f"no GPU backend: {str(error).strip().splitlines()[0]}") from None
    if not count:
        raise NpglmError("no GPU backend: CuPy sees no device")
    return cupy
