"""`examples/publish.py` makes a folder of a run."""

import json

import publish
import pytest
import timm
import toy_run

from vilonghorn.engine.checkpoint import load_weights, save_weights

OPTIONS = ["--model.name=vilonghorn_nano", "--model.kwargs={depth: 1, embed_dim: 32}", "--data.interpolation=area"]

EPOCH = ["--schedule.epochs=1", "--schedule.warmup_epochs=0"]


def test_the_card_and_the_configuration_of_a_run_have_the_size_of_its_images(tmp_path):
    model = ["--model.name=vilonghornv2_nano", "--model.kwargs={stem_stride: 2}", "--data.image_size=[32, 48]"]
    loaders = {"train": toy_run.ToyLoader(size=(32, 48)), "val": toy_run.ToyLoader(16, training=False, size=(32, 48))}
    toy_run.toy_trainer(tmp_path / "run", *model, *EPOCH, **loaders).fit()
    publish.main([str(tmp_path / "run"), str(tmp_path / "out")])
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["model_args"]["img_size"] == config["pretrained_cfg"]["input_size"][1:] == [32, 48]
    assert "**Image size:** 32 x 48" in (tmp_path / "out/README.md").read_text()


def test_a_run_is_published_with_its_classes(tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "out"
    toy_run.toy_trainer(run, *OPTIONS).fit()
    publish.main([str(run), str(out), "--checkpoint", "last", "--repo", "me/photos"])
    said = capsys.readouterr().out
    assert "local-dir:" in said and f"hf upload me/photos {out} ." in said
    assert json.loads((out / "config.json").read_text())["label_names"] == toy_run.ToyLoader.class_names
    card = (out / "README.md").read_text()
    assert (
        "top-1 (%)" in card
        and "top-5" not in card
        and "hf-hub:me/photos" in card
        and "Class names:** a, b, c, d" in card
    )
    assert "val.beton" not in card  # the path of data.val
    data = timm.data.resolve_data_config(model=timm.create_model(f"local-dir:{out}", pretrained=True))
    assert data["input_size"] == (3, 16, 16)
    assert data["interpolation"] == "box"  # as the folder loader measures it: PIL's average over areas
    with pytest.raises(FileNotFoundError, match="there are no weights"):
        publish.main([str(tmp_path / "nothing"), str(tmp_path / "other")])

    weights, record = load_weights(run / "best.safetensors")
    save_weights(run / "best.safetensors", weights, record | dict(class_names=None))
    publish.main([str(run), str(tmp_path / "nameless")])
    assert "label_names" not in json.loads((tmp_path / "nameless" / "config.json").read_text())
