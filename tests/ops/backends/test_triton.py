"""The Triton kernels under Triton's interpreter, and what their backend says of itself.

Whether a kernel is interpreted is settled when triton is imported, so these tests run in a process of their own.
"""

import os
import subprocess
import sys
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from oracle import inputs

from vilonghorn.ops import backends, scan
from vilonghorn.ops.arguments import ScanArguments
from vilonghorn.ops.backends import cuda
from vilonghorn.ops.backends import triton as triton_backend
from vilonghorn.ops.validate import MAX_STATE

pytest.importorskip("triton")
FILE = Path(__file__).parents[2] / "helpers" / "interpreted_triton.py"


@pytest.mark.skipif(
    metadata.version("triton").startswith("3.6") and numpy.lib.NumpyVersion(numpy.__version__) >= "2.4.0",
    reason="the interpreter of Triton 3.6 needs numpy<2.4: it converts arrays of one element to numbers",
)
def test_the_interpreted_kernels_pass_their_tests(emulator_path):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=20", str(FILE)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "VILONGHORN_EMULATOR": str(emulator_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    print(done.stdout)  # which pytest shows with -s or of a failure
    assert done.returncode == 0 and " passed" in done.stdout, done.stderr


def test_the_backend_says_why_it_cannot_run():
    assert "GPU" in backends("cpu")["triton"]
    assert "float64" in triton_backend.unavailable("cuda", torch.float64)
    with pytest.raises(RuntimeError, match="'triton' cannot run .* on 'cpu'"):
        scan(**inputs(1, 1, 2, 3, 4, rule="longhorn"), backend="triton")


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that only its name and its compute capability say."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6) if device == 1 else (7, 5))
    for cached in (triton_backend._no_gpu, cuda._unavailable_on):
        cached.cache_clear()
    yield monkeypatch
    for cached in (triton_backend._no_gpu, cuda._unavailable_on):
        cached.cache_clear()


def test_what_is_too_old_is_named_with_what_is_needed(gpu):
    assert triton_backend.unavailable("cuda:0") == "Some GPU has compute capability 7.5, 8.0 is needed"
    assert triton_backend.unavailable(torch.device("cuda", 1)) is None  # the tensor's device counts


def test_a_cuda_library_that_does_not_run_is_not_replaced_without_a_word(gpu):
    checks = {0: 35, 1: 0}  # an old driver for the current device
    library = SimpleNamespace(vl_cuda_check=checks.get, vl_cuda_error=lambda error: b"driver is insufficient")
    gpu.setattr(cuda, "_open", lambda: (library, None))
    with pytest.warns(
        UserWarning, match="CUDA library does not run on Some GPU .*: driver is insufficient. Triton runs"
    ):
        assert "driver is insufficient" in cuda.unavailable("cuda")
    assert cuda.unavailable("cuda:1") is None


@pytest.mark.parametrize("states", range(1, MAX_STATE + 1))
def test_a_tile_holds_all_states_and_divides_the_padding(states):
    tile = triton_backend.tile_of(states)
    assert states <= tile.SR * tile.SL < 2 * states
    assert tile.SL * tile.CL == 32 and tile.SR * tile.CR <= 16
    assert triton_backend.LANES % tile.channels == 0


@pytest.mark.parametrize(
    "programs, chunks, expected",
    [
        (1024, 13, 13),  # 128 images of 224 px: enough programs
        (512, 64, 16),  # 64 of 512 px
        (128, 256, 16),  # 16 of 1024 px
        (8, 256, 8),  # one of 1024 px: no segment is shorter
        (8, 13, 13),  # one of 224 px: too short
        (1, 25, 9),  # three segments
        (800, 256, 256),  # two segments are no faster than one
        (10**6, 10**4, 10**4),
        (0, 0, 1),
    ],
)
def test_a_scan_with_few_programs_is_split_over_time(programs, chunks, expected):
    assert triton_backend.segment_chunks(programs, chunks) == expected


def test_more_programs_never_make_more_segments():
    for chunks in range(1, 300, 7):
        segments = [-(-chunks // triton_backend.segment_chunks(programs, chunks)) for programs in range(1, 3000, 41)]
        assert segments == sorted(segments, reverse=True) and segments[-1] == 1


@pytest.mark.parametrize("heads", [1, 2], ids=["chunks", "tokens"])
def test_a_large_batch_stays_within_the_axes_of_a_grid(heads, monkeypatch):
    """Only the first axis of a grid may have more than 65,535 programs."""
    grids = {}
    monkeypatch.setattr(triton_backend._Launch, "run", lambda self, kernel, grid, *_: grids.update({kernel: grid}))
    values = inputs(1, batch := 70_000, 17, 2, 1, rule="longhorn_exact")
    values |= {name: values[name][..., :heads] for name in ("dt", "dt_bias")}
    args = ScanArguments(**values, rule="longhorn_exact")
    y, _, saved_states = triton_backend.forward(args, True)
    triton_backend.backward(y, None, args, saved_states)
    assert len(grids) == (4 if heads == 1 else 3)
    assert all(grid[0] in (batch, 2 * batch) and max(grid[1:]) <= 65_535 for grid in grids.values()), grids


def test_more_channels_than_a_grid_has_blocks_are_refused(monkeypatch):
    monkeypatch.setattr(triton_backend._Launch, "run", lambda *_: None)
    channels, most = triton_backend.tile_of(16).channels, 2**16 - 1
    for blocks in (most, most + 1):
        x, k = torch.empty(1, 1, 1, blocks * channels), torch.empty(1, 1, 1, 16)
        run = partial(triton_backend.forward, ScanArguments(x, x, k, k, reverse=(0,)), False)
        if blocks == most:
            assert run()[0].shape == x.shape
        else:
            with pytest.raises(ValueError, match="2097152 channels in 65536 blocks, .* at most 65535"):
                run()
