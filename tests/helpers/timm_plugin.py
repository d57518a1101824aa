"""A pytest plugin that runs timm's own model tests on our models.

Use it in timm's source: `pytest -p timm_plugin tests/test_models.py`, with our model names in VILONGHORN_MODELS. timm's
tests choose models by `timm.list_models`, which this plugin replaces. Tests of features with a declared map size get no
models, because our features are tokens; those tests also exclude timm's vision transformers.
VILONGHORN_DEPTH limits the number of blocks. Downloads of official Vim weights are replaced by random weights.
"""

import functools
import os
import tempfile
from pathlib import Path

import timm
import torch

import vilonghorn  # noqa: F401  (registers the models)

OURS = os.environ["VILONGHORN_MODELS"].split()
DEPTH = {"depth": int(os.environ["VILONGHORN_DEPTH"])} if os.environ.get("VILONGHORN_DEPTH") else {}
create_model = timm.create_model


def list_models(filter="", module="", pretrained=False, exclude_filters="", include_tags=False, **_):
    if isinstance(filter, str) and filter:  # models of one kind, by name
        return []
    if "vit_*" in exclude_filters and (include_tags or pretrained):  # features as maps of declared size
        return [name for name in OURS if name.startswith("vilonghornv2") and not pretrained]
    return [name for name in OURS if not pretrained or timm.is_model_pretrained(name)]


@functools.cache
def official_file(repo_id: str, filename: str) -> str:
    """A file of random weights in place of one of Vim's authors."""
    cfgs = {name: timm.models.get_pretrained_cfg(name) for name in OURS if name.startswith("vim_")}
    name = next(n for n, cfg in cfgs.items() if (cfg.hf_hub_id, cfg.hf_hub_filename) == (repo_id, filename))
    path = Path(tempfile.mkdtemp(dir=os.environ["VILONGHORN_TMP"]), filename)
    torch.save({"model": create_model(name.split(".")[0], **DEPTH).state_dict()}, path)
    return str(path)


def depth(name: str) -> dict[str, int]:
    """The number of blocks; models with weights in the package, and hierarchies, keep theirs."""
    return {} if timm.models.get_pretrained_cfg(name).file or name.startswith("vilonghornv2") else DEPTH


def pytest_configure(config):
    timm.list_models, timm.list_pretrained = list_models, lambda *_, **__: []
    timm.create_model = lambda name, **kwargs: create_model(name, **{**depth(name), **kwargs})
    timm.models._hub.hf_hub_download = lambda repo_id, filename, **_: official_file(repo_id, filename)


def pytest_collection_modifyitems(config, items):
    """Deselects timm's tests of its own models."""
    ours = [item for item in items if hasattr(item, "callspec") and item.callspec.params.get("model_name") in OURS]
    config.hook.pytest_deselected(items=[item for item in items if item not in ours])
    items[:] = ours
