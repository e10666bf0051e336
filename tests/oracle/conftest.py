from types import SimpleNamespace

import numpy as np
import pytest
from shapes import MODELS
from synth import write_model

import npglm
from reference.ops import ReferenceOps


@pytest.fixture(scope="session", params=MODELS)
def model(request, tmp_path_factory):
    """Each synthetic model: seed, checkpoint, and weights for the reference, decoded once for all tests."""
    seed = request.param
    checkpoint = npglm.load(write_model(tmp_path_factory.mktemp("oracle") / f"seed{seed}.gguf", seed, **MODELS[seed]))
    return SimpleNamespace(seed=seed, checkpoint=checkpoint, weights=ReferenceOps().load(checkpoint))


@pytest.fixture(scope="session")
def prompt():
    """prompt(checkpoint, n) -> n token ids, the same every time."""

    def make(checkpoint, n: int) -> list[int]:
        return np.random.default_rng(n).integers(0, checkpoint.config.vocab, n).tolist()

    return make
