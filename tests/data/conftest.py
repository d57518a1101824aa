"""Small image folders and `.beton` files that the tests of the data package share."""

from collections.abc import Callable
from pathlib import Path

import pytest

from vilonghorn.data import write_beton


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, photo: Callable) -> Path:
    """Three classes with 8, 9 and 10 images of different sizes."""
    root = tmp_path_factory.mktemp("folder")
    for label, name in enumerate(("cat", "dog", "eel")):
        (root / name).mkdir()
        for i in range(8 + label):
            photo(100 * label + i, 40 + 3 * i, 36 + 5 * label).save(root / name / f"{i:02d}.png")
    return root


@pytest.fixture(scope="session")
def raw_beton(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("raw") / "raw.beton"
    write_beton(folder, path, progress=False)
    return path


@pytest.fixture(scope="session")
def jpg_beton(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("jpg") / "jpg.beton"
    write_beton(folder, path, mode="jpg", progress=False)
    return path


@pytest.fixture(params=["folder", pytest.param("beton", marks=pytest.mark.needs_ffcv)])
def source(request: pytest.FixtureRequest, folder: Path) -> Path:
    """The folder, then a file with its images as JPEGs."""
    return folder if request.param == "folder" else request.getfixturevalue("jpg_beton")
