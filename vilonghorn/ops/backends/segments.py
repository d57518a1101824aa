"""Splits a scan over time into segments, where few images and channels would leave most of a GPU idle.

Both GPU backends split alike. The state after a segment is an affine map of the state before it. One kernel computes
the maps of all segments at once: it runs each segment from a zero state, and from basis states without inputs. A second
kernel chains the maps into the state that each segment starts with. Then the kernels of the scan run every segment as
if it were a sequence. Backward does the same against time.
"""

from typing import NamedTuple

import torch

from ..arguments import ScanArguments
from ..rules import RULES

MAX_SEGMENTS = 64
MIN_STEPS = 64  # of a segment: a shorter one costs more than it saves
LAUNCH_STEPS = 32  # steps that a warp could run while the two more kernels are launched


class Device(NamedTuple):
    """A GPU as a backend uses it."""

    warps: int  # that run at once
    channels: int  # of a warp
    direction_warps: int = 1  # warps that share the directions with reduce="mean"


class Segments(NamedTuple):
    """Segments of `steps` steps each, in image order; the last may be shorter. `steps` is None without a split."""

    steps: int | None
    count: int


def basis_runs(rule: str, states: int) -> int:
    """Number of runs that find the linear part of a segment's map: one if it is diagonal."""
    return states if RULES[rule].couples_states else 1


def split(args: ScanArguments, device: Device, chunk: int) -> Segments:
    """The segments of a scan; their steps are a multiple of `chunk`, the steps between saved states."""
    L, count = args.x.shape[2], num_segments(args, device)
    if count == 1:
        return Segments(None, 1)
    steps = -(-L // (count * chunk)) * chunk
    return Segments(steps, -(-L // steps))


def num_segments(args: ScanArguments, device: Device) -> int:
    """Into how many segments to split a scan: 1, for no split, or a power of two up to MAX_SEGMENTS.

    The time of a scan is estimated in steps that a warp runs, stretched where there are more warps than run at once. A
    split adds the runs that find the maps and their chain, and must halve the time nevertheless. The constants are a
    model, not measured.
    """
    G, B, L, D = args.x.shape
    runs = 1 + basis_runs(args.rule, args.k.shape[-1])
    columns = B * -(-D // device.channels)  # warps of one direction and segment
    parallel, passes = G, 1  # directions at once, and one after the other
    if args.reduce == "mean":
        reverse = sum(args.reverse)
        both = device.direction_warps == 2 and 0 < reverse < G
        parallel, passes = (2, max(reverse, G - reverse)) if both else (1, G)

    def time(count: int) -> float:
        scan = passes * max(1, count * columns * parallel / device.warps)
        if count == 1:
            return L * scan
        maps = max(1, count * columns * G * runs / device.warps)
        return L / count * (scan + maps) + (count - 1) * runs + LAUNCH_STEPS

    counts = [1]
    while counts[-1] < MAX_SEGMENTS and L >= 2 * counts[-1] * MIN_STEPS:
        counts.append(2 * counts[-1])
    best = min(counts, key=time)
    return best if time(best) <= time(1) / 2 else 1


def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU; 1 for an emulator or interpreter on a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
