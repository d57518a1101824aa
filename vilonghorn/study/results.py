"""The results of a study: selection of its runs, means over seeds, paired differences."""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .plan import Study

CONFIDENCE = 0.95
# Names in the files of earlier versions, and what they are now.
OLD_NAMES = {"contender": "candidate", '"floor"': '"min_lr_ratio"', "vilonghorn.tools.study": "vilonghorn.study"}


@dataclass
class Report:
    """Everything that a study measured, as its JSON file holds it."""

    study: str  # name of its file
    command: list[str]
    commit: str | None  # of the report; each cell has its own
    date: str  # UTC, ISO 8601
    machine: dict[str, Any]  # see `vilonghorn.bench.report.machine`
    finished: bool
    seconds: float  # of the last command
    plan: Study
    cells: list[dict[str, Any]]  # fields of `Cell` and results; "counts" marks the runs at the chosen rate

    def title(self, candidate: str) -> str:
        """What a candidate is called in tables."""
        return self.plan.candidates[candidate].title

    def tested(self, task: str, candidate: str) -> dict[int, dict[str, Any]]:
        """The tested runs of a candidate on a task, by seed."""
        key = task, candidate
        cells = (cell for cell in self.cells if (cell["task"], cell["candidate"]) == key)
        return {cell["seed"]: cell for cell in cells if cell["counts"] and cell["tests"]}

    def accuracies(self, task: str, test: str, candidate: str) -> dict[int, float]:
        """Test accuracy in percent, by seed."""
        return {seed: cell["tests"][test]["top1"] for seed, cell in self.tested(task, candidate).items()}

    def difference(self, task: str, test: str, candidate: str) -> "Interval | None":
        """Test accuracy less that of the reference, seed by seed; None without a common seed."""
        ours, theirs = (self.accuracies(task, test, name) for name in (candidate, self.plan.reference))
        values = [ours[seed] - theirs[seed] for seed in sorted(set(ours) & set(theirs))]
        return interval(values) if values else None


def read_report(path: Path) -> Report:
    """Reads the JSON file of a study."""
    text = path.read_text(encoding="utf-8")
    for old, new in OLD_NAMES.items():
        text = text.replace(old, new)
    values = json.loads(text)
    return Report(**{**values, "plan": Study(**values["plan"])})


def sweep_runs(
    study: Study, cells: Iterable[dict[str, Any]], task: str, candidate: str
) -> dict[float, list[dict[str, Any]]]:
    """The trained runs that choose the learning rate of a candidate on a task, by rate."""
    runs: dict[float, list[dict[str, Any]]] = {rate: [] for rate in study.tasks[task].sweep}
    for cell in cells:
        if (cell["task"], cell["candidate"]) == (task, candidate) and cell["seed"] in study.sweep_seeds:
            if cell["rate"] in runs and "seconds" in cell:
                runs[cell["rate"]].append(cell)
    return runs


def choose_rate(study: Study, cells: Iterable[dict[str, Any]], task: str, candidate: str) -> float | None:
    """The learning rate with the best mean validation accuracy; None before its sweep is finished.

    Of equal ones, the rate with the smaller loss. Rates at which a run diverged come last.
    """
    runs = sweep_runs(study, cells, study.tasks[task].rates_of or task, candidate)
    if any(len(found) < len(study.sweep_seeds) for found in runs.values()):
        return None

    def score(rate: float) -> tuple[float, float]:
        if any("diverged" in cell for cell in runs[rate]):
            return -1.0, 0.0
        return mean_validation(runs[rate], "top1"), -mean_validation(runs[rate], "loss")

    return max(runs, key=score)


def mean_validation(cells: Iterable[dict[str, Any]], name: str) -> float:
    """The mean of a validation figure of trained runs."""
    return statistics.fmean(cell["val"][name] for cell in cells)


class Interval(NamedTuple):
    """A mean over seeds and Student's 95% confidence interval; `std`, `low` and `high` are nan for one value."""

    mean: float
    std: float  # of the sample
    low: float
    high: float
    count: int

    @property
    def excludes_zero(self) -> bool:
        """Whether 0 is outside of the confidence interval."""
        return self.low > 0 or self.high < 0


def interval(values: Sequence[float]) -> Interval:
    """Mean, standard deviation and confidence interval of at least one value."""
    from scipy.stats import t  # a dependency of scikit-learn, which has the digits

    mean, count = statistics.fmean(values), len(values)
    if count == 1:
        return Interval(mean, math.nan, math.nan, math.nan, 1)
    std = statistics.stdev(values)
    half = float(t.ppf((1 + CONFIDENCE) / 2, count - 1)) * std / math.sqrt(count)
    return Interval(mean, std, mean - half, mean + half, count)
