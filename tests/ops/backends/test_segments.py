"""When a scan is split over time, and into what, by shapes alone; how the kernels do it is in their own tests."""

import pytest
import torch
from oracle import KERNEL_RULES

from vilonghorn.ops.arguments import ScanArguments
from vilonghorn.ops.backends import segments

TRITON = dict(channels=32)  # of a warp
CUDA = dict(channels=64, direction_warps=2)
both = pytest.mark.parametrize("backend", [TRITON, CUDA], ids=["triton", "cuda"])
reductions = pytest.mark.parametrize("reduce", ["none", "mean"])


def arguments(B, L, *, D=384, rule="longhorn", reduce="mean", reverse=(False, True)):
    x, k = torch.empty(len(reverse), B, L, D, device="meta"), torch.empty(len(reverse), B, L, 16, device="meta")
    return ScanArguments(x, x, k, k, None, None, None, None, rule, reverse, reduce)


def count(B, L, *, backend, processors=132, **options):
    return segments.num_segments(arguments(B, L, **options), segments.Device(8 * processors, **backend))


@both
@reductions
@pytest.mark.parametrize("rule", KERNEL_RULES)
@pytest.mark.parametrize("B, L", [(128, 197), (64, 785), (32, 6084), (1, 197), (1, 1), (0, 197), (1, 0)])
def test_a_scan_that_fills_the_machine_or_is_short_is_not_split(B, L, rule, reduce, backend):
    assert count(B, L, rule=rule, reduce=reduce, backend=backend) == 1


@both
@reductions
def test_a_long_sequence_alone_is_split_so_far_as_the_machine_has_room(reduce, backend):
    found = {rule: count(1, 6084, rule=rule, reduce=reduce, backend=backend) for rule in KERNEL_RULES}
    assert found["longhorn"] == found["mamba"] > found["longhorn_exact"] > 1  # exact pays more for its summaries
    counts = [count(1, 6084, reduce=reduce, processors=p, backend=backend) for p in (1, 8, 32, 132)]
    assert counts == sorted(counts) and counts[0] == 1
    assert 6084 // found["longhorn"] >= segments.MIN_STEPS


@pytest.mark.parametrize("length, wanted", [(6084, 64), (197, 3), (16, 2), (9, 2), (8, 4)])
def test_segments_are_whole_chunks_and_cover_the_sequence(length, wanted, monkeypatch):
    monkeypatch.setattr(segments, "num_segments", lambda args, device: wanted)
    span, found = segments.split(arguments(1, length), segments.Device(1, 32), chunk=8)
    assert span % 8 == 0 and found <= wanted
    assert (found - 1) * span < length <= found * span


def test_a_scan_that_is_not_split_has_no_span():
    assert segments.split(arguments(128, 197), segments.Device(1056, 32), chunk=8) == (None, 1)
