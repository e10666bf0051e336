"""An interpolated modified Kneser-Ney model over token ids: the baseline that the checkpoint has to beat.

An n-gram of up to five tokens below 4096 is one int64 of 12 bits a token, newest token lowest, so that all
tables are sorted arrays and all look-ups binary searches.
"""

import numpy as np

BITS = 12


def pack(tokens: np.ndarray, order: int) -> np.ndarray:
    """Every n-gram of the stream, by the place of its last token (from order - 1 on)."""
    grams = np.zeros(len(tokens) - order + 1, dtype=np.int64)
    for at in range(order):
        grams = grams << BITS | tokens[at : len(tokens) - order + 1 + at].astype(np.int64)
    return grams


def look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0.0)


class KneserNey:
    def __init__(self, tokens: np.ndarray, order: int = 5, vocabulary: int = 1 << BITS):
        self.order, self.vocabulary, self.levels = order, vocabulary, {}
        tables = {n: np.unique(pack(tokens, n), return_counts=True) for n in range(1, order + 1)}
        for n in range(1, order + 1):
            keys, counts = tables[n]
            if n < order:  # lower orders count the different tokens seen before the n-gram
                keys, counts = np.unique(tables[n + 1][0] & ((1 << BITS * n) - 1), return_counts=True)
            seen = [np.count_nonzero(counts == c) for c in range(5)]
            y = seen[1] / (seen[1] + 2 * seen[2])
            discount = np.array([0.0] + [c - (c + 1) * y * seen[c + 1] / seen[c] for c in (1, 2, 3)])
            taken = discount[np.minimum(counts, 3)]
            contexts, first = np.unique(keys >> BITS, return_index=True)
            total = np.add.reduceat(counts.astype(float), first)
            back_off = np.add.reduceat(taken, first) / total
            self.levels[n] = keys, counts - taken, contexts, total, back_off

    def log2(self, tokens: np.ndarray) -> np.ndarray:
        """log2 of the probability of every token, each given up to order - 1 tokens before it."""
        probability = np.full(len(tokens), 1.0 / self.vocabulary)
        for n in range(1, self.order + 1):
            keys, kept, contexts, total, back_off = self.levels[n]
            grams = pack(tokens, n)
            sums = look_up(contexts, total, grams >> BITS)
            rest = np.where(sums > 0, look_up(contexts, back_off, grams >> BITS), 1.0)
            own = look_up(keys, kept, grams) / np.where(sums > 0, sums, 1.0)
            probability[n - 1 :] = own + rest * probability[n - 1 :]
        return np.log2(probability)


def bits(train: np.ndarray, documents: list[np.ndarray]) -> float:
    """What the documents cost, each by itself."""
    model = KneserNey(train)
    return -sum(model.log2(document).sum() for document in documents)
