"""Files of Vim's authors: in, out, at other sizes, and refused where they are not what they should be."""

import composition
import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed

import vilonghorn  # noqa: F401  (registers the models)
from vilonghorn.models import vim

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


@pytest.mark.parametrize("name, dim", [("vim_tiny", 192), ("vim_small", 384)])
def test_the_official_keys_and_shapes_load_strictly_and_come_back_exactly(name, dim):
    shapes = composition.official_shapes(dim=dim)
    numbers = torch.arange(sum(torch.Size(shape).numel() for shape in shapes.values()), dtype=torch.float32)
    parts = numbers.split([torch.Size(shape).numel() for shape in shapes.values()])
    weights = {key: part.view(shape) for (key, shape), part in zip(shapes.items(), parts)}  # no two alike
    if name == "vim_tiny":
        assert len(numbers) == 7_148_008
    model = timm.create_model(name, device="meta")
    model.load_state_dict(vim.checkpoint_filter_fn({"model": weights}, model), strict=True, assign=True)
    back = vim.to_official(model.state_dict())
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[key], weights[key]) for key in weights)


def test_a_model_is_written_and_read_exactly():
    model = timm.create_model("vim_nano", img_size=48)
    state_dict = model.state_dict()
    wrapped = {f"module.{key}": value for key, value in vim.to_official(state_dict).items()}
    for checkpoint in (wrapped, {"model": wrapped}, {"state_dict": wrapped}):
        back = vim.checkpoint_filter_fn(checkpoint, model)
        assert back.keys() == state_dict.keys() and all(torch.equal(back[key], state_dict[key]) for key in back)


def test_position_rows_are_in_the_order_of_the_sequence_there():
    model = timm.create_model("vim_nano", img_size=48)  # 9 patches: the class token is number 4
    with torch.no_grad():
        model.pos_embed.copy_(torch.arange(10.0).view(1, 10, 1).expand(1, 10, 96))
    assert vim.to_official(model.state_dict())["pos_embed"][0, :, 0].tolist() == [1, 2, 3, 4, 0, 5, 6, 7, 8, 9]


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


def test_a_file_that_does_not_fit_is_refused_with_three_mismatches_named(weights, path):
    with pytest.raises(ValueError, match=r"this checkpoint does not fit the model: .*(expected \(.*){3}"):
        load(path, embed_dim=48, num_classes=10)
    del weights["layers.2.mixer.A_b_log"]
    message = "blocks.2.mixer.A_log is missing.*layers.2.mixer.A_log is .*, expected no such name"
    with pytest.raises(ValueError, match=message):
        vim.checkpoint_filter_fn(weights, timm.create_model("vim_nano", num_classes=10))


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("pos_embed", torch.zeros(()), r"pos_embed is \(\), expected \(1, 197, 96\)"),
        ("pos_embed", torch.zeros(1, 0, 96), r"pos_embed is \(1, 0, 96\), expected \(1, 197, 96\)"),
        ("layers.1.mixer.D", 1, "values that are not tensors: layers.1.mixer.D is of type int"),
        ("layers.3.mixer.D", torch.full((192,), torch.nan), r"hold NaN or infinity \(blocks.3.mixer.D\)"),
        ("patch_embed.proj.weight", torch.zeros(96, 3, 0, 0), r"patch_embed.proj.weight is \(96, 3, 0, 0\), expected"),
    ],
)
def test_a_damaged_tensor_is_refused_by_name(weights, name, value, message):
    weights[name] = value
    with pytest.raises(ValueError, match=message):
        vim.checkpoint_filter_fn(weights, timm.create_model("vim_nano", num_classes=10))


@pytest.mark.parametrize(
    "name, options",
    [
        ("vilonghorn_nano", {}),
        ("vilonghorn_nano_shared", {}),
        ("vim_nano", dict(shared_directions=True)),
        ("vim_nano", dict(d_conv=(3, 3))),
        ("vim_nano", dict(mlp_ratio=1.0)),
    ],
)
def test_only_a_vim_is_written_in_the_official_format(name, options):
    with pytest.raises(ValueError, match="not that of a vim_"):
        vim.to_official(timm.create_model(name, depth=1, **options).state_dict())
