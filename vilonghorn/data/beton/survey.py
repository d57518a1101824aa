"""What the headers of image files tell before any pixel is read: which are bad, and how much room they need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from ..images import ImageFiles, UnreadableImage, read_header
from ..threads import in_order
from .encode import stored_size

SHOWN = 10  # names of one kind in a message or in the manifest; more are only counted
TURNED = "turned by EXIF"


@dataclass
class Survey:
    """What was found.

    Attributes:
        raw_bytes: of all readable images as 8-bit pixels at the size they are stored at.
        unreadable: by sample index, why its image cannot be used.
        converted: by kind (a mode of PIL's other than RGB, or turned by EXIF data), the images that are so.
    """

    raw_bytes: int
    unreadable: dict[int, str]
    converted: dict[str, list[str]]

    def summary(self) -> dict[str, dict[str, Any]]:
        """`converted` for the manifest: counts, and the first few names."""
        return {kind: {"count": len(names), "first": names[:SHOWN]} for kind, names in sorted(self.converted.items())}


def survey(files: ImageFiles, *, max_resolution: int, workers: int, progress: bool) -> Survey:
    """Reads the header of every image file.

    Args:
        files: the dataset.
        max_resolution: larger images will be shrunk, so that no side has more pixels.
        workers: threads.
        progress: show a progress bar.
    """
    found = Survey(0, {}, {})

    def look(index: int) -> tuple[int, list[str]] | str:
        path = files.paths[index]
        try:
            header = read_header(path)
            width, height = stored_size(header.width, header.height, max_resolution, path)
        except UnreadableImage as error:
            return str(error)
        return 3 * width * height, [header.mode] * (header.mode != "RGB") + [TURNED] * header.turned

    looks = in_order(look, len(files), workers)
    bar = tqdm(looks, total=len(files), desc=f"checking {files.root.name}", unit="img", disable=not progress)
    for index, seen in enumerate(bar):
        if isinstance(seen, str):
            found.unreadable[index] = seen
            continue
        found.raw_bytes += seen[0]
        for kind in seen[1]:
            found.converted.setdefault(kind, []).append(files.paths[index])
    return found


def refusal(unreadable: dict[int, str]) -> str:
    """The sentence that refuses images, naming the first few and the way to leave them out."""
    reasons = list(unreadable.values())
    shown = "; ".join(reasons[:SHOWN]) + f"; and {len(reasons) - SHOWN} more" * (len(reasons) > SHOWN)
    return f"{shown} (--skip-unreadable, skip_unreadable=True, leaves such images out and lists them)"
