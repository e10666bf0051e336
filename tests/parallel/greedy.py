"""Run by mpirun from test_ranks.py: greedy decoding on every rank; each writes its logits [steps,Y] and ids to OUT.rN.npz."""

import sys

import numpy as np

import npglm
import npglm.cpu
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


def main(argv, ranks):
    path, experts, n, out = argv
    checkpoint, ops = parallel.share(npglm.load(path), npglm.cpu.op_set("f32", 1), ranks, experts)
    np.savez(ranks.path(out), **greedy(Model(checkpoint, forward, ops), int(n)))


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:], ranks=True))
