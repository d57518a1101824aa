"""The CPU kernels built as for processors other than x86, against the float64 oracle."""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from native_gemm import gemm, int8_product, int8_stem, linear, merged, stem
from oracle import KERNEL_RULES, block_inputs, compare, inputs, mixer, mixer_inputs, residual_block

from vilonghorn.ops import block, mamba_inner, scan
from vilonghorn.ops.backends import bindings, cpu

KERNELS = Path(__file__).parents[3] / "kernels"
COMPILER = shutil.which("clang++") or shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler (clang++ or g++)")
TOLERANCE = {torch.float32: 3e-6, torch.float64: 1e-12}
rules = pytest.mark.parametrize("rule", KERNEL_RULES)
ABSENT = dict.fromkeys(("x_proj", "dt_proj", "dt_bias", "A", "D"))


@pytest.fixture(scope="module", autouse=True)
def generic(tmp_path_factory):
    """Takes the place of the installed library."""
    folder = tmp_path_factory.mktemp("generic")
    cmake = [sys.executable, "-m", "cmake"]
    options = ["-DVILONGHORN_X86=OFF", "-DVILONGHORN_CUDA=OFF", "-DCMAKE_CXX_FLAGS_RELEASE=-O1"]  # sooner than -O3
    subprocess.run([*cmake, "-S", KERNELS, "-B", folder, *options], capture_output=True, check=True)
    subprocess.run([*cmake, "--build", folder, "--parallel", str(os.cpu_count())], capture_output=True, check=True)
    path = folder / bindings.library_path("cpu").name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bindings, "library_path", lambda name: path)
        library, reason = cpu._open()
        assert reason is None
        patch.setattr(cpu, "library", library)
        assert list(cpu.isas()) == ["generic"]
        yield


@pytest.mark.parametrize("rule", (*KERNEL_RULES, "none"))
def test_a_block_agrees_with_the_oracle(rule, threads):
    values = block_inputs(2, 3, 70, 42, 16, 6, 4, 23, hidden=30, heads=7, rule=rule)
    run = lambda **given: block(**ABSENT | given)  # noqa: E731
    compare(run, values, TOLERANCE[torch.float32], truth=residual_block, rule=rule, reverse=(False, True))


@rules
def test_a_mixer_in_double_precision_agrees_with_the_oracle(rule, threads):
    values = mixer_inputs(2, 3, 70, 41, 16, 6, 4, rule=rule, dtype=torch.float64)
    compare(mamba_inner, values, 1e-12, truth=mixer, rule=rule, reverse=(False, True))


@rules
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_scan_agrees_with_the_oracle(rule, dtype):
    values = inputs(2, 2, 70, 21, 5, rule=rule, dtype=dtype)
    compare(partial(scan, backend="cpu"), values, TOLERANCE[dtype], rule=rule, reverse=(False, True), reduce="mean")


@pytest.mark.parametrize("depth", [1, 33, 192])
def test_a_product_with_int8_weights_has_the_same_bits(depth):
    a, scale = torch.randn(13, depth), torch.rand(50)
    b = torch.randint(-127, 128, (50, depth), dtype=torch.int8)
    assert torch.equal(gemm(a, b.t(), b_scale=scale), int8_product(a, b, scale))


def test_layers_with_int8_weights_are_those_of_integers():
    x, scale = torch.randn(2, 6, 10, 5), torch.rand(33)
    b = torch.randint(-127, 128, (33, 20), dtype=torch.int8)
    assert torch.equal(linear(x, b, scale=scale, merge=2).flatten(0, 2), int8_product(merged(x, 2), b, scale))
    given = [torch.randn(2, 3, 50, 70), torch.randn(7, 3, 3, 3) / 5, torch.randn(7)]
    given += [torch.randint(-127, 128, (20, 7, 3, 3), dtype=torch.int8), torch.randn(20), torch.randn(20)]
    expected, byte = int8_stem(*given, scale[:20] / 63, (2, 2), 1e6)
    error, rounding = (stem(*given, scale[:20] / 63, eps=1e6) - expected).abs(), 1e-8 + 1e-3 * byte
    rounding += 1e-5 * expected.abs()
    assert (error <= 2 * byte + rounding).all() and (error <= rounding).double().mean() > 0.9
