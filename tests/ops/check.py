"""The one checking loop: a production op set's verb against its twin in reference/ops.

A case names a verb and its arguments as host values: NumPy arrays, npglm.checkpoint.Tensor for weights, numbers, namespaces of these.
The verb runs on every place (PLACES). Its results are judged by npglm.trace.metrics: truth is the twin in f64 with the same
Numerics. Arrays on a place lie between canaries; outputs start as NaN (integers as -1).
"""

from types import SimpleNamespace

import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from synth import random_blocks

from npglm.checkpoint import Tensor
from npglm.trace import metrics
from reference.numerics import NUMERICS
from reference.ops import EXACT, ReferenceOps

GUARD = 256  # bytes of canary on each side


class Guarded:
    """A Device whose arrays lie between canaries and start as 0xff bytes."""

    def __init__(self, device):
        self.device, self.buffers = device, []

    def __getattr__(self, name):
        return getattr(self.device, name)

    def empty(self, shape, dtype):
        n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        padded = -(-n_bytes // GUARD) * GUARD
        buffer = self.device.empty((padded + 2 * GUARD,), np.uint8)
        buffer[...] = 255
        self.buffers.append((buffer, n_bytes))
        return buffer[GUARD : GUARD + n_bytes].view(dtype).reshape(shape)

    def array(self, values, dtype):
        values = np.ascontiguousarray(values, dtype)
        array = self.empty(values.shape, dtype)
        array[...] = self.device.array(values, dtype)
        return array

    def verify(self) -> None:
        """Raise AssertionError if a canary has been written over."""
        for buffer, n_bytes in self.buffers:
            bytes_ = self.device.numpy(buffer)
            assert (bytes_[:GUARD] == 255).all(), "written before the start of an array"
            assert (bytes_[GUARD + n_bytes :] == 255).all(), "written past the end of an array"
        self.buffers.clear()


def _emulated(lanes: int):
    from npglm.gpu.emulate import Emulated
    from npglm.gpu.ops import GpuOps

    return lambda numerics: GpuOps(Guarded(Emulated(lanes)), numerics, "emulated")


def _gpu(numerics):
    from npglm.gpu.device import open_gpu
    from npglm.gpu.ops import GpuOps

    return GpuOps(Guarded(open_gpu()), numerics, "gpu")


PLACES = {"emulated-32": _emulated(32), "emulated-64": _emulated(64), "gpu": _gpu}


def place_parameters() -> list:
    """Warps of 64 are slow tests: the same kernels compiled once more."""
    from npglm.errors import NpglmError
    from npglm.gpu.device import open_gpu

    marks = {"emulated-64": pytest.mark.slow}
    try:
        open_gpu()
    except NpglmError as error:
        marks["gpu"] = pytest.mark.skip(reason=f"needs a GPU: {error}")
    return [pytest.param(name, marks=marks.get(name, ())) for name in PLACES]


every_place = pytest.mark.parametrize("place", place_parameters())
both_numerics = pytest.mark.parametrize("numerics", ["ggml", "f32"])


def tensor(rng, kind: T, *shape: int, scale: float = 1.0, name: str = "w") -> Tensor:
    """A random weight tensor; values of a row have about the norm `scale`."""
    if len(shape) == 1:
        data = rng.normal(1, 0.3, shape).astype(np.float32)
        return Tensor(name, shape, T.F32, data.view(np.uint8).reshape(1, -1), "test")
    rows, cols = int(np.prod(shape[:-1])), shape[-1]
    return Tensor(name, shape, kind, random_blocks(kind, rows, cols, rng, scale / cols**0.5), "test")


class Op:
    """The op set of a place with its twins: call check()."""

    def __init__(self, place: str, numerics: str = "ggml", traced: bool = False):
        self.place, self.numerics = place, numerics
        ops = PLACES[place](numerics)
        self.ops = ops.traced() if traced else ops
        self.twin, self.truth = ReferenceOps(NUMERICS[numerics]), ReferenceOps(NUMERICS[numerics].truth())

    def there(self, value):
        """A host value -> the same on the place."""
        if isinstance(value, np.ndarray):
            return self.ops.array(value, value.dtype)
        if isinstance(value, Tensor):
            return self.ops.weight(value)
        if isinstance(value, SimpleNamespace):
            return SimpleNamespace(**{k: self.there(v) for k, v in vars(value).items()})
        return tuple(map(self.there, value)) if isinstance(value, tuple) else value

    def run(self, verb: str, *args, **options):
        """The verb's result on the place, as NumPy; canaries checked. A tuple for several results."""
        return self.run_on(verb, *map(self.there, args), **options)

    def run_on(self, verb: str, *args, **options):
        """run() with arguments that are on the place already."""
        result = getattr(self.ops, verb)(*args, **options)
        if result is None:
            self.ops.device.verify()
            return None
        many = result if isinstance(result, tuple) else (result,)
        host = tuple(np.array(self.ops.numpy(r)) for r in many)
        self.ops.device.verify()
        return host if isinstance(result, tuple) else host[0]

    def check(self, verb: str, *args, factor: float = metrics.FACTOR, exact: bool = False, twin_args=None, **options):
        """Judge the verb. exact: bit for bit. options go to the place only. Integers must be equal. Returns the place's results."""
        exact = exact or verb in {e.__name__ for e in EXACT}
        mine = self.run(verb, *args, **options)
        twin = getattr(self.twin, verb)(*(twin_args or args))
        truth = twin if exact else getattr(self.truth, verb)(*(twin_args or args))
        as_tuple = lambda r: r if isinstance(r, tuple) else (r,)
        for i, (x, y, z) in enumerate(zip(as_tuple(mine), as_tuple(twin), as_tuple(truth), strict=True)):
            what = f"{verb}, result {i}, on {self.place} ({self.numerics})"
            assert x.shape == y.shape, f"{what}: shape {x.shape}, expected {y.shape}"
            if exact or y.dtype.kind in "iu":
                assert x.dtype == y.dtype, f"{what}: {x.dtype}, expected {y.dtype}"
                different = np.argwhere(~((x == y) | (np.isnan(x) & np.isnan(y))))
                assert not len(different), f"{what}: {len(different)} of {x.size} differ, first at {different[0]}: " + (
                    f"{x[tuple(different[0])]!r}, expected {y[tuple(different[0])]!r}"
                )
            else:
                metrics.check(x, y, z, factor=factor, what=what)
        return mine
