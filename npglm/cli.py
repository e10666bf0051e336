"""What every script shares: one-line errors with exit status 2, Ctrl-C with 130, outputs that appear whole or not at all."""

import argparse
import contextlib
import os
import sys
from pathlib import Path

from npglm.errors import NpglmError


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line."""

    def __init__(self, **kwargs):
        super().__init__(formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False, **kwargs)

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")


def run(main, argv=None) -> int:
    """Run main(argv) -> exit status (None counts as 0); turn what a person can cause into one line on stderr."""
    program = Path(sys.argv[0]).name
    try:
        status = main(argv) or 0
        sys.stdout.flush()  # a closed pipe or full disk shows here, not in the interpreter's exit
        return status
    except NpglmError as error:
        message, status = str(error), 2
    except KeyboardInterrupt:
        message, status = "interrupted", 130
    except BrokenPipeError:  # the reader has left, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except OSError as error:
        message, status = f"{error.filename or ''}: {error.strerror or error}".lstrip(": "), 2
    except MemoryError:
        message, status = "out of memory", 2
    print(f"{program}: error: {message}" if status == 2 else f"{program}: {message}", file=sys.stderr)
    return status


@contextlib.contextmanager
def whole_file(path):
    """Open a temporary binary file beside `path`; it takes that name only if the block ends without an error.

    Raises NpglmError that names `path` when it cannot be written (no such folder, no permission, full disk).
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            with open(temporary, "w+b") as file:
                yield file
            os.replace(temporary, path)
        except OSError as error:
            raise NpglmError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):  # the folder may be the very thing that is wrong
            temporary.unlink(missing_ok=True)


def token_ids(text: str) -> list[int]:
    """`1,2,3` -> [1, 2, 3], for argparse's type=."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected token ids such as 1,2,3, found {text[:40]!r}") from None
