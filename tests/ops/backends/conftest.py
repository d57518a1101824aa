"""The CUDA library without a GPU: its own source, compiled for the emulator in `kernels/`."""

import ctypes
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from vilonghorn.ops.backends import cuda

KERNELS = Path(os.environ.get("VILONGHORN_KERNELS", Path(__file__).parents[3] / "kernels")) / "cuda"
FLAGS = ["-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-U_FORTIFY_SOURCE", "-DVILONGHORN_EMULATED"]


@pytest.fixture(scope="session")
def emulator_path(tmp_path_factory):
    """The compiled emulator, which all processes of a run of pytest share."""
    if "VILONGHORN_EMULATOR" in os.environ:
        return Path(os.environ["VILONGHORN_EMULATOR"])
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("the emulator needs a C++ compiler (g++ or clang++)")
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    path = folder / "libvilonghorn_emulated.so"
    if not path.exists():
        part = folder / f"emulator-{os.getpid()}.so"
        # The emulator has one state, so all kernels are one translation unit.
        *included, source = map(str, sorted(KERNELS.glob("*.cu")))
        sources = [*(f"-include{path}" for path in included), "-x", "c++", source]
        subprocess.run([compiler, *FLAGS, *sources, "-o", str(part)], check=True)
        part.replace(path)
    return path


@pytest.fixture(scope="session")
def emulated_library(emulator_path):
    return cuda.declare(ctypes.CDLL(str(emulator_path)))


@pytest.fixture
def emulator(emulated_library, monkeypatch):
    """The emulator in the place of the CUDA library, and NaN in all new memory. Its orders are random.

    A failure shows the line with the seed: VILONGHORN_EMULATOR_SEED=N repeats the orders.
    """
    monkeypatch.setattr(cuda, "_open", lambda: (emulated_library, None))
    monkeypatch.setattr(cuda, "unavailable", lambda device_type, dtype=None: None)
    monkeypatch.setattr(cuda, "_call", lambda function, device, *structs: function(*structs, 0, None))
    seed = int(os.environ.get("VILONGHORN_EMULATOR_SEED") or random.randrange(2**16))
    print(f"VILONGHORN_EMULATOR_SEED={seed}")
    emulated_library.vl_emulator_seed(seed)
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield emulated_library
    torch.use_deterministic_algorithms(False)
