"""Candidates of a benchmark, in a module that their processes can import."""

from __future__ import annotations

import os
import time

import torch


def sleeping(seconds: float):
    return {"first": lambda: time.sleep(seconds), "second": lambda: None}


def allocating(megabytes: int):
    """Allocates and frees memory in one step, and a tenth of it in the other."""

    def allocate(size: int) -> None:
        torch.ones(size, dtype=torch.uint8)

    return {"first": lambda: allocate(megabytes * 2**20), "second": lambda: allocate(megabytes * 2**20 // 10)}


def failing(steps: tuple[str, ...]):
    """Raises in these steps; without any, in its setup."""

    def fail():
        raise ValueError("nothing left to do")

    if not steps:
        fail()
    return {step: fail if step in steps else lambda: None for step in ("first", "second")}


def crashing():
    return {"first": lambda: os._exit(7), "second": lambda: None}
