"""Tasks prepare side by side and are measured one at a time; one that fails, crashes or hangs is named."""

import math
import multiprocessing
import os
import time
from dataclasses import dataclass

import pytest

from vilonghorn.bench import tasks as bench_tasks
from vilonghorn.bench.device import CopyTask
from vilonghorn.bench.tasks import Outcome, run


@dataclass
class Failing:
    title: str = "failing"
    seconds: float = 0

    def prepare(self):
        raise ValueError("nothing to do")


class Crashing:
    """Takes its process along as soon as it arrives there."""

    title, seconds = "crashing", 0

    def __reduce__(self):
        return os._exit, (7,)


class Hanging:
    title, seconds = "hanging", 0

    def __reduce__(self):
        return time.sleep, (600,)


def test_in_one_process_a_failure_leaves_the_others():
    outcomes = list(run([Failing(), CopyTask("cpu", 10)], jobs=1, deadline=math.inf, limit=1))
    assert outcomes[0].problem.startswith("ValueError: nothing to do (test_bench_tasks.py:")
    assert not outcomes[0].late and outcomes[1].problem is None and len(outcomes[1].rows) == 1


@pytest.mark.parametrize("jobs", [1, 2])
def test_nothing_begins_after_the_deadline(jobs):
    task = CopyTask("cpu", 10)
    assert (
        list(run([task, task], jobs=jobs, deadline=time.monotonic(), limit=1))
        == [Outcome(task, [], "not begun in the time there was", late=True)] * 2
    )


def test_in_processes_a_crash_leaves_the_others():
    crashing, copy = run([Crashing(), CopyTask("cpu", 10)], jobs=2, deadline=time.monotonic() + 300, limit=120)
    assert crashing.problem == "its process ended with exit code 7" and not crashing.late
    assert copy.problem is None and copy.rows[0]["bytes"] == 40


def test_in_processes_a_hang_is_stopped():
    began = time.monotonic()
    [hanging] = run([Hanging()], jobs=2, deadline=began + 300, limit=1)
    assert hanging.late and hanging.problem == "not ready in the time there was"
    assert time.monotonic() - began < 60


def test_a_child_says_why_it_failed():
    ours, theirs = multiprocessing.Pipe()
    ours.send("whatever ends the wait")
    bench_tasks._serve(theirs, Failing())
    rows, problem = ours.recv()
    assert rows == [] and "nothing to do" in problem
