"""Ways in which a `.beton` can be damaged or strange, and a reader of one in a process that a watchdog can end."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from vilonghorn.data import check_beton, create_loader
from vilonghorn.data.beton import format as fmt

LIMIT = 300  # seconds; imports take some, on a busy machine many, and a file less than one
BATCH = 4


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def table_at(path: Path) -> int:
    return int(np.fromfile(path, fmt.HEADER, 1)[0]["table"])


def set_sample(path: Path, index: int, **values: int) -> None:
    """Changes the metadata of one sample."""
    at = fmt.TABLES_AT + index * fmt.SAMPLE.itemsize
    row = np.fromfile(path, fmt.SAMPLE, 1, offset=at)
    for name, value in values.items():
        (row if name == "label" else row["image"])[name] = value
    overwrite(path, at, row.tobytes())


def image_at(path: Path, index: int) -> tuple[int, int]:
    """Offset and size in bytes of the data of an image."""
    beton = check_beton(path)
    return int(beton.images["data_ptr"][index]), int(beton.sizes[index])


def fill_image(path: Path, index: int, start: float, stop: float, byte: bytes = b"\0") -> None:
    """Overwrites a share of the data of an image."""
    at, size = image_at(path, index)
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


# Name: (kind of file, what is done to it, what its reader has to say of it)
DAMAGE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "an empty file": (
        "jpg",
        lambda p: p.write_bytes(b""),
        "BetonError: .*not a .beton file of version 2: an empty file",
    ),
    "a text": ("jpg", lambda p: p.write_text("hello"), "BetonError: .*not a .beton file"),
    "a picture": ("jpg", lambda p: p.write_bytes(b"\xff\xd8\xff\xe0" + bytes(4000)), "BetonError: .*not a .beton file"),
    "cut off in the header": ("jpg", lambda p: os.truncate(p, 30), "BetonError: .*damaged .beton"),
    "cut off in the metadata": ("jpg", lambda p: os.truncate(p, fmt.TABLES_AT + 99), "BetonError: .*damaged .beton"),
    "cut off in the images": ("jpg", lambda p: os.truncate(p, table_at(p) - 999), "BetonError: .*damaged .beton"),
    "cut off in the table": ("jpg", lambda p: os.truncate(p, os.path.getsize(p) - 7), "BetonError: .*damaged .beton"),
    "left by a killed writer": ("jpg", lambda p: overwrite(p, 16, bytes(8)), "BetonError: .*unfinished"),
    "no samples": ("jpg", lambda p: overwrite(p, 8, bytes(8)), "BetonError: .*no sample"),
    "an unknown field": ("jpg", lambda p: overwrite(p, fmt.HEADER.itemsize, b"\x07"), "BetonError: .*not an RGB image"),
    "a name not in ASCII": ("jpg", lambda p: overwrite(p, fmt.HEADER.itemsize + 3, b"\xd3"), "BetonError: .*in ASCII"),
    "a negative label": ("jpg", lambda p: set_sample(p, 2, label=-1), "BetonError: .*negative label"),
    "an enormous label": ("jpg", lambda p: set_sample(p, 2, label=2**40), "BetonError: .*label 1099511627776"),
    "an image of no width": ("jpg", lambda p: set_sample(p, 2, width=0), "BetonError: .*empty image"),
    "an unknown mode": ("jpg", lambda p: set_sample(p, 2, mode=9), "BetonError: .*unknown mode"),
    "an image elsewhere": (
        "jpg",
        lambda p: set_sample(p, 2, data_ptr=2**50),
        "BetonError: .*sample 2 .*another position",
    ),
    "a raw image too large": ("raw", lambda p: set_sample(p, 2, width=9999), "BetonError: .*not 3 x width x height"),
    "a JPEG without header": (
        "jpg",
        lambda p: fill_image(p, 2, 0, 0.2),
        "ValueError: .*sample 2: its JPEG data are damaged",
    ),
    "a JPEG without body": (
        "jpg",
        lambda p: fill_image(p, 2, 0.6, 1),
        "ValueError: .*sample 2: its JPEG data are damaged",
    ),
    "a JPEG of 0xff": (
        "jpg",
        lambda p: fill_image(p, 2, 0, 1, b"\xff"),
        "ValueError: .*sample 2: its JPEG data are damaged",
    ),
    "an enormous JPEG": (
        "jpg",
        lambda p: set_sample(p, 2, width=65535, height=65535),
        "BetonError: .*sample 2 .*65535x65535 pixels.*too few bytes",
    ),
    "a JPEG of another size": ("jpg", swap_images, "ValueError: .*sample 3: its JPEG"),
    "an image of one column": ("raw", turn_to_line, "27 samples"),
    "raw noise": ("raw", lambda p: fill_image(p, 2, 0, 1, b"\x5a"), "27 samples"),
    "nothing": ("jpg", lambda p: None, "27 samples"),
}


def read_all(path: Path, options: dict) -> str:
    """Reads a file as training and evaluation do, and says how many samples it had or which error it gave."""
    try:
        for training in (False, True):
            loader = create_loader(path, batch_size=BATCH, image_size=16, training=training, drop_last=False, **options)
            count = sum(len(targets) for images, targets in loader.epoch(0) if bool(images.isfinite().all()))
        return f"{count} samples"
    except (ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"


def abort(path: Path, options: dict) -> str:
    """Dies, as a process does in which FFCV meets damage that nobody looked for."""
    os.abort()


def hang(path: Path, options: dict) -> str:
    """Waits for ever, as FFCV does when a thread of its own dies."""
    threading.Event().wait()


def serve(connection: Connection) -> None:
    while True:
        function, path, options = connection.recv()
        connection.send(function(path, options))


class Watched:
    """A process that reads one file after the other, so that only the first waits for imports; ended if it hangs."""

    def __init__(self):
        self.process = None

    def outcome(self, path: Path, function: Callable = read_all, limit: float = LIMIT, **options) -> str:
        """What a function says of a file in the process, or that it hung or died."""
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.connection, theirs = context.Pipe()
            self.process = context.Process(target=serve, args=(theirs,), daemon=True)
            self.process.start()
            theirs.close()
        self.connection.send((function, path, options))
        try:
            if self.connection.poll(limit):
                return self.connection.recv()
            self.end()
            return f"hung for {limit} seconds"
        except EOFError:
            return f"died with exit code {self.end(kill=False)}"

    def end(self, kill: bool = True) -> int | None:
        """Ends the process; the next file gets a new one. Returns its exit code."""
        if self.process is None:
            return None
        if kill:
            self.process.kill()
        self.process.join()
        code, self.process = self.process.exitcode, None
        return code


def damaged_copy(source: Path, folder: Path, damage: Callable[[Path], None]) -> Path:
    """A copy, without its manifest, to which something is done."""
    path = Path(shutil.copy(source, folder / "copy.beton"))
    damage(path)
    return path
