"""ImageNet's flat validation folder gets the labels of class folders, by the devkit or by a table, or a clear error."""

import os

import numpy as np
import pytest
from scipy.io import savemat

from vilonghorn.cli import main
from vilonghorn.data import check_beton, flat_images

# By class number; sorted, n01 is label 0, n02 label 1, n03 label 2.
SYNSETS = ["n02", "n03", "n01"]
NUMBERS = [3, 1, 1, 2, 3]
LABELS = [0, 1, 1, 2, 0]


@pytest.fixture
def flat(tmp_path, photo):
    root = tmp_path / "val"
    root.mkdir()
    for i in range(1, 6):
        photo(i).save(root / f"ILSVRC2012_val_{i:08d}.JPEG")
    (root / "notes.txt").write_text("not an image")
    return root


@pytest.fixture
def devkit(tmp_path):
    """The devkit as it is: classes with children, which have no images, come after the others."""
    data = tmp_path / "ILSVRC2012_devkit_t12" / "data"
    data.mkdir(parents=True)
    (data / "ILSVRC2012_validation_ground_truth.txt").write_text("".join(f"{n}\n" for n in NUMBERS))
    kinds = [("ILSVRC2012_ID", float), ("WNID", object), ("words", object), ("num_children", float)]
    rows = [(i + 1, name, "some words", 0) for i, name in enumerate(SYNSETS)] + [(4, "n00", "an ancestor", 3)]
    savemat(data / "meta.mat", {"synsets": np.array(rows, kinds).reshape(-1, 1)})
    return data.parent


def synset_list(devkit):
    os.remove(devkit / "data" / "meta.mat")
    (devkit / "data" / "synsets.txt").write_text("".join(f"{name} some words\n" for name in SYNSETS))
    return devkit


def table(devkit):
    file = devkit.parent / "LOC_val_solution.csv"
    lines = [f"ILSVRC2012_val_{i + 1:08d},{SYNSETS[n - 1]} 240 170 260 240 " for i, n in enumerate(NUMBERS)]
    file.write_text("\n".join(["ImageId,PredictionString", *reversed(lines)]) + "\n")
    return file


@pytest.mark.parametrize("source", [lambda devkit: devkit, lambda devkit: devkit / "data", synset_list, table])
def test_labels_are_positions_among_the_sorted_names(flat, devkit, source):
    images = flat_images(flat, source(devkit))
    assert images.classes == ["n01", "n02", "n03"]
    assert [os.path.basename(path)[-9:-5] for path in images.paths] == ["0001", "0002", "0003", "0004", "0005"]
    assert images.labels.tolist() == LABELS


def test_the_command_writes_a_flat_folder(flat, devkit, tmp_path, capsys):
    path = tmp_path / "val.beton"
    assert main(["beton", str(flat), str(path), "--labels", str(devkit), "--quiet"]) == 0
    assert "5 images, 3 classes" in capsys.readouterr().out
    assert check_beton(path).labels.tolist() == LABELS and check_beton(path).classes == ["n01", "n02", "n03"]


def test_a_class_without_an_image_keeps_its_label(flat, devkit):
    for i in (1, 5):
        os.remove(flat / f"ILSVRC2012_val_{i:08d}.JPEG")
    images = flat_images(flat, table(devkit))
    assert images.classes == ["n01", "n02", "n03"] and images.labels.tolist() == [1, 1, 2]


KIT = "expected the folder of the devkit with data/ILSVRC2012_validation_ground_truth.txt .*meta.mat.*synsets.txt"
TRUTH = "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("ILSVRC2012_devkit_t12/data/meta.mat", None, KIT),
        (TRUTH, None, KIT),
        (
            "val/ILSVRC2012_val_00000003.JPEG",
            None,
            "4 images for the 5 lines of .*the first .*00000004.JPEG",
        ),
        (TRUTH, b"3 1 1 4 3", "'4' is not a class number; expected 1 to 3"),
        ("ILSVRC2012_devkit_t12/data/meta.mat", b"MATLAB 5.0 MAT-file" + bytes(200), "meta.mat: not the devkit's"),
        ("ILSVRC2012_devkit_t12/data/synsets.txt", b"n02\nn02\nn01\n", "the names of its classes are not distinct"),
    ],
)
def test_what_does_not_fit_is_named_with_what_is_expected(flat, devkit, tmp_path, file, content, message):
    if content is None:
        os.remove(tmp_path / file)
    else:
        (tmp_path / file).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        flat_images(flat, devkit)


def test_labels_and_images_that_are_missing_are_named(flat, devkit, tmp_path):
    with pytest.raises(FileNotFoundError, match=KIT):
        flat_images(flat, devkit / "gone")
    labels = table(devkit)
    labels.write_text(labels.read_text().replace("00000002", "00000009"))
    with pytest.raises(ValueError, match="no line for 1 of the 5 images, the first ILSVRC2012_val_00000002.JPEG"):
        flat_images(flat, labels)
    with pytest.raises(NotADirectoryError, match="nowhere: no"):
        flat_images(tmp_path / "nowhere", devkit)
    with pytest.raises(ValueError, match="data: no images in it"):
        flat_images(devkit / "data", devkit)
