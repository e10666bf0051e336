import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "scripts")]


@pytest.fixture(scope="session")
def golden() -> Path:
    return HERE.parent / "golden"


@pytest.fixture(scope="session")
def small(golden):
    from npglm.checkpoint import Checkpoint

    return Checkpoint.open(golden / "small.Q2_K.gguf")
