"""What every script shares: one-line errors with exit status 2, Ctrl-C with 130, outputs that appear whole or not at all."""

import argparse
import contextlib
import os
import signal
import sys
import traceback
from pathlib import Path

import numpy as np

from npglm.errors import NpglmError

TERMINATED = 128 + signal.SIGTERM


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action):
        default = action.default
        if default is None or default is False or default == [] or "(default:" in action.help:
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line, and whose help says the defaults that say something."""

    def __init__(self, **kwargs):
        super().__init__(formatter_class=_Help, allow_abbrev=False, **kwargs)

    def error(self, message: str):
        raise NpglmError(f"{message} (see --help)")


def options(args) -> dict:
    """What all ranks must be told alike: the script, and its parsed options but for the model, whose path may differ from host to host."""
    given = {f"--{name.replace('_', '-')}": value for name, value in vars(args).items() if name != "model"}
    return {"the script": Path(sys.argv[0]).name} | given


def run(main, argv=None, ranks: bool = False) -> int:
    """Run main(argv) -> exit status (None counts as 0); turn what a person can cause into one line on stderr.

    ranks: main takes (argv, npglm.parallel.Ranks or None) and may be one of several processes; then any one's failure ends them all.
    """
    _repair_streams()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # so that unfinished outputs are taken away
    program = Path(sys.argv[0]).name
    others = None
    try:
        if ranks:
            from npglm.parallel import started

            others = started()
        with np.errstate(all="ignore"):  # what is not finite is judged where it matters, not warned about
            status = (main(argv, others) if ranks else main(argv)) or 0
        sys.stdout.flush()  # a closed pipe or full disk shows here, not in the interpreter's exit
        return status
    except NpglmError as error:
        message, status = str(error), 2
    except KeyboardInterrupt:
        message, status = "interrupted", 130
    except BrokenPipeError:  # the reader has left, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if others:
            others.fail("", 141)
        return 141
    except OSError as error:
        message, status = f"{error.filename or ''}: {error.strerror or error}".lstrip(": "), 2
    except MemoryError:
        message, status = "out of memory", 2
    except SystemExit as ending:
        if others and ending.code == TERMINATED:  # what argparse ends, it ends on every rank
            others.fail(f"{program}: terminated", TERMINATED)
        raise
    except Exception:
        if others:
            others.fail(traceback.format_exc().rstrip(), 1)
        raise
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done: it would only spoil the message or the exit
    message = f"{program}: error: {message}" if status == 2 else f"{program}: {message}"
    if others:
        others.fail(message, status)
    with contextlib.suppress(OSError):
        print(message, file=sys.stderr)
    return status


def _repair_streams() -> None:
    """Closed standard streams become /dev/null, so that no output file takes their place; text that cannot be encoded is replaced."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
            setattr(sys, name, open(fd, mode))  # noqa: SIM115 - for the rest of the run
    # Input that is not UTF-8 is named by the tokenizer; output that the terminal cannot show is replaced.
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace"), (sys.stderr, "backslashreplace")):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=errors)


@contextlib.contextmanager
def whole_file(path, inputs=()):
    """Open a temporary binary file beside `path`; it takes that name only if the block ends without an error.

    inputs: files that must not be overwritten; names that are none do not count. Raises NpglmError that names `path` when it is one of them, is no regular file, or
    cannot be written (no such folder, no permission, full disk).
    """
    target = Path(os.path.realpath(path))
    if not os.fspath(path) or (target.exists() and not target.is_file()):
        raise NpglmError(f"{path}: cannot be written: not a regular file")
    if target.exists() and any(os.path.exists(source) and os.path.samefile(target, source) for source in inputs):
        raise NpglmError(f"{path}: cannot be written: it is being read")
    temporary = target.with_name(f".{target.name[:100]}.{os.getpid()}.tmp")
    try:
        try:
            with open(temporary, "w+b") as file:
                yield file
            os.replace(temporary, target)
        except OSError as error:
            raise NpglmError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):  # the folder may be the very thing that is wrong
            temporary.unlink(missing_ok=True)


def integers(what: str):
    """For argparse's type=: `1,2,3` -> [1, 2, 3]. what: they are, for the error."""

    def parse(text: str) -> list[int]:
        try:
            return [int(part) for part in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {what} such as 1,2,3, found {text[:40]!r}") from None

    return parse


token_ids = integers("token ids")
