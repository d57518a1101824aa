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
# Of NVIDIA's kernels, by name and dtype: the most instructions of their longest loop, or of all where there is none,
# and the most stack, bytes. Triton 3.6, 3.8 and 3.9 stay within them, on sm_100, too.
LIMITS = {
    ("scan_forward", "bfloat16"): (400, 0),
    ("scan_backward", "bfloat16"): (3700, 112),
    ("sum_shares", "bfloat16"): (200, 0),
    ("sum_shares", "float32"): (200, 0),
    ("chunks_prepare", "bfloat16"): (850, 0),
    ("chunks_prepare", "float32"): (2000, 0),
    ("chunks_forward_maps", "bfloat16"): (360, 0),
    ("chunks_forward_maps", "float32"): (740, 0),
    ("chunks_forward", "bfloat16"): (720, 0),
    ("chunks_forward", "float32"): (1200, 0),
    ("chunks_backward_maps", "bfloat16"): (780, 0),
    ("chunks_backward_maps", "float32"): (1280, 0),
    ("chunks_backward", "bfloat16"): (2350, 384),
    ("chunks_backward", "float32"): (4200, 640),
}


def test_every_kernel_compiles_and_spills_little(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= dict(PYTHONPATH=os.pathsep.join(path for path in sys.path if path), TRITON_CACHE_DIR=str(tmp_path))
    done = subprocess.run([sys.executable, str(SCRIPT), *TARGETS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 3 * (3 + 1 + 1 + 1) + 6 * (2 + 1 + 1 + 1)  # forward, backward, sums; with heads their maps, too
    for row in rows:
        loop, stack = LIMITS[row["name"], row["dtype"]]
        assert row.get("loop", 0) <= loop and row.get("stack", 0) <= stack and not row.get("local"), row


def test_no_tuple_of_a_shape_has_a_field_of_the_configuration():
    """Triton 3.6 stops at `tl.zeros((CONFIG.CHUNK, 1), ...)`; an annotated tl.constexpr works in every version."""
    folder = Path(triton.__file__).parent
    for file in folder.glob("*.py"):
        assert not re.findall(r"tl\.(?:zeros|full)\(\([^)]*CONFIG", file.read_text(encoding="utf-8")), file
