"""Into how many segments a scan is split over time, where few images and channels would leave most of a GPU idle.

Both GPU backends split alike. A segment is an affine map of the state that enters it; one kernel finds these maps, all at
once, from a run of the segment from zero and from probes of its linear part; a second one chains them into the state
that each segment starts with; then the scan's own kernels run every segment as if it were a sequence. For the gradient
the same is done against time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..validate import ScanArguments

MAX_SEGMENTS = 64
MIN_SEGMENT = 64  # tokens: below, starting a program costs more than it saves
OVERHEAD = 32  # tokens that a warp could walk through while the two more kernels are launched


class Machine(NamedTuple):
    """What a backend makes of a device."""

    warps: int  # that run at once
    channels: int  # of a warp
    teams: int = 1  # warps that share the directions under "mean"


class Split(NamedTuple):
    """How a scan is split: all segments have `span` tokens, in image order, but the last. None: not at all."""

    span: int | None
    segments: int


def probes(rule: str, states: int) -> int:
    """Runs that find the linear part of a segment: one where every number of a state is scaled by itself."""
    return states if rule == "longhorn_exact" else 1


def split(args: ScanArguments, machine: Machine, chunk: int) -> Split:
    """The split of a scan whose checkpoints lie `chunk` tokens apart, in whole chunks but for the end."""
    length, segments = args.x.shape[2], count(args, machine)
    if segments == 1:
        return Split(None, 1)
    span = -(-length // (segments * chunk)) * chunk
    return Split(span, -(-length // span))


def count(args: ScanArguments, machine: Machine) -> int:
    """Into how many segments a scan is split.

    Time is counted in tokens that a warp walks through, stretched where there are more warps than run at once. A split
    adds the runs over its segments and the chain through them, and has to halve the time all the same. Longhorn's exact
    rule is split less than the others, for it needs N + 1 runs where they need 2. The constants are a model, not measured.

    Args:
        args: the scan; its shapes, rule, flags and reduction count.
        machine: what there is to fill.

    Returns:
        1, for no split, or a power of two up to MAX_SEGMENTS.
    """
    G, B, L, D = args.x.shape
    runs = 1 + probes(args.rule, args.k.shape[-1])
    columns = B * -(-D // machine.channels)  # warps of one direction and segment
    scans, passes = G, 1
    if args.reduce == "mean":
        backwards = sum(args.reverse)
        scans, passes = (2, max(backwards, G - backwards)) if machine.teams == 2 and 0 < backwards < G else (1, G)

    def tokens(count: int) -> float:
        scan = passes * max(1, count * columns * scans / machine.warps)
        if count == 1:
            return L * scan
        return L / count * (scan + max(1, count * columns * G * runs / machine.warps)) + (count - 1) * runs + OVERHEAD

    counts = [1]
    while counts[-1] < MAX_SEGMENTS and L >= 2 * counts[-1] * MIN_SEGMENT:
        counts.append(2 * counts[-1])
    best = min(counts, key=tokens)
    return best if tokens(best) <= tokens(1) / 2 else 1


def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; an emulator or interpreter, on a CPU, has one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
