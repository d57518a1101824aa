"""The tables of a study in Markdown, and what they say in words; every figure comes from its report (`study.report`)."""

from __future__ import annotations

import math
import shlex
from typing import Any

from ..tools.compare import markdown
from .stats import (
    Interval,
    Report,
    accuracies,
    chosen_rate,
    contenders,
    cost,
    difference,
    efficiency,
    interval,
    lost_rates,
    ratio,
    sweep,
)

NONE = "–"


def tables(report: Report) -> str:
    """All tables of a study, with headings, and what they are of."""
    parts = [summary(report)]
    for name, table in report["plan"]["tables"].items():
        parts += [f"### {table['title']}", scores(report, name), differences_title(report), differences(report, name)]
        parts.append(findings(report, name))
    parts += [
        "### Training images to an accuracy",
        efficiencies(report),
        "### What a training image costs",
        costs(report),
    ]
    parts += ["### Learning rates", rates(report)]
    return "\n\n".join(parts) + "\n"


def summary(report: Report) -> str:
    """What was run, where, by which command, and within which limits."""
    plan, ran = report["plan"], [cell for cell in report["cells"] if "val" in cell]
    commits = sorted({cell["commit"] or "no commit" for cell in ran})
    sizes = sorted({cell["parameters"] for cell in ran})
    overlap = sorted(set(plan["seeds"]) & set(plan["sweep_seeds"]))
    diverged = [
        f"{cell['contender']} on {cell['task']}, seed {cell['seed']}" for cell in report["cells"] if "diverged" in cell
    ]
    hours = sum(cell["seconds"] for cell in ran) / 3600
    lines = [
        f"{plan['title']} `{shlex.join(report['command'])}`, {report['date'][:10]}, {report['machine']['cpu']}.",
        f"{len(ran)} training runs, {hours:.2f} hours long in all by the clock, one thread each, of models of {sizes[0]:,} "
        f"to {sizes[-1]:,} parameters; seeds {listed(plan['seeds'])}; rates chosen on seeds {listed(plan['sweep_seeds'])}."
        if ran
        else "No run is finished.",
    ]
    if diverged:
        lines.append(f"Diverged and left out: {'; '.join(diverged)}.")
    if overlap:
        lines.append(
            f"Seed {listed(overlap)} serves for both, so its result at the chosen rate may be a little too good, for every "
            "contender alike."
        )
    if not report["finished"]:
        lines.append("**The study is not finished: what follows is of a part of it.**")
    lines.append(f"Commit {listed(commits)} (a plus sign: with changes that were not committed).")
    return " ".join(lines)


def listed(values: Any) -> str:
    """Values with commas."""
    return ", ".join(map(str, values))


def titles(report: Report) -> dict[str, str]:
    """What contenders are called, by name."""
    return {name: contender["title"] for name, contender in report["plan"]["contenders"].items()}


def points(report: Report, table: str) -> list[tuple[str, str, float]]:
    """Task, test set and place on the axis of a table's points."""
    return [tuple(point) for point in report["plan"]["tables"][table]["points"]]


def taking_part(report: Report, table: str) -> list[str]:
    """Contenders of any of a table's tasks, in the order of the study."""
    tasks = {task for task, _, _ in points(report, table)}
    return [name for name in report["plan"]["contenders"] if any(name in contenders(report, task) for task in tasks)]


def column(report: Report, table: str, point: tuple[str, str, float]) -> str:
    """The head of a point's column."""
    several = len({task for task, _, _ in points(report, table)}) > 1 and len(points(report, table)) > len(
        {x for _, _, x in points(report, table)}
    )
    return f"{report['plan']['tables'][table]['axis']} {point[2]:g}" + (f" ({point[0]})" if several else "")


def scores(report: Report, table: str) -> str:
    """Mean and standard deviation of test accuracy in percent, and chance."""
    lines: list[dict[str, str]] = []
    chances: dict[str, str] = {"test top-1, %": "chance"}
    for name in taking_part(report, table):
        line = {"test top-1, %": titles(report)[name]}
        for point in points(report, table):
            values = accuracies(report, point[0], point[1], name)
            text = shown(interval(list(values.values()))) if values else NONE
            seeds = report["plan"]["seeds"]
            few = "" if len(values) in (0, len(seeds)) else f" ({len(values)} of {len(seeds)} seeds)"
            line[column(report, table, point)] = text + few
            tested = [c["tests"] for c in report["cells"] if c["task"] == point[0] and c["tests"]]
            if tested:
                chances[column(report, table, point)] = f"{tested[0][point[1]]['chance']:.1f}"
        lines.append(line)
    return markdown([*lines, chances])


def shown(found: Interval) -> str:
    """Mean and spread."""
    return f"{found.mean:.1f}" + ("" if math.isnan(found.spread) else f" ± {found.spread:.1f}")


def differences_title(report: Report) -> str:
    """What the table of differences is."""
    reference = titles(report)[report["plan"]["reference"]]
    return f"Less {reference}, seed by seed, in points, with Student's 95% confidence interval; bold where that leaves out 0:"


def differences(report: Report, table: str) -> str:
    """Paired differences from the reference."""
    reference, lines = report["plan"]["reference"], []
    for name in taking_part(report, table):
        if name != reference:
            line = {"difference": titles(report)[name]}
            for point in points(report, table):
                found = _difference(report, point, name)
                line[column(report, table, point)] = NONE if found is None else signed(found)
            lines.append(line)
    return markdown(lines)


def _difference(report: Report, point: tuple[str, str, float], name: str) -> Interval | None:
    task, test, _ = point
    return difference(accuracies(report, task, test, name), accuracies(report, task, test, report["plan"]["reference"]))


def signed(found: Interval) -> str:
    """A difference with its interval."""
    text = f"{found.mean:+.1f}" + (f" [{found.low:+.1f}, {found.high:+.1f}]" if found.count > 1 else "")
    return f"**{text}**" if found.beyond else text


def findings(report: Report, table: str) -> str:
    """One sentence: which differences are larger than chance between seeds explains."""
    reference = report["plan"]["reference"]
    found: dict[str, list[str]] = {"better": [], "worse": []}
    compared = 0
    for name in taking_part(report, table):
        for point in points(report, table) if name != reference else ():
            gap = _difference(report, point, name)
            compared += gap is not None
            if gap is not None and gap.beyond:
                where = f"{titles(report)[name]} at {column(report, table, point)}"
                found["better" if gap.mean > 0 else "worse"].append(where)
    words = [
        f"{kind.capitalize()} than {titles(report)[reference]}: {'; '.join(names)}"
        for kind, names in found.items()
        if names
    ]
    told = ". ".join(words) if words else f"No difference from {titles(report)[reference]} leaves out 0"
    expected = (1 - 0.95) * compared
    return f"{told}. (Of {compared} comparisons, {expected:.1f} would leave out 0 by chance alone.)"


def efficiencies(report: Report) -> str:
    """Training images seen until validation accuracy first reached each threshold, and the ratio to the reference."""
    plan, reference, lines = report["plan"], report["plan"]["reference"], []
    for task in plan["tasks"]:
        for threshold in plan["thresholds"]:
            own = {name: efficiency(report, task, name, threshold) for name in contenders(report, task)}
            if not any(value for seeds in own.values() for value in seeds.values()):
                continue
            line = {"task": task, "to": f"{threshold:g}%"}
            for name, seeds in own.items():
                reached = [value for value in seeds.values() if value]
                text = NONE if not reached else f"{sum(reached) / len(reached):,.0f}"
                text += "" if len(reached) == len(seeds) or not reached else f" ({len(reached)} of {len(seeds)} seeds)"
                gap = ratio(seeds, own[reference]) if name != reference else None
                if gap is not None:
                    text += f", {gap.mean:.2f} times" + (f" [{gap.low:.2f}, {gap.high:.2f}]" if gap.count > 1 else "")
                line[titles(report)[name]] = text
            lines.append(line)
    return markdown(lines) if lines else "No contender reached any of the thresholds."


def costs(report: Report) -> str:
    """Milliseconds and kept megabytes a training image."""
    lines = []
    for task in report["plan"]["tasks"]:
        line = {"ms (MB kept for backward) an image": task}
        for name in contenders(report, task):
            found = cost(report, task, name)
            line[titles(report)[name]] = NONE if found is None else f"{found[0]:.2f} ({found[1]:.2f})"
        lines.append(line)
    return markdown(lines)


def rates(report: Report) -> str:
    """What each rate of the sweeps reached on the validation split; the chosen one bold, and marked at an edge."""
    lines = []
    for task, plan in report["plan"]["tasks"].items():
        for name in contenders(report, task) if plan["sweep"] else ():
            found, best = sweep(report, task, name), chosen_rate(report, task, name)
            lost = plan["sweep"] if report["finished"] else lost_rates(report, task, name)
            edge = " (edge)" if best in (min(plan["sweep"]), max(plan["sweep"])) and len(plan["sweep"]) > 1 else ""
            line = {"validation top-1, %": f"{task}, {titles(report)[name]}"}
            for rate in plan["sweep"]:
                value = f"{found[rate]:.1f}" if rate in found else "diverged" if rate in lost else NONE
                line[f"{rate:g}"] = f"**{value}**{edge}" if rate == best else value
            lines.append(line)
    return (
        markdown(lines)
        + "\n\nEdge: the best of the rates tried is the first or the last, so that a better one may lie beyond."
    )
