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


def perturbed(name, **kwargs):
    """A model, and its weights away from their start."""
    torch.manual_seed(0)
    model = timm.create_model(name, **kwargs).eval()
    model.load_state_dict(composition.perturb(model.state_dict()))
    return model


@torch.no_grad()
def test_vim_tiny_with_a_file_of_its_authors_is_vim():
    weights = composition.official_weights(dim=192)
    model = timm.create_model("vim_tiny").eval()
    model.load_state_dict(vim.checkpoint_filter_fn({"model": weights}, model), strict=True)
    expected = composition.vim(weights, images())
    assert expected.std() > 0.1 and error(model(images()), expected) < TOLERANCE
    assert error(model.double()(images().double()), expected) < 1e-12


@pytest.mark.parametrize(
    "name, rule, size",
    [
        ("vilonghorn_tiny", "longhorn", 224),
        ("vilonghorn_tiny_shared", "longhorn", 224),
        ("vilonghorn_nano_exact", "longhorn_exact", 64),
    ],
)
@torch.no_grad()
def test_a_model_is_its_equations(name, rule, size):
    model = perturbed(name, img_size=size)
    expected = composition.vilonghorn(model.state_dict(), images(size), rule)
    assert error(model(images(size)), expected) < TOLERANCE
    assert error(model.double()(images(size).double()), expected) < 1e-12


@torch.no_grad()
def test_overlapping_patches_are_the_equations_at_another_stride():
    weights = composition.official_weights(dim=96, depth=6, classes=10, patches=49)
    model = timm.create_model("vim_nano", img_size=64, stride=8, num_classes=10).eval()
    model.load_state_dict(vim.checkpoint_filter_fn(weights, model), strict=True)
    assert error(model(images(64)), composition.vim(weights, images(64), stride=8)) < TOLERANCE


ALTERNATE = ((False,), (True,))
SWITCHES = {
    "one direction a block": dict(reverse=ALTERNATE),
    "filters over the grid": dict(d_conv=(3, 3)),
    "wide filters over the grid, one direction a block": dict(d_conv=(3, 5), reverse=ALTERNATE),
    "heads": dict(num_heads=8, rule="longhorn"),
    "patches read": dict(global_pool="avg"),
    "MLPs": dict(mlp_ratio=1.3),
    "all": dict(reverse=ALTERNATE, d_conv=(3, 3), num_heads=4, mlp_ratio=0.7, expand=3),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_and_all_its_gradients_are_its_equations(name):
    kwargs = {"rule": "longhorn_exact", "global_pool": "token", "reverse": (False, True), **SWITCHES[name]}
    model = perturbed(
        "vilonghorn_nano", img_size=(12, 20), patch_size=4, embed_dim=16, depth=2, num_classes=3, **kwargs
    ).double()
    flags = kwargs["reverse"] if kwargs["reverse"] is ALTERNATE else (kwargs["reverse"],)
    batch, leaves = torch.randn(2, 3, 12, 20, dtype=torch.float64), dict(model.named_parameters())
    options = kwargs["rule"], flags, kwargs["global_pool"]
    expected = composition.vilonghorn(leaves, batch, *options)
    ours, theirs = (torch.autograd.grad(y.square().sum(), list(leaves.values())) for y in (model(batch), expected))
    assert error(model(batch), expected) < 1e-12
    wrong = {name: error(a, b) for name, a, b in zip(leaves, ours, theirs)}
    assert max(wrong.values()) < 1e-9, wrong
    assert error(model.float()(batch.float()), expected) < TOLERANCE  # the fused block, where it applies
