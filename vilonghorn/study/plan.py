"""What a study is: contenders, tasks, rates and seeds, read from YAML and checked, and the cells that it consists of.

A cell is one training run: a contender on a task at a learning rate from a seed. How one is run is in study_cell.py,
which ones and when in study.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from ..data.specimens import SPLITS
from .tasks import Digits, Recall, make_task


@dataclass
class Contender:
    """A model of the comparison.

    Args:
        title: what it is called in tables
        model: timm's name of it
        kwargs: its keywords
        match: at most one keyword, and its smallest and largest value and step, of which the value is taken that brings the
            parameters nearest to those of the reference
    """

    title: str
    model: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    match: dict[str, tuple[float, float, float]] = field(default_factory=dict)


@dataclass
class TaskPlan:
    """A task and how it is learned.

    Args:
        kind: digits or recall, see vilonghorn.study.tasks
        options: of its mosaics or pictures
        count: how many of each split; digits have as many as there are
        kwargs: keywords of every contender on this task
        recipe: changes to the recipe of the study
        parts: epochs that a pass over the training data is cut into, each of which ends with a validation
        sweep: learning rates to choose from, on the validation split
        rates_of: the task whose chosen rates this one takes over, instead of a sweep of its own
        floor: share of the learning rate that is left at the end; default what the recipe says of min_lr
        contenders: which take part; default all
        tests: names of test sets, and how their options differ from the task's
        test_count: sizes of test sets that differ from the task's
    """

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    count: dict[str, int] = field(default_factory=dict)
    kwargs: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, dict[str, Any]] = field(default_factory=dict)
    parts: int = 1
    sweep: list[float] = field(default_factory=list)
    rates_of: str | None = None
    floor: float | None = None
    contenders: list[str] | None = None
    tests: dict[str, dict[str, Any]] = field(default_factory=lambda: {"test": {}})
    test_count: dict[str, int] = field(default_factory=dict)

    def dataset(self, split: str, test: str | None = None) -> Digits | Recall:
        """A split, or one of the test sets, as a map-style dataset."""
        options = {**self.options, **self.tests.get(test or "", {})}
        count = self.test_count.get(test or "", self.count.get(split))
        return make_task(self.kind, split, **options, **({} if count is None else {"count": count}))


@dataclass
class Table:
    """A table and a plot of test results.

    Args:
        title: what it answers
        axis: what its points differ in
        points: task, test set, and where it stands on the axis
        log: whether the axis is logarithmic
    """

    title: str
    axis: str
    points: list[tuple[str, str, float]]
    log: bool = False


@dataclass
class Study:
    """A comparison.

    Args:
        title: one sentence
        reference: the contender that others are compared with
        trunk: keywords that all contenders share
        recipe: sections of the configuration of every run, see docs/training.md
        contenders: by name
        tasks: by name
        tables: by name
        seeds: of the runs that count
        sweep_seeds: of the runs that the rates are chosen by
        thresholds: accuracies in percent at which images seen are compared
    """

    title: str
    reference: str
    trunk: dict[str, Any]
    recipe: dict[str, dict[str, Any]]
    contenders: dict[str, Contender]
    tasks: dict[str, TaskPlan]
    tables: dict[str, Table]
    seeds: list[int]
    sweep_seeds: list[int]
    thresholds: list[float]

    def names(self, task: str) -> list[str]:
        """The contenders of a task."""
        return self.tasks[task].contenders or list(self.contenders)

    def sweep_cells(self) -> Iterator[Cell]:
        """The runs that rates are chosen by."""
        for task, plan in self.tasks.items():
            for contender in self.names(task):
                for rate in plan.sweep:
                    for seed in self.sweep_seeds:
                        yield Cell(task, contender, rate, seed)

    def to_dict(self) -> dict[str, Any]:
        """Plain and nested."""
        return asdict(self)


@dataclass(frozen=True)
class Cell:
    """One training run."""

    task: str
    contender: str
    rate: float
    seed: int

    @property
    def id(self) -> str:
        return f"{self.task}/{self.contender}/rate{self.rate:g}-seed{self.seed}"


def read_study(path: Path) -> Study:
    """Reads and checks the YAML of a study; keys that it lacks are those of the study that its `base` names.

    Raises:
        FileNotFoundError: there is none.
        ValueError: an unknown key, a value of the wrong type, or a name that means nothing.
    """
    if not path.is_file():
        there = ", ".join(sorted(file.stem for file in path.parent.glob("*.yaml"))) or "none"
        raise FileNotFoundError(f"there is no study {path}; those in {path.parent}: {there}")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Study, "study")
    try:
        plan = yaml.safe_load(path.read_text(encoding="utf-8"))
        if "base" in plan:
            base = yaml.safe_load((path.parent / plan.pop("base")).read_text(encoding="utf-8"))
            plan = {**base, **plan, "recipe": merged(base["recipe"], plan.get("recipe", {}))}
        values = parser.parse_object({"study": plan}).study.as_dict()
    except (ArgumentError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
    for name, kind in (("contenders", Contender), ("tasks", TaskPlan), ("tables", Table)):
        values[name] = {key: kind(**value) for key, value in values[name].items()}
    study = Study(**values)
    try:
        check(study)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    return study


def check(study: Study) -> None:
    """Refuses names that mean nothing and tasks that cannot be made; `study_match` sees to the sizes of contenders."""
    known(study.reference, study.contenders, "contender")
    for name, contender in study.contenders.items():
        if len(contender.match) > 1:
            raise ValueError(f"contender {name} matches {', '.join(sorted(contender.match))}; expected one keyword")
    for name, task in study.tasks.items():
        for contender in study.names(name):
            known(contender, study.contenders, "contender")
        if study.reference not in study.names(name):
            raise ValueError(f"task {name} is without the reference {study.reference}")
        if bool(task.sweep) == bool(task.rates_of):
            raise ValueError(
                f"task {name}: give either sweep, learning rates to choose from, or rates_of, another task"
            )
        if task.floor is not None and not 0 <= task.floor <= 1:
            raise ValueError(f"task {name}: floor is {task.floor}, expected a share of the learning rate from 0 to 1")
        if task.rates_of is not None:
            known(task.rates_of, study.tasks, "task")
            if not study.tasks[task.rates_of].sweep or set(study.names(name)) - set(study.names(task.rates_of)):
                raise ValueError(f"task {name} takes rates of {task.rates_of}, which does not choose them for all")
        for split in SPLITS[:2]:
            task.dataset(split)
        for test in task.tests:
            task.dataset("test", test)
    for table in study.tables.values():
        for task, test, _ in table.points:
            known(task, study.tasks, "task")
            known(test, study.tasks[task].tests, "test set")
    if len(set(study.seeds)) < 2:
        raise ValueError(f"seeds are {study.seeds}: a spread takes at least two")


def known(name: str, names: Any, what: str) -> None:
    """Refuses a name that is not among the names."""
    if name not in names:
        raise ValueError(f"there is no {what} {name!r}; expected one of {', '.join(names)}")


def merged(*layers: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Sections of a configuration, later ones over earlier ones."""
    result: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for name, section in layer.items():
            result[name] = {**result.get(name, {}), **copy.deepcopy(section)}
    return result
