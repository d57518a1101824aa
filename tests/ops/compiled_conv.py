"""What `test_triton_conv.py` runs in a process of its own: compiles the convolution in Triton without a GPU.

Prints one JSON line for each kernel and architecture.
"""

import importlib.util
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from vilonghorn.ops.backends import triton as backend
from vilonghorn.ops.validate import ConvArguments

SCRIPT = Path(__file__).parents[2] / "docs" / "performance" / "compiled.py"
spec = importlib.util.spec_from_file_location("compiled", SCRIPT)
compiled = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compiled)

run, kernels = JITFunction.run, {}
x = torch.empty(2, 50, 256, dtype=torch.bfloat16)[..., :128]
args = ConvArguments(x, torch.empty(2, 128, 4), torch.empty(2, 128), (0, 1))


def compile_only(kernel, *arguments, **options):
    kernels[kernel.__name__] = run(kernel, *arguments, **options | dict(warmup=True))


for architecture in compiled.ARCHITECTURES:
    current = dict(get_current_target=GPUTarget("cuda", architecture, 32), get_current_device=architecture)
    calls = {name: lambda value=value: value for name, value in current.items()}
    driver.set_active(SimpleNamespace(**calls, get_current_stream=lambda device: 0))
    with mock.patch.object(JITFunction, "run", compile_only):
        backend.conv_backward(backend.conv_forward(args), args)
    for name, kernel in kernels.items():
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            [code] = compiled.disassemble(Path(file.name)).values()
        row = dict(code.resources, name=name, architecture=architecture, loop=max(map(len, code.loops())))
        print(json.dumps(row))
