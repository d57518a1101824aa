"""Publishes a model as a folder, or as a repository of the Hugging Face Hub, that timm and transformers load.

`vilonghorn publish RUN FOLDER` publishes what `vilonghorn train` trained.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import HfApi
from timm.models import get_model_input_config
from timm.models._hub import generate_readme
from torch import nn

from ..commands import make_parser
from ..engine import load_config, load_run
from ..models import VisionSSM
from .loaded_model import preprocessing

USAGE = """```python
import timm, vilonghorn

model = timm.create_model("hf-hub:{name}", pretrained=True).eval()  # of a folder: "local-dir:PATH"
transform = timm.data.create_transform(**timm.data.resolve_data_config(model=model))
```
With transformers, once vilonghorn is imported: `AutoModelForImageClassification.from_pretrained("{name}")`.
`pip install vilonghorn` brings the models; features, other image sizes and fine-tuning are as in timm."""


def make_card(
    model: nn.Module,
    name: str,
    metrics: Mapping[str, Any] | None = None,
    license: str = "other",
) -> str:
    """Returns a model card in Markdown for a repository "owner/name" or a folder.

    `metrics` were measured with these weights, such as {"top-1 (%)": 76.1}; `license` is its identifier on the Hub.
    """
    details = {
        "Architecture": model.pretrained_cfg["architecture"],
        "Parameters (M)": f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}",
        "Image size": " x ".join(map(str, get_model_input_config(model)["input_size"][-2:])),
        "Classes": model.num_classes,
    }
    if isinstance(model, VisionSSM):
        details["Mixer"] = model.blocks[0].mixer.extra_repr()
    details["Metrics"] = dict(metrics) if metrics else "none given"
    description = "An image backbone, made with Vision Longhorn and timm."
    card = dict(license=license, description=description, details=details, usage=USAGE.format(name=name))
    return generate_readme(card, name)


def save_pretrained(model: nn.Module, folder: str | Path, card: str, **config: Any) -> None:
    """Writes weights, config.json and README.md for `timm.create_model("local-dir:FOLDER", pretrained=True)`.

    The folder appears complete or not at all. `config` has further arguments of `timm.models.save_for_hf`, such as
    model_config=dict(label_names=...).

    Raises:
        FileExistsError: `folder` exists.
        ValueError: weights that are not finite.
    """
    folder, state = Path(folder), model.state_dict()
    if folder.exists():
        raise FileExistsError(f"{folder} exists already: choose another folder, or remove it")
    if wrong := [name for name, value in state.items() if not torch.isfinite(value).all()]:
        raise ValueError(f"{', '.join(wrong[:3])} hold NaN or infinity: such weights are not published")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        partial = Path(temporary, folder.name)
        timm.models.save_for_hf(model, partial, safe_serialization=True, **config)
        # timm 1.0.31 writes num_classes twice, and transformers' TimmWrapper then fails to load the model.
        written = json.loads((partial / "config.json").read_text(encoding="utf-8"))
        written.get("model_args", {}).pop("num_classes", None)
        (partial / "config.json").write_text(json.dumps(written, indent=2), encoding="utf-8")
        (partial / "README.md").write_text(card, encoding="utf-8")
        os.replace(partial, folder)


def push_folder(folder: str | Path, repo_id: str, private: bool = False) -> str:
    """Uploads a folder of `save_pretrained` to the Hugging Face Hub and returns the URL of the commit.

    The repository "owner/name" is created if needed; its README is kept. The token is that of `hf auth login`.
    """
    api = HfApi(library_name="timm", library_version=timm.__version__)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    settings = dict(ignore_patterns=["README.md"] if api.file_exists(repo_id, "README.md") else None)
    return api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Add model", **settings).commit_url


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command, also of its completion."""
    examples = ("runs/photos published/photos", "runs/photos published/photos --push me/photos --private")
    about = "Make a folder of a run that timm and transformers load, and upload it to the Hugging Face Hub if --push."
    parser = make_parser("publish", about, *examples)
    parser.add_argument("run", metavar="RUN", help="directory of the run")
    parser.add_argument("folder", metavar="FOLDER", help="folder to make; it must not exist")
    parser.add_argument("--checkpoint", choices=("best", "last"), default="best", help="weights (default: best)")
    parser.add_argument(
        "--push", metavar="OWNER/NAME", help="also upload to this repository of the Hub (default: none)"
    )
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    help = "licence of the weights, an identifier of the Hub such as apache-2.0 (default: other)"
    parser.add_argument("--license", default="other", help=help)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = build_parser()
    options = parser.parse_args(argv)
    try:
        model, record = load_run(options.run, options.checkpoint)
        data = load_config(Path(options.run) / "config.yaml").data
        metrics = {"top-1 (%)": f"{record['top1']:.2f}", "top-5 (%)": f"{record['top5']:.2f}"}
        metrics |= {"measured on": data.val, "weights": f"{record['weights']} of epoch {record['epoch']}"}
        config: dict[str, Any] = dict(data_config=preprocessing(data))
        if record.get("class_names"):
            config["model_config"] = dict(label_names=list(record["class_names"]))
        card = make_card(model, options.push or Path(options.folder).name, metrics, options.license)
        save_pretrained(model, options.folder, card, **config)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f'{options.folder}: timm.create_model("local-dir:{options.folder}", pretrained=True)')
    if options.push:
        try:
            print(push_folder(options.folder, options.push, options.private))
        except (OSError, ValueError) as error:  # ValueError: a name that the Hub refuses
            command = f"hf upload {options.push} {options.folder} ."
            parser.error(f"{options.folder} is complete, but was not uploaded ({error}); upload it: {command}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
