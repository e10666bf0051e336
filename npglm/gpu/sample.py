"""The next token on the device. Twin: npglm/sampler.py without filters."""

import numpy as np

from npglm.errors import NpglmError


def sample(logits, step, *, ops, temperature: float = 0.0, seed: int = 0):
    """logits [Y], step int64 [1] -> id int32 [1]; -1 if the logits cannot be sampled (NaN, +inf, all -inf): see checked."""
    chosen = ops.empty((1,), np.int32)
    if temperature == 0:
        ops.launch("greedy_f32", (1,), 1024, logits, chosen, logits.size)
    else:
        ops.launch("temperature_f32", (1,), 1024, logits, step, chosen, logits.size, temperature, seed)
    return chosen


def checked(chosen: int, step: int) -> int:
    """The id that sample gave, read back. Raises NpglmError if it is -1."""
    if chosen < 0:
        raise NpglmError(f"logits are not finite at step {step}")
    return chosen
