"""The choice of the CPU kernels' instruction set."""

import os
import subprocess
import sys

import pytest

from vilonghorn.ops.backends import cpu

pytestmark = pytest.mark.skipif(not cpu.isa_levels(), reason="the native CPU library is not built")
REPORT = "from vilonghorn.ops.backends import cpu; print(cpu._isa)"


def start(isa: str) -> subprocess.Popen:
    command, environment = [sys.executable, "-c", REPORT], os.environ | {cpu.ISA_VARIABLE: isa}
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_the_environment_variable_chooses_and_a_wrong_value_names_the_right_ones():
    first, index = next(iter(cpu.isa_levels().items()))
    processes = [start(first), start("v9")]
    (chosen, _), (_, error) = (process.communicate() for process in processes)
    assert int(chosen) == index
    assert f"ValueError: VILONGHORN_ISA is 'v9', expected one of '{first}'" in error
