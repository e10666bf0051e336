"""The CPU op set: Numba over the memory-mapped bytes. Importing this package loads neither Numba nor a kernel.

    npglm.cpu.select("avx2")               # before the first op set of a process; default: the best that the machine has
    ops = npglm.cpu.op_set("ggml", threads=4)

A tier says which instructions the kernels are made of; simd.py is the one place where tiers differ.
"""

import os
import platform
from functools import cache

from npglm.errors import NpglmError

# tier -> (features that the machine must have, LLVM CPU name and features to compile for when the tier is asked for by name)
TIERS = {
    "avx512vnni": (("avx512f", "avx512bw", "avx512vl", "avx512vnni", "f16c", "fma"), None, None),
    "avxvnni": (("avxvnni", "avx2", "f16c", "fma"), "alderlake", "+avxvnni,+avx2,+f16c,+fma,+prfchw"),
    "avx2": (("avx2", "f16c", "fma"), "haswell", "+avx2,+f16c,+fma"),
    "plain": ((), "x86-64", ""),
}
_chosen: str | None = None


@cache
def tiers() -> tuple[str, ...]:
    """The tiers that this machine has, best first."""
    from llvmlite.binding import get_host_cpu_features

    has = get_host_cpu_features() if platform.machine() in ("x86_64", "AMD64") else {}
    return tuple(name for name, (needs, _, _) in TIERS.items() if all(has.get(f) for f in needs))


def tier() -> str:
    """The tier that is or will be in use."""
    return _chosen or tiers()[0]


def select(name: str) -> None:
    """Compile for this tier. Raises NpglmError when the machine lacks it or kernels of another tier are loaded."""
    global _chosen
    import sys

    if name not in TIERS:
        raise NpglmError(f"tier {name!r} is unknown; expected one of {', '.join(TIERS)}")
    if name not in tiers():
        raise NpglmError(f"this machine has no {name}; it has {', '.join(tiers())}")
    if name == tier():
        _chosen = name
        return
    if "npglm.cpu.simd" in sys.modules:
        raise NpglmError(f"kernels of tier {tier()} are loaded; select {name} in a fresh process")
    from numba import config

    _, cpu, features = TIERS[name]
    if cpu and platform.machine() in ("x86_64", "AMD64"):
        os.environ["NUMBA_CPU_NAME"], os.environ["NUMBA_CPU_FEATURES"] = cpu, features  # Numba reads them again
        config.CPU_NAME, config.CPU_FEATURES = cpu, features
    _chosen = name


def op_set(numerics: str = "ggml", threads: int | None = None, progress=lambda done, total: None):
    """The op set that npglm.forward takes. numerics: "ggml" or "f32"; threads: default one per physical core.

    Kernels are compiled by ops.load() or at their first use, once for a machine; progress is told how many of them are done.
    """
    from npglm.cpu.ops import CpuOps

    return CpuOps(numerics, threads, progress=progress)
