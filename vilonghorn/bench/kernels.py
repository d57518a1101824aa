"""Counts what compiled GPU kernels issue, without a GPU: `python -m vilonghorn.bench.kernels`, in a checkout.

Compiles the CUDA and Triton kernels for two architectures, reads their disassembly, and keeps the counts in
docs/performance/kernels.json, of which `bench_docs` makes tables. Needs nvcc and Triton.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vilonghorn.data.files import replacing
from vilonghorn.ops.validate import RULES

from . import compile_cuda

FILE = Path("docs/performance/kernels.json")
ARCHITECTURES = (80, 90)
BF16 = {"cuda": "bfloat16", "triton": "bf16"}
# Of the authors' own kernels, counted in the same way: forward, backward.
OFFICIAL = {("longhorn", 90): (1050, 2000), ("mamba", 90): (871, 1790)}


def measure() -> dict[str, Any]:
    """What every kernel uses, and the compilers that made them.

    Raises:
        RuntimeError: there is no nvcc, or a compiler fails.
    """
    rows = [row for architecture in ARCHITECTURES for row in compile_cuda.reports(architecture)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "vilonghorn.bench.compile_triton", *map(str, ARCHITECTURES)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} fails:\n{result.stderr}")
    rows += [json.loads(line) for line in result.stdout.splitlines()]
    return dict(nvcc=_nvcc_version(), triton=version("triton"), rows=rows)


def tables(report: dict[str, Any]) -> dict[str, str]:
    """Markdown for docs/performance/gpu.md: "instructions", "registers" and "compilers"."""
    columns = [(backend, kernel) for backend in ("cuda", "triton") for kernel in ("forward", "backward")]
    instructions = [_header(columns, "official forward", "official backward")]
    registers = [_header(columns)]
    for architecture in ARCHITECTURES:
        for rule in RULES:
            own = [_cells(report, backend, kernel, rule, architecture) for backend, kernel in columns]
            counts = [max(row["instructions"] for row in rows if "instructions" in row) for rows in own]
            official = OFFICIAL.get((rule, architecture), ("", ""))
            instructions.append(_line(f"{rule}, sm_{architecture}", *counts, *official))
            registers.append(
                _line(f"{rule}, sm_{architecture}", *(max(row["registers"] for row in rows) for rows in own))
            )
    compilers = f"nvcc {report['nvcc']}, Triton {report['triton']}"
    return dict(instructions="\n".join(instructions), registers="\n".join(registers), compilers=compilers)


def _cells(report: dict[str, Any], backend: str, kernel: str, rule: str, architecture: int) -> list[dict[str, Any]]:
    """Rows of the kernels that run bfloat16 with up to 16 states."""
    wanted = dict(backend=backend, kernel=kernel, rule=rule, architecture=architecture, dtype=BF16[backend])
    rows = [row for row in report["rows"] if all(row[name] == value for name, value in wanted.items())]
    return [row for row in rows if row.get("states", 16) == 16]


def _header(columns: Sequence[tuple[str, str]], *others: str) -> str:
    names = [f"{'CUDA' if backend == 'cuda' else 'Triton'} {kernel}" for backend, kernel in columns]
    return _line("", *names, *others) + "\n" + "|---" * (1 + len(names) + len(others)) + "|"


def _line(*cells: Any) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _nvcc_version() -> str:
    output = subprocess.run([str(compile_cuda.nvcc()), "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"release ([\d.]+)", output)[1]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what every kernel uses and writes it down, in the working directory; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m vilonghorn.bench.kernels", description=__doc__.splitlines()[0])
    parser.parse_args(argv)
    if not FILE.parent.is_dir():
        parser.error(f"there is no {FILE.parent} here: run it in the root of a checkout")
    try:
        report = measure()
    except RuntimeError as error:
        parser.error(str(error))
    for row in report["rows"]:
        print(" ".join(f"{name}={value}" for name, value in row.items()))
    with replacing(FILE) as file:
        rows = ",\n".join(json.dumps(row) for row in report.pop("rows"))
        file.write(f'{json.dumps(report)[:-1]}, "rows": [\n{rows}\n]}}\n'.encode())
    print(f"{FILE} has them: now run python -m vilonghorn.bench.docs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
