"""One training run of a study and its tests.

It leaves RUN (the run directory), RUN.txt (its output) and RUN.yaml (its configuration, which `vilonghorn train` reads
too). Its results are returned.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import closing, redirect_stderr, redirect_stdout
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import yaml

from vilonghorn.engine import Config, Trainer, evaluate, load_config, load_run
from vilonghorn.engine.checkpoint import RunDirectory, read_log
from vilonghorn.engine.device import autocast, pick_device
from vilonghorn.engine.loaders import build_loader

from .plan import Cell, Study, match_size, merge
from .tasks import Task, write_task


def data_file(folder: Path, dataset: Task) -> Path:
    """The file of a dataset; its name is a hash of what the dataset contains."""
    return folder / "data" / f"{dataset.split}-{hashlib.sha256(repr(dataset).encode()).hexdigest()[:12]}.beton"


def write_data(study: Study, folder: Path, task: str, seed: int = 1) -> None:
    """Writes the datasets of a task in a run with that seed that do not exist yet."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    plan = study.tasks[task]
    for dataset in (plan.dataset("train", seed), plan.dataset("val", seed), *plan.test_datasets(seed).values()):
        if not data_file(folder, dataset).is_file():
            write_task(dataset, data_file(folder, dataset))


def run_config(study: Study, folder: Path, cell: Cell) -> dict[str, dict[str, Any]]:
    """The configuration of a cell's run, by section."""
    task = study.tasks[cell.task]
    train, val = task.dataset("train", cell.seed), task.dataset("val", cell.seed)
    candidate = study.candidates[cell.candidate]
    kwargs, _ = match_size(study, cell.task, cell.candidate)
    own = {
        "data": {"train": str(data_file(folder, train)), "val": str(data_file(folder, val)), "image_size": train.side},
        "model": {"name": candidate.model, "kwargs": kwargs},
        "optimizer": {"lr": cell.rate, "lr_batch": None},
        "run": {"dir": str(run_directory(folder, cell)), "seed": cell.seed, "tensorboard": False},
    }
    if task.min_lr_ratio is not None:
        own["schedule"] = {"min_lr": task.min_lr_ratio * cell.rate}
    return merge(study.recipe, task.recipe, candidate.recipe, own)


def run_directory(folder: Path, cell: Cell) -> Path:
    """The directory of a cell's run."""
    return folder / "runs" / cell.id


def plan_hash(study: Study, folder: Path, cell: Cell) -> str:
    """A hash of all that the plan says of a cell: recipe, model, data and tests, without the paths of this machine."""
    task, config = study.tasks[cell.task], run_config(study, folder, cell)
    config["data"] |= {split: repr(task.dataset(split, cell.seed)) for split in ("train", "val")}
    del config["run"]["dir"]
    tests = {name: [repr(dataset), dataset.side] for name, dataset in task.test_datasets(cell.seed).items()}
    sizes = config.get("augmentation", {}).pop("sizes", None)
    mixed = {"sides": sizes} if sizes else {}  # as in earlier versions
    text = json.dumps({"config": config, "parts": task.parts, "tests": tests, **mixed}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class StudyLoader:
    """A loader with shorter epochs, so that one pass over the data gives a curve.

    Args:
        loader: of training data.
        parts: epochs of a pass; the remainder of the division, in batches, is not used.

    Raises:
        ValueError: there are fewer batches than parts.
    """

    def __init__(self, loader: Any, parts: int) -> None:
        self.loader, self.parts = loader, parts
        self.length = len(loader) // parts
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
        first = part * self.length + start
        with closing(self.loader.epoch(number, start=first)) as batches:
            yield from islice(batches, self.length - start)


def run_cell(study: Study, folder: Path, cell: Cell, commit: str | None) -> dict[str, Any]:
    """Trains a cell, or resumes its training, and measures its final weights on the test sets. Divergence is a result.

    Returns:
        The fields of the cell; "plan" (see `plan_hash`), "commit", "parameters", "seconds" (of training), "tests"
        (top1, top5 and loss by test set; None if it diverged), and either "diverged" (the reason) or "val" (top1, top5
        and loss), "skipped" (updates), and "curve" ("images" seen and validation "top1" of each epoch).

    Raises:
        Interrupted: a signal stopped it; the run is saved.
        ValueError: see `vilonghorn.engine.Trainer`.
    """
    directory, sections, task = run_directory(folder, cell), run_config(study, folder, cell), study.tasks[cell.task]
    directory.parent.mkdir(parents=True, exist_ok=True)
    config_file = Path(f"{directory}.yaml")
    config_file.write_text(yaml.safe_dump(sections, sort_keys=False), encoding="utf-8")
    results = {**asdict(cell), "plan": plan_hash(study, folder, cell), "commit": commit}
    results["parameters"] = match_size(study, cell.task, cell.candidate)[1]
    with open(f"{directory}.txt", "a", encoding="utf-8") as output, redirect_stdout(output), redirect_stderr(output):
        config = load_config(config_file)
        loader = build_loader(config, pick_device(config.run.device), training=True)
        loader = StudyLoader(loader, task.parts)
        trainer = Trainer(config, train=loader, resume="auto")
        try:
            outcome = trainer.fit()
        except FloatingPointError as error:
            return results | {"seconds": round(trainer.progress.seconds, 1), "tests": None, "diverged": str(error)}
    batch = config.data.batch_size * config.optimizer.accumulate
    epochs = [record for record in read_log(RunDirectory(directory).log_file) if record["kind"] == "epoch"]
    curve = [{"images": record["update"] * batch, "top1": round(record["model"]["top1"], 3)} for record in epochs]
    return results | {
        "val": scores(outcome),
        "skipped": outcome["skipped"],
        "seconds": round(outcome["seconds"], 1),
        "curve": curve,
        "tests": measure(study, config, cell, folder),
    }


def scores(measured: dict[str, Any]) -> dict[str, float]:
    """Accuracy in percent and loss, rounded."""
    return {name: round(measured[name], 5) for name in ("top1", "top5", "loss")}


def measure(study: Study, config: Config, cell: Cell, folder: Path) -> dict[str, dict[str, float]]:
    """The scores of the final weights on the test sets of the task, by name."""
    device = pick_device(config.run.device)
    tests = {}
    for name, dataset in study.tasks[cell.task].test_datasets(cell.seed).items():
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
        tests[name] = {**scores(measured), "images": loader.num_samples, "chance": round(100 * dataset.chance, 5)}
    return tests
