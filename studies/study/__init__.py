"""Runs comparisons of models that plans describe: see command.py."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "data"))  # of icons.py and npm.py, which make the data
