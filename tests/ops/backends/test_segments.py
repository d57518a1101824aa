"""When a scan of the CUDA backend is split over time, and into what, by shapes alone."""

import pytest
import torch
from oracle import KERNEL_RULES

from vilonghorn.ops.arguments import ScanArguments
from vilonghorn.ops.backends import segments

reductions = pytest.mark.parametrize("reduce", ["none", "mean"])


def arguments(B, L, *, rule="longhorn", reduce="mean"):
    x, k = (torch.empty(2, B, L, size, device="meta") for size in (384, 16))
    return ScanArguments(x, x, k, k, rule=rule, reverse=(False, True), reduce=reduce)


def count(B, L, processors=132, **options):
    return segments.num_segments(arguments(B, L, **options), 8 * processors)


@reductions
@pytest.mark.parametrize("rule", KERNEL_RULES)
@pytest.mark.parametrize("B, L", [(128, 197), (64, 785), (32, 6084), (1, 197), (1, 1), (0, 197), (1, 0)])
def test_a_scan_that_fills_the_machine_or_is_short_is_not_split(B, L, rule, reduce):
    assert count(B, L, rule=rule, reduce=reduce) == 1
    assert segments.split(arguments(B, L, rule=rule, reduce=reduce), 1056, chunk=8) == (0, 1)


@reductions
def test_a_long_sequence_alone_is_split_so_far_as_the_machine_has_room(reduce):
    found = count(1, 6084, reduce=reduce)
    counts = [count(1, 6084, p, reduce=reduce) for p in (1, 8, 32, 132)]
    assert counts == sorted(counts) and counts[0] == 1
    assert 6084 // found >= segments.MIN_STEPS


@pytest.mark.parametrize("length, wanted", [(6084, 64), (197, 3), (16, 2), (9, 2), (8, 4)])
def test_segments_are_whole_chunks_and_cover_the_sequence(length, wanted, monkeypatch):
    monkeypatch.setattr(segments, "num_segments", lambda args, warps: wanted)
    steps, found = segments.split(arguments(1, length), 1, chunk=8)
    assert steps % 8 == 0 and found <= wanted
    assert (found - 1) * steps < length <= found * steps
