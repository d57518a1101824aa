"""Triton's interpreter: `needed` skips a test where it does not run, `poisoned_memory` fills new tensors."""

from importlib import metadata

import pytest
import torch


def _release(package):
    try:
        return tuple(map(int, metadata.version(package).split(".")[:2]))
    except metadata.PackageNotFoundError:
        return (0, 0)


needed = pytest.mark.skipif(
    _release("triton") < (3, 7) and _release("numpy") >= (2, 4),
    reason="the interpreter of Triton 3.6 needs numpy<2.4: it converts arrays of one element to numbers",
)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """New tensors hold NaN, which shows in a result wherever a kernel did not write."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **options: empty(*args, **options).fill_(float("nan")))
