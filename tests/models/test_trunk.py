"""VisionSSM: what it computes, and timm's contract for a vision backbone."""

import math
from functools import partial

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import HybridEmbed
from timm.models.vision_transformer import VisionTransformer
from timm.optim import param_groups_weight_decay

import vilonghorn  # noqa: F401  (registers the models)
from vilonghorn.models import VisionSSM

RULES = ("longhorn", "longhorn_exact", "mamba")


def small(**kwargs):
    """Three narrow blocks on 4 x 4 patches."""
    torch.manual_seed(0)
    return VisionSSM(**{**dict(img_size=32, patch_size=8, embed_dim=32, depth=3, num_classes=5), **kwargs}).eval()


@pytest.fixture
def images():
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dynamic", [False, True])
def test_without_positions_it_is_the_model_whose_positions_are_zero(dynamic, images):
    learned, without = small(dynamic_img_size=dynamic), small(pos_embed="none", dynamic_img_size=dynamic)
    assert without.pos_embed is None and "pos_embed" not in without.state_dict()
    torch.nn.init.zeros_(learned.pos_embed)
    without.load_state_dict({name: value for name, value in learned.state_dict().items() if name != "pos_embed"})
    torch.testing.assert_close(without(images), learned(images))
    torch.testing.assert_close(torch.jit.script(without)(images), learned(images))
    large = F.interpolate(images, (48, 40))
    for model in (learned, without):
        model.set_input_size((48, 40))
    torch.testing.assert_close(without(large), learned(large))


def test_pooling_reads_what_it_says(images):
    model = small()
    tokens = model.forward_features(images)
    patches = tokens[:, 1:]
    expected = {
        "token": tokens[:, 0],
        "avg": patches.mean(1),
        "max": patches.amax(1),
        "avgmax": (patches.mean(1) + patches.amax(1)) / 2,
        "": tokens,
    }
    for pool, features in expected.items():
        model.reset_classifier(5, pool)
        assert model.global_pool == pool
        torch.testing.assert_close(model.forward_head(tokens, pre_logits=True), features)
        torch.testing.assert_close(model(images), model.head(features))


def test_reset_classifier_keeps_pooling_dtype_and_mode():
    model = small(global_pool="avg", dtype=torch.bfloat16).train()
    model.reset_classifier(7)
    assert model.num_classes == 7 and model.global_pool == "avg"
    assert model.get_classifier().weight.shape == (7, 32)
    assert model.get_classifier().weight.dtype == torch.bfloat16 and model.get_classifier().training
    for wrong in ("catavgmax", "map"):
        with pytest.raises(ValueError, match="expected one of 'token', 'avg'"):
            model.reset_classifier(7, wrong)
    model.eval().reset_classifier(0)
    assert isinstance(model.get_classifier(), torch.nn.Identity) and not model.head.training


def test_the_attributes_of_a_timm_backbone_are_there():
    model = small(in_chans=1, stride=4, drop_path_rate=0.4)
    assert model.num_features == model.head_hidden_size == model.embed_dim == 32
    assert (model.in_chans, model.num_classes, model.num_prefix_tokens) == (1, 5, 1)
    assert [info["module"] for info in model.feature_info] == ["blocks.0", "blocks.1", "blocks.2"]
    assert {(info["num_chs"], info["reduction"]) for info in model.feature_info} == {(32, 4)}
    assert model.patch_embed.dynamic_feat_size((32, 48)) == (7, 11)
    assert [getattr(block.drop_path, "drop_prob", 0) for block in model.blocks] == pytest.approx([0, 0.2, 0.4])


def test_weight_decay_takes_the_matrices_and_nothing_else():
    model = small(rule="mamba", depth=1)
    assert model.no_weight_decay() <= dict(model.named_parameters()).keys()
    groups = param_groups_weight_decay(model, 0.1, no_weight_decay_list=model.no_weight_decay())
    decayed = {id(p) for group in groups if group["weight_decay"] > 0 for p in group["params"]}
    matrices = ("in_proj.weight", "conv_weight", "x_proj", "dt_proj", "out_proj.weight")
    assert {name for name, p in model.named_parameters() if id(p) in decayed} == {
        "patch_embed.proj.weight",
        "head.weight",
        *(f"blocks.0.mixer.{name}" for name in matrices),
    }


def test_layer_decay_groups_follow_the_depth():
    model = small()
    layer = timm.models.group_parameters(model, model.group_matcher(), reverse=True)
    assert layer["cls_token"] == layer["pos_embed"] == layer["patch_embed.proj.weight"] == 0
    assert [layer[f"blocks.{i}.mixer.D"] for i in range(3)] == [1, 2, 3]
    assert layer["norm.weight"] == 3 and layer["head.weight"] == 4


def test_set_input_size_gives_the_output_of_dynamic_resampling():
    model = small(dynamic_img_size=True)
    images = torch.randn(1, 3, 48, 64)
    expected = model(images)
    model.requires_grad_(False)
    model.set_input_size(img_size=(48, 64))
    assert model.pos_embed.shape == (1, 1 + 6 * 8, 32) and not model.pos_embed.requires_grad
    torch.testing.assert_close(model(images), expected)
    with torch.no_grad():
        model.pos_embed.fill_(2.0)[:, 0] = 7.0
    model.set_input_size(patch_size=16)
    assert model.pos_embed[0, :, 0].tolist() == pytest.approx([7] + [2] * 12)  # the class token keeps its row
    assert model.patch_embed.grid_size == (3, 4) and model.feature_info[0]["reduction"] == 16
    assert model(images).shape == (1, 5)


@pytest.mark.parametrize("rule", RULES)
def test_a_model_made_on_meta_is_initialised_by_init_weights(rule, images):
    model = small(rule=rule, device="meta", dtype=torch.float64)
    assert all(t.is_meta and t.dtype == torch.float64 for t in model.parameters())
    assert model(torch.empty(2, 3, 32, 32, device="meta", dtype=torch.float64)).shape == (2, 5)
    assert not list(model.buffers())
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, math.nan)
    torch.manual_seed(0)
    model.init_weights()
    model(images.double()).square().mean().backward()
    assert all(p.grad.isfinite().all() and p.grad.abs().sum() > 0 for p in model.parameters())
    fresh = small(rule=rule, dtype=torch.float64)
    for (name, a), b in zip(model.named_parameters(), fresh.parameters()):
        if a.numel() > 500:
            assert a.std().item() == pytest.approx(b.std().item(), rel=0.2), name


def test_our_maps_are_the_input_of_timms_vision_transformer():
    maps = timm.create_model(
        "vilonghorn_nano", features_only=True, img_size=64, embed_dim=32, depth=2, out_indices=[0, 1]
    )
    embed = partial(HybridEmbed, backbone=maps)
    model = VisionTransformer(
        img_size=64, patch_size=1, embed_dim=24, depth=1, num_heads=2, num_classes=5, embed_layer=embed
    )
    assert model.patch_embed.grid_size == (4, 4)
    model(torch.randn(2, 3, 64, 64)).square().mean().backward()
    assert all(p.grad is not None for p in maps.model.blocks.parameters())
