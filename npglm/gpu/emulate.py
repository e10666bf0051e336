"""The GPU kernels on the CPU: the same sources compiled with g++ behind raw_kernels/emulation.hip, run on NumPy arrays.

Why not a package: AMD's HIP-CPU (header-only, needs TBB) is unmaintained and in no registry we use; pocl runs OpenCL, not HIP.
"""

import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from npglm.errors import NpglmError
from npglm.gpu.device import Device, options
from raw_kernels import FAMILIES, KERNELS, TYPES, Kernel, read

COMPILER = "g++"
FLAGS = (
    "-x", "c++", "-std=c++17", "-O2", "-fPIC", "-shared", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-exceptions", "-fno-rtti",
    "-fcf-protection=none", "-Wl,-Bsymbolic", "-fno-stack-protector", "-U_FORTIFY_SOURCE", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function",
    "-Wno-unknown-pragmas", "-DEMULATED",
)  # fmt: skip
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g", "--param", "asan-use-after-return=0")
C_TYPES = {
    "f64": "double", "f32": "float", "f16": "u16", "s8": "s8", "u8": "u8", "i16": "short", "i32": "int", "i64": "long long",
    "u64": "u64",
}  # fmt: skip


class Emulated(Device):
    """lanes: threads of a warp, 32 or 64. sanitize: under AddressSanitizer and UBSan (the process needs libasan preloaded)."""

    array_type = np.ndarray
    n_processors = 132  # as on an H200, so that grids are the same

    def __init__(self, lanes: int = 32, sanitize: bool = False):
        self.lanes, self.sanitize = lanes, sanitize
        self.name = f"emulation with {lanes} lanes"
        self.max_shared = 227 << 10 if lanes == 32 else 64 << 10  # as on Hopper and on AMD

    def empty(self, shape, dtype):
        return np.empty(shape, dtype)

    def array(self, values, dtype):
        array = np.ascontiguousarray(values, dtype)
        return array if array.ctypes.data % 16 == 0 else array.copy()  # a file's tensors may lie anywhere

    def numpy(self, array) -> np.ndarray:
        return array

    def address(self, array) -> int:
        return array.ctypes.data

    def free_bytes(self) -> tuple[int, int]:
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page

    def synchronize(self) -> None:
        pass

    def _run(self, kernel, defines, grid, block, shared, values) -> None:
        library = _library(kernel.family, defines, self.lanes, self.sanitize)
        held = [
            ctypes.c_void_p(v if v is None else v.ctypes.data) if argument.axes else np.array([v])
            for argument, v in zip(kernel.arguments, values, strict=True)
        ]
        pointers = (ctypes.c_void_p * len(held))(
            *(h.ctypes.data if isinstance(h, np.ndarray) else ctypes.addressof(h) for h in held)
        )
        function = getattr(library, f"run_{kernel.name}")
        status = library.emu_launch(function, pointers, (ctypes.c_uint * 3)(*grid), block, ctypes.c_long(shared))
        if status == 2:
            raise MemoryError
        if status:
            raise RuntimeError(f"{kernel.name}: {library.emu_error().decode()}")


def emulated_source(family: str, defines: tuple) -> str:
    """The whole text: scheduler, preamble, kernels, and a function per kernel that takes its arguments as an array of pointers."""
    names = ("emulation", "preamble", *FAMILIES[family], family)
    text = [f'#line 1 "{name}.hip"\n' + read(name) for name in names]
    text.append("struct Any { void* p; template <class T> operator T*() const { return (T*)p; } };")
    kind = dict(defines).get("TYPE", "")
    for kernel in KERNELS.values():
        if kernel.family == family and (family not in TYPES or kernel.name.endswith(f"_{kind}") or "<t>" in kernel.name):
            text.append(_trampoline(kernel))
    return "\n".join(text)


def _trampoline(kernel: Kernel) -> str:
    """Its casts come from the typed table, so that a kernel whose C arguments differ from its line does not compile."""
    values = []
    for i, argument in enumerate(kernel.arguments):
        kind = "Any" if argument.dtype == "any" else C_TYPES[argument.dtype]
        if argument.axes is not None and kind != "Any":
            kind = f"{'' if argument.written else 'const '}{kind}*"
        values.append(f"*({kind}*)a[{i}]")
    return f'extern "C" void run_{kernel.name}(void** a) {{ {kernel.name}({", ".join(values)}); }}'


@cache
def _library(family: str, defines: tuple, lanes: int, sanitize: bool) -> ctypes.CDLL:
    library = ctypes.CDLL(str(build(family, defines, lanes, sanitize)))
    library.emu_error.restype = ctypes.c_char_p
    return library


def build(family: str, defines: tuple, lanes: int, sanitize: bool = False) -> Path:
    """Compile, or find in the cache ($XDG_CACHE_HOME/npglm). Returns the shared library's path."""
    text = emulated_source(family, defines)
    flags = (*FLAGS, *_native(), *(SANITIZE if sanitize else ()), *options(defines, lanes))
    digest = hashlib.sha256("\0".join((text, *flags, _version())).encode()).hexdigest()[:24]
    path = _cache_folder() / f"{family}-{digest}.so"
    if not path.exists():
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".so", delete=False) as file:
            made = Path(file.name)
        try:
            done = subprocess.run([COMPILER, *flags, "-o", made, "-"], input=text, text=True, capture_output=True, check=False)
            if "No space left on device" in done.stderr:
                raise NpglmError(f"{path.parent}: No space left on device")
            if done.returncode:
                raise RuntimeError(f"{family} does not compile with {COMPILER}:\n{done.stderr[:4000]}")
            os.replace(made, path)
        finally:
            made.unlink(missing_ok=True)
    return path


@cache
def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "npglm"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@cache
def _version() -> str:
    try:
        return subprocess.run([COMPILER, "--version"], text=True, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        raise NpglmError(f"the emulated backend needs {COMPILER}, which was not found") from None


@cache
def _native() -> tuple[str, ...]:
    """F16C, where this machine has it: conversions from f16 would be library calls."""
    flags = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    return ("-mf16c", "-mavx2") if " f16c " in flags and " avx2 " in flags else ()
