"""Kills a job of two processes at random moments until it is done: python tests/helpers/kill_run.py 20

Even kills hit one process, and torchrun --max-restarts restarts the job; odd ones hit the whole job, which is then
started by the same command. The weights must be bitwise those of an undisturbed job.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rank_run import ended, some_digits, start_ranks, train

from vilonghorn.engine.checkpoint import load_state

SCRIPT = Path(__file__).parents[2] / "train_imagenet.py"
EVERY = 3  # updates between checkpoints
UPDATES = 10  # an epoch: 160 digits, two processes, batches of 8
CHANCE = [  # all random augmentation
    "--model.drop_path=0.1",
    "--augmentation.scale=[0.7, 1]",
    "--augmentation.auto_augment=rand-m9-mstd0.5-inc1",
    "--augmentation.erase=0.25",
    "--augmentation.repeats=3",
    "--augmentation.mixup=0.2",
    "--augmentation.cutmix=0.2",
]


def job_options(folder: Path, epochs: int) -> list[str]:
    """Options of a job of `epochs` times 10 updates, on digits that are written into the folder."""
    counts = ["--data.batch_size=8", f"--schedule.epochs={epochs}", f"--run.checkpoint_updates={EVERY}"]
    return [*some_digits(folder), *CHANCE, *counts]


def torchrun(options: list[str], restarts: int) -> subprocess.Popen:
    """The job, as the leader of a session of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [f"--max-restarts={restarts}", str(SCRIPT), *options, "--auto-resume"]
    return subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def workers(job: subprocess.Popen) -> list[int]:
    """Processes that torchrun has started and that live, by their order."""
    return [int(pid) for pid in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]


def logged(directory: Path) -> int:
    """The last update in a run's log."""
    lines = (directory / "log.jsonl").read_bytes().split(b'"update": ') if (directory / "log.jsonl").exists() else []
    return int(lines[-1].split(b",")[0]) if len(lines) > 1 else 0


def saved(directory: Path) -> int:
    """The update of a run's last checkpoint."""
    if not (directory / "last.pt").exists():
        return 0
    progress = load_state(directory / "last.pt")["progress"]
    return progress["epoch"] * UPDATES + progress["batch"] // 2


def wait_for(directory: Path, update: int, job: subprocess.Popen) -> None:
    """Waits until a job has logged an update."""
    while logged(directory) < update:
        if job.poll() is not None:
            raise RuntimeError(f"the job ended with {job.returncode} before update {update}: {job.stdout.read()}")
        time.sleep(0.01)


def kill_again_and_again(directory: Path, options: list[str], kills: int, epochs: int, chance: random.Random) -> None:
    """Brings a job to its end in spite of kills, whose moments are spread over it at random."""
    moments = sorted(chance.sample(range(1, (epochs - 1) * UPDATES), kills))  # the last epoch is left to end in
    options = [*options, f"--run.dir={directory}"]
    job = torchrun(options, restarts=kills)
    try:
        for number, update in enumerate(moments):
            wait_for(directory, update, job)
            time.sleep(chance.uniform(0, 0.1))
            reached = logged(directory)
            if number % 2 == 0:
                os.kill(chance.choice(workers(job)), signal.SIGKILL)
                what = "one process"
            else:
                for pid in workers(job):
                    os.killpg(pid, signal.SIGKILL)
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
                what = "the whole job"
            lost = reached - saved(directory)
            print(f"kill {number + 1}: {what}, after update {reached}; lost {max(lost, 0)} updates", flush=True)
            assert lost <= EVERY, "more was lost than the work since the last checkpoint"
            if number % 2:
                job = torchrun(options, restarts=kills)
        output = job.communicate()[0].decode()
        assert job.returncode == 0, output
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGTERM)
            job.wait()


def prove(folder: Path, kills: int, seed: int) -> int:
    """Does one job twice, undisturbed and killed, and compares the weights; returns the epochs it had."""
    epochs = 2 + kills // 5
    options = job_options(folder, epochs)
    undisturbed, killed = folder / "undisturbed", folder / "killed"
    assert ended(start_ranks(2, train, ["--config=digits", *options, f"--run.dir={undisturbed}"])) == [0, 0]
    kill_again_and_again(killed, options, kills, epochs, random.Random(seed))
    for name in ("last.safetensors", "best.safetensors"):
        assert (killed / name).read_bytes() == (undisturbed / name).read_bytes(), name
    return epochs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("kills", type=int, nargs="?", default=20)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    kills, seed = vars(parser.parse_args()).values()
    with tempfile.TemporaryDirectory() as folder:
        epochs = prove(Path(folder), kills, seed)
    print(f"{kills} kills (seed {seed}): the weights of {epochs} epochs are those of the undisturbed job, bit for bit")


if __name__ == "__main__":
    main()
