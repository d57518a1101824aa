"""Every Triton kernel compiles without a GPU, by the installed version of Triton, and some for each kind of GPU.

`python tests/helpers/compiled_triton.py` compiles all of them for all GPUs.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.backends.nvidia")
from vilonghorn.ops.backends import triton  # noqa: E402

SCRIPT = Path(__file__).parents[2] / "helpers" / "compiled_triton.py"
# All scans, or a rule and heads in a dtype, by their numbers in SCANS of the script.
TARGETS = ("sm_90", "sm_80:1,3", "sm_120:2,4", "gfx942:0,3")
# Of NVIDIA's kernels, by name and dtype: the most instructions of their longest loop, and the most stack, bytes. Triton
# 3.6 and 3.8 stay within them, and what was compiled with 3.9.
LIMITS = {
    ("scan_forward", "bfloat16"): (400, 0),
    ("scan_backward", "bfloat16"): (3700, 112),
    ("chunks_forward", "bfloat16"): (1200, 0),
    ("chunks_backward", "bfloat16"): (3000, 384),
    ("sum_shares", "bfloat16"): (200, 0),
    ("sum_shares", "float32"): (200, 0),
    ("chunks_forward", "float32"): (2600, 0),
    ("chunks_backward", "float32"): (5300, 400),
}


def test_every_kernel_compiles_and_spills_little(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= dict(PYTHONPATH=os.pathsep.join(path for path in sys.path if path), TRITON_CACHE_DIR=str(tmp_path))
    done = subprocess.run([sys.executable, str(SCRIPT), *TARGETS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 3 * (5 + 2 + 2 + 2)  # forward, backward, sums
    for row in rows:
        loop, stack = LIMITS[row["name"], row["dtype"]]
        assert row.get("loop", 0) <= loop and row.get("stack", 0) <= stack and not row.get("local"), row


def test_no_tuple_of_a_shape_has_a_field_of_the_configuration():
    """Triton 3.6 stops at `tl.zeros((CONFIG.CHUNK, 1), ...)`; an annotated tl.constexpr works in every version."""
    folder = Path(triton.__file__).parent
    for file in folder.glob("*.py"):
        assert not re.findall(r"tl\.(?:zeros|full)\(\([^)]*CONFIG", file.read_text(encoding="utf-8")), file
