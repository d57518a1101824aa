"""The card of the weights of icons is made of its committed results, and small sets of images are read as it says."""

import importlib.util
from pathlib import Path

import pytest
from PIL import Image

pytest.importorskip("sklearn")

ROOT = Path(__file__).parents[2]


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "models" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["icons480", "small_data"])
def test_the_committed_card_is_made_of_the_committed_results(name, tmp_path, monkeypatch):
    script, text = load(name), (ROOT / "docs/models/icons480.md").read_text(encoding="utf-8")
    (tmp_path / "card.md").write_text(text, encoding="utf-8")
    monkeypatch.setattr(script, "PAGE", tmp_path / "card.md")
    monkeypatch.chdir(ROOT)
    script.write_page()
    assert (tmp_path / "card.md").read_text(encoding="utf-8") == text, f"run python docs/models/{name}.py"


def test_images_are_read_on_white_ground_and_every_fifth_is_held_out(tmp_path):
    for name, colour in (("dark", (0, 0, 0, 255)), ("clear", (0, 0, 0, 0))):
        (tmp_path / name / "deep").mkdir(parents=True)
        for i in range(6):
            Image.new("RGBA", (20, 10), colour).save(tmp_path / name / "deep" / f"{i}.png")
    train, held_out, classes = load("small_data").read_folder(tmp_path)
    assert classes == ["clear", "dark"] and train.labels.tolist() == [0] * 4 + [1] * 4
    assert held_out.labels.tolist() == [0, 0, 1, 1]
    assert (train.pixels[0] == 255).all()  # clear
    dark = train.pixels[-1, 0]  # as wide as the canvas and half as high
    assert (dark[18:46] == 0).all() and (dark[:16] == 255).all()
