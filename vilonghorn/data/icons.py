"""Icons of the npm package @iconify/json as an image folder: an icon's name is its class, whole sets are held out.

The package has 243 icon sets, each a JSON file of SVG with its licence. resvg-py draws them, black on white.
"""

import hashlib
import io
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from concurrent.futures import Executor
from itertools import groupby
from typing import Any, Literal, NamedTuple

from PIL import Image
from tqdm import tqdm

from .npm import check_package, is_written, new_dataset, read_files

PACKAGE, VERSION = "@iconify/json", "2.2.535"
LICENCES = frozenset(  # SPDX; others (GPL, NC, none, unknown) are left out
    "Apache-2.0 BSD-3-Clause CC-BY-3.0 CC-BY-4.0 CC-BY-SA-3.0 CC-BY-SA-4.0 CC0-1.0 ISC MIT MPL-2.0 OFL-1.1 "
    "Unlicense".split()
)
STYLES = frozenset(  # the last words of a name that say how an icon is drawn: home-outline-24 is a home
    "outline fill filled line bold duotone thin light linear solid regular broken twotone sharp rounded round alt flat "
    "color duo stroke o s b i r l 1 2 3 4 12 16 20 24 28 32 48".split()
)
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")  # Iconify's rule for names of sets and icons; safe as a file's name

EXTERNAL = re.compile(r"""<(image|feImage)\b[^>]*href\s*=\s*["'](?!\s*(#|data:))""")  # resvg opens files of the machine


class Icon(NamedTuple):
    """An icon of a set: its class, the set's prefix, its name in the set, the split of the set."""

    label: str
    prefix: str
    name: str
    split: str

    def __str__(self) -> str:
        return f"{self.prefix}:{self.name}"


def label_of(name: str) -> str:
    """The class of an icon: its name without the words of style at its end."""
    words = name.split("-")
    while len(words) > 1 and words[-1] in STYLES:
        words.pop()
    return "-".join(words)


def split_of(key: str, held_out: float) -> str:
    """The split, "train" or "val", by a hash of the name of a set or author; `held_out` is a multiple of 0.1."""
    return "val" if int(hashlib.sha1(key.encode()).hexdigest(), 16) % 10 < round(10 * held_out) else "train"


def draw(svg: str) -> bytes | str:
    """Draws an SVG on white, as PNG; or says why it cannot be used. Equal pictures are equal bytes."""
    import resvg_py

    if EXTERNAL.search(svg):
        return "damaged: refers to another file"
    try:  # without the system's fonts, which would make the pictures depend on the machine
        png = resvg_py.svg_to_bytes(svg_string=svg, background="white", skip_system_fonts=True)
    except ValueError as error:
        return f"damaged: {error}"
    image = Image.open(io.BytesIO(png)).convert("RGB")
    if image.getextrema() == ((255, 255),) * 3:
        return "blank"
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def read_sets(package: str | os.PathLike) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The sets that may be used, by prefix, without the drawings, which are half a gigabyte; and why not the others."""
    sets, left_out = {}, {}
    for file, data in read_files(package, r"json/[^/]+\.json"):
        try:
            found = json.loads(data)
            prefix, info = found["prefix"], found["info"]
            licence = info["license"].get("spdx")
            names = [name for name, icon in found["icons"].items() if not icon.get("hidden") and NAME.fullmatch(name)]
            author = info.get("author", {})
            about = {"name": info.get("name"), "author": author.get("name") or prefix, "url": author.get("url")}
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            left_out[file] = f"damaged: {error!r}"
            continue
        if file != f"json/{prefix}.json" or not NAME.fullmatch(prefix):
            left_out[file] = f"damaged: its prefix is {prefix!r}"
        elif licence not in LICENCES:
            left_out[file] = f"licence {licence}"
        else:
            sets[prefix] = about | {"licence": licence, "names": names}
    return sets, left_out


def read_svgs(package: str | os.PathLike, icons: Iterable[Icon], pixels: int) -> dict[Icon, str]:
    """The icons as SVG documents of `pixels` in width and height; an oblong icon is centred."""
    by_file, svgs = defaultdict(list), {}
    for icon in icons:
        by_file[f"json/{icon.prefix}.json"].append(icon)
    for file, data in read_files(package, r"json/[^/]+\.json"):
        if file not in by_file:
            continue
        found = json.loads(data)
        for icon in by_file[file]:
            one = {"left": 0, "top": 0, "width": 16, "height": 16, "body": ""} | found | found["icons"][icon.name]
            svgs[icon] = (
                '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" color="black" '
                f'width="{pixels}" height="{pixels}" viewBox="{one["left"]} {one["top"]} {one["width"]} '
                f'{one["height"]}">{one["body"]}</svg>'
            )
    return svgs


def write_icons(
    package: str | os.PathLike,
    target: str | os.PathLike,
    *,
    pixels: int = 64,
    min_sets: int = 30,
    held_out: float = 0.2,
    split_by: Literal["set", "author"] = "set",
    beton: bool = True,
    pool: Executor | None = None,
    progress: bool = True,
) -> bool:
    """Writes icons as `target/{train,val}/CLASS/SET_ICON.png`, `target/{train,val}.beton` and `target/manifest.json`.

    A class is a name that stands in at least `min_sets` sets, without its words of style, and that has images in both
    splits. Of equal pictures the first is kept, in the order of class, set and icon. The manifest names the sets with
    licences and authors, and all that was left out, with the reason. Returns whether anything was written.

    Args:
        package: the tarball of `npm pack @iconify/json@2.2.535`, or its folder.
        target: the folder to make.
        pixels: width and height of the images, 8 to 1024.
        min_sets: number of sets in which the name of a class stands, at least 2.
        held_out: fraction of the sets in the split "val", a multiple of 0.1 from 0.1 to 0.9.
        split_by: "set": a hash of a set's name decides its split; "author": of its author's name, so that all sets of
            an author are in one split.
        beton: write the `.beton` files.
        pool: draws the icons; default: this process does.
        progress: show progress bars.

    Raises:
        FileExistsError: `target` exists and is not this dataset.
        FileNotFoundError, ValueError: the package or an option is not as described.
        ImportError: resvg-py is not installed.
    """
    for name, value, low, high in (("pixels", pixels, 8, 1024), ("min_sets", min_sets, 2, 1000)):
        if not low <= value <= high:
            raise ValueError(f"{name} {value}: expected {low} to {high}")
    if held_out not in [tenths / 10 for tenths in range(1, 10)]:
        raise ValueError(f"held_out {held_out}: expected 0.1, 0.2, ... or 0.9")
    if split_by not in ("set", "author"):
        raise ValueError(f"split_by {split_by!r}: expected set or author")
    try:
        import resvg_py
    except ImportError as error:
        raise ImportError("resvg-py draws the icons; run: pip install 'vilonghorn[icons]'") from error
    check_package(package, PACKAGE, VERSION)
    settings = {"pixels": pixels, "min_sets": min_sets, "held_out": held_out, "split_by": split_by}
    made_from = {"package": PACKAGE, "version": VERSION, "resvg-py": resvg_py.__version__, **settings}
    if is_written(target, made_from, beton):
        return False

    sets, sets_left_out = read_sets(package)
    if not sets:
        raise ValueError(f"{package}: no icon set in it (json/*.json) that can be used; run npm pack again")
    by_label = defaultdict(list)
    for prefix, found in sets.items():
        found["split"] = split_of(prefix if split_by == "set" else found["author"], held_out)
        for name in found.pop("names"):
            by_label[label_of(name)].append(Icon(label_of(name), prefix, name, found["split"]))
    wanted = [icons for icons in by_label.values() if len({icon.prefix for icon in icons}) >= min_sets]
    icons = sorted(icon for icons in wanted for icon in icons)
    if not icons:
        raise ValueError(f"{package}: no name stands in {min_sets} of its {len(sets)} sets; give a lower --min-sets")
    svgs = read_svgs(package, icons, pixels)
    drawn = (pool.map if pool else map)(draw, [svgs[icon] for icon in icons], **{"chunksize": 64} if pool else {})
    bar = tqdm(zip(icons, drawn), total=len(icons), desc="drawing", unit="img", disable=not progress)

    first_of: dict[bytes, Icon] = {}
    kept, copies, icons_left_out, classes_left_out = Counter(), {}, {}, {}
    manifest = {"made_from": made_from, "sets": sets, "sets_left_out": sets_left_out}
    with new_dataset(target, manifest, beton, progress) as folder:
        for label, group in groupby(bar, key=lambda pair: pair[0].label):
            pictures: dict[bytes, Icon] = {}
            for icon, png in group:
                if isinstance(png, str):
                    icons_left_out[str(icon)] = png
                elif first := first_of.get(png) or pictures.get(png):
                    copies[str(icon)] = str(first)
                else:
                    pictures[png] = icon
            if len({icon.split for icon in pictures.values()}) < 2:
                classes_left_out[label] = f"{len(pictures)} images, all in one split"
                continue
            first_of |= pictures
            for png, icon in pictures.items():
                file = folder / icon.split / label / f"{icon.prefix}_{icon.name}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(png)
                kept[icon.prefix] += 1
        if not kept:
            raise ValueError(f"{package}: no class has images in both splits; give a lower --min-sets")
        for prefix, found in sets.items():
            found["images"] = kept[prefix]
        manifest |= {"classes_left_out": classes_left_out, "icons_left_out": icons_left_out, "copies_left_out": copies}
    return True
