"""Contenders for races in processes of their own, which find this module where tests cannot be imported."""

from __future__ import annotations

import os
import time

import torch


def sleeping(seconds: float):
    return {"sleep": lambda: time.sleep(seconds), "nap": lambda: None}


def holding(megabytes: int):
    """Takes memory and gives it back, in one step, and a tenth of it in another."""

    def hold(bytes_: int) -> None:
        torch.ones(bytes_, dtype=torch.uint8)

    return {"much": lambda: hold(megabytes * 2**20), "little": lambda: hold(megabytes * 2**20 // 10)}


def failing(when: int):
    """Fails at its call number `when`; 0: before there is any."""
    calls = []

    def step() -> None:
        calls.append(None)
        if len(calls) == when:
            raise ValueError("nothing left to do")

    if when == 0:
        raise ValueError("nothing to begin with")
    return {"sleep": step}


def crashing():
    return {"sleep": lambda: os._exit(7)}


def sleepless():
    return {"think": lambda: None}
