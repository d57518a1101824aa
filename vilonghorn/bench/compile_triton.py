"""Compiles the Triton kernels ahead of time, without a GPU, and prints what they use as lines of JSON.

    python -m vilonghorn.bench.compile_triton [80 90] [--all]

A line has a kernel's form and architecture, its registers, bytes of stack and local memory, and, without a split over
time, its instructions for 32 channels and one token of one direction, counted in the disassembly. Needs cuobjdump,
which comes with Triton, and a process in which Triton is not interpreted.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vilonghorn.ops.backends import triton as triton_backend
from vilonghorn.ops.backends.triton import (
    backward as triton_backward,
)
from vilonghorn.ops.backends.triton import (
    forward as triton_forward,
)
from vilonghorn.ops.backends.triton import (
    split as triton_split,
)
from vilonghorn.ops.validate import RULES

from . import sass

ACTIVATIONS = {"x", "dt", "k", "q", "z", "y", "dy", "dx", "ddt", "dz"}
SCALARS = {"batch", "length", "channels", "reverse", "span", "segments"}
KERNELS = {
    "scan_forward": triton_forward.scan_forward,
    "scan_backward": triton_backward.scan_backward,
    "scan_summary": triton_split.scan_summary,  # of the gradient, which has more to load
    "scan_join": triton_split.scan_join,
}


def compile_kernel(
    name: str, architecture: int, *, rule: str, mean: bool, split: bool, dtype: str = "bf16", aligned: bool = True
):
    """The compiled kernel of two directions with 16 states, z, D and dt_bias."""
    kernel = KERNELS[name]
    constants = dict(RULE=RULES.index(rule), GROUPS=2, MEAN=mean, INDEX=tl.int32, N=16, CHUNK=triton_backend.CHUNK)
    held = (triton_backend.HELD_SPLIT if split else triton_backend.HELD)[rule]
    constants |= dict(HELD=held, GRADIENT=True, **triton_backend.tile_of(16)._asdict())
    constants = {n: value for n, value in constants.items() if n in kernel.arg_names}
    if not mean and "sums" in kernel.arg_names:
        constants["sums"] = None
    if not split:
        constants |= dict(span=None, starts=None)
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
            paths = [] if slices or argument in ("A", "checkpoints", "summaries", "starts", "dA") else [(position,)]
        attributes |= {path: [["tt.divisibility", 16]] for path in paths}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(n),): value for n, value in constants.items()},
        attrs=attributes,
    )
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=dict(triton_backend.OPTIONS))


def report(
    name: str, architecture: int, rule: str, mean: bool, split: bool, dtype: str, aligned: bool
) -> dict[str, Any]:
    """What one kernel uses."""
    form = dict(rule=rule, mean=mean, split=split, dtype=dtype, aligned=aligned)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compile_kernel(name, architecture, **form).asm["cubin"])
        file.flush()
        [resources], [code] = (read(Path(file.name)).values() for read in (sass.resources, sass.listings))
    if name in ("scan_forward", "scan_backward") and not split:
        resources["instructions"] = _instructions(code, name, rule)
    form["reduce"] = "mean" if form.pop("mean") else "none"
    return dict(backend="triton", architecture=architecture, kernel=name.removeprefix("scan_"), **form, **resources)


def _instructions(code: sass.Code, name: str, rule: str) -> int:
    """For 32 channels and one token of one direction, by the loops of a kernel that is not split, inner ones first."""
    loops, chunk, held = (
        sorted(sass.loops(code), key=lambda loop: loop.size),
        triton_backend.CHUNK,
        triton_backend.HELD[rule],
    )
    if name == "scan_forward":  # one loop over tokens (within one over directions), that saves every chunk-th state
        step, saving = loops[0].size, sass.skipped(code, loops[0])
        return round(step - saving + saving / chunk)
    # a loop that repeats tokens from the checkpoint on, within one over parts of `held` tokens
    repeat, part = loops[0].size, loops[1].size
    repeats = sum(start % chunk for start in range(0, held * chunk, held)) / (held * chunk)
    return round((part - repeat) / held + repeats * repeat)


def reports(architectures: list[int], every: bool) -> Iterator[dict[str, Any]]:
    """As the models call them (bfloat16, directions averaged, k and q slices of a projection), or in every form."""
    types = [("bf16", True), ("bf16", False), ("fp32", True)] if every else [("bf16", False)]
    for architecture in architectures:
        for name in KERNELS:
            for rule in RULES:
                for mean in (True, False) if every else (True,):
                    for split in (True,) if name in ("scan_summary", "scan_join") else (False, True):
                        for dtype, aligned in types:
                            yield report(name, architecture, rule, mean, split, dtype, aligned)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for line in reports([int(a) for a in sys.argv[1:] if a != "--all"] or [80, 90], "--all" in sys.argv):
            print(json.dumps(line), flush=True)
