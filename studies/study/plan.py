"""The plan of a study: candidates, tasks, learning rates and seeds, read from YAML and checked."""

import copy
from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import timm
import torch
import yaml
from jsonargparse import ArgumentError, ArgumentParser
from jsonargparse.typing import ClosedUnitInterval, NonNegativeInt

import vilonghorn  # noqa: F401  (registers the models)

from . import mixers, position  # noqa: F401  (registers their models)
from .tasks import Task, make_task


@dataclass
class Candidate:
    """A model of the comparison."""

    title: str  # name in tables
    model: str  # name in timm
    kwargs: dict[str, Any] = field(default_factory=dict)
    # At most one argument: its smallest value, largest value and step, to match the parameters of the reference.
    match: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    sweep: list[float] = field(default_factory=list)  # learning rates, instead of those of a task that has a sweep
    recipe: dict[str, dict[str, Any]] = field(default_factory=dict)  # changes to the recipe of the study and the task
    removed: bool = False  # this version lacks an argument of the model: finished runs count, no others are started


@dataclass
class TaskPlan:
    """A task and how it is trained."""

    kind: str  # see `make_task`
    options: dict[str, Any] = field(default_factory=dict)  # of the dataset
    folds: bool = False  # cross-validation: the option `fold` of a run's datasets is its seed
    count: dict[str, int] = field(default_factory=dict)  # number of samples by split, see `make_task`
    kwargs: dict[str, Any] = field(default_factory=dict)  # arguments of every model
    recipe: dict[str, dict[str, Any]] = field(default_factory=dict)  # changes to the recipe of the study
    parts: int = 1  # epochs that one pass over the training data is divided into; each ends with a validation
    sweep: list[float] = field(default_factory=list)  # learning rates to choose from by validation accuracy
    widen: NonNegativeInt = 0  # rates added, one by one, beyond the end of `sweep` at which the best rate lies
    rates_of: str | None = None  # another task whose chosen learning rates are used, instead of `sweep`
    min_lr_ratio: ClosedUnitInterval | None = None  # final / peak learning rate; None: `min_lr` of the recipe
    candidates: list[str] | None = None  # those that take part; None: all
    seeds: list[int] | None = None  # of the runs that are tested; None: those of the study
    tests: dict[str, dict[str, Any]] = field(default_factory=lambda: {"test": {}})  # changed options by test set
    test_count: dict[str, int] = field(default_factory=dict)  # changed number of samples by test set

    def dataset(self, split: str, seed: int = 1) -> Task:
        """The dataset of the "train" or "val" split in a run with that seed."""
        return make_task(self.kind, split, self.count.get(split), **self._options(seed))

    def test_datasets(self, seed: int = 1) -> dict[str, Task]:
        """The test sets of a run by name."""
        count = self.count.get("test")
        return {
            name: make_task(self.kind, "test", self.test_count.get(name, count), **{**self._options(seed), **options})
            for name, options in self.tests.items()
        }

    def _options(self, seed: int) -> dict[str, Any]:
        return {**self.options, "fold": seed} if self.folds else self.options


@dataclass
class Table:
    """A table and a plot of test accuracy."""

    title: str
    axis: str  # what the points differ in
    points: list[tuple[str, str, float]]  # task, test set and position on the axis
    log: bool = False  # whether the axis is logarithmic
    metric: Literal["top1", "top5"] = "top1"


@dataclass(frozen=True)
class Cell:
    """One training run of a study."""

    task: str
    candidate: str
    rate: float
    seed: int

    @property
    def id(self) -> str:
        """Path of the run, relative to the folder of runs."""
        return f"{self.task}/{self.candidate}/rate{self.rate:g}-seed{self.seed}"


@dataclass
class Study:
    """A comparison of models."""

    title: str
    reference: str  # the candidate that the others are compared with
    shared_kwargs: dict[str, Any]  # arguments of every model
    recipe: dict[str, dict[str, Any]]  # configuration of every run, by section, see docs/training.md
    candidates: dict[str, Candidate]
    tasks: dict[str, TaskPlan]
    tables: dict[str, Table]
    seeds: list[int]  # of the runs that are tested
    sweep_seeds: list[int]  # of the runs that choose the learning rates
    thresholds: list[float]  # validation accuracies in percent to which training images are counted
    tolerance: ClosedUnitInterval = 0.03  # allowed relative difference in parameters from the reference

    def __post_init__(self) -> None:
        for name, kind in (("candidates", Candidate), ("tasks", TaskPlan), ("tables", Table)):
            values = getattr(self, name).items()
            setattr(self, name, {key: kind(**value) if isinstance(value, dict) else value for key, value in values})

    def names(self, task: str) -> list[str]:
        """The candidates of a task."""
        return self.tasks[task].candidates or list(self.candidates)

    def seeds_of(self, task: str) -> list[int]:
        """The seeds of the runs of a task that are tested."""
        return self.tasks[task].seeds or self.seeds

    def pairs(self) -> Iterator[tuple[str, str]]:
        """All pairs of a task and a candidate."""
        return ((task, name) for task in self.tasks for name in self.names(task))


def read_study(path: Path) -> Study:
    """Reads and checks the YAML file of a study. Missing keys are those of the file that its `base` names.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: an unknown key, a value of a wrong type or out of range, or an unknown name.
    """
    if not path.is_file():
        found = ", ".join(sorted(file.stem for file in path.parent.glob("*.yaml"))) or "none"
        raise FileNotFoundError(f"there is no plan {path}; those in {path.parent}: {found}")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Study, "study")
    try:
        plan = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        if "base" in plan:
            base = yaml.safe_load((path.parent / plan.pop("base")).read_text(encoding="utf-8")) or {}
            plan = {**base, **plan, "recipe": merge(base.get("recipe", {}), plan.get("recipe", {}))}
        study = Study(**parser.parse_object({"study": plan}).study.as_dict())
        _check(study)
    except (ArgumentError, TypeError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
    return study


def _check(study: Study) -> None:
    """Refuses unknown names, rates that cannot be chosen, and tasks that cannot be made."""

    def known(name: str, names: Collection[str], kind: str) -> None:
        if name not in names:
            raise ValueError(f"there is no {kind} {name!r}; expected one of {', '.join(names)}")

    known(study.reference, study.candidates, "candidate")
    if len(set(study.seeds)) < 2:
        raise ValueError(f"seeds are {study.seeds}: a standard deviation needs at least two")
    for name, task in study.tasks.items():
        candidates = study.names(name)
        for candidate in candidates:
            known(candidate, study.candidates, "candidate")
        if study.reference not in candidates:
            raise ValueError(f"task {name} lacks the reference {study.reference}")
        if bool(task.sweep) == bool(task.rates_of):
            raise ValueError(f"task {name}: give either sweep (learning rates) or rates_of (the name of a task)")
        if task.rates_of is not None:
            known(task.rates_of, study.tasks, "task")
            if not study.tasks[task.rates_of].sweep or set(candidates) - set(study.names(task.rates_of)):
                raise ValueError(f"task {name}: {task.rates_of} of rates_of has no sweep for all candidates of {name}")
        for seed in study.seeds_of(name) + study.sweep_seeds:
            task.dataset("train", seed)
            task.dataset("val", seed)
            task.test_datasets(seed)
    for table in study.tables.values():
        for task_name, test, _ in table.points:
            known(task_name, study.tasks, "task")
            known(test, study.tasks[task_name].tests, "test set")


def merge(*layers: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Merges configurations by section; later values replace earlier ones."""
    result: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for name, section in layer.items():
            result.setdefault(name, {}).update(copy.deepcopy(section))
    return result


def match_size(study: Study, task: str, candidate: str) -> tuple[dict[str, Any], int]:
    """The arguments of a candidate on a task, and its number of parameters (0 for a candidate that is `removed`).

    Raises:
        ValueError: timm cannot make the model, or no value of `match` brings it within `tolerance` of the reference.
    """
    dataset = study.tasks[task].dataset("train")

    def kwargs(name: str, **more: Any) -> dict[str, Any]:
        return {**study.shared_kwargs, **study.tasks[task].kwargs, **study.candidates[name].kwargs, **more}

    def count(name: str, **more: Any) -> int:
        model = study.candidates[name].model
        return _num_parameters(model, yaml.safe_dump({**kwargs(name, **more), **data_arguments(model, dataset)}))

    if study.candidates[candidate].removed:
        return kwargs(candidate), 0
    target = count(study.reference)
    choices: list[dict[str, float]] = [{}]
    if study.candidates[candidate].match:
        ((name, (low, high, step)),) = study.candidates[candidate].match.items()
        values = np.arange(low, high + step / 2, step).tolist()
        choices = [{name: int(value) if value.is_integer() else value} for value in values]
    near = bisect_left(choices, target, key=lambda choice: count(candidate, **choice))  # sizes rise with the argument
    choices = choices[max(0, near - 1) : near + 1]
    size, choice = min(((count(candidate, **c), c) for c in choices), key=lambda pair: abs(pair[0] - target))
    if abs(size / target - 1) > study.tolerance:
        raise ValueError(
            f"{candidate} has {size:,} parameters on task {task}, {size / target - 1:+.1%} against {study.reference}, "
            f"at most {study.tolerance:.0%} is allowed: give it an argument to match, such as embed_dim: [56, 72, 1]"
        )
    return kwargs(candidate, **choice), size


def data_arguments(model: str, dataset: Any) -> dict[str, int]:
    """The arguments of a model of timm that follow from a dataset: classes, and the size if the model asks for it."""
    cfg = timm.get_pretrained_cfg(model.partition(".")[0])
    size = {"img_size": dataset.side} if cfg is not None and cfg.fixed_input_size else {}
    return {"num_classes": dataset.num_classes, **size}


@cache
def _num_parameters(model: str, kwargs: str) -> int:
    try:
        with torch.device("meta"):  # allocates nothing
            return sum(p.numel() for p in timm.create_model(model, **yaml.safe_load(kwargs)).parameters())
    except (TypeError, RuntimeError, AssertionError, ZeroDivisionError) as error:
        raise ValueError(f"timm cannot make {model} with {yaml.safe_load(kwargs)}: {error}") from error
