"""Run by mpirun from test_ranks.py: greedy decoding on every rank, which proves its shards first; each writes its logits [steps,Y]
and ids to OUT.rN.npz."""

import sys

import numpy as np

import npglm
import npglm.cpu
import npglm.gpu
from npglm import parallel
from npglm.cli import run
from npglm.forward import forward
from npglm.generate import Model

PROMPT = [3, 17, 29, 5, 41, 7, 11, 2, 19, 23]


def greedy(model, n: int) -> dict:
    cache, ids, rows = model.cache(len(PROMPT) + n), [], []
    for _ in range(n):
        rows.append(model.run(cache, ids[-1:] or PROMPT)[0].copy())
        ids.append(int(rows[-1].argmax()))
    return {"logits": np.array(rows), "ids": np.array(ids)}


def op_set(place: str, numerics: str, ranks=None):
    if place == "cpu":
        return npglm.cpu.op_set(numerics, 1)
    from npglm.gpu.collective import own_gpu

    return npglm.gpu.op_set(numerics, "gpu", index=own_gpu(ranks) if ranks else None)


def main(argv, ranks):
    path, experts, place, numerics, n, out = argv
    checkpoint, ops = parallel.share(npglm.load(path), op_set(place, numerics, ranks), ranks, experts)
    model = Model(checkpoint, forward, ops)
    parallel.check_shards(model.weights, checkpoint, ops)
    np.savez(ranks.path(out), **greedy(model, int(n)))


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:], ranks=True))
