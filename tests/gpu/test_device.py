"""launch() checks against the typed table, and the scheduler of the emulation."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import raw_kernels
from npglm.errors import NpglmError
from npglm.gpu import device
from npglm.gpu.device import LaunchError, row_stride, rows_contiguous
from npglm.gpu.emulate import Emulated

ROOT = Path(__file__).parents[2]


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


def test_what_is_settled(place, monkeypatch):
    """What the last launch wrote is not, nor what overlaps with it; nor the one before, if the last lets the next one start early."""
    x, rows = np.ones(64, np.float32), np.zeros((4, 64), np.float32)
    add(place, x, x, rows[1])
    assert place.settled(x, rows[0], rows[2:], np.zeros((0, 64), np.float32))
    assert not place.settled(x, rows[1])
    assert not place.settled(rows[:, 3:9])
    add(place, x, x, rows[2])
    assert place.settled(rows[1])
    for argument, early in ((None, True), ("x", True), ("z", False)):  # of add_f32 x is given
        monkeypatch.setattr(device, "LETS_NEXT_START", {})
        add(place, x, x, rows[2])
        monkeypatch.setattr(device, "LETS_NEXT_START", {"add_f32": argument})
        add(place, x, x, rows[3])
        assert place.settled(rows[1])
        assert place.settled(rows[2]) is not early
        assert not place.settled(rows[3])


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
    named = {re.sub("<t>", "", line.split(": ")[1].split("(")[0]) for line in raw_kernels.TABLE.strip().splitlines()}
    for family in raw_kernels.FAMILIES:
        text = raw_kernels.read(family)
        found = re.findall(r"^KERNEL (?:(?:BOUNDS|AT_MOST)\([^)]*\) )?(?:JOIN\((\w+), TYPE\)|(\w+))\(", text, re.MULTILINE)
        assert found, family
        assert {a or b for a, b in found} <= named, family
    for name in {f for family, needs in raw_kernels.FAMILIES.items() for f in (family, *needs)} | {"preamble"}:
        assert not re.search(r"^\s*#include|\btemplate\b", raw_kernels.read(name), re.MULTILINE), name


def test_emulated_arrays_are_aligned():
    """As a device's are, wherever a file has its tensors: kernels read 16 bytes at a time."""
    values = np.arange(16, dtype=np.float32)
    odd = np.frombuffer(bytes(4) + values.tobytes(), np.float32, offset=4)
    for array in (odd, odd[1:], values):
        made = Emulated().array(array, np.float32)
        assert made.ctypes.data % 16 == 0
        assert (made == array).all()


def test_staging_goes_round_its_buffers():
    """Fewer rows than threads and more; strided rows, as a rank's part of a matrix has."""
    from npglm.gpu.staging import Staging

    staging, rng = Staging(Emulated(32), [np.empty(5000, np.uint8) for _ in range(2)]), np.random.default_rng(1)
    for rows, n in ((1, 5000), (3, 70), (16, 17), (50, 100), (33, 84)):
        data = rng.integers(0, 256, (rows, n + 6), np.uint8)[:, 2 : n + 2]
        assert (staging.upload(data) == data).all()


FRAME = """
================================================================
Failed to import CuPy.

Check the Installation Guide for details:
  https://docs.cupy.dev/en/latest/install.html

Original error:
  ImportError: libamdhip64.so.5: cannot open shared object file: No such file or directory
================================================================
"""
NO_DEVICE = """
class CUDARuntimeError(RuntimeError):
    pass
class cuda:
    class runtime:
        CUDARuntimeError = CUDARuntimeError
        def getDeviceCount():
            FOUND
"""
BROKEN = {  # what a package named cupy does -> the line
    f"import warnings\nwarnings.warn('CUDA path could not be detected.')\nraise ImportError({FRAME!r})": (
        "CuPy cannot be loaded: ImportError: libamdhip64.so.5: cannot open shared object file: No such file or directory"
    ),
    "import no_such_part_of_cupy": "CuPy cannot be loaded: No module named 'no_such_part_of_cupy'",
    "import numpy\nnumpy.no_such_name": "CuPy cannot be loaded: module 'numpy' has no attribute 'no_such_name'",
    NO_DEVICE.replace("FOUND", "raise CUDARuntimeError('cudaErrorInsufficientDriver: CUDA driver version is insufficient')"): (
        "cudaErrorInsufficientDriver: CUDA driver version is insufficient"
    ),
    NO_DEVICE.replace("FOUND", "return 0"): "CuPy sees no device",
}


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_cupy_is_one_line(tmp_path, text):
    """With --backend gpu it ends the run; auto says it and takes another backend."""
    (tmp_path / "cupy.py").write_text(text)
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    code = (
        "import sys; sys.path.insert(0, 'scripts'); import backend, argparse; from npglm import cli\n"
        "args = argparse.Namespace(numerics=None, threads=None, weight_cache=1.0, offload_experts=False, backend=sys.argv[1])\n"
        "sys.exit(cli.run(lambda argv: print(backend.pick(args)[1].backend)))"
    )
    gpu, auto = (
        subprocess.run([sys.executable, "-c", code, name], env=env, cwd=ROOT, capture_output=True, text=True, check=False)
        for name in ("gpu", "auto")
    )
    assert (gpu.returncode, gpu.stdout, gpu.stderr) == (2, "", f"-c: error: no GPU backend: {BROKEN[text]}\n")
    assert (auto.returncode, auto.stdout) == (0, "cpu\n")
    assert auto.stderr == f"note: no GPU backend: {BROKEN[text]}\n"


WEIGHT_AXES, WEIGHT_NAMES = {("W",), ("W/4",), ("D",), ("n_out", "n_in")}, {"weight", "kv_weight", "bias", "table", "grid"}


# What kernels read before they wait, besides weights. Where settled is true: what their callers ask Device.settled about. Inboxes: other
# GPUs fill them, and the kernel before changes no calls (npglm/gpu/collective.py).
SETTLED = {
    "attention_f16": ("cache", "top_k", "pos"), "rms_norm_blocks_f32": ("x",), "sum_rms_norm_blocks_f32": ("x",),
    "matvec_gate_up_swiglu_": ("experts",), "matvec_down_combine_": ("experts",), "indexer_score_f16": ("pos",),
    "select_top_k_f32": ("pos",),
}  # fmt: skip
# Where settled is true it has written the row of keys at pos at most: what reads the others.
OLD_ROWS = {"indexer_score_f16": "stage_keys(keys, s0, settled ? last - 1 : last, rows);"}
INBOXES = {"sum_rms_norm_blocks_f32": ("inboxes", "calls")}


def faults_of_waiting(family: str, text: str) -> list[str]:
    """What in a family's source breaks the rule of preamble.hip: before a kernel's wait_for_inputs() only its weights are touched, what
    is INBOXES, after a wait of its own a pointer that it is for, and after `if (!settled)` what is SETTLED. Pointers may be compared with
    null, and copied."""
    faults = []
    for head, body in re.findall(r"^(KERNEL [^{]*)\{\n(.*?)^\}", re.sub("//.*", "", text), re.MULTILINE | re.DOTALL):
        start, _, parameters = head.rpartition("(")
        name = re.search(r"(\w+)(?:, TYPE\))?$", start)[1]
        kernel = next(k for k in raw_kernels.KERNELS.values() if k.family == family and k.name.startswith(name))
        before, call, _ = f"\n{body}".partition("\n  wait_for_inputs();\n")
        if not call:
            faults.append(f"{name} does not wait")
            continue
        if "return" in before:
            faults.append(f"{name} may end before it waits")
        for parameter, argument in zip(parameters.split(","), kernel.arguments, strict=True):
            pointer = re.findall(r"\w+", parameter)[-1]
            free = argument.name in WEIGHT_NAMES or pointer in INBOXES.get(name, ())
            if argument.axes is None or argument.axes in WEIGHT_AXES or free:
                continue
            early = before.partition(f"if ({pointer}) wait_for_inputs();")[0]
            early = early.replace(OLD_ROWS.get(name, "\0"), "")
            if pointer in SETTLED.get(name, ()):
                early = re.split(rf"if \((?:{pointer} && )?!settled\) wait_for_inputs\(\);", early)[0]
            early = re.sub(
                rf"if \({pointer}\) let_next_start\(\);|if \({pointer}\b(?= &&|$)|\b{pointer} \?|\* \w+ = {pointer};", "", early
            )
            if re.search(rf"\b{pointer}\b", early):
                faults.append(f"{name} touches {pointer} before it waits")
    return faults


@pytest.mark.parametrize("family", raw_kernels.FAMILIES)
def test_every_kernel_waits_for_its_inputs(family):
    assert not faults_of_waiting(family, raw_kernels.read(family))


def test_who_lets_the_next_one_start():
    """The kernels that call let_next_start(), always or where an argument is given, are those that Device knows of."""
    found = {}
    for family in raw_kernels.FAMILIES:
        for kernel in re.split(r"^KERNEL ", raw_kernels.read(family), flags=re.MULTILINE)[1:]:
            if call := re.search(r"^  (?:if \((\w+)\) )?let_next_start\(\);$", kernel, re.MULTILINE):
                name = re.search(r"(\w+?)(?:, TYPE\))?\(const", kernel)[1]
                found |= {k: call[1] for k in raw_kernels.KERNELS if k.startswith(name)}
    assert found == device.LETS_NEXT_START


@pytest.mark.parametrize(
    ("early", "fault"),
    [
        ("  if (n == 0) return;\n  wait_for_inputs();\n", "scale_f32 may end before it waits"),
        ("  if (n) wait_for_inputs();\n", "scale_f32 does not wait"),
        ("  float first = x[THREAD];\n  wait_for_inputs();\n", "scale_f32 touches x before it waits"),
        ("  *out = 0;\n  wait_for_inputs();\n", "scale_f32 touches out before it waits"),
        ("  read(x);\n  wait_for_inputs();\n", "scale_f32 touches x before it waits"),
    ],
)
def test_the_rule_of_waiting(early, fault):
    text = "KERNEL scale_f32(const float* x, float* out, long long n, float factor) {\n" + early + "  out[0] = x[0];\n}\n"
    assert faults_of_waiting("elementwise", text) == [fault]


@pytest.mark.parametrize(
    ("early", "faults"),
    [
        ("  if (!settled) wait_for_inputs();\n  float first = x[0];\n", []),
        ("  float first = x[0];\n  if (!settled) wait_for_inputs();\n", ["scale_f32 touches x before it waits"]),
        ("  if (n && !settled) wait_for_inputs();\n  float first = x[0];\n", ["scale_f32 touches x before it waits"]),
        ("  if (!settled) wait_for_inputs();\n  out[0] = x[0];\n", ["scale_f32 touches out before it waits"]),
    ],
)
def test_the_rule_of_waiting_for_what_is_settled(monkeypatch, early, faults):
    monkeypatch.setitem(SETTLED, "scale_f32", ("x",))
    text = "KERNEL scale_f32(const float* x, float* out, long long n, float factor) {\n" + early + "  wait_for_inputs();\n}\n"
    assert faults_of_waiting("elementwise", text) == faults


def test_no_cupy_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(NpglmError, match=r"^no GPU backend: CuPy is not installed \(pip install 'npglm\[cuda13\]'.*\)$"):
        device._cupy()
