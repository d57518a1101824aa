"""Compiles the chunks of heads in Triton without a GPU, as `test_triton_compiled.py` does.

Prints one JSON line for each kernel, type of x and architecture.
"""

import itertools
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from vilonghorn.ops.arguments import ScanArguments
from vilonghorn.ops.backends import triton as backend

sys.path.append(str(Path(__file__).parents[2] / "docs" / "performance"))
import compiled  # noqa: E402

run, kernels = JITFunction.run, {}


def chunks(dtype):
    k, q = torch.empty(1, 2, 50, 32, dtype=dtype).chunk(2, -1)
    x, dt = (torch.empty(1, 2, 50, size, dtype=dtype) for size in (384, 4))
    return ScanArguments(
        x, dt, k, q, x[0], None, torch.empty(1, 384), torch.empty(1, 4), "longhorn_exact", (0,), "mean"
    )


def compile_only(kernel, *arguments, **options):
    kernels[kernel.__name__] = run(kernel, *arguments, **options | dict(warmup=True))


for architecture, dtype in itertools.product(compiled.ARCHITECTURES, ("bfloat16", "float32")):
    current = dict(get_current_target=GPUTarget("cuda", architecture, 32), get_current_device=architecture)
    calls = {name: lambda value=value: value for name, value in current.items()}
    driver.set_active(SimpleNamespace(**calls, get_current_stream=lambda device: 0))
    with mock.patch.object(JITFunction, "run", compile_only):
        args = chunks(getattr(torch, dtype))
        y, states = backend.forward(args, True)
        backend.backward(y, args, states)
    for name, kernel in kernels.items():
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            [code] = compiled.disassemble(Path(file.name)).values()
        loop = max(map(len, code.loops()))
        print(json.dumps(dict(code.resources, name=name, dtype=dtype, architecture=architecture, loop=loop)))
    kernels.clear()
