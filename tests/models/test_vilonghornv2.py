"""`VisionLonghorn`: against its equations in float64, its maps, sizes and errors."""

from unittest import mock

import composition
import pytest
import timm
import torch
from oracle import error
from torch._subclasses import FakeTensorMode

from vilonghorn.models import VisionLonghorn
from vilonghorn.models.vilonghornv2 import to_stream

SMALL = dict(embed_dims=(16, 24, 32, 48), depths=(1, 2, 2, 1), num_classes=7, drop_path_rate=0.1)
SMALL |= dict(num_heads=(None, None, 4, 2), mlp_ratios=(0.0, 0.5, 0.5, 0.75))


def make(**options):
    torch.manual_seed(0)
    model = VisionLonghorn(**SMALL | options).eval()
    model.load_state_dict(composition.perturb(model.state_dict()))
    return model


def images(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("stem_stride, strides", [(4, (2, 2)), (2, (2, 1)), (1, (1, 1))])
def test_logits_and_gradients_are_those_of_the_equations_in_float64(stem_stride, strides):
    model, last = make(stem_stride=stem_stride, img_size=96), 8 * stem_stride
    batch = images(2, 3, 2 * last, 3 * last)
    grids = [(2 * scale, 3 * scale) for scale in (8, 4, 2, 1)]
    weights = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    expected = composition.hierarchy(weights, batch, strides, grids)
    actual = model(batch)
    assert error(actual.detach(), expected.detach()) < 1e-5
    expected_grads = torch.autograd.grad(expected.square().sum(), list(weights.values()))
    grads = torch.autograd.grad(actual.square().sum(), list(model.parameters()))
    wrong = {name: error(a, b) for name, a, b in zip(weights, grads, expected_grads)}
    assert max(wrong.values()) < 1e-4, wrong


@torch.no_grad()
def test_maps_have_the_strides_and_channels_of_feature_info():
    model = make()
    final, maps = model.forward_intermediates(images(2, 3, 64, 96))
    assert [info["reduction"] for info in model.feature_info] == [4, 8, 16, 32]
    for info, y in zip(model.feature_info, maps):
        assert y.shape == (2, info["num_chs"], 64 // info["reduction"], 96 // info["reduction"])
    torch.testing.assert_close(final, model.forward_features(images(2, 3, 64, 96)))
    stopped, (early,) = model.forward_intermediates(images(2, 3, 64, 96), indices=[1], norm=True, stop_early=True)
    assert torch.equal(stopped, early) and torch.equal(early, maps[1])


@pytest.mark.parametrize("num_conv_stages", [0, 1, 2, 4])
@pytest.mark.parametrize("stem_stride, size, sides", [(4, 32, (96, 160)), (4, 512, (64, 96)), (1, 16, (40, 72))])
def test_tiles_give_the_map_and_the_gradients_of_the_whole_image(num_conv_stages, stem_stride, size, sides):
    model = make(stem_stride=stem_stride, num_conv_stages=num_conv_stages, img_size=64, drop_path_rate=0.0)
    batch = images(2, 3, *sides)
    results = [model.forward_features(batch), model.forward_tiles(batch, size)]
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
    of_whole, of_tiles = (torch.autograd.grad(y.square().sum(), list(model.parameters())[:-2]) for y in results)
    assert max(map(error, of_tiles, of_whole)) < 1e-4


def test_tiles_leave_whole_what_convolves_along_the_rows():
    model, batch = make(d_conv=4, depths=(1, 1, 1, 1)), images(1, 3, 32, 512)
    torch.testing.assert_close(model.forward_tiles(batch, 32), model.forward_features(batch))


def test_tiles_of_a_padded_image_and_a_size_that_does_not_fit():
    model, batch = make(dynamic_img_pad=True), images(1, 3, 70, 45)
    torch.testing.assert_close(model.forward_tiles(batch, 32), model.forward_features(batch))
    for size in (0, 48, -32):
        with pytest.raises(ValueError, match=f"size is {size}, expected a positive multiple of the last stride, 32"):
            model.forward_tiles(batch, size)
    with pytest.raises(ValueError, match="70"):
        make().forward_tiles(batch)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(stem_stride=3), "stem_stride is 3, expected 1, 2 or 4"),
        (dict(depths=(1, 1, 1)), "expected one value a stage"),
        (dict(img_size=100), "image of 100x100 is not a whole number of 32x32 patches"),
        (dict(drop_path_rate=1.5), "drop_path_rate is 1.5"),
        (dict(num_conv_stages=5), "num_conv_stages is 5, expected an integer from 0 to 4"),
        (dict(num_conv_stages="2"), "num_conv_stages is '2', expected an integer"),
    ],
)
def test_options_that_do_not_fit_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        VisionLonghorn(**SMALL | options)


def test_set_input_size_changes_the_configuration_or_keeps_it():
    model = make()
    model.set_input_size((64, 96))
    model.set_input_size()
    assert model.img_size == (64, 96) and model.grid_size() == (2, 3)
    with pytest.raises(ValueError, match="image of 64x72 is not a whole number"):
        model.set_input_size((64, 72))


def test_an_image_that_a_stage_cannot_halve_is_an_error():
    with pytest.raises(ValueError, match="image of 64x72 is not a whole number of 32x32 patches.*dynamic_img_pad"):
        make()(images(1, 3, 64, 72))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm_layer", [None, "layernorm"])
def test_an_image_in_a_padded_batch_gives_what_it_gives_alone(training, norm_layer):
    model = make(norm_layer=norm_layer, drop_path_rate=0.0, dynamic_img_pad=True).train(training)
    sizes, batch = [(70, 33), (33, 128), (128, 64)], images(3, 3, 128, 128)
    mask = torch.zeros(3, 128, 128, dtype=torch.bool)
    alone = []
    for i, (H, W) in enumerate(sizes):
        mask[i, :H, :W] = True
        alone.append(model.forward_intermediates(batch[i : i + 1, :, :H, :W]))
    batch = torch.where(mask[:, None], batch, torch.nan)  # the padding is not read
    mask = mask.to(torch.uint8) * 255  # what is not 0 is the image
    final, maps = model.forward_intermediates(batch, pixel_mask=mask)
    logits = model.forward_head(model.forward_features(batch, mask), pixel_mask=mask)
    for i, (H, W) in enumerate(sizes):
        single, single_maps = alone[i]
        for together, separate in zip([final, *maps], [single, *single_maps]):
            h, w = separate.shape[2:]
            assert error(together[i : i + 1, :, :h, :w], separate.detach()) < 1e-5
            assert together[i, :, h:].abs().sum() == together[i, :, :, w:].abs().sum() == 0
        assert error(logits[i].detach(), model(batch[i : i + 1, :, :H, :W])[0].detach()) < 1e-5


def test_masks_that_do_not_fit_are_errors():
    with pytest.raises(ValueError, match=r"pixel_mask has shape .*64, 32.*, expected .*64, 64"):
        make().forward_features(images(1, 3, 64, 64), torch.ones(1, 64, 32))
    with pytest.raises(ValueError, match="pixel_mask with global_pool 'max', expected global_pool 'avg'"):
        make(global_pool="max").forward_head(images(1, 48, 2, 2), pixel_mask=torch.ones(1, 64, 64))
    for shape in ((1, 96, 96), (2, 64, 64), (1, 64, 96)):
        with pytest.raises(ValueError, match=r"pixel_mask has shape .*, which does not fit a map .*1, 48, 2, 2"):
            make().forward_head(images(1, 48, 2, 2), pixel_mask=torch.ones(shape))


def test_an_image_without_pixels_has_features_of_zero_and_spoils_no_gradient():
    model, batch, mask = make(), images(2, 3, 64, 64), torch.ones(2, 64, 64)
    mask[1] = 0
    logits = model.forward_head(model.forward_features(batch, mask), pixel_mask=mask)
    assert torch.equal(logits[1], model.head.fc.bias) and error(logits[:1].detach(), model(batch[:1]).detach()) < 1e-5
    logits[0].sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_the_average_of_a_small_image_in_a_large_batch_fits_float16():
    model, mask = make(num_classes=0).half(), torch.zeros(1, 2048, 2048)
    mask[:, :32, :32] = 1
    features = torch.zeros(1, 48, 64, 64, dtype=torch.float16)
    features[..., 0, 0] = 30
    assert torch.equal(model.forward_head(features, pixel_mask=mask), features[..., 0, 0])


@torch.no_grad()
def test_a_model_without_its_last_stages_gives_the_same_maps_with_its_norm_or_without():
    batch = images(1, 3, 64, 64)
    expected = make().forward_intermediates(batch, indices=[1], norm=True, intermediates_only=True)[0]
    for prune_norm in (False, True):
        model = make()
        assert model.prune_intermediate_layers([1], prune_norm=prune_norm) == [1]
        final, (y,) = model.forward_intermediates(batch, indices=[1], norm=True)
        assert torch.equal(y, expected) and torch.equal(final, expected)
        assert torch.equal(model.forward_features(batch), expected)
        model.reset_classifier(3, "catavgmax")
        assert model(batch).shape == (1, 3) and 2 * model.num_features == model.head_hidden_size == 48
        assert model.forward_head(expected, pre_logits=True).shape == (1, 48)


def test_an_extractor_has_gradients_for_all_its_parameters_with_and_without_checkpointing():
    for checkpointing in (False, True):
        model = timm.create_model("vilonghornv2_nano", features_only=True, out_indices=(0, 1))
        model.set_grad_checkpointing(checkpointing)
        sum(y.sum() for y in model(images(1, 3, 64, 64))).backward()
        assert all(p.grad is not None for p in model.parameters())
    assert model.model.stages[0].grad_checkpointing
    for kind in ("list", "dict", "hook", "fx"):
        with pytest.raises(ValueError, match=f"feature_cls is '{kind}', expected 'getter'"):
            timm.create_model("vilonghornv2_nano", features_only=True, feature_cls=kind)


def test_a_checkpoint_is_a_start_for_other_classes_and_channels_and_one_of_patches_is_refused(tmp_path):
    weights = timm.create_model("vilonghornv2_nano").state_dict()
    torch.save(weights, tmp_path / "a.pth")
    torch.save(timm.create_model("vilonghorn_nano_exact").state_dict(), tmp_path / "plain.pth")

    def load(name, **options):
        overlay = dict(file=str(tmp_path / name))
        return timm.create_model("vilonghornv2_nano", pretrained=True, pretrained_cfg_overlay=overlay, **options)

    model = load("a.pth", num_classes=3, in_chans=1, img_size=64)
    assert model.head.fc.out_features == 3
    torch.testing.assert_close(model.stem.conv1.weight, weights["stem.conv1.weight"].sum(1, keepdim=True))
    torch.save(
        {k: v for k, v in weights.items() if "head" not in k} | {"head.fc.weight": torch.ones(5)}, tmp_path / "b.pth"
    )
    extractor = load("b.pth", features_only=True)
    assert torch.equal(extractor.model.stem.conv1.weight, weights["stem.conv1.weight"])
    with pytest.raises(ValueError, match="one grid of patches, as those of vilonghorn_.*; the model has stages"):
        load("plain.pth")
    with pytest.raises(ValueError, match="does not fit the model: 17 mismatches .stem.conv1.weight is"):
        load("a.pth", embed_dims=(32, 96, 160))


@pytest.mark.parametrize(
    "in_fp32, autocast, dtype",
    [
        (None, torch.bfloat16, torch.float32),  # on a CPU
        (False, torch.bfloat16, torch.bfloat16),
        (True, torch.bfloat16, torch.float32),
        (False, torch.float16, torch.float32),  # would overflow
    ],
)
def test_the_residual_stream_is_bfloat16_under_bfloat16_autocast_on_request(in_fp32, autocast, dtype):
    exact, model, seen = make(), make(residual_in_fp32=in_fp32), set()
    expected, batch = exact(images(2, 3, 64, 64)).detach(), images(2, 3, 64, 64)
    assert torch.equal(model(batch), expected)  # without autocast nothing changes
    for stage in model.stages:
        stage.blocks[-1].register_forward_hook(lambda block, args, y: seen.add(y.dtype))
    with torch.autocast("cpu", autocast):
        logits = model(batch)
    assert seen == {dtype} and 0 < error(logits.detach().float(), expected) < 0.03


def test_by_default_the_residual_stream_is_bfloat16_on_a_gpu():
    def stream(dtype, in_fp32=None):
        with FakeTensorMode():
            x = torch.empty(1, 4, 4, 16, device="cuda")
            with mock.patch("torch.is_autocast_enabled", lambda _: dtype is not None):
                with mock.patch("torch.get_autocast_dtype", lambda _: dtype):
                    return to_stream(x, in_fp32).dtype

    assert stream(torch.bfloat16) == torch.bfloat16 and stream(torch.bfloat16, True) == torch.float32
    assert stream(torch.float16) == stream(None) == torch.float32


@torch.no_grad()
def test_a_head_without_pooling_has_no_logits():
    assert make(global_pool="", num_classes=0)(images(1, 3, 64, 64)).shape == (1, 48, 2, 2)
    with pytest.raises(ValueError, match="global_pool is '' and num_classes is 7, but a map has no logits: give num_c"):
        make(global_pool="")(images(1, 3, 64, 64))


@torch.no_grad()
def test_a_pooling_that_is_refused_and_a_layer_that_is_replaced_leave_the_model_as_it_was():
    model, batch = make(), images(1, 3, 64, 64)
    expected = model(batch)
    with pytest.raises(AssertionError):
        model.reset_classifier(3, "no pooling")
    assert (model.num_classes, model.global_pool) == (7, "avg")
    model.stages[1].downsample.reduction = torch.nn.Sequential(model.stages[1].downsample.reduction)
    assert torch.equal(model(batch), expected)
