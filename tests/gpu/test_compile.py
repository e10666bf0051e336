"""Every variant of every kernel compiles for GPUs without one, with the options of production and all warnings as errors."""

import shutil

import compilers
import pytest
from variants import NO_SPILL, variants

from raw_kernels import DECODED_TYPES

pytestmark = pytest.mark.slow
FEW = ("q8_0", "q2_k", "iq3_s")  # weight types for all architectures but the first of each vendor
LDS = 64 << 10  # shared memory of an AMD workgroup
NVIDIA, AMD, HIPRTC = ("sm_90", "sm_80"), ("gfx90a", "gfx906", "gfx908", "gfx1030"), ("gfx906", "gfx90a", "gfx1030")


def compile_all(compiler, arch, first, max_shared=227 << 10):
    figures = {}
    for family, defines in variants(DECODED_TYPES if arch == first else FEW, max_shared):
        for name, found in compiler(family, defines, arch).items():
            figures[name, tuple(sorted(defines.items()))] = found
    assert len(figures) > 60
    return figures


def spilling(figures):
    return [(name, dict(defines), f) for (name, defines), f in figures.items() if name in NO_SPILL and f["spill_bytes"]]


@pytest.mark.parametrize("arch", NVIDIA)
def test_nvrtc(arch):
    assert compilers.nvrtc_library(), "needs pip install nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl"
    assert not spilling(compile_all(compilers.nvrtc, arch, "sm_90"))


@pytest.mark.parametrize("arch", AMD)
def test_clang(arch):
    assert shutil.which("clang++-19"), "needs apt-get install clang-19 lld-19 rocm-device-libs libamdhip64-dev"
    assert not spilling(compile_all(compilers.clang, arch, "gfx90a", LDS))


@pytest.mark.parametrize("arch", HIPRTC)
def test_hiprtc(arch):
    for family, defines in variants(FEW, LDS):
        assert compilers.hiprtc(family, defines, arch) > 1000
