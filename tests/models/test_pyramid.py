"""Models with a feature pyramid: geometry, weights, and the contracts of timm and torchvision."""

import copy
import math

import pytest
import timm
import torch
import torch.nn.functional as F
from oracle import error
from safetensors.torch import save_file
from timm.optim import param_groups_layer_decay
from torch.export import Dim, export
from torchvision.models.detection import FCOS, FasterRCNN, MaskRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator

import vilonghorn  # noqa: F401  (registers the models)
from vilonghorn.models import DetectionBackbone
from vilonghorn.models.pyramid import STRIDES

SMALL = dict(img_size=64, embed_dim=32, depth=2, pyramid_channels=16)
SIZES = [(64, 96), (100, 77), (33, 16), (5, 3)]


def make(name="vilonghorn_nano_sfp", **kwargs):
    torch.manual_seed(0)
    return timm.create_model(name, **{**SMALL, **kwargs}).eval()


def images(*size, seed=1):
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("patch_size", [4, 16, 32])
@torch.no_grad()
def test_maps_lie_at_strides_4_to_32_whatever_the_size_of_patch_and_image(patch_size):
    model = make(features_only=True, patch_size=patch_size)
    assert model.feature_info.reduction() == list(STRIDES) and model.feature_info.channels() == [16] * 4
    for H, W in SIZES:
        shapes = [tuple(level.shape) for level in model(images(H, W))]
        assert shapes == [(2, 16, math.ceil(H / s), math.ceil(W / s)) for s in STRIDES]


@torch.no_grad()
def test_padding_below_and_to_the_right_is_all_that_an_odd_size_sees():
    model = make(features_only=True)
    odd = images(50, 70)
    padded = F.pad(odd, (0, 80 - 70, 0, 64 - 50))
    whole = model(padded)
    for cut, level, s in zip(model(odd), whole, STRIDES):
        torch.testing.assert_close(cut, level[:, :, : math.ceil(50 / s), : math.ceil(70 / s)])
    model.model.set_input_size(img_size=(64, 80))
    for level, resized in zip(whole, model(padded)):
        torch.testing.assert_close(resized, level)
    with pytest.raises(ValueError, match="made for patches of 16 pixels; make a new model with patch_size=8"):
        model.model.set_input_size(patch_size=8)


@torch.no_grad()
def test_every_map_is_made_of_the_normed_tokens_of_the_last_block():
    model, batch = make(), images(64, 64)
    plain = timm.create_model("vilonghorn_nano", img_size=64, embed_dim=32, depth=2).eval()
    plain.load_state_dict(model.state_dict(), strict=False)
    grid = plain.forward_intermediates(batch, indices=1, norm=True, intermediates_only=True)[0]
    for level, expected in zip(model.forward_features(batch), model.pyramid(grid).values()):
        torch.testing.assert_close(level, expected)


@pytest.mark.parametrize("name, options", [("vim_nano", dict(shared_directions=True))])
def test_plain_weights_load_into_the_trunk_and_leave_the_rest_as_it_was_made(name, options, tmp_path):
    trunk = dict(embed_dim=32, depth=2, patch_size=8, **options)
    plain = timm.create_model(name, img_size=32, num_classes=5, **trunk).eval()
    save_file(plain.state_dict(), tmp_path / "plain.safetensors")
    file = dict(file=str(tmp_path / "plain.safetensors"), num_classes=5)
    same = dict(pyramid_channels=16, num_classes=3, **trunk)
    torch.manual_seed(3)
    fresh = timm.create_model(f"{name}_sfp", img_size=64, **same)
    torch.manual_seed(3)
    model = timm.create_model(f"{name}_sfp", pretrained=True, pretrained_cfg_overlay=file, img_size=64, **same)
    plain.set_input_size(img_size=64)
    for key, value in model.state_dict().items():
        expected = fresh if key.startswith(("pyramid.", "head.")) else plain
        assert torch.equal(value, expected.state_dict()[key]), key
    extractor = timm.create_model(f"{name}_sfp", True, pretrained_cfg_overlay=file, features_only=True, **trunk)
    assert torch.equal(extractor.model.blocks[1].mixer.x_proj, plain.blocks[1].mixer.x_proj)


def test_a_pyramids_own_weights_load_exactly_and_not_into_a_plain_model(tmp_path):
    model = make(num_classes=5)
    timm.models.save_for_hf(model, tmp_path / "saved", safe_serialization=True)
    loaded = timm.create_model(f"local-dir:{tmp_path / 'saved'}", pretrained=True)
    assert all(torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), model.state_dict().values()))
    save_file(model.state_dict(), tmp_path / "pyramid.safetensors")
    overlay = dict(file=str(tmp_path / "pyramid.safetensors"), num_classes=5)
    with pytest.raises(ValueError, match="does not fit the model: .*pyramid.*expected no such name"):
        timm.create_model("vilonghorn_nano", True, pretrained_cfg_overlay=overlay, img_size=64, embed_dim=32, depth=2)
    save_file({k: v for k, v in model.state_dict().items() if "levels.2" not in k}, tmp_path / "pyramid.safetensors")
    with pytest.raises(ValueError, match="pyramid.levels.2.0.weight is missing"):
        make(pretrained=True, pretrained_cfg_overlay=overlay, num_classes=5)


@pytest.mark.parametrize("indices", [[0], [1, 3], 2])
def test_features_of_some_levels_leave_nothing_unused(indices):
    whole, batch = make(), images(64, 64)
    model = make(features_only=True, out_indices=indices)
    kept = [indices] if isinstance(indices, int) else indices
    kept = [2, 3] if indices == 2 else kept
    maps = model(batch)
    assert list(model.model.pyramid.levels) == [str(i) for i in kept]
    expected = whole.forward_intermediates(batch, indices=indices, intermediates_only=True)
    assert len(maps) == len(expected) and all(torch.equal(a, b) for a, b in zip(maps, expected))
    assert model.feature_info.reduction() == [STRIDES[i] for i in kept]
    sum(level.square().sum() for level in maps).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@torch.no_grad()
def test_a_classifier_reads_every_level_and_can_be_replaced():
    model, batch = make(num_classes=5), images(50, 70)
    pooled = torch.stack([level.mean((2, 3)) for level in model.forward_features(batch)]).mean(0)
    torch.testing.assert_close(model(batch), model.head(pooled))
    model.prune_intermediate_layers([3], prune_head=False)
    torch.testing.assert_close(model(batch), model.head(pooled))
    model.reset_classifier(7)
    assert model(batch).shape == (2, 7)
    model.reset_classifier(0)
    torch.testing.assert_close(model(batch), pooled)


@torch.no_grad()
def test_an_exported_pyramid_takes_any_batch_and_size_from_65_pixels():
    model = make(features_only=True)
    sizes = dict.fromkeys((0, 2, 3), Dim.DYNAMIC)  # torch 2.11 cannot solve for named dimensions from 65 pixels
    program = export(model, (images(70, 90),), dynamic_shapes=(sizes,)).module()
    batch = images(75, 120)
    for level, expected in zip(program(batch[:1]), model(batch[:1])):
        torch.testing.assert_close(level, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(stride=8), "patch_size is 16x16 and stride 8x8; .* square patches"),
        (dict(patch_size=(16, 8)), "patch_size is 16x8"),
        (dict(img_size=72, patch_size=12), "strides are 12 and 4, expected a ratio that is a power of two"),
        (dict(global_pool="token"), "global_pool is 'token', expected one of .avg."),
    ],
)
def test_what_a_pyramid_cannot_be_made_of_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        make(**wrong)
    with pytest.raises(ValueError, match="output_fmt is 'NLC', expected 'NCHW'"):
        make().forward_intermediates(images(32, 32), output_fmt="NLC")


def test_a_detectors_backbone_names_its_maps_and_adds_a_coarser_one():
    model = make(features_only=True)
    backbone, batch = DetectionBackbone(model), images(64, 128)
    maps = backbone(batch)
    assert list(maps) == ["0", "1", "2", "3", "pool"] and backbone.out_channels == 16
    assert all(torch.equal(maps[str(i)], level) for i, level in enumerate(model(batch)))
    assert torch.equal(maps["pool"], maps["3"][:, :, ::2, ::2])
    plain = dict(img_size=64, embed_dim=32, depth=3, features_only=True)
    with pytest.raises(ValueError, match=r"the maps have strides \[16, 16, 16\], expected different ones"):
        DetectionBackbone(timm.create_model("vilonghorn_nano", **plain))
    convolutional = DetectionBackbone(timm.create_model("test_resnet", features_only=True), 16)
    assert [level.shape[1:] for level in convolutional(batch).values()][-2:] == [(16, 2, 4), (16, 1, 2)]
    for refused in (backbone, convolutional):
        with pytest.raises(ValueError, match="image_sizes need a model that takes masks, such as vilonghornv2_tiny"):
            refused(batch, [(64, 128), (32, 32)])
    one = DetectionBackbone(timm.create_model("vilonghorn_nano", out_indices=(-1,), **plain))
    assert [level.shape[2:] for level in one(images(64, 64)).values()] == [(4, 4), (2, 2)]


def hierarchy(name="vilonghornv2_nano", out_channels=32, **options):
    torch.manual_seed(0)
    backbone = DetectionBackbone(timm.create_model(name, features_only=True, **options), out_channels)
    return shaken(backbone)


def shaken(module):
    """Biases and weights of norms that are not what they are made as."""
    for p in module.parameters():
        p.data += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * (p.ndim == 1)
    return module


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("indices", [None, (0, 2), (-1,)])
def test_an_image_has_the_maps_in_a_padded_batch_that_it_has_alone(training, indices):
    backbone = hierarchy(dynamic_img_pad=True, **({} if indices is None else dict(out_indices=indices)))
    backbone.train(training)
    sizes, batch = [(70, 33), (33, 120), (100, 64)], torch.full((3, 3, 100, 120), 9.0)
    for image, (h, w) in zip(batch, sizes):
        image[:, :h, :w] = images(h, w)[0]
    together = backbone(batch, sizes)
    sum(level.square().sum() for level in together.values()).backward()
    assert [name for name, p in backbone.named_parameters() if p.grad is None] == []
    for i, (h, w) in enumerate(sizes):
        for name, level in backbone(batch[i : i + 1, :, :h, :w]).items():
            height, width = level.shape[2:]
            assert error(together[name][i : i + 1, :, :height, :width], level.detach()) < 1e-5, name
            if name != "pool":
                assert together[name][i, :, height:].eq(0).all() and together[name][i, :, :, width:].eq(0).all()


@pytest.mark.parametrize("sizes", [[(64, 64)], [(64, 96), (64, 64)], [(64, 64), (0, 9)]])
def test_sizes_that_do_not_fit_the_batch_are_errors(sizes):
    with pytest.raises(ValueError, match=r"image_sizes is .*, expected 2 pairs \(height, width\) of at most 64x64"):
        hierarchy()(images(64, 64), sizes)
    with pytest.raises(ValueError, match="the detector's backbone is DetectionBackbone, not this one"):
        hierarchy().attach(FCOS(hierarchy(), 2))


DETECTORS = {FasterRCNN: (16, 3), MaskRCNN: (16, 3), FCOS: (4, 1), RetinaNet: (16, 3)}  # size and number of anchors


@pytest.mark.parametrize("kind", DETECTORS)
def test_the_boxes_of_an_image_do_not_depend_on_its_neighbours(kind):
    backbone, (size, number) = hierarchy(), DETECTORS[kind]
    anchors = AnchorGenerator(tuple((size * 2**i,) for i in range(4)), ((0.5, 1.0, 2.0)[:number],) * 4)
    options = dict(min_size=96, max_size=200)
    if kind in (FasterRCNN, MaskRCNN):
        options |= dict(rpn_anchor_generator=anchors, rpn_pre_nms_top_n_test=9999, rpn_post_nms_top_n_test=50)
    else:
        options |= dict(anchor_generator=anchors, score_thresh=0.002, topk_candidates=9999)
    detector = copy.deepcopy(backbone.attach(shaken(kind(backbone, 5, **options))))  # as an EMA
    scenes = [torch.rand(3, *s, generator=torch.Generator().manual_seed(s[0])) for s in ((96, 170), (190, 100))]
    target = dict(boxes=torch.tensor([[9.0, 9, 60, 70]]), labels=torch.tensor([1]))
    targets = [dict(target, masks=torch.ones(1, *scene.shape[1:], dtype=torch.uint8)) for scene in scenes]
    sum(detector(scenes, targets).values()).backward()
    assert [name for name, p in detector.named_parameters() if p.grad is None] == []
    detector.eval()
    with torch.no_grad():
        for scene, found in zip(scenes, detector(scenes)):
            alone = detector([scene])[0]
            assert len(alone["boxes"]) > 9
            # Boxes of equal scores have no order, and the last of them are cut off.
            rows = [torch.cat([d["boxes"], 999 * d["labels"][:, None]], 1) for d in (alone, found)]
            order = torch.cdist(rows[0], rows[1]).argmin(1)[: int(0.9 * len(rows[0]))]
            for key, value in alone.items():
                torch.testing.assert_close(found[key][order], value[: len(order)], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", ["vilonghorn_nano", "vilonghorn_nano_sfp"])
def test_a_feature_extractor_has_the_layers_and_the_weight_decay_of_its_model(name):
    whole = timm.create_model(name, img_size=64, embed_dim=32, depth=3, num_classes=0)
    features = timm.create_model(name, img_size=64, embed_dim=32, depth=3, features_only=True, out_indices=(1, -1))

    def groups(model, prefix):
        found = param_groups_layer_decay(model, 0.1, model.no_weight_decay(), layer_decay=0.5)
        names = {id(p): name.removeprefix(prefix) for name, p in model.named_parameters()}
        return {names[id(p)]: (g["lr_scale"], g["weight_decay"]) for g in found for p in g["params"]}

    expected, found = groups(whole, ""), groups(features, "model.")
    assert found == {name: expected[name] for name in found}
    assert found["cls_token"] == (0.125, 0) and found["blocks.2.mixer.D"] == (1, 0)
    assert found["blocks.1.mixer.in_proj.weight"] == (0.5, 0.1)
    assert found.get("pyramid.levels.3.2.weight", (1, 0.1)) == (1, 0.1)  # as the last block


def test_dilated_stages_are_refused():
    assert make(features_only=True, output_stride=32).feature_info.reduction() == list(STRIDES)
    for name in ("vilonghorn_nano", "vim_nano_sfp", "vilonghornv2_nano"):
        with pytest.raises(ValueError, match=f"output_stride is 16, expected 32: {name} does not dilate its stages"):
            timm.create_model(name, output_stride=16, features_only=True)
