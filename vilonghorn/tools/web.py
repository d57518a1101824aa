"""A page on which one drops an image and sees what a model makes of it: `python -m vilonghorn.tools.web MODEL`.

It shows the most probable classes and the maps of `interpret`. It needs gradio (`pip install 'vilonghorn[web]'`), and
serves this machine alone unless --host says otherwise. The page asks no other machine for anything.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from ..data.images import read_image
from ..interpret.draw import KINDS, draw, make_sheet
from ..interpret.tokens import check_backbone
from . import loaded_model as subject
from .loaded_model import Subject
from .predict import predict

if TYPE_CHECKING:
    import gradio


def look(found: Subject, file: str, what: str) -> tuple[dict[str, float], Image.Image]:
    """What the page says of an image file.

    Args:
        found: the model.
        file: the image.
        what: one of KINDS.

    Returns:
        Probabilities of the five most probable classes by name, and the picture of the maps.

    Raises:
        ValueError: the image does not decode, or the model does not take it.
    """
    (result,) = predict(found, [file])
    if "error" in result:
        raise ValueError(result["error"])
    image = found.transform(read_image(file))
    figure = draw(make_sheet(found, image, what), found.picture(image))
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return {found.class_name(p["class"]): p["probability"] for p in result["predictions"]}, Image.open(buffer)


def page(found: Subject) -> gradio.Blocks:
    """The page of a model of this library, to be launched.

    Raises:
        ImportError: gradio is not installed.
        TypeError: a model of another kind.
    """
    check_backbone(found.model)
    gr = _gradio()

    def show(file: str | None, what: str) -> tuple[Any, Any]:
        if file is None:
            return None, None
        try:
            return look(found, file, what)
        except ValueError as error:
            raise gr.Error(str(error).replace(file, Path(file).name), print_exception=False) from error

    with gr.Blocks(title="vilonghorn", analytics_enabled=False) as blocks:
        gr.Markdown(f"# {found.name}\nDrop an image to see what it is to the model, and why.")
        with gr.Row():
            file = gr.Image(type="filepath", sources=["upload", "clipboard"], label="image", height=300)
            # The file as it was sent: it is decoded, and refused, as everywhere else in this library.
            file.preprocess = lambda sent: None if sent is None else sent.path
            classes = gr.Label(label="classes", num_top_classes=5)
        what = gr.Radio([(title, kind) for kind, title in KINDS.items()], value="attention", label="maps")
        maps = gr.Image(
            format="png", interactive=False, show_label=False, elem_id="maps", buttons=["download", "fullscreen"]
        )
        # One at a time: Grad-CAM hooks the model while it runs.
        changes = [file.input, file.clear, what.input]
        gr.on(changes, show, [file, what], [classes, maps], concurrency_limit=1, concurrency_id="model")
    return blocks


def launch(blocks: gradio.Blocks, host: str = "127.0.0.1", port: int | None = None) -> str:
    """Serves a page in threads of its own, until `blocks.close()` or the end of the process.

    Args:
        blocks: of `page`.
        host: address to listen on.
        port: default: the first free one from 7860.

    Returns:
        The page's address.

    Raises:
        OSError: the address or the port cannot be had.
    """
    settings = dict(share=False, ssr_mode=False, footer_links=[], max_file_size="50mb", quiet=True)
    return blocks.launch(server_name=host, server_port=port, prevent_thread_lock=True, **settings)[1]


def _gradio() -> Any:
    try:
        import gradio
    except ImportError as error:
        raise ImportError("the page needs gradio; run: pip install 'vilonghorn[web]'") from error
    return gradio


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0 when it was interrupted, or 2 for what cannot be served."""
    parser = argparse.ArgumentParser(prog="python -m vilonghorn.tools.web", description=__doc__.split("\n\n")[1])
    subject.arguments(parser)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine alone)"
    )
    parser.add_argument("--port", type=int, help="default: the first free one from 7860")
    options = parser.parse_args(argv)
    try:
        blocks = page(subject.from_options(options))
        print(f"the page is at {launch(blocks, options.host, options.port)} until you press Ctrl+C", flush=True)
    except (*subject.FAILURES, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    blocks.block_thread()
    return 0


if __name__ == "__main__":
    sys.exit(main())
