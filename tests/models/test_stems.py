"""Hybrid models: a convolutional stem before the patch embedding, and our models as a stem of others."""

from functools import partial

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import HybridEmbed
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import vilonghorn  # noqa: F401  (registers the models)

SMALL = dict(img_size=64, patch_size=8, embed_dim=32, depth=2, num_classes=5)


def make(name="vilonghorn_nano", **kwargs):
    torch.manual_seed(0)
    return timm.create_model(name, **{**SMALL, "stem": "conv", **kwargs}).eval()


def images(*size, seed=1):
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(seed))


def test_tokens_are_the_stems_map_projected_and_every_parameter_learns():
    model, batch = make(), images(64, 64)
    embed = model.patch_embed
    expected = F.conv2d(embed.backbone(batch), embed.proj.weight, embed.proj.bias)
    torch.testing.assert_close(embed(batch), expected.flatten(2).mT)
    assert embed(batch).shape == (2, 64, 32) and model(batch).shape == (2, 5)
    model.train()(batch).square().mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    layer = timm.models.group_parameters(model, model.group_matcher(), reverse=True)
    assert {layer[name] for name in layer if name.startswith("patch_embed.")} == {0}
    # Each convolution halves the resolution, the last has the width of the tokens.
    convolutions = [layer for layer in embed.backbone if isinstance(layer, nn.Conv2d)]
    assert [(c.in_channels, c.out_channels) for c in convolutions] == [(3, 8), (8, 16), (16, 32)]


@torch.no_grad()
def test_a_hybrid_keeps_the_contract_on_sizes():
    model, batch = make(dynamic_img_size=True, dynamic_img_pad=True), images(50, 70)
    torch.testing.assert_close(model(batch), model(F.pad(batch, (0, 2, 0, 6))))
    resized = make()
    resized.set_input_size(img_size=(56, 72))
    torch.testing.assert_close(resized(F.pad(batch, (0, 2, 0, 6))), model(batch))
    with pytest.raises(ValueError, match="patch_size is 16, but the stem's is 8"):
        resized.set_input_size(patch_size=16)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(patch_size=12, img_size=48), "patch_size is 12, expected a power of two"),
        (dict(stride=4), "a stem needs square patches"),
        (dict(stem="test_resnet"), "stem is 'test_resnet', expected 'conv' or None"),
    ],
)
def test_a_stem_that_does_not_reach_the_patches_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        make(**wrong)


def test_our_models_are_stems_of_timms_vision_transformer():
    stem = timm.create_model(
        "vilonghorn_nano", features_only=True, img_size=64, embed_dim=32, depth=2, out_indices=[0, 1]
    )
    embed = partial(HybridEmbed, backbone=stem)
    model = VisionTransformer(
        img_size=64, patch_size=1, embed_dim=24, depth=1, num_heads=2, num_classes=5, embed_layer=embed
    )
    assert model.patch_embed.grid_size == (4, 4)
    model(images(64, 64)).square().mean().backward()
    assert all(p.grad is not None for p in stem.model.blocks.parameters())
