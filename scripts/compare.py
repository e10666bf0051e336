#!/usr/bin/env python
"""Compare what another engine computed with the checkpoint: first divergence, guilty op, cause. Without --model: two recordings."""

import sys

import npglm
from npglm import cli
from npglm.trace.compare import compare
from npglm.trace.formats.names import read_names
from npglm.trace.formats.recordings import files_of, open_engine
from npglm.trace.report import page, to_json, worst


def main(argv=None):
    parser = cli.Parser(
        description=__doc__,
        epilog="Exit status: 0 equal or rounding, 1 precision or wrong, 2 nothing comparable. Recordings: traces (.safetensors), "
        ".npz, .pt, llama-eval-callback text, probe lines; several files, or a folder of them, are the ranks of one engine.",
    )
    parser.add_argument("recordings", nargs="+", metavar="OTHER", help="what an engine recorded")
    parser.add_argument("--model", metavar="M.gguf", help="the checkpoint that the engine ran")
    parser.add_argument("--tokens", type=cli.token_ids, metavar="1,2,3", help="token ids, where the recording has none")
    parser.add_argument(
        "--names", metavar="TABLE.toml", help="name table of .npz and .pt files: a file, or transformers, or vllm"
    )
    parser.add_argument("--json", metavar="PATH", help="write the result as JSON; - is stdout")
    parser.add_argument("--html", metavar="OUT.html", help="write a self-contained page")
    args = parser.parse_args(argv)

    names = read_names(args.names) if args.names else None
    if args.html is not None and args.html == args.json:
        parser.error("--json and --html name the same file")
    if args.model is None:
        if len(args.recordings) != 2:
            parser.error(f"without --model, exactly two recordings are compared; found {len(args.recordings)}")
        from npglm.trace.pair import compare_pair

        runs = [open_engine([path], names) for path in args.recordings]
        reports, inputs = [compare_pair(runs[0][0], runs[1][0])], [f for path in args.recordings for f in files_of([path])]
    else:
        checkpoint = npglm.load(args.model)
        inputs = [*checkpoint.paths, *files_of(args.recordings)]
        reports = [compare(checkpoint, run, args.tokens) for run in open_engine(args.recordings, names)]
    inputs.append(args.names or "")
    if args.json != "-":
        print(page(reports))
    if args.json == "-":
        print(to_json(reports))
    elif args.json is not None:
        _write(args.json, to_json(reports) + "\n", inputs)
    if args.html is not None:
        from npglm.trace.html import html

        _write(args.html, html(reports), inputs)
    return worst(reports).status


def _write(path, text: str, inputs) -> None:
    with cli.whole_file(path, inputs) as file:
        file.write(text.encode())


if __name__ == "__main__":
    sys.exit(cli.run(main))
