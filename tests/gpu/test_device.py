"""launch() checks against the typed table, and the scheduler of the emulation."""

import numpy as np
import pytest

import raw_kernels
from npglm.gpu import device
from npglm.gpu.device import LaunchError, row_stride, rows_contiguous
from npglm.gpu.emulate import Emulated


@pytest.fixture
def place():
    return Emulated(32)


def add(place, x, y, out, n=None, grid=(1,), block=64):
    place.launch("add_f32", grid, block, x, y, out, out.size if n is None else n)


def test_launch_checks(place):
    x, out = np.ones(64, np.float32), np.zeros(64, np.float32)
    add(place, x, x, out)
    assert (out == 2).all()
    bad = [
        ("expected 4", lambda: place.launch("add_f32", (1,), 64, x, x, out)),
        ("x is f32, found float64", lambda: add(place, x.astype(np.float64), x, out)),
        ("not contiguous", lambda: add(place, np.ones(128, np.float32)[::2], x, out)),
        ("x is missing", lambda: add(place, None, x, out)),
        ("is an array on", lambda: add(place, [1.0], x, out)),
        ("n is a number", lambda: add(place, x, x, out, n=x)),
        ("threads in a block", lambda: add(place, x, x, out, block=96)),
        ("threads in a block", lambda: add(place, x, x, out, block=2048)),
        ("grid", lambda: add(place, x, x, out, grid=(1, 65536))),
        ("shared memory", lambda: place.launch("add_f32", (1,), 64, x, x, out, 64, shared=1 << 20)),
    ]
    for message, call in bad:
        with pytest.raises(LaunchError, match=message):
            call()
    add(place, x, x, np.zeros(64, np.float32), grid=(0,))  # nothing to do


def test_row_strides():
    wide = np.zeros((3, 4, 20), np.float32)
    assert rows_contiguous(wide[..., 4:9])
    assert row_stride(wide[..., 4:9]) == 20
    assert rows_contiguous(wide[:1, :, 3:])
    assert row_stride(wide[:1, :1]) == 20
    assert not rows_contiguous(wide[:, ::2].transpose(1, 0, 2))
    assert not rows_contiguous(wide[..., ::2])


DIVERGENT = """
KERNEL add_f32(const float* x, const float* y, float* out, long long n) {
  (void)x, (void)y, (void)n;
  if (THREAD < 40) BAD;
  out[THREAD] = 1;
}
KERNEL scale_f32(const float* x, float* out, long long n, float factor) { (void)x, (void)out, (void)n, (void)factor; }
"""


@pytest.mark.parametrize(("bad", "message"), [("barrier()", "block barrier"), ("lane_read(1, 0)", "shuffle")])
def test_divergence_is_an_error(place, monkeypatch, bad, message):
    from npglm.gpu import emulate

    kernels = {n: k for n, k in raw_kernels.KERNELS.items() if n in ("add_f32", "scale_f32")}
    monkeypatch.setattr(emulate, "KERNELS", kernels)
    monkeypatch.setattr(
        emulate, "read", lambda name: DIVERGENT.replace("BAD", bad) if name == "elementwise" else raw_kernels.read(name)
    )
    emulate._library.cache_clear()
    x, out = np.ones(64, np.float32), np.zeros(64, np.float32)
    with pytest.raises(RuntimeError, match=message):
        add(place, x, x, out)
    emulate._library.cache_clear()


def test_table_names_every_kernel():
    """Each KERNEL of the sources has its line, and no source includes anything or uses templates."""
    import re

    named = {re.sub("<t>", "", line.split(": ")[1].split("(")[0]) for line in raw_kernels.TABLE.strip().splitlines()}
    for family in raw_kernels.FAMILIES:
        text = raw_kernels.read(family)
        found = re.findall(r"^KERNEL (?:(?:BOUNDS|AT_MOST)\([^)]*\) )?(?:JOIN\((\w+), TYPE\)|(\w+))\(", text, re.MULTILINE)
        assert found, family
        assert {a or b for a, b in found} <= named, family
    for name in {f for family, needs in raw_kernels.FAMILIES.items() for f in (family, *needs)} | {"preamble"}:
        assert not re.search(r"^\s*#include|\btemplate\b", raw_kernels.read(name), re.MULTILINE), name


def test_no_cupy_is_one_line(monkeypatch):
    import builtins

    real = builtins.__import__

    def broken(name, *args, **kwargs):
        if name == "cupy":
            raise ImportError("libamdhip64.so.5: cannot open shared object file\nmore")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", broken)
    with pytest.raises(device.NpglmError) as caught:
        device._cupy()
    assert "\n" not in str(caught.value)
