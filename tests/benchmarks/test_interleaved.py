"""Candidates take rounds in turn, each in its own process, and one that fails does not stop the others."""

import os
import subprocess
import sys
from functools import partial
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import bench_candidates
import interleaved
import psutil
import pytest
from interleaved import peak_bytes, run_interleaved

STEPS = ["first", "second"]
PARENT = """
import os, signal
from interleaved import _worker

if __name__ == "__main__":
    with _worker(1) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        signal.pause()
"""


def test_times_and_memory_are_of_each_step_and_failures_leave_the_other_steps_and_candidates():
    candidates = dict(
        right=partial(bench_candidates.allocating, 0.03, 400),
        no_setup=partial(bench_candidates.failing, ()),
        no_second=partial(bench_candidates.failing, ("second",)),
        crashing=bench_candidates.crashing,
    )
    found = run_interleaved(candidates, STEPS, rounds=2, threads=1)
    assert [list(rows) for rows in found.values()] == [list(candidates)] * 2
    right = found["first"]["right"]
    assert len(right["ms"]) == 2 and min(right["ms"]) >= 30 and right["problem"] is None
    assert len(found["second"]["right"]["ms"]) == len(found["first"]["no_second"]["ms"]) == 2
    if peak_bytes() is not None:  # the system measures it
        assert [found[step]["right"]["memory_gb"] * 1e9 / 2**20 for step in STEPS] == pytest.approx([400, 40], abs=25)
    problems = {name: row["problem"] for name, row in found["second"].items()}
    assert problems["no_setup"] == problems["no_second"] == "ValueError: nothing left to do"
    assert problems["crashing"].startswith("BrokenProcessPool")
    assert all(found["second"][name]["ms"] is None for name in problems if name != "right")
    assert not [child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())]


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


def test_a_process_ends_with_the_one_that_made_it(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = os.environ | {"PYTHONPATH": str(Path(interleaved.__file__).parent)}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    assert psutil.wait_procs([worker], timeout=60)[1] == []
