"""Processes that are killed, stopped or short of disk take the others with them, and what they did is not lost."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from kill_run import EVERY, job_options, kill_again_and_again, logged, saved
from rank_run import ended, start_ranks, train, train_to_status

from vilonghorn.engine.checkpoint import load_state

EPOCHS = 3


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> list[str]:
    return job_options(tmp_path_factory.mktemp("lost"), EPOCHS)


@pytest.fixture(scope="module", params=[2, 3])
def undisturbed(request, options, tmp_path_factory):
    """Number of processes, and the directory of what they did when nobody disturbed them."""
    directory = tmp_path_factory.mktemp("undisturbed")
    assert ended(start_ranks(request.param, train, [*options, f"--run.dir={directory}"])) == [0] * request.param
    return request.param, directory


def assert_same_weights(directory, reference):
    for name in ("last.safetensors", "best.safetensors"):
        assert (directory / name).read_bytes() == (reference / name).read_bytes(), name


def wait_for(directory, update):
    end = time.monotonic() + 120
    while logged(directory) < update:
        assert time.monotonic() < end
        time.sleep(0.005)


def test_kills_at_random_moments_change_nothing_and_lose_little(options, undisturbed, tmp_path):
    size, reference = undisturbed
    chance = random.Random(size)
    options = [*options, f"--run.dir={tmp_path}"]
    total = logged(reference)
    for number, update in enumerate(sorted(chance.sample(range(1, total - 1), 3))):
        processes = start_ranks(size, train_to_status, options, resume="auto")
        wait_for(tmp_path, update)
        time.sleep(chance.uniform(0, 0.05))
        reached = logged(tmp_path)
        whole_job = number == 1
        victims = processes if whole_job else [chance.choice(processes)]
        for victim in victims:
            os.kill(victim.pid, signal.SIGKILL)
        codes = ended(processes)
        assert all(code == (-signal.SIGKILL if process in victims else 2) for process, code in zip(processes, codes))
        state = load_state(tmp_path / "last.pt")["progress"]
        assert reached - (state["epoch"] * total // EPOCHS + state["batch"] // size) <= EVERY
    assert ended(start_ranks(size, train_to_status, options, resume="auto")) == [0] * size
    assert_same_weights(tmp_path, reference)
