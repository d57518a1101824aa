"""Publishes the model of a run for timm and transformers: `vilonghorn publish RUN FOLDER`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..engine import load_config, load_run
from ..inference import preprocessing
from ..publish import make_card, push_folder, save_pretrained
from . import make_parser
from .arguments import add_run


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command, also of its completion."""
    examples = ("runs/photos published/photos", "runs/photos published/photos --push me/photos --private")
    about = "Make a folder of a run that timm and transformers load, and upload it to the Hugging Face Hub if --push."
    parser = make_parser("publish", about, *examples)
    add_run(parser)
    parser.add_argument("folder", metavar="FOLDER", help="folder to make; it must not exist")
    help = "also upload to this repository of the Hub (default: none)"
    parser.add_argument("--push", metavar="OWNER/NAME", help=help)
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    help = "licence of the weights, an identifier of the Hub such as apache-2.0 (default: %(default)s)"
    parser.add_argument("--license", default="other", help=help)
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0."""
    options = build_parser().parse_args(argv)
    folder, (model, record) = options.folder, load_run(options.run, options.checkpoint)
    data = load_config(Path(options.run) / "config.yaml").data
    metrics = {"top-1 (%)": f"{record['top1']:.2f}", "top-5 (%)": f"{record['top5']:.2f}"}
    metrics |= {"measured on": data.val, "weights": f"{record['weights']} of epoch {record['epoch']}"}
    config: dict[str, Any] = dict(data_config=preprocessing(data))
    if record.get("class_names"):
        config["model_config"] = dict(label_names=list(record["class_names"]))
    card = make_card(model, options.push or Path(folder).name, metrics, options.license)
    save_pretrained(model, folder, card, **config)
    print(f'{folder}: timm.create_model("local-dir:{folder}", pretrained=True)')
    if options.push:
        try:
            print(push_folder(folder, options.push, options.private))
        except (OSError, ValueError) as error:  # ValueError: a name that the Hub refuses
            command = f"hf upload {options.push} {folder} ."
            raise OSError(f"{folder} is complete, but was not uploaded ({error}); upload it: {command}") from error
    return 0
