"""Removes each barrier and wait of the CUDA kernels in turn, and says whether the tests in the emulator notice.

python tests/helpers/removed_barriers.py [--races] [FILE:LINE ...]
With --races, ThreadSanitizer (races.py) is asked first, which does not see copies that are not waited for. Ends with 1
if a barrier is not noticed.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import races

ROOT = Path(__file__).parents[2]
TESTS = [f"tests/ops/backends/test_{name}_emulated.py" for name in ("conv", "cuda", "mamba_inner", "norm")]
SYNC = re.compile(r"(sync_warp\(\)|sync_block\(\)|sync_teams\([^;]*\)|wait_for_copies\(\));")


def failed_test(kernels: Path) -> str:
    """The first test that fails with these kernels, or an empty string."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-qx",
        "-p",
        "no:cacheprovider",
        "-k",
        "oracle or order or float64",
        *TESTS,
    ]
    environment = os.environ | {"VILONGHORN_KERNELS": str(kernels)}
    output = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True).stdout
    return next((line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))), "")


def race(kernels: Path) -> str:
    """The races of these kernels, or that their threads wait forever, or the test that fails, or an empty string."""
    try:
        return races.find(kernels) or failed_test(kernels)
    except RuntimeError as error:
        return str(error).splitlines()[-1]


def main(wanted: list[str]) -> int:
    """Prints a line for each barrier, or for those given."""
    notices, missed = race if "--races" in wanted else failed_test, 0
    wanted = [site for site in wanted if site != "--races"]
    for source in sorted((ROOT / "kernels/cuda").glob("*.cuh")):
        text = source.read_text()
        for match in SYNC.finditer(text):
            site = f"{source.name}:{text.count(chr(10), 0, match.start()) + 1}"
            if source.name == "device.cuh" or (wanted and site not in wanted):
                continue
            with tempfile.TemporaryDirectory() as folder:
                kernels = Path(folder) / "kernels"
                shutil.copytree(ROOT / "kernels", kernels)
                changed = f"{text[: match.start()]}(void)0;{text[match.end() :]}"
                (kernels / "cuda" / source.name).write_text(changed)
                noticed = notices(kernels)
                print(site, match[1], noticed[:110] or "NOT NOTICED", sep="  ", flush=True)
                missed += not noticed
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
