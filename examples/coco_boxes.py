"""Reads and checks COCO files of boxes for torchvision's detectors.

Boxes are [left, top, width, height] in pixels of the upright photograph: `read_image` turns it as its EXIF orientation
says. `width` and `height` in the file must be those of the upright photograph, too, which shows most files whose boxes
are of the stored pixels. (torchvision's CocoDetection does not turn photographs; pycocotools reads no images.)
Category ids may have gaps, and images may have no boxes.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import common
import torch
from torch import nn
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

from vilonghorn import read_image

KEYS = {  # that are read
    "images": ("id", "file_name", "width", "height"),
    "annotations": ("id", "image_id", "category_id", "bbox"),
    "categories": ("id", "name"),
}


def read_coco(folder: Path, file: Path) -> tuple[dict[str, list[dict]], list[str]]:
    """The content of a COCO file, and all problems of it and of its images in `folder`."""
    try:
        content = json.loads(file.read_bytes())
        entries = [(f"{kind}[{i}]", kind, entry) for kind in KEYS for i, entry in enumerate(content[kind])]
        problems = [f"{name} has no {key}" for name, kind, entry in entries for key in KEYS[kind] if key not in entry]
        problems = problems or list(find_problems(folder, content))
    except (KeyError, TypeError, ValueError, OSError) as error:
        content, problems = {}, [f"not a COCO file with images, annotations and categories ({error!r})"]
    return content, [f"{file}: {problem}" for problem in problems]


def find_problems(folder: Path, content: dict[str, list[dict]]) -> Iterator[str]:
    for kind, key in (("images", "id"), ("images", "file_name"), ("annotations", "id"), ("categories", "id")):
        counts = Counter(entry[key] for entry in content[kind])
        yield from (f"{kind}: {key} {value} is there {n} times" for value, n in counts.items() if n > 1)
        if not counts:
            yield f"there are no {kind}"
    images = {image["id"]: image for image in content["images"]}
    paths = {number: folder / image["file_name"] for number, image in images.items()}
    sizes, unread = common.check(lambda path: read_image(path).size, list(paths.values()))
    yield from unread
    for number, image in images.items():
        given, found = (image["width"], image["height"]), sizes.get(paths[number])
        if found and given != found:
            turned = ", which its EXIF orientation turns: write image and boxes upright" * (given == found[::-1])
            yield f"{image['file_name']} has {found[0]}x{found[1]} pixels, but the file says {given}{turned}"
    names = {category["id"] for category in content["categories"]}
    for annotation in content["annotations"]:
        name, box = f"annotation {annotation['id']}", annotation["bbox"]
        if annotation["image_id"] not in images:
            yield f"{name}: its image_id {annotation['image_id']} is not the id of an image"
        if annotation["category_id"] not in names:
            yield f"{name}: its category_id {annotation['category_id']} is not the id of a category"
        numbers = box if isinstance(box, list) and all(isinstance(value, int | float) for value in box) else []
        size = sizes.get(paths.get(annotation["image_id"]))
        if len(numbers) != 4 or not all(map(math.isfinite, numbers)) or min(numbers[2:]) <= 0:
            yield f"{name}: bbox is {box}, expected [left, top, width, height], the last two above 0"
        elif size:
            beyond = max(-box[0], -box[1], box[0] + box[2] - size[0], box[1] + box[3] - size[1])
            if beyond > 1 or beyond >= min(box[2:]):  # 1 pixel may come from rounding
                yield f"{name}: bbox is {box}, beyond its image of {size[0]}x{size[1]} pixels"


class CocoBoxes(Dataset):
    """Images (3, H, W) float32 from 0 to 1, and targets: `boxes` (n, 4) xyxy, `labels` (n,) from 1, `iscrowd` (n,).

    Category ids need not be 0..N: label i + 1 is the i-th of the sorted ids.
    """

    def __init__(self, folder: Path, content: dict[str, list[dict]], augment: list[nn.Module]) -> None:
        self.folder, self.images, self.annotations = folder, content["images"], defaultdict(list)
        for annotation in content["annotations"]:
            self.annotations[annotation["image_id"]].append(annotation)
        self.labels = {number: label for label, number in enumerate(class_names(content), 1)}
        finish = [v2.ToDtype(torch.float32, scale=True), v2.ConvertBoundingBoxFormat("XYXY"), v2.ClampBoundingBoxes()]
        self.transform = v2.Compose([*augment, *finish])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        info = self.images[index]
        image = tv_tensors.Image(v2.functional.pil_to_tensor(read_image(self.folder / info["file_name"])))
        found = self.annotations.get(info["id"], [])
        boxes = torch.tensor([a["bbox"] for a in found], dtype=torch.float32).reshape(-1, 4)
        target = {
            "boxes": tv_tensors.BoundingBoxes(boxes, format="XYWH", canvas_size=image.shape[-2:]),
            "labels": torch.tensor([self.labels[a["category_id"]] for a in found], dtype=torch.int64),
            "iscrowd": torch.tensor([a.get("iscrowd", 0) for a in found], dtype=torch.int64),
        }
        return self.transform(image, target)


def class_names(content: dict[str, list[dict]]) -> dict[int, str]:
    """Category id to name, in the order of the ids."""
    return dict(sorted((category["id"], category["name"]) for category in content["categories"]))


def collate(samples: list) -> tuple[list, list]:
    return tuple(map(list, zip(*samples)))
