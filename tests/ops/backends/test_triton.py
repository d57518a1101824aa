"""The Triton kernels under Triton's interpreter, and what their backend says of itself.

Whether a kernel is interpreted is settled when triton is imported, so these tests run in a process for each rule.
"""

import os
import subprocess
import sys
from pathlib import Path

import interpreter
import pytest
import torch
from oracle import KERNEL_RULES, inputs

from vilonghorn.ops import backends, scan
from vilonghorn.ops.backends import triton as triton_backend
from vilonghorn.ops.validate import MAX_STATE

pytest.importorskip("triton")
FILE = Path(__file__).parents[2] / "helpers" / "interpreted_triton.py"


@pytest.fixture(scope="module")
def processes():
    started = {}
    for rule in KERNEL_RULES:
        environment = os.environ | {"TRITON_INTERPRET": "1", "VILONGHORN_RULE": rule}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FILE)]
        started[rule] = subprocess.Popen(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    yield started
    for process in started.values():
        process.kill()


@interpreter.needed
@pytest.mark.parametrize("rule", KERNEL_RULES)
def test_the_interpreted_kernels_pass_their_tests(rule, processes):
    output, _ = processes[rule].communicate()
    assert processes[rule].returncode == 0 and " passed" in output, output


def test_the_backend_says_why_it_cannot_run():
    assert "GPU" in backends("cpu")["triton"]
    assert "float64" in triton_backend.unavailable("cuda", torch.float64)
    with pytest.raises(RuntimeError, match="'triton' cannot run .* on 'cpu'"):
        scan(**inputs(1, 1, 2, 3, 4, rule="longhorn"), backend="triton")


@pytest.mark.parametrize("states", range(1, MAX_STATE + 1))
def test_a_tile_holds_all_states_and_divides_the_padding(states):
    tile = triton_backend.tile_of(states)
    assert states <= tile.SR * tile.SL < 2 * states
    assert tile.SL * tile.CL == 32 and tile.SR * tile.CR <= 16
    assert triton_backend.LANES % tile.channels == 0
