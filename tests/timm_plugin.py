"""A plugin for timm's own test-suite: its tests of models run on ours.

`pytest -p timm_plugin tests/test_models.py` in timm's source, with names of our models in VILONGHORN_MODELS. timm's tests
choose models by asking `timm.list_models` for names that its filters know. Here it answers with ours, but where a test
asks for models whose features are maps of declared size (ours are tokens, as in timm's vision transformers, which those
tests leave out too). VILONGHORN_DEPTH cuts the equal blocks of every model to that number. What timm would fetch from the
Hub for a Vim is made here, in its authors' format.
"""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path

import timm
import torch

import vilonghorn  # noqa: F401  (registers the models)
from vilonghorn.models import vim

OURS = os.environ["VILONGHORN_MODELS"].split()
DEPTH = {"depth": int(os.environ["VILONGHORN_DEPTH"])} if os.environ.get("VILONGHORN_DEPTH") else {}
create_model = timm.create_model


def list_models(filter="", module="", pretrained=False, exclude_filters="", include_tags=False, **_):
    if isinstance(filter, str) and filter:  # models of one kind, by name
        return []
    if "vit_*" in exclude_filters and (include_tags or pretrained):  # features as maps of declared size
        return []
    return [name for name in OURS if not pretrained or timm.is_model_pretrained(name)]


@functools.lru_cache(maxsize=None)
def official_file(repo_id: str, filename: str) -> str:
    """A file as its authors publish it, with random numbers."""
    name = next(name for name, place in vim.OFFICIAL.items() if place == (repo_id, filename))
    path = Path(tempfile.mkdtemp(dir=os.environ["VILONGHORN_TMP"]), filename)
    torch.save({"model": vim.to_official(create_model(name.split(".")[0], **DEPTH).state_dict())}, path)
    return str(path)


def pytest_configure(config):
    timm.list_models, timm.list_pretrained = list_models, lambda *_, **__: []
    timm.create_model = lambda *args, **kwargs: create_model(*args, **{**DEPTH, **kwargs})
    timm.models._hub.hf_hub_download = lambda repo_id, filename, **_: official_file(repo_id, filename)


def pytest_collection_modifyitems(config, items):
    """Leaves out timm's tests of single models of its own."""
    ours = [item for item in items if hasattr(item, "callspec") and item.callspec.params.get("model_name") in OURS]
    config.hook.pytest_deselected(items=[item for item in items if item not in ours])
    items[:] = ours
