"""Compiles the CUDA kernels of a checkout without a GPU, and says what they use. Needs nvcc.

Every instruction of a loop counts, paths not taken included, so that the figures are upper bounds.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from vilonghorn.ops.validate import RULES

from . import sass

SOURCE = Path(__file__).parents[2] / "kernels" / "scan_cuda.cu"
ARCHITECTURES = (80, 86, 89, 90, 100, 120)  # as in kernels/CMakeLists.txt
CHUNK = 8  # steps of a chunk
REMADE = 10  # of a chunk's states in backward, which makes them by halves
TYPES = {"f": "float32", "13__nv_bfloat16": "bfloat16", "6__half": "float16"}
KERNEL = re.compile(r"scan_(forward|backward|summary|join)ILi(\d)E(?:(f|13__nv_bfloat16|6__half)(?:Li(\d)E)?)?E")
SPILLS = re.compile(
    r"properties for (\S+)\n\s+\d+ bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)


def nvcc() -> str | None:
    return shutil.which("nvcc")


def reports(architecture: int) -> list[dict[str, Any]]:
    """A row for each kernel: its name, registers, bytes of stack and of spills, and instructions where it has a loop
    over steps of 16 states.

    Raises:
        RuntimeError: there is no nvcc, or it fails.
    """
    if nvcc() is None:
        raise RuntimeError("there is no nvcc: install the CUDA toolkit")
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "scan.cubin"
        flags = ["-std=c++17", "-O3", "-cubin", f"-arch=sm_{architecture}", "-Xptxas=-v"]
        result = subprocess.run([nvcc(), *flags, str(SOURCE), "-o", str(cubin)], capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"nvcc fails for sm_{architecture}:\n{result.stderr}")
        spills = {symbol: int(stores) + int(loads) for symbol, stores, loads in SPILLS.findall(result.stderr)}
        listings, rows = sass.listings(cubin), []
        for symbol, used in sass.resources(cubin).items():
            row = dict(backend="cuda", architecture=architecture, **_name(symbol), **used, spilled=spills[symbol])
            if row["kernel"] in ("forward", "backward") and row["states"] == 16:
                row["instructions"] = _instructions(listings[symbol], row["kernel"], row["rule"])
            rows.append(row)
    return sorted(rows, key=lambda row: str(list(row.items())[:5]))


def _name(symbol: str) -> dict[str, Any]:
    kernel, rule, dtype, split = KERNEL.search(symbol).groups()
    return dict(
        kernel=kernel, rule=RULES[int(rule)], dtype=TYPES.get(dtype, "float32"), states=64 if split == "4" else 16
    )


def _instructions(code: sass.Code, kernel: str, rule: str) -> int:
    """For 32 channels and one step of one direction, with its share of the loop over chunks."""

    def arithmetic(loop: sass.Loop) -> int:
        return sum("FFMA" in line or "FMUL" in line for _, line in code[loop.first : loop.last + 1])

    heavy = [loop for loop in sass.loops(code) if arithmetic(loop) >= 16]
    inner = [a for a in heavy if not any(a.first < b.first and b.last <= a.last for b in heavy)]
    around = [a for a in heavy if a.first < inner[0].first and a.last > max(loop.last for loop in inner)]
    sizes = sorted(loop.size for loop in inner)
    if len(sizes) != (1 if kernel == "forward" else 2) or not around:
        raise RuntimeError(f"{kernel} of {rule} has loops over {len(sizes)} kinds of steps: count them anew")
    step = sizes[-1] + (sizes[0] * REMADE / CHUNK if kernel == "backward" else 0)
    whole = step + (min(loop.size for loop in around) - sum(sizes)) / CHUNK
    channels = 1 if (kernel, rule) == ("backward", "mamba") else 2  # of a lane
    return round(whole / channels)
