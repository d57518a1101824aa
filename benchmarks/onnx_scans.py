"""Times both forms of a scan in ONNX files of vilonghornv2_tiny and prints a table.

`python benchmarks/onnx_scans.py [ROUNDS]` in the root of a checkout. Candidates alternate, with one session of
onnxruntime at a time. The table has ratios of the shortest times, and with one thread those of processor time, because
other processes disturb it least.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import onnxruntime
import torch
from page_tables import markdown

from vilonghorn.engine.environment import processor
from vilonghorn.export.attention import SCANS
from vilonghorn.export.capture import capture, describe
from vilonghorn.export.load import load_for_export
from vilonghorn.export.onnx_file import write_onnx
from vilonghorn.export.run_exported import load_onnx

MODEL, CALLS = "vilonghornv2_tiny", 5


def shortest(run: Callable[..., object], images: torch.Tensor, threads: int) -> float:
    """Milliseconds of the fastest of some calls."""
    clock = time.process_time if threads == 1 else time.perf_counter
    times = []
    for _ in range(CALLS + 1):
        start = clock()
        run(images)
        times.append(1e3 * (clock() - start))
    return min(times[1:])


@torch.inference_mode()
def measure(rounds: int) -> None:
    """Measures, and prints the table."""
    model, lines = load_for_export(MODEL), []
    with tempfile.TemporaryDirectory() as folder:
        files = {scan: str(Path(folder, f"{scan}.onnx")) for scan in SCANS}
        for scan, path in files.items():
            write_onnx(capture(model, scan=scan), Path(path), describe(model, scan=scan))
        for side, batch, threads in product((224, 512), (1, 8), (1, 2)):
            torch.set_num_threads(threads)
            images, times = torch.randn(batch, 3, side, side), dict.fromkeys(("eager", *SCANS), float("inf"))
            for name in list(times) * rounds:
                run = load_onnx(files[name]) if name in files else model
                times[name] = min(times[name], shortest(run, images, threads))
            line = dict(px=f"{side}", batch=f"{batch}", threads=f"{threads}", eager=f"{times['eager']:.1f} ms")
            lines.append(line | {f"{scan} to eager": f"{times[scan] / times['eager']:.2f}" for scan in SCANS})
            print(lines[-1], flush=True)
    versions = f"torch {torch.__version__}, onnxruntime {onnxruntime.__version__}"
    made = f"`python benchmarks/onnx_scans.py {rounds}`, {MODEL}, {processor()}, {versions}"
    print(f"{made}:\n\n{markdown(lines)}")


def main() -> None:
    """Reads the number of rounds from the command line, and measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    text = "sessions of each candidate (default: %(default)s)"
    parser.add_argument("rounds", nargs="?", type=int, metavar="ROUNDS", default=5, help=text)
    measure(parser.parse_args().rounds)


if __name__ == "__main__":
    main()
