"""Prints a table of runs, and the configuration keys in which they differ."""

import json
import statistics
from collections.abc import Sequence
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
    print(markdown([run["row"] for run in runs]))
    if rows := differences(runs):
        print("\nWhat differs:\n\n" + markdown(rows))


def read_run(path: str) -> dict[str, Any]:
    """The name, flat config and row of the table of a run.

    Raises:
        ValueError: its files are missing, or not those of a run.
    """
    run = RunDirectory(path)
    try:
        config = flatten(read_sections(run.config)[0])
        processes = json.loads(run.environment.read_text(encoding="utf-8")).get("processes", 1)
        return dict(name=path, config=config, row={"run": path, **_row(config, processes, read_log(run.log_file))})
    # What values of files of another program or of a damaged file raise.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not the directory of a run ({one_line(error)})") from error


def _row(config: dict[str, Any], processes: int, records: list[dict[str, Any]]) -> dict[str, str]:
    """What the table says of a run, of averaged weights if it has them."""
    train, epochs = ([record for record in records if record["kind"] == kind] for kind in ("train", "epoch"))
    epochs = [{**record, **(record.get("ema") or record["model"])} for record in epochs]
    finished = epochs[-1]["epoch"] if epochs else 0
    values = {"model": config["model.name"], "epochs": f"{finished}/{config['schedule.epochs']}"}
    values["images an update"] = str(config["data.batch_size"] * config["optimizer.accumulate"] * processes)
    if epochs:
        last, best = epochs[-1], max(epochs, key=quality)
        if "top1" in last:
            values |= {"top-1": f"{last['top1']:.2f}", "top-5": f"{last['top5']:.2f}"}
            values["best top-1"] = f"{best['top1']:.2f} (epoch {best['epoch']})"
        values["loss"] = f"{last['loss']:.4f}"
        values |= {"skipped": f"{last['skipped']}", "hours": f"{last['seconds'] / 3600:.3f}"}
    if speeds := [r["images_per_second"] for r in train if "images_per_second" in r]:
        values["images/s"] = f"{statistics.median(speeds):.1f}"
    return values


def differences(runs: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """The configuration keys whose values differ, with the value of every run."""
    keys = dict.fromkeys(key for run in runs for key in run["config"] if key not in ("run.dir", "run.device"))
    rows = [{"key": key, **{run["name"]: json.dumps(run["config"].get(key)) for run in runs}} for key in keys]
    return [row for row in rows if len(set(list(row.values())[1:])) > 1]
