"""Marks of tests that need something of this machine."""

import shutil

import pytest
import torch

from vilonghorn.layers.fast_block import can_run_now
from vilonghorn.ops.backends import cpu

_reason = cpu.unavailable("cpu")
needs_native = pytest.mark.skipif(_reason is not None, reason=f"native CPU library {_reason}")
needs_fused = pytest.mark.skipif(
    not can_run_now(torch.ones(1)), reason="needs the native CPU library on an x86 processor"
)
needs_amx = pytest.mark.skipif(
    not cpu.has_bf16_products(), reason="the processor or the library lacks products of bfloat16 values"
)
needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler"
)
