"""The machine and the versions that a run, a benchmark or a study records."""

import os
import platform
import re
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from .. import __version__, ops
from ..ops.backends import cpu

PACKAGES = ("torchvision", "timm", "triton", "numpy", "ffcv", "numba", "safetensors", "mamba_ssm")


def processor() -> str:
    """The name of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return name[1].strip() if name else platform.processor()


def _version(name: str) -> str | None:
    """The version of a package; None: not installed; "unknown": found on the path, but not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown" if find_spec(name) else None


def machine(device: str = "cpu") -> dict[str, Any]:
    """The machine, the versions and the settings of a run, a benchmark or a study on "cpu" or "cuda"."""
    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    found = {"cpu": processor(), "cores": os.cpu_count(), "load": load, "threads": torch.get_num_threads()}
    found |= {"platform": platform.platform(), "python": platform.python_version(), "vilonghorn": __version__}
    found |= {"torch": str(torch.__version__), **{name: _version(name) for name in PACKAGES}}
    isas = [*cpu.isas()]
    found["instruction_sets"] = isas
    found["chosen"] = (os.environ.get(cpu.ISA_VARIABLE) or isas[-1]) if cpu.unavailable("cpu") is None else None
    found |= {"backends": ops.backends(device), "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "not set")}
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        found |= {"gpu": gpu.name, "multiprocessors": gpu.multi_processor_count, "cuda": torch.version.cuda}
    return found
