"""Makes a folder of a run, with a model card, that timm and transformers load.

python examples/publish.py runs/photos published/photos --repo me/photos --license mit
hf upload me/photos published/photos .
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
import yaml
from timm.models import get_model_input_config
from timm.models._hub import generate_readme, save_config_for_hf
from torch import nn

from vilonghorn.data.atomic_files import atomic_folder
from vilonghorn.data.image_file import printable
from vilonghorn.engine import load_run
from vilonghorn.engine.evaluate import check_names, preprocessing
from vilonghorn.engine.predictions import hide_top5
from vilonghorn.layers import Mixer
from vilonghorn.models.weights_file import pack

USAGE = """```python
import timm, vilonghorn

model = timm.create_model("hf-hub:{name}", pretrained=True).eval()  # of a folder: "local-dir:PATH"
transform = timm.data.create_transform(**timm.data.resolve_data_config(model=model))
```
With transformers, once vilonghorn is imported: `AutoModelForImageClassification.from_pretrained("{name}")`.
The package vilonghorn is not on PyPI: `pip install .` in a clone of its repository installs it. Features, other image
sizes and fine-tuning are as in timm."""
MAX_NAMES = 20  # classes that a card lists


def make_card(
    model: nn.Module,
    name: str,
    metrics: Mapping[str, Any] | None = None,
    license: str = "other",
    class_names: Sequence[str] | None = None,
    image_size: Sequence[int] | None = None,
) -> str:
    """Returns a model card in Markdown.

    Args:
        model: a timm model.
        name: of the repository, "owner/name"; without an owner, the card has OWNER in its place.
        metrics: measured with these weights, such as {"top-1 (%)": 76.1}.
        license: its identifier on the Hub.
        class_names: by class. The first 20 are listed.
        image_size: height and width of the images that it was measured on, in pixels. Default: those of the model.

    Raises:
        ValueError: `class_names` is not a text for each class.
    """
    _check_names(model, class_names)
    size = get_model_input_config(model)["input_size"][-2:] if image_size is None else image_size
    name = _text(name if "/" in name else f"OWNER/{name}")
    details = {
        "Architecture": model.pretrained_cfg["architecture"],
        "Parameters (M)": f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}",
        "Image size": " x ".join(map(str, size)),
        "Classes": model.num_classes,
    }
    if class_names is not None:
        more = ", ... (all are in config.json)" * (len(class_names) > MAX_NAMES)
        details["Class names"] = ", ".join(map(_text, class_names[:MAX_NAMES])) + more
    if mixers := [module for module in model.modules() if isinstance(module, Mixer)]:
        details["Mixer"] = mixers[-1].extra_repr()
    details["Metrics"] = {key: _text(str(value)) for key, value in metrics.items()} if metrics else "none given"
    license = yaml.safe_dump(license, default_style='"', width=math.inf).strip()  # unquoted, null and 1.0 are no texts
    description = "An image backbone, made with Vision Longhorn and timm."
    card = dict(license=license, description=description, details=details, usage=USAGE.format(name=name))
    return generate_readme(card, name)


def _check_names(model: nn.Module, names: Any) -> None:
    check_names("the model", model.num_classes, list(names) if isinstance(names, tuple) else names)


def _text(text: str) -> str:
    """A text of the user in one line, without HTML."""
    return escape(printable(text), quote=False)


def save_pretrained(model: nn.Module, folder: str | Path, card: str, **config: Any) -> None:
    """Writes weights, config.json and README.md for `timm.create_model("local-dir:FOLDER", pretrained=True)`.

    The folder appears complete or not at all. `config` has arguments of `timm.models.save_for_hf` on the model, such as
    model_config=dict(label_names=...).

    Raises:
        FileExistsError: `folder` exists, and is not empty.
        ValueError: weights that are not finite, or names that are not a text for each class.
    """
    _check_names(model, config.get("model_config", {}).get("label_names"))
    if wrong := [name for name, value in model.state_dict().items() if not torch.isfinite(value).all()]:
        raise ValueError(f"{', '.join(wrong[:3])} contain NaN or infinity: such weights are not published")
    with atomic_folder(folder) as partial:
        (partial / "model.safetensors").write_bytes(pack(model.state_dict()))  # with a digest
        save_config_for_hf(model, partial / "config.json", **config)
        # timm 1.0.31 writes num_classes twice, and transformers' TimmWrapper then fails to load the model.
        written = json.loads((partial / "config.json").read_text(encoding="utf-8"))
        written.get("model_args", {}).pop("num_classes", None)
        (partial / "config.json").write_text(json.dumps(written, indent=2), encoding="utf-8")
        (partial / "README.md").write_text(card, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Publishes a run, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="directory of the run")
    parser.add_argument("folder", metavar="FOLDER", help="folder to make; it must not exist")
    parser.add_argument("--checkpoint", choices=["best", "last"], default="best", help="weights (default: %(default)s)")
    help = "repository of the Hub that the card names (default: OWNER and the name of FOLDER)"
    parser.add_argument("--repo", metavar="OWNER/NAME", help=help)
    help = "licence of the weights, an identifier of the Hub such as apache-2.0 (default: %(default)s)"
    parser.add_argument("--license", default="other", help=help)
    options = parser.parse_args(argv)
    folder, (model, record) = options.folder, load_run(options.run, options.checkpoint)
    if not record["kwargs"]["num_classes"]:
        raise ValueError(f"{options.run} has learned without labels, no classifier: train from its weights first")
    shown = hide_top5(record, record["kwargs"]["num_classes"])
    metrics = {f"{name[:3]}-{name[3:]} (%)": f"{shown[name]:.2f}" for name in ("top1", "top5") if name in shown}
    metrics["measured on"] = "the held-out images of the run"
    metrics["weights"] = f"{record['weights']} of epoch {record['epoch']}"
    model.pretrained_cfg["license"] = options.license
    names, transform = record.get("class_names"), preprocessing(options.run)
    size = transform["input_size"][-2:]
    if hasattr(model, "set_input_size") and not get_model_input_config(model)["fixed_input_size"]:
        model.set_input_size(img_size=size)  # of the arguments in config.json
    card = make_card(model, options.repo or Path(folder).name, metrics, options.license, names, size)
    save_pretrained(model, folder, card, data_config=transform, model_config={"label_names": names})
    print(f'{folder}: timm.create_model("local-dir:{folder}", pretrained=True)')
    print(f"upload it: hf upload {options.repo or 'OWNER/NAME'} {folder} .")


if __name__ == "__main__":
    main()
