"""Reads what a compiler made of GPU kernels: their resources, instructions and loops. Needs cuobjdump, not a GPU."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

Code = list[tuple[int, str]]  # instructions with their addresses


class Loop(NamedTuple):
    """A backward branch and what it goes back to, by position in the code."""

    first: int
    last: int

    @property
    def size(self) -> int:
        return self.last - self.first + 1


def cuobjdump() -> str | None:
    """The disassembler of the CUDA toolkit, or the one inside Triton; None where there is neither."""
    found = shutil.which("cuobjdump")
    if found is None and (spec := importlib.util.find_spec("triton")) is not None:
        found = shutil.which(Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump")
    return found


def resources(cubin: Path) -> dict[str, dict[str, int]]:
    """Registers a thread, and bytes of stack and local memory, of each kernel by its symbol."""
    usage = _run("-res-usage", cubin)
    found = re.findall(r"Function (\S+):\s+(REG:.*)", usage)
    keys = {"registers": "REG", "stack": "STACK", "local": "LOCAL"}
    return {
        symbol: {name: int(re.search(rf"\b{key}:(\d+)", text)[1]) for name, key in keys.items()}
        for symbol, text in found
    }


def listings(cubin: Path) -> dict[str, Code]:
    """Instructions of each kernel by its symbol."""
    parts = re.split(r"Function : (\S+)", _run("-sass", cubin))[1:]
    pattern = re.compile(r"/\*([0-9a-f]{4,})\*/ +([^;]+);")
    return {
        symbol: [(int(at, 16), line) for at, line in pattern.findall(text)]
        for symbol, text in zip(parts[::2], parts[1::2])
    }


def loops(code: Code) -> list[Loop]:
    """Loops by their first instruction; of those that begin at one place, the longest."""
    index = {at: i for i, (at, _) in enumerate(code)}
    found: dict[int, int] = {}
    for i, (at, line) in enumerate(code):
        to = branch(line)
        if to is not None and to < at and "DIV" not in line:
            found[index[to]] = max(found.get(index[to], 0), i)
    return [Loop(first, last) for first, last in sorted(found.items())]


def skipped(code: Code, loop: Loop) -> int:
    """Instructions of a loop that a forward branch within it passes over."""
    index = {at: i for i, (at, _) in enumerate(code)}
    jumps = ((i, index[to]) for i, (at, line) in enumerate(code) if (to := branch(line)) is not None and to > at)
    return sum(to - i - 1 for i, to in jumps if loop.first <= i and to <= loop.last)


def branch(line: str) -> int | None:
    """The address that an instruction branches to, if it does."""
    found = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", line)
    return int(found[1], 16) if found else None


def _run(flag: str, cubin: Path) -> str:
    tool = cuobjdump()
    if tool is None:
        raise RuntimeError("there is no cuobjdump: install the CUDA toolkit or triton, which has it inside")
    return subprocess.run([tool, flag, str(cubin)], check=True, capture_output=True, text=True).stdout
