"""Times the scan and the models: `vilonghorn bench`."""

from ..bench.__main__ import build_parser, main

__all__ = ["build_parser", "main"]
