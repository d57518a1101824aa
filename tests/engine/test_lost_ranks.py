"""Processes that are killed, stopped or short of disk take the others with them, and what they did is not lost."""

import os
import random
import signal
import time

import pytest
from kill_run import EVERY, job_options, logged, prove
from rank_run import ended, start_ranks, train, train_on_a_full_disk, train_to_status, train_with_other_data

from vilonghorn.engine.checkpoint import load_state

EPOCHS, SIZE = 2, 3


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> list[str]:
    return job_options(tmp_path_factory.mktemp("lost"), EPOCHS)


@pytest.fixture(scope="module")
def undisturbed(options, tmp_path_factory):
    """What the processes did when nobody disturbed them."""
    directory = tmp_path_factory.mktemp("undisturbed")
    assert ended(start_ranks(SIZE, train, [*options, f"--run.dir={directory}"])) == [0] * SIZE
    return directory


def assert_same_weights(directory, reference):
    for name in ("last.safetensors", "best.safetensors"):
        assert (directory / name).read_bytes() == (reference / name).read_bytes(), name


def wait_for(directory, update, processes):
    while logged(directory) < update:
        assert all(process.is_alive() for process in processes)
        time.sleep(0.005)


def test_kills_at_random_moments_change_nothing_and_lose_little(options, undisturbed, tmp_path):
    chance = random.Random(0)
    options = [*options, f"--run.dir={tmp_path}"]
    total = logged(undisturbed)
    for number, update in enumerate(sorted(chance.sample(range(1, total - total // EPOCHS), 3))):
        processes = start_ranks(SIZE, train_to_status, options, resume="auto")
        wait_for(tmp_path, update, processes)
        time.sleep(chance.uniform(0, 0.05))
        reached = logged(tmp_path)
        whole_job = number == 1
        victims = processes if whole_job else [chance.choice(processes)]
        for victim in victims:
            os.kill(victim.pid, signal.SIGKILL)
        codes = ended(processes)
        assert all(code == (-signal.SIGKILL if process in victims else 2) for process, code in zip(processes, codes))
        state = load_state(tmp_path / "last.pt")["progress"]
        assert reached - (state["epoch"] * total // EPOCHS + state["batch"] // SIZE) <= EVERY
    assert ended(start_ranks(SIZE, train_to_status, options, resume="auto")) == [0] * SIZE
    assert_same_weights(tmp_path, undisturbed)


def test_a_signal_to_one_process_saves_and_stops_all(options, undisturbed, tmp_path):
    options = [*options, f"--run.dir={tmp_path}"]
    processes = start_ranks(SIZE, train_to_status, options)
    wait_for(tmp_path, 4, processes)
    os.kill(processes[-1].pid, signal.SIGUSR1)
    assert ended(processes) == [128 + signal.SIGUSR1] * SIZE
    progress = load_state(tmp_path / "last.pt")["progress"]
    assert progress["epoch"] < EPOCHS and progress["batch"] > 0
    assert ended(start_ranks(SIZE, train_to_status, options, resume=True)) == [0] * SIZE
    assert_same_weights(tmp_path, undisturbed)


def test_a_full_disk_of_the_process_that_writes_ends_all_with_the_last_checkpoint_intact(
    options, undisturbed, tmp_path
):
    options = [*options, f"--run.dir={tmp_path}"]
    assert ended(start_ranks(SIZE, train_on_a_full_disk, options, 2)) == [2] * SIZE
    assert load_state(tmp_path / "last.pt")["progress"]["batch"] == EVERY * SIZE
    assert ended(start_ranks(SIZE, train_to_status, options, resume=True)) == [0] * SIZE
    assert_same_weights(tmp_path, undisturbed)


def test_a_process_that_cannot_start_tells_the_others(options, tmp_path):
    options = [*options, f"--run.dir={tmp_path}/run"]
    assert ended(start_ranks(2, train_with_other_data, options)) == [2, 2]
    assert not (tmp_path / "run").exists()


def test_torchrun_makes_good_a_process_that_is_killed(tmp_path):
    assert prove(tmp_path, kills=1, seed=0) == 2
