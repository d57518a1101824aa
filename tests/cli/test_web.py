"""The page, in a real browser: what it shows is what the model says, and what it says of a file that is no image."""

import asyncio
import io
import os
import re
import shutil
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
import torch
from left_run import NAMES, leave_run, make_image
from PIL import Image

from vilonghorn import load
from vilonghorn.cli import main, web
from vilonghorn.data.images import read_image
from vilonghorn.interpret.draw import EXPLANATIONS, draw, make_sheet, view

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture
def loaded(tmp_path):
    leave_run(tmp_path / "run")
    return load(tmp_path / "run")


@pytest.fixture
def val(tmp_path):
    """An image folder of two classes."""
    for seed, name in enumerate(("ant/1.png", "ant/2.png", "bee/1.png")):
        make_image(tmp_path / "val" / name, seed)
    return tmp_path / "val"


@pytest.fixture
def address(loaded, val):
    """Of a page that is being served, with examples from `val`."""
    pytest.importorskip("gradio", reason="the page needs gradio: pip install 'vilonghorn[web]'")
    blocks = web.build_page(replace(loaded, val=val))
    yield web.launch(blocks)
    blocks.close()


@pytest.fixture
def tab(address):
    """A browser's tab that shows the page; it may talk to the page's server alone."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'vilonghorn[test]'")
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    asked = []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page()
        tab.set_default_timeout(120_000)
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto(address)
        yield tab
        browser.close()
    assert asked and all(url.startswith((address, "data:", "blob:")) for url in asked)


def shown_maps(tab, other_than=None):
    """Address and pixels of the picture of maps, once there is one."""
    loaded = "const i = document.querySelector('#maps img'); return i && i.complete && i.naturalWidth"
    script = f"old => {{ {loaded} && i.src !== old && i.src }}"
    address = tab.wait_for_function(script, arg=other_than).json_value()
    return address, np.asarray(Image.open(io.BytesIO(urlopen(address).read())).convert("RGB"))


def drawn(loaded, file, what, target=None):
    buffer, picture = io.BytesIO(), read_image(str(file))
    sheet = make_sheet(loaded, loaded.transform(picture), what, target=target)
    draw(sheet, view(loaded, picture)).savefig(buffer, format="png", dpi=100)
    return np.asarray(Image.open(buffer).convert("RGB"))


def test_a_dropped_image_gets_its_classes_and_maps_and_a_bad_one_a_sentence(loaded, tab, tmp_path):
    image = make_image(tmp_path / "a.png", 3)
    with torch.no_grad():
        values, classes = loaded.model(image).softmax(1)[0].topk(5)
    tab.wait_for_function("document.title === 'vilonghorn_nano'")
    assert tab.inner_text("h1") == "vilonghorn_nano"
    assert "best weights (ema, epoch 3) of run run" in tab.inner_text("body") and str(tmp_path) not in tab.content()
    assert tab.inner_text("#explanation") == EXPLANATIONS["attention"] and not tab.is_visible("#target")
    tab.set_input_files("input[type=file]", tmp_path / "a.png")
    source, pixels = shown_maps(tab)
    assert np.array_equal(pixels, drawn(loaded, tmp_path / "a.png", "attention"))
    text = tab.inner_text("body")
    for c, p in zip(classes.tolist(), values.tolist()):
        assert re.search(rf"{NAMES[c]}\s+{round(100 * p)}%", text), text

    tab.get_by_text("Grad-CAM").click()
    source, pixels = shown_maps(tab, source)
    assert np.array_equal(pixels, drawn(loaded, tmp_path / "a.png", "cam"))
    assert tab.inner_text("#explanation") == EXPLANATIONS["cam"]
    tab.click("#target input")
    tab.get_by_role("option", name="fox").click()
    source, pixels = shown_maps(tab, source)
    assert np.array_equal(pixels, drawn(loaded, tmp_path / "a.png", "cam", NAMES.index("fox")))

    tab.get_by_label("Remove Image").click()
    tab.wait_for_selector("#maps img", state="detached")
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes()[:100])
    tab.set_input_files("input[type=file]", tmp_path / "b.png")
    assert tab.wait_for_selector("text=b.png: not a readable image").is_visible()


def test_a_narrow_page_has_examples_and_shows_narrow_pictures_whole(loaded, tab, tmp_path):
    tab.set_viewport_size({"width": 390, "height": 800})
    examples = tab.locator("#examples img")
    examples.nth(1).click()
    _, pixels = shown_maps(tab)
    make_image(tmp_path / "a.png", 2)  # the first of the second class
    assert examples.count() == 2 and np.array_equal(pixels, drawn(loaded, tmp_path / "a.png", "attention"))
    assert tab.evaluate("document.documentElement.scrollWidth") == 390
    upload, classes, maps = (tab.locator(name).bounding_box() for name in ("#image", "#classes", "#maps img"))
    assert upload["y"] + upload["height"] < classes["y"] < maps["y"]
    assert all(
        box["x"] >= 0 and box["x"] + box["width"] <= 390 and box["width"] > 280 for box in (upload, classes, maps)
    )


def test_examples_are_an_image_of_each_of_six_classes_of_a_folder(val, tmp_path):
    assert web.find_examples(val) == [[str(val / name)] for name in ("ant/1.png", "bee/1.png")]
    for i in range(9):
        make_image(val / f"class {i}" / "0.png", i)
    assert len(web.find_examples(val)) == 6
    assert web.find_examples(None) == web.find_examples(tmp_path / "moved.beton") == []


def test_what_the_page_says_needs_no_page(loaded, tmp_path):
    image = make_image(tmp_path / "a.png", 3)
    classes, picture = web.analyze(loaded, str(tmp_path / "a.png"), "field")
    with torch.no_grad():
        expected = loaded.model(image).softmax(1)[0]
    assert len(classes) == 5 and sorted(classes.values(), reverse=True) == list(classes.values())
    assert classes == {name: pytest.approx(expected[NAMES.index(name)].item(), abs=1e-6) for name in classes}
    assert np.array_equal(np.asarray(picture.convert("RGB")), drawn(loaded, tmp_path / "a.png", "field"))
    (tmp_path / "b.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match="b.png: not a readable image"):
        web.analyze(loaded, str(tmp_path / "b.png"), "field")
    with pytest.raises(ValueError, match="a.png: too many pixels .16x16 are more than the limit of 255"):
        web.analyze(loaded, str(tmp_path / "a.png"), "field", max_pixels=255)


def test_without_gradio_or_with_another_model_there_is_a_sentence(tmp_path, monkeypatch, capsys):
    leave_run(tmp_path / "vit", "vit_tiny_patch16_224", num_heads=2)
    assert main(["web", str(tmp_path / "vit")]) == 2
    assert "VisionTransformer, expected a vilonghorn_" in capsys.readouterr().err
    leave_run(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert main(["web", str(tmp_path / "run")]) == 2
    assert "pip install 'gradio>=6.0,<7'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "host, header, accepted",
    [
        ("127.0.0.1", "127.0.0.1:7860", True),
        ("127.0.0.1", "LOCALHOST", True),
        ("127.0.0.1", "[::1]:7860", True),
        ("127.0.0.1", "evil.example:7860", False),
        ("127.0.0.1", "127.0.0.1.evil.example", False),
        ("127.0.0.1", "10.0.0.7", False),
        ("127.0.0.1", "[", False),
        ("127.0.0.1", "", False),
        ("127.0.0.1", "evil.example@localhost", False),
        ("127.0.0.1", "localhost/evil.example", False),
        ("127.0.0.1", "localhost:evil", False),
        ("127.0.0.1", "localhost:", True),
        ("0.0.0.0", "10.0.0.7:80", True),
        ("0.0.0.0", socket.gethostname(), True),
        ("0.0.0.0", "evil.example", False),
    ],
)
def test_a_request_that_names_another_host_is_refused(host, header, accepted):
    answers, passed = [], []

    async def application(*_):
        passed.append(True)

    async def send(message):
        answers.append(message)

    scope = {"type": "http", "headers": [(b"host", header.encode())]}
    asyncio.run(web.HostCheck(application, host)(scope, None, send))
    assert passed == [True] * accepted and [m["status"] for m in answers if "status" in m] == [421] * (not accepted)


@pytest.mark.parametrize("hosts", [[], [b"localhost", b"evil.example"], [b"evil.example", b"localhost"]])
def test_a_request_without_a_host_or_with_two_is_refused(hosts):
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "headers": [(b"host", host) for host in hosts]}
    asyncio.run(web.HostCheck(None, "127.0.0.1")(scope, None, send))
    assert sent[0]["status"] == 421


def test_the_served_page_refuses_a_foreign_host(address):
    with pytest.raises(HTTPError, match="421"):
        urlopen(Request(address, headers={"Host": "evil.example"}))


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_uploads_are_deleted_when_the_server_ends(tmp_path, monkeypatch, end):
    folders = []

    def serve():
        folders.append(Path(os.environ["GRADIO_TEMP_DIR"]))
        (folders[0] / "upload.png").touch()
        os.kill(os.getpid(), end)
        time.sleep(10)

    leave_run(tmp_path / "run")
    monkeypatch.setenv("GRADIO_TEMP_DIR", "")
    monkeypatch.setattr(web, "build_page", lambda *_: SimpleNamespace(block_thread=serve))
    monkeypatch.setattr(web, "launch", lambda *_: "http://127.0.0.1:7860/")
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        assert main(["web", str(tmp_path / "run")]) == 130
    finally:
        signal.signal(signal.SIGINT, ignored)
    assert not folders[0].exists()
