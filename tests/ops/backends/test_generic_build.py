"""The kernels as processors other than x86 get them, built and run here, against the float64 oracle."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from oracle import block_inputs, compare, convolution, error, inputs, residual_block

from vilonghorn.ops import block, conv_silu, scan
from vilonghorn.ops.backends import (
    bindings as abi,
)
from vilonghorn.ops.backends import (
    cpu as native,
)
from vilonghorn.ops.backends import (
    cpu_block as native_block,
)
from vilonghorn.ops.backends import (
    cpu_mixer as native_mixer,
)
from vilonghorn.ops.validate import RULES

KERNELS = Path(__file__).parents[3] / "kernels"
pytestmark = pytest.mark.skipif(native.library is None, reason="the native library is not built, as without a compiler")
TOLERANCE = {torch.float32: 3e-6, torch.float64: 1e-12}
STORED = TOLERANCE | {dtype: 2 * torch.finfo(dtype).eps for dtype in (torch.bfloat16, torch.float16)}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
rules = pytest.mark.parametrize("rule", RULES)


@pytest.fixture(scope="module", autouse=True)
def generic(tmp_path_factory):
    """Takes the place of the installed library."""
    folder = tmp_path_factory.mktemp("generic")
    cmake = [sys.executable, "-m", "cmake"]
    options = ["-DVILONGHORN_X86=OFF", "-DVILONGHORN_CUDA=OFF", "-DCMAKE_CXX_FLAGS_RELEASE=-O1"]  # sooner than -O3
    subprocess.run([*cmake, "-S", KERNELS, "-B", folder, *options], capture_output=True, check=True)
    subprocess.run([*cmake, "--build", folder, "--parallel", str(os.cpu_count())], capture_output=True, check=True)
    path = folder / abi.library_path("cpu").name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(abi, "library_path", lambda name: path)
        library, reason = native._open()
        assert reason is None
        for module in (native, native_mixer, native_block):
            patch.setattr(module, "library", library)
        assert list(native.levels()) == ["generic"]
        yield


@rules
@dtypes
def test_a_block_agrees_with_the_oracle(rule, dtype, threads):
    values = block_inputs(2, 3, 70, 41, 16, 6, 4, 23, rule=rule, dtype=dtype)
    function, options = lambda A=None, **tensors: block(A=A, **tensors), dict(rule=rule, reverse=(False, True))
    compare(function, values, TOLERANCE[dtype], truth=residual_block, **options)


@rules
@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_a_scan_agrees_with_the_oracle(rule, dtype):
    values = inputs(2, 2, 70, 21, 5, rule=rule, dtype=dtype)
    compare(partial(scan, backend="cpu"), values, STORED[dtype], rule=rule, reverse=(False, True), reduce="mean")


@dtypes
def test_a_convolution_agrees_with_the_oracle(dtype):
    x, weight, bias = (torch.randn(shape, dtype=dtype) for shape in ((2, 37, 21), (2, 21, 4), (2, 21)))
    y = conv_silu(x, weight, bias, reverse=(False, True))
    assert error(y, convolution(x, weight, bias, (False, True))) < TOLERANCE[dtype]


@pytest.mark.parametrize("turned", [False, True])
def test_products_agree_with_float64(turned):
    a, b = torch.randn(37, 600), torch.randn(600, 50)
    if turned:
        a, b = a.t().contiguous().t(), b.t().contiguous().t()
    torch.testing.assert_close(native.matmul(a, b).double(), a.double() @ b.double(), rtol=1e-5, atol=1e-4)
