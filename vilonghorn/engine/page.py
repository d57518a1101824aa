"""The one-page report of a finished run: HTML that holds its pictures, to be kept or sent as one file."""

from __future__ import annotations

import base64
from html import escape
from typing import Any

import yaml

from .checkpoint import write_whole
from .config import Config
from .directory import RunDirectory
from .distributed import Ranks
from .predictions import Predictions, draw_predictions, predict, worst_classes
from .train_state import Learner

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em; color: #222 }
img { max-width: 100% } pre { background: #f5f5f5; padding: 1em; overflow-x: auto; font-size: 13px }
table { border-collapse: collapse } td, th { padding: .15em 1em .15em 0; text-align: left; border-bottom: 1px solid #ddd }
"""


def leave_report(
    directory: RunDirectory, config: Config, learner: Learner, val: Any, ranks: Ranks, result: dict[str, Any]
) -> None:
    """Draws the predictions of a finished run and writes its page; every process calls it, and process 0 writes.

    Args:
        directory: the run's, with its curves.
        config: of the run.
        learner: with the final weights.
        val: loader of the held-out data.
        ranks: the processes.
        result: what `Trainer.fit` returns.
    """
    found = predict(learner.models[learner.weights], val, learner.amp, ranks)
    if ranks.main:
        draw_predictions(directory.predictions, found, config.data.mean, config.data.std)
        write_page(directory, config.to_dict(), result, found)


def write_page(directory: RunDirectory, config: dict[str, Any], result: dict[str, Any], found: Predictions) -> None:
    """Writes `report.html` of a run whose curves and predictions are drawn.

    Args:
        directory: the run's.
        config: resolved configuration.
        result: what `Trainer.fit` returns.
        found: what the weights that count say of the held-out data.
    """
    name = config["model"]["name"]
    scores = {
        "top-1": f"{result['top1']:.2f} %",
        "top-5": f"{result['top5']:.2f} %",
        "loss": f"{result['loss']:.4f}",
        "held-out images": result["images"],
        "weights": f"{result['weights']} after {result['epochs']} epochs",
        "best epoch": f"{result['best']['epoch']}, top-1 {result['best']['top1']:.2f} %",
        "skipped updates": result["skipped"],
        "seconds": f"{result['seconds']:.0f}",
    }
    worst = [
        [
            row["name"],
            row["images"],
            f"{row['top1']:.1f} %",
            ", ".join(f"{n} ({k})" for n, k in row["taken_for"].items()),
        ]
        for row in worst_classes(found)
    ]
    environment = directory.environment.read_text(encoding="utf-8")
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(name)}</title><style>{STYLE}</style>",
        f"<h1>{escape(name)}</h1><p>{escape(str(directory.path))}</p>",
        table([], scores.items()),
        f"<h2>Curves</h2>{picture(directory.curves, 'loss, top-1 and learning rate over epochs')}",
        "<h2>The worst classes</h2>",
        table(["class", "images", "recognised", "taken for"], worst) if worst else "<p>No image is mistaken.</p>",
        f"<h2>Mistakes and a sample</h2>{picture(directory.predictions, 'held-out images with their predicted classes')}",
        f"<h2>Configuration</h2><pre>{escape(yaml.safe_dump(config, sort_keys=False))}</pre>",
        f"<h2>Environment</h2><pre>{escape(environment)}</pre></html>\n",
    ]
    write_whole(directory.report, lambda file: file.write("\n".join(parts).encode()))


def table(head: list[str], rows: Any) -> str:
    """An HTML table of anything that has a string."""
    lines = [("th", head)] if head else []
    lines += [("td", row) for row in rows]
    cells = ("".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in row) for tag, row in lines)
    return "<table>" + "\n".join(f"<tr>{row}</tr>" for row in cells) + "</table>"


def picture(path: Any, meaning: str) -> str:
    """A PNG file as a part of the page."""
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img src="data:image/png;base64,{data}" alt="{escape(meaning)}">'
