"""Size of exported files, and CPU seconds to write and to load them: `python benchmarks/export_time.py MODEL...`.

Each file is written and loaded in two fresh processes, on one thread. Prints a table, with both times of each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from vilonghorn.export.attention import RULE
from vilonghorn.export.capture import capture, describe
from vilonghorn.export.formats import FORMATS
from vilonghorn.export.load import load_for_export

KINDS = ("onnx", "pt2")
RUNS = 2


def measure(name: str, kind: str, path: Path, step: str) -> dict[str, Any]:
    """Writes or loads a file; returns the bytes of the file, and the CPU seconds without imports."""
    form = FORMATS[kind]
    if step == "write":
        model = load_for_export(name)
        start = time.process_time()
        has_exact_rule = any(getattr(module, "rule", None) == RULE for module in model.modules())
        scan = "attention" if kind == "onnx" and has_exact_rule else "standard"  # as the command
        form.write(capture(model, form.library is not None, scan=scan), path, describe(model, scan=scan))
    else:
        if kind != "pt2":
            import onnxruntime  # noqa: F401
        start = time.process_time()
        form.load(path, *form.libraries())
    return dict(bytes=path.stat().st_size, seconds=time.process_time() - start)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)  # kind, path, step: in this process
    options = parser.parse_args(argv)
    if options.one:
        kind, path, step = options.one
        print(json.dumps(measure(options.models[0], kind, Path(path), step)))
        return 0
    print("| model | `--to` | MB | write, s | load, s |\n| --- | --- | --- | --- | --- |")
    for name, kind in product(options.models, KINDS):
        found: dict[str, list[float]] = {"write": [], "load": []}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"model{FORMATS[kind].suffix}")
            for step in ["write"] * RUNS + ["load"] * RUNS:
                command = [sys.executable, __file__, name, "--one", kind, path, step]
                done = subprocess.run(
                    command, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True
                )
                row = json.loads(done.stdout.splitlines()[-1])
                found[step].append(row["seconds"])
        times = " | ".join(", ".join(f"{seconds:.2g}" for seconds in found[step]) for step in found)
        print(f"| `{name}` | `{kind}` | {row['bytes'] / 1e6:.1f} | {times} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
