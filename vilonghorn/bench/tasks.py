"""Runs the pieces of a benchmark in processes of their own: prepared side by side, measured one at a time.

Compiling takes long and disturbs nobody's figures until the measuring begins; a kernel that crashes or hangs takes only
its own process along. What a piece does is its own affair.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

MEASURE_SECONDS = 60  # no measurement takes longer, unless it hangs


class Task(Protocol):
    """A piece of work that can be sent to another process."""

    title: str
    seconds: float  # that measuring takes, about: they are kept for it out of the time to prepare

    def prepare(self) -> None:
        """Whatever may run beside other tasks."""

    def measure(self) -> list[dict[str, Any]]:
        """Rows of figures, or of verdicts; nothing else runs meanwhile."""


class Outcome(NamedTuple):
    """What came of a task: its rows, or the problem that stands in their place."""

    task: Task
    rows: list[dict[str, Any]]
    problem: str | None = None
    late: bool = False  # the problem is the time limit


def run(tasks: Sequence[Task], *, jobs: int, deadline: float, limit: float) -> Iterator[Outcome]:
    """Prepares and measures tasks, `jobs` at a time.

    Args:
        tasks: in order of importance: the last ones are those that time may not suffice for.
        jobs: processes side by side; 1 runs everything in this process, and cannot stop what hangs.
        deadline: value of `time.monotonic()` after which nothing more begins.
        limit: seconds that a preparation may take.

    Yields:
        One outcome for each task, in order.
    """
    if jobs == 1:
        yield from (_run_here(task) if time.monotonic() < deadline else _late(task, "not begun") for task in tasks)
        return
    for start in range(0, len(tasks), jobs):
        wave = tasks[start : start + jobs]
        until = min(time.monotonic() + limit, deadline - sum(task.seconds for task in wave))
        if time.monotonic() < until:
            yield from _run_wave(wave, until)
        else:
            yield from (_late(task, "not begun") for task in wave)


def _late(task: Task, what: str) -> Outcome:
    return Outcome(task, [], f"{what} in the time there was", late=True)


def _run_here(task: Task) -> Outcome:
    try:
        task.prepare()
        return Outcome(task, task.measure())
    except Exception as error:
        return Outcome(task, [], describe(error))


def _run_wave(tasks: Sequence[Task], until: float) -> Iterator[Outcome]:
    children: list[_Child] = []
    try:
        children.extend(_Child(task) for task in tasks)
        prepared = [child.receive(until, "not ready") for child in children]
        for child, outcome in zip(children, prepared):
            if outcome.late:  # it must not disturb those who are measured
                child.stop()
        for child, outcome in zip(children, prepared):
            if outcome.problem is None:
                outcome = child.measure()
            child.stop()
            yield outcome
    finally:
        for child in children:
            child.stop()


class _Child:
    """A process with one task, and the pipe to it."""

    def __init__(self, task: Task):
        context = multiprocessing.get_context("spawn")  # CUDA does not outlive a fork
        self.task = task
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, task))
        self.process.start()
        theirs.close()

    def measure(self) -> Outcome:
        try:
            self.pipe.send("measure")
        except OSError:
            return Outcome(self.task, [], "its process ended before it was measured")
        return self.receive(time.monotonic() + MEASURE_SECONDS, "not measured")

    def receive(self, until: float, what: str) -> Outcome:
        if not self.pipe.poll(max(0.0, until - time.monotonic())):
            return _late(self.task, what)
        try:
            return Outcome(self.task, *self.pipe.recv())
        except (EOFError, OSError):
            self.process.join()
            return Outcome(self.task, [], f"its process ended with exit code {self.process.exitcode}")

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _serve(pipe: Connection, task: Task) -> None:
    """The child's side: prepare, say so, wait for the word, measure."""
    try:
        task.prepare()
        pipe.send(([],))
        pipe.recv()
        message = (task.measure(),)
    except Exception as error:
        message = ([], describe(error))
    pipe.send(message)
    pipe.recv()  # nothing comes: it is stopped when its answer has arrived


def describe(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]} ({place.filename.rpartition('/')[2]}:{place.lineno})"
