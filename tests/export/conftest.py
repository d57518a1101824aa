"""A small model, its checkpoint, and images for it."""

import subprocess
from functools import cache
from io import BytesIO
from types import SimpleNamespace

import pytest
import timm
import torch

from vilonghorn.engine.checkpoint import save_weights
from vilonghorn.export import capture, export, formats, run_exported, verify
from vilonghorn.ops.backends import cpu

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
def exported(tmp_path_factory):
    """Exports a small model to ONNX, once: `exported(name, scan, **kwargs)` returns it and its file."""

    @cache
    def export_once(name, scan=None, **kwargs):
        model, path = make_small(name, **kwargs), tmp_path_factory.mktemp(name) / "model.onnx"
        errors = export(model, "onnx", path, scan=scan)
        assert len(errors) == 6 and max(error for _, error in errors) < 1e-5
        return model, path

    return export_once


@pytest.fixture
def write(tmp_path):
    """Writes a file as `export` does, without the comparison: `write(model, kind)` returns its path."""

    def write_file(model, kind):
        if kind == "ort" and cpu.library is None:
            pytest.skip("the native library is not built")
        form = formats.FORMATS[kind]
        path = tmp_path / f"a model{form.suffix}"
        form.write(capture.capture(model, form.library is not None), path, capture.describe(model))
        return path

    return write_file


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
