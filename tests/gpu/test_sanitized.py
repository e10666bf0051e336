"""The op cases under AddressSanitizer and UBSan."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RUN = """
import sys, pytest
sys.path[:0] = [{tests!r}, {ops!r}]
import check
from npglm.gpu.emulate import Emulated
from npglm.gpu.ops import GpuOps
for lanes in (32, 64):
    check.PLACES[f"emulated-{{lanes}}"] = lambda numerics, lanes=lanes: GpuOps(check.Guarded(Emulated(lanes, sanitize=True)), numerics, "emulated")
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", {ops!r}, "-k", "emulated"]))
"""


@pytest.mark.slow
def test_sanitized():
    library = subprocess.run(["g++", "-print-file-name=libasan.so"], text=True, capture_output=True, check=True).stdout.strip()
    environment = os.environ | {"LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    script = RUN.format(tests=str(HERE.parent), ops=str(HERE.parent / "ops"))
    done = subprocess.run([sys.executable, "-c", script], env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert " passed" in done.stdout
