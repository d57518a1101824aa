"""The registered models: names, sizes, configurations, and what becomes of pretrained=True."""

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from timm.models import get_model_input_config, get_pretrained_cfg

import vilonghorn  # noqa: F401  (registers the models)
from vilonghorn.layers import Mixer

PARAMETERS = [  # 1000 classes, 224 px, patch 16; published or computed from the papers, in millions
    ("vim_tiny", {}, 7.15),
    ("vim_small", {}, 25.80),
    ("vim_base", {}, 97.60),
    ("vilonghorn_tiny", {}, 6.85),
    ("vilonghorn_small", {}, 25.21),
    ("vilonghorn_base", {}, 96.42),
    ("vilonghorn_small_exact", {}, 25.21),
    ("vilonghorn_small_shared", {}, 23.64),
    ("vilonghornv2_nano", dict(num_classes=1000), 0.61),
    ("vilonghornv2_tiny", {}, 5.36),
    ("vilonghornv2_small", {}, 22.57),
    ("vilonghornv2_base", {}, 77.97),
    # Models without a name, which docs/models.md replaces by keywords.
    ("vilonghorn_base", dict(shared_directions=True), 91.52),
    ("vilonghorn_small_shared", dict(stride=8), 23.84),
    ("vilonghorn_tiny", dict(stride=8), 6.96),
]
RULES = {
    "vilonghorn_nano": "longhorn",
    "vilonghorn_nano_exact": "longhorn_exact",
    "vilonghorn_nano_shared": "longhorn",
    "vilonghornv2_tiny": "longhorn_exact",
    "vim_nano": "mamba",
}


@pytest.mark.parametrize("name, keywords, millions", PARAMETERS)
def test_parameter_counts_are_the_published_ones(name, keywords, millions):
    model = timm.create_model(name, device="meta", **keywords)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 2) == millions


def test_the_families_are_listed_by_timm():
    names = {"nano", "tiny", "small", "base", "nano_patch8"}
    forms = {f"{size}_{form}" for size in ("nano", "tiny", "small") for form in ("exact", "shared")}
    first = names | forms | {"nano_exact_patch8"}
    assert set(timm.list_models(module="vilonghornv2")) == {
        f"vilonghornv2_{size}" for size in ("nano", "tiny", "small", "base")
    }
    vim, longhorn = ({f"{family}_{name}" for name in own} for family, own in (("vim", names), ("vilonghorn", first)))
    assert set(timm.list_models(module="vim")) == vim | longhorn | {"vim_tiny_stride8"}
    assert timm.models.model_entrypoint("vim_tiny") is vilonghorn.models.vim.vim_tiny
    assert "stride=8" in vilonghorn.models.vim.vim_tiny_stride8.__doc__


@pytest.mark.parametrize("name", RULES)
def test_each_family_has_its_configuration_and_runs_its_own_rule_at_224(name):
    model = timm.create_model(name).eval()
    cfg, data = model.default_cfg, timm.data.resolve_data_config(model=model)
    assert {f"{cfg['first_conv']}.weight", f"{cfg['classifier']}.weight"} <= model.state_dict().keys()
    assert data["input_size"] == (3, 224, 224) and data["crop_pct"] == 0.875 and data["interpolation"] == "bicubic"
    mixers = [module for module in model.modules() if isinstance(module, Mixer) and module.rule != "none"]
    assert {mixer.rule for mixer in mixers} == {RULES[name]}
    in_turn = [(False,), (True,), (False,), (True,), (False,)]
    assert [mixer.reverse for mixer in mixers] == (in_turn if "v2" in name else [(False, True)] * 6)
    with torch.no_grad():
        logits = model(torch.randn(1, 3, 224, 224))
    assert logits.shape == (1, 1000) and torch.isfinite(logits).all()


@pytest.mark.parametrize(
    "name, base, keywords",
    [
        ("vilonghorn_nano_exact_patch8", "vilonghorn_nano_exact", dict(patch_size=8, global_pool="avg")),
        ("vim_nano_patch8", "vilonghorn_nano_patch8", dict(rule="mamba", embed_dim=92)),
    ],
)
@torch.no_grad()
def test_keywords_make_the_model_of_another_name_and_take_its_weights(name, base, keywords):
    model = timm.create_model(name, pretrained=True).eval()
    cfg = model.pretrained_cfg
    overlay = dict(file=cfg["file"], num_classes=480, input_size=(3, 64, 64))
    sizes = dict(img_size=64, num_classes=480)
    again = timm.create_model(base, pretrained=True, pretrained_cfg_overlay=overlay, **sizes, **keywords).eval()
    images = torch.randn(1, 3, 64, 64)
    assert torch.equal(again(images), model(images))


@pytest.mark.parametrize("name", timm.list_pretrained(["vim_*", "vilonghorn*"]))
def test_a_model_has_the_image_size_of_its_tag_or_the_one_given(name):
    model = timm.create_model(name, device="meta")
    channels, *size = timm.data.resolve_model_data_config(model)["input_size"]
    assert get_model_input_config(model)["input_size"] == (channels, *size)
    assert model.grid_size() == model.grid_size(tuple(size)) != model.grid_size(32)
    assert timm.create_model(name, device="meta", img_size=32).grid_size() == model.grid_size(32)


@pytest.mark.parametrize("name", ["vim_nano", "vilonghornv2_nano.icons480"])
def test_a_configuration_without_an_image_size_leaves_the_size_of_the_model(name):
    model = timm.create_model(name, device="meta", pretrained_cfg_overlay=dict(input_size=None))
    assert model.grid_size() == model.grid_size(224)


@pytest.mark.parametrize("name", ["vilonghorn_tiny", "vim_nano"])
def test_pretrained_is_refused_while_there_is_nothing_to_load(name):
    with pytest.raises(RuntimeError, match=f"no pretrained weights for {name}"):
        timm.create_model(name, pretrained=True, device="meta")
    assert not timm.is_model_pretrained(name)


@pytest.mark.parametrize(
    "name, repository, file",
    [
        ("vim_tiny", "hustvl/Vim-tiny-midclstok", "vim_t_midclstok_76p1acc.pth"),
        ("vim_base", "hustvl/Vim-base-midclstok", "vim_b_midclstok_81p9acc.pth"),
        ("vim_tiny_stride8", "hustvl/Vim-tiny-midclstok", "vim_t_midclstok_ft_78p3acc.pth"),
    ],
)
def test_vim_fetches_its_authors_files(name, repository, file, monkeypatch):
    cfg = get_pretrained_cfg(name)
    assert (cfg.hf_hub_id, cfg.hf_hub_filename) == (repository, file) and timm.is_model_pretrained(name)

    class Asked(Exception):
        pass

    def download(repo_id=None, filename=None, **_):
        raise Asked(repo_id, filename)

    monkeypatch.setattr(timm.models._hub, "hf_hub_download", download)
    with pytest.raises(Asked) as asked:
        timm.create_model(name, pretrained=True)
    assert asked.value.args == (repository, file)


@pytest.mark.parametrize("name", ["vilonghornv2_nano", "vilonghorn_nano_patch8", "vim_nano_patch8"])
def test_weights_in_the_package_name_what_is_drawn(name):
    pytest.importorskip("jsonargparse", reason="vilonghorn.load needs jsonargparse: pip install vilonghorn")
    image = Image.new("RGB", (64, 64), "white")
    draw = ImageDraw.Draw(image)
    draw.line([(32, 8), (32, 56)], "black", 6)
    draw.line([(8, 32), (56, 32)], "black", 6)
    loaded = vilonghorn.load(f"{name}.icons480", device="cpu")
    with torch.no_grad():
        scores = loaded.model(loaded.transform(image)[None])[0]
    assert loaded.class_name(int(scores.argmax())) in ("add", "plus")
    assert len(loaded.class_names) == 480 == len(scores)


def test_features_in_the_package_tell_two_drawings_apart_and_have_no_classes():
    model = timm.create_model("vilonghornv2_nano.lite0", pretrained=True).eval()
    size, images = model.pretrained_cfg["input_size"][-1], []
    for shape in ("ellipse", "ellipse", "line"):
        image = Image.new("RGB", (size, size), "white")
        getattr(ImageDraw.Draw(image), shape)([30 + len(images), 30, 90, 90], "red")
        images.append(torch.from_numpy(np.array(image)).permute(2, 0, 1) / 127.5 - 1)
    with torch.no_grad():
        features = F.normalize(model(torch.stack(images)))
    assert model.num_classes == 0 and features.shape == (3, 160)
    same, other = features[0] @ features[1], features[0] @ features[2]
    assert same > 0.9 > other
    other = timm.create_model("vilonghornv2_nano.lite0", pretrained=True, num_classes=3)
    assert other(torch.stack(images)).shape == (3, 3)


def test_weights_in_the_package_are_a_start_for_other_classes_and_sizes():
    own = dict(num_classes=3, img_size=96, in_chans=1)
    model = timm.create_model("vilonghorn_nano_patch8", pretrained=True, **own)
    source = timm.create_model("vilonghorn_nano_patch8", pretrained=True)
    assert torch.equal(model.blocks[2].mixer.x_proj, source.blocks[2].mixer.x_proj)
    assert model(torch.zeros(1, 1, 96, 96)).shape == (1, 3)
