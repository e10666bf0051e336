"""The three compilers that need no GPU: NVRTC (PyPI), clang (Debian), and HIPRTC 5.2 (Debian). Each takes a family's source
with the options that npglm.gpu.device gives CuPy and CuPy adds, and returns resource figures by kernel."""

import ctypes
import re
import subprocess
import sysconfig
from pathlib import Path

from npglm.gpu.device import options
from raw_kernels import source

AMD_LANES = {"gfx906": 64, "gfx908": 64, "gfx90a": 64, "gfx942": 64, "gfx1030": 32, "gfx1100": 32}
BITCODE = "/usr/lib/x86_64-linux-gnu/amdgcn/bitcode"
NO_BITCODE = ("gfx942", "gfx1100")  # Debian 12's device libraries are older: compiled to assembly, not linked


class CompileError(Exception):
    pass


def nvrtc_library() -> Path | None:
    found = sorted(Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*/lib/libnvrtc.so*"))
    return found[0] if found else None


def nvrtc(family: str, defines: dict, arch: str) -> dict[str, dict[str, int]]:
    """kernel -> registers, spill_bytes, shared_bytes, as ptxas reports them. Raises CompileError with the log."""
    lib = ctypes.CDLL(str(nvrtc_library()))
    flags = (f"-arch={arch}", "-fmad=false", "-ftz=true", "-std=c++17", "-Xptxas=-v", "-Werror=all-warnings")
    flags += ("-diag-suppress=177", *options(tuple(sorted(defines.items())), 32))
    program = ctypes.c_void_p()
    text = source(family).encode()
    assert lib.nvrtcCreateProgram(ctypes.byref(program), text, f"{family}.hip".encode(), 0, None, None) == 0
    values = (ctypes.c_char_p * len(flags))(*(f.encode() for f in flags))
    status = lib.nvrtcCompileProgram(program, len(flags), values)
    size = ctypes.c_size_t()
    lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetProgramLog(program, log)
    lib.nvrtcDestroyProgram(ctypes.byref(program))
    text = log.value.decode()
    if status:
        raise CompileError(f"NVRTC {arch}: {family} {defines}\n{text}")
    figures = {}
    for name, rest in re.findall(r"Compiling entry function '(\w+)'.*?\n(.*?Used \d+ registers[^\n]*)", text, re.DOTALL):
        number = lambda pattern, rest=rest: int(m[1]) if (m := re.search(pattern, rest)) else 0
        figures[name] = {
            "registers": number(r"Used (\d+) registers"),
            "spill_bytes": number(r"(\d+) bytes spill stores"),
            "shared_bytes": number(r"(\d+) bytes smem"),
        }
    return figures


def clang(family: str, defines: dict, arch: str, compiler: str = "clang++-19") -> dict[str, dict[str, int]]:
    """kernel -> registers, spill_bytes (of vector registers), shared_bytes, from -Rpass-analysis=kernel-resource-usage."""
    flags = (
        "-x",
        "hip",
        f"--offload-arch={arch}",
        "--offload-device-only",
        "--rocm-path=/usr",
        *(("-nogpulib", "-S") if arch in NO_BITCODE else (f"--rocm-device-lib-path={BITCODE}",)),
    )
    flags += ("-std=c++17", "-O3", "-ffp-contract=off", "-fgpu-flush-denormals-to-zero", "-Wall", "-Wextra", "-Werror")
    flags += (
        "-Wno-unused-function",
        "-Wno-pass-failed",
        "-Rpass-analysis=kernel-resource-usage",
        *options(tuple(sorted(defines.items())), AMD_LANES[arch]),
    )
    done = subprocess.run(
        [compiler, *flags, "-o", "/dev/null", "-"], input=source(family), text=True, capture_output=True, check=False
    )
    if done.returncode:
        raise CompileError(f"{compiler} {arch}: {family} {defines}\n{done.stderr[:6000]}")
    figures = {}
    for part in done.stderr.split("Function Name: ")[1:]:
        number = lambda what, part=part: int(re.search(rf"{what}: (\d+)", part)[1])
        figures[part.split()[0]] = {
            "registers": number("VGPRs"), "spill_bytes": number("VGPRs Spill"), "shared_bytes": number(r"LDS Size \[bytes/block\]"),
        }  # fmt: skip
    return figures


def hiprtc(family: str, defines: dict, arch: str) -> int:
    """Compile with HIPRTC; returns the code object's bytes. Raises CompileError with the log."""
    lib = ctypes.CDLL("libamdhip64.so.5")
    flags = (f"--gpu-architecture={arch}", "-ffp-contract=off", "-fcuda-flush-denormals-to-zero", "-std=c++17", "-O3")
    flags += ("-Wall", "-Wextra", "-Werror", "-Wno-unused-function", "-Wno-pass-failed")
    flags += options(tuple(sorted(defines.items())), AMD_LANES[arch])
    program = ctypes.c_void_p()
    assert lib.hiprtcCreateProgram(ctypes.byref(program), source(family).encode(), f"{family}.hip".encode(), 0, None, None) == 0
    values = (ctypes.c_char_p * len(flags))(*(f.encode() for f in flags))
    status = lib.hiprtcCompileProgram(program, len(flags), values)
    size = ctypes.c_size_t()
    lib.hiprtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value + 1)
    lib.hiprtcGetProgramLog(program, log)
    code = ctypes.c_size_t()
    if not status:
        lib.hiprtcGetCodeSize(program, ctypes.byref(code))
    lib.hiprtcDestroyProgram(ctypes.byref(program))
    if status:
        raise CompileError(f"HIPRTC {arch}: {family} {defines}\n{log.value.decode()[:6000]}")
    return code.value
