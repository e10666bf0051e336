"""The next token on the device. Twin: npglm/sampler.py without filters."""

import numpy as np

from npglm.errors import NpglmError

LOGITS = 4096  # that a block of threads looks through first: raw_kernels/sample.hip


def sample(logits, step, *, ops, temperature: float = 0.0, seed: int = 0):
    """logits [Y], step int64 [1] -> id int32 [1]; -1 if the logits cannot be sampled (NaN, +inf, all -inf): see checked."""
    chosen, best = ops.empty((1,), np.int32), ops.empty((-(-logits.size // LOGITS),), np.uint64)
    ops.launch("best_logits_f32", best.shape, 256, logits, best, logits.size)
    if temperature == 0:
        ops.launch("greedy_f32", (1,), 64, best, chosen, best.size)
    else:
        ops.launch("temperature_f32", (1,), 1024, logits, best, step, chosen, logits.size, best.size, temperature, seed)
    return chosen


def checked(chosen: int, step: int) -> int:
    """The id that sample gave, read back. Raises NpglmError if it is -1."""
    if chosen < 0:
        raise NpglmError(f"logits are not finite at step {step}")
    return chosen
