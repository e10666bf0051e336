"""Opening what other engines wrote, whatever the form: files of ranks, folders, several runs in one file."""

from pathlib import Path

from npglm.errors import NpglmError
from npglm.trace.formats.arrays import read_npz, read_pt
from npglm.trace.formats.eval_callback import is_eval_callback, read_eval_callback
from npglm.trace.formats.names import Place
from npglm.trace.formats.probe_lines import is_probe_lines, read_probe_lines
from npglm.trace.record import read_trace
from npglm.trace.recording import Recording

HEAD_BYTES = 1 << 20
SUFFIXES = {".safetensors", ".npz", ".pt", ".pth", ".txt", ".log"}


def read_file(path, names: list[Place] | None = None) -> tuple[list, bool]:
    """The traces in one file, and whether they are ranks of one run (else runs of their own)."""
    path = Path(path)
    if not path.exists():
        raise NpglmError(f"{path}: no such file")
    if path.stat().st_size == 0:
        raise NpglmError(f"{path.name}: the file is empty")
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        return [read_trace(path)], True
    if suffix == ".npz":
        return read_npz(path, names), False
    if suffix in (".pt", ".pth"):
        return [read_pt(path, names)], True
    if suffix in (".pkl", ".pickle"):
        raise NpglmError(
            f"{path.name}: pickles are not read, since they can run code; save .npz, .safetensors or tensors as .pt"
        )
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
    if head[:2] == b"PK":
        return read_npz(path, names), False
    text = head.decode("utf-8", errors="replace")
    if is_eval_callback(text):
        return [read_eval_callback(path)], True
    if is_probe_lines(text):
        return read_probe_lines(path), True
    if text.count("\0") or text.count("\ufffd") > 8:
        raise NpglmError(
            f"{path.name}: neither a trace nor text; expected .safetensors, .npz, .pt, llama-eval-callback or probe lines"
        )
    raise NpglmError(f"{path.name}: text, but neither llama-eval-callback's nor probe lines ('r0 NAME-LAYER SUM ...')")


def files_of(paths) -> list[Path]:
    """The files of one engine: those that are named, or one folder's."""
    paths = [Path(p) for p in paths]
    if len(paths) == 1 and paths[0].is_dir():
        folder = paths[0]
        paths = sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES)
        if not paths:
            raise NpglmError(f"{folder}: no recording in the folder ({', '.join(sorted(SUFFIXES))})")
    return paths


def open_engine(paths, names: list[Place] | None = None) -> list[Recording]:
    """files_of(paths) -> the engine's runs. Several files are ranks, joined by the ops' rules."""
    read = [read_file(p, names) for p in files_of(paths)]
    if len(read) == 1 and not read[0][1]:
        return [Recording([trace]) for trace in read[0][0]]
    if any(not ranks and len(traces) > 1 for traces, ranks in read):
        raise NpglmError("a file with several runs cannot be one of several ranks")
    return [Recording([t for traces, _ in read for t in traces])]
