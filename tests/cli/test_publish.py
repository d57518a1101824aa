"""`vilonghorn publish` makes a folder of a run, and uploads it."""

import json

import timm
import toy_run

from vilonghorn.cli import main
from vilonghorn.engine.checkpoint import load_weights, save_weights

OPTIONS = ["--model.name=vilonghorn_nano", "--model.kwargs={depth: 1, embed_dim: 32}", "--data.interpolation=area"]


def test_a_run_is_published_with_its_classes_and_is_complete_if_the_upload_fails(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    toy_run.toy_trainer(run, *OPTIONS).fit()
    for error in (OSError, ValueError):  # of the network, of a name that the Hub refuses

        def fail(*_, error=error):
            raise error("no token")

        monkeypatch.setattr("vilonghorn.cli.publish.push_folder", fail)
        out = tmp_path / error.__name__
        assert main(["publish", str(run), str(out), "--checkpoint", "last", "--push", "me/photos"]) == 2
        said, err = capsys.readouterr()
        sentence = f"{out} is complete, but was not uploaded (no token); upload it: hf upload me/photos {out} ."
        assert "local-dir:" in said and sentence in err
        config = json.loads((out / "config.json").read_text())
        assert config["label_names"] == toy_run.ToyLoader.class_names
        assert "top-1 (%)" in (out / "README.md").read_text()
        data = timm.data.resolve_data_config(model=timm.create_model(f"local-dir:{out}", pretrained=True))
        assert data["input_size"] == (3, 16, 16)
        assert data["interpolation"] == "box"  # as the folder loader measures it: PIL's average over areas
    assert main(["publish", str(tmp_path / "nothing"), str(tmp_path / "other")]) == 2
    assert "there are no weights" in capsys.readouterr().err

    weights, record = load_weights(run / "best.safetensors")
    save_weights(run / "best.safetensors", weights, record | dict(class_names=None))
    assert main(["publish", str(run), str(tmp_path / "nameless")]) == 0
    assert "label_names" not in json.loads((tmp_path / "nameless" / "config.json").read_text())
