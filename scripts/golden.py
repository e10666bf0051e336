#!/usr/bin/env python
"""Write a golden trace: what every op of a forward pass made, for one list of tokens."""

import sys

import numpy as np
from backend import add_arguments, add_rank_arguments, open_model

import npglm
from npglm import cli
from npglm.errors import NpglmError
from npglm.generate import n_chunks, raw_prompt
from npglm.progress import LayerProgress
from npglm.tokenizer import Tokenizer
from npglm.trace.record import recorder


def layer_list(text: str) -> list[int]:
    """`0-3,6` -> [0, 1, 2, 3, 6]."""
    try:
        layers: list[int] = []
        for part in text.split(","):
            first, dash, last = part.partition("-")
            first, last = int(first), int(last) if dash else int(first)
            if not 0 <= first <= last < 4096:
                raise ValueError
            layers += range(first, last + 1)
        if not layers:
            raise ValueError
        return layers
    except ValueError:
        raise cli.argparse.ArgumentTypeError(f"expected layers such as 0-3,6, found {text[:40]!r}") from None


def main(argv=None, ranks=None):
    parser = cli.Parser(description=__doc__)
    parser.add_argument("model", help="GGUF file, any shard, or a folder")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--tokens", type=cli.token_ids, metavar="1,2,3", help="token ids of the prompt")
    given.add_argument(
        "--prompt", metavar="TEXT", help="BOS is added only if the checkpoint says so; special tokens are parsed"
    )
    parser.add_argument("-o", "--out", required=True, metavar="OUT.safetensors", help="the trace to write")
    parser.add_argument(
        "--layers", type=layer_list, metavar="0-3,6", help="only these (inclusive); the run stops after the last one"
    )
    parser.add_argument("--probes", nargs="+", metavar="PATTERN", help="only these, by name or NAME-layer; * and ? match")
    add_arguments(parser, backend="reference")
    add_rank_arguments(parser)
    args = parser.parse_args(argv)
    if ranks:
        ranks.agree(cli.options(args))
    checkpoint = npglm.load(args.model)
    config = checkpoint.config
    if args.layers and (outside := [i for i in args.layers if i >= config.n_layers]):
        raise NpglmError(f"--layers: {outside[0]} is outside the model's 0-{config.n_layers - 1}")
    tokens = args.tokens
    if tokens is None:
        tokens = raw_prompt(Tokenizer.from_metadata(checkpoint.metadata, checkpoint.path.name), args.prompt)
    model = open_model(args, checkpoint, ranks, traced=True)
    model.config.check_tokens(tokens)
    last = max(args.layers) if args.layers else config.n_layers - 1
    numerics, out = model.ops.numerics.name, ranks.path(args.out) if ranks else args.out
    dtype = np.float64 if numerics == "f64" else np.float32
    with cli.whole_file(out, checkpoint.paths) as file, LayerProgress(last + 1, n_chunks(len(tokens))) as progress:
        record = recorder(file, model.checkpoint, tokens, numerics, args.layers, args.probes, dtype)
        stop = None if last == config.n_layers - 1 else last
        model.run(model.cache(len(tokens)), tokens, progress.over(record), every_row=True, last_layer=stop)
        record.finish()


if __name__ == "__main__":
    sys.exit(cli.run(main, ranks=True))
