"""The choice of the CPU kernels' instruction set, types of a mixer, and rules that the library lacks."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from flat_arguments import from_tensors
from oracle import block_inputs, inputs, mixer_inputs

from vilonghorn.ops.arguments import BlockArguments, MambaInnerArguments, ScanArguments
from vilonghorn.ops.backends import cpu
from vilonghorn.ops.rules import RULES

pytestmark = pytest.mark.skipif(not cpu.isas(), reason="the native CPU library is not built")
REPORT = """
import torch, vilonghorn
from vilonghorn.ops import scan
from vilonghorn.ops.backends import cpu
print(cpu._isa, cpu.unavailable("cpu"))
scan(*torch.zeros(4, 1, 1, 2, 3))
"""


def start(isa: str) -> subprocess.Popen:
    command, environment = [sys.executable, "-c", REPORT], os.environ | {cpu.ISA_VARIABLE: isa}
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_the_environment_variable_chooses_and_the_first_scan_says_that_its_value_is_wrong():
    first, index = next(iter(cpu.isas().items()))
    processes = [start(first), start("v9")]
    (chosen, _), (wrong, error) = (process.communicate() for process in processes)
    assert chosen == f"{index} None\n"
    assert wrong.startswith(f"-1 VILONGHORN_ISA is 'v9', expected one of '{first}'")
    assert "many times slower than a native kernel. No kernel can run:\n  cpu: VILONGHORN_ISA is 'v9'" in error


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists(),
    reason="needs x86-64 and Linux's list of its flags",
)
def test_the_library_finds_the_instruction_sets_that_the_processor_has():
    flags = set(re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE).group(1).split())
    needs = {"v2": {"sse4_2"}, "v3": {"avx2", "bmi2", "fma"}}
    needs["v4"] = needs["v3"] | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
    needs["vnni"] = needs["v4"] | {"avx512_vnni"}
    needs["amx"] = needs["vnni"] | {"amx_tile", "amx_bf16", "avx512_bf16"}
    assert list(cpu.isas()) == [name for name, wanted in needs.items() if wanted <= flags]


@pytest.mark.parametrize("number", [-1, 4])
def test_a_rule_that_the_library_lacks_is_an_error(number, monkeypatch):
    monkeypatch.setitem(RULES, "gru", RULES["longhorn"]._replace(name="gru", number=number))
    values, saved = inputs(1, 1, 3, 4, 2, rule="longhorn"), [torch.zeros(1000)] * 5
    scan = ScanArguments(**values, rule="gru")
    mixer_values = mixer_inputs(1, 1, 3, 4, 2, 1, 2, rule="longhorn")
    inner = from_tensors(MambaInnerArguments, mixer_values, "gru", [0], [], False)
    block_values = block_inputs(1, 1, 3, 4, 2, 1, 2, 5, hidden=6)
    block = from_tensors(BlockArguments, block_values, "gru", [0], 1e-5, 1e-5, False, [])
    for call in (
        lambda: cpu.forward(scan, True),
        lambda: cpu.forward(scan._replace(rule="none"), True),
        lambda: cpu.backward(values["x"], None, scan, saved[0]),
        lambda: cpu.mamba_inner_forward(inner, True),
        lambda: cpu.mamba_inner_backward(values["x"][0], inner, *saved[:2]),
        lambda: cpu.block_forward(block, False),
        lambda: cpu.block_forward(block, True),
        lambda: cpu.block_backward(block.x, saved, block, [1] * 15),
    ):
        with pytest.raises(RuntimeError, match="the CPU library has no kernel for this rule; use backend='reference'"):
            call()
