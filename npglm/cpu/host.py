"""Where the op set's arrays come from. Those of one token are used again as soon as nobody holds them: decoding allocates nothing."""

import mmap
from sys import getrefcount

import numpy as np

POOLED_BYTES = 1 << 20  # larger arrays, and those of more than one row, are left to malloc: prefill's sizes vary
UNSHARED = 3  # references to an array that only the pool holds: the pool's list, the loop's variable, getrefcount's argument


class Array(np.ndarray):
    """An ndarray that knows its address; views of it do not."""

    __slots__ = ("address",)


class Host:
    """Allocates on the host."""

    def __init__(self):
        self.pool: dict[tuple, list[Array]] = {}

    def empty(self, shape: tuple[int, ...], dtype) -> Array:
        free = self.pool.setdefault((shape, dtype), []) if shape[0] == 1 else ()
        for array in free:
            if getrefcount(array) == UNSHARED:
                return array
        array = np.empty(shape, dtype).view(Array)
        array.address = array.__array_interface__["data"][0]
        if shape[0] == 1 and array.nbytes <= POOLED_BYTES:
            free.append(array)
        return array

    def array(self, values, dtype) -> np.ndarray:
        return np.asarray(values, dtype)

    def numpy(self, array) -> np.ndarray:
        return np.asarray(array)


def address_of(array: np.ndarray) -> int:
    """Where a C-contiguous array begins."""
    try:
        return array.address
    except AttributeError:
        return array.__array_interface__["data"][0]


def address_space(n_bytes: int = 1 << 36) -> np.ndarray:
    """A block of addresses whose pages come into being when written; half as large, and so on, where the system refuses."""
    while True:
        try:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
            return np.frombuffer(mmap.mmap(-1, n_bytes, flags=flags), np.uint8)
        except OSError:
            if n_bytes < 1 << 28:
                raise
            n_bytes //= 2
