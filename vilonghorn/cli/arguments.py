"""Arguments that several commands share, and the model that they name."""

import argparse
import ast
from typing import Any

from jsonargparse.typing import PositiveInt

from ..data.image_file import MAX_PIXELS
from ..inference import LoadedModel, load


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds MODEL, --checkpoint, --model-kwargs and --device to a command line."""
    parser.add_argument("model", metavar="MODEL", help="directory of a run, or name of a timm model")
    help = "run: best (default) or last; timm model: pretrained (default), random, or a file of weights"
    parser.add_argument("--checkpoint", metavar="WHICH", help=help)
    help = "arguments of a timm model, such as num_classes=10 img_size=64 patch_size=4 (default: none)"
    parser.add_argument("--model-kwargs", nargs="+", default=[], type=key_value, metavar="KEY=VALUE", help=help)
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1, ...")


def add_max_pixels(parser: argparse.ArgumentParser) -> None:
    """Adds --max-pixels to a command line that reads image files."""
    help = "refuse image files of more pixels (width times height), which fill the memory (default: %(default)s)"
    parser.add_argument("--max-pixels", type=PositiveInt, default=MAX_PIXELS, metavar="N", help=help)


def load_model(options: argparse.Namespace) -> LoadedModel:
    """Loads the model that a command line with `add_model` names."""
    return load(options.model, options.checkpoint, dict(options.model_kwargs), options.device)


def key_value(text: str) -> tuple[str, Any]:
    """The key and the value of KEY=VALUE, a Python literal or else a string."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE; give images and other arguments before it")
    try:
        return key, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return key, {"true": True, "false": False}.get(value.lower(), value)
