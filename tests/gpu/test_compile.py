"""Every variant of every kernel compiles for GPUs without one, with the options of production and all warnings as errors."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import compilers
import pytest
from variants import NO_SPILL, variants

from raw_kernels import DECODED_TYPES

pytestmark = pytest.mark.slow
FEW = ("q8_0", "q2_k", "iq3_s")  # weight types for all architectures but the first of each vendor
TILED = ("matmul_q8_0", "matmul_q2_k", "attention_f16", "indexer_score_f16")
LDS = 64 << 10  # shared memory of an AMD workgroup
NVIDIA, HIPRTC = ("sm_90", "sm_80"), ("gfx906", "gfx90a", "gfx1030")
AMD = ("gfx90a", "gfx906", "gfx908", "gfx1030")


def compile_all(compiler, arch, types=FEW, max_shared=227 << 10):
    """Figures by (kernel, defines); compilers run side by side."""
    every = list(variants(types, max_shared))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(lambda variant: compiler(*variant, arch), every)
        return {
            (n, tuple(sorted(d.items()))): f for (_, d), found in zip(every, results, strict=True) for n, f in found.items()
        }


def spilling(figures, arch):
    """Those that must not. Without a matrix unit (gfx906, gfx1030) the tile is a fallback that only has to be right."""
    exempt = () if arch.startswith("sm_") or arch in ("gfx908", "gfx90a") else TILED
    found = [(name, dict(defines), f) for (name, defines), f in figures.items() if f["spill_bytes"]]
    return [f for f in found if f[0] in NO_SPILL and f[0] not in exempt and f[1].get("TOKENS", 1) == 1]


@pytest.mark.parametrize("arch", NVIDIA)
def test_nvrtc(arch):
    assert compilers.nvrtc_library(), "needs pip install nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl"
    assert not spilling(compile_all(compilers.nvrtc, arch, DECODED_TYPES if arch == "sm_90" else FEW), arch)


@pytest.mark.parametrize("arch", AMD)
def test_clang(arch):
    assert shutil.which("clang++-19"), "needs apt-get install clang-19 lld-19 rocm-device-libs libamdhip64-dev"
    assert not spilling(compile_all(compilers.clang, arch, DECODED_TYPES if arch == "gfx90a" else FEW, LDS), arch)


@pytest.mark.parametrize("arch", compilers.NO_BITCODE)
def test_clang_without_device_libraries(arch):
    compile_all(compilers.clang, arch, ("q2_k",), LDS)  # its figures say nothing: expf is a call that keeps no registers


@pytest.mark.parametrize("arch", HIPRTC)
def test_hiprtc(arch):
    for family, defines in variants(FEW, LDS):  # one by one: its compiler is not made for threads
        assert compilers.hiprtc(family, defines, arch) > 1000
