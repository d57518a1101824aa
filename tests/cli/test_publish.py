"""`vilonghorn publish` makes a folder of a run, and uploads it."""

import json

import timm
import toy_run

from vilonghorn.cli import main

OPTIONS = ["--model.name=vilonghorn_nano", "--model.kwargs={depth: 1, embed_dim: 32}", "--schedule.epochs=2"]


def test_a_run_is_published_with_its_classes_and_is_complete_if_the_upload_fails(tmp_path, monkeypatch, capsys):
    toy_run.toy_trainer(tmp_path / "run", *OPTIONS).fit()
    for error in (OSError, ValueError):  # of the network, of a name that the Hub refuses

        def fail(*_, error=error):
            raise error("no token")

        monkeypatch.setattr("vilonghorn.cli.publish.push_folder", fail)
        out = tmp_path / error.__name__
        command = ["publish", str(tmp_path / "run"), str(out), "--checkpoint", "last", "--push", "me/photos"]
        assert main(command) == 2
        said, err = capsys.readouterr()
        sentence = f"{out} is complete, but was not uploaded (no token); upload it: hf upload me/photos {out} ."
        assert "local-dir:" in said and sentence in err
        config = json.loads((out / "config.json").read_text())
        assert config["label_names"] == toy_run.ToyLoader.class_names
        assert config["pretrained_cfg"]["input_size"] == [3, 16, 16]
        assert "top-1 (%)" in (out / "README.md").read_text()
        timm.create_model(f"local-dir:{out}", pretrained=True)
    assert main(["publish", str(tmp_path / "nothing"), str(tmp_path / "other")]) == 2
    assert "there are no weights" in capsys.readouterr().err


def test_a_run_whose_classes_have_no_names_is_published_with_its_interpolation(tmp_path, monkeypatch):
    monkeypatch.setattr(toy_run.ToyLoader, "class_names", None)
    toy_run.toy_trainer(tmp_path / "run", *OPTIONS, "--data.interpolation=area").fit()
    assert main(["publish", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    model = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True)
    assert not model.pretrained_cfg.get("label_names")
    data = timm.data.resolve_data_config(model=model)
    assert data["interpolation"] == "box"  # as the folder loader measures it: PIL's average over areas
    timm.data.create_transform(**data)
