"""Runs comparisons of models that plans describe: see command.py."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# icons.py and npm.py make the data; page_tables.py and interleaved.py are shared with the benchmarks.
sys.path += [str(ROOT / "studies" / "data"), str(ROOT / "benchmarks")]
