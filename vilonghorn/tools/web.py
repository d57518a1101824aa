"""A web page that classifies a dropped image and draws its maps: `vilonghorn web MODEL`.

It shows the most probable classes and the maps of `vilonghorn.interpret`. It needs gradio (`pip install
'vilonghorn[web]'`), listens to this machine only unless --host is given, and loads nothing from other machines.
"""

import argparse
import sys
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from ..commands import make_parser
from ..data.images import MAX_PIXELS, read_image
from ..interpret import KINDS, check_backbone, draw, make_sheet
from .loaded_model import USER_ERRORS, LoadedModel, add_arguments, add_max_pixels, from_options
from .predict import predict


def analyze(
    loaded: LoadedModel, file: str, kind: str, max_pixels: int = MAX_PIXELS
) -> tuple[dict[str, float], Image.Image]:
    """Returns the five most probable classes of an image file with their probabilities, and the picture of its maps.

    Raises:
        ValueError: the image does not decode or has more than `max_pixels`, or the model does not take it.
    """
    (result,) = predict(loaded, [file], max_pixels=max_pixels)
    if "error" in result:
        raise ValueError(result["error"])
    image = loaded.transform(read_image(file, max_pixels))
    buffer = BytesIO()
    draw(make_sheet(loaded, image, kind), loaded.denormalize(image)).savefig(buffer, format="png", dpi=100)
    probabilities = {loaded.class_name(p["class"]): p["probability"] for p in result["predictions"]}
    return probabilities, Image.open(buffer, formats=["PNG"])


def build_page(loaded: LoadedModel, max_pixels: int = MAX_PIXELS) -> Any:
    """Builds the page of a model, for `launch`. It refuses images of more than `max_pixels`.

    Raises:
        ImportError: gradio is not installed.
        TypeError: the model is not of this library.
    """
    check_backbone(loaded.model)
    try:
        import gradio as gr
    except ImportError as error:
        raise ImportError("the page needs gradio; run: pip install 'vilonghorn[web]'") from error

    def show(file: str | None, kind: str) -> tuple[Any, Any]:
        if file is None:
            return None, None
        try:
            return analyze(loaded, file, kind, max_pixels)
        except ValueError as error:
            raise gr.Error(str(error).replace(file, Path(file).name), print_exception=False) from error

    with gr.Blocks(title="vilonghorn", analytics_enabled=False) as blocks:
        gr.Markdown(f"# {loaded.name}\nDrop an image to see its classes, and the maps of the model's blocks.")
        with gr.Row():
            file = gr.Image(type="filepath", sources=["upload", "clipboard"], label="image", height=300)
            # Pass on the uploaded file itself, so that read_image decodes or refuses it, not gradio.
            file.preprocess = lambda sent: None if sent is None else sent.path
            classes = gr.Label(label="classes", num_top_classes=5)
        kind = gr.Radio([(title, kind) for kind, title in KINDS.items()], value="attention", label="maps")
        buttons = ["download", "fullscreen"]
        maps = gr.Image(format="png", interactive=False, show_label=False, elem_id="maps", buttons=buttons)
        # One request at a time: Grad-CAM hooks the model while it runs.
        changes = [file.input, file.clear, kind.input]
        gr.on(changes, show, [file, kind], [classes, maps], concurrency_limit=1, concurrency_id="model")
    return blocks


def launch(blocks: Any, host: str = "127.0.0.1", port: int | None = None) -> str:
    """Serves a page in background threads, until `blocks.close()` or the end of the process; returns its URL.

    The default port is the first free one from 7860. Raises OSError if the address or the port is not available.
    """
    settings = dict(share=False, ssr_mode=False, footer_links=[], max_file_size="50mb", quiet=True)
    return blocks.launch(server_name=host, server_port=port, prevent_thread_lock=True, **settings)[1]


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command, also of its completion."""
    parser = make_parser("web", __doc__.split("\n\n")[1], "runs/photos", "runs/photos --checkpoint last --port 8080")
    add_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, help="default: the first free one from 7860")
    add_max_pixels(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command until it is interrupted; returns 2 if the page cannot be served."""
    options = build_parser().parse_args(argv)
    try:
        blocks = build_page(from_options(options), options.max_pixels)
        print(f"the page is at {launch(blocks, options.host, options.port)} until you press Ctrl+C", flush=True)
    except (*USER_ERRORS, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    blocks.block_thread()
    return 0


if __name__ == "__main__":
    sys.exit(main())
