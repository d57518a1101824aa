"""Serves a page on this machine that classifies pictures in the browser and draws Grad-CAM over them.

It is the page of `vilonghorn export MODEL --to web`, in a temporary folder until Ctrl+C. Pictures are not uploaded. The
first call downloads onnxruntime-web, 33 MB.
"""

from collections.abc import Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory

from jsonargparse.typing import restricted_number_type

from ..data.atomic_files import exits_on_sigterm
from ..export.formats import FORMATS
from ..export.load import load_for_export
from ..export.web_page import read_examples, write_page
from . import make_parser

HOST = "127.0.0.1"
Port = restricted_number_type("Port", int, [(">=", 0), ("<=", 65535)])

parser = make_parser("web", __doc__, "runs/photos", "vilonghornv2_nano.icons480 --port 8080")
help = "directory of a run, or a model of this library, such as vilonghornv2_nano.icons480"
parser.add_argument("model", metavar="MODEL", help=help)
help = "run: best (default) or last; model: a file of weights (default: the tag's, or random)"
parser.add_argument("--checkpoint", metavar="WHICH", help=help)
parser.add_argument("--port", type=Port, default=0, help="up to 65535 (default: a free one)")


def main(argv: Sequence[str]) -> None:
    """Runs the command until it is interrupted."""
    options = parser.parse_args(argv)
    FORMATS["onnx"].check_installed()
    model = load_for_export(options.model, options.checkpoint)
    with exits_on_sigterm(), TemporaryDirectory(prefix="vilonghorn-web-") as folder:
        page = Path(folder, "page")
        with ThreadingHTTPServer((HOST, options.port), partial(SimpleHTTPRequestHandler, directory=page)) as server:
            write_page(model, page, examples=read_examples(options.model))
            print(f"the page is at http://{HOST}:{server.server_port}/ until you press Ctrl+C", flush=True)
            server.serve_forever()
