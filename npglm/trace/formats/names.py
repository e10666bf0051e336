r"""Name tables: which of an engine's modules or arrays is which probe.

    [q_a]
    module = 'model\.layers\.(?P<layer>\d+)\.self_attn\.q_a_proj'
    output = 0            # of a module that returns several; default the first
    input = 0             # take this positional input instead
    axes = "H T V"        # how the array's axes are named, where they are not those of the probe in their order
    scale = 2.5           # multiply by this
    columns = [0, 128]    # only these of the last axis; numbers with a point are shares of its width: [0.5, 1.0]
    offset = -1           # the probe belongs to this many layers further on

A table [probe] may be a list ([[probe]]) of several places; the first that matches counts.
"""

import re
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from npglm.errors import NpglmError
from npglm.trace.probes import PROBES

KEYS = {"module", "output", "input", "axes", "scale", "columns", "offset"}


@dataclass(frozen=True)
class Place:
    """output, input: index of the output (or positional input) to take. columns: (start, stop) of the last axis, or None.

    offset: added to the layer that the pattern finds.
    """

    probe: str
    module: re.Pattern
    output: int = 0
    input: int | None = None
    axes: str | None = None
    scale: float = 1.0
    columns: tuple[float, float] | None = None
    offset: int = 0


def read_names(path) -> list[Place]:
    """A table from a file, or a shipped one by its name (transformers, vllm). Raises NpglmError that names the entry."""
    shipped = files("npglm.trace.formats").joinpath(f"{path}.toml")
    try:
        ours = re.fullmatch(r"\w+", str(path)) and shipped.is_file()
        table = tomllib.loads((shipped if ours else Path(path)).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise NpglmError(f"{path}: {error}") from None
    places = []
    for probe, entries in table.items():
        if probe not in PROBES:
            raise NpglmError(f"{path}: [{probe}] is no probe; they are {', '.join(PROBES)}")
        for entry in entries if isinstance(entries, list) else [entries]:
            places.append(_place(path, probe, entry))
    return places


def _place(source, probe: str, entry) -> Place:
    if not isinstance(entry, dict) or not isinstance(entry.get("module"), str) or set(entry) - KEYS:
        raise NpglmError(
            f"{source}: [{probe}] needs module = 'regular expression' and may have {', '.join(sorted(KEYS - {'module'}))}"
        )
    try:
        pattern = re.compile(entry["module"])
    except re.error as error:
        raise NpglmError(f"{source}: [{probe}] module: {error}") from None
    if PROBES[probe].where != "model" and "layer" not in pattern.groupindex:
        raise NpglmError(f"{source}: [{probe}] module needs (?P<layer>\\d+)")
    columns = entry.get("columns")
    return Place(
        probe, pattern, int(entry.get("output", 0)), entry.get("input"), entry.get("axes"), float(entry.get("scale", 1.0)),
        None if columns is None else tuple(columns), int(entry.get("offset", 0)),
    )  # fmt: skip


def trace_name(place: Place, match: re.Match) -> str:
    return place.probe if PROBES[place.probe].where == "model" else f"{place.probe}-{int(match['layer']) + place.offset}"
