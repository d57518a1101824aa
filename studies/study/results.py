"""The results of a study: its file, the choice of learning rates, means over seeds, paired differences."""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vilonghorn.data.atomic_files import write_json

from .plan import Cell, Study

CONFIDENCE = 0.95


@dataclass
class Report:
    """Everything that a study measured, as its JSON file holds it."""

    study: str  # name of its file
    command: list[str]
    commit: str | None  # of the report; each cell has its own
    date: str  # UTC, ISO 8601
    machine: dict[str, Any]  # see `vilonghorn.engine.environment.machine`
    finished: bool
    plan: Study
    cells: list[dict[str, Any]]  # one finished run each: fields of `Cell`, and its results, see `run_cell`

    def title(self, candidate: str) -> str:
        """What a candidate is called in tables."""
        return self.plan.candidates[candidate].title

    def tested(self, task: str, candidate: str) -> dict[int, dict[str, Any]]:
        """The runs of a candidate on a task at its chosen rate, by seed, without those that diverged."""
        key = task, candidate, choose_rate(self.plan, self.cells, task, candidate)
        cells = (cell for cell in self.cells if (cell["task"], cell["candidate"], cell["rate"]) == key)
        return {cell["seed"]: cell for cell in cells if cell["seed"] in self.plan.seeds_of(task) and cell["tests"]}

    def accuracies(self, task: str, test: str, candidate: str, metric: str = "top1") -> dict[int, float]:
        """Test accuracy in percent, by seed; `metric` is "top1" or "top5"."""
        return {seed: cell["tests"][test][metric] for seed, cell in self.tested(task, candidate).items()}

    def difference(self, task: str, test: str, candidate: str, metric: str = "top1") -> "Interval | None":
        """Test accuracy less that of the reference, seed by seed; None without a common seed."""
        ours, theirs = (self.accuracies(task, test, name, metric) for name in (candidate, self.plan.reference))
        values = [ours[seed] - theirs[seed] for seed in sorted(set(ours) & set(theirs))]
        return interval(values) if values else None

    def adjusted(self) -> dict[tuple[str, str, str, str], float]:
        """Holm's p-values of all differences in the tables, by task, test set, candidate and metric."""
        found = {}
        for table in self.plan.tables.values():
            for task, test, _ in table.points:
                for name in self.plan.names(task):
                    one = self.difference(task, test, name, table.metric) if name != self.plan.reference else None
                    if one is not None and one.count > 1:
                        found[task, test, name, table.metric] = one.pvalue
        return dict(zip(found, holm(list(found.values()))))


def write_report(report: Report, path: Path) -> None:
    """Writes the JSON file of a study, a line for each run; its folder exists."""
    write_json(path, asdict(report))


def read_report(path: Path) -> Report:
    """Reads the JSON file of a study.

    Raises:
        OSError: it cannot be read.
        ValueError: it is something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        plan = values["plan"]
        if "trunk" in plan:  # what older files call it
            plan["shared_kwargs"] = plan.pop("trunk")
        return Report(**{**values, "plan": Study(**plan)})
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not the JSON file of a study ({type(error).__name__}: {error})") from error


def sweep_runs(
    study: Study, cells: Iterable[dict[str, Any]], task: str, candidate: str
) -> dict[float, list[dict[str, Any]]]:
    """The finished runs that choose the learning rate of a candidate on a task, by rate in ascending order.

    The rates are those of the candidate, or else of the task, and those that they are widened by: while the best rate
    is the first or the last, and `widen` allows, one more follows beyond it, at the ratio of the two rates at that end.
    """
    plan = study.tasks[task]
    found: dict[float, list[dict[str, Any]]] = {}
    for cell in cells:
        if (cell["task"], cell["candidate"]) == (task, candidate) and cell["seed"] in study.sweep_seeds:
            found.setdefault(cell["rate"], []).append(cell)
    rates = sorted(plan.sweep and (study.candidates[candidate].sweep or plan.sweep))
    for _ in range(plan.widen if len(rates) > 1 else 0):
        best = best_rate(study, {rate: found.get(rate, []) for rate in rates})
        if best == rates[0]:
            rates.insert(0, float(f"{best * best / rates[1]:.3g}"))
        elif best == rates[-1]:
            rates.append(float(f"{best * best / rates[-2]:.3g}"))
    return {rate: found.get(rate, []) for rate in rates}


def best_rate(study: Study, runs: dict[float, list[dict[str, Any]]]) -> float | None:
    """The learning rate with the best mean validation accuracy; None while a run of the sweep is missing.

    Of equal ones, the rate with the smaller loss. Rates at which a run diverged come last.
    """
    if any(len(cells) < len(study.sweep_seeds) for cells in runs.values()):
        return None

    def score(rate: float) -> tuple[float, float]:
        if any("diverged" in cell for cell in runs[rate]):
            return -1.0, 0.0
        return mean_validation(runs[rate], "top1"), -mean_validation(runs[rate], "loss")

    return max(runs, key=score)


def choose_rate(study: Study, cells: Iterable[dict[str, Any]], task: str, candidate: str) -> float | None:
    """The learning rate of a candidate on a task: the best of its sweep, or of that of the task in `rates_of`."""
    return best_rate(study, sweep_runs(study, cells, study.tasks[task].rates_of or task, candidate))


def remaining_cells(study: Study, cells: Sequence[dict[str, Any]], tasks: Iterable[str]) -> list[Cell]:
    """The runs that are missing and can be made now, in the order of `tasks`: of each the sweep, then the seeds."""
    wanted: dict[Cell, None] = {}
    for task in tasks:
        for name in study.names(task) if study.tasks[task].sweep else ():
            rates = sweep_runs(study, cells, task, name)
            wanted |= dict.fromkeys(Cell(task, name, rate, seed) for rate in rates for seed in study.sweep_seeds)
        rates = {name: choose_rate(study, cells, task, name) for name in study.names(task)}
        for seed in study.seeds_of(task):
            wanted |= dict.fromkeys(Cell(task, name, rate, seed) for name, rate in rates.items() if rate is not None)
    done = {cell_of(cell) for cell in cells}
    return [cell for cell in wanted if cell not in done and not study.candidates[cell.candidate].removed]


def cell_of(result: dict[str, Any]) -> Cell:
    """The cell of a result."""
    return Cell(result["task"], result["candidate"], result["rate"], result["seed"])


def mean_validation(cells: Iterable[dict[str, Any]], name: str) -> float:
    """The mean of a validation figure of trained runs."""
    return statistics.fmean(cell["val"][name] for cell in cells)


class Interval(NamedTuple):
    """A mean over seeds, Student's 95% confidence interval, and the p-value of a mean of 0.

    `std`, `low`, `high` and `pvalue` are nan for one value.
    """

    mean: float
    std: float  # of the sample
    low: float
    high: float
    count: int
    pvalue: float


def interval(values: Sequence[float]) -> Interval:
    """Mean, standard deviation, confidence interval and two-sided p-value of at least one value."""
    from scipy.stats import t  # of the extra [comparison]

    mean, count = statistics.fmean(values), len(values)
    if count == 1:
        return Interval(mean, math.nan, math.nan, math.nan, 1, math.nan)
    error = statistics.stdev(values) / math.sqrt(count)
    half = float(t.ppf((1 + CONFIDENCE) / 2, count - 1)) * error
    pvalue = 2 * float(t.sf(abs(mean) / error, count - 1)) if error else float(mean == 0)
    return Interval(mean, statistics.stdev(values), mean - half, mean + half, count, pvalue)


def holm(pvalues: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: below 0.05 means that the family-wise error rate is at most 5%.

    Source: Holm, "A simple sequentially rejective multiple test procedure", 1979.
    """
    adjusted, highest = [0.0] * len(pvalues), 0.0
    for rank, index in enumerate(sorted(range(len(pvalues)), key=pvalues.__getitem__)):
        highest = max(highest, min(1.0, (len(pvalues) - rank) * pvalues[index]))
        adjusted[index] = highest
    return adjusted
