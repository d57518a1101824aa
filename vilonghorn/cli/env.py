"""Prints what a bug report needs: versions, processor, GPU, kernels and why some cannot run, settings."""

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from ..data.threads import available_cpus
from ..engine.environment import machine
from ..ops import backends
from ..ops.backends import cpu, cuda
from ..ops.backends.bindings import open_library
from . import make_parser

VARIABLES = re.compile("VILONGHORN_|OMP_|GOMP_|KMP_|MKL_|CUDA_|TRITON_|PYTHONPATH$|LD_|CXX$|WORLD_SIZE$")


def report() -> dict[str, Any]:
    """All that `vilonghorn env` prints, as plain values by topic."""
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    libraries = {name: open_library(name, "a compiler")[0] for name in (cpu.NAME, cuda.NAME)}
    return machine() | dict(
        usable_cores=available_cpus(),
        gpus=[f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, compute {gpu.major}.{gpu.minor}" for gpu in gpus],
        backends={device: backends(device) for device in ("cpu", "cuda")},
        libraries={name: library and library._name for name, library in libraries.items()},
        package=str(Path(__file__).parents[1]),
        executable=sys.executable,
        variables={name: value for name, value in sorted(os.environ.items()) if VARIABLES.match(name)},
    )


parser = make_parser("env", __doc__, "", "--json > machine.json")
parser.add_argument("--json", action="store_true", help="as JSON (default: as YAML)")


def main(argv: Sequence[str]) -> None:
    """Runs the command."""
    as_json, found = parser.parse_args(argv).json, report()
    print(json.dumps(found, indent=1) if as_json else yaml.safe_dump(found, sort_keys=False, width=1000).strip())
