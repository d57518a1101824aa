"""Several processes train as one, and what is done is not lost when they are killed or stopped."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rank_run import (
    dry_run,
    ended,
    some_digits,
    start_ranks,
    train,
    train_to_status,
    train_with_full_disk,
    train_with_other_data,
    train_without_reader,
)

from vilonghorn.engine.checkpoint import load_state, load_weights, read_log
from vilonghorn.engine.distributed import Distributed

SCRIPT = Path(__file__).parents[2] / "train_imagenet.py"
SIZE = 3  # processes; sums of three depend on the buckets of DistributedDataParallel
EVERY, UPDATES = 3, 7  # updates between checkpoints, and in an epoch
RANDOM = [  # all random augmentation
    "--model.drop_path=0.1",
    "--augmentation.scale=[0.7, 1]",
    "--augmentation.auto_augment=rand-m9-mstd0.5-inc1",
    "--augmentation.erase=0.25",
    "--augmentation.repeats=3",
    "--task.mixup=0.2",
    "--task.cutmix=0.2",
]


def log_of(directory, kind):
    log = directory / "log.jsonl"
    return [record for record in (read_log(log) if log.exists() else []) if record["kind"] == kind]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "1"}, "RANK is 1 and WORLD_SIZE is 1, expected a RANK below it: .* unset both"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', expected a number from 1 on, .* unset it"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE is '0', expected a number from 1 on"),
    ],
)
def test_variables_that_torchrun_does_not_set_so_are_named(monkeypatch, variables, message):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, variables.get(name, ""))
    with pytest.raises(ValueError, match=message):
        Distributed()
    for name in variables:
        monkeypatch.setenv(name, "")
    assert (Distributed().rank, Distributed().world_size, Distributed().local_size) == (0, 1, 1)


def test_two_processes_that_accumulate_two_batches_compute_the_same_as_one_process(tmp_path):
    """The same losses, gradients, rates and weights within the rounding of float32, and the very same counts."""
    digits, one, two = some_digits(tmp_path), tmp_path / "one", tmp_path / "two"
    train([*digits, "--data.batch_size=32", f"--run.dir={one}"])
    options = [*digits, "--data.batch_size=8", "--optimizer.accumulate=2", f"--run.dir={two}"]
    assert ended(start_ranks(2, train, options)) == [0, 0]
    assert len(log_of(two, "train")) == 10
    for kind, names in (("train", ("update", "loss", "grad_norm", "lr")), ("epoch", ("update", "train_loss"))):
        for own, other in zip(log_of(two, kind), log_of(one, kind), strict=True):
            assert [own[name] for name in names] == pytest.approx([other[name] for name in names], rel=2e-4)
    for own, other in zip(log_of(two, "epoch"), log_of(one, "epoch")):
        for weights in ("model", "ema"):
            assert all(own[weights][name] == other[weights][name] for name in ("top1", "top5"))
            assert own[weights]["loss"] == pytest.approx(other[weights]["loss"], rel=1e-4)
    own, other = (load_weights(run / "last.safetensors")[0] for run in (two, one))
    assert all((own[name] - value).abs().max() < 1e-4 for name, value in other.items())


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> list[str]:
    counts = ["--data.batch_size=8", f"--run.checkpoint_updates={EVERY}"]
    return ["--config=digits", *some_digits(tmp_path_factory.mktemp("digits"), 17), *RANDOM, *counts]


@pytest.fixture(scope="module")
def undisturbed(options, tmp_path_factory):
    directory = tmp_path_factory.mktemp("undisturbed")
    assert ended(start_ranks(SIZE, train, [*options, f"--run.dir={directory}"])) == [0] * SIZE
    assert len(log_of(directory, "train")) == 2 * UPDATES
    return directory


def wait_for(directory, update, is_alive):
    while len(log_of(directory, "train")) < update:
        assert is_alive()
        time.sleep(0.02)


def start(options, directory, update, size=SIZE, **arguments):
    """Starts processes and waits until they have logged an update."""
    processes = start_ranks(size, train_to_status, [*options, f"--run.dir={directory}"], **arguments)
    wait_for(directory, update, lambda: all(process.is_alive() for process in processes))
    return processes


@pytest.mark.parametrize("task", ["classes", "teacher", "masks"])
def test_kills_of_one_process_and_of_all_change_nothing_and_lose_little(options, undisturbed, tmp_path, task):
    whole, size = undisturbed, SIZE
    if task == "teacher":
        whole, size = tmp_path / "whole", 2
        options = [*options, "--data.batch_size=12", f"--task.teacher={undisturbed}", "--task.teacher_cache=true"]
        assert ended(start_ranks(size, train, [*options, f"--run.dir={whole}"])) == [0, 0]
    if task == "masks":
        whole, size, options = tmp_path / "whole", 2, [*options[1:], "--data.batch_size=12"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command = [*torchrun, "-m", "vilonghorn", "pretrain", *options, f"--run.dir={whole}"]
        subprocess.run(command, cwd=SCRIPT.parent, check=True, capture_output=True)
        options = ["--config=pretrain", *options]
    assert len(log_of(whole, "train")) == 2 * UPDATES
    run = tmp_path / "killed"
    for update, victims in zip(sorted(random.Random(task).sample(range(2, 11), 2)), (1, size)):
        processes = start(options, run, update, size, resume="auto")
        for victim in processes[:victims]:
            os.kill(victim.pid, signal.SIGKILL)
        assert ended(processes, seconds=10) == [-signal.SIGKILL] * victims + [2] * (size - victims)
        progress = load_state(run / "last.pt")["progress"]
        assert update - (progress["epoch"] * UPDATES + progress["batch"] // size) <= EVERY
    assert ended(start(options, run, 0, size, resume="auto")) == [0] * size
    for name in ("last.safetensors", "best.safetensors"):
        assert (run / name).read_bytes() == (whole / name).read_bytes(), name


def test_a_signal_to_one_process_saves_and_stops_all(options, tmp_path):
    processes = start(options, tmp_path, 4)
    os.kill(processes[-1].pid, signal.SIGUSR1)
    assert ended(processes) == [128 + signal.SIGUSR1] * SIZE
    progress = load_state(tmp_path / "last.pt")["progress"]
    assert progress["epoch"] == 1 or progress["batch"] >= 4 * SIZE


def test_a_dry_run_of_two_processes_reads_the_data_in_both_whatever_their_caches_have(options, tmp_path):
    options = [*options, f"--run.dir={tmp_path}/run"]
    assert ended(start_ranks(2, dry_run, options)) == [0, 0]
    assert ended(start_ranks(2, dry_run, options, cache=f"{tmp_path}/empty")) == [0, 0]


def test_a_process_that_cannot_start_ends_the_others(options, tmp_path):
    options = [*options, f"--run.dir={tmp_path}/run"]
    assert ended(start_ranks(2, train_with_other_data, options)) == [2, 2]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (train_with_full_disk, "no space left for .*log.jsonl: free some space, then resume .*--resume"),
        (train_without_reader, "process 0 of 2 cannot reach the others .*: resume with --auto-resume"),
    ],
)
def test_a_full_disk_and_a_killed_reader_end_all_processes_in_a_sentence(options, tmp_path, target, words):
    run = tmp_path / "run"
    processes = start_ranks(2, target, [*options, f"--run.dir={run}"])
    wait_for(run, 1, lambda: all(process.is_alive() for process in processes))
    assert ended(processes, seconds=15) == [2, 2]  # a few updates, and 10 seconds
    [error] = [line for line in Path(f"{run}.errors0").read_text().splitlines() if line.startswith("error: ")]
    assert re.search(words, error)


def test_torchrun_restarts_after_a_kill_and_prints_how_to_resume_a_stopped_job(options, tmp_path):
    run, torchrun = tmp_path / "a run", [sys.executable, "-m", "torch.distributed.run"]
    command = [*torchrun, "--standalone", "--nproc-per-node=2", "--max-restarts=1", str(SCRIPT), *options]
    command += ["--data.batch_size=4", "--schedule.epochs=1", "--schedule.warmup_epochs=0"]  # 21 updates
    with open(tmp_path / "output", "w+") as output:
        job = subprocess.Popen([*command, "--auto-resume", f"--run.dir={run}"], stdout=output, stderr=subprocess.STDOUT)
        try:
            wait_for(run, EVERY, lambda: job.poll() is None)
            workers = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
            os.kill(int(workers[1]), signal.SIGKILL)
            wait_for(run, 2 * EVERY, lambda: job.poll() is None)
            job.send_signal(signal.SIGTERM)
            assert job.wait(60) != 0
        finally:
            job.terminate()
            job.wait()
    text = (tmp_path / "output").read_text()
    typed = re.search(r"stopped by SIGTERM in epoch 1, after \d+ of 42 batches; resume with: (.*)\n", text)[1]
    (tmp_path / "torchrun").write_text(f'#!/bin/sh\nexec {" ".join(torchrun)} "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(typed, shell=True, cwd=SCRIPT.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and f"resuming {run} in epoch 1, after " in done.stdout, done.stderr
    val = Path(next(option for option in options if option.startswith("--data.val=")).partition("=")[2])
    rows = [line.split(",") for line in (run / "predictions.csv").read_text().splitlines()[1:]]
    assert [row[0] for row in rows] == sorted(str(path.relative_to(val)) for path in val.rglob("*.png"))
    right = sum(row[-1] == "true" for row in rows)
    assert all(row[0].split("/")[0] == row[1] for row in rows) and (run / "report.html").exists()
    assert 100 * right / len(rows) == pytest.approx(load_weights(run / "last.safetensors", tensors=False)[1]["top1"])
