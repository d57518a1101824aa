"""Masked image modelling: patches that a mask token replaces, in both families."""

import math

import pytest
import timm
import torch

import vilonghorn  # noqa: F401  (registers the models)

MODELS = {
    "vilonghorn_nano": dict(img_size=(32, 48), patch_size=16, depth=2),
    "vilonghornv2_nano": {},
}


def make(name, **options):
    torch.manual_seed(0)
    return timm.create_model(name, **MODELS.get(name, MODELS["vilonghorn_nano"]) | options).eval()


def images():
    return torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(1))


MASK = torch.tensor([[[1, 0, 0], [0, 1, 1]], [[0, 0, 1], [1, 0, 0]]], dtype=torch.bool)


@pytest.mark.parametrize("name", MODELS)
def test_pixels_of_masked_patches_have_no_effect_and_the_mask_token_has(name):
    model, batch = make(name, mask_token=True), images()
    other = torch.where(MASK.repeat_interleave(16, 1).repeat_interleave(16, 2)[:, None], 9.0, batch)
    final, maps = model.forward_intermediates(batch, masked=MASK)
    for a, b in zip(maps, model.forward_intermediates(other, masked=MASK.flatten(1), intermediates_only=True)):
        assert torch.equal(a, b)
    features = model.forward_features(batch, masked=MASK)
    assert all(map(torch.equal, features, final))
    assert not torch.allclose(features[-1], model.forward_features(batch)[-1])
    features[-1].square().sum().backward()
    assert model.mask_token.grad.abs().sum() > 0 and "mask_token" in model.no_weight_decay()


VARIANTS = [
    ("vilonghorn_nano", dict(stride=8)),
    ("vilonghorn_nano_shared", dict(patch_size=(16, 24))),
    ("vim_nano", dict(dynamic_img_size=True, dynamic_img_pad=True, exportable=True)),
    ("vilonghornv2_nano", dict(stem_stride=2, exportable=True, norm_layer="layernorm")),
    ("vilonghornv2_nano", dict(dynamic_img_pad=True, residual_in_fp32=False)),
]


@pytest.mark.parametrize("bad, seed", [(math.nan, 1), (-math.inf, 2)])
@pytest.mark.parametrize("name, options", VARIANTS)
def test_what_is_under_a_mask_is_not_read_not_even_as_nan(name, options, bad, seed):
    model = make(name, mask_token=True, drop_path_rate=0.2, **options).train(seed == 1)
    rng = torch.Generator().manual_seed(seed)
    masked = torch.rand(2, *model.grid_size((32, 48)), generator=rng) < 0.5
    (dy, dx), (height, width) = model.patches()
    hidden = torch.ones(2, *model.image_size(*masked.shape[1:]), dtype=torch.bool)
    for image, row, column in (~masked).nonzero().tolist():
        hidden[image, row * dy : row * dy + height, column * dx : column * dx + width] = False
    hidden, more = hidden[:, :32, :48], {}
    if model.takes_pixel_mask and seed == 1:
        more["pixel_mask"] = torch.ones(2, 32, 48)
        more["pixel_mask"][0, 9:] = more["pixel_mask"][1, :, 15:] = 0
        hidden = hidden | (more["pixel_mask"] == 0)
    results = []
    for value in (0.3, bad):
        batch = torch.where(hidden[:, None], value, images()).requires_grad_()
        torch.manual_seed(seed)
        model.zero_grad()
        final, maps = model.forward_intermediates(batch, masked=masked, **more)
        sum(y.float().square().mean() for y in [final, *maps]).backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        results.append([final.detach(), *(y.detach() for y in maps), batch.grad, *grads])
    assert all(y.isfinite().all() for y in results[1])
    assert all(map(torch.equal, *results))


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_a_mask_hides_nan_in_an_exported_and_in_a_compiled_model(name):
    model = make(name, mask_token=True)

    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x, masked):
            return self.model.forward_features(x, masked=masked)

    batch = torch.where(MASK.repeat_interleave(16, 1).repeat_interleave(16, 2)[:, None], math.nan, images())
    expected = model.forward_features(images(), masked=MASK)
    compiled = torch.compile(Masked(), backend="eager", fullgraph=True)
    for run in (torch.export.export(Masked(), (batch, MASK)).module(), compiled):
        torch.testing.assert_close(run(batch, MASK), expected)


@torch.no_grad()
def test_a_mask_of_nothing_changes_nothing_and_padding_stays_masked():
    model, batch = make("vilonghornv2_nano", mask_token=True), images()
    torch.testing.assert_close(model.forward_features(batch, masked=MASK & False), model.forward_features(batch))
    valid = torch.ones(2, 32, 48)
    valid[:, :, 32:] = 0
    padded = model.forward_features(batch, valid, MASK)
    torch.testing.assert_close(padded[..., :2], model.forward_features(batch[..., :32], masked=MASK[..., :2]))
    assert padded[..., 2:].eq(0).all()


@pytest.mark.parametrize("name", MODELS)
def test_masks_of_another_shape_and_models_without_a_token_are_errors(name):
    for shape in ([2, 3, 2], [1, 6], [2, 1, 2, 3]):
        with pytest.raises(ValueError) as caught:
            make(name, mask_token=True).forward_features(images(), masked=torch.ones(shape))
        assert f"masked has shape {shape}, expected (B, h, w) = [2, 2, 3] or (B, h * w) = [2, 6]" in str(caught.value)
    with pytest.raises(ValueError, match="the model has no mask token.*make the model with mask_token=True"):
        make(name).forward_features(images(), masked=MASK)


@pytest.mark.parametrize("name", MODELS)
def test_weights_load_with_and_without_a_mask_token(name, tmp_path):
    plain, pretrained = make(name), make(name, mask_token=True)
    assert set(pretrained.state_dict()) - set(plain.state_dict()) == {"mask_token"}
    for source, token in ((plain, True), (pretrained, False), (pretrained, True)):
        torch.save(source.state_dict(), tmp_path / "weights.pth")
        overlay = dict(file=str(tmp_path / "weights.pth"), num_classes=plain.num_classes)
        loaded = make(name, mask_token=token, pretrained=True, pretrained_cfg_overlay=overlay)
        shared = set(source.state_dict()) & set(loaded.state_dict())
        assert len(shared) >= len(plain.state_dict())
        assert all(torch.equal(loaded.state_dict()[name], source.state_dict()[name]) for name in shared)
