"""Where the time of one training step goes: operators by their own time, as torch's profiler has it."""

from __future__ import annotations

from typing import Any

from torch.profiler import ProfilerActivity, profile

from .cpu import STEPS, model_steps
from .model import kernels


def profile_model(name: str, batch: int, size: int, steps: int = 3) -> dict[str, Any]:
    """Profiles forward and backward of a model on the CPU.

    Args:
        name: registered with timm.
        batch: images.
        size: of an image, pixels.
        steps: that are profiled, after one to warm up.

    Returns:
        "model", "batch", "size", "ms" of a step, and "ops": "op", "calls" and "ms" a step, the longest first.
    """
    step = model_steps(name, batch, size)[STEPS[True]]
    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            step()
    ops = [
        dict(op=row["kernel"], calls=row["calls"], ms=row["us"] / 1e3)
        for row in kernels(profiler.key_averages(), "cpu", steps)
    ]
    return dict(model=name, batch=batch, size=size, ms=sum(op["ms"] for op in ops), ops=ops)


def shares(found: dict[str, Any], most: int = 10) -> list[tuple[str, float, float, float]]:
    """The `most` expensive operators and the rest together: name, calls and milliseconds a step, share."""
    ops = found["ops"]
    rows = [(op["op"], op["calls"], op["ms"], op["ms"] / found["ms"]) for op in ops[:most]]
    if rest := ops[most:]:
        ms = sum(op["ms"] for op in rest)
        rows.append((f"{len(rest)} others", sum(op["calls"] for op in rest), ms, ms / found["ms"]))
    return rows


def report_profile(found: dict[str, Any]) -> None:
    """Prints the table."""
    what = f"{found['model']}, forward + backward, batch {found['batch']}, {found['size']} px"
    print(f"\n{what}: {found['ms']:.1f} ms a step under the profiler")
    print(f"  {'ms':>9}{'share':>8}{'calls':>8}   operator, by its own time")
    for name, calls, ms, share in shares(found):
        print(f"  {ms:9.1f}{share:8.1%}{calls:8.1f}   {name}")
