"""Prints a table of runs, and the configuration keys in which they differ."""

import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..bench.tables import markdown
from ..engine.build import one_line
from ..engine.checkpoint import RunDirectory, read_log
from ..engine.config import flatten, read_sections
from ..engine.evaluate import quality
from . import make_parser

parser = make_parser("compare", __doc__, "runs/a runs/b", "runs/imagenet/*")
parser.add_argument("runs", metavar="RUN", nargs="+", help="directory of a run, finished or not")


def main(argv: Sequence[str]) -> None:
    """Runs the command."""
    runs = [read_run(path) for path in dict.fromkeys(parser.parse_args(argv).runs)]
    print(markdown([row(run) for run in runs]))
    if rows := differences(runs):
        print("\nWhat differs:\n\n" + markdown(rows))


@contextmanager
def named(path: str) -> Iterator[None]:
    """Turns what values of files of another program or of a damaged file raise into a ValueError."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not the directory of a run ({one_line(error)})") from error


def read_run(path: str) -> dict[str, Any]:
    """The name, flat config, number of processes, and log records of a run, of averaged weights if it has them.

    Raises:
        ValueError: its files are missing, or not those of a run.
    """
    run = RunDirectory(path)
    with named(path):
        config = flatten(read_sections(run.config)[0])
        processes = json.loads(run.environment.read_text(encoding="utf-8")).get("processes", 1)
        records = read_log(run.log_file)
        train, epochs = ([record for record in records if record["kind"] == kind] for kind in ("train", "epoch"))
        epochs = [{**record, **(record.get("ema") or record["model"])} for record in epochs]
    return dict(name=path, config=config, processes=processes, train=train, epochs=epochs)


def row(run: dict[str, Any]) -> dict[str, str]:
    """The table's row of a run. Raises ValueError if its configuration or log is not that of a run."""
    with named(run["name"]):
        return _row(run)


def _row(run: dict[str, Any]) -> dict[str, str]:
    config, epochs = run["config"], run["epochs"]
    finished = epochs[-1]["epoch"] if epochs else 0
    images = config["data.batch_size"] * config["optimizer.accumulate"] * run["processes"]
    values = {"run": run["name"], "model": config["model.name"], "epochs": f"{finished}/{config['schedule.epochs']}"}
    values["images an update"] = str(images)
    if epochs:
        last, best = epochs[-1], max(epochs, key=quality)
        values |= {"top-1": f"{last['top1']:.2f}", "top-5": f"{last['top5']:.2f}", "loss": f"{last['loss']:.4f}"}
        values["best top-1"] = f"{best['top1']:.2f} (epoch {best['epoch']})"
        values |= {"skipped": f"{last['skipped']}", "hours": f"{last['seconds'] / 3600:.3f}"}
    if speeds := [r["images_per_second"] for r in run["train"] if "images_per_second" in r]:
        values["images/s"] = f"{statistics.median(speeds):.1f}"
    return values


def differences(runs: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """The configuration keys whose values differ, with the value of every run."""
    keys = dict.fromkeys(key for run in runs for key in run["config"] if key not in ("run.dir", "run.device"))
    rows = [{"key": key, **{run["name"]: json.dumps(run["config"].get(key)) for run in runs}} for key in keys]
    return [row for row in rows if len(set(list(row.values())[1:])) > 1]
