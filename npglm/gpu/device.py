"""Where kernels run. The only file that imports cupy; emulate.py has the other Device.

A Device owns arrays (empty, array, numpy) and launch(), which checks every argument against the typed table of raw_kernels.
"""

import contextlib
import ctypes
import warnings
import weakref
from functools import cache, cached_property

import numpy as np

from npglm.errors import NpglmError
from npglm.gpu.staging import Staging
from raw_kernels import DTYPES, KERNELS, Argument, source

STAGE_BYTES = 64 << 20
REGISTER_MAPPED, REGISTER_READ_ONLY = 2, 8  # of cudaHostRegister and hipHostRegister
MAX_BLOCK = 1024
BLOCK_MULTIPLE = 64  # the widest warp
# While the kernel before may still run (raw_kernels/preamble.hip); some only where this argument is given.
LETS_NEXT_START = {"sum_rms_norm_blocks_f32": None, "matvec_rounding_q8_0": "beside"}
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
    written: list = []  # noqa: RUF012 - arrays that a kernel may still write when the next one starts; replaced, never changed
    overlaps = False  # a kernel may start before the one before it has ended: see raw_kernels/preamble.hip
    hosts: list | None = None  # of a step that is being captured: what host() was given

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
        given = {a.name: v for a, v in zip(kernel.arguments, values, strict=True) if v is not None}
        arrays = [given[a.name] for a in kernel.arguments if a.written and a.name in given]
        early = name in LETS_NEXT_START and LETS_NEXT_START[name] in (None, *given)
        self.written = arrays + (self.written if early else [])
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

    def settled(self, *arrays) -> bool:
        """Whether no kernel writes into these arrays any more when the next one starts, which may read them before it waits."""

        def span(array):
            first = self.address(array)
            last = first + sum((n - 1) * step for n, step in zip(array.shape, array.strides, strict=True))
            return first, last + array.itemsize

        written = [span(array) for array in self.written]
        return not any(a < stop and start < b for a, b in map(span, arrays) for start, stop in written)

    def capture(self, function):
        """A callable that repeats the launches that function() makes. Here it is function itself."""
        return function

    def mark(self):
        """This place in the order of launches, for beside(); None where no step is captured."""

    def beside(self, mark):
        """A context whose launches follow those before `mark`, and each other, but not those that came after it: in a captured step they
        run beside these. What is launched after the context follows all of them."""
        return contextlib.nullcontext()

    def host(self, function, release) -> None:
        """Call function() on the host now; in a captured step each time, as soon as its launches are on their way. function() waits for
        the device by itself, and kernels that come later wait for it: where anything is raised in a captured step, until release()."""
        function()

    def shared(self, shape: tuple[int, ...], dtype) -> tuple:
        """A new array of the host, and the same memory as an array that kernels read in place."""
        array = np.empty(shape, dtype)
        return array, array

    def in_place(self, data: np.ndarray):
        """uint8 of the host, also of a mapped file, as an array that kernels read in place: all of it stays in memory from here on.
        None where the device cannot."""

    def idle(self) -> bool:
        """Whether all that was launched has ended. Raises what went wrong there."""
        return True

    def event(self):
        """A function that waits for what was launched until now."""
        return lambda: None

    def fill(self, array, values: np.ndarray) -> None:
        """Host values into an array, after what was launched until now. Pinned values may change once event() has come."""
        array[...] = values

    def upload(self, data: np.ndarray):
        """uint8 [rows, n] of a mapped file -> the same on the device."""
        return self.array(data, np.uint8)

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

    def __init__(self, index: int | None = None):
        self.cupy = cupy = _cupy()
        if index is not None:
            cupy.cuda.Device(index).use()
        self.hip = cupy.cuda.runtime.is_hip
        self.id = cupy.cuda.Device().id
        properties = cupy.cuda.runtime.getDeviceProperties(self.id)
        self.name = properties["name"].decode()
        self.lanes = int(properties["warpSize"])
        self.n_processors = int(properties["multiProcessorCount"])
        self.max_shared = 65536 if self.hip else int(cupy.cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"])
        self.array_type = cupy.ndarray
        self.kernels: dict = {}
        self.overlaps = (  # CUDA 12.3: such launches can be captured
            not self.hip and int(cupy.cuda.Device().compute_capability) >= 90 and cupy.cuda.runtime.driverGetVersion() >= 12030
        )
        self.side, self.early = None, True  # its second stream; whether the next kernel may start before the last one has ended

    def empty(self, shape, dtype):
        return self.cupy.empty(shape, dtype)

    def array(self, values, dtype):
        return self.cupy.asarray(values, dtype)

    def numpy(self, array) -> np.ndarray:
        return self.cupy.asnumpy(array)

    def address(self, array) -> int:
        return array.data.ptr

    def free_bytes(self) -> tuple[int, int]:
        """(free, total) bytes of device memory; what CuPy's pool keeps counts as free."""
        free, total = self.cupy.cuda.runtime.memGetInfo()
        return free + self.cupy.get_default_memory_pool().free_bytes(), total

    def synchronize(self) -> None:
        self.cupy.cuda.get_current_stream().synchronize()

    def nccl(self):
        """CuPy's module for NCCL, or RCCL. Raises NpglmError where there is none."""
        from cupy.cuda import nccl

        if not nccl.available:
            raise NpglmError("several GPUs need NCCL, which CuPy does not find (pip install 'npglm[cuda13]')")
        return nccl

    def mark(self):
        return self.side and self.cupy.cuda.get_current_stream().record(self.cupy.cuda.Event(disable_timing=True))

    @contextlib.contextmanager
    def beside(self, mark):
        if mark is None:
            yield
            return
        main, written = self.cupy.cuda.get_current_stream(), self.written
        self.side.wait_event(mark)
        self.early = False  # measured: the first kernel beside others starts sooner so
        with self.side as side:
            yield
            end = side.record(self.cupy.cuda.Event(disable_timing=True))
        main.wait_event(end)
        self.written = self.written + written

    def host(self, function, release) -> None:
        if self.hosts is None:
            super().host(function, release)
        else:
            self.hosts.append((function, release))

    def idle(self) -> bool:
        return self.cupy.cuda.get_current_stream().done

    def pinned(self, shape, dtype) -> np.ndarray:
        """An array of the host that is copied without a detour."""
        import cupyx

        return cupyx.empty_pinned(shape, dtype)

    def shared(self, shape, dtype):
        host = self.pinned(shape, dtype)
        return host, self._seen(host)

    def in_place(self, data):
        runtime = self.cupy.cuda.runtime
        for flags in (REGISTER_MAPPED | REGISTER_READ_ONLY, REGISTER_MAPPED):  # a file is mapped for reading only
            try:
                runtime.hostRegister(data.ctypes.data, data.nbytes, flags)
            except runtime.CUDARuntimeError:
                continue
            owner = data.view()
            weakref.finalize(owner, runtime.hostUnregister, data.ctypes.data).atexit = False
            return self._seen(owner)
        return None

    def _seen(self, host: np.ndarray):
        """Host memory as an array that kernels reach: at its own address, on ROCm perhaps at another one."""
        cuda, address = self.cupy.cuda, host.ctypes.data
        if self.hip:
            address = cuda.runtime.pointerGetAttributes(address).devicePointer
        pointer = cuda.MemoryPointer(cuda.UnownedMemory(address, host.nbytes, host, self.id), 0)
        return self.cupy.ndarray(host.shape, host.dtype, pointer)

    def event(self):
        event = self.cupy.cuda.Event(disable_timing=True)
        event.record()
        return event.synchronize

    def fill(self, array, values: np.ndarray) -> None:
        runtime, stream = self.cupy.cuda.runtime, self.cupy.cuda.get_current_stream()
        self._filling = values = np.ascontiguousarray(values, array.dtype)  # not given back to a pool while it is read
        runtime.memcpyAsync(array.data.ptr, values.ctypes.data, array.nbytes, runtime.memcpyHostToDevice, stream.ptr)

    @cached_property
    def _staging(self) -> Staging:
        return Staging(self, [self.pinned((STAGE_BYTES,), np.uint8) for _ in range(2)])

    def upload(self, data: np.ndarray):
        return self._staging.upload(data) if data.nbytes <= STAGE_BYTES else self.array(data, np.uint8)

    def capture(self, function):
        """A CUDA graph of what function() launches, beside which the host does its part; on ROCm, where CuPy cannot capture, function itself."""
        if self.hip:
            return function
        stream, self.side = (self.cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        self.synchronize()
        with stream:
            try:
                function()  # compiles, and leaves the memory that the captured run takes in the pool
                stream.synchronize()
                self.hosts = hosts = []
                stream.begin_capture()
                function()
                graph = stream.end_capture()
            finally:
                self.hosts = self.side = None
        stream.synchronize()

        def replay():
            try:
                graph.launch(self.cupy.cuda.get_current_stream())
                for work, _ in hosts:
                    work()
            except BaseException:
                for _, release in hosts:
                    release()
                raise

        return replay

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
        if self.overlaps:
            stream = self.cupy.cuda.get_current_stream().ptr
            arrays = [getattr(v, "data", None) if a.axes else v for a, v in zip(kernel.arguments, values, strict=True)]
            launch_overlapping(function.kernel.ptr, grid, block, shared, stream, kernel.arguments, arrays, self.early)
            self.early = True
        else:
            function(grid, (block,), tuple(np.uintp(0) if v is None else v for v in values), shared_mem=shared)


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint), ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)), ("n_attributes", ctypes.c_uint),
    )  # fmt: skip


PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_: the kernel may start early, and waits itself
NUMBERS = {
    "i32": ctypes.c_int, "i64": ctypes.c_longlong, "u64": ctypes.c_ulonglong, "f32": ctypes.c_float, "f64": ctypes.c_double,
}  # fmt: skip


@cache
def _driver():
    return ctypes.CDLL("libcuda.so.1")


def launch_overlapping(function: int, grid, block: int, shared: int, stream: int, arguments, values, early: bool) -> None:
    """cuLaunchKernelEx, if `early` with programmatic stream serialization, which CuPy has no call for. values: pointers and numbers."""
    held = [
        ctypes.c_void_p(v.ptr if v else 0) if a.axes else NUMBERS[a.dtype](v.item())
        for a, v in zip(arguments, values, strict=True)
    ]
    pointers = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
    attribute = LaunchAttribute(PROGRAMMATIC_STREAM_SERIALIZATION, b"", (ctypes.c_int * 16)(1))
    config = LaunchConfig(grid, (block, 1, 1), shared, stream, ctypes.pointer(attribute), early)
    status = _driver().cuLaunchKernelEx(ctypes.byref(config), ctypes.c_void_p(function), pointers, None)
    if status:
        raise RuntimeError(f"cuLaunchKernelEx: CUDA error {status}")


@cache
def open_gpu(index: int | None = None) -> Gpu:
    """The GPU that CuPy sees, or its index-th. Raises NpglmError, in one line, where there is none or CuPy does not work."""
    return Gpu(index)


def visible() -> list[str]:
    """PCI bus ids of the GPUs that CuPy sees, which tell those of a host apart. Raises NpglmError where there are none."""
    runtime = _cupy().cuda.runtime
    return [runtime.deviceGetPCIBusId(i) for i in range(runtime.getDeviceCount())]


def _cupy():
    try:
        with warnings.catch_warnings(action="ignore"):  # what is missing shows below
            import cupy
    except (ImportError, AttributeError, OSError, RuntimeError, ValueError) as error:  # a wheel for another CUDA, ROCm or NumPy
        if getattr(error, "name", None) == "cupy":
            extras = "pip install 'npglm[cuda13]', or cuda12, rocm5, rocm7"
            raise NpglmError(f"no GPU backend: CuPy is not installed ({extras})") from None
        lines = [line.strip() for line in str(error).splitlines() if line.strip(" =")]  # CuPy draws a frame of =
        raise NpglmError(f"no GPU backend: CuPy cannot be loaded: {lines[-1] if lines else type(error).__name__}") from None
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise NpglmError(f"no GPU backend: {str(error).strip().splitlines()[0]}") from None
    if not count:
        raise NpglmError("no GPU backend: CuPy sees no device")
    return cupy
