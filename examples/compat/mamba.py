"""state-spaces/mamba and Dao-AILab/causal-conv1d: their own tests of the scan and the convolution, on a CPU.

A copy of each test file has "cpu" for "cuda" and tests `vilonghorn.compat` against the references of the checkouts.
Left out are complex numbers, packed sequences, 10,000 repetitions against races, and with --quick the largest sizes.
Needs einops and pytest.

    python examples/compat/mamba.py --source mamba --conv causal-conv1d
"""

import argparse
import importlib
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from common import reference_of

from vilonghorn import compat

LEFT_OUT = "wtype1 or varlen or get_states or race_condition or deterministic"
FILES = ("tests/ops/test_selective_scan.py", "tests/ops/triton/test_selective_state_update.py")
REFERENCES = {  # taken from the checkouts, which `compat` replaces otherwise
    "mamba_ssm.ops.selective_scan_interface": ("selective_scan_ref", "mamba_inner_ref"),
    "mamba_ssm.ops.triton.selective_state_update": ("selective_state_update_ref",),
    "causal_conv1d.causal_conv1d_interface": ("causal_conv1d_ref", "causal_conv1d_update_ref"),
}

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--source", type=Path, required=True, help="folder with a checkout of state-spaces/mamba")
parser.add_argument("--conv", type=Path, required=True, help="folder with a checkout of Dao-AILab/causal-conv1d")
parser.add_argument("--quick", action="store_true", help="without convolutions of 4,128 channels")
args, rest = parser.parse_known_args()

torch.set_num_threads(1)
before = set(sys.modules)
reference_of(args.source, args.conv)
references = {}
for name, members in REFERENCES.items():
    found = importlib.import_module(name)
    references[name] = {member: getattr(found, member) for member in members}
compat.uninstall()
compat.install(replace=True)
for name, members in references.items():
    for member, value in members.items():
        setattr(sys.modules[name], member, value)

with tempfile.TemporaryDirectory() as folder:
    for file in (*(args.source / name for name in FILES), args.conv / "tests" / "test_causal_conv1d.py"):
        text = file.read_text(encoding="utf-8")
        for quote in "'\"":
            text = text.replace(f"{quote}cuda{quote}", f"{quote}cpu{quote}")
        (Path(folder) / file.name).write_text(text, encoding="utf-8")
    left_out = LEFT_OUT + (" or 4128" if args.quick else "")
    sys.exit(pytest.main([*rest, "-q", "-p", "no:cacheprovider", "--no-header", "-k", f"not ({left_out})", folder]))
