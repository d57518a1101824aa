"""Makes a folder of a run that timm and transformers load, and uploads it to the Hugging Face Hub if --push."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..engine import load_config, load_run
from ..inference import preprocessing
from ..publish import make_card, push_folder, save_pretrained
from . import make_parser
from .arguments import add_run

PUSH = "runs/photos published/photos --push me/photos --private"
parser = make_parser("publish", __doc__, "runs/photos published/photos", PUSH)
add_run(parser)
parser.add_argument("folder", metavar="FOLDER", help="folder to make; it must not exist")
help = "also upload to this repository of the Hub (default: none)"
parser.add_argument("--push", metavar="OWNER/NAME", help=help)
parser.add_argument("--private", action="store_true", help="make a new repository private")
help = "licence of the weights, an identifier of the Hub such as apache-2.0 (default: %(default)s)"
parser.add_argument("--license", default="other", help=help)


def main(argv: Sequence[str]) -> None:
    """Runs the command."""
    options = parser.parse_args(argv)
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
