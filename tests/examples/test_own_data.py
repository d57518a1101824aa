"""Detection and segmentation of one's own images: a short run, weights that load, and every problem of the data."""

import json
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("torchmetrics", reason="pip install vilonghorn[downstream]")
pytest.importorskip("pycocotools", reason="pip install vilonghorn[downstream]")
pytest.importorskip("segmentation_models_pytorch", reason="pip install vilonghorn[downstream]")
TURNED = 6  # EXIF orientation: a quarter turn


@pytest.fixture
def scenes(script, tmp_path):
    """Folders and COCO files of four scenes to train on and two held out, in which category ids have gaps."""
    folder = tmp_path / "scenes"
    script("examples/scenes").main([str(folder), "--train", "4", "--val", "2", "--side", "64"])
    for split in ("train", "val"):
        edit(folder / f"{split}.json", lambda coco: [renumber(coco), coco["annotations"][0].update(iscrowd=1)])
    return folder


def edit(file, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def renumber(coco):
    for category in coco["categories"]:
        category["id"] = 90 - 7 * category["id"]
    for annotation in coco["annotations"]:
        annotation["category_id"] = 90 - 7 * annotation["category_id"]


def save_turned(path, size):
    exif = Image.Exif()
    exif[0x0112] = TURNED
    Image.new("RGB", size).save(path, exif=exif)


def gray_of_4_bits(side) -> bytes:
    """A PNG file of zeros, which Pillow cannot write."""
    rows = zlib.compress(bytes((1 + side // 2) * side))
    parts = [(b"IHDR", struct.pack(">IIBBBBB", side, side, 4, 0, 0, 0, 0)), (b"IDAT", rows), (b"IEND", b"")]
    chunks = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def refused(main, arguments, capsys) -> list[str]:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    return capsys.readouterr().err.splitlines()


def arguments(folder, annotations, out, *more):
    data = [str(folder / name.format(split)) for split in ("train", "val") for name in ("{}", annotations)]
    brief = ["--epochs", "1", "--batch", "4", "--size", "64", "--no-flip"]
    return ["--train", *data[:2], "--val", *data[2:], "--out", str(out), *brief, *more]


def test_a_detector_trains_on_a_coco_file_and_is_loaded(script, scenes, tmp_path, capsys):
    edit(
        scenes / "train.json",
        lambda coco: (
            coco["annotations"].clear()
            or coco["annotations"].append(dict(id=1, image_id=1, category_id=90, bbox=[-0.5, 3, 30, 61.5]))
        ),
    )  # rounded, and images without boxes
    Image.new("CMYK", (64, 64)).save(scenes / "train" / "00002.png.jpg")
    edit(scenes / "train.json", lambda coco: coco["images"][2].update(file_name="00002.png.jpg"))
    detect = script("examples/detect_coco")
    score = detect.main(arguments(scenes, "{}.json", tmp_path / "out"))
    assert 0 <= score <= 1 and f"mAP {score:.3f}, mAP at IoU 0.5" in capsys.readouterr().out
    model, names = detect.load(tmp_path / "out" / "weights.safetensors")
    assert names == dict(enumerate("9876543210", 1)) and not model.training
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["weights.safetensors"]
    with pytest.raises(SystemExit):
        detect.main(arguments(scenes, "{}.json", tmp_path / "out"))


def test_labels_and_boxes_are_those_of_the_file_and_crowds_are_marked(script, scenes):
    coco_boxes = script("examples/coco_boxes")
    content, problems = coco_boxes.read_coco(scenes / "val", scenes / "val.json")
    image, target = coco_boxes.CocoBoxes(scenes / "val", content, [])[0]
    expected = script("examples/scenes").DigitScenes(2, 64, train=False)[0]
    assert problems == [] and torch.equal(target["boxes"], expected.boxes)
    assert target["labels"].tolist() == (10 - expected.labels).tolist()
    assert target["iscrowd"].tolist() == [1] + [0] * (len(expected.labels) - 1)
    assert (image - expected.image).abs().max() < 1 / 255


def test_every_problem_of_a_coco_file_is_listed(script, scenes, tmp_path, capsys):
    def damage(coco):
        coco["annotations"] = [
            dict(id=n, image_id=0, category_id=90, bbox=box)
            for n, box in enumerate([[1, 1, 0, 5], [1, 1, 5, -2], [60, 1, 9, 9], "1155", [float("nan"), 1, 5, 5]])
        ]
        coco["annotations"] += [dict(id=9, image_id=n, category_id=n, bbox=[1, 1, 5, 5]) for n in (0, 77)]
        coco["images"][1]["width"] = 63
        coco["images"][2]["file_name"] = "gone.png"
        coco["images"][3] |= dict(file_name="turned.jpg", width=64, height=32)

    save_turned(scenes / "train" / "turned.jpg", (64, 32))
    edit(scenes / "train.json", damage)
    edit(scenes / "val.json", lambda coco: coco["images"][0].pop("file_name"))
    main = script("examples/detect_coco").main
    said = refused(main, arguments(scenes, "{}.json", tmp_path / "out"), capsys)
    expected = [
        "annotations: id 9 is there 2 times",
        "gone.png: there is no such file",
        "00001.png has 64x64 pixels, but the file says (63, 64)",
        "turned.jpg has 32x64 pixels, but the file says (64, 32), which its EXIF orientation turns",
        "annotation 0: bbox is [1, 1, 0, 5], expected [left, top, width, height]",
        "annotation 1: bbox is [1, 1, 5, -2]",
        "annotation 2: bbox is [60, 1, 9, 9], beyond its image of 64x64 pixels",
        "annotation 3: bbox is 1155, expected",
        "annotation 4: bbox is [nan, 1, 5, 5], expected",
        "annotation 9: its category_id 0 is not the id of a category",
        "annotation 9: its image_id 77 is not the id of an image",
        "annotation 9: its category_id 77 is not",
        "val.json: images[0] has no file_name",
        "error: 13 problem(s) in the data; nothing was trained",
    ]
    assert len(said) == len(expected) and all(part in line for part, line in zip(expected, said))
    (scenes / "val.json").write_text("[1")
    assert "val.json: not a COCO file" in refused(main, arguments(scenes, "{}.json", tmp_path / "out"), capsys)[-2]
    gone = arguments(scenes, "no-{}.json", tmp_path / "out")
    assert refused(main, gone, capsys)[-1].endswith(f"no {scenes}/no-train.json; there is no {scenes}/no-val.json")


CLASSES = ["--classes", "background", *"0123456789"]


def test_a_segmenter_trains_on_palettes_and_is_loaded(script, scenes, tmp_path, capsys):
    for path in (scenes / "train_masks").iterdir():
        mask = Image.fromarray(np.asarray(Image.open(path)), "P")
        mask.putpalette(list(range(255, -1, -1)) * 3)
        mask.save(path)
    Image.new("L", (64, 64), 255).save(scenes / "train_masks" / "00000.png")
    save_turned(scenes / "val" / "turned.jpg", (50, 34))
    Image.new("1", (34, 50), 1).save(scenes / "val_masks" / "turned.png")
    segment = script("examples/segment_masks")
    score = segment.main(arguments(scenes, "{}_masks", tmp_path / "out", *CLASSES))
    assert 0 <= score <= 1 and f"mean IoU {score:.3f} on 3 images" in capsys.readouterr().out
    model, names = segment.load(tmp_path / "out" / "weights.safetensors")
    assert names == CLASSES[1:] and not model.training
    with torch.no_grad():
        assert model(torch.rand(1, 3, 50, 35)).shape == (1, 11, 50, 35)


def test_ignored_pixels_are_neither_learned_nor_measured(script):
    segment, draw = script("examples/segment_masks"), torch.Generator().manual_seed(0)
    logits = torch.randn(1, 3, 4, 4, generator=draw)
    mask = torch.randint(0, 2, (4, 4), generator=draw, dtype=torch.uint8)
    mask[0] = 255
    kept = torch.nn.functional.cross_entropy(logits[:, :, 1:], mask[None, 1:].long())
    assert torch.allclose(segment.cross_entropy(logits, mask[None]), kept)
    assert segment.cross_entropy(logits, torch.full((1, 4, 4), 255)) == 0
    found, true = logits[:, :2].argmax(1)[0, 1:], mask[1:]
    data = [(torch.zeros(3, 4, 4), mask)]
    two = torch.cat([logits[:, :2], torch.full((1, 1, 4, 4), -99.0)], 1)
    scores = segment.evaluate(lambda images: two, data, 4, 3, torch.device("cpu"))
    expected = [((found == c) & (true == c)).sum() / ((found == c) | (true == c)).sum() for c in range(2)]
    assert scores[:2].tolist() == pytest.approx([float(value) for value in expected]) and scores[2].isnan()


def test_every_problem_of_the_masks_is_listed(script, scenes, tmp_path, capsys):
    masks = scenes / "train_masks"
    (masks / "00000.png").rename(masks / "other.png")
    Image.new("RGB", (64, 64)).save(masks / "00001.png")
    Image.new("L", (64, 63), 200).save(masks / "00002.png")
    save_turned(scenes / "train" / "turned.jpg", (50, 34))
    Image.new("L", (50, 34)).save(masks / "turned.png")
    for name in ("00003.jpg", "bits.png"):
        Image.new("L", (64, 64)).save(scenes / "train" / name)
    (masks / "bits.png").write_bytes(gray_of_4_bits(64))
    (scenes / "train" / "half.png").write_bytes(gray_of_4_bits(64))
    (masks / "half.png").write_bytes(gray_of_4_bits(64)[:60])
    Image.new("L", (64, 64)).save(masks / "half.PNG", "PNG")
    Image.new("L", (64, 63)).save(scenes / "val_masks" / "00001.png")
    main = script("examples/segment_masks").main
    said = refused(main, arguments(scenes, "{}_masks", tmp_path / "out", *CLASSES), capsys)
    expected = [
        f"{scenes}/train/00000.png: there is no mask {masks}/00000.png",
        f"{masks}/other.png: there is no image of this name",
        "train: 2 files are named 00003; expected one",
        "train_masks: 2 files are named half; expected one",
        "00001.png: a mask of mode RGB, expected gray or a palette: write one channel of class numbers",
        "00002.png: class number(s) 200; expected 0 to 10, or 255",
        "bits.png: a gray mask of 4 bits, expected 8 or 16",
        "half.png: not a readable PNG file",
        "turned.png: 50x34 pixels, but",
        "val_masks/00001.png: 64x63 pixels, but",
        "error: 10 problem(s) in the data; nothing was trained",
    ]
    assert len(said) == len(expected) and all(part in line for part, line in zip(expected, said))
