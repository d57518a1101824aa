"""VisionSSM: what it computes, timm's contract for a vision backbone, and the weights that it reads.

Files of Vim's authors are read at other sizes, by models of other rules, and refused where they are damaged.
"""

import math
from functools import partial

import composition
import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import HybridEmbed, resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from timm.optim import param_groups_weight_decay

import vilonghorn  # noqa: F401  (registers the models)
from vilonghorn.layers import class_token_first
from vilonghorn.models import VisionSSM
from vilonghorn.models.vim import LONGHORN, checkpoint_filter_fn
from vilonghorn.ops import scan
from vilonghorn.ops.rules import RULES


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


def test_a_mixer_of_ones_own_may_take_the_tokens_only(images):
    model = small()
    tokens = model._embed(images)
    for block in model.blocks:
        block.mixer = torch.nn.Identity()
        tokens = tokens + block.norm(tokens)
    torch.testing.assert_close(model.forward_features(images), model.norm(class_token_first(tokens)))


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


@pytest.mark.parametrize("rule", ("longhorn", "longhorn_exact", "mamba"))
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


OFFICIAL = dict(dim=96, depth=6, classes=10)


def load_official(path, name="vim_nano", **kwargs):
    overlay = dict(file=str(path), num_classes=10)
    return timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **kwargs)


@pytest.fixture
def weights():
    return composition.official_weights(**OFFICIAL)


@pytest.fixture
def path(weights, tmp_path):
    torch.save({"model": weights, "epoch": 299}, tmp_path / "vim.pth")
    return tmp_path / "vim.pth"


@pytest.mark.parametrize("prefix, key", [("", "model"), ("module.", "state_dict"), ("module.", None)])
def test_the_official_keys_and_shapes_load_strictly(prefix, key):
    shapes = composition.official_shapes(dim=192)
    weights = {prefix + name: torch.zeros(shape) for name, shape in shapes.items()}
    assert sum(value.numel() for value in weights.values()) == 7_148_008
    model = timm.create_model("vim_tiny", device="meta")
    fitted = checkpoint_filter_fn({key: weights} if key else weights, model)
    model.load_state_dict(fitted, strict=True, assign=True)


def test_a_file_of_224_px_loads_into_other_sizes_strides_and_class_counts(weights, path):
    pos = weights["pos_embed"]
    model = load_official(path, img_size=(96, 160), num_classes=10)
    patches = torch.cat([pos[:, :98], pos[:, 99:]], 1)
    expected = resample_abs_pos_embed(patches, [6, 10], [14, 14], num_prefix_tokens=0)
    torch.testing.assert_close(model.pos_embed[:, 1:], expected)
    overlapping = load_official(path, stride=8, num_classes=3)
    assert overlapping.pos_embed.shape == (1, 730, 96) and overlapping.head.weight.shape == (3, 96)
    for loaded in (model, overlapping):
        assert torch.equal(loaded.pos_embed[:, 0], pos[:, 98])
        assert torch.equal(loaded.blocks[5].mixer.D[1], weights["layers.5.mixer.D_b"])


def test_a_file_without_one_direction_is_refused(weights):
    del weights["layers.2.mixer.A_b_log"]
    message = r"blocks.2.mixer.A_log is \(192, 16\), expected \(2, 192, 16\)"
    with pytest.raises(ValueError, match=message):
        checkpoint_filter_fn(weights, timm.create_model("vim_nano", num_classes=10))


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("pos_embed", torch.zeros(()), r"pos_embed is \(\), expected \(1, 197, 96\)"),
        ("pos_embed", torch.zeros(1, 0, 96), r"pos_embed is \(1, 0, 96\), expected \(1, 197, 96\)"),
        ("layers.1.mixer.D", 1, "values that are not tensors in memory: layers.1.mixer.D is of type int"),
        (5, torch.zeros(1), "not a dictionary of tensors by name; give a state dict of float tensors"),
        ("layers.1.mixer.D", torch.zeros(192).to_sparse(), "not tensors in memory: layers.1.mixer.D is"),
        ("pos_embed", torch.zeros(1, 65, 96).int(), r"pos_embed is \(1, 65, 96\) of torch.int32, expected"),
        ("layers.3.mixer.D", torch.full((192,), torch.nan), r"hold NaN or infinity \(layers.3.mixer.D\)"),
        ("patch_embed.proj.weight", torch.zeros(96, 3, 0, 0), r"patch_embed.proj.weight is \(96, 3, 0, 0\), expected"),
    ],
)
def test_a_damaged_tensor_is_refused_by_name(weights, name, value, message):
    weights[name] = value
    with pytest.raises(ValueError, match=message):
        checkpoint_filter_fn(weights, timm.create_model("vim_nano", num_classes=10))


@pytest.mark.parametrize("rule", LONGHORN)
def test_the_step_of_mamba_is_minus_log_one_minus_beta(rule):
    u = torch.linspace(-8, 8, 33, dtype=torch.float64)
    beta = RULES[rule].gate(u, torch.zeros(4, dtype=torch.float64))  # eps for keys of zero
    torch.testing.assert_close(-torch.log1p(-beta), F.softplus(u))


@pytest.mark.parametrize("rule", LONGHORN)
def test_outputs_agree_with_mamba_to_first_order_in_the_step(rule):
    generator = torch.Generator().manual_seed(0)
    x, dt, k, q = (torch.randn(2, 3, 9, n, generator=generator, dtype=torch.float64) for n in (6, 6, 4, 4))
    A = -torch.rand(2, 6, 4, generator=generator, dtype=torch.float64) * 16

    def outputs(step):
        bias = torch.full((2, 6), step, dtype=torch.float64).log()
        options = dict(dt_bias=bias, reverse=(False, True), backend="reference")
        return scan(x, dt, k, q, rule=rule, **options), scan(x, dt, k, q, A=A, rule="mamba", **options)

    def errors(step):
        ours, mamba = outputs(step)
        return (ours - mamba).norm() / mamba.norm()

    assert errors(1e-6) < 1e-3
    assert errors(1e-6) == pytest.approx(errors(1e-5).item() / 10, rel=0.02)  # of the next order


@pytest.mark.parametrize("name", ["vilonghorn_nano", "vilonghorn_nano_exact"])
def test_a_file_of_vim_loads_into_longhorn_by_both_names_and_all_but_the_decays_is_its_own(name, tmp_path):
    weights = composition.official_weights(dim=96, depth=6, classes=10)
    source = timm.create_model("vim_nano", num_classes=10)
    source.load_state_dict(checkpoint_filter_fn(weights, source))
    kept = {key: value for key, value in source.state_dict().items() if not key.endswith("A_log")}
    for number, content in enumerate(({"model": weights}, source.state_dict())):
        torch.save(content, tmp_path / f"{number}.pth")
        overlay = dict(file=str(tmp_path / f"{number}.pth"), num_classes=10)
        model = timm.create_model(name, True, pretrained_cfg_overlay=overlay, num_classes=10)
        assert model.state_dict().keys() == kept.keys()
        assert all(torch.equal(value, kept[key]) for key, value in model.state_dict().items())
        resized = timm.create_model(name, True, pretrained_cfg_overlay=overlay, num_classes=3, img_size=96)
        assert resized.pos_embed.shape == (1, 37, 96) and resized.head.weight.shape == (3, 96)


@pytest.mark.parametrize(
    "name, kwargs, message",
    [
        ("vilonghorn_nano", dict(embed_dim=92), r"cls_token is \(1, 1, 96\), expected \(1, 1, 92\)"),
        ("vilonghorn_nano_exact", dict(num_heads=4), r"blocks.0.mixer.dt_bias is \(2, 192\), expected \(2, 4\)"),
        ("vilonghorn_nano_exact", dict(d_state=8), r"blocks.0.mixer.x_proj is \(2, 38, 192\), expected \(2, 22, 192\)"),
        ("vilonghorn_nano_shared", {}, r"conv_weight is \(2, 192, 4\), expected \(1, 192, 4\)"),
        ("vilonghorn_nano", dict(mlp_ratio=1), "blocks.0.norm2.weight is missing"),
        ("vilonghorn_nano", dict(reverse=(False,)), r"conv_weight is \(2, 192, 4\), expected \(1, 192, 4\)"),
    ],
)
def test_weights_of_another_trunk_are_refused(name, kwargs, message):
    weights = timm.create_model("vim_nano", num_classes=10).state_dict()
    with pytest.raises(ValueError, match=message):
        checkpoint_filter_fn(weights, timm.create_model(name, num_classes=10, **kwargs))
