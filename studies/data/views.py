"""Views of drawings and photographs without labels: images of SIDE px for studies/students.py.

The drawings are coloured icons and emoji of two npm packages and Debian's openclipart-png; the photographs are
wallpapers of Debian. docs/models/lite0.md has the licences, and the commands that fill the folder. A view is a drawing
on white, on a colour or on a part of a photograph, or a part of a photograph alone.
"""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from icons import PACKAGE, SHA512, VERSION, refuse
from npm import check_package, read_files
from numpy.random import Generator, default_rng
from PIL import Image

from vilonghorn.data.atomic_files import atomic_write

SETS = (  # coloured sets of @iconify/json
    "noto noto-v1 twemoji openmoji emojione fxemoji fluent-emoji-flat streamline-ultimate-color streamline-emojis "
    "flat-color-icons meteocons"
).split()
ALIKE = re.compile(r"flag|keycap|clock-|people-holding|couple|family|-(light|medium|dark|skin|tone)")  # left out
RENDERINGS = ("@lobehub/fluent-emoji-3d", "1.1.0")
RENDERINGS_SHA512 = "Wlq2lVStTnr8BDpIJ0pEnTKO4LuDxxqTEhTvRtD1DLRF0me7ogeRQjKoehDHXuVJ2Qaecgl5wRBv60lUAG3h7g=="
SKIN = re.compile(r"1f3f[b-f]")  # in the names of its files
CLIPART, PHOTOGRAPHS = "usr/share/openclipart/png", "usr/share/backgrounds"
COPIES = {"set": 1, "clipart": 2, "rendering": 4, "photograph": 150}  # views of an image
SIDE, LARGEST = 128, 160  # pixels of a view, of a drawing
MAX_PIXELS = 1 << 20  # of clip art; 51 of 6,900 files have more, up to 600 million
Image.MAX_IMAGE_PIXELS = None  # they are opened, but not decoded


def read_drawings(folder: Path) -> Iterator[tuple[str, Image.Image]]:
    """Kind and RGBA image of each drawing."""
    import resvg_py

    packages = [folder / "iconify-json-2.2.535.tgz", folder / "lobehub-fluent-emoji-3d-1.1.0.tgz"]
    check_package(packages[0], PACKAGE, VERSION, SHA512)
    check_package(packages[1], *RENDERINGS, RENDERINGS_SHA512)
    for _, data in read_files(packages[0], rf"json/({'|'.join(SETS)})\.json"):
        found = json.loads(data)
        for name, icon in found["icons"].items():
            one = {"left": 0, "top": 0, "width": 16, "height": 16} | found | icon
            svg = (
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{LARGEST}" height="{LARGEST}" viewBox="{one["left"]} '
                f'{one["top"]} {one["width"]} {one["height"]}">{one["body"]}</svg>'
            )
            if not ALIKE.search(name) and not refuse(svg):
                yield "set", Image.open(io.BytesIO(resvg_py.svg_to_bytes(svg_string=svg, skip_system_fonts=True)))
    for file, data in read_files(packages[1], r"assets/.*\.webp"):
        if not SKIN.search(file):
            yield "rendering", Image.open(io.BytesIO(data))
    for path in sorted((folder / CLIPART).rglob("*.png")):
        if (image := Image.open(path)).width * image.height <= MAX_PIXELS:
            yield "clipart", image


def part(photograph: Image.Image, rng: Generator) -> Image.Image:
    """A random square of a photograph, at most as wide as it and at least an eighth, at SIDE px."""
    side = int(min(photograph.size) * 2 ** rng.uniform(-3, 0))
    left, top = (int(rng.integers(0, length - side + 1)) for length in photograph.size)
    return photograph.resize(
        (SIDE, SIDE), Image.Resampling.BICUBIC, (left, top, left + side, top + side), reducing_gap=2
    )


def view(drawing: Image.Image, photographs: list[Image.Image], rng: Generator) -> Image.Image:
    """A drawing, turned a little, or a part of it: half of the views on white, the others on a colour or photograph."""
    ground, kind = Image.new("RGB", (SIDE, SIDE), "white"), rng.random()
    if kind > 0.7:
        ground = part(photographs[rng.integers(len(photographs))], rng)
    elif kind > 0.5:
        ground.paste(tuple(rng.integers(0, 256, 3).tolist()), (0, 0, SIDE, SIDE))
    drawing = drawing.rotate(rng.normal(0, 8), Image.Resampling.BICUBIC, expand=True)
    scale = SIDE * 2 ** rng.uniform(-0.6, 0.4) / max(drawing.size)
    drawing = drawing.resize([max(round(length * scale), 1) for length in drawing.size], Image.Resampling.BICUBIC)
    place = [round(rng.uniform(*sorted((0, SIDE - length)))) for length in drawing.size]
    ground.paste(drawing, place, drawing)
    return ground


def write_views(folder: Path, file: Path) -> None:
    """Writes all views, (N, SIDE, SIDE, 3) uint8, in random order."""
    rng = default_rng(0)
    paths = sorted(path for path in (folder / PHOTOGRAPHS).rglob("*") if path.suffix in (".jpg", ".png"))
    photographs = []
    for path in paths:
        image = Image.open(path).convert("RGB")
        image.thumbnail((2048, 2048), Image.Resampling.BICUBIC)
        photographs.append(image)
    counts, views = dict.fromkeys(COPIES, 0), []
    for kind, image in read_drawings(folder):
        drawing = image.convert("RGBA")
        drawing.thumbnail((LARGEST, LARGEST), Image.Resampling.BICUBIC)
        if box := drawing.getchannel("A").getbbox():
            counts[kind] += 1
            views += [np.asarray(view(drawing.crop(box), photographs, rng)) for _ in range(COPIES[kind])]
    for photograph in photographs:
        counts["photograph"] += 1
        views += [np.asarray(part(photograph, rng)) for _ in range(COPIES["photograph"])]
    rng.shuffle(views)
    print(f"{len(views)} views of {counts}", flush=True)
    with atomic_write(file) as target:
        np.save(target, np.stack(views))
