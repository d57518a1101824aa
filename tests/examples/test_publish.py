"""What is published loads again, exactly: with timm and with transformers."""

import math

import publish
import pytest
import timm
import torch
import yaml

KWARGS = {
    "vilonghorn_nano": dict(img_size=(32, 64), num_classes=4, in_chans=1),
    "vilonghorn_nano_exact": dict(img_size=32, stride=8, num_classes=3),
    "vilonghorn_nano_shared": dict(img_size=32, num_heads=1, global_pool="avg"),
    "vim_nano": dict(img_size=32, depth=2),
}


def make(name, **kwargs):
    torch.manual_seed(0)
    return timm.create_model(name, **{**KWARGS[name], **kwargs}).eval()


def images(model):
    return torch.randn(2, model.in_chans, *model.patch_embed.img_size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", KWARGS)
def test_a_folder_loads_exactly_with_timm_and_transformers(name, tmp_path):
    model, saved = make(name), tmp_path / "saved"
    labels, x = [f"class {i}" for i in range(model.num_classes)], images(model)
    publish.save_pretrained(model, saved, publish.make_card(model, "me/saved"), model_config=dict(label_names=labels))
    loaded = timm.create_model(f"local-dir:{saved}", pretrained=True).eval()
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), model.state_dict().values()))
    assert torch.equal(loaded(x), model(x))
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir())
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install vilonghorn[downstream]")
    classifier = transformers.AutoModelForImageClassification.from_pretrained(saved).eval()
    assert torch.equal(classifier(x).logits, model(x))
    assert classifier.config.id2label[model.num_classes - 1] == labels[-1]
    backbone = transformers.AutoModel.from_pretrained(saved).eval()
    assert torch.equal(backbone(x).last_hidden_state, model.forward_features(x))


def test_a_model_changed_after_it_was_made_loads_as_it_is_now(tmp_path):
    model = make("vilonghorn_nano")
    model.set_input_size(img_size=(48, 48))
    model.reset_classifier(7, "avg")
    publish.save_pretrained(model, tmp_path / "saved", publish.make_card(model, "saved"))
    loaded = timm.create_model(f"local-dir:{tmp_path / 'saved'}", pretrained=True).eval()
    assert loaded.num_classes == 7 and torch.equal(loaded(images(model)), model(images(model)))
    assert timm.data.resolve_data_config(model=loaded)["input_size"] == (1, 48, 48)


@pytest.mark.parametrize("license", ["null", "No", "1.0", "0x1f", "2026-01-01", "~", "mit", "apache-2.0", "é: #1"])
def test_a_licence_is_the_text_that_was_given(license):
    card = publish.make_card(make("vim_nano"), "me/a", license=license)
    assert yaml.safe_load(card.split("\n---\n")[0])["license"] == license


@pytest.mark.parametrize("names", ["cat dog eel", ["cat", "dog"], ["cat", "dog", 3]])
def test_names_that_are_not_a_text_for_each_class_are_refused(tmp_path, names):
    model = make("vilonghorn_nano_exact")
    with pytest.raises(ValueError, match="3 classes but .*class names.*expected a list of one text for each"):
        publish.make_card(model, "me/a", class_names=names)
    with pytest.raises(ValueError, match="3 classes but .*class names"):
        publish.save_pretrained(model, tmp_path / "a", "", model_config={"label_names": names})
    assert not (tmp_path / "a").exists()


def test_the_card_says_what_how_and_how_well_and_escapes_what_it_is_given():
    model, license = make("vilonghorn_nano_shared", num_classes=22), 'mine: "free"\n---\n# anything'
    names = ["ant", "<b>bee</b>\n# cat", *map(str, range(20))]
    text = publish.make_card(model, "me/photos", {"top-1 (%)": 76.1}, license=license, class_names=names)
    said = [
        "vilonghorn_nano_shared",
        model.blocks[0].mixer.extra_repr(),
        "top-1 (%): 76.1",
        "&lt;b&gt;bee&lt;/b&gt;\\n# cat",
    ]
    assert [words for words in [*said, '"hf-hub:me/photos", pretrained=True'] if words not in text] == []
    assert yaml.safe_load(text.split("\n---\n")[0])["license"] == license and text.count("\n---\n") == 1
    text = publish.make_card(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1), "photos")
    assert "hf-hub:OWNER/photos" in text and "Mixer" not in text


def test_nothing_is_written_over_and_nothing_is_half_there(tmp_path, monkeypatch):
    model = make("vim_nano")
    (tmp_path / "taken/folder").mkdir(parents=True)
    with pytest.raises(FileExistsError, match="taken: exists"):
        publish.save_pretrained(model, tmp_path / "taken", publish.make_card(model, "x"))
    with torch.no_grad():
        model.blocks[1].mixer.D[0, 0] = math.nan
    with pytest.raises(ValueError, match="blocks.1.mixer.D contain NaN or infinity"):
        publish.save_pretrained(model, tmp_path / "saved", publish.make_card(model, "x"))

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(publish.json, "dumps", fail)
    with pytest.raises(OSError, match="no space left"):
        publish.save_pretrained(make("vim_nano"), tmp_path / "saved", publish.make_card(model, "x"))
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
