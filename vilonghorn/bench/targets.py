"""What the library means to reach on a CPU, and whether a run of the benchmark says that it does."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

from .report import paired_ratio, tokens

TINY, EXACT, SMALL = "vilonghorn_tiny", "vilonghorn_tiny_exact", "vilonghorn_small"
DEIT_TINY, DEIT_SMALL = "deit_tiny_patch16_224", "deit_small_patch16_224"
Report = dict[str, Any]


class Target(NamedTuple):
    """A quantity, what it may be at most, and what it is; `value` is None where the run did not measure it."""

    what: str
    limit: float
    value: float | None

    @property
    def verdict(self) -> str:
        return "not measured" if self.value is None else "met" if self.value <= self.limit else "NOT MET"


def targets(report: Report) -> list[Target]:
    """Every target, from a report's rows."""
    return [Target(what, limit, value) for what, limit, value in _targets(report)]


def _targets(report: Report) -> Iterator[tuple[str, float, float | None]]:
    scans = {(row["rule"], row["form"], row["train"]): row for row in report.get("scan", []) if row["ms"]}
    models = {(row["model"], row["size"], row["train"]): row for row in report.get("models", []) if row.get("ms")}
    step = {False: "forward", True: "forward + backward"}

    for train, limit in ((False, 1.8), (True, 2.2)):
        for rule in ("longhorn", "longhorn_exact"):
            row = scans.get((rule, "cpu", train))
            value = row and paired_ratio(row["ms"], row["arithmetic_ms"])
            yield f"scan, {rule}, {step[train]}: time to its arithmetic floor", limit, value
    for train in step:
        pair = scans.get(("longhorn_exact", "cpu", train)), scans.get(("longhorn", "cpu", train))
        yield f"scan, {step[train]}: time of longhorn_exact to longhorn", 1.1, _ratio(*pair, "ms")

    def against(ours: str, theirs: str, size: int, train: bool, key: str = "ms") -> float | None:
        return _ratio(models.get((ours, size, train)), models.get((theirs, size, train)), key)

    limits = {224: (1.2, 1.3), 512: (0.75, 0.75), 1024: (0.45, 0.45)}
    for size, limit in limits.items():
        for train in step:
            yield (
                f"{TINY} to {DEIT_TINY}, {size} px, {step[train]}",
                limit[train],
                against(TINY, DEIT_TINY, size, train),
            )
    for train in step:
        yield (
            f"{SMALL} to {DEIT_SMALL}, 224 px, {step[train]}",
            limits[224][train],
            against(SMALL, DEIT_SMALL, 224, train),
        )
    ends = {(row["size"], row["train"]): row for row in report.get("growth", []) if row["ms"]}
    for train in step:
        large, usual = (ends.get((size, train)) for size in (1248, 224))
        value = _ratio(large, usual, "ms")
        value = value and value * tokens(usual) / tokens(large)
        yield f"{TINY}, {step[train]}: time of a token at 1248 px to 224 px", 1.25, value
    memory = against(TINY, DEIT_TINY, 512, True, "memory_gb")
    yield f"{TINY} to {DEIT_TINY}, 512 px: peak memory of forward + backward", 1.0, memory


def per_token(row: dict[str, Any] | None) -> float | None:
    """Milliseconds a token, of a model with patches of 16 pixels and a class token."""
    return row and statistics.median(row["ms"]) / tokens(row)


def _ratio(ours: dict[str, Any] | None, theirs: dict[str, Any] | None, key: str) -> float | None:
    if not (ours and theirs and ours[key] and theirs[key]):
        return None
    return paired_ratio(ours[key], theirs[key]) if key == "ms" else ours[key] / theirs[key]


def report_targets(report: Report) -> list[dict[str, Any]]:
    """Prints a line for each target; returns them as plain data."""
    found = targets(report)
    print(f"\n{'target':92}{'at most':>9}{'is':>9}")
    for target in found:
        value = "-" if target.value is None else f"{target.value:.2f}"
        print(f"  {target.what:90}{target.limit:9.2f}{value:>9}   {target.verdict}")
    return [target._asdict() | dict(verdict=target.verdict) for target in found]
