"""Whole models against the papers' equations, written out in float64 in composition.py."""

import composition
import pytest
import timm
import torch
from oracle import error

import vilonghorn  # noqa: F401  (registers the models)
from vilonghorn.models import vim

TOLERANCE = 1e-5  # of the logits, in the 2-norm


def images(size=224):
    return torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(1))


def stirred(name, **kwargs):
    """A model, and its weights away from their start."""
    torch.manual_seed(0)
    model = timm.create_model(name, **kwargs).eval()
    model.load_state_dict(composition.stir(model.state_dict()))
    return model


@torch.no_grad()
def test_vim_tiny_with_a_file_of_its_authors_is_vim():
    weights = composition.official_weights(dim=192)
    model = timm.create_model("vim_tiny").eval()
    model.load_state_dict(vim.checkpoint_filter_fn({"model": weights}, model), strict=True)
    expected = composition.vim(weights, images())
    assert expected.std() > 0.1 and error(model(images()), expected) < TOLERANCE
    assert error(model.double()(images().double()), expected) < 1e-12


@pytest.mark.parametrize("name, form", [("vilonghorn_tiny", "longhorn"), ("vilonghorn_tiny_shared", "shared")])
@torch.no_grad()
def test_vilonghorn_tiny_is_its_equations(name, form):
    model = stirred(name)
    expected = composition.vilonghorn(model.state_dict(), images(), form)
    assert error(model(images()), expected) < TOLERANCE
    assert error(model.double()(images().double()), expected) < 1e-12


@torch.no_grad()
def test_the_exact_form_is_its_equations():
    model = stirred("vilonghorn_nano_exact", img_size=64)
    expected = composition.vilonghorn(model.state_dict(), images(64), "longhorn_exact")
    assert error(model(images(64)), expected) < TOLERANCE


@torch.no_grad()
def test_overlapping_patches_are_the_equations_at_another_stride():
    weights = composition.official_weights(dim=96, depth=6, classes=10, patches=49)
    model = timm.create_model("vim_nano", img_size=64, stride=8, num_classes=10).eval()
    model.load_state_dict(vim.checkpoint_filter_fn(weights, model), strict=True)
    assert error(model(images(64)), composition.vim(weights, images(64), stride=8)) < TOLERANCE
