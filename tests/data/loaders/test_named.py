"""Data sets of Hugging Face and WebDataset are read as the folder of the same images."""

import io
import pickle
import sys
import tarfile

import pytest
import torch

from vilonghorn.data import create_loader
from vilonghorn.data.images import ImageFolder
from vilonghorn.engine import load_config
from vilonghorn.engine.config_file import find_config
from vilonghorn.engine.loaders import build_loader

OPTIONS = {"batch_size": 8, "image_size": 16, "workers": 0}


def write_shards(data: ImageFolder, folder, labelled: bool = True) -> None:
    """Three tar files as WebDataset writes them."""
    folder.mkdir()
    for shard in range(3):
        with tarfile.open(folder / f"train-{shard:04d}.tar", "w") as tar:
            for index in range(len(data))[shard * 9 : shard * 9 + 9]:
                parts = {"PNG": open(data.paths[index], "rb").read(), "json": b"{}"}
                for extension, content in (parts | {"cls": b"%d" % data.labels[index]} if labelled else parts).items():
                    info = tarfile.TarInfo(f"a/{index:05d}.{extension}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))


def write_table(datasets, data: ImageFolder, folder, kind: str, names: list[str] | None) -> str:
    label = datasets.ClassLabel(names=names) if names else datasets.Value("int64")
    features = datasets.Features({"label": label, "picture": datasets.Image()})
    images = [{"path": path, "bytes": open(path, "rb").read()} for path in data.paths]
    names = names or data.classes
    labels = [names.index(data.classes[label]) for label in data.labels]
    table = datasets.Dataset.from_dict({"label": labels, "picture": images}, features)
    if kind == "saved":
        datasets.DatasetDict({"train": table}).save_to_disk(folder)
    else:
        folder.mkdir()
        table.to_parquet(folder / "train-0.parquet")
    return f"hfds/{folder}:train"


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    """Hugging Face's library, if it is installed, with a cache of its own and without a network."""
    library = pytest.importorskip("datasets")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(library.config, "HF_HUB_OFFLINE", True)
    return library


def write(kind: str, data: ImageFolder, folder, request) -> str:
    if kind == "wds":
        write_shards(data, folder)
        return f"wds/{folder}/train-*.tar"
    datasets = request.getfixturevalue("datasets")
    if kind == "imagefolder":
        return f"hfds/{data.path}:train"
    return write_table(datasets, data, folder, kind, None if kind == "numbers" else ["eel", "dog", "cat"])


@pytest.mark.filterwarnings("ignore:.*the center crop shows")
@pytest.mark.parametrize("kind", ["wds", "saved", "parquet", "numbers", "imagefolder"])
def test_batches_are_those_of_the_folder(folder, tmp_path, kind, request):
    data = ImageFolder(folder)
    source, names = write(kind, data, tmp_path / "data", request), kind in ("saved", "parquet", "imagefolder")
    for training in (False, True):
        same = {"training": training, **OPTIONS, "rank": 1, "world_size": 2}
        loader = create_loader(source, **same, classes=data.classes if names else None)
        assert loader.num_classes == 3 and loader.class_names == (data.classes if names else ["0", "1", "2"])
        for (images, labels), (expected, targets) in zip(
            loader.epoch(2), create_loader(folder, **same).epoch(2), strict=True
        ):
            assert torch.equal(images, expected) and torch.equal(labels, targets)
    image, label = pickle.loads(pickle.dumps(loader.data))[26]  # as a reading process that is not forked
    assert image == data[26][0] and loader.data.labels[26] == label
    unlabelled = create_loader(source, training=False, labelled=False, **OPTIONS)
    assert unlabelled.num_classes == 0 and unlabelled.class_names is None
    assert torch.equal(next(unlabelled.epoch(0))[1], torch.zeros(8, dtype=torch.int64))


@pytest.mark.filterwarnings("ignore:.*the center crop shows")
@pytest.mark.parametrize("part, kept", [("[-30%:]", slice(19, None)), ("[:4]+train[20:]", [*range(4), *range(20, 27)])])
def test_a_part_of_a_split_is_read(datasets, folder, tmp_path, part, kept):
    data = ImageFolder(folder)
    source = write_table(datasets, data, tmp_path / "data", "parquet", data.classes)
    loader = create_loader(source + part, training=False, classes=data.classes, **OPTIONS)
    assert loader.data.labels.tolist() == data.labels[kept].tolist()


def test_a_run_takes_names_and_says_which_there_are(folder, tmp_path):
    write_shards(ImageFolder(folder), tmp_path / "data")
    config = load_config(find_config("photos"), f"--data.train=wds/{tmp_path}/data", "--data.val=tfds/x")
    assert build_loader(config, "cpu", training=True).num_samples == 27
    with pytest.raises(FileNotFoundError, match="data.val is tfds/x, .* hfds/NAME:SPLIT or wds/FILES"):
        build_loader(config, "cpu", training=False)


@pytest.mark.parametrize("workers", [0, 2])
def test_shards_are_read_as_webdataset_reads_them(folder, tmp_path, workers):
    webdataset = pytest.importorskip("webdataset")
    write_shards(ImageFolder(folder), tmp_path / "data")
    urls = sorted(map(str, (tmp_path / "data").glob("*.tar")))
    samples = [*webdataset.WebDataset(urls, shardshuffle=False).decode("pil").to_tuple("png", "cls")]
    loader = create_loader(f"wds/{tmp_path}/data", training=False, **OPTIONS | {"workers": workers})
    assert torch.cat([labels for _, labels in loader.epoch(0)]).tolist() == [label for _, label in samples]
    assert all(image == loader.data[i][0] for i, (image, _) in enumerate(samples))


def test_what_cannot_be_read_is_refused_in_a_sentence(folder, tmp_path, monkeypatch):
    write_shards(ImageFolder(folder), tmp_path / "bare", labelled=False)
    (tmp_path / "bad.tar").write_bytes(b"\x1f\x8b" + bytes(600))
    (tmp_path / "empty").mkdir()
    tarfile.open(tmp_path / "empty/x.tar", "w").close()
    for source, message, kind in (
        (f"wds/{tmp_path}/none-*.tar", "no such tar files; expected wds/FOLDER", FileNotFoundError),
        (f"wds/{tmp_path}/bad.tar", "bad.tar: not a tar file of WebDataset", ValueError),
        (f"wds/{tmp_path}/empty", "expected images, each with a label", ValueError),
        (f"wds/{tmp_path}/bare", r"each with a label from 0; found labels \[None\]", ValueError),
    ):
        with pytest.raises(kind, match=message) as raised:
            create_loader(source, training=False, **OPTIONS)
        assert "\n" not in str(raised.value)
    (bare := next((tmp_path / "bare").iterdir())).write_bytes(bare.read_bytes()[:2000])
    with pytest.raises(ValueError, match="not a tar file .*unexpected end of data"):
        create_loader(f"wds/{bare}", training=False, labelled=False, **OPTIONS)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="needs the library datasets .*: pip install datasets"):
        create_loader("hfds/cifar10:train", training=False, **OPTIONS)


def test_a_data_set_that_there_is_not_and_a_damaged_image_are_named(folder, tmp_path, datasets):
    data = ImageFolder(folder)
    table = write_table(datasets, data, tmp_path / "data", "parquet", data.classes)
    for source in (
        f"hfds/{tmp_path}/none:train",
        table.replace(":train", ":test"),
        "hfds/nobody/nothing:train",
        "hfds/x",
    ):
        with pytest.raises(ValueError, match=f"{source}: expected hfds/NAME:SPLIT, .*"):
            create_loader(source, training=False, **OPTIONS)
    image = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    bad = datasets.Dataset.from_dict({"image": [None, None], "label": [3, -1]}, image)
    datasets.DatasetDict({"val": bad}).save_to_disk(tmp_path / "negative")
    with pytest.raises(ValueError, match=r"each with a label from 0; found labels \[-1\]"):
        create_loader(f"hfds/{tmp_path}/negative:val", training=False, **OPTIONS)
    for name, rows in {"torn": {"image": [b"x"], "label": [0]}, "none": {"image": [None], "label": [0]}}.items():
        rows["image"] = [value and {"bytes": value, "path": None} for value in rows["image"]]
        datasets.DatasetDict({"val": datasets.Dataset.from_dict(rows, image)}).save_to_disk(tmp_path / name)
        with pytest.raises(ValueError, match="sample 0: hfds/.*:val: not a readable image"):
            next(create_loader(f"hfds/{tmp_path}/{name}:val", training=False, **OPTIONS).epoch(0))
