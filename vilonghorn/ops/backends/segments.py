"""Splits a scan of the CUDA backend over time into segments, where few sequences would leave most of a GPU idle.

The state after a segment is an affine map of the state before it. One kernel computes the maps of all segments at once:
it runs each segment from a zero state, and from basis states without inputs. A second kernel chains the maps into the
state that each segment starts with. Then the kernels of the scan run every segment as if it were a sequence. Backward
does the same against time.
"""

import functools

import torch

from ..arguments import ScanArguments

CHANNELS = 64  # of a warp: LANES of the backend
RUNS = 2  # that find a segment's map: without inputs, and from a basis state (the rules here have diagonal maps)
MAX_SEGMENTS = 64
MIN_STEPS = 64  # of a segment: a shorter one costs more than it saves
LAUNCH_STEPS = 32  # steps that a warp could run while the two more kernels are launched


def split(args: ScanArguments, warps: int, chunk: int) -> tuple[int, int]:
    """Steps of a segment, a multiple of `chunk`, and number of segments; (0, 1) without a split.

    `warps` run at once on the GPU.
    """
    L, count = args.x.shape[2], num_segments(args, warps)
    if count == 1:
        return 0, 1
    steps = -(-L // (count * chunk)) * chunk
    return steps, -(-L // steps)


def num_segments(args: ScanArguments, warps: int) -> int:
    """Into how many segments to split a scan: 1, for no split, or a power of two up to MAX_SEGMENTS.

    The time of a scan is estimated in steps that a warp runs, stretched where there are more warps than run at once. A
    split adds the runs that find the maps and their chain, and must halve the time nevertheless. The constants are a
    model, not measured.
    """
    G, B, L, D = args.x.shape
    if L < 2 * MIN_STEPS:
        return 1
    columns = B * -(-D // CHANNELS)  # warps of one direction and segment
    parallel, passes = G, 1  # directions at once, and one after the other
    if args.reduce == "mean":
        reverse = sum(args.reverse)
        parallel, passes = (2, max(reverse, G - reverse)) if 0 < reverse < G else (1, G)

    def time(count: int) -> float:
        scan = passes * max(1, count * columns * parallel / warps)
        if count == 1:
            return L * scan
        maps = max(1, count * columns * G * RUNS / warps)
        return L / count * (scan + maps) + (count - 1) * RUNS + LAUNCH_STEPS

    counts = [1]
    while counts[-1] < MAX_SEGMENTS and L >= 2 * counts[-1] * MIN_STEPS:
        counts.append(2 * counts[-1])
    best = min(counts, key=time)
    return best if time(best) <= time(1) / 2 else 1


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU; 1 for an emulator on a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
