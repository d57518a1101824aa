"""npm packages as `npm pack` leaves them, with a few icons and digits."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

SETS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "iota", "xi")
HELD_OUT = {"iota", "xi"}  # of SETS: the SHA-1 of the name, modulo 10, is 0 or 1


def icon_set(prefix: str, number: int, spdx: str | None = "MIT", author: str | None = None) -> dict[str, Any]:
    """A set in which every icon differs from those of a set of another number."""
    circles = [f'<circle cx="12" cy="12" r="{r + number}" fill="currentColor"/>' for r in (3, 3.5)]
    square = f'<path fill="currentColor" d="M2 2h{4 + number}v{4 + number}h-{4 + number}z"/>'
    bodies = {"sun": circles[0], "sun-outline": circles[1], "box-fill": square}
    info = {"name": prefix.title(), "author": {"name": author or prefix}, "license": {"title": spdx, "spdx": spdx}}
    icons = {name: {"body": body} for name, body in bodies.items()}
    return {"prefix": prefix, "info": info, "icons": icons, "width": 24, "height": 24}


def icon_sets() -> dict[str, dict[str, Any]]:
    return {prefix: icon_set(prefix, number) for number, prefix in enumerate(SETS)}


def pack(path: Path, name: str, version: str, files: dict[str, Any]) -> Path:
    """Writes a tarball with package.json and JSON or text files; returns its path."""
    with tarfile.open(path, "w:gz") as archive:
        for file, content in {"package.json": {"name": name, "version": version}, **files}.items():
            data = (content if isinstance(content, str) else json.dumps(content)).encode()
            member = tarfile.TarInfo(f"package/{file}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def pack_icons(path: Path, sets: dict[str, Any] | None = None) -> Path:
    """The package of `sets`, dictionaries or text by name of file."""
    sets = icon_sets() if sets is None else sets
    return pack(path, "@iconify/json", "2.2.535", {f"json/{name}.json": found for name, found in sets.items()})


def mnist_files(count: int = 7) -> tuple[dict[str, Any], np.ndarray]:
    """The files of `count` random images of each digit, and (10, count, 28, 28) their pixels."""
    pixels = np.random.default_rng(0).integers(0, 256, (10, count, 28, 28), dtype=np.uint8)
    return {f"src/digits/{d}.json": {"data": np.round(pixels[d].ravel() / 255, 3).tolist()} for d in range(10)}, pixels
