"""The data of a run are opened and checked before anything is written."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from vilonghorn.cli import main
from vilonghorn.data import write_beton
from vilonghorn.engine import Trainer, load_config, load_run
from vilonghorn.engine.evaluate import evaluate_run

SMALL = "--model.name=vilonghornv2_nano --model.weights=null --data.image_size=32 --data.batch_size=4 --data.workers=0"
SMALL += " --schedule.epochs=1 --run.tensorboard=false --ema.decay=0"


@pytest.fixture
def photos(tmp_path, photo):
    """Training and held-out photographs of two classes, in folders whose names have spaces and umlauts."""
    for i in range(20):
        file = tmp_path / ("val" if i % 5 == 0 else "train") / ("kätzchen", "a dog")[i % 2] / f"bild {i} ö.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        photo(i).save(file)
    return tmp_path


def options(photos, *more):
    return [f"--data.train={photos}/train", f"--run.dir={photos}/run", *SMALL.split(), *more]


def config(photos, *more):
    return load_config("photos", *options(photos, *more))


def damage(photos, *names):
    for name in names:
        file = photos / name
        file.write_bytes(file.read_bytes()[:100])


BAD = ["train/a dog/bild 1 ö.png", "train/kätzchen/bild 2 ö.png", "train/kätzchen/bild 4 ö.png"]


@pytest.mark.parametrize("command", ["train --config=photos", "train --config=photos --dry-run", "pretrain"])
def test_all_damaged_images_are_listed_before_a_run_folder_is_made(photos, capsys, command):
    damage(photos, *BAD, "val/a dog/bild 5 ö.png")
    assert main([*command.split(), *options(photos, f"--data.val={photos}/val")]) == 2
    message = capsys.readouterr().err
    assert f"3 of 16 images of {photos}/train cannot be read" in message and "--data.skip_unreadable true" in message
    assert all(f"\n  {photos}/{name}: not a readable image" in message for name in BAD)
    assert f"1 of 4 images of {photos}/val cannot be read" in message and "bild 5 ö.png: not a" in message
    assert not (photos / "run").exists()


def test_a_run_without_the_damaged_images_names_them_and_has_the_others(photos):
    damage(photos, *BAD)
    with pytest.warns(UserWarning, match="3 of 16 images of .* cannot be read and are left out:(\n  .*){3}$"):
        trainer = Trainer(config(photos, f"--data.val={photos}/val", "--data.skip_unreadable=true"))
    assert trainer.train_loader.num_samples == 13 and trainer.fit()["images"] == 4


def test_images_in_both_parts_or_in_two_classes_are_listed(photos):
    shutil.copy(photos / "val/a dog/bild 5 ö.png", photos / "train/a dog/copy.png")
    shutil.copy(photos / "train/kätzchen/bild 2 ö.png", photos / "train/a dog/other.png")
    with pytest.warns(UserWarning) as warned:
        Trainer(config(photos, f"--data.val={photos}/val"))
    texts = [str(warning.message) for warning in warned]
    both, two = ("images are in the training and in the held-out data", "images are in two classes")
    [text] = [text for text in texts if both in text]
    assert text.endswith(f"\n  {photos}/train/a dog/copy.png is {photos}/val/a dog/bild 5 ö.png")
    [text] = [text for text in texts if two in text]
    assert text.startswith("1 ") and f"{photos}/train/kätzchen/bild 2 ö.png" in text


def test_a_part_of_the_training_images_can_be_held_out_and_is_evaluated_again(photos, photo):
    trainer = Trainer(config(photos, "--data.val_split=0.25"))
    train, val = trainer.train_loader.data, trainer.val_loader.data
    assert len(train.paths) == 12 and np.bincount(val.labels).tolist() == [2, 2]
    assert {*train.paths}.isdisjoint(val.paths)
    result = trainer.fit()
    found = evaluate_run(photos / "run", load_config(photos / "run" / "config.yaml"), "last")
    assert found["images"] == 4 and found["loss"] == pytest.approx(result["loss"])
    assert load_run(photos / "run")[1]["val_images"] == trainer.val_loader.content
    with pytest.raises(ValueError, match=r"data.val_split \(0.5\) or the files"):
        evaluate_run(photos / "run", load_config(photos / "run" / "config.yaml", "--data.val_split=0.5"))
    photo(99).save(val.paths[0])
    with pytest.raises(
        ValueError, match="the files of data.train are not those of the training.*give held-out images by"
    ):
        evaluate_run(photos / "run", load_config(photos / "run" / "config.yaml"))
    found = evaluate_run(photos / "run", load_config(photos / "run" / "config.yaml", f"--data.val={photos}/val"))
    assert found["images"] == 4


@pytest.mark.parametrize("part", ["train", "val"])
def test_other_images_of_the_same_names_are_refused_on_resume(photos, photo, part):
    Trainer(config(photos, f"--data.val={photos}/val"))
    file = next((photos / part / "a dog").iterdir())
    photo(77).save(file)
    with pytest.raises(ValueError, match=f"the fingerprint of the images of data.{part} is .* was started with"):
        Trainer(config(photos, f"--data.val={photos}/val"), resume=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["--data.train=null"],
            "data.train is missing: give --data.train, a folder with one folder of images for each",
        ),
        ([], "data.val is missing: give --data.val, .* or, to hold out a part of data.train, --data.val_split 0.2"),
        (["--data.val_split=1.5"], r"data.val_split is 1.5.*\(0, 1\)"),
    ],
)
def test_what_is_missing_is_said_with_the_option_that_gives_it(photos, given, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        Trainer(config(photos, *given))


def test_one_class_is_refused(photos):
    shutil.rmtree(photos / "train" / "a dog")
    with (
        pytest.warns(UserWarning, match="has one class only"),
        pytest.raises(ValueError, match="has one class only: give a"),
    ):
        Trainer(config(photos, f"--data.val={photos}/train"))


@pytest.mark.needs_ffcv
def test_training_data_without_names_of_classes_warn_that_held_out_labels_are_not_matched(photos, photo):
    write_beton([(photo(i), i % 2) for i in range(8)], photos / "tars.beton", progress=False)
    unnamed = config(photos, f"--data.train={photos}/tars.beton", f"--data.val={photos}/val")
    with pytest.warns(UserWarning, match="tars.beton have no names: label 0 is taken for a dog of .*val, and so on$"):
        Trainer(unnamed)


def test_a_split_folder_is_copied_whole_or_not_at_all(photos, capsys):
    assert main(["data", "split", f"{photos}/train", f"{photos}/new/parts", "--fraction", "0.25"]) == 0
    assert "12 training and 4 held-out images" in capsys.readouterr().out
    originals = {path.read_bytes() for path in (photos / "train").rglob("*.png")}
    copies = [path.read_bytes() for path in (photos / "new/parts").rglob("*.png")]
    assert {*copies} == originals and len(copies) == 16
    assert len([*(photos / "new/parts/val/kätzchen").iterdir()]) == 2
    (photos / "empty").mkdir()
    (photos / "link").symlink_to("empty")
    assert main(["data", "split", f"{photos}/train", f"{photos}/link"]) == 2
    assert "link: exists" in capsys.readouterr().err
    damage(photos, *BAD)
    for arguments in ([f"{photos}/train", f"{photos}/other"], [f"{photos}/train", f"{photos}/new/parts"], ["", "x"]):
        assert main(["data", "split", *arguments]) == 2
    assert "data.train is '', expected a name or a path" in capsys.readouterr().err
    for wrong in (["--fraction", "0"], ["--fraction", "nan"], ["--seed", "-1"]):
        with pytest.raises(SystemExit, match="2"):
            main(["data", "split", f"{photos}/train", f"{photos}/other", *wrong])
        assert f"argument {wrong[0]}: " in capsys.readouterr().err
    assert not (photos / "other").exists() and not [*photos.glob("*.partial")]


@pytest.mark.parametrize("same", ["Cat", "1.PNG"])
def test_a_disk_that_takes_two_names_for_one_is_refused(photos, same, monkeypatch, capsys):
    images = sorted((photos / "train/a dog").iterdir())
    for number, name in enumerate(["cat/1.png", "cat/1.PNG", "Cat/2.png"]):  # equal images of a class are in one part
        (photos / "train" / name).parent.mkdir(exist_ok=True)
        shutil.move(images[number], photos / "train" / name)
    shutil.copy(photos / "train/cat/1.png", photos / "train/cat/1.PNG")

    def copy(source, to):
        to = Path(str(to).replace(same, same.lower()))
        to.parent.mkdir(exist_ok=True)
        shutil.copyfile(source, to)

    monkeypatch.setattr(shutil, "copy2", copy)
    assert main(["data", "split", f"{photos}/train", f"{photos}/parts"]) == 2
    assert "such as Cat and cat; rename them" in capsys.readouterr().err and not (photos / "parts").exists()


@pytest.mark.parametrize("skip", ["false", "true"])
def test_files_of_other_formats_are_counted_where_a_part_is_held_out(photos, skip):
    (photos / "train/a dog/1.heic").touch()
    options = [] if skip == "false" else ["--skip-unreadable"]
    if options:
        damage(photos, *BAD)
    text = "files are left out: 1 .heic"
    with pytest.warns(UserWarning, match=text):
        Trainer(config(photos, "--data.val_split=0.25", f"--data.skip_unreadable={skip}"))
    with pytest.warns(UserWarning, match=text):
        assert main(["data", "split", f"{photos}/train", f"{photos}/parts", *options]) == 0
