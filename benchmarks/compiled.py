"""Compiles the CUDA and Triton kernels without a GPU and prints what they use, one JSON line per kernel.

A row has registers per thread, bytes of stack and local memory and, for kernels of 16 states, the instructions for 32
channels and one step of one direction. Run `python benchmarks/compiled.py` in a checkout; --save also writes
benchmarks/results/kernels.json. Needs nvcc and Triton, which contains cuobjdump.
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
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch

from vilonghorn.data.atomic_files import write_json
from vilonghorn.ops.arguments import ScanArguments
from vilonghorn.ops.rules import RULES

FILE = Path(__file__).parent / "results" / "kernels.json"
SOURCE = Path(__file__).parents[1] / "kernels" / "cuda" / "scan.cu"
ARCHITECTURES = (80, 90)
BACKENDS = ("cuda", "triton")
STATE_EVERY = 8  # steps between two saved states of the CUDA kernels
# Runs of steps in a chunk of backward: turns of the loop that recomputes states before the run, whether the run starts
# from the saved one, and its steps.
RUNS = {rule: ((2, True, 2), (0, False, 3), (0, True, 3)) for rule in RULES} | {"mamba": ((1, True, 4), (0, True, 4))}
STAGE = 4  # steps that forward unrolls
V2_WIDTH, V2_HEADS = 256, 4  # of `vilonghornv2_tiny`, stages.2
V2_SEQUENCES = (16, 4096)  # images of 1024 px, and their tokens there


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

    def loops(self) -> list[range]:
        """Positions of each loop's instructions, shortest loop first; of loops with the same start, the longest.

        Code after the last exit is for warps that diverge, and returns to where it was entered.
        """
        end = max((i for i, (_, line) in enumerate(self.code) if "EXIT" in line), default=len(self.code))
        last = {target: i for i, target in self.branches() if target < i < end and "DIV" not in self.code[i][1]}
        return sorted((range(start, end + 1) for start, end in last.items()), key=len)


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
    pattern = r"/\*([0-9a-f]{4,})\*/ +([^;]+);"
    found = {symbol: re.findall(pattern, text) for symbol, text in zip(parts[1::2], parts[2::2])}
    code = {symbol: [(int(at, 16), line) for at, line in lines] for symbol, lines in found.items()}
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
            pattern = r"(forward|backward|summary|join|reduce)(?:_sums)?"
            pattern += r"(?:I(?:Li(\d)E)?(?:(f|13__nv_bfloat16|6__half)(?:Li(\d)E)?)?E)?"
            kernel, rule, dtype, lanes = re.search(pattern, symbol).groups()
            dtypes = {"13__nv_bfloat16": "bfloat16", "6__half": "float16"}
            options = dict(
                kernel=kernel, rule=[*RULES][int(rule)] if rule else None, dtype=dtypes.get(dtype, "float32")
            )
            row = dict(backend="cuda", architecture=architecture, **options, states=64 if lanes == "4" else 16)
            row |= compiled.resources
            if kernel in ("forward", "backward") and row["states"] == 16:
                row["instructions"] = _cuda_instructions(compiled, kernel, row["rule"])
            rows.append(row)
    return sorted(rows, key=lambda row: str(list(row.items())[:5]))


def _cuda_instructions(compiled: Kernel, kernel: str, rule: str) -> int:
    """Instructions of a step, with its share of the loops around the steps, along the path that a warp executes."""
    channels = 1 if (kernel, rule) == ("backward", "mamba") else 2  # of a lane
    path, steps = (
        (_forward_stage(compiled), STAGE) if kernel == "forward" else (_backward_chunk(compiled, rule), STATE_EVERY)
    )
    return round(len(path) / steps / channels)


def _forward_stage(compiled: Kernel) -> list[int]:
    """Positions of the instructions that a full stage executes, with a saved state.

    Conditional branches are not taken, except around a barrier of the block and around accesses to single states.
    """
    copies = [loop for loop in compiled.loops() if sum("LDGSTS" in compiled.code[i][1] for i in loop) >= 3 * STAGE]
    loop = copies[0]  # the innermost one that copies x, dt and z
    jumps = {i: to for i, to in compiled.branches() if i < to <= loop[-1]}
    path, i = [], loop[0]
    while i <= loop[-1]:
        path.append(i)
        skipped = "".join(line for _, line in compiled.code[i + 1 : jumps.get(i, i)])
        rare = "BAR." in skipped or len(re.findall(r"STG\.E(?:\.U16)? (?:desc|\[)", skipped)) > 3
        taken = re.match(r"\s*BRA 0x", compiled.code[i][1]) or (rare and skipped.count("FFMA") < 16)
        i = jumps[i] if i in jumps and taken else i + 1
    return path


def _backward_chunk(compiled: Kernel, rule: str) -> list[int]:
    """Positions of the instructions that a full chunk executes.

    Conditional branches are not taken, except around what the run does not do, around a barrier of the block, and
    around accesses to single states.
    """
    arithmetic = [i for i, (_, line) in enumerate(compiled.code) if "FFMA" in line or "FMUL" in line]
    loops = [loop for loop in compiled.loops() if sum(i in loop for i in arithmetic) >= 16]

    def inside(loop: range) -> list[range]:
        return [other for other in loops if other[0] in loop[1:] and other[-1] in loop[:-1]]

    innermost = [loop for loop in loops if not inside(loop)]
    around = [loop for loop in loops if sum(inner in inside(loop) for inner in innermost) == 2]
    if len(around) < 2:
        raise RuntimeError(f"{len(around)} loops of a backward kernel contain two others: adapt _backward_chunk")
    run, chunk = around[:2]
    nests = sorted((inner for inner in innermost if inner in inside(run)), key=lambda loop: loop[0])
    jumps = {i: to for i, to in compiled.branches() if to > i}

    def walk(loop: range, nested: dict[range, list[int]], restores: bool = True, shorter: bool = False) -> list[int]:
        path, position = [], loop[0]
        while position <= loop[-1]:
            for other, body in nested.items():
                if position == other[0]:
                    path += body
                    position = other[-1] + 1
            path.append(position)
            target = jumps.get(position, loop[-1] + 1)
            text = "".join(line for _, line in compiled.code[position + 1 : target])
            loads = len(re.findall(r"LDG\.E\.(?:64|128) ", text)) >= 4
            if any(position < other[0] < target for other in nested):
                taken = False
            elif "FFMA" in text:  # a state less
                taken = shorter and "STS.128" in text
            else:
                single = len(re.findall(r"LDG\.E(?:\.U16)? R", text)) > 3
                taken = "BAR." in text or not loads and single or loads and not restores
            taken = taken or re.match(r"\s*BRA 0x", compiled.code[position][1])
            position = target if target <= loop[-1] and taken else position + 1
        return path

    runs = []
    for turns, restores, steps in RUNS[rule]:
        nested = {nest: count * walk(nest, {}) for nest, count in zip(nests, (turns, steps))}
        runs += walk(run, nested, restores, steps < RUNS[rule][-1][2])
    return walk(chunk, {run: runs})


def triton(architecture: int) -> Iterator[dict[str, Any]]:
    """Compiles the Triton kernels as the models call them, for one architecture; one row per kernel."""
    for rule, num_heads in [*((rule, None) for rule in RULES), ("longhorn_exact", V2_HEADS)]:
        for name, kernel in compile_triton(architecture, rule, num_heads).items():
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(kernel.asm["cubin"])
                file.flush()
                [compiled] = disassemble(Path(file.name)).values()
            row = dict(backend="triton", architecture=architecture, kernel=name, rule=rule, dtype="bf16")
            row |= compiled.resources
            if num_heads is None:
                row["instructions"] = _triton_instructions(compiled, name, rule)
            else:
                # Of a chunk; `steps` chunks follow one another in a scan of V2_SEQUENCES.
                instructions = max(map(len, compiled.loops()), default=len(compiled.code))
                steps = 1 if name == "chunks_prepare" else _chunk_steps()
                row |= dict(
                    triton=version("triton"), shared=kernel.metadata.shared, instructions=instructions, steps=steps
                )
            yield row


def _chunk_steps() -> int:
    from vilonghorn.ops.backends.triton import CHUNK, segment_chunks

    images, tokens = V2_SEQUENCES
    return segment_chunks(images * V2_WIDTH // 32, tokens // CHUNK)


def compile_triton(architecture: int, rule: str, num_heads: int | None = None) -> dict[str, Any]:
    """Calls a scan and its backward with a driver that compiles the kernels instead of running them.

    The call has bfloat16 inputs, the mean over two directions, 16 states, z, D, dt_bias, and slices as k and q. With
    heads it has one direction, as in `vilonghornv2_tiny`, and is long enough to be split over time.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import JITFunction, driver

    from vilonghorn.ops.backends import triton as backend

    target = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", architecture, 32),
        get_current_device=lambda: architecture,  # Triton keeps compiled kernels per device
        get_current_stream=lambda device: 0,
    )
    compiled = {}
    run = JITFunction.run

    def compile_only(kernel: JITFunction, *args: Any, **options: Any) -> None:
        name = kernel.__name__.removeprefix("scan_")
        if name != "sum_shares":
            is_map = name in ("chunks_forward", "chunks_backward") and args[5] is None  # of a segment, without results
            compiled[name + "_maps" * is_map] = run(kernel, *args, **options | dict(warmup=True))

    G, B, L, D, N, R = (1, 2, 500, V2_WIDTH, 16, 16) if num_heads else (2, 2, 50, 32, 16, 12)
    x, dt = (torch.empty((G, B, L, size), dtype=torch.bfloat16) for size in (D, num_heads or D))
    _, k, q = torch.empty((G, B, L, R + 2 * N), dtype=torch.bfloat16).split([R, N, N], -1)
    A = torch.empty(G, D, N) if rule == "mamba" else None
    D_skip, dt_bias = torch.empty(G, D), torch.empty(G, dt.shape[-1])
    args = ScanArguments(x, dt, k, q, x[0], A, D_skip, dt_bias, None, rule, (False, True)[:G], "mean")
    driver.set_active(target)
    with mock.patch.object(JITFunction, "run", compile_only):
        y, _, saved_states = backend.forward(args, save=True)
        backend.backward(y, None, args, saved_states)
    return compiled


def _triton_instructions(compiled: Kernel, name: str, rule: str) -> int:
    """Instructions of a step."""
    from vilonghorn.ops.backends.triton import HELD, STATE_EVERY

    inner, *outer = compiled.loops()
    if name == "forward":  # one loop over steps, which saves the state every STATE_EVERY steps
        saving = sum(to - i - 1 for i, to in compiled.branches() if inner[0] <= i < to <= inner[-1])
        return round(len(inner) - saving + saving / STATE_EVERY)
    # a loop that recomputes states from a saved one, inside a loop over `held` steps
    held = HELD[rule]
    recomputed = sum(start % STATE_EVERY for start in range(0, held * STATE_EVERY, held)) / (held * STATE_EVERY)
    return round((len(outer[0]) - len(inner)) / held + recomputed * len(inner))


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles, prints one line per kernel, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("architectures", nargs="*", type=int, default=ARCHITECTURES, help="compute capabilities: 80 90")
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, default=BACKENDS, help="cuda, triton or both")
    parser.add_argument("--save", action="store_true", help=f"write {FILE} too")
    args = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("Triton does not compile while it interprets: unset TRITON_INTERPRET")
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
        write_json(FILE, dict(nvcc=re.search(r"release ([\d.]+)", nvcc)[1], triton=version("triton"), rows=rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
