"""Progress of long forward passes, on stderr and only where someone watches."""

from typing import Self

from rich.console import Console
from rich.progress import Progress

from npglm.trace.probes import NO_PROBE


class LayerProgress:
    """A bar that moves with every layer of every chunk: `with LayerProgress(...) as p: forward(..., probe=p.over(probe))`."""

    def __init__(self, n_layers: int, n_chunks: int = 1, label: str = "prompt"):
        console = Console(stderr=True)
        self._bar = Progress(console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task(label, total=n_layers * n_chunks)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the bar away; may be called again."""
        self._bar.stop()

    def over(self, probe=NO_PROBE) -> "_Watched":
        return _Watched(probe, lambda: self._bar.advance(self._task))


class LoadProgress:
    """A bar over bytes that are moved: `with LoadProgress() as p: ops.load(checkpoint, p)`. It appears once there are some."""

    def __init__(self, label: str = "loading"):
        console = Console(stderr=True)
        self._bar = Progress(console=console, transient=True, disable=not console.is_terminal)
        self._label, self._task = label, None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        if self._task is None:
            self._task = self._bar.add_task(self._label, total=total)
            self._bar.start()
        self._bar.update(self._task, completed=done, total=total)


class _Watched:
    def __init__(self, probe, tick):
        self._probe, self._tick = probe, tick

    def __call__(self, name: str, array) -> None:
        self._probe(name, array)

    def layer(self, index: int):
        self._tick()
        return self._probe.layer(index)
