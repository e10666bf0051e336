"""One token id from one row of logits.

The filters and their order are llama.cpp's default chain (`common_params_sampling.samplers` in common/common.h of the source
vendored in llama-cpp-python 0.3.36; its other members are off by default): top_k, top_p, min_p, temperature. So top_p and min_p
look at the probabilities before temperature, and top_p at those of the tokens that top_k left, renormalised.

Candidates are always ordered by logit descending, then id ascending, so that ties are decided by the id alone. Probabilities
are computed in float64 from the float32 logits.
"""

import math
from operator import index

import numpy as np

from npglm.errors import NpglmError


def uniform(seed: int, step: int) -> float:
    """The random number of one step, in [0, 1): a multiple of 2^-24, exact in float32 and float64.

    Philox-4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011; constants as in Random123 and NumPy)
    with the key words (seed, 0) and the counter words (step + 1, 0, 0, 0), low word first; x0 is the first of its four 64-bit
    outputs, and the number is (x0 >> 40) * 2^-24. The counter is step + 1 because NumPy counts up before its first block: x0 is
    `numpy.random.Philox(key=seed, counter=step).random_raw()`. A kernel needs ten rounds of two 64x64-bit products, high
    (__umul64hi) and low words, and no float64: the top 24 bits become a float without rounding.

    seed: 0 <= seed < 2^64. step: 0 <= step < 2^64 - 1.
    """
    x0 = np.random.Philox(key=seed, counter=step).random_raw()
    return (int(x0) >> 40) * 2.0**-24


class Sampler:
    """Chooses token ids. Without state: the choice depends on the arguments, the logits and the step only.

    temperature: 0 is greedy: the highest logit, of equal ones the lowest id; the filters cannot change that.
    top_k: only the k highest logits; 0 is all.
    top_p: then only the fewest whose probabilities add up to top_p or more; 1 is all.
    min_p: then only those at least min_p times as probable as the first; 0 is all.
    seed: of `uniform`.
    """

    def __init__(self, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 0):
        # `not (good)` rather than `bad`, so that NaN is refused.
        if not 0 <= temperature < math.inf:
            raise NpglmError(f"temperature is {temperature}, expected a finite number >= 0")
        if not _is_int(top_k) or top_k < 0:
            raise NpglmError(f"top_k is {top_k}, expected an integer >= 0 (0: all tokens)")
        if not 0 < top_p <= 1:
            raise NpglmError(f"top_p is {top_p}, expected 0 < top_p <= 1 (1: all tokens)")
        if not 0 <= min_p <= 1:
            raise NpglmError(f"min_p is {min_p}, expected 0 <= min_p <= 1 (0: all tokens)")
        if not _is_int(seed) or not 0 <= seed < 2**64:
            raise NpglmError(f"seed is {seed}, expected an integer, 0 <= seed < 2^64")
        self.temperature, self.top_k, self.top_p, self.min_p, self.seed = temperature, top_k, top_p, min_p, seed

    @property
    def filters(self) -> bool:
        """Whether top_k, top_p or min_p can take a token away that temperature alone would leave."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    def sample(self, logits: np.ndarray, step: int) -> int:
        """The id chosen from logits [Y] float32. step: how many tokens were generated before; each has one random number.

        -inf is a token that cannot be chosen. NaN, +inf and a row of -inf are an NpglmError.
        """
        if not _is_int(step) or not 0 <= step < 2**64 - 1:
            raise NpglmError(f"step is {step}, expected an integer, 0 <= step < 2^64 - 1")
        logits = _row(logits)
        if not np.isfinite(logits.max()):  # max passes NaN on
            raise NpglmError(f"logits are not finite at step {step}")
        if self.temperature == 0:
            return int(logits.argmax())

        ids = self._candidates(logits)  # [n] n <= Y
        kept = logits[ids].astype(np.float64)
        total = np.cumsum(np.exp((kept - kept[0]) / self.temperature))  # [n] not normalised
        # The first candidate whose cumulative sum exceeds the target: none of probability 0, and uniform < 1 keeps it in range.
        return int(ids[np.searchsorted(total, uniform(self.seed, step) * total[-1], side="right")])

    def logprob(self, logits: np.ndarray, id: int) -> float:
        """Natural logarithm of the id's probability under softmax(logits [Y]), without temperature or filters."""
        logits = _row(logits)
        if not _is_int(id) or not 0 <= id < len(logits):
            raise NpglmError(f"token id {id} is outside the {len(logits)} logits")
        top = logits.max()
        if not np.isfinite(top):
            raise NpglmError("logits are not finite")
        shifted = logits.astype(np.float64) - top
        return float(shifted[id] - np.log(np.exp(shifted).sum()))

    def _candidates(self, logits: np.ndarray) -> np.ndarray:
        """The ids that the filters leave, best first; at least one."""
        k = min(self.top_k, len(logits)) or len(logits)
        # Sort only what can be kept: everything down to the k-th highest logit, equal ones included.
        ids = np.flatnonzero(logits >= np.partition(logits, len(logits) - k)[len(logits) - k])
        ids = ids[np.argsort(-logits[ids], kind="stable")][:k]  # stable: equal logits stay in order of id
        kept = logits[ids].astype(np.float64)
        n = len(ids)
        if self.top_p < 1:
            total = np.cumsum(np.exp(kept - kept[0]))
            n = int(np.searchsorted(total, self.top_p * total[-1], side="left")) + 1  # up to the first sum >= top_p
        if self.min_p > 0:
            n = min(n, int(np.count_nonzero(kept >= kept[0] + math.log(self.min_p))))
        return ids[:n]


def _is_int(value) -> bool:
    try:
        return index(value) is not None and not isinstance(value, bool)
    except TypeError:
        return False


def _row(logits: np.ndarray) -> np.ndarray:
    logits = np.asarray(logits)
    if logits.ndim != 1 or not len(logits):
        raise NpglmError(f"logits have shape {logits.shape}, expected one row of at least one logit")
    return logits
