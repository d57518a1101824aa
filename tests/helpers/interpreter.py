"""Where Triton's interpreter runs: `interpreter.needed` skips a test elsewhere."""

from importlib import metadata

import pytest


def _release(package):
    try:
        return tuple(map(int, metadata.version(package).split(".")[:2]))
    except metadata.PackageNotFoundError:
        return (0, 0)


needed = pytest.mark.skipif(
    _release("triton") < (3, 7) and _release("numpy") >= (2, 4),
    reason="the interpreter of Triton 3.6 needs numpy<2.4: it converts arrays of one element to numbers",
)
