"""Compiles the Triton kernels ahead of time, without a GPU, and prints what they use as lines of JSON.

    python tests/ops/compile_triton.py [80 90] [--all]

A line has a kernel's form and architecture, its registers, bytes of stack and local memory, and, without a split over
time, its instructions for 32 channels and one token of one direction, counted in the disassembly. Needs cuobjdump,
which comes with Triton, and a process in which Triton is not interpreted.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vilonghorn.ops import triton_backend, triton_kernels, triton_split
from vilonghorn.ops.arguments import RULES

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
ACTIVATIONS = {"x", "dt", "k", "q", "z", "y", "dy", "dx", "ddt", "dz"}
SCALARS = {"batch", "length", "channels", "reverse", "span"}
KERNELS = {
    "scan_forward": triton_kernels.scan_forward,
    "scan_backward": triton_kernels.scan_backward,
    "scan_summary": triton_split.scan_summary,  # of the gradient, which has more to load
}


def compile_kernel(
    name: str, architecture: int, *, rule: str, mean: bool, split: bool, dtype: str = "bf16", aligned: bool = True
):
    """The compiled kernel of two directions with 16 states, z, D and dt_bias."""
    kernel = KERNELS[name]
    constants = dict(RULE=RULES.index(rule), GROUPS=2, MEAN=mean, INDEX=tl.int32, N=16)
    constants |= triton_backend.tile_of(16)._asdict()
    if name != "scan_summary":
        constants["CHUNK"] = triton_backend.CHUNK
    if name == "scan_backward":
        constants["HELD"] = (triton_backend.HELD_SPLIT if split else triton_backend.HELD)[rule]
    if not mean and "sums" in kernel.arg_names:
        constants["sums"] = None
    if not split:
        constants |= dict(span=None, summaries=None)
    if rule != "mamba":
        constants |= {n: None for n in ("A", "dA") if n in kernel.arg_names}
    signature, attributes = {}, {}
    for position, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
            continue
        slices = not aligned and argument.split("_")[0] in ("k", "q")  # rows of a projection, at any offset
        if argument.endswith("_strides"):
            signature[argument] = ("i32",) * (2 if argument == "z_strides" else 3)
            paths = [] if slices else [(position, i) for i in range(len(signature[argument]))]
        elif argument in SCALARS:
            signature[argument] = "i32"
            paths = [(position,)] if argument == "channels" else []
        else:
            signature[argument] = f"*{dtype}" if argument in ACTIVATIONS else "*fp32"
            paths = [] if slices or argument in ("A", "checkpoints", "summaries", "dA") else [(position,)]
        attributes |= {path: [["tt.divisibility", 16]] for path in paths}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(n),): value for n, value in constants.items()},
        attrs=attributes,
    )
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=dict(triton_backend.OPTIONS))


def inspect(binary: bytes) -> tuple[dict[str, int], list[tuple[int, int]]]:
    """Resources of a cubin with one kernel, and its loops as (instructions, of which a branch may skip), by size."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        usage, listing = (
            subprocess.run([CUOBJDUMP, flag, file.name], check=True, capture_output=True, text=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    keys = {"registers": "REG", "stack": "STACK", "local": "LOCAL"}
    resources = {name: int(re.search(rf"\b{key}:(\d+)", usage)[1]) for name, key in keys.items()}
    lines = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/ +([^;]+);", listing)]
    jumps = [(at, int(m[1], 16)) for at, text in lines if (m := re.search(r"\bBRA\b.*?(0x[0-9a-f]+)\s*$", text))]

    def count(first: int, last: int) -> int:
        return sum(first <= at <= last for at, _ in lines)

    loops = [(to, at) for at, to in jumps if to < at]
    skips = [(at, to) for at, to in jumps if to > at]
    skipped = {loop: sum(count(a, b) - 2 for a, b in skips if loop[0] <= a and b <= loop[1]) for loop in loops}
    return resources, sorted((count(*loop), skipped[loop]) for loop in loops)


def report(name: str, architecture: int, rule: str, mean: bool, split: bool, dtype: str, aligned: bool) -> dict:
    form = dict(rule=rule, mean=mean, split=split, dtype=dtype, aligned=aligned)
    resources, loops = inspect(compile_kernel(name, architecture, **form).asm["cubin"])
    if not split:
        resources["instructions"] = instructions(name, rule, loops)
    form["reduce"] = "mean" if form.pop("mean") else "none"
    return dict(kernel=name, architecture=architecture, **form, **resources)


def instructions(name: str, rule: str, loops: list[tuple[int, int]]) -> int:
    """Instructions for 32 channels and one token of one direction, by the loops of a kernel that is not split."""
    chunk, held = triton_backend.CHUNK, triton_backend.HELD[rule]
    if name == "scan_forward":  # one loop over tokens (within one over directions), that saves every chunk-th state
        (step, saving), *_ = loops
        return round(step - saving + saving / chunk)
    else:  # a loop that repeats tokens from the checkpoint on, within one over parts of `held` tokens
        (repeat, _), (part, _), *_ = loops
        repeats = sum(start % chunk for start in range(0, held * chunk, held)) / (held * chunk)
        return round((part - repeat) / held + repeats * repeat)


def reports(architectures: list[int], every: bool) -> Iterator[dict]:
    """As the models call them (bfloat16, directions averaged, k and q slices of a projection), or in every form."""
    types = [("bf16", True), ("bf16", False), ("fp32", True)] if every else [("bf16", False)]
    for architecture in architectures:
        for name in KERNELS:
            for rule in RULES:
                for mean in (True, False) if every else (True,):
                    for split in (True,) if name == "scan_summary" else (False, True):
                        for dtype, aligned in types:
                            yield report(name, architecture, rule, mean, split, dtype, aligned)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for line in reports([int(a) for a in sys.argv[1:] if a != "--all"] or [80, 90], "--all" in sys.argv):
            print(json.dumps(line), flush=True)
