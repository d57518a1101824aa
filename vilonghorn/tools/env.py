"""What a bug report needs to know of a machine: versions, processor, GPU, kernels, settings. `vilonghorn env`."""

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import timm
import torch
import yaml

import vilonghorn

from ..commands import make_parser
from ..data.threads import available_cpus
from ..engine.report import describe_environment
from ..ops import backends
from ..ops.backends import cpu, cuda
from ..ops.backends.bindings import open_library

VARIABLES = re.compile("VILONGHORN_|OMP_|GOMP_|KMP_|MKL_|CUDA_|TRITON_|PYTHONPATH$|LD_|CXX$|WORLD_SIZE$")


def processor() -> str:
    """The name of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return name[1].strip() if name else platform.processor()


def machine(device: str = "cpu") -> dict[str, object]:
    """The machine, the versions and the settings of a benchmark or a study."""
    found = dict(
        cpu=processor(),
        cores=os.cpu_count(),
        load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        threads=torch.get_num_threads(),
        python=platform.python_version(),
        torch=torch.__version__,
        timm=timm.__version__,
        vilonghorn=vilonghorn.__version__,
        backends=backends(device),
        omp_wait_policy=os.environ.get("OMP_WAIT_POLICY", "not set"),
    )
    if device == "cuda":
        gpu, peers = torch.cuda.get_device_properties(device), ("triton", "mamba_ssm")
        found |= dict(gpu=gpu.name, multiprocessors=gpu.multi_processor_count, cuda=torch.version.cuda)
        found |= {name: metadata.version(name) if find_spec(name) else "not installed" for name in peers}
    return found


def report() -> dict[str, Any]:
    """All that `vilonghorn env` prints, as plain values by topic."""
    levels = [*cpu.isas()]
    libraries = {name: open_library(name, "a compiler")[0] for name in (cpu.NAME, cuda.NAME)}
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return dict(
        versions=describe_environment(torch.device("cpu"))["versions"] | dict(torch=str(torch.__version__)),
        system=f"{platform.platform()} {' '.join(platform.libc_ver())}".strip(),
        processor=dict(
            name=processor(),
            cores=os.cpu_count(),
            usable_cores=available_cpus(),
            torch_threads=torch.get_num_threads(),
            instruction_sets=levels,
            chosen=(os.environ.get(cpu.ISA_VARIABLE) or levels[-1]) if cpu.unavailable("cpu") is None else None,
        ),
        gpus=[f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, compute {gpu.major}.{gpu.minor}" for gpu in gpus],
        cuda_of_torch=torch.version.cuda,
        backends={device: backends(device) for device in ("cpu", "cuda")},
        libraries={name: library and library._name for name, library in libraries.items()},
        vilonghorn=str(Path(vilonghorn.__file__).parent),
        python=sys.executable,
        variables={name: value for name, value in sorted(os.environ.items()) if VARIABLES.match(name)},
    )


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command, also of its completion."""
    about = "Print what a bug report needs: versions, processor, GPU, kernels and why some cannot run, settings."
    parser = make_parser("env", about, "", "--json > machine.json")
    parser.add_argument("--json", action="store_true", help="as JSON (default: as YAML)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0."""
    options = build_parser().parse_args(argv)
    found = report()
    print(json.dumps(found, indent=1) if options.json else yaml.safe_dump(found, sort_keys=False, width=1000).strip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
