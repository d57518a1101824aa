"""The registered models: names, sizes, configurations, and what becomes of pretrained=True."""

import pytest
import timm
import torch
from timm.models import get_pretrained_cfg

import vilonghorn  # noqa: F401  (registers the models)

PARAMETERS = {  # 1000 classes, 224 px, patch 16; published or computed from the papers, in millions but for vim_tiny
    "vim_tiny": 7_148_008,
    "vim_small": 25.80,
    "vim_base": 97.60,
    "vilonghorn_tiny": 6.85,
    "vilonghorn_small": 25.21,
    "vilonghorn_base": 96.42,
    "vilonghorn_tiny_exact": 6.85,
    "vilonghorn_small_exact": 25.21,
    "vilonghorn_base_exact": 96.42,
}
RULES = {"vilonghorn_nano": "longhorn", "vilonghorn_nano_exact": "longhorn_exact", "vim_nano": "mamba"}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts_are_the_published_ones(name):
    count = sum(p.numel() for p in timm.create_model(name, device="meta").parameters())
    expected = PARAMETERS[name]
    assert count == expected if isinstance(expected, int) else round(count / 1e6, 2) == expected


def test_the_families_are_listed_by_timm():
    sizes = ("base", "nano", "small", "tiny")
    assert timm.list_models(module="vim") == [f"vim_{size}" for size in sizes]
    assert set(timm.list_models(module="vilonghorn")) == {f"vilonghorn_{s}{f}" for s in sizes for f in ("", "_exact")}


@pytest.mark.parametrize("name", RULES)
def test_each_family_runs_its_own_rule_at_224(name):
    model = timm.create_model(name).eval()
    assert {block.mixer.rule for block in model.blocks} == {RULES[name]}
    assert {block.mixer.reverse for block in model.blocks} == {(False, True)}
    with torch.no_grad():
        logits = model(torch.randn(1, 3, 224, 224))
    assert logits.shape == (1, 1000) and torch.isfinite(logits).all()


@pytest.mark.parametrize("name", [*PARAMETERS, *RULES])
def test_configurations_name_real_parameters_and_the_right_transform(name):
    model = timm.create_model(name, device="meta")
    keys = model.state_dict().keys()
    cfg = model.default_cfg
    assert f"{cfg['first_conv']}.weight" in keys and f"{cfg['classifier']}.weight" in keys
    data = timm.data.resolve_data_config(model=model)
    assert data["input_size"] == (3, 224, 224) and data["crop_pct"] == 0.875 and data["interpolation"] == "bicubic"


def test_variants_are_made_by_keyword():
    model = timm.create_model(
        "vilonghorn_nano", rule="mamba", img_size=(64, 32), patch_size=16, stride=8, in_chans=1, num_classes=3
    )
    assert model(torch.randn(2, 1, 64, 32)).shape == (2, 3)
    assert model.patch_embed.grid_size == (7, 3) and model.blocks[0].mixer.A_log is not None


@pytest.mark.parametrize("name", ["vilonghorn_tiny", "vilonghorn_base_exact", "vim_tiny", "vim_small"])
def test_pretrained_is_refused_while_there_is_nothing_to_load(name):
    with pytest.raises(RuntimeError, match=f"no pretrained weights for {name}"):
        timm.create_model(name, pretrained=True, device="meta")
    assert not timm.is_model_pretrained(name)


def test_vim_names_where_the_official_weights_are():
    assert get_pretrained_cfg("vim_tiny").origin_url == "https://huggingface.co/hustvl/Vim-tiny-midclstok"
    assert get_pretrained_cfg("vim_base").notes == ("vim_b_midclstok_81p9acc.pth",)


def test_unknown_arguments_and_names_are_refused():
    with pytest.raises(TypeError, match="depht"):
        timm.create_model("vilonghorn_nano", depht=3)
    with pytest.raises(RuntimeError, match="Unknown model"):
        timm.create_model("vilonghorn_gigantic")
