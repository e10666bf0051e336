"""npglm: run GLM-5 (GGUF architecture glm-dsa) checkpoints, and see where another engine's numbers go wrong."""

__version__ = "0.1.0"


def load(path):
    """Open the GLM-5 checkpoint at `path` (a .gguf file, any shard of a set, or a folder holding one).

    Returns npglm.checkpoint.Checkpoint: metadata, config and named, shape-checked tensors, memory-mapped and not decoded.
    Raises npglm.errors.NpglmError with one line that names the file, key or tensor.
    """
    from npglm.checkpoint import Checkpoint

    return Checkpoint.open(path)


def embedded():
    """Path of the small trained checkpoint that comes with npglm (npglm/data/README.md is its card)."""
    from pathlib import Path

    return Path(__file__).parent / "data" / "tiny-glm.Q2_K.gguf"
