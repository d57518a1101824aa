"""What the results of a study say: means, spreads, paired differences with their confidence, images to an accuracy.

All reads the report of `study.report`; nothing is measured here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Report = dict[str, Any]
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and how sure it is.

    Attributes:
        mean: of the values.
        spread: their standard deviation (n - 1); nan of one value.
        low, high: Student's 95% confidence interval of the mean; infinite for one value.
        count: values.
    """

    mean: float
    spread: float
    low: float
    high: float
    count: int

    @property
    def beyond(self) -> bool:
        """Whether 0 is outside of the confidence interval."""
        return self.low > 0 or self.high < 0


def interval(values: Sequence[float]) -> Interval:
    """Mean, spread and Student's confidence interval of at least one value."""
    from scipy.stats import t  # comes with scikit-learn, whose digits the tasks are made of

    mean, count = statistics.fmean(values), len(values)
    if count == 1:
        return Interval(mean, math.nan, -math.inf, math.inf, 1)
    spread = statistics.stdev(values)
    half = float(t.ppf((1 + CONFIDENCE) / 2, count - 1)) * spread / math.sqrt(count)
    return Interval(mean, spread, mean - half, mean + half, count)


def counted(report: Report, task: str, contender: str) -> dict[int, dict[str, Any]]:
    """The tested runs of a contender on a task, by seed."""
    cells = (
        c for c in report["cells"] if c["counts"] and c["tests"] and (c["task"], c["contender"]) == (task, contender)
    )
    return {cell["seed"]: cell for cell in cells}


def accuracies(report: Report, task: str, test: str, contender: str) -> dict[int, float]:
    """Test accuracy in percent, by seed."""
    return {seed: cell["tests"][test]["top1"] for seed, cell in counted(report, task, contender).items()}


def difference(ours: dict[int, float], theirs: dict[int, float]) -> Interval | None:
    """Ours less theirs, seed by seed; None if they have no seed in common."""
    common = sorted(set(ours) & set(theirs))
    return interval([ours[seed] - theirs[seed] for seed in common]) if common else None


def contenders(report: Report, task: str) -> list[str]:
    """Those that take part in a task, in the order of the study."""
    return report["plan"]["tasks"][task]["contenders"] or list(report["plan"]["contenders"])


def chosen_rate(report: Report, task: str, contender: str) -> float | None:
    """The rate of the runs that count."""
    return next((cell["rate"] for cell in counted(report, task, contender).values()), None)


def sweep(report: Report, task: str, contender: str) -> dict[float, float]:
    """Mean validation accuracy in percent at the end of the sweep's runs, by rate, without rates that diverged."""
    lost, found = lost_rates(report, task, contender), dict[float, list[float]]()
    for cell in _sweep_cells(report, task, contender):
        if "val" in cell:
            found.setdefault(cell["rate"], []).append(cell["val"]["top1"])
    rates = report["plan"]["tasks"][task]["sweep"]
    return {rate: statistics.fmean(found[rate]) for rate in rates if rate in found and rate not in lost}


def lost_rates(report: Report, task: str, contender: str) -> set[float]:
    """Rates from which some run of the sweep diverged."""
    return {cell["rate"] for cell in _sweep_cells(report, task, contender) if "diverged" in cell}


def _sweep_cells(report: Report, task: str, contender: str) -> list[dict[str, Any]]:
    seeds = report["plan"]["sweep_seeds"]
    return [c for c in report["cells"] if (c["task"], c["contender"]) == (task, contender) and c["seed"] in seeds]


def images_to(curve: Sequence[dict[str, Any]], accuracy: float, chance: float) -> float | None:
    """Training images seen when validation accuracy first reached a value; None if it never did.

    Between epochs the accuracy is taken to rise linearly, from chance before the first.

    Args:
        curve: of each epoch, images and top1.
        accuracy: in percent.
        chance: in percent.
    """
    before, seen = chance, 0.0
    for point in curve:
        if point["top1"] >= accuracy:
            share = (accuracy - before) / (point["top1"] - before) if point["top1"] > before else 1.0
            return seen + max(0.0, share) * (point["images"] - seen)
        before, seen = point["top1"], point["images"]
    return None


def efficiency(report: Report, task: str, contender: str, accuracy: float) -> dict[int, float | None]:
    """Images seen to an accuracy, by seed; None for seeds that never reached it."""
    found = {}
    for seed, cell in counted(report, task, contender).items():
        chance = min(test["chance"] for test in cell["tests"].values())
        found[seed] = images_to(cell["curve"], accuracy, chance)
    return found


def ratio(ours: dict[int, float | None], theirs: dict[int, float | None]) -> Interval | None:
    """How many times as many images we take, as a geometric mean over the seeds in which both reached the accuracy."""
    logs = [math.log(ours[s] / theirs[s]) for s in sorted(set(ours) & set(theirs)) if ours[s] and theirs[s]]
    if not logs:
        return None
    found = interval(logs)
    low, high = math.exp(found.low), math.exp(min(found.high, 700.0)) if found.count > 1 else math.inf
    return Interval(math.exp(found.mean), math.nan, low, high, found.count)


def cost(report: Report, task: str, contender: str) -> tuple[float, float] | None:
    """Milliseconds and kept megabytes a training image: medians over the runs that count."""
    cells = [cell for cell in counted(report, task, contender).values() if cell["ms_per_image"]]
    if not cells:
        return None
    return tuple(
        statistics.median(cell[name] for cell in cells) * f
        for name, f in (("ms_per_image", 1), ("kept_bytes_per_image", 1e-6))
    )
