"""Stand-ins for a checkpoint's tensors: weights given as an array, or some columns of a tensor."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np


class ArrayWeight:
    """Weights that are at hand: what reference.ops asks of a Tensor. `like` gives the type, which decides the activations' rounding."""

    def __init__(self, values: np.ndarray, like):
        self.values, self.shape, self.type, self.name = values, values.shape, like.type, like.name
        self.n_rows = int(np.prod(values.shape[:-1]))

    def rows(self, start: int, stop: int) -> np.ndarray:
        return self.values.reshape(self.n_rows, -1)[start:stop]

    def row_blocks(self, start: int = 0, stop: int | None = None):
        yield start, self.n_rows if stop is None else stop

    def decode(self) -> np.ndarray:
        return self.values


class MappedWeight(ArrayWeight):
    """A tensor whose decoded rows go through `change([n, in], first row) -> [n, in']`; nothing is decoded before it is used."""

    def __init__(self, tensor, change, n_in: int | None = None):
        self.tensor, self.change = tensor, change
        self.shape = (*tensor.shape[:-1], n_in or tensor.shape[-1])
        self.type, self.name, self.n_rows = tensor.type, tensor.name, tensor.n_rows

    def rows(self, start: int, stop: int) -> np.ndarray:
        return self.change(self.tensor.rows(start, stop), start)

    def row_blocks(self, start: int = 0, stop: int | None = None):
        return self.tensor.row_blocks(start, self.n_rows if stop is None else stop)

    def decode(self) -> np.ndarray:
        return self.rows(0, self.n_rows).reshape(self.shape)


def with_weights(place, **weights):
    """The same place with other weights."""
    return replace(place, w=SimpleNamespace(**(vars(place.w) | weights)))


class ColumnSlice(MappedWeight):
    """Some columns of a tensor's input dimension: the share of one tensor-parallel rank."""

    def __init__(self, tensor, columns: slice):
        super().__init__(tensor, lambda rows, first: rows[:, columns], columns.stop - columns.start)
        self.columns = columns


def rank_weights(place, names: tuple[str, ...], columns: slice | None):
    """The place with each weight of `names` cut to `columns` of its input dimension."""
    if columns is None:
        return place
    return with_weights(place, **{n: ColumnSlice(getattr(place.w, n), columns) for n in names})
