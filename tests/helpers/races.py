"""Runs the CUDA kernels in the emulator under ThreadSanitizer, in which only barriers order what threads access.

python tests/helpers/races.py    prints the first race, and ends with 1 if there is one. It needs g++ and its libtsan.
"""

import ctypes
import os
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/ops/backends")]
from conftest import FLAGS  # noqa: E402
from oracle import KERNEL_RULES, conv_inputs, inputs, mixer_inputs, value_and_grads  # noqa: E402

from vilonghorn.ops import conv_silu, mamba_inner, scan  # noqa: E402
from vilonghorn.ops.backends import cpu, cuda  # noqa: E402

# G, B, L, D, N; G, B, L, D, K
SCANS = [(2, 1, 11, 34, 16), (2, 1, 9, 6, 14), (1, 33, 1, 2, 5), (2, 1, 3, 34, 16)]
CONVOLUTIONS = [(2, 1, 33, 16, 4), (1, 2, 17, 33, 4)]
REVERSE = {1: (False,), 2: (False, True)}


def run(library: str) -> None:
    """Forward and backward of scans, mixers, norms and convolutions."""
    kernels = cuda.declare(ctypes.CDLL(library))
    cuda._open, cuda.unavailable, cpu._reason = lambda: (kernels, None), lambda *_: None, "not built"
    cuda._call = lambda function, device, *structs: function(*structs, 0, None)
    torch.set_num_threads(1)
    for rule in KERNEL_RULES:
        for shape in SCANS:
            values = inputs(*shape, rule=rule)
            options = dict(rule=rule, reverse=REVERSE[shape[0]], reduce="mean")
            value_and_grads(partial(scan, backend="cuda"), values, **options)
        for G, heads, grid in ((2, None, None), (1, 2, (4, 5))):
            L, K = (20, 9) if grid else (21, 4)
            values = mixer_inputs(G, 1, L, 34, 5, 2, K, rule=rule, heads=heads, filters=grid and (3, 3))
            value_and_grads(mamba_inner, values, rule=rule, reverse=REVERSE[G], grid=grid)
    cuda.norm_backward(*(torch.ones(70, 48) for _ in range(3)), torch.ones(48), 1e-5)
    values = mixer_inputs(1, 1, 27, 10, 1, 1, 9, rule="none", filters=(3, 3))
    value_and_grads(mamba_inner, values, rule="none", reverse=(False,), grid=(9, 3))
    for shape in CONVOLUTIONS:
        value_and_grads(partial(conv_silu, backend="cuda"), conv_inputs(*shape), reverse=REVERSE[shape[0]])


def find(kernels: Path) -> str:
    """The first race, as FILE:LINE of the functions on both stacks, or an empty string."""
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/libemulated.so"
        *included, source = map(str, sorted((kernels / "cuda").glob("*.cu")))
        sources = [*(f"-include{path}" for path in included), "-x", "c++", source]
        subprocess.run(["g++", *FLAGS, "-fsanitize=thread", "-g", *sources, "-o", library], check=True)
        runtime = subprocess.check_output(["g++", "-print-file-name=libtsan.so"], text=True).strip()
        environment = os.environ | dict(LD_PRELOAD=runtime, TSAN_OPTIONS="exitcode=66 halt_on_error=1")
        command = ["setarch", "-R", sys.executable, __file__, library]  # ThreadSanitizer needs known addresses
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode not in (0, 66):
        raise RuntimeError(f"the kernels did not run under ThreadSanitizer: {result.stderr[-2000:]}")
    places = re.findall(r"#\d+ .*/(\w+\.cuh:\d+)", result.stderr)
    return " ".join(places) or result.stderr if result.returncode else ""


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(run(sys.argv[1]))
    found = find(ROOT / "kernels")
    print(found or "no race")
    sys.exit(bool(found))
