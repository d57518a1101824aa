"""`python studies/study PLAN` runs a comparison of models; see command.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # of the package study, also in worker processes

from study.command import main

if __name__ == "__main__":
    sys.exit(main())
