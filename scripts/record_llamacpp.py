#!/usr/bin/env python
"""Record every node of llama.cpp's graph of one prefill into a trace (CPU, f16 cache). Needs: pip install 'npglm[oracle]'."""

import os
import sys
from pathlib import Path

import npglm
from npglm import cli
from npglm.trace.llamacpp import need_llama_cpp, record_trace


def main(argv=None):
    parser = cli.Parser(description=__doc__)
    parser.add_argument("model", help="GGUF file, any shard, or a folder")
    parser.add_argument("--tokens", type=cli.token_ids, required=True, metavar="1,2,3", help="token ids of the prompt")
    parser.add_argument("-o", "--out", required=True, metavar="OUT.safetensors", help="the trace to write")
    parser.add_argument("--threads", type=int, default=min(os.cpu_count() or 1, 512), help="of llama.cpp")
    parser.add_argument("--flash-attn", action=cli.argparse.BooleanOptionalAction, default=True, help="its fused attention")
    args = parser.parse_args(argv)
    if not 1 <= args.threads <= 512:
        parser.error(f"--threads: expected 1 to 512, found {args.threads}")

    need_llama_cpp()
    checkpoint = npglm.load(args.model)
    n_probes, n_others = record_trace(checkpoint, args.tokens, args.out, args.threads, args.flash_attn)
    print(f"{Path(args.out).name}: {n_probes} probes, {n_others} other nodes of {len(args.tokens)} tokens", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(cli.run(main))
