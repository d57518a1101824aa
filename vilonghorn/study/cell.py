"""One cell of a study: a training run by the engine and its tests, in a process of its own.

A cell writes RUN (directory of the engine's run), RUN.txt (its output), RUN.yaml (its configuration, which
`vilonghorn train` reads too), RUN.json (results of training) and RUN.test.json (results on the test sets).
"""

import hashlib
import json
import statistics
from collections.abc import Iterator
from contextlib import closing, redirect_stderr, redirect_stdout
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import yaml

from ..data.files import atomic_write
from ..engine import Trainer, evaluate, load_config, load_run
from ..engine.build import autocast, build_loader, pick_device
from ..engine.dry_run import activation_bytes
from ..tools.compare import read_run
from .match import match_size
from .plan import Cell, Study, merge
from .tasks import Digits, Recall, write_task


def data_file(folder: Path, dataset: Digits | Recall) -> Path:
    """The file of a dataset; its name is a hash of the dataset's options."""
    return folder / "data" / f"{dataset.split}-{hashlib.sha256(repr(dataset).encode()).hexdigest()[:12]}.beton"


def write_data(study: Study, folder: Path) -> None:
    """Writes the datasets of a study that do not exist yet."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for task in study.tasks.values():
        for dataset in (task.dataset("train"), task.dataset("val"), *task.test_datasets().values()):
            if not data_file(folder, dataset).is_file():
                write_task(dataset, data_file(folder, dataset))


def run_config(study: Study, folder: Path, cell: Cell) -> dict[str, dict[str, Any]]:
    """The configuration of a cell's run, by section."""
    task = study.tasks[cell.task]
    train, val = task.dataset("train"), task.dataset("val")
    kwargs, _ = match_size(study, cell.task, cell.candidate)
    own = {
        "data": {"train": str(data_file(folder, train)), "val": str(data_file(folder, val)), "image_size": train.side},
        "model": {"name": study.candidates[cell.candidate].model, "kwargs": kwargs},
        "optimizer": {"lr": cell.rate, "lr_batch": None},
        "run": {"dir": str(run_directory(folder, cell)), "seed": cell.seed, "tensorboard": False},
    }
    if task.min_lr_ratio is not None:
        own["schedule"] = {"min_lr": task.min_lr_ratio * cell.rate}
    return merge(study.recipe, task.recipe, own)


def run_directory(folder: Path, cell: Cell) -> Path:
    """The directory of a cell's run."""
    return folder / "runs" / cell.id


def result_file(folder: Path, cell: Cell, kind: str) -> Path:
    """The file of a cell's results, of kind "train" or "test"."""
    return Path(f"{run_directory(folder, cell)}{'.json' if kind == 'train' else '.test.json'}")


def read_result(folder: Path, cell: Cell) -> dict[str, Any]:
    """The results of a cell: "seconds" is missing before it is trained, and "tests" is None before it is tested."""
    trained, tested = (
        json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        for file in (result_file(folder, cell, kind) for kind in ("train", "test"))
    )
    return {**asdict(cell), **trained, "tests": tested.get("tests"), "test_data": tested.get("data")}


def check_unchanged(study: Study, folder: Path, cell: Cell) -> None:
    """Checks that the results of a cell belong to this plan.

    Raises:
        ValueError: the cell was trained with another configuration, or tested on other data.
    """
    result, config = read_result(folder, cell), json.loads(json.dumps(run_config(study, folder, cell)))
    if result.get("config", config) != config:
        kind, changed = "train", "another recipe, model or data"
    elif result["tests"] and result["test_data"] != _test_data(study, folder, cell):
        kind, changed = "test", "other test sets"
    else:
        return
    file = result_file(folder, cell, kind)
    raise ValueError(f"{file} has {changed} than the study: give --dir another directory, or remove the file")


def _test_data(study: Study, folder: Path, cell: Cell) -> dict[str, str]:
    tests = study.tasks[cell.task].test_datasets()
    return {name: data_file(folder, dataset).name for name, dataset in tests.items()}


class ShortEpochs:
    """A loader whose passes over the data are divided into epochs, so that one pass gives a curve.

    Args:
        loader: of training data.
        parts: epochs of a pass; the remainder of the division, in batches, is not used.

    Raises:
        ValueError: there are fewer batches than parts.
    """

    def __init__(self, loader: Any, parts: int) -> None:
        self.loader, self.parts, self.length = loader, parts, len(loader) // parts
        if not self.length:
            raise ValueError(f"{len(loader)} batches cannot be divided into {parts} parts: use fewer, or more data")
        self.num_samples = self.length * loader.batch_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return self.length

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The batches of an epoch from number `start` on."""
        number, part = divmod(epoch, self.parts)  # of the pass, and within it
        with closing(self.loader.epoch(number, start=part * self.length + start)) as batches:
            yield from islice(batches, self.length - start)


def train_cell(study: Study, folder: Path, cell: Cell, commit: str | None) -> None:
    """Trains a cell, or resumes its training, and writes the results. Divergence is a result.

    Raises:
        Interrupted: a signal stopped it; the run is saved.
        ValueError: see `vilonghorn.engine.Trainer`.
    """
    directory, sections = run_directory(folder, cell), run_config(study, folder, cell)
    directory.parent.mkdir(parents=True, exist_ok=True)
    config_file = Path(f"{directory}.yaml")
    config_file.write_text(yaml.safe_dump(sections, sort_keys=False), encoding="utf-8")
    results = {"commit": commit, "config": sections, "parameters": match_size(study, cell.task, cell.candidate)[1]}
    with open(f"{directory}.txt", "a", encoding="utf-8") as output, redirect_stdout(output), redirect_stderr(output):
        config = load_config(config_file)
        loader = build_loader(config, pick_device(config.run.device), training=True)
        loader = ShortEpochs(loader, study.tasks[cell.task].parts)
        trainer = Trainer(config, train=loader, resume="auto")
        try:
            outcome = trainer.fit()
        except FloatingPointError as error:
            results |= {"seconds": trainer.progress.seconds, "diverged": str(error)}
            return _write(result_file(folder, cell, "train"), results)
        kept = activation_bytes(trainer.train_state)
    run = read_run(directory)
    batch = config.data.batch_size * config.optimizer.accumulate
    speeds = [record["images_per_second"] for record in run["train"] if "images_per_second" in record]
    results |= {
        "val": {name: outcome[name] for name in ("top1", "loss")},
        "skipped": outcome["skipped"],
        "seconds": outcome["seconds"],
        "ms_per_image": 1e3 / statistics.median(speeds) if speeds else None,
        "kept_bytes_per_image": kept,
        "curve": [
            {"images": record["update"] * batch, "train_loss": record["train_loss"], **record["model"]}
            for record in run["epochs"]
        ],
    }
    _write(result_file(folder, cell, "train"), results)


def test_cell(study: Study, folder: Path, cell: Cell, commit: str | None) -> None:
    """Measures the final weights of a trained cell on the test sets of its task, and writes the results."""
    config = load_config(run_directory(folder, cell) / "config.yaml")
    device = pick_device(config.run.device)
    tests = {}
    for name, dataset in study.tasks[cell.task].test_datasets().items():
        model, _ = load_run(config.run.dir, "last")
        if dataset.side != config.data.image_size:
            model.set_input_size(img_size=dataset.side)
        enlargement = max(1, (dataset.side // config.data.image_size) ** 2)
        data = replace(
            config.data,
            val=str(data_file(folder, dataset)),
            image_size=dataset.side,
            batch_size=max(1, config.data.batch_size // enlargement),
        )
        loader = build_loader(replace(config, data=data), device, training=False)
        measured = evaluate({"model": model.to(device)}, loader, amp=autocast(config.run.amp, device))["model"]
        tests[name] = {**measured, "images": loader.num_samples, "chance": 100 * dataset.chance}
    results = {"commit": commit, "data": _test_data(study, folder, cell), "tests": tests}
    _write(result_file(folder, cell, "test"), results)


def _write(path: Path, results: dict[str, Any]) -> None:
    with atomic_write(path, "w") as file:
        json.dump(results, file, indent=1)
