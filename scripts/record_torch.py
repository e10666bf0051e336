#!/usr/bin/env python
"""Record transformers' model with a GGUF's dequantised weights into a trace (CPU). Needs: pip install 'npglm[oracle]'."""

import sys

import npglm
from npglm import cli
from npglm.trace.record import describe_run
from npglm.trace.torch_model import glm_from_checkpoint, need_torch
from npglm.trace.torch_record import torch_recorder

AS_IS_EPS = 1e-6  # transformers 5.24 leaves the q_a and kv_a norms at its default eps (hf#48762)


def main(argv=None):
    parser = cli.Parser(description=__doc__)
    parser.add_argument("model", help="GGUF file, any shard, or a folder")
    parser.add_argument("--tokens", type=cli.token_ids, required=True, metavar="1,2,3", help="token ids of the prompt")
    parser.add_argument("-o", "--out", required=True, metavar="OUT.safetensors", help="the trace to write")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of weights and activations"
    )
    parser.add_argument("--names", default="transformers", metavar="TABLE", help="name table: a shipped one or a file")
    parser.add_argument(
        "--fix-eps",
        action="store_true",
        help="run the q_a and kv_a norms at the checkpoint's eps; transformers itself uses 1e-6",
    )
    args = parser.parse_args(argv)

    torch, transformers = need_torch()
    checkpoint = npglm.load(args.model)
    checkpoint.config.check_tokens(args.tokens)
    model = glm_from_checkpoint(checkpoint, getattr(torch, args.dtype), None if args.fix_eps else AS_IS_EPS)
    with torch.no_grad(), torch_recorder(model, args.names) as recorder:
        model(torch.tensor([args.tokens]), use_cache=False)
    about = describe_run(checkpoint, args.tokens, args.dtype) | {
        "engine": "transformers", "engine_version": transformers.__version__,
    }  # fmt: skip
    about = {k: v for k, v in about.items() if k not in ("tokens", "rank", "world")}
    recorder.save(args.out, args.tokens, inputs=[*checkpoint.paths, args.names], **about)
    print(f"{args.out}: {len(recorder.arrays)} probes of {len(args.tokens)} tokens", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(cli.run(main))
