import sys
from pathlib import Path

for folder in ("ops", "."):  # the cases of tests/ops, and synth.py
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
