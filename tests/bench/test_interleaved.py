"""Candidates take rounds in turn, each in its own process, and one that fails does not stop the others."""

import signal
import subprocess
import sys
from functools import partial
from itertools import cycle
from types import SimpleNamespace

import bench_candidates
import psutil
import pytest

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
    found = run_interleaved(candidates, STEPS, rounds=3, threads=1)
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
    peaks = [row["memory_gb"] * 1e3 / 1.048576 for rows in found.values() for row in rows.values()]
    assert peaks == pytest.approx([400, 100, 40, 10], abs=25)


def test_restarts_share_the_rounds_and_the_order_alternates(monkeypatch):
    calls, names = [], cycle("ab")

    class Pool:
        """A pool that notes its calls only."""

        def __init__(self, *_, **__):
            self.name = next(names)
            calls.append(".")

        __enter__, __exit__ = lambda self: self, lambda *_: None

        def submit(self, function, *args):
            calls.append(self.name * (function is interleaved._measure))
            return SimpleNamespace(result=lambda: (1.0, 2.0))

    monkeypatch.setattr(interleaved, "_worker", Pool)
    monkeypatch.setattr(interleaved, "wait", list)
    found = run_interleaved(dict(a=dict, b=dict), ["first"], rounds=5, threads=1, restarts=2)
    assert found["first"]["a"] == dict(ms=[1.0] * 5, memory_gb=2.0, problem=None)
    assert "".join(calls) == "..abbaab..abba"


def test_a_process_ends_with_the_one_that_made_it():
    code = "from vilonghorn.bench.interleaved import _worker; import os, time; p = _worker(1); "
    code += "print(p.submit(os.getpid).result(), flush=True); time.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
    assert psutil.wait_procs([worker], timeout=60)[1] == []
