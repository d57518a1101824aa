"""A detector of transformers with our backbone loads as it was saved, and its own parameters are renamed as before."""

import re
import sys
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F

import vilonghorn  # noqa: F401  (registers the models)
from vilonghorn.models.weights_file import TRANSFORMERS_KINDS, keep_names_in_transformers

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install vilonghorn[downstream]")


@pytest.fixture
def renamings(monkeypatch):
    """transformers' table as it makes it, whatever was done to it before this test, or is after."""
    from transformers import conversion_mapping

    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", None)
    monkeypatch.setattr(conversion_mapping, "USER_REGISTERED_MAPPINGS", set())
    return conversion_mapping


def detr(backbone, out_indices=(1,)):
    torch.manual_seed(0)
    config = transformers.DetrConfig(
        backbone_config=transformers.TimmBackboneConfig(backbone=backbone, out_indices=list(out_indices)),
        **dict(d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=32, decoder_ffn_dim=32),
        **dict(encoder_attention_heads=2, decoder_attention_heads=2, num_queries=5, num_labels=3),
    )
    return transformers.DetrForObjectDetection(config).eval()


@torch.no_grad()
def test_a_detr_loads_as_it_was_saved(renamings, tmp_path, monkeypatch):
    model = detr("vilonghornv2_nano", [2])
    images = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(renamings, "_checkpoint_conversion_mapping_cache", None)  # as another process
    loaded, info = transformers.DetrForObjectDetection.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for a, b in zip(model(images).values(), loaded.eval()(images).values()):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


@torch.no_grad()
def test_a_detr_with_the_hook_of_the_page_finds_the_same_in_a_padded_batch():
    page = (Path(__file__).parents[2] / "docs" / "downstream.md").read_text(encoding="utf-8")
    model = detr("vilonghornv2_nano", [2])
    images = torch.randn(1, 3, 64, 48, generator=torch.Generator().manual_seed(1))
    padded, mask = F.pad(images, (0, 80, 0, 64)), torch.zeros(1, 128, 128, dtype=torch.int64)
    mask[:, :64, :48] = 1

    def gap():
        alone, together = model(images, pixel_mask=mask[:, :64, :48]), model(padded, pixel_mask=mask)
        return (alone.logits - together.logits).abs().max()

    assert gap() > 1e-4
    exec(re.search(r"```\n(from functools import partial\n.*?)```", page, re.DOTALL)[1], {"detr": model})
    assert gap() < 1e-5


def test_the_files_of_a_detr_have_the_names_that_they_had(renamings, tmp_path):
    from safetensors.torch import load_file

    model = detr("test_resnet")
    model.save_pretrained(tmp_path / "before")
    assert not renamings.USER_REGISTERED_MAPPINGS
    keep_names_in_transformers()
    assert set(TRANSFORMERS_KINDS) == renamings.USER_REGISTERED_MAPPINGS
    model.save_pretrained(tmp_path / "after")
    before, after = (load_file(tmp_path / which / "model.safetensors") for which in ("before", "after"))
    assert before.keys() == after.keys() and any("self_attn.out_proj" in name for name in after)
    loaded = transformers.DetrForObjectDetection.from_pretrained(tmp_path / "before").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())


def test_a_transformers_with_another_table_gets_a_warning_and_one_that_is_not_imported_none(monkeypatch, recwarn):
    monkeypatch.delitem(sys.modules, "transformers.conversion_mapping")
    timm.create_model("vilonghornv2_nano", features_only=True)
    assert not recwarn and "transformers.conversion_mapping" not in sys.modules
    monkeypatch.setitem(sys.modules, "transformers.conversion_mapping", object())
    with pytest.warns(UserWarning, match="may lose out_proj of the backbone on loading"):
        timm.create_model("vilonghornv2_nano", features_only=True)
