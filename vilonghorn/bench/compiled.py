"""Compiles the CUDA and Triton kernels without a GPU and prints what they use, one JSON line per kernel.

A row has registers per thread, bytes of stack and local memory and, for kernels of 16 states, the instructions for 32
channels and one step of one direction. Run `python -m vilonghorn.bench.compiled` in a checkout; --save also writes
docs/performance/kernels.json for `python docs/performance/make.py`. Needs nvcc and Triton, which contains cuobjdump.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from vilonghorn.data.files import atomic_write
from vilonghorn.ops.validate import RULES

FILE = Path("docs/performance/kernels.json")
SOURCE = Path(__file__).parents[2] / "kernels" / "cuda" / "scan.cu"
ARCHITECTURES = (80, 90)
BF16 = {"cuda": "bfloat16", "triton": "bf16"}
# Triton kernels, each with and without a split over time, and their arguments.
TRITON_KERNELS = [(name, False) for name in ("forward", "backward")]
TRITON_KERNELS += [(name, True) for name in ("forward", "backward", "summary", "join")]
SIZES = ("batch", "length", "channels", "reverse", "segment_steps", "num_segments")
BF16_TENSORS = ("x", "dt", "k", "q", "z", "y", "dy", "dx", "ddt", "dz")
UNALIGNED = {"k", "q", "k_strides", "q_strides", "A", "dA", "checkpoints", "summaries", "starts", *SIZES} - {"channels"}

Loop = tuple[int, int]  # positions of a loop's first instruction and of the branch back to it


class Kernel(NamedTuple):
    """A compiled kernel: registers and memory, and its instructions (SASS) with their addresses."""

    resources: dict[str, int]
    code: list[tuple[int, str]]

    def branches(self) -> Iterator[tuple[int, int]]:
        """Positions of each branch and of its target."""
        position = {address: i for i, (address, _) in enumerate(self.code)}
        for i, (_, line) in enumerate(self.code):
            if target := re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", line):
                yield i, position[int(target[1], 16)]

    def loops(self) -> list[Loop]:
        """Loops, shortest first; of loops with the same start, the longest."""
        last = {target: i for i, target in self.branches() if target < i and "DIV" not in self.code[i][1]}
        return sorted(last.items(), key=_size)


def _size(loop: Loop) -> int:
    return loop[1] - loop[0] + 1


def cuobjdump() -> str | None:
    """The disassembler of the CUDA toolkit, else the one that Triton contains, else None."""
    spec = importlib.util.find_spec("triton")
    folder = spec and Path(spec.origin).parent / "backends" / "nvidia" / "bin"
    return shutil.which("cuobjdump") or (folder and shutil.which("cuobjdump", path=folder))


def disassemble(cubin: Path) -> dict[str, Kernel]:
    """The kernels of a compiled file, by symbol.

    Raises:
        RuntimeError: cuobjdump is not installed.
    """
    tool = cuobjdump()
    if tool is None:
        raise RuntimeError("cuobjdump is not installed: install the CUDA toolkit or triton, which contains it")
    usage, sass = (
        subprocess.run([tool, flag, str(cubin)], check=True, capture_output=True, text=True).stdout
        for flag in ("-res-usage", "-sass")
    )
    parts = re.split(r"Function : (\S+)", sass)
    code = {
        symbol: [(int(at, 16), line) for at, line in re.findall(r"/\*([0-9a-f]{4,})\*/ +([^;]+);", text)]
        for symbol, text in zip(parts[1::2], parts[2::2])
    }
    keys = {"registers": "REG", "stack": "STACK", "local": "LOCAL"}
    return {
        symbol: Kernel({name: int(re.search(rf"\b{key}:(\d+)", text)[1]) for name, key in keys.items()}, code[symbol])
        for symbol, text in re.findall(r"Function (\S+):\s+(REG:.*)", usage)
    }


def cuda(architecture: int) -> list[dict[str, Any]]:
    """Compiles the CUDA library for one architecture; one row per kernel.

    Raises:
        RuntimeError: nvcc is not installed or fails.
    """
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise RuntimeError("nvcc is not installed: install the CUDA toolkit")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "scan.cubin"
        command = [nvcc, "-std=c++17", "-O3", "-cubin", f"-arch=sm_{architecture}", str(SOURCE), "-o", str(cubin)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"nvcc fails for sm_{architecture}:\n{result.stderr}")
        for symbol, compiled in disassemble(cubin).items():
            pattern = r"scan_(\w+?)ILi(\d)E(?:(f|13__nv_bfloat16|6__half)(?:Li(\d)E)?)?E"
            kernel, rule, dtype, lanes = re.search(pattern, symbol).groups()
            dtypes = {"13__nv_bfloat16": "bfloat16", "6__half": "float16"}
            form = dict(kernel=kernel, rule=RULES[int(rule)], dtype=dtypes.get(dtype, "float32"))
            row = dict(backend="cuda", architecture=architecture, **form, states=64 if lanes == "4" else 16)
            row |= compiled.resources
            if kernel in ("forward", "backward") and row["states"] == 16:
                row["instructions"] = _cuda_instructions(compiled, kernel, row["rule"])
            rows.append(row)
    return sorted(rows, key=lambda row: str(list(row.items())[:5]))


def _cuda_instructions(compiled: Kernel, kernel: str, rule: str) -> int:
    """Instructions of a step, with its share of the loop over chunks. Counts loop bodies, not the executed path."""
    chunk, recomputed = 8, 10  # steps of a chunk, and states that backward recomputes for it
    arithmetic = [i for i, (_, line) in enumerate(compiled.code) if "FFMA" in line or "FMUL" in line]
    loops = [(a, b) for a, b in compiled.loops() if sum(a <= i <= b for i in arithmetic) >= 16]
    inner = [(a, b) for a, b in loops if not any(a < c and d <= b for c, d in loops)]
    outer = [(a, b) for a, b in loops if all(a < c and d < b for c, d in inner)]
    if len(inner) != (1 if kernel == "forward" else 2) or not outer:
        raise RuntimeError(f"{kernel} of {rule} has {len(inner)} loops over steps: adapt _cuda_instructions")
    step = _size(inner[-1]) + (_size(inner[0]) * recomputed / chunk if kernel == "backward" else 0)
    total = step + (_size(outer[0]) - sum(map(_size, inner))) / chunk
    return round(total / (1 if (kernel, rule) == ("backward", "mamba") else 2))  # channels per lane


def triton(architecture: int) -> Iterator[dict[str, Any]]:
    """Compiles the Triton kernels as the models call them, for one architecture; one row per kernel."""
    for (name, split), rule in itertools.product(TRITON_KERNELS, RULES):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compile_triton(name, architecture, rule, split).asm["cubin"])
            file.flush()
            [compiled] = disassemble(Path(file.name)).values()
        row = dict(backend="triton", architecture=architecture, kernel=name, rule=rule, split=split, dtype="bf16")
        row |= compiled.resources
        if not split:
            row["instructions"] = _triton_instructions(compiled, name, rule)
        yield row


def compile_triton(name: str, architecture: int, rule: str, split: bool):
    """Compiles a kernel for bfloat16, the mean over two directions, 16 states, z, D, dt_bias, and slices as k and q."""
    from triton import compile, language
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vilonghorn.ops.backends import triton as backend
    from vilonghorn.ops.backends.triton.backward_kernel import scan_backward
    from vilonghorn.ops.backends.triton.forward_kernel import scan_forward
    from vilonghorn.ops.backends.triton.split_kernels import scan_join, scan_summary

    kernel = dict(forward=scan_forward, backward=scan_backward, summary=scan_summary, join=scan_join)[name]
    held = (backend.HELD_SPLIT if split else backend.HELD)[rule]
    constants = dict(RULE=RULES.index(rule), DIRECTIONS=2, MEAN=True, INDEX=language.int32, N=16, CHUNK=backend.CHUNK)
    constants |= dict(HELD=held, GRADIENT=True, **backend.tile_of(16)._asdict())
    constants |= {} if split else dict(segment_steps=None, starts=None)
    constants |= {} if rule == "mamba" else dict(A=None, dA=None)
    constants = {n: value for n, value in constants.items() if n in kernel.arg_names}
    signature, attributes = {}, {}
    for position, argument in enumerate(kernel.arg_names):
        paths = [(position,)]
        if argument in constants:
            signature[argument], paths = "constexpr", []
        elif argument.endswith("_strides"):
            signature[argument] = ("i32",) * (2 if argument == "z_strides" else 3)
            paths = [(position, i) for i in range(len(signature[argument]))]
        elif argument in SIZES:
            signature[argument] = "i32"
        else:
            signature[argument] = "*bf16" if argument in BF16_TENSORS else "*fp32"
        if argument not in UNALIGNED:
            attributes |= {path: [["tt.divisibility", 16]] for path in paths}
    values = {(kernel.arg_names.index(n),): value for n, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    return compile(source, target=GPUTarget("cuda", architecture, 32), options=dict(backend.OPTIONS))


def _triton_instructions(compiled: Kernel, name: str, rule: str) -> int:
    """Instructions of a step of a kernel that is not split over time."""
    from vilonghorn.ops.backends.triton import CHUNK, HELD

    inner, *outer = compiled.loops()
    if name == "forward":  # one loop over steps, which saves a checkpoint every CHUNK steps
        saving = sum(to - i - 1 for i, to in compiled.branches() if inner[0] <= i < to <= inner[1])
        return round(_size(inner) - saving + saving / CHUNK)
    # a loop that recomputes states from a checkpoint, inside a loop over `held` steps
    held = HELD[rule]
    recomputed = sum(start % CHUNK for start in range(0, held * CHUNK, held)) / (held * CHUNK)
    return round((_size(outer[0]) - _size(inner)) / held + recomputed * _size(inner))


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles, prints one line per kernel, and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m vilonghorn.bench.compiled", description=__doc__.splitlines()[0])
    parser.add_argument("architectures", nargs="*", type=int, default=ARCHITECTURES, help="compute capabilities: 80 90")
    parser.add_argument("--backend", nargs="+", choices=BF16, default=list(BF16), help="cuda, triton or both")
    parser.add_argument("--save", action="store_true", help=f"write {FILE} too")
    args = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("Triton does not compile while it interprets: unset TRITON_INTERPRET")
    if args.save and not FILE.parent.is_dir():
        parser.error(f"{FILE.parent} does not exist: run this in the root of a checkout")
    rows = []
    try:
        with tempfile.TemporaryDirectory() as cache:
            os.environ["TRITON_CACHE_DIR"] = cache
            for backend, architecture in itertools.product(args.backend, args.architectures):
                for row in (cuda if backend == "cuda" else triton)(architecture):
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    except RuntimeError as error:
        parser.error(str(error))
    if args.save:
        nvcc = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
        head = json.dumps(dict(nvcc=re.search(r"release ([\d.]+)", nvcc)[1], triton=version("triton")))
        with atomic_write(FILE) as file:
            lines = ",\n".join(map(json.dumps, rows))
            file.write(f'{head[:-1]}, "rows": [\n{lines}\n]}}\n'.encode())
        print(f"Wrote {FILE}. Now run python docs/performance/make.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
