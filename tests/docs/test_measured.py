"""The card of the weights of icons and the tables of docs/export.md say what was measured; small sets are read so."""

import shutil
from pathlib import Path

import pytest
from PIL import Image

pytest.importorskip("sklearn")

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["icons480", "small_data"])
def test_the_committed_card_is_made_of_the_committed_results(script, name, tmp_path, monkeypatch):
    module = script(f"models/{name}")
    pages = {"PAGE": ROOT / "docs/models/icons480.md"}
    if name == "small_data":
        pages["PRETRAINING"] = ROOT / "docs/pretraining.md"
    for constant, page in pages.items():
        shutil.copy(page, tmp_path / page.name)
        monkeypatch.setattr(module, constant, tmp_path / page.name)
    monkeypatch.chdir(ROOT)
    module.write_page()
    for page in pages.values():
        text = page.read_text(encoding="utf-8")
        assert (tmp_path / page.name).read_text(encoding="utf-8") == text, f"run python docs/models/{name}.py"


def test_images_are_read_on_white_ground_and_every_fifth_is_held_out(script, tmp_path):
    for name, colour in (("dark", (0, 0, 0, 255)), ("clear", (0, 0, 0, 0))):
        (tmp_path / name / "deep").mkdir(parents=True)
        for i in range(6):
            Image.new("RGBA", (20, 10), colour).save(tmp_path / name / "deep" / f"{i}.png")
    train, held_out, classes = script("models/small_data").read_folder(tmp_path)
    assert classes == ["clear", "dark"] and train.labels.tolist() == [0] * 4 + [1] * 4
    assert held_out.labels.tolist() == [0, 0, 1, 1]
    assert (train.pixels[0] == 255).all()  # clear
    dark = train.pixels[-1, 0]  # as wide as the canvas and half as high
    assert (dark[18:46] == 0).all() and (dark[:16] == 255).all()


def test_the_page_on_export_is_made_from_the_json_files(script):
    make = script("export/make")
    page = (ROOT / make.PAGE).read_text(encoding="utf-8")
    assert make.filled(page, ROOT / make.FOLDER) == page, "run python docs/export/make.py"
