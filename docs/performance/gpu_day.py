"""What gpu_day.sh runs beside scan.py and `vilonghorn bench`: `docs/performance/gpu_day.py peers|profile --json FILE`.

- peers: the scan of one direction beside mamba_ssm's kernel (if peers.sh built it), and of the exact rule beside its
  chunks of heads in Triton;
- profile: the kernels of a compiled training step of `vilonghorn_tiny`, batch 128 and 224 px, by their own time.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from scan import WORKLOADS, Workload, function_steps, scan_inputs, scan_steps
from torch.profiler import ProfilerActivity, profile

from vilonghorn.bench.candidates import model_steps
from vilonghorn.bench.interleaved import STEPS, Steps, run_interleaved
from vilonghorn.data.files import write_json
from vilonghorn.ops import scan

HEADS = 4  # of `vilonghornv2_tiny`, whose channels share dt
ROUNDS, PROFILED_STEPS = 9, 3


def mamba_ssm_steps(workload: Workload, device: str) -> Steps:
    """mamba_ssm's scan of the same inputs, in its layout (B, D, L)."""
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    inputs, dy = scan_inputs("mamba", workload, device)
    names = dict(x="u", dt="delta", k="B", q="C", dt_bias="delta_bias")
    inputs = {names.get(name, name): t if name == "z" else t[0] for name, t in inputs.items()}
    inputs = {name: t.mT.contiguous() if t.ndim == 3 else t for name, t in inputs.items()}
    return function_steps(partial(selective_scan_fn, delta_softplus=True), inputs, dy[0].mT.contiguous())


def chunk_steps(workload: Workload, device: str) -> Steps:
    """The exact rule with one dt for a head, in chunks."""
    inputs, dy = scan_inputs("longhorn_exact", workload, device)
    inputs |= {name: inputs[name][..., :HEADS].contiguous() for name in ("dt", "dt_bias")}
    return function_steps(
        partial(scan, rule="longhorn_exact", backend="triton" if device == "cuda" else None), inputs, dy
    )


def peers() -> dict[str, object]:
    """Times the scans interleaved; the rows by step and candidate."""
    workload = WORKLOADS["cuda"][0]
    made = {
        f"{rule}, cuda": partial(scan_steps, rule, "cuda", workload, "cuda") for rule in ("mamba", "longhorn_exact")
    }
    made["longhorn_exact, triton chunks"] = partial(chunk_steps, workload, "cuda")
    if importlib.util.find_spec("mamba_ssm"):
        made["mamba, mamba_ssm"] = partial(mamba_ssm_steps, workload, "cuda")
    rows = run_interleaved(made, list(STEPS.values()), ROUNDS, threads=1, device="cuda", restarts=3)
    for step, candidates in rows.items():
        for name, row in candidates.items():
            print(step, name, row["problem"] or f"{sorted(row['ms'])[len(row['ms']) // 2]:.3f} ms", sep=", ")
    return rows


def profiled() -> dict[str, object]:
    """Milliseconds of each kernel in a training step."""
    step = model_steps("vilonghorn_tiny", 224, 128, "bf16", "cuda", compiled=True)[STEPS[True]]
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_STEPS):
            step()
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    found = {event.key: round(event.self_device_time_total / 1e3 / PROFILED_STEPS, 3) for event in events}
    for name, ms in list(found.items())[:12]:
        print(f"{ms:8.3f} ms  {name}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one of the two; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("peers", "profile"))
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("torch finds no GPU")
    found = peers() if args.what == "peers" else profiled()
    if args.json:
        write_json(args.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
