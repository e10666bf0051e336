"""Decoded weights up to a budget, so that small models run at NumPy's speed and large ones in bounded memory."""

from types import SimpleNamespace

import numpy as np

from npglm.checkpoint import Tensor


class WeightCache:
    """What has been decoded stays until `budget` bytes are full; then everything else is decoded at each use.

    Nothing is evicted: a forward pass reads the weights in a circle, where eviction of the oldest would keep nothing.
    """

    def __init__(self, budget: int):
        self.budget, self.used = budget, 0
        self.rows: dict[tuple[str, int, int], np.ndarray] = {}

    def wrap(self, weights: SimpleNamespace) -> SimpleNamespace:
        """The same tree, with each Tensor behind this cache."""
        wrapped = SimpleNamespace()
        for name, value in vars(weights).items():
            if isinstance(value, list):
                value = [self.wrap(layer) for layer in value]
            elif value is not None:
                value = CachedTensor(value, self)
            setattr(wrapped, name, value)
        return wrapped


class CachedTensor:
    """A Tensor whose rows() remembers. Embedding tables are looked up by row, so a row alone is not worth keeping."""

    def __init__(self, tensor: Tensor, cache: WeightCache):
        self.tensor, self.cache = tensor, cache
        self.name, self.shape, self.type, self.n_rows = tensor.name, tensor.shape, tensor.type, tensor.n_rows
        self.row_blocks = tensor.row_blocks

    def rows(self, start: int, stop: int) -> np.ndarray:
        key = (self.name, start, stop)
        rows = self.cache.rows.get(key)
        if rows is None:
            rows = self.tensor.rows(start, stop)
            if (stop - start > 1 or self.n_rows == 1) and self.cache.used + rows.nbytes <= self.cache.budget:
                self.cache.rows[key] = rows
                self.cache.used += rows.nbytes
        return rows

    def decode(self) -> np.ndarray:
        return self.rows(0, self.n_rows).reshape(self.shape)
