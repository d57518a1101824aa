"""`--to web`: the page shows the model's numbers, and asks nothing of other servers."""

import hashlib
import json
import shutil
import tarfile
import threading
import warnings
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import yaml
from left_run import leave_run, make_image
from PIL import Image
from timm.data import create_transform, resolve_model_data_config

from vilonghorn.data import write_beton
from vilonghorn.export import web_page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ARCHIVE = Path(torch.hub.get_dir(), web_page.RUNTIME)  # real only where `vilonghorn web` has downloaded it


@pytest.fixture(scope="module")
def model(small):
    model = small("vilonghornv2_nano")
    model.pretrained_cfg = {**model.pretrained_cfg, "input_size": (3, 32, 32), "crop_pct": 0.9}
    return model


@pytest.fixture(scope="module", autouse=True)
def runtime(tmp_path_factory):
    """The runtime, or files of its names."""
    folder = tmp_path_factory.mktemp("hub")
    with tarfile.open(folder / web_page.RUNTIME, "w:gz") as archive:
        for name in web_page.RUNTIME_FILES:
            (folder / name).write_bytes(b"not the runtime")
            archive.add(folder / name, f"package/dist/{name}")
    with pytest.MonkeyPatch.context() as patch:
        if not ARCHIVE.exists():
            patch.setattr(torch.hub, "get_dir", lambda: str(folder))
        yield folder / web_page.RUNTIME


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("web") / "page"
    folder.mkdir()  # an empty folder is replaced
    assert max(error for _, error in web_page.write_page(model, folder)) < 1e-5
    return folder


@pytest.fixture
def tab(folder):
    """Opens a page in a window of a width; afterwards says that all requests were for its server."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'vilonghorn[test]'")
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    if not ARCHIVE.exists():
        pytest.skip(f"needs {ARCHIVE}, which vilonghorn web downloads")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=folder.parent))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address, asked = f"http://127.0.0.1:{server.server_port}/", []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])

        def open_page(width, folder=folder):
            tab = browser.new_page(viewport=dict(width=width, height=900))
            tab.on("request", lambda request: asked.append(request.url))
            tab.goto(f"{address}{folder.name}/")
            return tab

        yield open_page
        browser.close()
    server.shutdown()
    assert all(url.startswith((address, "data:")) for url in asked)


def test_a_page_without_the_runtime_says_which_command_writes_it(folder, tab):
    part = shutil.copytree(folder, folder.with_name("part"))
    (part / web_page.RUNTIME_FILES[0]).unlink()
    page = tab(390, part)
    page.wait_for_selector("#missing:visible")
    assert page.inner_text("#commands").startswith("vilonghorn export MODEL --to web") and not page.is_visible("#app")


@pytest.mark.parametrize("size", [(90, 61), (23, 40)])
def test_the_page_shows_the_numbers_of_the_model(size, model, folder, tab, tmp_path):
    make_image(tmp_path / "a.png", 1)
    picture = Image.open(tmp_path / "a.png").convert("RGB").resize(size, Image.Resampling.BICUBIC)
    picture.save(tmp_path / "a.png")
    scores, maps = web_page.ClassMaps(model)(create_transform(**resolve_model_data_config(model))(picture)[None])
    for width in (1280, 390):
        page = tab(width)
        page.wait_for_selector("body[data-ready]")
        page.set_input_files("#file", tmp_path / "a.png")
        page.wait_for_selector("#classes button")
        shown = {
            int(b.get_attribute("data-index")): float(b.get_attribute("value")) for b in page.locator("button").all()
        }
        expected = [scores.softmax(1)[0, index].item() for index in shown]
        assert [*shown.values()] == pytest.approx(expected, abs=1e-4) and len(shown) == 5
        assert page.evaluate("document.documentElement.scrollWidth") == width
        drawn = page.evaluate("Array.from(result.maps.data)")
        torch.testing.assert_close(torch.tensor(drawn), maps.flatten(), rtol=0, atol=1e-4)
    (tmp_path / "b.png").write_bytes(b"no image")
    page.set_input_files("#file", tmp_path / "b.png")
    page.wait_for_selector("text=b.png is not a picture that this browser can read")


def test_keys_choose_a_picture_and_a_page_without_maps_says_why(small, folder, tab, tmp_path):
    model = small("vilonghorn_nano", global_pool="token")
    model.pretrained_cfg = {**model.pretrained_cfg, "input_size": (3, 32, 32)}
    web_page.write_page(model, folder.with_name("token"))
    make_image(tmp_path / "a.png", 1)
    for at, maps in ((folder, True), (folder.with_name("token"), False)):
        page = tab(390, at)
        page.wait_for_selector("body[data-ready]")
        page.keyboard.press("Tab")
        page.wait_for_selector("#file:focus")
        page.set_input_files("#file:focus", tmp_path / "a.png")
        page.wait_for_selector("#classes button")
        assert page.is_visible("#controls") == maps != page.is_visible("text=this model classifies one class token")
        page.keyboard.press("Tab")
        if maps:
            page.keyboard.press("Tab")
            page.keyboard.press("Enter")
            assert page.get_attribute("button:focus", "aria-pressed") == "true"
            assert page.locator("#classes button").nth(1).get_attribute("aria-pressed") == "true"
            page.focus("#overlay")
            page.keyboard.press("Space")
            assert not page.is_visible("#map")


def test_a_class_map_has_the_score_as_its_mean_and_a_class_token_has_none(small, images):
    for name, kwargs in (("vilonghornv2_nano", {}), ("vilonghorn_nano", dict(global_pool="avg"))):
        model = small(name, **kwargs)
        scores, maps = web_page.ClassMaps(model)(images(2, 3, 32, 64))
        assert web_page.without_maps(model) is None
        torch.testing.assert_close(maps.mean((2, 3)) + model.get_classifier().bias, scores, rtol=0, atol=1e-5)
    assert "classifies one class token" in web_page.without_maps(small("vilonghorn_nano", global_pool="token"))


def test_the_page_opens_with_the_first_example(model, folder, tab, tmp_path, monkeypatch):
    make_image(tmp_path / "a.png", 1)
    pictures = web_page.read_examples("vilonghornv2_nano", [tmp_path / "a.png", tmp_path / "a.png"])
    pictures[1] = pictures[1].resize((700, 90))
    monkeypatch.setattr(web_page, "export", lambda _, __, path, **___: shutil.copyfile(folder / "model.onnx", path))
    web_page.write_page(model, folder.with_name("examples"), pictures)
    page = tab(390, folder.with_name("examples"))
    page.wait_for_selector("body[data-ready]")
    assert page.is_visible("#map") and page.locator("#classes button").count() == 5
    about = page.inner_text("#about")
    assert about.startswith("5 classes") and about.endswith("The model sees 32 × 32 pixels.")
    page.click("#examples button >> nth=1")
    page.wait_for_selector("text=Example 2,")
    assert page.get_attribute("#examples button >> nth=1", "aria-pressed") == "true"
    assert page.evaluate("document.querySelectorAll('#examples img')[1].naturalWidth") == web_page.SIDE


@pytest.mark.parametrize("beton", [False, True])
def test_the_examples_of_a_run_are_held_out_images_of_any_classes(beton, tmp_path):
    leave_run(tmp_path / "run")
    for i in range(5):
        make_image(tmp_path / f"val/other-{i % 2}/{i}.png", i)
    val = tmp_path / "val"
    if beton:
        pytest.importorskip("ffcv")
        val = tmp_path / "val.beton"
        write_beton(tmp_path / "val", val)
    config = tmp_path / "run/config.yaml"
    text = yaml.safe_load(config.read_text())
    for source, count in ((val, 3), (tmp_path / "missing", 0)):
        text["data"]["val"] = str(source)
        config.write_text(yaml.safe_dump(text))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pictures = web_page.read_examples(str(tmp_path / "run"))
        assert [picture.mode for picture in pictures] == ["RGB"] * count
        assert any("no examples from data.val of the run" in str(w.message) for w in caught) == (count == 0)
    with pytest.raises(ValueError, match="missing: there is no such file"):
        web_page.read_examples("vilonghornv2_nano", [tmp_path / "missing"])


def test_the_folder_describes_the_model_and_a_full_one_is_refused(model, folder):
    about = json.loads((folder / "model.json").read_text())
    assert about["preprocessing"]["input_size"] == [3, 32, 32] and about["without_maps"] is None
    files = {"index.html", "page.js", "model.json", "model.onnx", *web_page.RUNTIME_FILES}
    assert {file.name for file in folder.iterdir()} == files
    with pytest.raises(FileExistsError, match="exists; remove it or give another name"):
        web_page.write_page(model, folder)
    with pytest.raises(ValueError, match="expected one of box"):
        model.pretrained_cfg["interpolation"] = "nearest"
        web_page.write_page(model, folder)


def test_the_runtime_is_downloaded_once_and_another_file_is_refused(runtime, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.setattr(web_page, "RUNTIME_URL", runtime.as_uri())
    with pytest.raises(OSError, match=f"the page needs {runtime.as_uri()} .invalid hash value.*copy this file to"):
        web_page.fetch_runtime()
    monkeypatch.setattr(web_page, "RUNTIME_SHA256", hashlib.sha256(runtime.read_bytes()).hexdigest())
    assert web_page.fetch_runtime().read_bytes() == runtime.read_bytes()
    monkeypatch.setattr(web_page, "RUNTIME_URL", "file:///nowhere")
    assert web_page.fetch_runtime().parent == tmp_path / "hub"
