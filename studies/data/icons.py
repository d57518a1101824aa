"""Icons of the npm package @iconify/json as an image folder: `python studies/data/icons.py OUT`.

The package has 243 icon sets, each a JSON file of SVG with its licence. resvg-py draws them, black on white. The name
of an icon is its class. All sets of an author are in one split.
"""

import hashlib
import io
import json
import re
import resource
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from xml.parsers import expat

from npm import check_package, main, new_dataset, read_files
from PIL import Image
from tqdm import tqdm

PACKAGE, VERSION = "@iconify/json", "2.2.535"
SHA512 = "nAV60ACUSHwnsb6fsp+letHlNkrwO4vzBtcC6B4EDHErQQfezk7E3nJdnwJjve6OCfMNO0uVT5Vrgna9/NCmXw=="
HELD_OUT = 0.2  # fraction of the authors in the split "val"
LICENCES = frozenset(  # SPDX; others (GPL, NC, none, unknown) are left out
    "Apache-2.0 BSD-3-Clause CC-BY-3.0 CC-BY-4.0 CC-BY-SA-3.0 CC-BY-SA-4.0 CC0-1.0 ISC MIT MPL-2.0 OFL-1.1 "
    "Unlicense".split()
)
STYLES = frozenset(  # the last words of a name that say how an icon is drawn: home-outline-24 is a home
    "outline fill filled line bold duotone thin light linear solid regular broken twotone sharp rounded round alt flat "
    "color duo stroke o s b i r l 1 2 3 4 12 16 20 24 28 32 48".split()
)
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")  # Iconify's rule for names of sets and icons; safe as a file's name
# resvg opens files of the machine, and an SVG inside an SVG has references of its own.
ALLOWED = ("#", *(f"data:image/{kind};" for kind in ("png", "jpeg", "gif", "webp")))
URL = re.compile(r"""url\(\s*["']?\s*([^"')\s]*)""", re.IGNORECASE)
MAX_CHARACTERS, MAX_DEPTH = 1 << 20, 64
SECONDS, MAX_MEMORY = 10, 4 << 30  # for one drawing; bytes


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


def split_of(author: str) -> str:
    """The split, "train" or "val", by a hash of the author's name."""
    return "val" if int(hashlib.sha1(author.encode()).hexdigest(), 16) % 10 < 10 * HELD_OUT else "train"


def refuse(svg: str) -> str | None:
    """Why an SVG is not drawn: it is no XML, refers to anything outside of itself, or is too large or too deep."""
    parser = expat.ParserCreate(namespace_separator=" ")
    depth, reasons = 0, []

    def check(text: str) -> None:
        if any(not reference.startswith(ALLOWED) for reference in URL.findall(text)) or "@import" in text:
            reasons.append("refers to another file")

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"has more than {MAX_DEPTH} elements in one another")
        for key, value in attributes.items():
            check(value)
            if key.rpartition(" ")[2] in ("href", "src") and not value.strip().startswith(ALLOWED):
                reasons.append("refers to another file")

    def end(name: str) -> None:
        nonlocal depth
        depth -= 1

    def no_declaration(*_: Any) -> None:
        raise ValueError("has a document type or a processing instruction")

    parser.StartElementHandler, parser.EndElementHandler, parser.CharacterDataHandler = start, end, check
    parser.StartDoctypeDeclHandler = parser.ProcessingInstructionHandler = no_declaration
    parser.buffer_text = True  # else a text, such as a style, comes in parts
    try:
        if len(svg) > MAX_CHARACTERS:
            raise ValueError(f"has more than {MAX_CHARACTERS:,} characters")
        parser.Parse(svg.encode(), True)
    except (ValueError, expat.ExpatError) as error:
        return str(error)
    return reasons[0] if reasons else None


def start_painter() -> None:
    """Limits the memory of the process that draws, and lets an alarm end it."""
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY, MAX_MEMORY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


@cache
def painter() -> ProcessPoolExecutor:
    """A process that draws, so that a drawing without end can be stopped."""
    return ProcessPoolExecutor(1, initializer=start_painter)


def paint(svg: str) -> bytes:
    """Draws an SVG as PNG, without the system's fonts, which would make the pictures depend on the machine."""
    import resvg_py

    signal.alarm(SECONDS)
    try:
        return resvg_py.svg_to_bytes(svg_string=svg, background="white", skip_system_fonts=True)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of Rust code: no Exception, and cannot be pickled
            raise
        raise ValueError(f"cannot be drawn: {error}") from None
    finally:
        signal.alarm(0)


def draw(svg: str) -> bytes | str:
    """Draws an SVG on white, as PNG; or says why it cannot be used. Equal pictures are equal bytes."""
    if reason := refuse(svg):
        return f"damaged: {reason}"
    try:
        png = painter().submit(paint, svg).result()
    except ValueError as error:
        return f"damaged: {error}"
    except BrokenProcessPool:
        painter.cache_clear()
        return f"damaged: takes more than {SECONDS} s or {MAX_MEMORY >> 30} GiB to draw"
    image = Image.open(io.BytesIO(png)).convert("RGB")
    if image.getextrema() == ((255, 255),) * 3:
        return "blank"
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def read_sets(package: Path) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The sets that may be used, by prefix, without the drawings, which are half a gigabyte; and why not the others."""
    sets, left_out = {}, {}
    for file, data in read_files(package, r"json/[^/]+\.json"):
        found = json.loads(data)
        prefix, info = found["prefix"], found["info"]
        author = info.get("author", {})
        if (licence := info["license"].get("spdx")) not in LICENCES:
            left_out[file] = f"licence {licence}"
            continue
        names = [name for name, icon in found["icons"].items() if not icon.get("hidden") and NAME.fullmatch(name)]
        about = {"name": info.get("name"), "author": author.get("name") or prefix, "url": author.get("url")}
        sets[prefix] = about | {"licence": licence, "split": split_of(about["author"]), "names": names}
    return sets, left_out


def read_svgs(package: Path, icons: Iterable[Icon], pixels: int) -> dict[Icon, str]:
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


def write_icons(package: Path, target: Path, *, pixels: int = 64, min_sets: int = 30, beton: bool = True) -> None:
    """Writes icons as `target/{train,val}/CLASS/SET_ICON.png`, `target/{train,val}.beton` and `target/manifest.json`.

    A class is a name that at least `min_sets` sets have, without its words of style, with images in both splits. Of
    equal pictures the first is kept, in the order of class, set and icon. The manifest names the sets with licences and
    authors, and all that was left out, with the reason.

    Args:
        package: the tarball of `npm pack @iconify/json@2.2.535`.
        target: the folder to make.
        pixels: width and height of the images.
        min_sets: number of sets that have the name of a class.
        beton: write the `.beton` files.

    Raises:
        FileExistsError: `target` exists.
        FileNotFoundError, ValueError: the package is not as described.
        ImportError: resvg-py is not installed.
    """
    try:
        import resvg_py
    except ImportError as error:
        raise ImportError("resvg-py draws the icons; run: pip install 'vilonghorn[comparison]'") from error
    check_package(package, PACKAGE, VERSION, SHA512)
    settings = {"pixels": pixels, "min_sets": min_sets, "held_out": HELD_OUT, "split_by": "author"}
    made_from = {"package": PACKAGE, "version": VERSION, "resvg-py": resvg_py.__version__, **settings}
    sets, sets_left_out = read_sets(package)
    by_label = defaultdict(list)
    for prefix, found in sets.items():
        for name in found.pop("names"):
            by_label[label_of(name)].append(Icon(label_of(name), prefix, name, found["split"]))
    wanted = [icons for icons in by_label.values() if len({icon.prefix for icon in icons}) >= min_sets]
    icons = sorted(icon for icons in wanted for icon in icons)
    svgs = read_svgs(package, icons, pixels)

    first_of: dict[bytes, Icon] = {}
    kept, copies, icons_left_out, classes_left_out = Counter(), {}, {}, {}
    manifest = {"made_from": made_from, "sets": sets, "sets_left_out": sets_left_out}
    with new_dataset(target, manifest, beton) as folder:
        for label, group in groupby(tqdm(icons, desc="drawing", unit="img", disable=None), key=lambda icon: icon.label):
            pictures: dict[bytes, Icon] = {}
            for icon in group:
                png = draw(svgs[icon])
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
            raise ValueError(f"{package}: none of its {len(sets)} usable sets gives a class; run npm pack again")
        for prefix, found in sets.items():
            found["images"] = kept[prefix]
        manifest |= {"classes_left_out": classes_left_out, "icons_left_out": icons_left_out, "copies_left_out": copies}


if __name__ == "__main__":
    sys.exit(main(write_icons, __doc__, f"iconify-json-{VERSION}.tgz"))
