"""Ways in which a `.beton` can be damaged or unusual, and what its check or its loader says of it."""

import os
import shutil
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from vilonghorn.data import Beton, check_beton, create_loader
from vilonghorn.data.beton import format as fmt


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def table_at(path: Path) -> int:
    return int(np.fromfile(path, fmt.HEADER, 1)[0]["table"])


def decode(beton: Beton, index: int) -> np.ndarray:
    """The pixels (H, W, 3) of a sample, by PIL."""
    image = beton.images[index]
    data = np.fromfile(beton.path, np.uint8, int(beton.sizes[index]), offset=int(image["data_ptr"]))
    if image["mode"] == fmt.MODES["raw"]:
        return data.reshape(image["height"], image["width"], 3)
    return np.asarray(Image.open(BytesIO(data)))


def set_sample(path: Path, index: int, **values: int) -> None:
    """Changes the metadata of one sample."""
    at = fmt.TABLES_AT + index * fmt.SAMPLE.itemsize
    row = np.fromfile(path, fmt.SAMPLE, 1, offset=at)
    for name, value in values.items():
        (row if name == "label" else row["image"])[name] = value
    overwrite(path, at, row.tobytes())


def fill_image(path: Path, index: int, start: float, stop: float, byte: bytes = b"\0") -> None:
    """Overwrites a fraction of the data of an image."""
    beton = check_beton(path)
    at, size = int(beton.images["data_ptr"][index]), int(beton.sizes[index])
    first, last = int(size * start), int(size * stop)
    overwrite(path, at + first, byte * (last - first))


def swap_images(path: Path) -> None:
    """Gives samples 3 and 4 each other's data and sizes, but not their widths and heights."""
    samples = np.fromfile(path, fmt.SAMPLE, 5, offset=fmt.TABLES_AT)
    regions = np.fromfile(path, fmt.REGION, -1, offset=table_at(path))
    a, b = (int(np.flatnonzero(regions["sample_id"] == i)[0]) for i in (3, 4))
    regions["sample_id"][[a, b]] = 4, 3
    overwrite(path, table_at(path), regions.tobytes())
    for index, other in ((3, 4), (4, 3)):
        set_sample(path, index, data_ptr=int(samples["image"]["data_ptr"][other]))


def turn_to_line(path: Path) -> None:
    """Makes a raw image one pixel wide, as FFCV's own writer would write such an image."""
    row = check_beton(path).images[2]
    set_sample(path, 2, width=1, height=int(row["width"]) * int(row["height"]))


# What `check_beton` refuses, by name: kind of file, damage, message.
REFUSED: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "an empty file": ("jpg", lambda p: p.write_bytes(b""), "not a .beton file of version 2: an empty file"),
    "a picture": ("jpg", lambda p: p.write_bytes(b"\xff\xd8\xff\xe0" + bytes(4000)), "not a .beton file"),
    "cut off in the header": ("jpg", lambda p: os.truncate(p, 30), "damaged .beton"),
    "something behind the end": ("raw", lambda p: overwrite(p, p.stat().st_size, bytes(24)), "its size is .* bytes"),
    "left by a killed writer": ("jpg", lambda p: overwrite(p, 16, bytes(8)), "unfinished"),
    "no samples": ("jpg", lambda p: overwrite(p, 8, bytes(8)), "no sample"),
    "an unknown field": ("jpg", lambda p: overwrite(p, fmt.HEADER.itemsize, b"\x07"), "not an RGB image"),
    "a negative label": ("jpg", lambda p: set_sample(p, 2, label=-1), "negative label"),
    "a large label": ("jpg", lambda p: set_sample(p, 2, label=2**24), "label 16777216"),
    "an image of no width": ("jpg", lambda p: set_sample(p, 2, width=0), "empty image"),
    "an unknown mode": ("jpg", lambda p: set_sample(p, 2, mode=9), "unknown mode"),
    "an image elsewhere": ("jpg", lambda p: set_sample(p, 2, data_ptr=2**50), "sample 2 .*another position"),
    "a raw image too large": ("raw", lambda p: set_sample(p, 2, width=9999), "not 3 x width x height"),
    "an enormous JPEG": (
        "jpg",
        lambda p: set_sample(p, 2, width=65535, height=65535),
        "sample 2 .*65535x65535 pixels.*too few bytes",
    ),
}
# What only decoding finds, or what is unusual and read: kind of file, damage, what `read_all` says.
DECODED: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "a JPEG without header": ("jpg", lambda p: fill_image(p, 2, 0, 0.2), "sample 2: its JPEG data are damaged"),
    "a JPEG without body": ("jpg", lambda p: fill_image(p, 2, 0.6, 1), "sample 2: its JPEG data are damaged"),
    "a JPEG of 0xff": ("jpg", lambda p: fill_image(p, 2, 0, 1, b"\xff"), "sample 2: its JPEG data are damaged"),
    "a JPEG of another size": ("jpg", swap_images, "sample 3: its JPEG"),
    "an image of one column": ("raw", turn_to_line, "27 samples"),
    "nothing": ("jpg", lambda p: None, "27 samples"),
}


def read_all(path: Path, **options) -> str:
    """Reads a file as training and evaluation do. Returns how many samples it had, or its error."""
    try:
        for training in (False, True):
            loader = create_loader(path, batch_size=9, image_size=16, training=training, **options)
            count = sum(len(targets) for images, targets in loader.epoch(0) if bool(images.isfinite().all()))
        return f"{count} samples"
    except (ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"


def damaged_copy(source: Path, folder: Path, damage: Callable[[Path], None]) -> Path:
    """A damaged copy without its manifest."""
    path = Path(shutil.copy(source, folder / "copy.beton"))
    damage(path)
    return path
