"""Detectors of torchvision on our backbones: maps, padding in a batch, layers and weight decay."""

import copy

import pytest
import timm
import torch
from detection_backbone import DetectionBackbone
from oracle import error
from timm.optim import param_groups_layer_decay
from torchvision.models.detection import FCOS, FasterRCNN, MaskRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.ssd import SSD

import vilonghorn  # noqa: F401  (registers the models)


def images(*size, seed=1):
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(seed))


def test_a_detectors_backbone_names_its_maps_and_adds_a_coarser_one():
    backbone, batch = hierarchy(), images(64, 128)
    maps = backbone(batch)
    assert list(maps) == ["0", "1", "2", "pool"] and backbone.out_channels == 32
    assert [level.shape[1:] for level in maps.values()] == [(32, 16, 32), (32, 8, 16), (32, 4, 8), (32, 2, 4)]
    assert torch.equal(maps["pool"], maps["2"][:, :, ::2, ::2])
    plain = dict(img_size=64, embed_dim=32, depth=3, features_only=True)
    with pytest.raises(ValueError, match=r"the maps have strides \[16, 16, 16\], expected different ones"):
        DetectionBackbone(timm.create_model("vilonghorn_nano", **plain))
    with pytest.raises(ValueError, match="the model is a VisionLonghorn, expected one made with features_only=True"):
        DetectionBackbone(timm.create_model("vilonghornv2_nano"))
    convolutional = DetectionBackbone(timm.create_model("test_resnet", features_only=True), 16)
    assert [level.shape[1:] for level in convolutional(batch).values()][-2:] == [(16, 2, 4), (16, 1, 2)]
    model = timm.create_model("vilonghorn_nano", out_indices=(-1,), **plain)
    one, square = DetectionBackbone(model), images(64, 64)
    assert one.out_channels == 32 and torch.equal(one(square)["0"], model(square)[0])
    assert [level.shape[2:] for level in one(square).values()] == [(4, 4), (2, 2)]
    for refused in (one, convolutional):
        with pytest.raises(ValueError, match="image_sizes need a model that takes pixel_mask, such as vilonghornv2"):
            refused(square, [(64, 64), (32, 32)])


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
    # Boxes that overlap by nearly the limit would be suppressed or not by rounding, so that none is.
    if kind in (FasterRCNN, MaskRCNN):
        options |= dict(rpn_anchor_generator=anchors, rpn_pre_nms_top_n_test=9999, rpn_post_nms_top_n_test=50)
        options |= dict(rpn_nms_thresh=1.0, box_nms_thresh=1.0)
    else:
        options |= dict(anchor_generator=anchors, score_thresh=0.002, topk_candidates=9999, nms_thresh=1.0)
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


def test_anchors_are_those_of_torchvision_where_it_has_the_same_strides_and_one_size_a_map():
    tiny = DetectionBackbone(timm.create_model("vilonghornv2_tiny", features_only=True))
    default = FasterRCNN(tiny, 2).rpn.anchor_generator
    made = tiny.anchors(MaskRCNN)["rpn_anchor_generator"]
    assert (made.sizes, made.aspect_ratios) == (default.sizes, default.aspect_ratios)
    backbone = hierarchy()
    for kind, strides in ((FasterRCNN, 8), (RetinaNet, 4), (FCOS, 1)):
        with pytest.raises(ValueError, match=rf"of 5 maps, expected 4: .* \*\*backbone.anchors\({kind.__name__}\)"):
            backbone.attach(kind(backbone, 3))
        detector = kind(backbone, 3, min_size=64, max_size=96, **backbone.anchors(kind)).eval()
        dense = getattr(detector, "rpn", detector)
        assert [sizes[0] / strides for sizes in dense.anchor_generator.sizes] == [4, 8, 16, 32]
        assert detector([torch.rand(3, 64, 80)])[0]["boxes"].shape[1] == 4
    with pytest.raises(ValueError, match="the detector is SSD, expected FasterRCNN, RetinaNet, FCOS or a subclass"):
        backbone.anchors(SSD)


@pytest.mark.parametrize("name, given", [("vilonghornv2_nano", (-1, 0)), ("vim_nano", (4, 1, 1))])
def test_maps_have_the_order_of_feature_info_whatever_that_of_out_indices(name, given):
    model = timm.create_model(name, img_size=64, features_only=True, out_indices=given)
    maps, info = model(images(64, 64)), model.feature_info
    assert [m.shape[1] for m in maps] == info.channels() and [64 // m.shape[2] for m in maps] == info.reduction()
    layers = [dict(model.model.named_modules())[module] for module in info.module_name()]
    seen = []
    hooks = [layer.register_forward_hook(lambda *_, layer=layer: seen.append(layer)) for layer in layers]
    assert hooks and len(model(images(64, 64))) == len(seen) and seen == layers
    with pytest.raises(ValueError, match=r"feature_info has strides \[32, 8\], expected them rising: give out_ind"):
        DetectionBackbone(timm.create_model("test_resnet", features_only=True, out_indices=(4, 2)))


def test_a_feature_extractor_has_the_layers_and_the_weight_decay_of_its_model():
    name = "vilonghorn_nano"
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


def test_dilated_stages_are_refused():
    taken = timm.create_model("vilonghornv2_tiny", features_only=True, output_stride=32)
    assert taken.feature_info.reduction() == [4, 8, 16, 32]
    for name in ("vilonghorn_nano", "vilonghornv2_nano"):
        with pytest.raises(ValueError, match=f"output_stride is 16, expected 32: {name} does not dilate its stages"):
            timm.create_model(name, output_stride=16, features_only=True)
