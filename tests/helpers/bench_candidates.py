"""Candidates of a benchmark, in a module that their processes can import."""

import os
import time

import torch


def allocating(seconds: float, megabytes: int):
    """Sleeps, and allocates and frees memory in one step; allocates a tenth of it in the other."""

    def allocate(size: int, seconds: float = 0) -> None:
        torch.ones(size, dtype=torch.uint8)
        time.sleep(seconds)

    return {"first": lambda: allocate(megabytes << 20, seconds), "second": lambda: allocate((megabytes << 20) // 10)}


def failing(steps: tuple[str, ...]):
    """Raises in these steps; without any, in its setup."""

    def fail():
        raise ValueError("nothing left to do")

    if not steps:
        fail()
    return {step: fail if step in steps else lambda: None for step in ("first", "second")}


def crashing():
    return {"first": lambda: os._exit(7), "second": lambda: None}
