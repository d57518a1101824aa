"""Times the scan and the models; see `vilonghorn.bench`."""

from ..bench.__main__ import build_parser, main

__all__ = ["main", "parser"]
parser = build_parser()
