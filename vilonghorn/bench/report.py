"""Tables and targets of the benchmark, from the report that it saves as JSON.

The report is one object with `command`, `date`, `machine`, `finished`, `seconds` by subject, and lists of rows. A row
has `train` (with backward); `ms`, `memory_gb` and `problem` of `run_interleaved`; and

    scan     workload, rule, backend; compute_bound_ms and memory_bound_ms, the roofline of each round
    models   model, size (pixels), batch, compiled, precision
    growth   as models: one model at its smallest and its largest size, timed against each other

`rates` has multiply-adds and copied bytes a second, by workload and step; `profile` one training step; `targets` the
verdicts.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from .candidates import FAMILIES, LOOP, PEER, STEPS
from .interleaved import Row

Report = dict[str, Any]
Line = dict[str, str]  # of a table: text by column
TINY, SMALL = "vilonghorn_tiny", "vilonghorn_small"
DEIT_TINY, DEIT_SMALL = (family[0] for family in FAMILIES)


def ratio(row: Row | None, other: Row | None, key: str = "ms") -> float | None:
    """The median over rounds of a row's `ms` to another's `key`, or the ratio of `memory_gb`; None if one is absent."""
    if not (row and other and row["ms"] and other.get(key)):
        return None
    if key == "memory_gb":
        return row[key] / other[key]
    return statistics.median(a / b for a, b in zip(row["ms"], other[key]))


def tokens(row: Row) -> int:
    """Tokens in the batch of a model with patches of 16 pixels and a class token."""
    return row["batch"] * ((row["size"] // 16) ** 2 + 1)


def by(rows: Sequence[Row], *keys: str) -> dict[tuple, Row]:
    """Rows with figures, by the values of some keys and by `train`."""
    return {(*(row[key] for key in keys), row["train"]): row for row in rows if row["ms"]}


def targets(report: Report) -> list[dict[str, Any]]:
    """The targets on a CPU: target, at_most, value (None: not measured), verdict."""
    scans = by(report.get("scan", []), "rule", "backend")
    models, growth = by(report.get("models", []), "model", "size"), by(report.get("growth", []), "size")
    found: list[dict[str, Any]] = []

    def add(target: str, at_most: float, value: float | None) -> None:
        verdict = "not measured" if value is None else "met" if value <= at_most else "NOT MET"
        found.append(dict(target=target, at_most=at_most, value=value, verdict=verdict))

    for train, limit in ((False, 1.8), (True, 2.2)):
        for rule in ("longhorn", "longhorn_exact"):
            row = scans.get((rule, "cpu", train))
            add(f"scan, {rule}, {STEPS[train]}: time to its compute bound", limit, ratio(row, row, "compute_bound_ms"))
    for train, step in STEPS.items():
        exact, diagonal = (scans.get((rule, "cpu", train)) for rule in ("longhorn_exact", "longhorn"))
        add(f"scan, {step}: time of longhorn_exact to longhorn", 1.1, ratio(exact, diagonal))
    for ours, theirs, size, limits in (
        (TINY, DEIT_TINY, 224, (1.2, 1.3)),
        (TINY, DEIT_TINY, 512, (0.75, 0.75)),
        (TINY, DEIT_TINY, 1024, (0.45, 0.45)),
        (SMALL, DEIT_SMALL, 224, (1.2, 1.3)),
    ):
        for train, step in STEPS.items():
            value = ratio(models.get((ours, size, train)), models.get((theirs, size, train)))
            add(f"{ours} to {theirs}, {size} px, {step}", limits[train], value)
    for train, step in STEPS.items():
        large, small = growth.get((1248, train)), growth.get((224, train))
        times = ratio(large, small)
        value = times and times * tokens(small) / tokens(large)
        add(f"{TINY}, {step}: time of a token at 1248 px to 224 px", 1.25, value)
    value = ratio(models.get((TINY, 512, True)), models.get((DEIT_TINY, 512, True)), "memory_gb")
    add(f"{TINY} to {DEIT_TINY}, 512 px: peak memory of forward + backward", 1.0, value)
    return found


def target_lines(report: Report) -> list[Line]:
    """Each target and its verdict."""
    return [
        {"target": target["target"], "at most": f"{target['at_most']:.2f}", "measured": figure(target["value"])}
        | {"verdict": f"**{target['verdict']}**" if "NOT" in target["verdict"] else target["verdict"]}
        for target in targets(report)
    ]


def scan_lines(report: Report) -> dict[str, list[Line]]:
    """By workload: time by rule and backend, speed against the loop or the peer, and time against the roofline."""
    scans = by(report["scan"], "workload", "rule", "backend")
    base = PEER if any(backend == PEER for _, _, backend, _ in scans) else LOOP
    lines: dict[str, list[Line]] = {}
    for (workload, rule, backend, train), row in scans.items():
        line = {"rule": rule, "backend": backend, "step": STEPS[train], "ms": figure(median(row))}
        line["lowest to highest"] = f"{min(row['ms']):.2f} to {max(row['ms']):.2f}"
        line[f"times faster than {base}"] = figure(ratio(scans.get((workload, rule, base, train)), row), 1)
        for bound in ("compute", "memory"):
            line[f"time to {bound} bound"] = figure(ratio(row, row, f"{bound}_bound_ms"))
        lines.setdefault(workload, []).append(line)
    return lines


def model_lines(report: Report) -> list[Line]:
    """Each model and size: time, and time and memory against the first of its family, in bold above 1."""
    models, lines = by(report["models"], "model", "size"), []
    first = {name: family[0] for family in FAMILIES for name in family}
    cells = dict.fromkeys((row["model"], row["size"], row["batch"], row["compiled"]) for row in report["models"])
    for name, size, batch, compiled in cells:
        line = {"px": f"{size}", "batch": f"{batch}", "model": f"`{name}`" + ", compiled" * compiled}
        for train, step in STEPS.items():
            row, deit = (models.get((model, size, train)) for model in (name, first.get(name)))
            # Spaces make the columns of the two steps different.
            line[f"{step}: ms"] = figure(median(row), 1)
            line["us/token" + " " * train] = figure(row and 1e3 * median(row) / tokens(row), 0)
            line["to DeiT" + " " * train] = figure(ratio(row, deit), bold_above=1)
        line["its peak memory: GB"] = figure(row and row["memory_gb"])
        line["to DeiT  "] = figure(ratio(row, deit, "memory_gb"), bold_above=1)
        lines.append(line)
    return lines


def profile_lines(profile: Row) -> list[Line]:
    """The 12 operators of one training step that take the most time of their own."""
    return [
        {"operator": f"`{op['op']}`", "calls": f"{op['calls']:.0f}", "ms": f"{op['ms']:.1f}"}
        | {"share": f"{op['ms'] / profile['ms']:.0%}"}
        for op in profile["ops"][:12]
    ]


def problems(report: Report) -> list[str]:
    """A line for each row without figures."""
    names = ("workload", "rule", "backend", "model", "size")
    return [
        f"{', '.join(str(row[name]) for name in names if name in row)}, {STEPS[row['train']]}: {row['problem']}"
        for subject in ("scan", "models", "growth")
        for row in report.get(subject, [])
        if row["problem"]
    ]


def figure(value: float | None, digits: int = 2, bold_above: float = math.inf) -> str:
    """A figure as text, "-" for None."""
    if value is None:
        return "-"
    text = f"{value:.{digits if value < 100 else 0}f}"
    return f"**{text}**" if value > bold_above else text


def median(row: Row | None) -> float | None:
    """The median time of a row, None without one."""
    return statistics.median(row["ms"]) if row else None
