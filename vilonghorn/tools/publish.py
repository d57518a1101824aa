"""Publishes a model: a folder, or a repository of the Hugging Face Hub, that timm and transformers load.

`python -m vilonghorn.tools.publish RUN FOLDER` does so with what a run of `train_imagenet.py` trained.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import HfApi
from torch import nn

from vilonghorn.engine import load_config, load_run
from vilonghorn.engine.directory import RunDirectory
from vilonghorn.models._timm import generate_readme, get_model_input_config

from .loaded_model import preprocessing

USAGE = """```python
import timm, vilonghorn

model = timm.create_model("hf-hub:{name}", pretrained=True).eval()  # of a folder: "local-dir:PATH"
transform = timm.data.create_transform(**timm.data.resolve_data_config(model=model))
```
With transformers, once vilonghorn is imported: `AutoModelForImageClassification.from_pretrained("{name}")`.
`pip install vilonghorn` brings the models; features, other image sizes and fine-tuning are as in timm."""


def card(
    model: nn.Module,
    name: str,
    metrics: Mapping[str, Any] | None = None,
    license: str = "apache-2.0",
    dataset: str | None = None,
) -> dict[str, Any]:
    """What a model card says, in the form of `timm.models.push_to_hf_hub`.

    Args:
        model: made by `timm.create_model`.
        name: under which it will be loaded.
        metrics: what was measured of these weights, such as {"top-1 (%)": 76.1}.
        license: of the weights, by its identifier on the Hub.
        dataset: what the weights were trained on.
    """
    details: dict[str, Any] = {"Architecture": model.pretrained_cfg["architecture"]}
    details["Parameters (M)"] = f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}"
    details["Image size"] = " x ".join(map(str, get_model_input_config(model)["input_size"][-2:]))
    details["Classes"] = model.num_classes
    if hasattr(model, "blocks") and hasattr(model.blocks[0], "mixer"):
        details["Mixer"] = model.blocks[0].mixer.extra_repr()
    if dataset:
        details["Dataset"] = dataset
    details["Metrics"] = dict(metrics) if metrics else "none given"
    return dict(
        description="An image backbone of bidirectional state-space blocks, made with Vision Longhorn and timm.",
        details=details,
        usage=USAGE.format(name=name),
        license=license,
    )


def save_pretrained(model: nn.Module, folder: str | Path, model_card: Mapping[str, Any], **config: Any) -> None:
    """Writes a folder that `timm.create_model("local-dir:FOLDER", pretrained=True)` loads: weights, config.json, README.md.

    Args:
        model: made by `timm.create_model`.
        folder: it must not exist; it appears whole or not at all.
        model_card: of `card`.
        config: further arguments of `timm.models.save_for_hf`, such as model_config=dict(label_names=...).

    Raises:
        FileExistsError: there is something at `folder`.
        ValueError: weights that are not finite.
    """
    folder = Path(folder)
    if folder.exists():
        raise FileExistsError(f"{folder} is there already: choose another folder, or remove it")
    _check_finite(model)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        timm.models.save_for_hf(model, partial, safe_serialization=True, **config)
        _say_classes_once(partial / "config.json")
        (partial / "README.md").write_text(generate_readme(dict(model_card), folder.name), encoding="utf-8")
        partial.chmod(0o755)  # mkdtemp's is for its owner alone
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _say_classes_once(config: Path) -> None:
    """Leaves num_classes where both timm and transformers look for it: the latter's TimmWrapper, which takes it from the
    root of the file, fails where the arguments of the model, which timm 1.0.31 writes there too, have it again."""
    content = json.loads(config.read_text(encoding="utf-8"))
    content.get("model_args", {}).pop("num_classes", None)
    config.write_text(json.dumps(content, indent=2), encoding="utf-8")


def push_to_hf_hub(
    model: nn.Module, repo_id: str, model_card: Mapping[str, Any], private: bool = False, **config: Any
) -> str:
    """Uploads what `save_pretrained` writes to a repository of the Hugging Face Hub, made if it is not there.

    Args:
        model: made by `timm.create_model`.
        repo_id: "owner/name"; the token is that of `hf auth login`.
        model_card: of `card`; a README that is there already stays.
        private: who does not own the repository cannot see it.
        config: further arguments of `timm.models.save_for_hf`.

    Returns:
        Address of the commit.

    Raises:
        ValueError: weights that are not finite.
    """
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder, repo_id.rsplit("/", 1)[-1])
        save_pretrained(model, local, model_card, **config)
        api = HfApi(library_name="timm", library_version=timm.__version__)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        kept = ["README.md"] if api.file_exists(repo_id, "README.md") else None
        commit = api.upload_folder(repo_id=repo_id, folder_path=local, commit_message="Add model", ignore_patterns=kept)
    return commit.commit_url


def _check_finite(model: nn.Module) -> None:
    wrong = [name for name, value in model.state_dict().items() if not torch.isfinite(value).all()]
    if wrong:
        raise ValueError(f"{', '.join(wrong[:3])} hold NaN or infinity: such weights are not published")


def describe_run(directory: str | Path, checkpoint: str, name: str) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    """A run's model, its card, and the arguments that carry its classes and preprocessing.

    Args:
        directory: the run's.
        checkpoint: "best" or "last".
        name: under which the model will be loaded.
    """
    model, record = load_run(directory, checkpoint)
    data = load_config(RunDirectory(directory).config).data
    metrics = {key: f"{record[short]:.2f}" for key, short in (("top-1 (%)", "top1"), ("top-5 (%)", "top5"))}
    metrics |= {"measured on": data.val, "weights": f"{record['weights']} of epoch {record['epoch']}"}
    config: dict[str, Any] = dict(data_config=preprocessing(data))
    if record.get("class_names"):
        config["model_config"] = dict(label_names=list(record["class_names"]))
    return model, card(model, name, metrics), config


def main(argv: Sequence[str] | None = None) -> int:
    """Publishes a run; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m vilonghorn.tools.publish", description=__doc__.splitlines()[0])
    parser.add_argument("run", help="directory of the run")
    parser.add_argument("folder", help="folder to make")
    parser.add_argument("--checkpoint", choices=("best", "last"), default="best")
    parser.add_argument(
        "--push", metavar="OWNER/NAME", help="also upload it to this repository of the Hugging Face Hub"
    )
    parser.add_argument("--private", action="store_true", help="of the repository")
    options = parser.parse_args(argv)
    try:
        model, text, config = describe_run(options.run, options.checkpoint, options.push or Path(options.folder).name)
        save_pretrained(model, options.folder, text, **config)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f'{options.folder}: timm.create_model("local-dir:{options.folder}", pretrained=True)')
    if options.push:
        print(push_to_hf_hub(model, options.push, text, options.private, **config))
    return 0


if __name__ == "__main__":
    sys.exit(main())
