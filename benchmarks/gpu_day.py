"""What gpu_day.sh runs beside scan.py: `benchmarks/gpu_day.py models|peers|profile --json FILE`.

- models: inference and training steps, eager, compiled block by block, and these captured in a CUDA graph;
- peers: the scan of one direction beside mamba_ssm's kernel (if peers.sh built it), and of the exact rule beside its
  chunks of heads in Triton;
- profile: the kernels of a compiled forward and training step by their own time, with their launches, and for how much
  of the step the GPU is busy.

It needs torch, triton, timm and numpy only.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from candidates import model_steps
from interleaved import STEPS, Row, Steps, run_interleaved
from scan import WORKLOADS, Workload, cuda_graph, function_steps, scan_inputs, scan_steps
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from vilonghorn.data.atomic_files import write_json
from vilonghorn.ops import scan

MODES = ("eager", "compiled", "captured")
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


def print_medians(rows: Mapping[str, Mapping[str, Row]]) -> None:
    """A line for each step and candidate."""
    for step, candidates in rows.items():
        for name, row in candidates.items():
            print(
                step, name, row["problem"] or f"{sorted(row['ms'])[len(row['ms']) // 2]:.3f} ms", sep=", ", flush=True
            )


def mode_steps(mode: str, **cell: object) -> Steps:
    """The steps of a model in one of MODES. Call it in a process of its own: it changes torch's options."""
    steps = model_steps(**cell, compiled=mode != "eager")
    return {name: cuda_graph(step) for name, step in steps.items()} if mode == "captured" else steps


def models(
    names: Sequence[str], modes: Sequence[str], size: int, batch: int, device: str = "cuda"
) -> dict[str, object]:
    """Times training and inference steps, interleaved; the rows by step, model and mode."""
    cell = dict(size=size, batch=batch, precision="bf16", device=device)
    made = {f"{name}, {mode}": partial(mode_steps, mode, model=name, **cell) for name in names for mode in modes}
    rows = run_interleaved(made, list(STEPS.values()), ROUNDS, threads=1, device=device)
    print_medians(rows)
    return rows


def peers() -> dict[str, object]:
    """Times the scans interleaved; the rows by step and candidate."""
    workload = WORKLOADS["cuda"][0]
    made = {
        f"{rule}, cuda": partial(scan_steps, rule, "cuda", workload, "cuda") for rule in ("mamba", "longhorn_exact")
    }
    made["longhorn_exact, triton chunks"] = partial(chunk_steps, workload, "cuda")
    if importlib.util.find_spec("mamba_ssm"):
        made["mamba, mamba_ssm"] = partial(mamba_ssm_steps, workload, "cuda")
    rows = run_interleaved(made, list(STEPS.values()), ROUNDS, threads=1, device="cuda")
    print_medians(rows)
    return rows


def busy_us(intervals: Iterable[tuple[float, float]]) -> float:
    """How long at least one of the intervals (begin, end) lasts."""
    total, last = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, last))
        last = max(last, end)
    return total


def profiled(name: str, size: int, batch: int, device: str = "cuda") -> dict[str, object]:
    """Milliseconds of a step without the profiler and of the busy GPU, launches, and each kernel's; of both steps."""
    steps = model_steps(name, size, batch, "bf16", device, compiled=device == "cuda")
    return {what: profiled_step(f"{name}, {size} px, batch {batch}, {what}", step) for what, step in steps.items()}


def profiled_step(title: str, step: Callable[[], object]) -> dict[str, object]:
    """As `profiled`, of one step."""

    def run() -> float:
        torch.accelerator.synchronize()
        begin = time.perf_counter()
        for _ in range(PROFILED_STEPS):
            step()
        torch.accelerator.synchronize()
        return (time.perf_counter() - begin) * 1e3 / PROFILED_STEPS

    run()
    wall = run()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
    on_gpu = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    busy = busy_us((event.time_range.start, event.time_range.end) for event in on_gpu) / 1e3 / PROFILED_STEPS
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    kernels = {event.key: round(event.self_device_time_total / 1e3 / PROFILED_STEPS, 3) for event in events}
    launches = len(on_gpu) / PROFILED_STEPS
    print(f"{title}: {wall:.3f} ms, {launches:.0f} launches, the GPU is busy {busy / wall:.0%} of it")
    for kernel, ms in list(kernels.items())[:12]:
        print(f"{ms:8.3f} ms  {kernel}")
    return dict(step_ms=round(wall, 3), busy_ms=round(busy, 3), launches=launches, kernels=kernels)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one of the three; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("models", "peers", "profile"))
    parser.add_argument("--json", type=Path, help="also write the figures to this file, which must not exist")
    names = ["vilonghornv2_tiny", "deit_tiny_patch16_224"]
    parser.add_argument(
        "--models", nargs="+", default=names, help=f"of models and profile (default: {' '.join(names)})"
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="of models (default: all)")
    parser.add_argument("--size", type=int, default=224, help="pixels a side (default: 224)")
    parser.add_argument("--batch", type=int, default=128, help="images (default: 128)")
    args = parser.parse_args(argv)
    if args.json and args.json.exists():
        parser.error(f"--json {args.json}: the file exists and is not replaced; name another one")
    if not torch.cuda.is_available():
        parser.error("torch finds no GPU")
    if args.what == "models":
        found = models(args.models, args.modes, args.size, args.batch)
    elif args.what == "peers":
        found = peers()
    else:
        found = {name: profiled(name, args.size, args.batch) for name in args.models}
    if args.json:
        date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        machine = dict(gpu=torch.cuda.get_device_name(), torch=torch.__version__, triton=version("triton"))
        write_json(args.json, dict(command=sys.argv if argv is None else argv, date=date, machine=machine) | found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
