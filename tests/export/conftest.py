"""A small model, its checkpoint, and images for it."""

import subprocess
from io import BytesIO
from types import SimpleNamespace

import pytest
import timm
import torch

from vilonghorn.engine.checkpoint import save_weights
from vilonghorn.export import run_exported, verify

SMALL = dict(img_size=32, patch_size=8, embed_dim=32, depth=1, num_classes=5)
HIERARCHY = dict(img_size=32, embed_dims=(16, 32), depths=(1, 1), num_heads=(None, 4), mlp_ratios=(0, 1), num_classes=5)


def make_small(name="vilonghorn_nano", **kwargs):
    torch.manual_seed(0)
    kwargs = HIERARCHY | kwargs if name.startswith("vilonghornv2") else SMALL | dict(dynamic_img_size=True) | kwargs
    model = timm.create_model(name, **kwargs)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def small():
    """Makes a model with random weights: `small(name, **kwargs)`."""
    return make_small


@pytest.fixture(scope="session")
def images():
    """Makes random images: `images(B, C, H, W)`."""
    return lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A run's weights of a small model, and the model."""
    path, model = tmp_path_factory.mktemp("run") / "best.safetensors", make_small()
    save_weights(path, model.state_dict(), dict(model="vilonghorn_nano", kwargs=dict(SMALL, drop_path_rate=0.1)))
    return path, model


@pytest.fixture
def in_this_process(monkeypatch):
    """Lets `export` run its files in this process, which is faster than the one that it starts to check a file."""

    def run(command, input, **_):
        _, _, loader, *paths = command
        computes, outputs = getattr(run_exported, loader)(*paths), BytesIO()
        torch.save([computes(images) for images in torch.load(BytesIO(input))], outputs)
        return subprocess.CompletedProcess(command, 0, outputs.getvalue())

    monkeypatch.setattr(verify, "subprocess", SimpleNamespace(run=run))
