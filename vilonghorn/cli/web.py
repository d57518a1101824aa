"""Serves a page that shows the most probable classes of an image and the maps of `vilonghorn interpret`.

It needs gradio (`pip install "gradio>=6.0,<7"`), listens to this machine only unless --host is given, and loads
nothing from other machines.
"""

import os
import re
import signal
import socket
from collections.abc import Sequence
from html import escape
from io import BytesIO
from ipaddress import ip_address
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from PIL import Image

from ..data.images import MAX_PIXELS, ImageFolder, printable, read_image
from ..figures import png
from ..inference import LoadedModel, predict
from ..interpret import EXPLANATIONS, KINDS, check_backbone, draw, make_sheet, view
from . import make_parser
from .arguments import add_crop_mode, add_max_pixels, add_model, load_model

HOST = re.compile(r"(\[[\da-f:.]+\]|[\w.-]+)(:\d*)?", re.ASCII | re.IGNORECASE)  # a name or an address, and a port
DELETE = (600, 3600)  # every 10 minutes, uploads and pictures older than an hour

parser = make_parser("web", __doc__, "runs/photos", "runs/photos --checkpoint last --port 8080")
add_model(parser)
parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
parser.add_argument("--port", type=int, help="default: the first free one from 7860")
add_max_pixels(parser)
add_crop_mode(parser)


def main(argv: Sequence[str]) -> None:
    """Runs the command until it is interrupted."""
    options = parser.parse_args(argv)
    loaded = load_model(options)
    check_backbone(loaded.model)
    for name in ("SIGTERM", "SIGHUP"):  # as Ctrl+C, so that the folder is deleted
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.default_int_handler)
    with TemporaryDirectory(prefix="vilonghorn-web-") as uploads:
        os.environ["GRADIO_TEMP_DIR"] = uploads  # what is uploaded, and the pictures
        page = build_page(loaded, options.max_pixels)
        print(f"the page is at {launch(page, options.host, options.port)} until you press Ctrl+C", flush=True)
        page.block_thread()


def analyze(
    loaded: LoadedModel,
    file: str,
    kind: str,
    target: int | None = None,
    max_pixels: int = MAX_PIXELS,
) -> tuple[dict[str, float], Image.Image]:
    """Returns the five most probable classes of an image file with their probabilities, and the picture of its maps.

    `target` is the class of Grad-CAM (default: the most probable one).

    Raises:
        ValueError: the image does not decode or has more than `max_pixels`, or the model does not take it.
    """
    (result,) = predict(loaded, [file], max_pixels=max_pixels)
    if "error" in result:
        raise ValueError(result["error"])
    picture = read_image(file, max_pixels)
    figure = draw(make_sheet(loaded, loaded.transform(picture), kind, target=target), view(loaded, picture))
    probabilities = {loaded.class_name(p["class"]): p["probability"] for p in result["predictions"]}
    return probabilities, Image.open(BytesIO(png(figure)), formats=["PNG"])


def find_examples(val: Path | None, classes: Sequence[str] | None = None) -> list[list[str]]:
    """One image file of each of up to six classes of a folder of held-out data; none if it is no longer there."""
    if val is None or not val.is_dir():
        return []
    data = ImageFolder(val, classes=classes)
    _, first = np.unique(data.labels, return_index=True)
    chosen = np.unique(np.linspace(0, len(first) - 1, 6).round().astype(int))
    return [[data.paths[i]] for i in first[chosen]]


def build_page(loaded: LoadedModel, max_pixels: int = MAX_PIXELS) -> Any:
    """Builds the page of a model of this library. It refuses images of more than `max_pixels`.

    Raises:
        ImportError: gradio is not installed.
        ValueError: the held-out data of the run, from which the examples are, has no images.
    """
    try:
        import gradio as gr
    except ImportError as error:
        raise ImportError("the page needs gradio; run: pip install 'gradio>=6.0,<7'") from error

    def show(file: str | None, kind: str, target: int) -> tuple[Any, Any]:
        if file is None:
            return None, None
        try:
            return analyze(loaded, file, kind, None if target < 0 else target, max_pixels)
        except ValueError as error:
            raise gr.Error(str(error).replace(file, Path(file).name), print_exception=False) from error

    def explain(kind: str) -> tuple[str, Any]:
        return EXPLANATIONS[kind], gr.update(visible=kind == "cam")

    numbers = [("most probable", -1)] + [(loaded.class_name(i), i) for i in range(loaded.model.num_classes)]
    with gr.Blocks(title=loaded.architecture, analytics_enabled=False, delete_cache=DELETE) as page:
        gr.HTML(f"<h1>{escape(loaded.architecture)}</h1>{escape(printable(loaded.weights))}", padding=False)
        with gr.Row():
            with gr.Column():
                options = dict(sources=["upload", "clipboard"], label="image", height=300, format="png")
                file = gr.Image(type="filepath", elem_id="image", **options)
                # Pass on the uploaded file itself, so that read_image decodes or refuses it, not gradio.
                file.preprocess = lambda sent: None if sent is None else sent.path
                if examples := find_examples(loaded.val, loaded.class_names):
                    gr.Examples(examples, [file], label="examples", elem_id="examples")
            classes = gr.Label(label="classes", num_top_classes=5, elem_id="classes")
        kind = gr.Radio([(title, kind) for kind, title in KINDS.items()], value="attention", label="maps")
        explanation = gr.Markdown(EXPLANATIONS["attention"], elem_id="explanation")
        target = gr.Dropdown(numbers, value=-1, label="class", visible=False, elem_id="target")
        buttons = ["download", "fullscreen"]
        maps = gr.Image(format="png", interactive=False, show_label=False, elem_id="maps", buttons=buttons)
        kind.input(explain, kind, [explanation, target], queue=False, show_progress="hidden")
        # One request at a time: Grad-CAM hooks the model while it runs.
        changes = [file.change, kind.input, target.input]
        gr.on(changes, show, [file, kind, target], [classes, maps], concurrency_id="model", concurrency_limit=1)
    return page


class HostCheck:
    """ASGI middleware: refuses requests that name another host, as those of a page of another site do (DNS rebinding).

    Args:
        app: the application.
        host: address that the server listens to. If it is of this machine only, so are the names that are accepted;
            else any IP address, and the names of this machine.
    """

    def __init__(self, app: Any, host: str) -> None:
        self.app, self.is_local = app, host in ("localhost", "::1") or host.startswith("127.")
        names = ["localhost", host] if self.is_local else ["localhost", host, socket.gethostname(), socket.getfqdn()]
        self.names = {name.lower() for name in names}

    def accepts(self, header: str) -> bool:
        """Whether a Host header, a name or an address and a port, is of this server."""
        if (match := HOST.fullmatch(header)) is None:
            return False
        name = match[1].strip("[]").lower()
        try:
            return name in self.names or ip_address(name).is_loopback or not self.is_local
        except ValueError:  # neither a name of this machine nor an address
            return False

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answers 421 in place of the application."""
        hosts = [value.decode("latin-1") for name, value in scope.get("headers", ()) if name == b"host"]
        if scope["type"] == "lifespan" or (len(hosts) == 1 and self.accepts(hosts[0])):
            await self.app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        body = b"this server has another name; open the address that `vilonghorn web` prints\n"
        head = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 421, "headers": head})
        await send({"type": "http.response.body", "body": body})


def launch(page: Any, host: str = "127.0.0.1", port: int | None = None) -> str:
    """Serves a page in background threads, until `page.close()` or the end of the process; returns its URL.

    The default port is the first free one from 7860. Raises OSError if the address or the port is not available.
    """
    settings = dict(share=False, ssr_mode=False, footer_links=[], max_file_size="50mb", quiet=True)
    middleware = [(HostCheck, (), {"host": host})]  # as starlette's Middleware unpacks
    settings |= dict(app_kwargs=dict(middleware=middleware))
    return page.launch(server_name=host, server_port=port, prevent_thread_lock=True, **settings)[1]
