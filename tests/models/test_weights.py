"""Weights into models of another size, through timm's own loading."""

import math

import pytest
import timm
import torch
from safetensors.torch import save_file

import vilonghorn  # noqa: F401  (registers the models)

SMALL = dict(embed_dim=32, depth=2, patch_size=8)


@pytest.fixture
def source():
    torch.manual_seed(0)
    return timm.create_model("vilonghorn_nano", img_size=32, num_classes=5, **SMALL).eval()


def load(path, name="vilonghorn_nano", **kwargs):
    overlay = dict(file=str(path), num_classes=5)
    return timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **kwargs)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_file_loads_exactly_into_the_same_model_also_from_a_training_checkpoint(source, wrapped, tmp_path):
    weights = source.state_dict()
    if wrapped:
        weights = {"epoch": 3, "model": {f"module.{name}": value for name, value in weights.items()}}
    torch.save(weights, tmp_path / "last.pt")
    model = load(tmp_path / "last.pt", img_size=32, **SMALL).eval()
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(model(images), source(images))


def test_a_file_loads_into_other_sizes_and_another_class_count(source, tmp_path):
    save_file(source.state_dict(), tmp_path / "weights.safetensors")
    model = load(tmp_path / "weights.safetensors", img_size=32, stride=4, num_classes=9, **SMALL)
    assert model.pos_embed.shape == (1, 1 + 7 * 7, 32) and model.head.weight.shape == (9, 32)
    assert torch.equal(model.pos_embed[:, 0], source.pos_embed[:, 0])
    assert torch.equal(model.blocks[1].mixer.x_proj, source.blocks[1].mixer.x_proj)
    gray = load(tmp_path / "weights.safetensors", img_size=32, in_chans=1, num_classes=0, **SMALL)
    torch.testing.assert_close(gray.patch_embed.proj.weight, source.patch_embed.proj.weight.sum(1, keepdim=True))
    model = load(tmp_path / "weights.safetensors", img_size=(96, 64), **{**SMALL, "patch_size": 16}).eval()
    source.set_input_size(img_size=(96, 64), patch_size=16)
    images = torch.randn(1, 3, 96, 64)
    torch.testing.assert_close(model(images), source(images))


def test_a_rectangle_loads_into_another_by_its_declared_size(tmp_path):
    source = timm.create_model("vilonghorn_nano", img_size=(32, 72), num_classes=5, **SMALL)
    with torch.no_grad():  # positions that vary along the height alone
        source.pos_embed[:, 1:] = torch.arange(4.0).repeat_interleave(9)[None, :, None]
    timm.models.save_for_hf(source, tmp_path / "saved", safe_serialization=True)
    model = timm.create_model(f"local-dir:{tmp_path / 'saved'}", pretrained=True, img_size=(32, 32))
    rows = model.pos_embed[0, 1:, 0].reshape(4, 4)
    torch.testing.assert_close(rows, torch.arange(4.0)[:, None].expand(4, 4), rtol=0, atol=1e-4)


def test_positions_of_no_known_grid_are_refused(source, tmp_path):
    state_dict = source.state_dict()
    state_dict["pos_embed"] = torch.zeros(1, 1 + 13, 32)
    save_file(state_dict, tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match="rows for 13 patches, neither a square grid nor that of 224x224"):
        load(tmp_path / "weights.safetensors", img_size=32, **SMALL)


def renamed(weights):
    return {name.replace("1.mixer.D", "1.mixer.extra"): value for name, value in weights.items()}


def not_finite(weights):
    return {name: value * (math.nan if name == "blocks.1.mixer.D" else 1) for name, value in weights.items()}


@pytest.mark.parametrize(
    "name, change, options, message",
    [
        ("vim_nano", dict, {}, "does not fit the model: 2 mismatches .*blocks.0.mixer.A_log is missing, expected"),
        (
            "vilonghorn_nano",
            dict,
            dict(embed_dim=96),
            r"\(cls_token is \(1, 1, 32\), expected \(1, 1, 96\); .*; \.\.\.\)",
        ),
        ("vilonghorn_nano", renamed, dict(num_classes=9), "1.mixer.D is missing, .*extra is .*, expected no such name"),
        ("vilonghorn_nano", not_finite, {}, r"1 of \d+ tensors .* hold NaN or infinity \(blocks.1.mixer.D\)"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_with_the_first_mismatches(
    source, tmp_path, name, change, options, message
):
    save_file(change(source.state_dict()), tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "weights.safetensors", name=name, **{"img_size": 32, **SMALL, **options})


def test_another_class_count_than_declared_is_refused_even_where_the_head_is_dropped(source, tmp_path):
    save_file(source.state_dict(), tmp_path / "weights.safetensors")
    wrong = dict(file=str(tmp_path / "weights.safetensors"), num_classes=7)
    with pytest.raises(ValueError, match=r"head.weight is \(5, 32\), expected \(7, 32\)"):
        timm.create_model("vilonghorn_nano", True, pretrained_cfg_overlay=wrong, img_size=32, num_classes=7, **SMALL)


def test_a_pickle_is_never_executed(source, tmp_path):
    class Trap:
        def __reduce__(self):
            return (tmp_path.joinpath("sprung").touch, ())

    torch.save({"model": source.state_dict(), "trap": Trap()}, tmp_path / "weights.pth")
    with pytest.raises(RuntimeError, match="weights_only=True blocked"):
        load(tmp_path / "weights.pth", img_size=32, **SMALL)
    assert not (tmp_path / "sprung").exists()
