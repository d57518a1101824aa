"""What is published loads again, exactly: with timm, with transformers, and after the Hub."""

import json
import math
from types import SimpleNamespace

import pytest
import timm
import torch
import toy_run

from vilonghorn.tools import publish

KWARGS = {
    "vilonghorn_nano": dict(img_size=(32, 64), num_classes=4, in_chans=1),
    "vilonghorn_nano_exact": dict(img_size=32, stride=8, num_classes=3),
    "vilonghorn_nano_shared": dict(img_size=32, heads=1, global_pool="avg"),
    "vim_nano": dict(img_size=32, depth=2),
}


def make(name, **kwargs):
    torch.manual_seed(0)
    return timm.create_model(name, **{**KWARGS[name], **kwargs}).eval()


def images(model):
    return torch.randn(2, model.in_chans, *model.patch_embed.img_size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", KWARGS)
def test_a_folder_loads_with_timm_exactly(name, tmp_path):
    model = make(name)
    publish.save_pretrained(model, tmp_path / "saved", publish.make_card(model, "me/saved"))
    loaded = timm.create_model(f"local-dir:{tmp_path / 'saved'}", pretrained=True).eval()
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), model.state_dict().values()))
    assert torch.equal(loaded(images(model)), model(images(model)))
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir())


def test_a_model_changed_after_it_was_made_loads_as_it_is_now(tmp_path):
    model = make("vilonghorn_nano")
    model.set_input_size(img_size=(48, 48))
    model.reset_classifier(7, "avg")
    publish.save_pretrained(model, tmp_path / "saved", publish.make_card(model, "saved"))
    loaded = timm.create_model(f"local-dir:{tmp_path / 'saved'}", pretrained=True).eval()
    assert loaded.num_classes == 7 and torch.equal(loaded(images(model)), model(images(model)))
    assert timm.data.resolve_data_config(model=loaded)["input_size"] == (1, 48, 48)


@pytest.mark.parametrize("name", KWARGS)
def test_a_folder_loads_with_transformers_exactly(name, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install vilonghorn[downstream]")
    model = make(name)
    labels = [f"class {i}" for i in range(model.num_classes)]
    publish.save_pretrained(
        model, tmp_path / "saved", publish.make_card(model, "x"), model_config=dict(label_names=labels)
    )
    classifier = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(classifier(images(model)).logits, model(images(model)))
    assert classifier.config.id2label[model.num_classes - 1] == labels[-1]
    backbone = transformers.AutoModel.from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(backbone(images(model)).last_hidden_state, model.forward_features(images(model)))


def test_the_card_says_what_how_and_how_well(tmp_path):
    model = make("vilonghorn_nano_shared")
    card = publish.make_card(model, "me/photos", {"top-1 (%)": 76.1}, license="cc-by-4.0")
    publish.save_pretrained(model, tmp_path / "photos", card)
    text = (tmp_path / "photos" / "README.md").read_text()
    for said in ("license: cc-by-4.0", "vilonghorn_nano_shared", "directions='shared'", "heads=1", "32 x 32"):
        assert said in text
    for said in ("top-1 (%): 76.1", 'create_model("hf-hub:me/photos", pretrained=True)'):
        assert said in text


def test_the_card_of_another_timm_model_names_no_mixer():
    card = publish.make_card(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1), "me/vit")
    assert "vit_tiny_patch16_224" in card and "Mixer" not in card and "- **Metrics:** none given" in card


def test_nothing_is_written_over_and_nothing_is_half_there(tmp_path, monkeypatch):
    model = make("vim_nano")
    (tmp_path / "taken").mkdir()
    with pytest.raises(FileExistsError, match="taken exists already"):
        publish.save_pretrained(model, tmp_path / "taken", publish.make_card(model, "x"))
    with torch.no_grad():
        model.blocks[1].mixer.D[0, 0] = math.nan
    with pytest.raises(ValueError, match="blocks.1.mixer.D hold NaN or infinity"):
        publish.save_pretrained(model, tmp_path / "saved", publish.make_card(model, "x"))

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(publish.json, "dumps", fail)
    with pytest.raises(OSError, match="no space left"):
        publish.save_pretrained(make("vim_nano"), tmp_path / "saved", publish.make_card(model, "x"))
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_the_hub_gets_what_a_folder_has(monkeypatch, tmp_path):
    uploaded = {}

    class Hub:
        def __init__(self, **_):
            pass

        def create_repo(self, repo_id, private, exist_ok):
            return SimpleNamespace(repo_id=repo_id)

        def file_exists(self, repo_id, name):
            return False

        def upload_folder(self, repo_id, folder_path, commit_message, ignore_patterns):
            uploaded.update({path.name: path.read_bytes() for path in folder_path.iterdir()}, ignored=ignore_patterns)
            return SimpleNamespace(commit_url=f"https://huggingface.co/{repo_id}/commit/1")

    monkeypatch.setattr(publish, "HfApi", Hub)
    model = make("vim_nano")
    card = publish.make_card(model, "me/vim")
    publish.save_pretrained(model, tmp_path / "vim", card)
    assert publish.push_folder(tmp_path / "vim", "me/vim") == "https://huggingface.co/me/vim/commit/1"
    assert uploaded.pop("ignored") is None
    assert uploaded == {path.name: path.read_bytes() for path in (tmp_path / "vim").iterdir()}
    monkeypatch.setattr(Hub, "file_exists", lambda *_: True)
    publish.push_folder(tmp_path / "vim", "me/vim")
    assert uploaded["ignored"] == ["README.md"]  # somebody wrote it


def test_a_run_is_published_with_its_classes_and_preprocessing(tmp_path, capsys):
    kwargs = "--model.kwargs={depth: 2, embed_dim: 32}"
    toy_run.toy_trainer(tmp_path / "run", "--model.name=vilonghorn_nano", kwargs, "--schedule.epochs=2").fit()
    assert publish.main([str(tmp_path / "run"), str(tmp_path / "out"), "--checkpoint", "last"]) == 0
    assert "local-dir:" in capsys.readouterr().out
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["label_names"] == toy_run.ToyLoader.class_names
    assert config["pretrained_cfg"]["input_size"] == [3, 16, 16]
    assert "top-1 (%)" in (tmp_path / "out" / "README.md").read_text()
    timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True)
    with pytest.raises(SystemExit):
        publish.main([str(tmp_path / "nothing"), str(tmp_path / "other")])
    assert "there are no weights" in capsys.readouterr().err


@pytest.mark.parametrize("error", [OSError, ValueError])  # of the network, of a name that the Hub refuses
def test_a_folder_that_cannot_be_uploaded_is_complete(error, tmp_path, monkeypatch, capsys):
    kwargs = "--model.kwargs={depth: 1, embed_dim: 32}"
    toy_run.toy_trainer(tmp_path / "run", "--model.name=vilonghorn_nano", kwargs, "--schedule.epochs=2").fit()

    def fail(*_):
        raise error("no token")

    monkeypatch.setattr(publish, "push_folder", fail)
    with pytest.raises(SystemExit) as ended:
        publish.main([str(tmp_path / "run"), str(tmp_path / "out"), "--push", "me/photos"])
    out = tmp_path / "out"
    sentence = f"{out} is complete, but was not uploaded (no token); upload it: hf upload me/photos {out} ."
    assert ended.value.code == 2 and sentence in " ".join(capsys.readouterr().err.split())
    timm.create_model(f"local-dir:{out}", pretrained=True)


def test_a_run_whose_classes_have_no_names_is_published_with_its_interpolation(tmp_path, monkeypatch):
    monkeypatch.setattr(toy_run.ToyLoader, "class_names", None)
    options = ["--model.name=vilonghorn_nano", "--model.kwargs={depth: 2, embed_dim: 32}", "--data.interpolation=area"]
    toy_run.toy_trainer(tmp_path / "run", *options, "--schedule.epochs=2").fit()
    assert publish.main([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    model = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True)
    assert not model.pretrained_cfg.get("label_names")
    data = timm.data.resolve_data_config(model=model)
    assert data["interpolation"] == "box"  # as the folder loader measures it: PIL's average over areas
    timm.data.create_transform(**data)
