"""Contenders that take turns, each in a process of its own: time side by side, and the peak of memory of each alone.

Whatever disturbs the machine disturbs all contenders of a round; one that fails, crashes or runs out of memory is
named, and the others go on. What the contenders do is their own affair.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from .tasks import describe

Steps = Mapping[str, Callable[[], object]]  # what a contender can be asked to do, by name
SAMPLE_SECONDS = 0.02  # short steps are repeated until a sample takes this long
LEAST_ROUNDS = 3  # whatever they take
PATIENCE_SECONDS = 600  # for one answer
PAUSE_SECONDS = 0.005  # between turns: threads of the last contender's pool may still be spinning


class Race:
    """Processes with one contender each; a context manager, which ends them.

    Args:
        contenders: what makes a contender's steps, by its name; it is called in the contender's own process, and must
            be picklable.
        threads: of torch, in each process.
    """

    def __init__(self, contenders: Mapping[str, Callable[[], Steps]], threads: int):
        self._contenders, self._threads = contenders, threads
        self._runners: dict[str, _Runner] = {}
        self.problems: dict[str, str] = {}
        self._begin(contenders)

    def __enter__(self) -> Race:
        return self

    def __exit__(self, *_: object) -> None:
        for runner in self._runners.values():
            runner.stop()
        self._runners.clear()

    def run(self, step: str, rounds: int, seconds: float = math.inf, lives: int = 1) -> dict[str, dict[str, Any]]:
        """Times one step of every contender.

        Args:
            step: its name; contenders that do not have it are left out.
            rounds: samples of each contender at most.
            seconds: no more rounds are begun than these are likely to suffice for, but never fewer than LEAST_ROUNDS. A
                process's first calls, which are not timed, come on top.
            lives: processes of each contender, one after the other, that share the rounds. Where the memory of a process
                has come to lie can slow it down by a fifth from its beginning to its end.

        Returns:
            By contender: "ms", milliseconds a call, a sample a round; "memory_gb", the most that its process has held
            more than before the contender was made, None where the system does not tell; and "problem", which is None
            where there is nothing to complain about. A problem has no figures.
        """
        warm = self._warm_up(step)
        repeats = {name: max(1, round(SAMPLE_SECONDS * 1e3 / ms)) for name, ms in warm.items()}
        once = sum(repeats[name] * ms / 1e3 for name, ms in warm.items())
        affordable = int(min(rounds, seconds / max(once, 1e-9)))
        rounds = min(rounds, max(LEAST_ROUNDS, affordable))
        answers: dict[str, list[dict[str, float]]] = {name: [] for name in warm}
        for i in range(rounds):
            if i * lives // rounds != max(i - 1, 0) * lives // rounds:
                self._begin(list(self._runners))
                warm = self._warm_up(step)
            for name in list(warm)[:: 1 if i % 2 == 0 else -1]:
                time.sleep(PAUSE_SECONDS)
                answer = self._ask(name, (step, repeats[name]))
                if answer:
                    answers[name].append(answer)
                else:
                    del warm[name]
        results = {name: _figures(answers[name]) for name in warm}
        return results | {name: dict(ms=None, memory_gb=None, problem=text) for name, text in self.problems.items()}

    def _begin(self, names: Iterable[str]) -> None:
        """Starts those contenders, each in a new process; the processes that there are end."""
        self.__exit__()
        try:
            for name in names:
                self._runners[name] = _Runner(self._contenders[name], self._threads)
            for name in names:  # all start at once, none is timed before the last is ready
                self._ask(name, None)
        except BaseException:
            self.__exit__()
            raise

    def _warm_up(self, step: str) -> dict[str, float]:
        """Milliseconds of a first call (pages, caches, lazy initialisation), or of a second one where that is cheap, of each
        contender that has the step."""
        answers = {}
        for name in list(self._runners):
            answer = self._ask(name, (step, 1))
            if answer and answer["ms"] < 250:
                answer = self._ask(name, (step, 1))
            if answer:
                answers[name] = answer["ms"]
        return answers

    def _ask(self, name: str, order: tuple[str, int] | None) -> dict[str, Any] | None:
        """A runner's answer; None where it has no such step, or has failed, which is then noted."""
        answer = self._runners[name].ask(order)
        if isinstance(answer, str):
            self.problems[name] = answer
            self._runners.pop(name).stop()
            return None
        return answer


def _figures(answers: list[dict[str, float]]) -> dict[str, Any]:
    peaks = [answer["memory_gb"] for answer in answers]
    return dict(ms=[answer["ms"] for answer in answers], memory_gb=None if None in peaks else max(peaks), problem=None)


class _Runner:
    """The parent's side of one process."""

    def __init__(self, make: Callable[[], Steps], threads: int):
        context = _context()
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, make, threads), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, order: tuple[str, int] | None) -> dict[str, Any] | str | None:
        """Sends an order, if any, and returns figures, a problem in words, or None where there is no such step."""
        try:
            if order is not None:
                self.pipe.send(order)
            if not self.pipe.poll(PATIENCE_SECONDS):
                return f"no answer within {PATIENCE_SECONDS} s"
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            return f"its process ended with exit code {code}" + (" (killed: out of memory?)" if code == -9 else "")

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _context() -> Any:
    """Processes begin as copies of one that has imported everything and run nothing, or else, slowly, from nothing."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vilonghorn.bench.cpu"])
    return context


def _serve(pipe: Connection, make: Callable[[], Steps], threads: int) -> None:
    """The child's side: make the contender, then run what is ordered until there is nobody to order."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupted parent ends its children itself
    try:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        torch.nn.Linear(8, 8)(torch.ones(8, 8)).sum().backward()  # what torch loads late is nobody's memory
        torch.empty(
            7 << 20
        )  # 28 MiB, freed: malloc keeps pages from now on, as where a model of some size has been trained
        before, asked = resident_bytes("VmRSS"), None
        steps = make()
        pipe.send({})
        while True:
            step, repeats = pipe.recv()
            if step not in steps:
                pipe.send(None)
                continue
            if step != asked:
                asked = step
                gc.collect()
                reset_peak()
            if repeats > 1:
                steps[
                    step
                ]()  # in caches that the last contender has filled: a long step makes up for it, a short one does not
            began = time.perf_counter()
            for _ in range(repeats):
                steps[step]()
            ms = (time.perf_counter() - began) * 1e3 / repeats
            peak = resident_bytes("VmHWM")
            pipe.send(dict(ms=ms, memory_gb=None if before is None else (peak - before) / 1e9))
    except EOFError:
        return  # there is nobody left to order
    except Exception as error:
        pipe.send(describe(error))


def resident_bytes(field: str) -> int | None:
    """This process's memory: "VmRSS" as it is, "VmHWM" at its peak; None where Linux is not there to tell."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    found = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(found[field].split()[0]) * 1024


def reset_peak() -> None:
    """Lets the peak begin anew, where there is one."""
    control = Path("/proc/self/clear_refs")
    if control.exists():
        control.write_text("5")
