"""Whole models against the papers' equations, written out in float64 in composition.py."""

import composition
import pytest
import timm
import torch
from oracle import error

import vilonghorn  # noqa: F401  (registers the models)
from vilonghorn.models.vim import checkpoint_filter_fn

TOLERANCE = 1e-5  # of the logits, in the 2-norm


def images(*size):
    return torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(1))


def perturbed(name, **kwargs):
    """A model, and its weights away from their start."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=3, **kwargs).eval()
    model.load_state_dict(composition.perturb(model.state_dict()))
    return model


@pytest.mark.parametrize("stride", [16, 8])
@torch.no_grad()
def test_vim_with_a_file_of_its_authors_is_vim(stride):
    weights = composition.official_weights(dim=192, depth=3, classes=10, patches=(96 // stride - 16 // stride + 1) ** 2)
    model = timm.create_model("vim_tiny", depth=3, img_size=96, stride=stride, num_classes=10).eval()
    model.load_state_dict(checkpoint_filter_fn({"model": weights}, model), strict=True)
    expected = composition.vim(weights, images(96, 96), stride)
    assert expected.std() > 0.1 and error(model(images(96, 96)), expected) < TOLERANCE
    assert error(model.double()(images(96, 96).double()), expected) < 1e-12


@pytest.mark.parametrize("name", ["vilonghorn_tiny", "vilonghorn_tiny_exact", "vilonghorn_tiny_shared"])
@torch.no_grad()
def test_a_model_is_its_equations(name):
    model = perturbed(name, img_size=96, depth=3)
    rule = "longhorn_exact" if name.endswith("exact") else "longhorn"
    expected = composition.vilonghorn(model.state_dict(), images(96, 96), rule)
    assert error(model(images(96, 96)), expected) < TOLERANCE
    assert error(model.double()(images(96, 96).double()), expected) < 1e-12


ALTERNATE = ((False,), (True,))
SWITCHES = {
    "one direction a block": dict(reverse=ALTERNATE),
    "wide filters over the grid": dict(d_conv=(3, 5)),
    "heads, patches read": dict(num_heads=8, rule="longhorn", global_pool="avg"),
    "all": dict(reverse=ALTERNATE, d_conv=(3, 3), num_heads=4, mlp_ratio=0.7, expand=3),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_and_all_its_gradients_are_its_equations(name):
    kwargs = {"rule": "longhorn_exact", "global_pool": "token", "reverse": (False, True), **SWITCHES[name]}
    model = perturbed("vilonghorn_nano", img_size=(12, 20), patch_size=4, embed_dim=16, depth=2, **kwargs).double()
    flags = kwargs["reverse"] if kwargs["reverse"] is ALTERNATE else (kwargs["reverse"],)
    batch, leaves = images(12, 20).double(), dict(model.named_parameters())
    expected = composition.vilonghorn(leaves, batch, kwargs["rule"], flags, kwargs["global_pool"])
    ours, theirs = (torch.autograd.grad(y.square().sum(), list(leaves.values())) for y in (model(batch), expected))
    assert error(model(batch), expected) < 1e-12
    wrong = {name: error(a, b) for name, a, b in zip(leaves, ours, theirs)}
    assert max(wrong.values()) < 1e-9, wrong
    assert error(model.float()(batch.float()), expected) < TOLERANCE  # the fused block, where it applies
