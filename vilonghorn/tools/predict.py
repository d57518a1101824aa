"""Says what images show: `python -m vilonghorn.tools.predict MODEL IMAGE...`, images being files or folders of them.

MODEL is the directory of a run, or a model that timm knows with its weights. Each image gets its most probable classes,
on a line of text or of JSON; one that cannot be read is named on standard error, the rest go on, and the exit status
is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from ..data.images import EXTENSIONS, read_image
from ..engine.build import REFUSALS
from .loaded_model import FAILURES, Subject, arguments, from_options


def find_images(names: Sequence[str]) -> list[str]:
    """Image files by their names, and in place of folders the images in them at any depth, in sorted order.

    In folders, hidden files, what lies in hidden folders, and files that no image's extension ends are passed over. A
    folder without images stays as it is, so that whoever reads it names it.
    """
    files = []
    for name in names:
        inside = [path for path in Path(name).rglob("*") if path.suffix.lower() in EXTENSIONS and path.is_file()]
        shown = sorted(str(path) for path in inside if not _hidden(path.relative_to(name)))
        files += shown or [name]
    return files


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


@torch.inference_mode()
def predict(
    subject: Subject, files: Sequence[str], *, top: int = 5, batch_size: int = 32, workers: int = 0
) -> Iterator[dict[str, Any]]:
    """Classifies image files in batches.

    Args:
        subject: the model.
        files: image files.
        top: classes to name, at most as many as there are.
        batch_size: images a batch.
        workers: processes that read images; 0 reads in this one.

    Yields:
        For each file, in order: {"image": file, "predictions": [{"class": number, "name": its name or null,
        "probability": 0 to 1}, ...]}, the most probable first; or {"image": file, "error": sentence}.

    Raises:
        ValueError: the model has no classes, does not take the images, or gives scores that are no numbers.
    """
    if getattr(subject.model, "num_classes", None) == 0:
        raise ValueError(f"{subject.name} has no classifier: give it num_classes, and weights that have them")
    for batch in DataLoader(_Files(subject, files), batch_size, num_workers=workers, collate_fn=list):
        readable = [image for _, image in batch if not isinstance(image, str)]
        predictions = iter(_classify(subject, torch.stack(readable), top) if readable else [])
        for file, image in batch:
            problem = isinstance(image, str)
            yield {"image": file, "error": image} if problem else {"image": file, "predictions": next(predictions)}


class _Files(Dataset):
    """(file, the model's input or a sentence on why there is none)."""

    def __init__(self, subject: Subject, files: Sequence[str]) -> None:
        self.files, self.transform = files, subject.transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[str, torch.Tensor | str]:
        file = self.files[index]
        if os.path.isdir(file):
            return file, f"{file}: no image in this folder; images end in {', '.join(EXTENSIONS)}"
        if not os.path.exists(file):
            return file, f"{file}: no such file or folder"
        try:
            return file, self.transform(read_image(file))
        except ValueError as error:
            return file, str(error)


def _classify(subject: Subject, images: torch.Tensor, top: int) -> list[list[dict[str, Any]]]:
    try:
        scores = subject.model(images.to(subject.device)).float()
    except REFUSALS as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{subject.name} does not take images {tuple(images.shape)} ({reason})") from error
    if scores.dim() != 2:
        shapes = f"images {tuple(images.shape)} into {tuple(scores.shape)}"
        raise ValueError(f"{subject.name} turns {shapes}, not into a score for each class")
    if not scores.isfinite().all():
        raise ValueError(f"{subject.name} gives scores that are no finite numbers: its weights are damaged")
    values, classes = scores.softmax(1).topk(min(top, scores.shape[1]))
    names = subject.class_names
    return [
        [{"class": c, "name": None if names is None else names[c], "probability": p} for c, p in zip(*pair)]
        for pair in zip(classes.tolist(), values.tolist())
    ]


def line(result: dict[str, Any]) -> str:
    """A prediction as text: the file, then names and percentages."""
    predictions = result["predictions"]
    names = [p["class"] if p["name"] is None else p["name"] for p in predictions]
    named = (f"{name} {100 * p['probability']:.1f}%" for name, p in zip(names, predictions))
    return f"{result['image']}: {', '.join(named)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, 1 if some image could not be read, or 2 for a model that cannot be asked."""
    parser = argparse.ArgumentParser(prog="python -m vilonghorn.tools.predict", description=__doc__.split("\n\n")[1])
    arguments(parser)
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="image file, or a folder of images at any depth")
    parser.add_argument("--top", type=_positive, default=5, help="classes to name (default: 5)")
    parser.add_argument("--batch-size", type=_positive, default=32, help="images a batch (default: 32)")
    parser.add_argument("--workers", type=int, default=0, help="processes that read images (default: 0, none)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of text")
    options = parser.parse_args(argv)
    files = find_images(options.images)
    settings = dict(top=options.top, batch_size=options.batch_size, workers=options.workers)
    failed = False
    try:
        subject = from_options(options)
        with tqdm(total=len(files), unit="img", disable=None if len(files) > 1 else True) as bar:
            for result in predict(subject, files, **settings):
                if "error" in result:
                    failed = True
                    bar.write(f"error: {result['error']}", file=sys.stderr)
                if options.json:
                    bar.write(json.dumps(result))
                elif "error" not in result:
                    bar.write(line(result))
                bar.update()
    except FAILURES as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 1 if failed else 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
