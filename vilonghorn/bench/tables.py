"""The tables of docs/performance.md and of the README, in Markdown, out of reports of the benchmark.

Each public function takes the reports of all runs in order; a cell has a figure of each, with a dash for what was not
measured. For the rows of a report see `bench_report`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from vilonghorn.ops.validate import RULES

from .cpu import FAMILIES, LOOP, STEPS
from .floor import SLOTS
from .profile import shares
from .report import paired_ratio
from .targets import DEIT_SMALL, DEIT_TINY, EXACT, SMALL, TINY, per_token, targets

Report = dict[str, Any]
Row = dict[str, Any]


def machines(reports: Sequence[Report]) -> str:
    """Each run: its file, its machine, its command."""
    lines = []
    for i, report in enumerate(reports, 1):
        found, command = report["machine"], " ".join(report["command"])
        lines.append(
            f"{i}. [{report['file']}](performance/{report['file']}), {report['date'][:10]}: {found['cpu']}, "
            f"{found['threads']} threads on {found['cores']} cores, load {found['load']:.2f} before it began, "
            f"Python {found['python']}, torch {found['torch']}, timm {found['timm']}; "
            f"{sum(report['seconds'].values()) / 60:.0f} min.\n   `{command}`"
        )
    return "\n".join(lines)


def verdicts(reports: Sequence[Report]) -> str:
    """Each target, and what every run says to it."""
    columns = [targets(report) for report in reports]
    heads = ["target", "at most", *(f"run {i + 1}" for i in range(len(columns))), "verdict"]
    rows = []
    for same in zip(*columns):
        found = list(dict.fromkeys(target.verdict for target in same))
        shown = found[0] if len(found) == 1 else " / ".join(target.verdict for target in same)
        values = [_number(target.value, 2) for target in same]
        rows.append([same[0].what, f"{same[0].limit:.2f}", *values, f"**{shown}**" if "NOT" in shown else shown])
    return _table(heads, rows)


def shape(reports: Sequence[Report]) -> str:
    """Sizes of the scan."""
    B, L, D, N = (reports[0]["shape"][name] for name in "BLDN")
    return f"Batch {B}, {L} tokens, {D} channels, {N} states, one direction with gate and skip."


def slots(reports: Sequence[Report]) -> str:
    """What the floors were counted as."""
    N = reports[0]["shape"]["N"]
    found = {key: state * N + own for key, (state, own) in SLOTS.items()}
    rules = (f"`{rule}` {found[rule, False]} forward and {found[rule, True]} with backward" for rule in RULES)
    return f"For a token and a channel of {N} states, that is {', '.join(rules)}."


def scan(reports: Sequence[Report]) -> str:
    """Every rule and form, forward, and forward with backward."""
    heads = ["rule", "", "ms", "spread", "against the loop", "to the arithmetic floor", "to the bytes' floor"]
    parts = []
    for train, step in STEPS.items():
        tables, rows = [_scans(report) for report in reports], []
        for rule, form in dict.fromkeys(key[:2] for table in tables for key in table):
            same = [(t.get((rule, form, train)), t.get((rule, LOOP, train))) for t in tables]
            rows.append(
                [
                    rule,
                    form,
                    _each(same, lambda row, _: _median(row), 2),
                    _spread([row for row, _ in same]),
                    _each(same, lambda row, loop: 1 / _ratio(row, loop), 1) + " times faster" if form != LOOP else "",
                    *(
                        _each(same, lambda row, _: paired_ratio(row["ms"], row[f"{f}_ms"]), 2)
                        for f in ("arithmetic", "bytes")
                    ),
                ]
            )
        parts.append(f"{step[0].upper()}{step[1:]}:\n\n" + _table(heads, rows))
    return "\n\n".join(parts)


def models(reports: Sequence[Report]) -> str:
    """Every model and size against DeiT, and the plot."""
    heads = [
        "px",
        "batch",
        "model",
        *(h for s in STEPS.values() for h in (f"{s}, ms", "to DeiT")),
        "its memory, GB",
        "to DeiT",
    ]
    tables = [_cells(report) for report in reports]
    rows = []
    for family in FAMILIES:
        for size in sorted({size for table in tables for _, size, _ in table}):
            for name in family:
                found = [
                    [(t.get((name, size, train)), t.get((family[0], size, train))) for t in tables] for train in STEPS
                ]
                known = [row for row, _ in found[0] + found[1] if row]
                if not known:
                    continue
                rows.append([str(size), str(known[0]["batch"]), f"`{name}`"])
                for same in found:
                    rows[-1] += [_each(same, lambda row, _: _median(row), 0), _each(same, _ratio, 2)]
                rows[-1] += [_each(found[1], lambda row, _: row["memory_gb"], 2)]
                rows[-1] += [_each(found[1], _memory_ratio, 2)]
    image = "![Time and peak memory of an image against its pixels, both axes logarithmic](performance/models.svg)"
    return _table(heads, rows) + f"\n\n{image}\n\n(Of the first run.)"


def growth(reports: Sequence[Report]) -> str:
    """The time of a token by size of image, and what power of its pixels an image takes."""
    tables = [_cells(report) for report in reports]
    sizes = sorted({size for table in tables for _, size, _ in table})
    rows = []
    for name in (DEIT_TINY, TINY, EXACT, "vim_tiny", DEIT_SMALL, SMALL):
        for train, step in STEPS.items():
            by_size = [[(t.get((name, size, train)),) for t in tables] for size in sizes]
            ends = [(t.get((name, sizes[-1], train)), t.get((name, sizes[0], train))) for t in tables]
            cells = [_each(same, lambda row: 1e3 * per_token(row), 0) for same in by_size]
            rows.append([f"`{name}`", step, *cells, _each(ends, _exponent, 2)])
    return _table(["model", "", *(f"{size} px" for size in sizes), "time grows as pixels to the power of"], rows)


def losses(reports: Sequence[Report]) -> str:
    """Where a model takes more time or memory than DeiT in any run, and what was not measured."""
    lines = []
    tables = [_cells(report) for report in reports]
    for family in FAMILIES:
        known = {key for table in tables for key in table if key[0] in family[1:]}
        for name, size, train in sorted(known, key=lambda key: (family.index(key[0]), *key[1:])):
            pairs = [(t.get((name, size, train)), t.get((family[0], size, train))) for t in tables]
            for what, quantity in (("time", _ratio), ("memory", _memory_ratio)):
                found = [quantity(*pair) for pair in pairs if all(pair)]
                if any(ratio is not None and ratio > 1 for ratio in found):
                    shown = f"{_each(pairs, quantity, 2)} times the {what} of `{family[0]}`"
                    lines.append(f"- `{name}`, {size} px, {STEPS[train]}: {shown}")
    for report in reports:
        for row in report.get("scan", []) + report.get("models", []):
            if row["problem"]:
                what = ", ".join(str(row[key]) for key in ("model", "size", "rule", "form") if key in row)
                lines.append(f"- not measured: {what}, {STEPS[row['train']]}: {row['problem']}")
        lines += [f"- not measured: {late['task']}: {late['problem']}" for late in report.get("not_measured", [])]
    return "\n".join(dict.fromkeys(lines)) or "None."


def profile(reports: Sequence[Report]) -> str:
    """Where the time of a training step goes, in the first run."""
    found = reports[0]["profile"]
    text = f"`{found['model']}`, batch {found['batch']}, {found['size']} px, {found['ms']:.0f} ms a step"
    text += " under the profiler, in the first run:\n\n"
    rows = [[f"`{name}`", f"{calls:.0f}", f"{ms:.1f}", f"{share:.0%}"] for name, calls, ms, share in shares(found)]
    return text + _table(["operator, by its own time", "calls", "ms", "share"], rows)


def speed(reports: Sequence[Report]) -> str:
    """The README's table: the scan against the loop, the models against DeiT."""
    rows = []
    for rule in ("longhorn", "longhorn_exact"):
        scans = [_scans(report) for report in reports]
        pairs = {train: [(t.get((rule, "cpu", train)), t.get((rule, LOOP, train))) for t in scans] for train in STEPS}
        faster = [_each(pairs[train], lambda row, loop: 1 / _ratio(row, loop), 0) + " times faster" for train in STEPS]
        rows.append([f"scan, `{rule}`", "the usual loop in torch", *faster])
    tables = [_cells(report) for report in reports]
    for name, deit, sizes in ((TINY, DEIT_TINY, (224, 512, 1024)), (SMALL, DEIT_SMALL, (224,))):
        for size in sizes:
            pairs = {
                train: [(t.get((name, size, train)), t.get((deit, size, train))) for t in tables] for train in STEPS
            }
            rows.append([f"`{name}`, {size} px", f"timm's `{deit}`"])
            rows[-1] += [_each(pairs[train], _ratio, 2) + " times its time" for train in STEPS]
    found = reports[0]["machine"]
    commands = " and ".join(dict.fromkeys(f"`{' '.join(report['command'])}`" for report in reports))
    count = {1: "one run", 2: "two runs"}.get(len(reports), f"{len(reports)} runs")
    text = f"On {found['threads']} threads of an {found['cpu']}, float32, {count} of {commands}:"
    return text + "\n\n" + _table(["", "against", *STEPS.values()], rows)


def _cells(report: Report) -> dict[tuple[str, int, bool], Row]:
    """Rows with figures, by model, size and step."""
    return {(row["model"], row["size"], row["train"]): row for row in report.get("models", []) if row["ms"]}


def _scans(report: Report) -> dict[tuple[str, str, bool], Row]:
    """Rows with figures, by rule, form and step."""
    return {(row["rule"], row["form"], row["train"]): row for row in report.get("scan", []) if row["ms"]}


def _median(row: Row) -> float:
    return statistics.median(row["ms"])


def _ratio(row: Row, other: Row) -> float:
    return paired_ratio(row["ms"], other["ms"])


def _exponent(large: Row, small: Row) -> float:
    """p in time of an image ~ pixels^p."""
    times = math.log((_median(large) / large["batch"]) / (_median(small) / small["batch"]))
    return times / math.log((large["size"] / small["size"]) ** 2)


def _memory_ratio(row: Row, other: Row) -> float | None:
    return row["memory_gb"] / other["memory_gb"] if row["memory_gb"] and other["memory_gb"] else None


def _each(rows: Sequence[tuple[Row | None, ...]], quantity: Callable[..., float | None], digits: int) -> str:
    """A figure of each run, made of some rows of it; a dash where one of them was not measured."""
    return " / ".join(_number(quantity(*of_run) if all(of_run) else None, digits) for of_run in rows)


def _spread(rows: Sequence[Row | None]) -> str:
    return " / ".join(f"{min(row['ms']):.2f} to {max(row['ms']):.2f}" if row else "-" for row in rows)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits if value < 100 else 0}f}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (heads, ["---"] * len(heads), *rows))
