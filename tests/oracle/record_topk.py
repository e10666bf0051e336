"""Record which tokens transformers' indexer chose on the golden model: exact ties are common there and torch.topk breaks them as it likes.

    python tests/oracle/record_topk.py -o tests/golden/transformers-topk.npz

For n in 5, 12, 100, of `ids_n` and `greedy_n` in transformers.npz (which were made by a whole forward pass for every token):
  topk_n        int16 [layers, rows, 24, k]  the sets of a pass over n, n+1, ... n+23 tokens; -1 is padding; full layers only
  cached_topk_n int16 [layers, 23, k]        the sets of 23 decode steps over a cache behind a pass over n tokens
  cached_greedy_n, cached_logits_n           [24], [24, Y]: what that decoding gives (another tie now and then, so another text)
  layers        which layers are full; made_by, versions: strings
"""

import shlex
import sys
from pathlib import Path

import numpy as np

import npglm
from npglm import cli
from npglm.errors import NpglmError
from npglm.trace.torch_model import glm_from_checkpoint, need_torch

GOLDEN = Path(__file__).parents[1] / "golden"
STEPS = 24


def tidy(top_k: np.ndarray, first_row: int) -> np.ndarray:
    """[T,k] in any order with future positions -> int16 [T,k] ascending, then -1."""
    out = np.full(top_k.shape, -1, np.int16)
    for i, row in enumerate(top_k):
        chosen = np.sort(row[row <= first_row + i])
        out[i, : len(chosen)] = chosen
    return out


class Indexers:
    """The choices of the last forward pass, by layer. Pads to `k` columns."""

    def __init__(self, model, k: int):
        self.k, self.seen = k, {}
        self.layers = [i for i, layer in enumerate(model.model.layers) if layer.self_attn.indexer is not None]
        for i in self.layers:
            model.model.layers[i].self_attn.indexer.register_forward_hook(self._hook(i))

    def _hook(self, layer):
        def keep(module, args, output):
            self.seen[layer] = output[0].numpy()  # [T,min(k,S)]

        return keep

    def take(self, first_row: int = 0) -> np.ndarray:
        """int16 [layers,T,k]"""
        sets = np.stack([tidy(self.seen[i], first_row) for i in self.layers])
        return np.pad(sets, ((0, 0), (0, 0), (0, self.k - sets.shape[2])), constant_values=-1)


def record(model, indexers: Indexers, ids: list[int], greedy: list[int], logits: np.ndarray) -> dict[str, np.ndarray]:
    torch, _ = need_torch()
    n = len(ids)
    tokens = torch.tensor(ids + greedy)[None]
    sets = np.full((len(indexers.layers), n + STEPS - 1, STEPS, indexers.k), -1, np.int16)
    with torch.no_grad():
        for step in range(STEPS):
            y = model(tokens[:, : n + step], use_cache=False).logits[0].numpy()
            if step == 0 and not np.array_equal(y, logits):
                difference = float(np.abs(y - logits).max())
                print(f"n={n}: logits differ from transformers.npz by up to {difference:.2e}", file=sys.stderr)
                if not difference <= 1e-5:
                    raise NpglmError(f"n={n}: these are not the logits of transformers.npz")
            if int(y[-1].argmax()) != greedy[step]:
                raise NpglmError(f"n={n}: token {step} is {int(y[-1].argmax())}, transformers.npz has {greedy[step]}")
            sets[:, : n + step, step] = indexers.take()
        out = model(tokens[:, :n], use_cache=True)
        if not np.array_equal(indexers.take(), sets[:, :n, 0]):
            raise NpglmError(f"n={n}: the same pass chose otherwise with a cache")
        cached, decoded = [out.logits[0, -1].numpy()], []
        for step in range(STEPS - 1):
            token = torch.tensor([[int(cached[-1].argmax())]])
            out = model(token, use_cache=True, cache=out.cache)
            cached.append(out.logits[0, -1].numpy())
            decoded.append(indexers.take(n + step)[:, 0])
    cached = np.stack(cached)
    return {
        f"topk_{n}": sets,
        f"cached_topk_{n}": np.stack(decoded, axis=1),
        f"cached_greedy_{n}": cached.argmax(-1).astype(np.int32),
        f"cached_logits_{n}": cached,
    }


def main(argv=None):
    parser = cli.Parser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--out", required=True, metavar="OUT.npz")
    args = parser.parse_args(argv)
    torch, transformers = need_torch()
    torch.set_num_threads(1)
    checkpoint = npglm.load(GOLDEN / "small.Q2_K.gguf")
    golden = np.load(GOLDEN / "transformers.npz")
    model = glm_from_checkpoint(checkpoint)
    indexers = Indexers(model, checkpoint.config.indexer_top_k)
    found = {"layers": np.array(indexers.layers, np.int16)}
    for n in (5, 12, 100):
        ids, greedy = golden[f"ids_{n}"].tolist(), golden[f"greedy_{n}"].tolist()
        found |= record(model, indexers, ids, greedy, golden[f"logits_{n}"])
    command = ["python", "tests/oracle/record_topk.py", "-o", "tests/golden/" + Path(args.out).name]
    found["made_by"] = np.array(shlex.join(command))
    found["versions"] = np.array(f"transformers {transformers.__version__}, torch {torch.__version__}")
    with cli.whole_file(args.out) as file:
        np.savez_compressed(file, **found)


if __name__ == "__main__":
    sys.exit(cli.run(main))
