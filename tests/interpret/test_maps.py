"""Maps over the image: that numbers stand at the right tokens, and are what autograd and plain algebra say."""

import pytest
import timm
import torch
from oracle import oracle

from vilonghorn.interpret.maps import attention, grad_cam, grid_of, patch_token, pca, receptive_field, scans
from vilonghorn.interpret.scan import attention_rows
from vilonghorn.layers import class_token_first

SIZE = dict(img_size=(12, 20), patch_size=4, depth=3, embed_dim=16, num_classes=5)  # 3 x 5 patches: an odd number


def make(name="vilonghorn_nano", **kwargs):
    torch.manual_seed(0)
    model = timm.create_model(name, **(SIZE | kwargs)).double().eval()
    for parameter in model.parameters():  # away from the start, where blocks hardly matter
        torch.nn.init.normal_(parameter, std=0.4)
    return model


IMAGES = torch.randn(2, 3, 12, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
PLACES = [7, *range(7), *range(8, 16)]  # in the order of the scan, of each token


@pytest.mark.parametrize(
    "name, options",
    [
        ("vilonghorn_nano", {}),
        ("vilonghorn_nano_exact", dict(reverse=((False,), (True,)), num_heads=4, d_conv=(3, 3), depth=3)),
        ("vim_nano", {}),
    ],
)
def test_maps_of_a_model_reproduce_what_its_block_adds(name, options):
    model = make(name, **options)
    scan = scans(model, IMAGES, [1])[0]
    y = scan.z * torch.sigmoid(scan.z)
    rows = attention_rows(scan, per_channel=True)
    y = y * (torch.einsum("gbtsd,gbsd->gbtd", rows, scan.values) + scan.D[:, None, None] * scan.values).mean(0)
    grid = model._grid(IMAGES)
    entered = model.blocks[0](model._embed(IMAGES), grid)
    added = model.blocks[1](entered, grid) - entered
    torch.testing.assert_close(y @ model.blocks[1].mixer.out_proj.weight.mT, added, rtol=1e-5, atol=1e-5)


def hierarchy():
    torch.manual_seed(0)
    options = dict(embed_dims=(8, 12, 16), num_classes=4, dynamic_img_pad=True)
    model = timm.create_model("vilonghornv2_nano", **options).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model


def test_maps_of_a_hierarchy_reproduce_what_its_block_adds_and_have_the_grid_of_its_stage():
    model, images = hierarchy(), torch.randn(2, 3, 28, 40, dtype=torch.float64)
    assert [grid_of(model, images, block) for block in (0, 1, 2, 5)] == [(8, 12), (8, 12), (4, 6), (2, 3)]
    stage = model.stages[1]
    block, seen = stage.blocks[1], []
    block.register_forward_hook(lambda module, inputs, output: seen.append(output - inputs[0]))
    block.mlp = None
    [scan] = scans(model, images, [3])
    rows = attention_rows(scan, per_channel=True)
    y = (torch.einsum("gbtsd,gbsd->gbtd", rows, scan.values) + scan.D[:, None, None] * scan.values).mean(0)
    added = (y * scan.z * torch.sigmoid(scan.z)) @ block.mixer.out_proj.weight.mT
    torch.testing.assert_close(added, seen[0], rtol=1e-5, atol=1e-5)
    mean = attention(model, images, [2, 3], None)
    assert mean.shape == (2, 1, 2, 1, 24)
    torch.testing.assert_close(mean[1, :, :, 0], rows.mean(2).abs().mean(-1).to(mean.dtype))
    for wrong, message in (([1, 2], "take blocks of one stage"), ([0], "expected one with a scan")):
        with pytest.raises(ValueError, match=message):
            attention(model, images, wrong, None)


def test_gradients_of_a_hierarchy_are_maps_of_its_stages():
    model, images = hierarchy(), torch.randn(2, 3, 32, 48, dtype=torch.float64)
    last = model.stages(model.stem(images)).detach().permute(0, 3, 1, 2).requires_grad_()
    scores = model.forward_head(model.norm(last.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
    (gradient,) = torch.autograd.grad(scores[:, 2].sum(), last)
    expected = (gradient.mean((2, 3), keepdim=True) * last).sum(1).relu()
    torch.testing.assert_close(grad_cam(model, images, [2, 2], -1), expected)
    pixels = images.clone().requires_grad_()
    (early,) = model.forward_intermediates(pixels, [0], intermediates_only=True)
    (gradient,) = torch.autograd.grad(early[:, :, 3, 5].sum(), pixels)
    found = receptive_field(model, images, 1, patch_token((8, 12), 3, 5, class_token=False))
    torch.testing.assert_close(found, gradient.abs().sum(1))
    assert pca(model, images, 4).shape == (2, 2, 3, 3)


def test_a_patch_has_its_token():
    assert patch_token((3, 5), 2, 4) == 15 and patch_token((3, 5), 0, 0) == 1
    with pytest.raises(ValueError, match="patch 3,0 is not on the image's grid of 3 rows and 5 columns"):
        patch_token((3, 5), 3, 0)


def test_attention_is_each_directions_gradient_at_the_tokens_place_on_the_image():
    model, tokens = make(), [0, 7, 12]
    weights = attention(model, IMAGES, [0, -1], tokens)
    assert weights.shape == (2, 2, 2, 3, 16)
    for b, scan in enumerate(scans(model, IMAGES, [0, 2])):
        # The oracle takes dt, not its gate: for the gates' sake k is made part of them.
        beta = scan.gate / (1 - scan.gate * scan.k.square().sum(-1, keepdim=True))
        values = scan.values.clone().requires_grad_()
        y = oracle(values, torch.logit(beta), scan.k, scan.q, rule="longhorn", reverse=scan.reverse)
        for i, token in enumerate(tokens):
            (gradient,) = torch.autograd.grad(y[:, :, PLACES[token]].sum(), values, retain_graph=True)
            expected = gradient.abs().mean(-1)
            for other in range(16):
                actual = weights[b, :, :, i, other]
                torch.testing.assert_close(actual, expected[..., PLACES[other]], rtol=1e-8, atol=1e-12)


def test_the_average_of_the_patches_attends_as_its_rows_do():
    model = make()
    [scan] = scans(model, IMAGES, [1])
    rows = attention_rows(scan, per_channel=True)[:, :, [t for t in range(16) if t != 7]]
    expected = class_token_first(rows.mean(2).abs().mean(-1).flatten(0, 1)[..., None]).view(2, 2, 16)
    torch.testing.assert_close(attention(model, IMAGES, [1], None)[0, :, :, 0], expected)


@pytest.mark.parametrize("token", [0, 9])
def test_receptive_field_is_the_gradient_of_the_tokens_features(token):
    model, pixels = make(), IMAGES.clone().requires_grad_()
    x = class_token_first(model.blocks[1](model.blocks[0](model._embed(pixels))))
    (gradient,) = torch.autograd.grad(x[:, token].sum(), pixels)
    torch.testing.assert_close(receptive_field(model, IMAGES, 1, token), gradient.abs().sum(1))


def test_principal_components_are_those_of_the_covariance():
    model = make()
    (features,) = model.forward_intermediates(IMAGES, indices=[1], output_fmt="NLC", intermediates_only=True)
    flat = features.detach().flatten(0, 1)
    values, vectors = torch.linalg.eigh(torch.cov(flat.mT))
    maps = pca(model, IMAGES, 1)
    assert maps.shape == (2, 3, 5, 3) and maps.amin((0, 1, 2)).eq(0).all() and maps.amax((0, 1, 2)).eq(1).all()
    for i in range(3):
        scores = (flat - flat.mean(0)) @ vectors[:, -1 - i]
        found = maps[..., i].flatten().double()
        assert torch.corrcoef(torch.stack([scores, found]))[0, 1].abs() > 1 - 1e-6
    assert torch.equal(pca(model, IMAGES, 1), maps)
    with pytest.raises(ValueError, match="components is 17, expected 1 to 16"):
        pca(model, IMAGES, 1, 17)


def test_grad_cam_weighs_features_by_the_mean_gradient_of_the_class():
    model, classes = make(), [3, 1]
    x = model._embed(IMAGES)
    x = model.blocks[1](model.blocks[0](x)).detach().requires_grad_()
    scores = model.forward_head(model._norm_tokens(model.blocks[2](x)))
    scores[0, 3].add(scores[1, 1]).backward()
    middle = 7
    patches = [t for t in range(16) if t != middle]
    weight = x.grad[:, patches].mean(1)
    expected = torch.einsum("bc,bmc->bm", weight, x.detach()[:, patches]).clamp_min(0).view(2, 3, 5)
    torch.testing.assert_close(grad_cam(model, IMAGES, classes), expected, rtol=1e-5, atol=1e-7)
    best = model(IMAGES).argmax(1).tolist()
    assert torch.equal(grad_cam(model, IMAGES), grad_cam(model, IMAGES, best))


def test_a_padded_image_has_the_maps_of_one_with_zeros_around_it():
    model, cut = make(), IMAGES[..., :-1]
    padding = make(dynamic_img_size=True, dynamic_img_pad=True)
    whole = torch.nn.functional.pad(cut, (0, 1))
    for token in (0, 9):
        expected = receptive_field(model, whole, 1, token)[..., :-1]
        torch.testing.assert_close(receptive_field(padding, cut, 1, token), expected)
        torch.testing.assert_close(attention(padding, cut, [0, 2], [token]), attention(model, whole, [0, 2], [token]))
    torch.testing.assert_close(pca(padding, cut, 2), pca(model, whole, 2))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_maps_of_gradients_are_the_same_without_autograd(mode):
    model, expected = make(), (grad_cam(make(), IMAGES), receptive_field(make(), IMAGES, 1, 9))
    with mode():
        images = IMAGES.clone()
        torch.testing.assert_close((grad_cam(model, images), receptive_field(model, images, 1, 9)), expected)


def test_grad_cam_needs_a_classifier_of_the_whole_image():
    with pytest.raises(ValueError, match="the model has no classifier .num_classes is 0."):
        grad_cam(make(num_classes=0), IMAGES)
    with pytest.raises(ValueError, match="the model scores each token .global_pool is ''."):
        grad_cam(make(global_pool=""), IMAGES)


def test_what_cannot_be_mapped_is_refused():
    model = make()
    with pytest.raises(ValueError, match="do not depend on the patches after block 2: take an earlier block"):
        grad_cam(model, IMAGES, block=-1)
    assert grad_cam(make(global_pool="avg"), IMAGES, block=-1).shape == (2, 3, 5)
    with pytest.raises(ValueError, match="classes are .9, 0., expected one of 0 to 4 for each image"):
        grad_cam(model, IMAGES, [9, 0])
    with pytest.raises(ValueError, match="block is 3, expected -3 to 2: the model has 3 blocks"):
        attention(model, IMAGES, [3])
    with pytest.raises(ValueError, match="token is 16, expected 0 .the class token. to 15"):
        attention(model, IMAGES, [0], [16])
    with pytest.raises(ValueError, match="token is 300, expected 0 .the class token. to 15"):
        receptive_field(model, IMAGES, 1, 300)
    with pytest.raises(ValueError, match="the blocks have different numbers of directions"):
        attention(make(reverse=((False,), (False, True))), IMAGES, [0, 1])
    other = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    with pytest.raises(
        ValueError, match="VisionTransformer, expected a vilonghorn_., vilonghornv2_. or vim_. backbone"
    ):
        attention(other, torch.zeros(1, 3, 32, 32), [0])
