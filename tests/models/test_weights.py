"""Weights into models of another size, through timm's own loading."""

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


def test_a_file_loads_exactly_into_the_same_model(source, tmp_path):
    save_file(source.state_dict(), tmp_path / "weights.safetensors")
    model = load(tmp_path / "weights.safetensors", img_size=32, **SMALL).eval()
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(model(images), source(images))


def test_a_file_loads_into_another_image_and_patch_size(source, tmp_path):
    save_file(source.state_dict(), tmp_path / "weights.safetensors")
    model = load(tmp_path / "weights.safetensors", img_size=(96, 64), **{**SMALL, "patch_size": 16}).eval()
    source.set_input_size(img_size=(96, 64), patch_size=16)
    images = torch.randn(1, 3, 96, 64)
    torch.testing.assert_close(model(images), source(images))


def test_a_file_loads_into_overlapping_patches_and_another_class_count(source, tmp_path):
    save_file(source.state_dict(), tmp_path / "weights.safetensors")
    model = load(tmp_path / "weights.safetensors", img_size=32, stride=4, num_classes=9, **SMALL)
    assert model.pos_embed.shape == (1, 1 + 7 * 7, 32) and model.head.weight.shape == (9, 32)
    assert torch.equal(model.pos_embed[:, 0], source.pos_embed[:, 0])
    assert torch.equal(model.blocks[1].mixer.x_proj, source.blocks[1].mixer.x_proj)


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
    with pytest.raises(ValueError, match="rows for 13 patches, neither a square nor the grid of 224x224"):
        load(tmp_path / "weights.safetensors", img_size=32, **SMALL)


def test_a_file_of_another_model_is_refused(source, tmp_path):
    save_file(source.state_dict(), tmp_path / "weights.safetensors")
    with pytest.raises(RuntimeError, match="A_log"):
        load(tmp_path / "weights.safetensors", name="vim_nano", img_size=32, **SMALL)


def test_the_format_of_vims_authors_is_refused_by_name(tmp_path):
    state_dict = {"layers.0.mixer.A_b_log": torch.zeros(1), "cls_token": torch.zeros(1)}
    save_file(state_dict, tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match="format of Vim's authors"):
        load(tmp_path / "weights.safetensors", name="vim_nano", img_size=32, **SMALL)
