"""Runs against each other: what they reached, what it took, what their configurations differ in, and their curves.

python -m vilonghorn.tools.compare runs/a runs/b                 a table
python -m vilonghorn.tools.compare runs/* --plot compare.png     and held-out top-1, loss and training loss as a picture
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure

from ..engine.checks import flatten
from ..engine.directory import RunDirectory
from ..engine.report import save_figure

UNTOLD = ("run.dir", "run.device")  # differ between any two runs, or say nothing of what is compared


def read_run(path: str | Path) -> dict[str, Any]:
    """What a run left: `name`, `config` (flat), `environment`, and of its log `train` and `epochs`.

    Raises:
        FileNotFoundError: there is no run.
        ValueError: its files are not those of a run.
    """
    directory = RunDirectory(path)
    for file in (directory.config, directory.environment, directory.log_file):
        if not file.is_file():
            raise FileNotFoundError(f"{path} holds no run: there is no {file.name}")
    try:
        config = flatten(yaml.safe_load(directory.config.read_text(encoding="utf-8")))
        environment = json.loads(directory.environment.read_text(encoding="utf-8"))
        lines = directory.log_file.read_bytes().split(b"\n")[:-1]  # of a run in progress, the last may be half there
        records = [json.loads(line) for line in lines]
        train, epochs = ([r for r in records if r["kind"] == kind] for kind in ("train", "epoch"))
    except (ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is not the directory of a run ({type(error).__name__}: {error})") from error
    return {"name": str(path), "config": config, "environment": environment, "train": train, "epochs": epochs}


def score(record: dict[str, Any]) -> dict[str, float]:
    """The result that counts of an epoch: that of the average, where there is one."""
    return record.get("ema") or record["model"]


def row(run: dict[str, Any]) -> dict[str, str]:
    """A run in one line of the table."""
    config, epochs, processes = run["config"], run["epochs"], run["environment"].get("processes", 1)
    images = config["data.batch_size"] * config["optimizer.accumulate"] * processes
    speeds = [r["images_per_second"] for r in run["train"] if "images_per_second" in r]
    line = {
        "run": run["name"],
        "model": config["model.name"],
        "epochs": f"{len(epochs)}/{config['schedule.epochs']}",
        "images an update": str(images),
    }
    if epochs:
        last, best = score(epochs[-1]), max(epochs, key=lambda record: score(record)["top1"])
        line |= {
            "top-1": f"{last['top1']:.2f}",
            "top-5": f"{last['top5']:.2f}",
            "loss": f"{last['loss']:.4f}",
            "best top-1": f"{score(best)['top1']:.2f} (epoch {best['epoch']})",
            "skipped": str(epochs[-1]["skipped"]),
            "hours": f"{epochs[-1]['seconds'] / 3600:.3f}",
        }
    if speeds:
        line["images/s"] = f"{sorted(speeds)[len(speeds) // 2]:.1f}"
    return line


def differences(runs: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """The keys whose values differ, with the value of every run."""
    keys = dict.fromkeys(key for run in runs for key in run["config"] if key not in UNTOLD)
    lines = []
    for key in keys:
        values = [json.dumps(run["config"].get(key)) for run in runs]
        if len(set(values)) > 1:
            lines.append({"key": key, **{run["name"]: value for run, value in zip(runs, values)}})
    return lines


def markdown(lines: Sequence[dict[str, str]]) -> str:
    """A Markdown table of lines, which may lack some of the columns."""
    columns = list(dict.fromkeys(column for line in lines for column in line))
    cells = [columns, ["---"] * len(columns), *([line.get(column, "") for column in columns] for line in lines)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in cells)


def draw(path: Path, runs: Sequence[dict[str, Any]]) -> None:
    """Draws held-out top-1 and loss and the training loss over epochs, a line for each run, as PNG."""
    figure = Figure(figsize=(14, 4.2), layout="constrained")
    panels = figure.subplots(1, 3)
    for run in runs:
        epochs = run["epochs"]
        at, marker = [record["epoch"] for record in epochs], "." if len(epochs) < 2 else None
        top1, losses = ([score(record)[name] for record in epochs] for name in ("top1", "loss"))
        trained = [float("nan") if r["train_loss"] is None else r["train_loss"] for r in epochs]
        for axes, values in zip(panels, (top1, losses, trained)):
            axes.plot(at, values, label=run["name"].replace("$", r"\$"), marker=marker)
    for axes, title in zip(panels, ("held-out top-1, %", "held-out loss", "training loss")):
        axes.set(title=title, xlabel="epoch")
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    save_figure(path, figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status: 0, or 2 for a directory that holds no run."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m vilonghorn.tools.compare", description=__doc__, formatter_class=form)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="directory of a run, finished or not")
    parser.add_argument("--plot", metavar="PNG", type=Path, help="file to draw the curves into")
    options = parser.parse_args(arguments)
    try:
        runs = [read_run(path) for path in dict.fromkeys(options.runs)]
        print(markdown([row(run) for run in runs]))
        if different := differences(runs):
            print("\nWhat differs:\n\n" + markdown(different))
        if options.plot:
            draw(options.plot, runs)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
