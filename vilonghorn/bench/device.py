"""How long calls take: CUDA events and graphs on a GPU, the clock on a CPU; and how fast a device copies memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

SECONDS = 0.3  # of samples that a figure rests on
LEAST, MOST = 5, 200  # samples


def call_times(function: Callable[[], object], device: str, seconds: float = SECONDS) -> list[float]:
    """Milliseconds of each call, one after another without a pause, warmed up."""
    sample = _sample_cuda if device == "cuda" else _sample_cpu
    sample(function, 2)  # warm up: pages, caches, lazy initialisation
    estimate = statistics.median(sample(function, 3))
    return sample(function, min(MOST, max(LEAST, round(seconds * 1e3 / max(estimate, 1e-3)))))


def _sample_cuda(function: Callable[[], object], count: int) -> list[float]:
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for start, end in pairs:
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def _sample_cpu(function: Callable[[], object], count: int) -> list[float]:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        function()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def capture(calls: Sequence[Callable[[], Any]]) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
    """All calls in one CUDA graph, and the results that its replay writes to. They run once before, to warm up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call() for call in calls]
    return graph, results


def device_times(calls: Sequence[Callable[[], None]], device: str) -> list[float]:
    """Milliseconds a call, without what launching from Python costs.

    Args:
        calls: the same work on different data, together larger than the cache; a sample is all of them in turn, on a
            GPU as one replay of a graph. They return nothing, so that one may reuse the memory of another.
        device: "cuda" or "cpu".
    """
    everything = capture(calls)[0].replay if device == "cuda" else lambda: [call() for call in calls]
    return [sample / len(calls) for sample in call_times(everything, device)]


def cache_bytes(device: str) -> int:
    """Size of a GPU's last cache; 0 elsewhere, where it is not asked for."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device == "cuda" else 0


class CopyTask:
    """Measures a copy within device memory: the rate that floors are reckoned with."""

    title, seconds = "copy", 1

    def __init__(self, device: str, elements: int = 2**29):
        self.device, self.elements = device, elements

    def prepare(self) -> None:
        self.source = torch.empty(self.elements, dtype=torch.bfloat16, device=self.device).normal_()
        self.target = torch.empty_like(self.source)

    def measure(self) -> list[dict[str, float]]:
        """Bytes read and bytes written, per second."""
        times = call_times(lambda: self.target.copy_(self.source), self.device)
        moved = 2 * self.source.numel() * self.source.element_size()
        return [dict(bytes=moved, median_ms=statistics.median(times), gb_per_s=moved / statistics.median(times) / 1e6)]
