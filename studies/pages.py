"""Fills the tables of the pages on studies from results/, and draws their plots.

    python studies/pages.py

in the root of a checkout. A page has a table between the lines <!-- NAME --> and <!-- end of NAME -->; `tables` has
the names. The figures are those of plans (study/), cost.py, fewshot.py, forgetting.py, icons480.py, million.py,
outside.py, small_data.py and students.py. The published ones of published.json and those of segmentation.json were
written down by hand.
"""

import itertools
import json
import math
import statistics
import sys
from collections.abc import Sequence
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import fewshot
import numpy as np
from forgetting import SHARES
from matplotlib import rc_context
from matplotlib.figure import Figure
from million import best_runs
from study.results import Interval, Report, choose_rate, interval, read_report
from study.tables import NONE, difference, differences, draw, mean_and_deviation, save_svg, score, scores

from page_tables import markdown, write_page  # isort: skip  (study puts benchmarks/ on the path)

ROOT = Path(__file__).parents[1]
DOCS, RESULTS = ROOT / "docs", ROOT / "studies" / "results"
RULES = {  # of outside.json
    "mamba": "Mamba, ours",
    "longhorn": "Longhorn, ours",
    "longhorn_exact": "Longhorn exact, ours",
    "longhorn_exact, eps up to 2": "exact, four heads, eps up to 2, ours",
}
FLOAT32, INT8 = ("onnxruntime", "ort"), ("int8", "ort-int8")  # forms of front-128.json
TEST_TO_TRAIN = 0.2 / 0.7  # photographs of a fold of solar_cells
STARTS = {"icons": "from the weights of icons", "random": "from random weights"}  # of small_data.json
MACHINES = {"colours": "SVM of a colour histogram", "pixels": "SVM of the pixels"}
WITHOUT_LABELS = {"unlabelled": "masked images without labels", "icons_unlabelled": "icons, then masked images"}


@cache
def report(study: str) -> Report:
    """The committed results of a study."""
    return read_report(RESULTS / f"{study}.json")


def load(name: str) -> dict[str, Any]:
    """Another file of results/."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def tables() -> dict[Path, dict[str, str]]:
    """The tables of each page, by the name of their marks."""
    folder = DOCS / "comparison"
    return {
        DOCS / "comparison.md": {"studies": studies_table()},
        folder / "recall.md": {
            "million": million_table("million"),
            "last tile": million_table("million_last", "million_longer"),
            "cost": streams_cost_table(),
            "keys": keys_table(),
            "forgetting": forgetting_table(),
            "images": images_table("recall", "long4_same_rate"),
        },
        folder / "few_shots.md": {"few shots": fewshot_table()},
        folder / "published.md": {"published": published_table()},
        folder / "icons.md": {
            "top1": scores(report("icons"), "top1"),
            "differences": differences(report("icons"), "top1"),
            "larger": larger_table(),
            "rivals": rivals_table(),
            "images": images_table("icons", "icons"),
            "cost": cost_table(),
        },
        folder / "hierarchy.md": {
            "recurrence": recurrence_table(),
            "extrapolation": extrapolation_table(),
            "icons": scores(report("hierarchy"), "top1"),
            "recall": scores(report("hierarchy_recall"), "longer"),
            "clothes": scores(report("fashion"), "top1"),
            "switches": switches_table(),
        },
        folder / "pathfinder.md": {
            "accuracy": scores(report("pathfinder"), "top1"),
            "differences": differences(report("pathfinder"), "top1"),
        },
        DOCS / "models" / "icons480.md": {
            "weights": weights_table(),
            "small data": small_data_table(STARTS | MACHINES),
        },
        DOCS / "models" / "lite0.md": {"students": students_table()},
        DOCS / "pretraining.md": {"small data": small_data_table(STARTS | WITHOUT_LABELS)},
    }


def points(study: str, task: str, test: str, one: str, other: str) -> str:
    """Difference of two candidates, seed by seed, in points, with its 95% interval."""
    return difference(interval(paired(study, task, test, one, other)), False)


def paired(study: str, task: str, test: str, one: str, other: str) -> list[float]:
    """Differences of the accuracies of two candidates for the seeds that both have."""
    ours, theirs = (report(study).accuracies(task, test, name) for name in (one, other))
    return [ours[seed] - theirs[seed] for seed in sorted(set(ours) & set(theirs))]


def corrected(values: Sequence[float], test_to_train: float) -> Interval:
    """The interval of differences in cross-validation, corrected for the training data that folds share.

    Source: Nadeau and Bengio, "Inference for the Generalization Error", 2003.
    """
    found = interval(values)
    factor = math.sqrt(1 + len(values) * test_to_train)  # of the standard error
    low, high = (found.mean + factor * (bound - found.mean) for bound in (found.low, found.high))
    return found._replace(low=low, high=high)


def segmentation() -> str:
    """What the recurrence gives in segmentation, in points of mean IoU."""
    found = load("segmentation")["mean_iou"]
    return difference(interval([ours - theirs for ours, theirs in zip(found["hierarchy"], found["conv"])]), False)


def studies_table() -> str:
    """A line for each study: its question and its result."""
    rules, pair = ("exact", "longhorn", "mamba"), ("hierarchy", "conv")

    def means(question: str, study: str, task: str, test: str, *names: str) -> tuple[str, str, str]:
        return study, question, " / ".join(score(report(study), task, test, name) for name in names)

    def less(question: str, study: str, task: str, test: str, one: str, other: str) -> tuple[str, str, str]:
        return study, question, points(study, task, test, one, other)

    rows = [
        means("recall, 4,096 tiles: exact / Longhorn / Mamba", "recall", "long4", "4096", *rules),
        means("icons, 64 px: exact / Longhorn / Mamba", "icons", "icons", "64", *rules),
        means(
            "icons, 256 px, trained at 64 to 128: exact / Longhorn / Mamba", "icons_large", "icons_mixed", "256", *rules
        ),
        less("icons: convolution over the grid", "v2", "icons", "64", "conv2d", "exact"),
        means(
            "recall, 4,096 tiles: one / two directions a block",
            *("v2_recall", "long4_same_rate", "4096", "alternate", "exact"),
        ),
        less("icons, 64 px: stages, less equal blocks", "hierarchy", "icons", "64", "hierarchy", "plain"),
        less(
            "icons, 96 px, trained at 64: stages, less equal blocks", "hierarchy", "icons", "96", "hierarchy", "plain"
        ),
        less("icons, 64 px: recurrence, less none", "hierarchy", "icons", "64", *pair),
        less("icons, 96 px, trained at 64: recurrence, less none", "hierarchy", "icons", "96", *pair),
        less("icons, 128 px: recurrence, less none", "hierarchy_128", "icons128_8epochs", "128", *pair),
        means("recall, 256 tiles: recurrence / none", "hierarchy_recall", "longer", "256", *pair),
        less("clothes: recurrence, less none", "fashion", "fashion", "test", *pair),
        less("solar cells: recurrence, less none", "solar_cells", "solar_cells", "test", *pair),
        less("Pathfinder, 32 px: recurrence, less none", "pathfinder", "pathfinder", "3", *pair),
        means(
            "icons, 96 px: stages, trained at 48 and 64 / at 64", "sizes", "icons", "96", "hierarchy_sizes", "hierarchy"
        ),
        less("icons: a position embedding", "position", "icons", "64", "position", "hierarchy"),
        less("icons: a residual stream in bfloat16", "bf16", "icons", "test", "bf16", "fp32"),
    ]
    return markdown(
        [
            {"plan": f"[{study}](../studies/plans/{study}.yaml)", "question": question, "result": result}
            for study, question, result in rows
        ]
    )


def shares(right: Sequence[float], images: int) -> str:
    """Mean and deviation of seeds in percent; for one seed the deviation of a share of so many images, or the share."""
    mean = statistics.fmean(right)
    if len(right) == 1 and images < 10:
        return f"{round(mean * images / 100)} of {images}"
    deviation = statistics.stdev(right) if len(right) > 1 else math.sqrt(mean * (100 - mean) / images)
    return f"{mean:.1f} ± {deviation:.1f}"


def runs_of(name: str, study: str = "million") -> list[dict[str, Any]]:
    """The runs of a mixer at its best rate; those of the three rules are of `recall`, whose models are the same."""
    if study == "million" and name in report("recall").plan.candidates:
        return list(report("recall").tested("long4", name).values())
    return list(best_runs(report(study).cells, name).values())


def by_tiles(name: str, study: str = "million") -> dict[int, tuple[list[float], int]]:
    """Top-1 of a mixer, of each seed, and the images of a seed, by the number of tiles."""
    runs, found = runs_of(name, study), {}
    for tiles in runs[0]["tests"] if runs else ():
        if all(tiles in run["tests"] for run in runs):
            found[int(tiles)] = [run["tests"][tiles]["top1"] for run in runs], runs[0]["tests"][tiles]["images"]
    known = set(found)
    for row in load("million_streams")["rows"] if study == "million" else ():
        wanted = "accuracy", name, runs[0]["rate"]
        if (row["kind"], row["candidate"], row.get("rate")) == wanted and row["tiles"] not in known:
            values = found.setdefault(row["tiles"], ([], row["images"]))[0]
            values.append(100 * row["right"] / row["images"])
    return found


def million_table(*studies: str) -> str:
    """Top-1 of the mixers of studies by the number of tiles, with their rates and seeds."""
    lines = {(study, name): by_tiles(name, study) for study in studies for name in report(study).plan.candidates}
    columns, rows = sorted({tiles for line in lines.values() for tiles in line}), []
    for (study, name), line in lines.items():
        if line:
            runs, plan = runs_of(name, study), report(study).plan
            row = {"test top-1, %": report(study).title(name), "mosaics": f"{plan.tasks['million'].count['train']:,}"}
            row |= {f"{tiles:,}": shares(*line[tiles]) if tiles in line else NONE for tiles in columns}
            rows.append(row | {"rate": f"{runs[0]['rate']:g}", "seeds": str(len(runs))})
    return markdown(rows)


def costs(name: str, key: str) -> dict[int, float]:
    """Seconds or MB of a candidate by the number of tiles."""
    found = [row for row in load("million_streams")["rows"] if row["kind"] == "cost" and row["candidate"] == name]
    return {row["tiles"]: row[key] for row in sorted(found, key=lambda row: row["tiles"])}


def streams_cost_table() -> str:
    """Seconds and MB of one image, by its number of tiles."""
    rows = []
    for name in report("million").plan.candidates:
        seconds, memory = costs(name, "seconds"), costs(name, "mb")
        if seconds:
            texts = {f"{tiles:,}": f"{seconds[tiles]:.2g} s, {memory[tiles]:.3g} MB" for tiles in seconds}
            rows.append({"one image": report("million").title(name), **texts})
    return markdown(rows)


def keys_table() -> str:
    """Quantiles of the share of a key of the exact rule beside the common direction, in percent."""
    return markdown(
        [
            {
                "share of a key, %": f"block {row['block'] + 1}, from the {'end' if row['direction'] else 'start'}",
                **{
                    f"{100 * level:g}% of tiles are below": f"{100 * share:.2g}"
                    for level, share in zip(SHARES, row["share"])
                },
            }
            for row in load("forgetting")["shares"]
            if (row["study"], row["candidate"], row["seed"]) == ("million", "exact", 1)
        ]
    )


def without_small_parts() -> dict[tuple[str, str, float], dict[int, tuple[int, int]]]:
    """Right answers and images of all seeds by the number of tiles, by study, mixer and threshold of removal."""
    found = {}
    for row in sorted(load("forgetting")["rows"], key=itemgetter("candidate", "study", "threshold", "tiles")):
        line = found.setdefault((row["study"], row["candidate"], row["threshold"]), {})
        right, images = line.get(row["tiles"], (0, 0))
        line[row["tiles"]] = right + row["right"], images + row["images"]
    return found


def forgetting_table() -> str:
    """Right answers, by mixer and the threshold below which components of keys are removed."""
    lines, rows = without_small_parts(), []
    columns = sorted({tiles for line in lines.values() for tiles in line})
    for (study, name, threshold), line in lines.items():
        title = report("million").title(name) + (", 4x the mosaics" if study == "million_longer" else "")
        title += f", parts below {100 * threshold:g}% removed" if threshold else ", as trained"
        row = {"right answers": title}
        rows.append(row | {f"{n:,}": "{} of {}".format(*line[n]) if n in line else NONE for n in columns})
    return markdown(rows)


def fewshot_table() -> str:
    """Top-1 of few-shot classification by tiles and shots, a line for each budget and mixer, at its best rate."""
    found, order, rows = load("fewshot"), list(report("million").plan.candidates), []
    names = sorted({run["candidate"] for run in found["runs"]}, key=order.index)
    for updates, name in itertools.product(fewshot.BUDGETS, names):
        rate = fewshot.best_rate(name, found["runs"])
        group = [run for run in found["runs"] if fewshot.key(run)[:3] == (name, rate, updates)]
        row = {"test top-1, %": report("million").title(name), "updates": f"{updates:,}"}
        for test in fewshot.TESTS:
            accuracies = [run["tests"][test] for run in group]
            row[test if "shots" in test else f"{test} tiles"] = shares(accuracies, fewshot.COUNT)
        validation = shares([run["validation"][-1] for run in group], 1024)
        rows.append(row | {"validation": validation, "rate": f"{rate:g}", "seeds": str(len(group))})
    rows.append({"test top-1, %": "nearest icon, no mixer", "16 tiles": f"{found['nearest']:.1f}"})
    return markdown(rows)


def draw_million(folder: Path) -> Path:
    """Draws `folder/recall-million.svg`: accuracy, time and memory of each mixer by the number of tiles."""
    path = folder / "recall-million.svg"
    found, longer = report("million"), report("million_longer").plan.candidates

    def means(name: str, study: str = "million") -> dict[int, float]:
        return {tiles: statistics.fmean(values) for tiles, (values, _) in sorted(by_tiles(name, study).items())}

    def of_other_images(study: str, threshold: float) -> dict[int, float]:
        line = without_small_parts()[study, "exact", threshold].items()
        return {tiles: 100 * right / images for tiles, (right, images) in line}

    with rc_context({"font.size": 9}):
        picture = Figure(figsize=(7, 8), layout="constrained")
        axes_of = picture.subplot_mosaic([["top", "top"], ["left", "right"]], height_ratios=[4, 3])
        top, left, right = (axes_of[place] for place in ("top", "left", "right"))
        for number, name in enumerate(found.plan.candidates):
            style = dict(color=f"C{number}", marker="os^vDP*Xd"[number], ms=4, lw=1 if number else 2.2)
            for axes, line in ((top, means(name)), (left, costs(name, "seconds")), (right, costs(name, "mb"))):
                axes.plot(list(line), list(line.values()), label=found.title(name), **style)
            if name in longer:
                line, style = means(name, "million_longer"), style | dict(lw=1, ls="--", mfc="none")
                if name == "exact":
                    more = of_other_images("million_longer", 0).items()
                    line |= {tiles: share for tiles, share in more if tiles > max(line)}
                top.plot(list(line), list(line.values()), label=f"{found.title(name)}, 4x the mosaics", **style)
        removed = of_other_images("million", 0.01)
        style = dict(color="C0", marker="o", mfc="none", ls=":", ms=7)
        top.plot(list(removed), list(removed.values()), label="Longhorn exact, small parts of keys removed", **style)
        top.axhline(25, color="0.5", ls=":", lw=1)
        top.set(ylim=(0, 101), ylabel="test top-1, %")
        left.set(yscale="log", ylabel="seconds of one image")
        right.set(yscale="log", ylabel="memory of one image, MB")
        for axes, first in ((top, 4), (left, 10), (right, 10)):
            ticks = [2**power for power in range(first, 21, 2)]
            axes.set_xscale("log", base=2)
            axes.set_xticks(
                ticks, [str(tick) if tick < 8192 else f"{tick >> 10}k" for tick in ticks[:-1]] + ["1M"], rotation=45
            )
            axes.minorticks_off()
            axes.grid(alpha=0.3)
            axes.set_xlabel("tiles of the image")
        picture.suptitle("Recall among distractors, trained on 16 tiles (dots: a guess)", fontsize=12)
        picture.legend(*top.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
        return save_svg(picture, path)


def recurrence_table() -> str:
    """What the recurrence of the hierarchy gives on each task."""
    pair = "hierarchy", "conv"
    solar = "solar_cells", "solar_cells", "test", *pair
    rows = {
        "icons, 64 px": points("hierarchy", "icons", "64", *pair),
        "icons, 64 px, trained at 48 and 64": points("sizes", "icons", "64", "hierarchy_sizes", "conv_sizes"),
        "icons, 96 px, trained at 64": points("hierarchy", "icons", "96", *pair),
        "icons, 96 px, trained at 48 and 64": points("sizes", "icons", "96", "hierarchy_sizes", "conv_sizes"),
        "icons, 128 px, 4 epochs": points("hierarchy_128", "icons128", "128", *pair),
        "icons, 128 px, 8 epochs": points("hierarchy_128", "icons128_8epochs", "128", *pair),
        "icons, 256 px, trained at 128, 8 epochs": points("hierarchy_128", "icons128_8epochs", "256", *pair),
        "clothes, 32 px": points("fashion", "fashion", "test", *pair),
        "solar cells, 288 px": points(*solar),
        "solar cells, corrected for shared folds": difference(corrected(paired(*solar), TEST_TO_TRAIN), False),
        "Pathfinder, 32 px": points("pathfinder", "pathfinder", "3", *pair),
        "segmentation of 96 px, mean IoU": segmentation(),
        "recall, 16 tiles": points("hierarchy_recall", "longer", "16", *pair),
        "recall, 256 tiles": points("hierarchy_recall", "longer", "256", *pair),
    }
    return markdown([{"task": task, "points [95% interval]": found} for task, found in rows.items()])


def extrapolation_table() -> str:
    """Top-1 of trained weights on enlarged icons, a row for each change of the scan."""
    rows: dict[str, dict[str, str]] = {}
    for row in load("extrapolation")["rows"]:
        rows.setdefault(row["scan"], {"scan": row["scan"]})[f"{row['pixels']} px"] = f"{row['top1']:.1f}"
    return markdown(list(rows.values()))


@cache
def rival_ms(model: str, *forms: str) -> float:
    """Milliseconds of one image of 128 px in the fastest of some exported forms, one thread."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "front-128.json").read_text(encoding="utf-8"))["rows"]
    return min(statistics.median(row["ms"]) for row in rows if row["model"] == model and row["form"] in forms)


def rivals_table() -> str:
    """A row for each model, task and rate of `rivals`; the times are of one image of 128 px, in the fastest form.

    The last two columns compare with ours: of equal time, at the rate that was chosen for each, and of 2 epochs.
    """
    found, rows = report("rivals"), []
    reference = found.plan.reference
    ours = found.plan.candidates[reference].model
    [two_epochs] = found.accuracies("equal_epochs", "test", reference).values()
    for name, task in itertools.product(found.plan.candidates, found.plan.tasks):
        cells = [run for run in found.cells if (run["task"], run["candidate"]) == (task, name)]
        if not cells:
            continue
        model = found.plan.candidates[name].model
        chosen = choose_rate(found.plan, found.cells, task, name)
        times = [rival_ms(model, *forms) / rival_ms(ours, *forms) for forms in (FLOAT32, INT8)]
        for rate in sorted({run["rate"] for run in cells}):
            runs = [run for run in cells if run["rate"] == rate]
            top = [run["tests"]["test"]["top1"] for run in runs]
            epochs, is_other = len(runs[0]["curve"]), name != reference
            compared = task == "equal_time" and rate == chosen and is_other
            less = found.difference(task, "test", name) if compared else None
            rows.append(
                {
                    "model": found.title(name).partition(",")[0],
                    "parameters": f"{runs[0]['parameters'] / 1e6:.1f} M",
                    "time, float32 / int8": " / ".join(f"{time:.2f}" for time in times),
                    "epochs": str(epochs),
                    "rate": f"{rate:g}",
                    "seeds": str(len(runs)),
                    "validation, %": mean_and_deviation([run["val"]["top1"] for run in runs]),
                    "test, %": mean_and_deviation(top),
                    "minus ours, equal time": difference(less, False),
                    "minus ours, 2 epochs": f"{top[0] - two_epochs:+.1f}" if epochs == 2 and is_other else "–",
                }
            )
    return markdown(rows)


def draw_rivals(folder: Path) -> Path:
    """Draws `folder/icons-rivals.svg`: test accuracy of each model at its best rate, by the time of one image."""
    path, found = folder / "icons-rivals.svg", report("rivals")
    cells = [run for run in found.cells if run["task"] == "equal_time"]
    with rc_context({"font.size": 9}):
        picture = Figure(figsize=(7, 3.6), layout="constrained")
        axes = picture.add_subplot()
        for name in found.plan.names("equal_time"):
            runs = list(best_runs(cells, name).values())
            if not runs:
                continue
            top = statistics.fmean(run["tests"]["test"]["top1"] for run in runs)
            model, colour = found.plan.candidates[name].model, "C0" if name == found.plan.reference else "0.4"
            times = [rival_ms(model, *forms) for forms in (INT8, FLOAT32)]
            axes.plot(times, [top, top], color=colour, lw=0.8)
            axes.plot(times[:1], [top], "o", color=colour, mfc="none")
            axes.plot(times[1:], [top], "o", color=colour)
            options = dict(textcoords="offset points", ha="center", color=colour)
            axes.annotate(found.title(name), (math.prod(times) ** 0.5, top), (0, 6), **options)
        axes.set(xscale="log", xlabel="milliseconds of one image, one thread (filled: float32, open: int8)")
        axes.set(ylabel="test top-1, %", title="Icons of 128 px, equal processor time in training")
        axes.set_xticks(ticks := [0.3, 0.5, 1, 2, 3, 5], [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.margins(x=0.2, y=0.15)
        axes.grid(alpha=0.3)
        return save_svg(picture, path)


def larger_table() -> str:
    """Top-1 on icons by their size, a row for each rule and each training of icons and icons_large."""
    icons, large, rows = report("icons"), report("icons_large"), []
    trainings = {
        "64": (icons, "icons"),
        "64, then 128": (large, "icons128"),
        "64, then 64, 96 or 128": (large, "icons_mixed"),
    }
    for name in large.plan.candidates:
        for sizes, (found, task) in trainings.items():
            texts = {f"{side} px": score(found, task, side, name) for side in ("64", "96", "128", "256")}
            rows.append({"rule": large.title(name), "trained at, px": sizes, **texts})
    return markdown(rows)


def switches_table() -> str:
    """Candidates of v2 and v2_recall: top-1 on icons, recall at two lengths, and time of a training step.

    Time is divided by that of the exact rule in Vim's blocks. Candidates that ran on one task only are left out.
    """
    icons, recall, rows = report("v2"), report("v2_recall"), []
    reference, times = icons.title(icons.plan.reference), step_times("icons")
    for name in (name for name in icons.plan.candidates if name in recall.plan.candidates):
        title = icons.title(name)
        row = {"candidate": title, "icons, %": score(icons, "icons", "64", name)}
        row["difference"] = difference(icons.difference("icons", "64", name) if title != reference else None, False)
        for length in ("16", "4096"):
            row[f"recall, {int(length):,} tiles, %"] = score(recall, "long4_same_rate", length, name)
        row["time"] = f"{times[title] / times[reference]:.2f}" if title in times else NONE
        rows.append(row)
    return markdown(rows)


def step_times(task: str) -> dict[str, float]:
    """Median time of a training step in ms by the title of a candidate."""
    return {row["candidate"]: statistics.median(row["ms"]) for row in load(f"cost_{task}")["rows"]}


def cost_table() -> str:
    """Time of a training step of the candidates of icons, divided by that of Longhorn, and peak memory."""
    times, rows = step_times("icons"), load("cost_icons")["rows"]
    titles = [candidate.title for candidate in report("icons").plan.candidates.values()]
    return markdown(
        [
            {
                "candidate": row["candidate"],
                "time of a step": f"{times[row['candidate']] / times[titles[0]]:.2f}",
                "peak memory, GB": f"{row['memory_gb']:.2f}",
            }
            for row in rows
            if row["candidate"] in titles
        ]
    )


def published_table() -> str:
    """A row for each task of outside.py: our accuracies, with the epochs of training, then the published ones."""
    published = load("published")["figures"]
    titles, lines = {title: f"{title}, published" for row in published.values() for title in row}, {}
    for run in load("outside")["runs"]:
        for name, accuracy in run["tests"].items():
            task = run["task"] if name == "accuracy" else f"{run['task']}, length {name}"
            lines.setdefault((run["task"], task), {})[RULES[run["rule"]]] = f"{accuracy:.1f} ({run['epochs']})"
    return markdown(
        [
            {"task": name}
            | {title: line.get(title, NONE) for title in RULES.values()}
            | {head: f"{published.get(task, {}).get(title, NONE)}" for title, head in titles.items()}
            for (task, name), line in lines.items()
        ]
    )


def images_table(study: str, task: str) -> str:
    """Training images until validation accuracy first reached each threshold, and the ratio to the reference."""
    found, rows = report(study), []
    reference = found.plan.reference
    for threshold in found.plan.thresholds:
        images = {name: images_to(found, task, name, threshold) for name in found.plan.names(task)}
        row = {"accuracy": f"{threshold:g}%"}
        for name, seeds in images.items():
            reached = [value for value in seeds.values() if value]
            text = f"{statistics.fmean(reached):,.0f}" if reached else NONE
            text += f" ({len(reached)} of {len(seeds)} seeds)" if 0 < len(reached) < len(seeds) else ""
            ratio = geometric_ratio(seeds, images[reference]) if name != reference else None
            if ratio is not None:
                bounds = f" [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio.count > 1 else ""
                text += f", {ratio.mean:.2f}x{bounds}"
            row[found.title(name)] = text
        rows.append(row)
    return markdown(rows)


def images_to(found: Report, task: str, candidate: str, accuracy: float) -> dict[int, float | None]:
    """Training images until a validation accuracy in percent, by seed; None for seeds that never reached it."""
    return {
        seed: first_reached(cell["curve"], accuracy, min(test["chance"] for test in cell["tests"].values()))
        for seed, cell in found.tested(task, candidate).items()
    }


def first_reached(curve: Sequence[dict[str, Any]], accuracy: float, chance: float) -> float | None:
    """Training images until validation accuracy first reached a value, interpolated linearly; None if it never did.

    Args:
        curve: "images" and "top1" at the end of each epoch.
        accuracy: in percent.
        chance: accuracy before the first epoch, in percent.
    """
    images, top1 = [0, *(point["images"] for point in curve)], [chance, *(point["top1"] for point in curve)]
    end = next((i for i, value in enumerate(top1) if value >= accuracy), None)
    return None if end is None else float(np.interp(accuracy, top1[: end + 1][-2:], images[: end + 1][-2:]))


def geometric_ratio(ours: dict[int, float | None], theirs: dict[int, float | None]) -> Interval | None:
    """The geometric mean of ours / theirs over the seeds that have both; its `std` is nan."""
    logs = [math.log(ours[s] / theirs[s]) for s in sorted(set(ours) & set(theirs)) if ours[s] and theirs[s]]
    if not logs:
        return None
    found = interval(logs)
    low, high = (math.exp(min(bound, 700.0)) for bound in (found.low, found.high))
    return found._replace(mean=math.exp(found.mean), std=math.nan, low=low, high=high)


def weights_table() -> str:
    """The weights of icons in the package."""
    return markdown(
        [
            {
                "model": f"`{row['model']}`",
                "parameters": f"{row['parameters']:,}",
                "file, MB": f"{row['bytes'] / 1e6:.2f}",
                "top-1, %": f"{row['top1']:.1f}",
                "top-5, %": f"{row['top5']:.1f}",
                "rate": f"{row['rate']:g}",
                "seed": str(row["seed"]),
            }
            for row in load("icons480")["rows"]
        ]
    )


def students_table() -> str:
    """Top-1 from the features of EfficientNet-Lite0 beside that from icons, and the paired differences."""
    found, lines = {(row["data"], row["start"]): row for row in load("students")["rows"]}, []
    for name in dict.fromkeys(name for name, _ in found):
        line = {"data": name, "training images": str(found[name, "lite0"]["train"])}
        values = {start: found[name, start]["top1"] for start in ("lite0", "icons480")}
        for start, top in values.items():
            line[f"from `{start}`"] = f"{statistics.fmean(top):.1f}"
        less = corrected(
            [ours - theirs for ours, theirs in zip(*values.values())], 0.25 if "photographs" in name else 0
        )
        lines.append(line | {"runs": str(less.count), "difference": difference(less, False)})
    return markdown(lines)


def small_data_table(methods: dict[str, str]) -> str:
    """Top-1 of some methods on few images; with images without labels, only the lines that have them."""
    lines = []
    for (name, count), group in itertools.groupby(
        load("small_data")["rows"], key=lambda row: (row["data"], row["train"])
    ):
        found = {row["method"]: row for row in group}
        if WITHOUT_LABELS.keys() <= methods.keys() and not WITHOUT_LABELS.keys() & found.keys():
            continue
        line = {"data": name, "classes": str(next(iter(found.values()))["classes"]), "training images": str(count)}
        for method, title in methods.items():
            top = found[method]["top1"] if method in found else []
            line[title] = mean_and_deviation(top) if top else "-"
        lines.append(line)
    return markdown(lines)


def draw_plots(folder: Path) -> list[Path]:
    """Draws the plots of the pages."""
    return [draw(report("icons"), "top1", folder), draw_million(folder), draw_rivals(folder)]


def main(argv: Sequence[str] = ()) -> int:
    """Writes the pages and the plots; returns the exit status."""
    if argv:
        sys.exit(__doc__)
    for path, contents in tables().items():
        write_page(path, contents)
    draw_plots(DOCS / "comparison")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
