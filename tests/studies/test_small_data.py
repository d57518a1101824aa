"""Small sets are read as their study says."""

import pytest
from PIL import Image

pytest.importorskip("sklearn")


def test_images_are_read_on_white_ground_and_every_fifth_is_held_out(script, tmp_path):
    for name, colour in (("dark", (0, 0, 0, 255)), ("clear", (0, 0, 0, 0))):
        (tmp_path / name / "deep").mkdir(parents=True)
        for i in range(6):
            Image.new("RGBA", (20, 10), colour).save(tmp_path / name / "deep" / f"{i}.png")
    train, held_out, classes = script("studies/small_data").read_folder(tmp_path)
    assert classes == ["clear", "dark"] and train.labels.tolist() == [0] * 4 + [1] * 4
    assert held_out.labels.tolist() == [0, 0, 1, 1]
    assert (train.pixels[0] == 255).all()  # clear
    dark = train.pixels[-1, 0]  # as wide as the canvas and half as high
    assert (dark[18:46] == 0).all() and (dark[:16] == 255).all()
