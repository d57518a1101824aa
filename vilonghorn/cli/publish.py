"""Makes a folder of a run that timm and transformers load. `hf upload OWNER/NAME FOLDER .` puts it on the Hub."""

from collections.abc import Sequence
from pathlib import Path

from ..engine import load_run
from ..inference import find_run
from ..publish import make_card, save_pretrained
from . import make_parser
from .arguments import add_run

REPO = "runs/photos published/photos --repo me/photos --license mit"
parser = make_parser("publish", __doc__, "runs/photos published/photos", REPO)
add_run(parser)
parser.add_argument("folder", metavar="FOLDER", help="folder to make; it must not exist")
help = "repository of the Hub that the card names (default: OWNER and the name of FOLDER)"
parser.add_argument("--repo", metavar="OWNER/NAME", help=help)
help = "licence of the weights, an identifier of the Hub such as apache-2.0 (default: %(default)s)"
parser.add_argument("--license", default="other", help=help)


def main(argv: Sequence[str]) -> None:
    """Runs the command."""
    options = parser.parse_args(argv)
    folder, (model, record) = options.folder, load_run(options.run, options.checkpoint)
    if not record["kwargs"]["num_classes"]:
        raise ValueError(f"{options.run} has learned without labels, no classifier: train from its weights first")
    _, _, preprocessing = find_run(options.run, options.checkpoint)
    metrics = {f"{name[:3]}-{name[3:]} (%)": f"{record[name]:.2f}" for name in ("top1", "top5") if name in record}
    metrics["measured on"] = "the held-out images of the run"
    metrics["weights"] = f"{record['weights']} of epoch {record['epoch']}"
    model.pretrained_cfg["license"] = options.license
    names = record.get("class_names")
    card = make_card(model, options.repo or Path(folder).name, metrics, options.license, names)
    save_pretrained(model, folder, card, data_config=preprocessing, model_config={"label_names": names})
    print(f'{folder}: timm.create_model("local-dir:{folder}", pretrained=True)')
    print(f"upload it: hf upload {options.repo or 'OWNER/NAME'} {folder} .")
