"""Recording a torch model: hooks on its modules by a name table, the first prefill only, each tensor cloned as it passes.

with torch_recorder(model, "transformers") as recorder:
    model(ids)
recorder.save("other.safetensors", tokens, engine="transformers")       # on every rank: rank=, world=
"""

import json
from typing import Self

import numpy as np

from npglm.errors import NpglmError
from npglm.trace.formats.arrays import shaped
from npglm.trace.formats.names import Place, read_names, trace_name
from npglm.trace.probes import PROBES
from npglm.trace.record import write_trace


class torch_recorder:
    """Context manager. names: a table's name or path, or its places. arrays: what has been recorded, by trace name."""

    def __init__(self, model, names="transformers"):
        self.model, self.arrays, self.handles = model, {}, []
        self.places: list[Place] = names if isinstance(names, list) else read_names(names)

    def __enter__(self) -> Self:
        for name, module in self.model.named_modules():
            for place in self.places:
                match = place.module.fullmatch(name)
                if match:
                    hook = self._hook(place, trace_name(place, match))
                    self.handles.append(module.register_forward_hook(hook, with_kwargs=True))
        if not self.handles:
            raise NpglmError("no module of the model matches the name table")
        return self

    def __exit__(self, *error) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def _hook(self, place: Place, name: str):
        def hook(module, args, kwargs, output):
            if name in self.arrays:
                return  # a later call: decoding, or another prompt
            value = output if place.input is None else _argument(args, kwargs, place.input)
            if isinstance(value, (tuple, list)):
                value = value[place.output] if place.output < len(value) else None
            if value is not None and hasattr(value, "detach"):
                self.arrays[name] = _array(value, place)

        return hook

    def save(self, path, tokens, rank: int = 0, world: int = 1, inputs=(), **metadata: str) -> None:
        """Write the trace of this rank. inputs: files that must not be overwritten. metadata: engine, engine_version, model_sha256, numerics, ..."""
        if not self.arrays:
            raise NpglmError("nothing was recorded: the model did not run inside the block")
        metadata = {"engine": "torch", **metadata, "tokens": json.dumps([int(t) for t in tokens])}
        write_trace(path, self.arrays, metadata | {"rank": str(rank), "world": str(world)}, inputs)


def _argument(args, kwargs, index: int):
    """A positional input, or the keyword in its place."""
    return args[index] if index < len(args) else next(iter(list(kwargs.values())[index - len(args) :]), None)


def _array(tensor, place: Place) -> np.ndarray:
    """A copy on the host: f32, or int32 for choices; the batch of one dropped."""
    value = tensor.detach()
    integer = PROBES[place.probe].dtype is np.int32
    array = np.array(value.cpu().numpy() if integer else value.float().cpu().numpy(), np.int32 if integer else np.float32)
    return shaped(array, place)
