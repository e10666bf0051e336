"""The cache of one sequence: per layer the latent key/value rows, and on full layers the indexer's keys."""

from npglm.config import GlmConfig


class Cache:
    """Rows 0..length-1 are filled; what lies beyond is uninitialised and never read.

    kv[i]: [capacity, R+P], the normed latent, then k_pe after rope. index_k[i]: [capacity, J], or None on shared layers.
    Arrays come from `ops.empty` in `ops.cache_dtype`, so they live where the op set computes.
    """

    def __init__(self, config: GlmConfig, capacity: int, ops):
        self.config, self.ops, self.capacity, self.length = config, ops, capacity, 0
        self.kv = [self._rows(config.kv_rank + config.rope) for _ in config.full]
        self.index_k = [self._rows(config.indexer_dim) if full else None for full in config.full]

    def _rows(self, width: int):
        return self.ops.empty((self.capacity, width), self.ops.cache_dtype)

    def grow(self, capacity: int) -> None:
        """Move to arrays of `capacity` rows; the filled rows are kept."""
        old, n = (self.kv, self.index_k), self.length
        self.__init__(self.config, max(capacity, n), self.ops)
        self.length = n
        for new, rows in zip(self.kv + self.index_k, old[0] + old[1], strict=True):
            if rows is not None:
                new[:n] = rows[:n]

    @staticmethod
    def row_bytes(config: GlmConfig, itemsize: int) -> int:
        """Bytes that one token takes over all layers."""
        return itemsize * (config.n_layers * (config.kv_rank + config.rope) + sum(config.full) * config.indexer_dim)
