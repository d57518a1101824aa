"""The CUDA convolution and norm compile without a GPU, with their values in registers and few instructions."""

import re
import shutil
import subprocess
from pathlib import Path

import compiled
import pytest

ROOT = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.skipif(compiled.cuobjdump() is None, reason="cuobjdump is not installed"),
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed"),
]
REGISTERS = 128  # so that 16 warps run at once
GRID_ROWS = 4  # of patches, of a thread
# Of a pair of directions with four taps, for a token and 32 channels, inside a segment
INSTRUCTIONS = {"forward": 23, "backward": 55}
VECTOR = {"forward": 4, "backward": 2}  # channels of a thread
STEPS = 4  # tokens of a turn of the loop


def compile_kernels(name, folder):
    source, cubin = ROOT / "kernels" / "cuda" / f"{name}.cu", folder / f"{name}.cubin"
    command = ["nvcc", "-std=c++17", "-O3", "-cubin", "-arch=sm_90", str(source), "-o", str(cubin)]
    subprocess.run(command, check=True)
    return compiled.disassemble(cubin)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return compile_kernels("conv", tmp_path_factory.mktemp("conv"))


def straight_runs(kernel) -> list[list[str]]:
    """The instructions between branches and their targets."""
    cuts = sorted({0, len(kernel.code), *(to for _, to in kernel.branches()), *(i + 1 for i, _ in kernel.branches())})
    lines = [line for _, line in kernel.code]
    return [lines[start:stop] for start, stop in zip(cuts, cuts[1:])]


def test_the_kernels_spill_nothing(kernels):
    # Two dtypes, forward and backward, one direction and a pair, several channels a thread and one; and the reduction
    sequence = 2 * 2 * 2 * 2 + 1
    grid = 2 * 2 * 2  # two dtypes, forward and backward, several channels a thread and one
    assert len(kernels) == sequence + grid
    for symbol, kernel in kernels.items():
        assert kernel.resources["stack"] == kernel.resources["local"] == 0, symbol
        assert kernel.resources["registers"] <= REGISTERS or "grid" in symbol, symbol


def test_a_pair_of_directions_issues_few_instructions(kernels):
    pairs = {symbol: kernel for symbol, kernel in kernels.items() if re.search("Li[24]ELb1E", symbol)}
    assert len(pairs) == 2 * 2
    for symbol, kernel in pairs.items():
        name = re.search(r"conv_(forward|backward)", symbol)[1]
        arithmetic = [(sum("FFMA" in line for line in run), len(run)) for run in straight_runs(kernel)]
        most = max(arithmetic)[0]
        inside = min(length for count, length in arithmetic if count >= 0.8 * most)  # at the borders it is longer
        assert most / (STEPS * VECTOR[name]) >= (8 if name == "forward" else 21), (symbol, most)
        assert inside / (STEPS * VECTOR[name]) <= INSTRUCTIONS[name], (symbol, inside)


@pytest.mark.parametrize(("name", "vector", "limit"), [("forward", 4, 33), ("backward", 2, 108)])
def test_a_step_over_the_grid_issues_few_instructions(kernels, name, vector, limit):
    """For a patch and a channel, with a gate: a turn of the loop has a column of the thread's rows."""
    [kernel] = [k for symbol, k in kernels.items() if f"conv_grid_{name}I13__nv_bfloat16Li{vector}E" in symbol]
    loops = [i - to + 1 for i, to in kernel.branches() if to < i]
    assert max(loops) / (GRID_ROWS * vector) <= limit


def test_the_kernels_of_the_norm_spill_nothing(tmp_path):
    kernels = compile_kernels("norm", tmp_path)
    assert len(kernels) == 2 * 2 * 5 + 1  # two dtypes of the stream, two of the gradient, five widths; the reduction
    for symbol, kernel in kernels.items():
        assert kernel.resources["stack"] == kernel.resources["local"] == 0, symbol
        wide = "Li4EE" in symbol or "Li8EE" in symbol  # more than 256 channels
        assert kernel.resources["registers"] <= (200 if wide else 64), symbol
