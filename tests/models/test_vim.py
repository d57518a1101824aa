"""Files of Vim's authors: at other sizes, and refused where they are not what they should be."""

import composition
import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed

import vilonghorn  # noqa: F401  (registers the models)
from vilonghorn.models.fit_weights import checkpoint_filter_fn

SMALL = dict(dim=96, depth=6, classes=10)


def load(path, name="vim_nano", **kwargs):
    overlay = dict(file=str(path), num_classes=10)
    return timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **kwargs)


@pytest.fixture
def weights():
    return composition.official_weights(**SMALL)


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
    model = load(path, img_size=(96, 160), num_classes=10)
    patches = torch.cat([pos[:, :98], pos[:, 99:]], 1)
    expected = resample_abs_pos_embed(patches, [6, 10], [14, 14], num_prefix_tokens=0)
    torch.testing.assert_close(model.pos_embed[:, 1:], expected)
    overlapping = load(path, stride=8, num_classes=3)
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
        ("layers.3.mixer.D", torch.full((192,), torch.nan), r"hold NaN or infinity \(blocks.3.mixer.D\)"),
        ("patch_embed.proj.weight", torch.zeros(96, 3, 0, 0), r"patch_embed.proj.weight is \(96, 3, 0, 0\), expected"),
    ],
)
def test_a_damaged_tensor_is_refused_by_name(weights, name, value, message):
    weights[name] = value
    with pytest.raises(ValueError, match=message):
        checkpoint_filter_fn(weights, timm.create_model("vim_nano", num_classes=10))
