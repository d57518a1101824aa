"""Compiles every Triton kernel without a GPU, for the targets given (default: all of TARGETS), as the models call them.

TARGET:0,3 means the first and the fourth of SCANS alone. Prints one JSON line for each kernel, rule, type of x and
target. It runs with any Python that has torch, timm and triton. For another version of triton, unpack its wheel into a
folder that PYTHONPATH names:

    pip download --no-deps -d build/triton triton==3.6.0 && unzip -q build/triton/*.whl -d build/triton
    PYTHONPATH=build/triton:. python tests/helpers/compiled_triton.py
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from vilonghorn.ops.arguments import ScanArguments
from vilonghorn.ops.backends import triton as backend

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import compiled  # noqa: E402

TARGETS = {f"sm_{sm}": GPUTarget("cuda", sm, 32) for sm in (80, 90, 100, 120)}
TARGETS["gfx942"] = GPUTarget("hip", "gfx942", 64)
# Rules and dtypes of scans with z; then of scans with heads.
SCANS = [(rule, "bfloat16", False) for rule in ("longhorn", "longhorn_exact", "mamba")]
SCANS += [("longhorn_exact", dtype, True) for dtype in ("bfloat16", "float32")]

run, kernels = JITFunction.run, {}


def arguments(rule: str, dtype: torch.dtype, has_heads: bool) -> ScanArguments:
    """Both directions averaged; with heads one direction, long enough to be split over time. k and q are slices."""
    G, L, N, D = (1, 500, 16, 256) if has_heads else (2, 50, 16, 64)
    k, q = torch.empty(G, 2, L, 2 * N, dtype=dtype).chunk(2, -1)
    x, dt = (torch.empty(G, 2, L, size, dtype=dtype) for size in (D, 4 if has_heads else D))
    A = torch.empty(G, D, N) if rule == "mamba" else None
    D_skip, dt_bias = torch.empty(G, D), torch.empty(G, dt.shape[-1])
    return ScanArguments(x, dt, k, q, x[0], A, D_skip, dt_bias, None, rule, (0, 1)[:G], "mean")


def compile_only(kernel, *arguments, **options):
    is_map = kernel.__name__ in ("chunks_forward", "chunks_backward") and arguments[5] is None  # without results
    kernels[kernel.__name__ + "_maps" * is_map] = run(kernel, *arguments, **options | dict(warmup=True))


def resources(target: str, kernel) -> dict:
    """What NVIDIA's disassembler says: registers, bytes of stack, and instructions of the longest loop, or of all."""
    if not target.startswith("sm_"):
        return dict(bytes=len(kernel.asm["hsaco"]))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        [code] = compiled.disassemble(Path(file.name)).values()
    return dict(code.resources, loop=max(map(len, code.loops()), default=len(code.code)))


def chosen() -> Iterator[tuple]:
    for target, _, numbers in (argument.partition(":") for argument in sys.argv[1:] or TARGETS):
        yield from ((target, *SCANS[int(i)]) for i in (numbers.split(",") if numbers else range(len(SCANS))))


for target, rule, dtype, has_heads in chosen():
    current = dict(get_current_target=TARGETS[target], get_current_device=target, get_current_stream=0)
    calls = {name: lambda *_, value=value: value for name, value in current.items()}
    driver.set_active(SimpleNamespace(**calls))
    args = arguments(rule, getattr(torch, dtype), has_heads)
    hip = "6" if target.startswith("gfx") else None
    with mock.patch.object(JITFunction, "run", compile_only), mock.patch.object(torch.version, "hip", hip):
        y, _, states = backend.forward(args, True)
        backend.backward(y, None, args, states)
    for name, kernel in kernels.items():
        row = dict(triton=triton.__version__, target=target, name=name, rule=rule, dtype=dtype)
        print(json.dumps(row | resources(target, kernel)), flush=True)
    kernels.clear()
