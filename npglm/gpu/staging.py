"""Host bytes to the device through two pinned buffers, which several threads fill in turn: from pageable memory, as a mapped file
is, the bus moves a fraction of what it can."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

THREADS = min(16, os.cpu_count() or 1)


class Staging:
    """buffers: two pinned uint8 arrays. One is filled while the other one is on its way."""

    def __init__(self, device, buffers):
        self.device, self.buffers, self.turn = device, buffers, 0
        self.moved = [lambda: None, lambda: None]  # wait until a buffer may be written
        self.pool = ThreadPoolExecutor(THREADS)

    def upload(self, data: np.ndarray):
        """uint8 [rows, n], at most a buffer -> the same on the device. Rows may be strided; they may change once this returns."""
        self.turn ^= 1
        self.moved[self.turn]()
        host = self.buffers[self.turn][: data.size].reshape(data.shape)
        step = -(-len(data) // THREADS)
        list(self.pool.map(lambda i: np.copyto(host[i : i + step], data[i : i + step]), range(0, len(data), step)))
        array = self.device.empty(data.shape, np.uint8)
        self.device.fill(array, host)
        self.moved[self.turn] = self.device.event()
        return array
