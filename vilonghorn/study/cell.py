"""One cell of a study, in a process and a thread of its own: trained by the engine, and if it counts, tested once.

A cell leaves RUN (the directory of the engine's run), RUN.txt (what it printed), RUN.yaml (its configuration, which
train_imagenet.py takes too), RUN.json (what was measured in training) and RUN.test.json (on the test sets).
"""

from __future__ import annotations

import hashlib
import json
import signal
import statistics
from collections.abc import Iterator
from contextlib import closing, redirect_stderr, redirect_stdout
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import yaml

from ..data import create_loader
from ..data.files import replacing
from ..engine import Trainer, evaluate, load_config, load_run
from ..engine.build import autocast, pick_device, train_loader
from ..engine.estimate import kept_for_backward
from ..tools.compare import read_run
from .match import matched
from .plan import Cell, Study, merged
from .tasks import Digits, Recall, write_task


def data_file(folder: Path, dataset: Digits | Recall) -> Path:
    """Where a split lies, by what it is made of."""
    return folder / "data" / f"{dataset.split}-{hashlib.sha256(repr(dataset).encode()).hexdigest()[:12]}.beton"


def write_data(study: Study, folder: Path) -> None:
    """Writes every split of every task that is not there yet."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for task in study.tasks.values():
        for dataset in (*map(task.dataset, ("train", "val")), *(task.dataset("test", test) for test in task.tests)):
            if not data_file(folder, dataset).is_file():
                write_task(dataset, data_file(folder, dataset))


def sections(study: Study, folder: Path, cell: Cell) -> dict[str, dict[str, Any]]:
    """The configuration of a cell's run."""
    task, contender = study.tasks[cell.task], study.contenders[cell.contender]
    train, val = task.dataset("train"), task.dataset("val")
    own = {
        "data": {"train": str(data_file(folder, train)), "val": str(data_file(folder, val)), "image_size": train.side},
        "model": {"name": contender.model, "kwargs": matched(study, cell.task, cell.contender)[0]},
        "optimizer": {"lr": cell.rate, "lr_batch": None},
        "run": {"dir": str(run_directory(folder, cell)), "seed": cell.seed, "tensorboard": False},
    }
    if task.floor is not None:
        own["schedule"] = {"min_lr": task.floor * cell.rate}
    return merged(study.recipe, task.recipe, own)


def test_data(study: Study, folder: Path, cell: Cell) -> dict[str, str]:
    """The names of the files that a cell is tested on, by test set, which tell what is in them."""
    task = study.tasks[cell.task]
    return {test: data_file(folder, task.dataset("test", test)).name for test in task.tests}


def run_directory(folder: Path, cell: Cell) -> Path:
    """The directory of a cell's run."""
    return folder / "runs" / cell.id


def result_file(folder: Path, cell: Cell, kind: str) -> Path:
    """The file of a cell's results, of kind "train" or "test"."""
    return run_directory(folder, cell).with_name(
        run_directory(folder, cell).name + {"train": ".json", "test": ".test.json"}[kind]
    )


def read_result(folder: Path, cell: Cell, kind: str) -> dict[str, Any] | None:
    """What a cell has measured, if it is finished."""
    file = result_file(folder, cell, kind)
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


class Parts:
    """A loader whose every pass over the data is cut into shorter epochs, so that there is a curve even of one pass.

    Args:
        loader: of training data.
        parts: epochs that make a pass; batches left over by the division are left out.
    """

    def __init__(self, loader: Any, parts: int) -> None:
        self.loader, self.parts, self.length = loader, parts, len(loader) // parts
        if not self.length:
            raise ValueError(
                f"{len(loader)} batches cannot be cut into {parts} parts: give more mosaics or fewer parts"
            )
        self.num_samples = self.length * loader.batch_size
        self.num_classes, self.class_names, self.fingerprint = (
            loader.num_classes,
            loader.class_names,
            loader.fingerprint,
        )

    def __len__(self) -> int:
        return self.length

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Batches `start`.. of a part."""
        whole, part = divmod(epoch, self.parts)
        with closing(self.loader.epoch(whole, start=part * self.length + start)) as batches:
            yield from islice(batches, self.length - start)


def one_thread() -> None:
    """Makes this process one of several that share the cores; Ctrl-C stops it in training only, where it can save."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def train_cell(study: Study, folder: Path, cell: Cell, commit: str | None) -> None:
    """Trains, or goes on where a killed process left off, and leaves the results; that it diverged is one.

    Raises:
        Interrupted: it was asked to stop; the run is saved.
        ValueError: see `vilonghorn.engine.Trainer`.
    """
    directory, parts = run_directory(folder, cell), sections(study, folder, cell)
    directory.parent.mkdir(parents=True, exist_ok=True)
    configuration = directory.with_name(f"{directory.name}.yaml")
    configuration.write_text(yaml.safe_dump(parts, sort_keys=False), encoding="utf-8")
    own = {"commit": commit, "config": parts, "parameters": matched(study, cell.task, cell.contender)[1]}
    with open(directory.with_name(f"{directory.name}.txt"), "a", encoding="utf-8") as said:
        with redirect_stdout(said), redirect_stderr(said):
            config = load_config(configuration)
            loader = Parts(train_loader(config, pick_device(config.run.device)), study.tasks[cell.task].parts)
            trainer = Trainer(config, train=loader, resume="auto")
            try:
                outcome = trainer.fit()
            except FloatingPointError as error:
                seconds = trainer.progress.seconds
                return leave(result_file(folder, cell, "train"), {**own, "seconds": seconds, "diverged": str(error)})
            kept = kept_for_backward(trainer.learner, 4) - kept_for_backward(trainer.learner, 2)
    run = read_run(directory)
    batch = config.data.batch_size * config.optimizer.accumulate
    speeds = [record["images_per_second"] for record in run["train"] if "images_per_second" in record]
    leave(
        result_file(folder, cell, "train"),
        {
            **own,
            "val": {name: outcome[name] for name in ("top1", "loss")},
            "skipped": outcome["skipped"],
            "seconds": outcome["seconds"],
            "ms_per_image": 1e3 / statistics.median(speeds) if speeds else None,
            "kept_bytes_per_image": kept / 2,
            "curve": [
                {"images": record["update"] * batch, "train_loss": record["train_loss"], **record["model"]}
                for record in run["epochs"]
            ],
        },
    )


def test_cell(study: Study, folder: Path, cell: Cell, commit: str | None) -> None:
    """Measures the final weights of a trained cell on every test set of its task, and leaves the results."""
    task, config = study.tasks[cell.task], load_config(run_directory(folder, cell) / "config.yaml")
    device = pick_device(config.run.device)
    results = {}
    for test in task.tests:
        dataset = task.dataset("test", test)
        model, _ = load_run(config.run.dir, "last")
        if dataset.side != config.data.image_size:
            model.set_input_size(img_size=dataset.side)
        tokens = (dataset.side // config.data.image_size) ** 2
        loader = create_loader(
            data_file(folder, dataset),
            batch_size=max(1, config.data.batch_size // max(1, tokens)),
            image_size=dataset.side,
            training=False,
            workers=config.data.workers,
            device=device,
            mean=config.data.mean,
            std=config.data.std,
            crop_pct=1.0,
            interpolation="area",
        )
        measured = evaluate({"model": model.to(device)}, loader, amp=autocast(config.run.amp, device))["model"]
        results[test] = {**measured, "images": loader.num_samples, "chance": 100 * dataset.chance}
    data = test_data(study, folder, cell)
    leave(result_file(folder, cell, "test"), {"commit": commit, "data": data, "tests": results})


JOBS = {"train": train_cell, "test": test_cell}


def leave(path: Path, results: dict[str, Any]) -> None:
    """Writes results, whole."""
    with replacing(path) as file:
        file.write(json.dumps(results, indent=1).encode())
