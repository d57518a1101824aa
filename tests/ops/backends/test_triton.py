"""The Triton kernels under Triton's interpreter, and what their backend says of itself.

Whether a kernel is interpreted is settled when triton is imported, so these tests run in processes of their own, one
for the convolution and one for each rule.
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
FOLDER = Path(__file__).parents[2] / "helpers"
RUNS = [("interpreted_conv.py", ""), *(("interpreted_triton.py", rule) for rule in KERNEL_RULES)]  # files and rules


@pytest.fixture(scope="module")
def processes():
    started = {}
    for file, rule in RUNS:
        environment = os.environ | {"TRITON_INTERPRET": "1", "VILONGHORN_RULE": rule}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / file)]
        started[file, rule] = subprocess.Popen(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    yield started
    for process in started.values():
        process.kill()


@interpreter.needed
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_the_interpreted_kernels_pass_their_tests(run, processes):
    output, _ = processes[run].communicate()
    assert processes[run].returncode == 0 and " passed" in output, output


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
