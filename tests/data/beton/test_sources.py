"""Data sets of Hugging Face and tar files are written as a folder of the same images, and what is lost is told."""

import io
import json
import sys
import tarfile
import tracemalloc

import numpy as np
import pytest
from damage import decode
from PIL import Image

from vilonghorn.cli import main
from vilonghorn.data import ImageFolder, create_loader, write_beton


def write_tar(path, files) -> str:
    """A tar file of (name, content); a content of None is a symbolic link."""
    with tarfile.open(path, "w") as tar:
        for name, content in files:
            info = tarfile.TarInfo(name)
            if content is None:
                info.type, info.linkname = tarfile.SYMTYPE, "x"
            info.size = len(content or b"")
            tar.addfile(info, io.BytesIO(content or b""))
    return str(path)


def png(shade: int, size: tuple[int, int] = (6, 4)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (shade, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def sample(key: str, shade: int, label: int) -> list[tuple[str, bytes]]:
    return [(f"{key}.png", png(shade)), (f"{key}.cls", b"%d\n" % label)]


def shades(beton) -> list[int]:
    return [int(decode(beton, i)[0, 0, 0]) for i in range(beton.num_samples)]


def left_out(beton) -> list[str]:
    return json.loads(beton.path.with_name(beton.path.name + ".json").read_text())["left_out"]


@pytest.fixture
def webdataset():
    return pytest.importorskip("webdataset")


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    """The library, with a cache of its own and without a network."""
    library = pytest.importorskip("datasets")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(library.config, "HF_HUB_OFFLINE", True)
    return library


def table(datasets, images: list, labels: list, names: list[str] | None = None):
    label = datasets.ClassLabel(names=names) if names else datasets.Value("int64")
    features = datasets.Features({"label": label, "picture": datasets.Image()})
    images = [image and {"path": None, "bytes": image} for image in images]
    return datasets.Dataset.from_dict({"label": labels, "picture": images}, features)


def write(kind: str, data: ImageFolder, folder, request) -> str:
    """The images of a folder as another source, of which class names are known if `kind` is of datasets."""
    contents = [open(path, "rb").read() for path in data.paths]
    folder.mkdir()
    if kind == "tars":
        request.getfixturevalue("webdataset")
        for shard in range(3):
            files = []
            for i in range(9 * shard, 9 * shard + 9):
                files += [(f"a/{i:05d}.PNG", contents[i]), (f"a/{i:05d}.cls", b"%d" % data.labels[i])]
            write_tar(folder / f"train-{shard:03d}.tar", files)
        return f"{folder}/train-{{000..002}}.tar"
    datasets = request.getfixturevalue("datasets")
    if kind == "imagefolder":
        return f"hf:{data.path}:train"
    rows = table(datasets, contents, data.labels.tolist(), data.classes)
    if kind == "saved":
        datasets.DatasetDict({"train": rows}).save_to_disk(folder)
    else:
        rows.to_parquet(folder / "train-0.parquet")
    return f"hf:{folder}:train"


@pytest.mark.parametrize("kind", ["tars", "saved", "parquet", "imagefolder"])
def test_the_file_is_that_of_the_folder_of_the_same_images(folder, raw_beton, tmp_path, kind, request):
    source = write(kind, ImageFolder(folder), tmp_path / "data", request)
    path, names = tmp_path / "x.beton", tmp_path / "names.txt"
    names.write_text("cat\ndog\neel\n")
    options = ["--classes", str(names)] if kind == "tars" else []
    assert main(["beton", source, str(path), "--quiet", *options]) == 0
    assert path.read_bytes() == raw_beton.read_bytes()
    assert (tmp_path / "x.beton.json").read_text() == raw_beton.with_name("raw.beton.json").read_text()


def test_a_part_of_a_split_and_labels_without_names(datasets, tmp_path):
    (tmp_path / "data").mkdir()
    table(datasets, [png(i) for i in range(10)], [3, *range(9)]).to_parquet(tmp_path / "data/train.parquet")
    beton = write_beton(f"hf:{tmp_path}/data:train[:4]+train[-20%:]", tmp_path / "x.beton", progress=False)
    assert shades(beton) == [0, 1, 2, 3, 8, 9] and beton.labels.tolist() == [3, 0, 1, 2, 7, 8]
    assert beton.classes is None and beton.num_classes == 9


def test_tar_files_are_read_in_the_order_in_which_they_are_given(webdataset, tmp_path, capsys):
    first = write_tar(tmp_path / "b.tar", sample("0", 10, 1) + sample("1", 20, 0))
    second = write_tar(tmp_path / "a.tar", sample("0", 30, 2))
    assert main(["beton", first, second, str(tmp_path / "x.beton"), "--quiet"]) == 0
    assert "3 images, 3 classes" in capsys.readouterr().out
    assert shades(write_beton(tmp_path / "a.tar", tmp_path / "z.beton", progress=False)) == [30]
    beton = write_beton(f"{first}::{second}", tmp_path / "y.beton", workers=1, progress=False)
    assert shades(beton) == [10, 20, 30] and beton.labels.tolist() == [1, 0, 2]
    assert main(["beton", first, second, str(tmp_path / "x.beton"), "--quiet"]) == 2
    assert "x.beton: exists" in capsys.readouterr().err
    for name in ("no,{2,3}/[1].tar", "a{4,5}.tar"):  # names, not patterns
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_tar(tmp_path / name, sample("0", 30, 2))
        assert shades(write_beton(tmp_path / name, tmp_path / f"{len(name)}.beton", progress=False)) == [30]
    assert main(["beton", str(tmp_path / "c{1,2}.tar"), str(tmp_path / "w.beton")]) == 2
    assert f"error: there is no tar file {tmp_path}/c1.tar, {tmp_path}/c2.tar; expected" in capsys.readouterr().err


BAD = {
    "damaged": ([("2.png", png(9)[:50]), ("2.cls", b"0")], "x.tar: 2: not a readable image"),
    "too large": ([("2.png", png(9, (60, 50))), ("2.cls", b"0")], "x.tar: 2: too many pixels"),
    "without an image": ([("2.cls", b"0")], "x.tar: 2: it has no image"),
    "two images": ([("2.png", png(9)), ("2.jpg", png(9)), ("2.cls", b"0")], "x.tar: 2: it has no image, or more than"),
    "without a label": ([("2.png", png(9))], "x.tar: 2: its label is b''"),
    "a label in words": ([("2.png", png(9)), ("2.cls", b"cat")], "x.tar: 2: its label is b'cat'"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_sample_of_a_tar_file_stops_the_command_or_is_listed(webdataset, tmp_path, kind):
    files, reason = BAD[kind]
    source, path = write_tar(tmp_path / "x.tar", sample("1", 10, 1) + files + sample("3", 30, 0)), tmp_path / "x.beton"
    with pytest.raises(ValueError, match=f"{reason}.*; --skip-unreadable"):
        write_beton(source, path, max_pixels=2000, progress=False)
    assert not path.exists()
    beton = write_beton(source, path, max_pixels=2000, skip_unreadable=True, progress=False)
    assert shades(beton) == [10, 30] and beton.labels.tolist() == [1, 0]
    (found,) = left_out(beton)
    assert reason in found


def test_a_bad_row_stops_the_command_or_is_listed(datasets, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    images = [png(1), b"x", None, png(4, (60, 50)), png(5), png(6), *[b""] * 9, png(7)]
    labels = [1, 1, 1, 1, None, -1, *[0] * 9, 0]
    table(datasets, images, labels, ["a", "b"]).to_parquet(tmp_path / "data/train.parquet")
    arguments = ["beton", f"hf:{tmp_path}/data:train", str(tmp_path / "x.beton"), "--quiet", "--max-pixels", "2000"]
    assert main(arguments) == 2 and not (tmp_path / "x.beton").exists()
    assert "data:train, row 1: not a readable image" in capsys.readouterr().err
    assert main([*arguments, "--skip-unreadable"]) == 0
    out, err = capsys.readouterr()
    assert "2 images, 2 classes" in out and "left out 14 (listed in x.beton.json)" in out
    assert err.count("left out: ") == 10
    reasons = ["not a readable", "no image", "too many pixels", "its label is None", "its label is -1", "no image"]
    found = json.loads((tmp_path / "x.beton.json").read_text())["left_out"]
    assert len(found) == 14 and all(reason in text for reason, text in zip(reasons, found))


def header_of(content: bytes, name: str) -> int:
    return content.index(name.encode() + b"\0")


CUTS = {
    "between two files": lambda tar: tar[: header_of(tar, "2.png")],
    "in a file": lambda tar: tar[: header_of(tar, "2.png") + 520],
    "in a header": lambda tar: tar[: header_of(tar, "2.png") + 100],
    "damaged header": lambda tar: tar.replace(b"2.png\0", b"7.png\0"),
    "zeros to the end": lambda tar: tar[: header_of(tar, "2.png")] + bytes(3 << 20),
    "two tars in one": lambda tar: tar + tar,
    "compressed": lambda tar: b"\x1f\x8b" + tar,
    "empty": lambda tar: b"",
}


@pytest.mark.parametrize("cut", CUTS)
def test_a_tar_file_that_is_not_whole_is_refused_before_the_first_image(webdataset, tmp_path, cut):
    path = tmp_path / "x.tar"
    write_tar(path, sample("1", 10, 1) + sample("2", 20, 0) + sample("3", 30, 0))
    path.write_bytes(CUTS[cut](path.read_bytes()))
    with pytest.raises(ValueError, match="x.tar: not a complete tar file without compression"):
        write_beton(str(path), tmp_path / "x.beton", skip_unreadable=True, progress=False)
    assert [file.name for file in tmp_path.iterdir()] == ["x.tar"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (sample("1", 10, 1) + sample("1", 20, 1), "1.png is there twice"),
        (sample("1", 10, 1) + sample("2", 20, 1) + sample("1", 30, 1), "1.png is there twice"),
        ([*sample("1", 10, 1), ("2.png", None), ("2.cls", b"1")], "2.png is there twice, or a link"),
        (sample("1", 10, 1) + sample("__x__/2", 20, 1), "__x__/2.png has a name that webdataset leaves out"),
        (sample("1", 10, 1) + sample("a/.2", 20, 1), "a/.2.png has a name that webdataset leaves out"),
        ([("1.png", png(1))], "empty; expected at least one sample with a label"),
        ([("1.png", b""), ("1.cls", b"1")], "no image of the dataset can be read; the first error: .*x.tar: 1: not a"),
    ],
)
def test_what_would_be_lost_in_a_tar_file_is_refused(webdataset, tmp_path, files, message):
    source = write_tar(tmp_path / "x.tar", files)
    with pytest.raises(ValueError, match=message):
        write_beton(source, tmp_path / "x.beton", skip_unreadable=True, progress=False)
    assert not (tmp_path / "x.beton").exists()


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.GNUTYPE_SPARSE], ids=["large", "sparse"])
def test_a_small_tar_file_that_would_fill_the_memory_is_refused(webdataset, tmp_path, kind):
    info = tarfile.TarInfo("1.png")
    info.type, info.size = kind, 1 << 40 if kind == tarfile.REGTYPE else 0
    with open(tmp_path / "x.tar", "wb") as file:
        file.write(info.tobuf(tarfile.GNU_FORMAT))
        file.truncate(512 + info.size + 10240)  # takes no space on the disk
    with pytest.raises(ValueError, match="1.png is sparse, or has more than 1,073,741,824 bytes"):
        write_beton(str(tmp_path / "x.tar"), tmp_path / "x.beton", progress=False)


def test_labels_without_an_image_are_said(webdataset, tmp_path):
    source = write_tar(tmp_path / "x.tar", sample("1", 10, 1) + sample("2", 20, 3))
    write_beton(source, tmp_path / "x.beton", progress=False)
    with pytest.warns(UserWarning, match="no image of 2 of 4 classes: label 0, label 2$"):
        create_loader(tmp_path / "x.beton", training=True, batch_size=2)


@pytest.mark.parametrize("name", ["pipe:touch made; cat x.tar", "http:x.tar", "a %20?#[b]*\n.tar", "file:a{0..2}.tar"])
def test_the_name_of_a_tar_file_is_taken_literally(webdataset, tmp_path, monkeypatch, name):
    write_tar(tmp_path / name, sample("1", 10, 1) + sample("2", 20, 0))
    monkeypatch.chdir(tmp_path)
    beton = write_beton(name, tmp_path / "x.beton", progress=False)
    assert beton.labels.tolist() == [1, 0] and not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1 is no name"),
        (b"a\n\nb\n", "line 2 is no name"),
        (b"a\nb\t\n", "line 2 is no name"),
        (b"a\nb\xc2\x85c\n", "line 2 is no name"),
        ("é\n".encode("latin-1"), "is not UTF-8"),
        ("é\ne\u0301\n".encode(), "look equal"),
    ],
)
def test_a_line_of_classes_that_is_no_name_is_refused(webdataset, tmp_path, capsys, content, message):
    source, names = write_tar(tmp_path / "x.tar", sample("1", 10, 1)), tmp_path / "names.txt"
    names.write_bytes(content)
    assert main(["beton", source, str(tmp_path / "x.beton"), "--classes", str(names), "--quiet"]) == 2
    assert message in capsys.readouterr().err
    names.write_bytes(b"\xef\xbb\xbfa\r\nb\r\n")
    assert main(["beton", source, str(tmp_path / "x.beton"), "--classes", str(names), "--quiet"]) == 0
    assert json.loads((tmp_path / "x.beton.json").read_text())["classes"] == ["a", "b"]


def test_class_names_are_those_of_the_file_and_enough(webdataset, tmp_path, capsys):
    source, names = write_tar(tmp_path / "x.tar", sample("1", 10, 1)), tmp_path / "names.txt"
    arguments = ["beton", source, str(tmp_path / "x.beton"), "--classes", str(names), "--quiet"]
    for text, message in (("cat\n", "x.tar: 1: label 1; expected 0 to 0"), ("a\na\n", "distinct string for each")):
        names.write_text(text)
        assert main(arguments) == 2 and message in capsys.readouterr().err
    names.write_text("cat\ngroßer Hund\n", encoding="utf-8")
    assert main(arguments) == 0
    assert json.loads((tmp_path / "x.beton.json").read_text())["classes"] == ["cat", "großer Hund"]


def test_class_names_replace_those_of_a_folder_but_do_not_change_their_order(folder, tmp_path):
    with pytest.raises(ValueError, match="classes: dog has another label in the source, whose classes are cat, dog, e"):
        write_beton(folder, tmp_path / "x.beton", classes=["dog", "cat", "eel"], progress=False)
    beton = write_beton(folder, tmp_path / "x.beton", classes=["cat", "hound", "moray"], progress=False)
    assert beton.classes == ["cat", "hound", "moray"]


def test_a_source_that_there_is_not_is_one_sentence(datasets, webdataset, folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "data").mkdir()
    table(datasets, [png(1)], [0]).remove_columns("label").to_parquet(tmp_path / "data/train.parquet")
    for source, message in (
        (f"hf:{tmp_path}/none:train", "cannot be loaded ("),
        (f"hf:{tmp_path}/data:test", "cannot be loaded ("),
        ("hf:nobody/nothing:train", "cannot be loaded ("),
        ("hf:cifar10", "expected hf:NAME:SPLIT, such as hf:cifar10:train"),
        (f"hf:{tmp_path}/data:train", "expected a column of images and one of classes; found picture"),
        (f"{tmp_path}/none-{{0..2}}.tar", "none-0.tar"),
    ):
        assert main(["beton", source, str(tmp_path / "x.beton"), "--quiet"]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("error: ") and message in error
    for library, source in (("datasets", "hf:cifar10:train"), ("webdataset", "x.tar")):
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(ImportError, match="needs a library .*: pip install datasets webdataset"):
            write_beton(source, tmp_path / "x.beton", progress=False)


def test_columns_that_are_not_read_are_told(datasets, tmp_path):
    (tmp_path / "data").mkdir()
    rows = table(datasets, [png(5)], [1], ["a", "b"])
    rows = rows.add_column("coarse", [0]).cast_column("coarse", datasets.ClassLabel(names=["c"]))
    rows.to_parquet(tmp_path / "data/train.parquet")
    with pytest.warns(UserWarning, match="picture and label are read, of the columns label, picture, coarse"):
        beton = write_beton(f"hf:{tmp_path}/data:train", tmp_path / "x.beton", progress=False)
    assert beton.labels.tolist() == [1] and beton.classes == ["a", "b"]


def test_the_memory_does_not_grow_with_a_tar_file(webdataset, tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (100, 100, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG")
    peaks = []
    for count in (50, 400):
        files = [part for i in range(count) for part in ((f"{i}.png", buffer.getvalue()), (f"{i}.cls", b"0"))]
        source = write_tar(tmp_path / f"{count}.tar", files)
        tracemalloc.start()
        write_beton(source, tmp_path / f"{count}.beton", workers=2, progress=False)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 2e6  # the images have 12 MB
