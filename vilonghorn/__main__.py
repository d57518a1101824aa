"""`python -m vilonghorn`: the same as the command `vilonghorn`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
