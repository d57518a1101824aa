"""The machine and the versions that a run, a benchmark or a study records."""

import os
import platform
import re
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import timm
import torch

from .. import __version__, ops

PACKAGES = ("torch", "torchvision", "timm", "triton", "numpy", "ffcv", "numba", "safetensors")


def processor() -> str:
    """The name of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return name[1].strip() if name else platform.processor()


def machine(device: str = "cpu") -> dict[str, Any]:
    """The machine, the versions and the settings of a benchmark or a study on "cpu" or "cuda"."""
    found = dict(
        cpu=processor(),
        cores=os.cpu_count(),
        load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        threads=torch.get_num_threads(),
        python=platform.python_version(),
        torch=torch.__version__,
        timm=timm.__version__,
        vilonghorn=__version__,
        backends=ops.backends(device),
        omp_wait_policy=os.environ.get("OMP_WAIT_POLICY", "not set"),
    )
    if device == "cuda":
        gpu, peers = torch.cuda.get_device_properties(device), ("triton", "mamba_ssm")
        found |= dict(gpu=gpu.name, multiprocessors=gpu.multi_processor_count, cuda=torch.version.cuda)
        found |= {name: metadata.version(name) if find_spec(name) else "not installed" for name in peers}
    return found


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Versions of Python and packages, device, threads and scan backends."""
    versions = {"vilonghorn": __version__, "python": platform.python_version()}
    versions |= {name: metadata.version(name) if find_spec(name) else None for name in PACKAGES}
    return {
        "versions": versions,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "device_type": device.type,
        "cpu_count": os.cpu_count(),
        "cpu_threads": torch.get_num_threads(),
        "scan_backends": ops.backends(device),
    }
