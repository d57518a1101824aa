"""Intermediate features: every argument of forward_intermediates, pruning, and timm's feature extractor."""

import copy

import pytest
import timm
import torch

from vilonghorn.layers import class_token_first

SMALL = dict(img_size=(32, 48), patch_size=8, embed_dim=32, depth=4)


@pytest.fixture
def model():
    return timm.create_model("vilonghorn_nano", **SMALL).eval()


@pytest.fixture
def images():
    return torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(1))


def test_features_are_maps_of_the_tokens_and_the_last_one_normed_is_the_output(model, images):
    final, features = model.forward_intermediates(images, norm=True)
    assert [tuple(f.shape) for f in features] == [(2, 32, 4, 6)] * 4
    assert torch.equal(final, model.forward_features(images))
    torch.testing.assert_close(features[-1].flatten(2).mT, final[:, 1:])
    tokens = model.forward_intermediates(images, norm=True, output_fmt="NLC", intermediates_only=True)
    assert torch.equal(features[1][:, :, 2, 3], tokens[1][:, 2 * 6 + 3])
    with pytest.raises(ValueError, match="'NHWC', expected 'NCHW' or 'NLC'"):
        model.forward_intermediates(images, output_fmt="NHWC")


def test_indices_choose_blocks_and_stopping_early_runs_no_more(model, images):
    everything = model.forward_intermediates(images, intermediates_only=True)
    model.set_grad_checkpointing()  # changes nothing
    last_two = model.forward_intermediates(images, indices=2, intermediates_only=True)
    assert all(torch.equal(a, b) for a, b in zip(last_two, everything[-2:]))
    ran = []
    for i, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, i=i: ran.append(i))
    early = model.forward_intermediates(images, indices=[0, -3], stop_early=True, intermediates_only=True)
    assert ran == [0, 1]
    assert torch.equal(early[0], everything[0]) and torch.equal(early[1], everything[1])


def test_prefix_tokens_come_beside_the_maps_or_in_a_dictionary(model, images):
    final = model.forward_features(images)
    features = model.forward_intermediates(images, return_prefix_tokens=True, norm=True, intermediates_only=True)
    assert torch.equal(features[-1][1], final[:, :1])
    full = model.forward_intermediates(images, indices=2, return_prefix_tokens=True, output_dict=True)
    assert full.keys() == {"image_features", "image_intermediates", "image_intermediates_prefix"}
    assert torch.equal(full["image_features"], final)
    assert [tuple(t.shape) for t in full["image_intermediates_prefix"]] == [(2, 1, 32)] * 2
    bare = model.forward_intermediates(images, output_dict=True, intermediates_only=True)
    assert bare.keys() == {"image_intermediates"}


@pytest.mark.parametrize("index", [0, 3])
def test_pruning_keeps_the_feature_and_leaves_nothing_unused(model, images, index):
    logits = model(images)
    (expected,) = model.forward_intermediates(images, indices=[index], intermediates_only=True)
    pruned = copy.deepcopy(model)
    assert pruned.prune_intermediate_layers([index], prune_norm=True) == [index]
    assert len(pruned.blocks) == index + 1 and pruned.num_classes == 0
    (feature,) = pruned.forward_intermediates(images, indices=[index], intermediates_only=True)
    assert torch.equal(feature, expected)
    feature.sum().backward()
    assert all(p.grad is not None for p in pruned.parameters())
    model.prune_intermediate_layers([3], prune_head=False)
    assert torch.equal(model(images), logits)


FAMILIES = ["vilonghorn_nano", "vilonghorn_nano_exact", "vilonghorn_nano_shared", "vim_nano"]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("size", [(32, 48), (48, 72), (33, 15)])
def test_what_a_hook_on_a_block_sees_has_the_class_token_in_its_middle(name, size):
    model = timm.create_model(name, dynamic_img_size=True, dynamic_img_pad=True, **SMALL).eval()
    seen, batch = {}, torch.randn(2, 3, *size)
    model.blocks[1].register_forward_hook(lambda module, inputs, output: seen.update(tokens=output))
    options = dict(return_prefix_tokens=True, intermediates_only=True)
    [(features, prefix)] = model.forward_intermediates(batch, [1], **options)
    tokens = class_token_first(seen["tokens"])
    assert torch.equal(tokens[:, :1], prefix)
    assert torch.equal(tokens[:, 1:].mT.unflatten(2, model.grid_size(size)), features)


@pytest.mark.parametrize("exportable", [False, True])  # the operators of this library, or torch's
@pytest.mark.parametrize("name", [*FAMILIES, "vilonghornv2_nano"])
def test_an_empty_batch_has_scores_features_and_gradients(name, exportable):
    options = {} if "v2" in name else SMALL
    model = timm.create_model(name, num_classes=7, drop_path_rate=0.1, exportable=exportable, **options)
    batch = torch.zeros(0, 3, 32, 48, requires_grad=True)
    logits = model(batch)
    assert logits.shape == (0, 7)
    logits.sum().backward()
    assert batch.grad.shape == batch.shape and all(p.grad.eq(0).all() for p in model.parameters())
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            maps, expected = (
                model.forward_intermediates(x, intermediates_only=True) for x in (batch, torch.zeros(1, 3, 32, 48))
            )
            assert [t.shape for t in maps] == [(0, *t.shape[1:]) for t in expected]
            assert model.eval()(batch).shape == (0, 7)
            assert len(model.forward_features(batch)) == 0


def test_features_only_gives_the_last_three_blocks_at_the_size_of_each_image(images):
    extractor = timm.create_model(
        "vilonghorn_nano", features_only=True, dynamic_img_size=True, dynamic_img_pad=True, **SMALL
    )
    assert [tuple(f.shape) for f in extractor(images)] == [(2, 32, 4, 6)] * 3
    assert [tuple(f.shape) for f in extractor(images[:, :, :17, :41])] == [(2, 32, 3, 6)] * 3
    assert extractor.feature_info.channels() == [32] * 3 and extractor.feature_info.reduction() == [8] * 3
    assert extractor.feature_info.module_name() == ["blocks.1", "blocks.2", "blocks.3"]
