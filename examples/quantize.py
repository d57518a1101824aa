"""Runs the recipes of docs/export/runtimes.md and fills its table: `python examples/quantize.py icons.onnx`.

In the root of a checkout where data/icons is (studies/data/icons.py), with nncf installed. The page says how
icons.onnx is exported. 2,000 held-out icons are classified.
"""

import argparse
import json
import os
import random
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import onnxruntime
from PIL import Image

from vilonghorn.export.onnx_file import read_onnx

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from page_tables import markdown, write_page  # noqa: E402

PAGE = Path("docs/export/runtimes.md")
IMAGES, BATCH = 2000, 50


def scores(path: Path, images: numpy.ndarray) -> numpy.ndarray:
    """(N, classes) of images, (N, 3, H, W)."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    batches = (images[start : start + BATCH] for start in range(0, len(images), BATCH))
    return numpy.concatenate([session.run(None, {"images": batch})[0] for batch in batches])


def recipes(page: str) -> str:
    """The Python code of the page's section on quantization."""
    return "\n".join(re.findall(r"```python\n(.*?)```", page.partition("\n## Quantization\n")[2], re.DOTALL))


def defaults(names: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """What quantizers do without a list of nodes, by the call."""
    nncf, onnx = names["nncf"], names["onnx"]
    return {
        "`quantize_static(FILE, OUT, Reader())`": lambda: names["quantize_static"](
            "icons.onnx", "default.onnx", names["Reader"]()
        ),
        "`quantize_dynamic(FILE, OUT)`": lambda: names["quantize_dynamic"]("icons.onnx", "default.onnx"),
        "`nncf.quantize(MODEL, DATASET)`": lambda: onnx.save(
            nncf.quantize(onnx.load("icons.onnx"), nncf.Dataset(names["batches"])), "default.onnx"
        ),
    }


def measure_recipes(file: Path) -> None:
    """Measures, and writes the page."""
    root, file, page = Path.cwd(), file.absolute(), PAGE.read_text(encoding="utf-8")
    classes = json.loads(read_onnx(file)["classes"])
    names: dict[str, Any] = {}
    lines: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("data").symlink_to(root / "data")
        Path("icons.onnx").symlink_to(file)
        exec(recipes(page), names)
        held_out = sorted(Path("data/icons/val").glob("*/*"))
        held_out = random.Random(0).sample(held_out, min(IMAGES, len(held_out)))
        images = numpy.stack([names["transform"](Image.open(path).convert("RGB")).numpy() for path in held_out])
        labels = numpy.array([classes.index(path.parent.name) for path in held_out])
        float_scores = scores(file, images)

        def measure(name: str, path: str) -> None:
            found = scores(Path(path), images).argmax(1)
            top1, agreement = (100 * (found == expected).mean() for expected in (labels, float_scores.argmax(1)))
            megabytes = f"{Path(path).stat().st_size / 1e6:.2f}"
            lines.append(
                {"": name, "MB": megabytes, "top-1, %": f"{top1:.1f}", "agrees with float, %": f"{agreement:.1f}"}
            )

        for name, path in dict(float="icons", static="static", dynamic="dynamic", nncf="nncf").items():
            measure(name if name == "float" else f"{name}, as above", f"{path}.onnx")
        for name, quantize in defaults(names).items():
            try:
                quantize()
                measure(name, "default.onnx")
            except Exception as error:  # of every kind that quantizers and onnxruntime raise
                print(name, error)
                lines.append({"": name, "top-1, %": "does not run"})
        os.chdir(root)
    versions = f"onnxruntime {onnxruntime.__version__}, nncf {names['nncf'].__version__}"
    made = f"`python examples/quantize.py {file.name}`, {versions}, {len(labels)} held-out icons"
    write_page(PAGE, {"quantize": f"{made}:\n\n{markdown(lines)}"})


def main() -> None:
    """Reads the file from the command line, and measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, metavar="ICONS.onnx", help="file of `vilonghorn export`, as on the page")
    measure_recipes(parser.parse_args().file)


if __name__ == "__main__":
    main()
