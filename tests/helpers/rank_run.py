"""Several processes that train together, for the tests of the engine: a small model on some embedded digits."""

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from vilonghorn.cli.train import train as train_command
from vilonghorn.data.digits import every_fifth, load_digits
from vilonghorn.engine import Trainer, build_parser, logger, parse
from vilonghorn.engine.checkpoint import RunDirectory
from vilonghorn.engine.command_line import run
from vilonghorn.engine.logger import RunLogger
from vilonghorn.engine.tasks import classification

# No augmentation: only the order of the images is random, and it is the same for any number of processes.
OPTIONS = [
    "--data.image_size=32",
    "--data.workers=0",
    "--data.mean=[0.5, 0.5, 0.5]",
    "--data.std=[0.5, 0.5, 0.5]",
    "--model.name=vilonghorn_nano",
    "--model.kwargs={patch_size: 8, depth: 2}",
    "--optimizer.lr=2e-3",
    "--optimizer.lr_batch=32",
    "--schedule.epochs=2",
    "--schedule.warmup_epochs=1",
    "--augmentation.scale=[1, 1]",
    "--augmentation.ratio=[1, 1]",
    "--augmentation.hflip=0",
    "--augmentation.auto_augment=null",
    "--augmentation.erase=0",
    "--augmentation.repeats=1",
    "--task.mixup=0",
    "--task.cutmix=0",
    "--ema.decay=0.9",
    "--run.device=cpu",
    "--run.log_updates=1",
    "--run.tensorboard=false",
]


def some_digits(folder: Path, train: int = 16, val: int = 7) -> list[str]:
    """Writes as many digits of every class, and returns the options of a run on them."""
    images, labels = load_digits()
    held_out = every_fifth(labels, 4)
    for split, chosen, count in (("train", ~held_out, train), ("val", held_out, val)):
        for label in range(10):
            target = folder / "digits" / split / str(label)
            target.mkdir(parents=True)
            for i in np.flatnonzero(chosen & (labels == label))[:count]:
                Image.fromarray(images[i]).resize((32, 32)).save(target / f"{i:04d}.png")
    return [*OPTIONS, f"--data.train={folder}/digits/train", f"--data.val={folder}/digits/val"]


def train(options: list[str], **arguments: Any) -> dict[str, Any]:
    """Trains in this process, as one of those that the environment tells of."""
    torch.set_num_threads(1)
    return Trainer(parse(build_parser(), options)[0], **arguments).fit()


def as_rank(environment: dict[str, str], target: Callable, arguments: tuple, keywords: dict) -> None:
    """In a process of its own: what torchrun would set, then the target, without pictures, which take longer."""
    os.environ.update(environment)
    logger.draw_curves = classification.predict_all = classification.write_report = lambda *arguments: None
    target(*arguments, **keywords)


def start_ranks(size: int, target: Callable, *arguments: Any, **keywords: Any) -> list[Any]:
    """Starts processes that find each other, all of them with one function of a module."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vilonghorn.engine", "torch.distributed"])
    processes = []
    for rank in range(size):
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
        environment = {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}
        processes.append(context.Process(target=as_rank, args=(environment, target, arguments, keywords)))
        processes[-1].start()
    return processes


def ended(processes: list[Any], seconds: float = 600) -> list[int | None]:
    """Exit codes, once all have ended. A process that hangs is killed, and its code is None."""
    end = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.1, end - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
    return codes


def train_to_status(options: list[str], **arguments: Any) -> None:
    """The same as a command, which ends this process with its exit status."""
    sys.exit(run(lambda argv: print(train(argv, **arguments)), options))


def train_with_other_data(options: list[str]) -> None:
    """The same, where the last process finds no data."""
    if os.environ["RANK"] == "1":
        options = [*options, "--data.val=nowhere"]
    train_to_status(options)


def dry_run(options: list[str], cache: str | None = None) -> None:
    """A dry run, where the last process has another cache of opened images, if one is given."""
    if cache and os.environ["RANK"] == "1":
        os.environ["XDG_CACHE_HOME"] = cache
    train_command([*options, "--dry-run"])


def train_to_file(options: list[str]) -> None:
    """The same, with its errors in a file beside the directory of the run, which is the last option."""
    with open(options[-1].removeprefix("--run.dir=") + f".errors{os.environ['RANK']}", "w", buffering=1) as sys.stderr:
        train_to_status(options)


def train_with_full_disk(options: list[str]) -> None:
    """The same, where nothing can be written to the log of the run after its first lines."""
    write_log, lines = RunDirectory.write_log, []

    def fill(directory: RunDirectory, **record: Any) -> None:
        lines.append(record)
        if len(lines) == 3:
            directory.log = open("/dev/full", "ab", buffering=0)
        write_log(directory, **record)

    RunDirectory.write_log = fill
    train_to_file(options)


def train_without_reader(options: list[str]) -> None:
    """The same, where a process that reads images for the last process is killed in the first epoch."""
    if os.environ["RANK"] == "1":
        RunLogger.log_update = lambda *arguments: [os.kill(child.pid, signal.SIGKILL) for child in active_children()]
    train_to_file([*options[:-1], "--data.workers=1", options[-1]])
