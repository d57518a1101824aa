"""The CUDA kernels compile to what was intended: states in registers, few instructions a step. Needs nvcc, not a GPU.

Run with -s to read the table that `docs/performance.md` keeps. Every instruction of a loop counts, paths not taken
included, so that the figures are upper bounds.
"""

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent.parent / "kernels" / "scan_cuda.cu"
NVCC = shutil.which("nvcc")
ARCHITECTURES = os.environ.get("VILONGHORN_TEST_ARCHITECTURES", "80 90").split()  # of "80 86 89 90 100 120"
CHUNK = 8  # steps of a chunk
RULES = ("longhorn", "longhorn_exact", "mamba")
TYPES = {"f": "float32", "13__nv_bfloat16": "bfloat16", "6__half": "float16"}
KERNEL = re.compile(r"scan_(forward|backward)ILi(\d)E(\w+?)Li(\d)EE")
pytestmark = pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")


def disassembler() -> str | None:
    """cuobjdump of the CUDA toolkit, or the one inside Triton."""
    found = shutil.which("cuobjdump")
    if found is None and NVCC is not None:
        triton = pytest.importorskip("triton", reason="no cuobjdump: neither the toolkit's nor Triton's")
        found = shutil.which(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")
    return found


def name_of(symbol: str) -> tuple[str, str, str, int]:
    way, rule, dtype, split = KERNEL.search(symbol).groups()
    return way, RULES[int(rule)], TYPES[dtype], 16 if split == "1" else 64


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Each architecture's cubin and what the compiler says of it."""
    folder = tmp_path_factory.mktemp("cubin")

    def compile_for(architecture):
        cubin = folder / f"scan_{architecture}.cubin"
        flags = ["-std=c++17", "-O3", "-cubin", f"-arch=sm_{architecture}", "-Xptxas=-v"]
        result = subprocess.run([NVCC, *flags, str(SOURCE), "-o", str(cubin)], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return cubin, result.stderr

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(ARCHITECTURES, pool.map(compile_for, ARCHITECTURES)))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_kernel_spills_its_registers(compiled, architecture):
    sizes = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n.*Used (\d+) registers"
    found = re.findall(r"properties for (\S+)\n\s+" + sizes, compiled[architecture][1])
    kernels = {name_of(symbol): tuple(map(int, numbers)) for symbol, *numbers in found}
    assert len(kernels) == 24  # three rules both ways, for three types up to 16 states and one above
    for name, (stack, stores, loads, registers) in sorted(kernels.items()):
        print(f"sm_{architecture} {name}: {registers} registers, {stack} bytes of stack, {stores} + {loads} spilled")
        assert max(stack, stores, loads) <= (0 if name[0] == "forward" else 64), name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_step_of_32_channels_takes_no_more_instructions_than_documented(compiled, architecture):
    command = [disassembler(), "-sass", str(compiled[architecture][0])]
    listing = subprocess.run(command, capture_output=True, text=True, check=True)
    limits = {
        "forward": dict(longhorn=130, longhorn_exact=120, mamba=165),
        "backward": dict(longhorn=410, longhorn_exact=350, mamba=550),
    }
    for text in listing.stdout.split("Function : ")[1:]:
        way, rule, dtype, states = name_of(text)
        if dtype == "bfloat16":
            step, whole = per_step(text, way, channels=32 if (way, rule) == ("backward", "mamba") else 64)
            print(f"sm_{architecture} {way} {rule}: {step:.0f} instructions, {whole:.0f} with a chunk's share")
            assert whole <= limits[way][rule], (way, rule)


def per_step(text: str, way: str, channels: int) -> tuple[float, float]:
    """Instructions per 32 channels and step: of the loops over steps, and with their share of the loop over chunks."""
    code = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", text)
    index = {int(address, 16): i for i, (address, _) in enumerate(code)}
    loops = {}  # first instruction to last
    for i, (address, instruction) in enumerate(code):
        branch = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", instruction)
        if branch and int(branch[1], 16) < int(address, 16) and "DIV" not in instruction:
            first = index[int(branch[1], 16)]
            loops[first] = max(loops.get(first, 0), i)

    def arithmetic(first, last):
        return sum("FFMA" in instruction or "FMUL" in instruction for _, instruction in code[first : last + 1])

    heavy = {first: last for first, last in loops.items() if arithmetic(first, last) >= 16}
    inner = {f: last for f, last in heavy.items() if not any(f < g and heavy[g] <= last for g in heavy)}
    chunk = min((last - f + 1 for f, last in heavy.items() if f < min(inner) and last > max(inner.values())))
    sizes = sorted(last - f + 1 for f, last in inner.items())
    assert len(sizes) == (1 if way == "forward" else 2)
    # Backward makes 10 of a chunk's 8 states again in a loop, since it does so by halves, and undoes each step once.
    step = sizes[-1] + (sizes[0] * 10 / CHUNK if way == "backward" else 0)
    return step * 32 / channels, (step + (chunk - sum(sizes)) / CHUNK) * 32 / channels
