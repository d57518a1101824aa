"""Candidates take rounds in turn, each in its own process, and one that fails does not stop the others."""

import time
from functools import partial
from itertools import cycle
from types import SimpleNamespace

import bench_candidates
import psutil
import pytest
import torch

from vilonghorn.bench import interleaved
from vilonghorn.bench.interleaved import peak_bytes, run_interleaved

STEPS = ["first", "second"]


def test_a_step_that_fails_leaves_the_other_steps_and_candidates():
    candidates = dict(
        right=partial(bench_candidates.sleeping, 0.03),
        no_setup=partial(bench_candidates.failing, ()),
        no_second=partial(bench_candidates.failing, ("second",)),
        crashing=bench_candidates.crashing,
    )
    found = run_interleaved(candidates, STEPS, rounds=3, threads=1, restarts=2)
    assert [list(rows) for rows in found.values()] == [list(candidates)] * 2
    right = found["first"]["right"]
    assert len(right["ms"]) == 3 and min(right["ms"]) >= 30 and right["problem"] is None
    assert len(found["second"]["right"]["ms"]) == len(found["first"]["no_second"]["ms"]) == 3
    problems = {name: row["problem"] for name, row in found["second"].items()}
    assert problems["no_setup"] == problems["no_second"] == "ValueError: nothing left to do"
    assert problems["crashing"].startswith("BrokenProcessPool")
    assert all(found["second"][name]["ms"] is None for name in problems if name != "right")
    assert not [child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())]


@pytest.mark.skipif(peak_bytes() is None, reason="the system does not measure the peak of memory")
def test_memory_is_the_peak_of_each_step_alone():
    candidates = dict(large=partial(bench_candidates.allocating, 400), small=partial(bench_candidates.allocating, 100))
    found = run_interleaved(candidates, STEPS, rounds=1, threads=1)
    peaks = {
        (step, name): row["memory_gb"] * 1e3 / 1.048576 for step, rows in found.items() for name, row in rows.items()
    }
    expected = {("first", "large"): 400, ("first", "small"): 100, ("second", "large"): 40, ("second", "small"): 10}
    assert peaks == pytest.approx(expected, abs=25)


class Pool:
    """A pool that only notes its calls, as (candidate, function)."""

    def __init__(self, name, calls):
        self.name, self.calls = name, calls
        calls.append((name, "start"))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.calls.append((self.name, "end"))

    def submit(self, function, *args):
        self.calls.append((self.name, args[0]))
        return SimpleNamespace(result=lambda: (1.0, 2.0) if args[0] == "measure" else None)


def test_restarts_share_the_rounds_and_the_order_alternates(monkeypatch):
    calls, names = [], cycle("ab")
    monkeypatch.setattr(interleaved, "worker_pool", lambda workers, threads: Pool(next(names), calls))
    found = run_interleaved(dict(a=dict, b=dict), ["first"], rounds=5, threads=1, restarts=2)
    assert found["first"]["a"] == dict(ms=[1.0] * 5, memory_gb=2.0, problem=None)
    measured = "".join(name if what == "measure" else "." * (what == "start") for name, what in calls)
    assert measured == "..abbaab..abba"
    assert [what for name, what in calls if name == "a"].count("warm_up") == 2


@pytest.mark.parametrize(("seconds", "calls"), [(0.004, 6), (1, 2)])
def test_short_steps_are_repeated_and_each_sample_follows_an_untimed_call(seconds, calls):
    clock = SimpleNamespace(now=0.0, late=0.0)

    def step():
        clock.now += seconds + clock.late
        clock.late = 0.0

    candidate = interleaved._Candidate(lambda: dict(step=step), "cpu", lambda: clock.now)
    candidate.warm_up("step")
    before, clock.late = clock.now, 0.5  # the first call after those of another candidate
    assert candidate.measure()[0] == pytest.approx(seconds * 1e3)
    assert clock.now - before == pytest.approx(seconds * calls + 0.5)


def test_on_a_gpu_events_surround_each_call(monkeypatch):
    clock = SimpleNamespace(now=0.0)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = clock.now
            clock.now += 0.25

        def elapsed_time(self, end):
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    candidate = interleaved._Candidate(dict, "cpu", time.perf_counter)
    candidate.device, candidate.flush, candidate.repeats = "cuda", torch.ones(8), 3
    candidate.call = lambda: setattr(clock, "now", clock.now + 7)
    assert candidate.time() == 7.25 and not candidate.flush.any()
