"""Classifies image files: `vilonghorn predict MODEL IMAGE...`.

MODEL is the directory of a run, or the name of a timm model. IMAGE is a file, or a folder that is searched at any
depth. Each image gets a line with its most probable classes. An image that cannot be read is reported on standard
error, the others are still classified, and the exit status is 1.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from ..commands import make_parser
from ..data.images import EXTENSIONS, MAX_PIXELS, images_under, printable, read_image
from ..engine.build import MODEL_ERRORS, one_line
from .loaded_model import USER_ERRORS, LoadedModel, add_arguments, add_max_pixels, from_options


def find_images(names: Sequence[str]) -> list[str]:
    """Replaces each folder by the image files in it at any depth, sorted, without hidden files and folders.

    A folder without images stays in the list, so that `predict` reports it.
    """
    found = [sorted(images_under(name)) if Path(name).is_dir() else [] for name in names]
    return [file for name, files in zip(names, found) for file in files or [name]]


@torch.inference_mode()
def predict(
    loaded: LoadedModel,
    files: Sequence[str],
    *,
    top: int = 5,
    batch_size: int = 32,
    workers: int = 0,
    max_pixels: int = MAX_PIXELS,
) -> Iterator[dict[str, Any]]:
    """Classifies image files in batches; `workers` processes read them, or this process if 0.

    A file of more than `max_pixels` is an error.

    Yields:
        For each file, in order: {"image": file, "predictions": [{"class": number, "name": its name or None,
        "probability": 0 to 1}, ...]}, the `top` most probable first; or {"image": file, "error": sentence}.

    Raises:
        ValueError: the model has no classes, does not take the images, or returns scores that are not finite.
    """
    if getattr(loaded.model, "num_classes", None) == 0:
        raise ValueError(f"{loaded.name} has no classifier: give it num_classes, and weights for them")
    read = partial(_read, loaded.transform, max_pixels)
    for batch in DataLoader(files, batch_size, num_workers=workers, collate_fn=read):
        images = [image for _, image in batch if isinstance(image, Tensor)]
        predictions = iter(_classify(loaded, torch.stack(images), top) if images else [])
        for file, image in batch:
            result = {"error": image} if isinstance(image, str) else {"predictions": next(predictions)}
            yield {"image": file, **result}


def _read(
    transform: Callable[[Image.Image], Tensor], max_pixels: int, files: Sequence[str]
) -> list[tuple[str, Tensor | str]]:
    """Pairs each file with the model's input, or with a sentence on why it cannot be read."""
    batch: list[tuple[str, Tensor | str]] = []
    for file in files:
        try:
            if os.path.isdir(file):
                raise ValueError(
                    f"{printable(file)}: no image in this folder; expected names that end in {', '.join(EXTENSIONS)}"
                )
            batch.append((file, transform(read_image(file, max_pixels))))
        except ValueError as error:
            batch.append((file, str(error)))
    return batch


def _classify(loaded: LoadedModel, images: Tensor, top: int) -> list[list[dict[str, Any]]]:
    try:
        scores = loaded.model(images.to(loaded.device)).float()
    except MODEL_ERRORS as error:
        raise ValueError(f"{loaded.name} does not take images {tuple(images.shape)} ({one_line(error)})") from error
    if scores.dim() != 2:
        raise ValueError(f"{loaded.name} returns scores {tuple(scores.shape)}, expected (images, classes)")
    if not scores.isfinite().all():
        raise ValueError(f"{loaded.name} returns scores that are not finite numbers: its weights are damaged")
    values, classes = scores.softmax(1).topk(min(top, scores.shape[1]))
    names = loaded.class_names
    return [
        [{"class": c, "name": None if names is None else names[c], "probability": p} for c, p in zip(*pair)]
        for pair in zip(classes.tolist(), values.tolist())
    ]


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command, also of its completion."""
    examples = ("runs/photos holiday/ --top 3", "vim_tiny a.jpg b.jpg --json")
    parser = make_parser("predict", __doc__.split("\n\n")[1], *examples)
    add_arguments(parser)
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="image file, or folder of images at any depth")
    parser.add_argument("--top", type=PositiveInt, default=5, help="number of classes to print per image (default: 5)")
    parser.add_argument("--batch-size", type=PositiveInt, default=32, help="images in a batch (default: 32)")
    parser.add_argument(
        "--workers",
        type=NonNegativeInt,
        default=0,
        help="processes that read images; 0: none but this one (default: 0)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per image and line (default: text)")
    add_max_pixels(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, 1 if an image could not be read, or 2 if the model cannot be used."""
    options = build_parser().parse_args(argv)
    files = find_images(options.images)
    settings = dict(
        top=options.top, batch_size=options.batch_size, workers=options.workers, max_pixels=options.max_pixels
    )
    failed = False
    try:
        loaded = from_options(options)
        with tqdm(total=len(files), unit="img", disable=None if len(files) > 1 else True) as bar:
            for result in predict(loaded, files, **settings):
                if "error" in result:
                    failed = True
                    bar.write(f"error: {result['error']}", file=sys.stderr)
                if options.json:
                    bar.write(json.dumps(result))
                elif "error" not in result:
                    named = [f"{loaded.class_name(p['class'])} {p['probability']:.1%}" for p in result["predictions"]]
                    bar.write(f"{printable(result['image'])}: {', '.join(named)}")
                bar.update()
    except BrokenPipeError:
        raise
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
