"""The Python code of the pages runs, block after block in one namespace.

tests/benchmarks/test_models_table.py runs that of docs/models.md.
"""

import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import timm
from left_run import NAMES, leave_run
from PIL import Image

from vilonghorn import export
from vilonghorn.engine import build_parser, command_line, parse
from vilonghorn.export.capture import capture
from vilonghorn.export.formats import FORMATS

ROOT = Path(__file__).parents[2]


def run_blocks(page: str, leave_out: str | None = None, first: str = "") -> dict:
    """Runs the Python blocks of a page, `first` those that contain a word, without others; returns their names."""
    names: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    chosen = [block for block in blocks if leave_out is None or leave_out not in block]
    assert chosen and (len(chosen) < len(blocks)) == (leave_out is not None)
    for block in sorted(chosen, key=lambda block: first not in block):
        exec(compile(block, page, "exec"), names)
    return names


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_readme():
    assert run_blocks("README.md")["logits"].shape == (1, 10)


def test_the_page_on_the_block(capsys):
    names = run_blocks("docs/own_model.md")
    shapes = re.findall(r"# (torch\.Size\(.*?\))", (ROOT / "docs" / "own_model.md").read_text(encoding="utf-8"))
    assert capsys.readouterr().out.split("\n") == [*shapes, ""]
    groups = names["optimizer"].param_groups
    assert sum(len(group["params"]) for group in groups) == len(list(names["model"].parameters()))
    assert any(p is names["model"].blocks[0].mixer.dt_bias for p in groups[1]["params"])


def test_the_page_on_clients():
    names = run_blocks("docs/clients.md")
    assert len(names["maps"]) == 4 and names["features"].shape == (2, 512, 7, 7)


def test_the_page_on_questions():
    run_blocks("docs/faq.md")


def test_the_page_on_export(folder, monkeypatch, capsys):
    pytest.importorskip("onnxruntime", reason="pip install vilonghorn[export]")
    small = timm.create_model("vilonghorn_nano", depth=1, embed_dim=32, num_classes=5, dynamic_img_size=True)
    small = small.eval().requires_grad_(False)
    monkeypatch.setattr(export, "load_for_export", lambda name: small)  # the page's is 24 times as deep
    monkeypatch.setattr(sys.modules["vilonghorn.export.verify"], "verify", lambda *args: [])  # tests/export tests it
    small.pretrained_cfg = {**small.pretrained_cfg, "label_names": ["ant", "bee", "cat", "dog", "eel"]}
    (folder / "holiday").mkdir()
    (folder / "photos.onnx").symlink_to("vilonghorn_tiny.onnx")  # which the page writes first
    Image.new("RGB", (40, 30), "gray").save(folder / "holiday/1.jpg")
    FORMATS["pt2"].write(capture(small), folder / "vilonghorn_tiny.pt2", {})
    FORMATS["ort"].write(capture(small, keep_native=True), folder / "vilonghorn_tiny.ort.onnx", {"weights": '"fp32"'})
    names = run_blocks("docs/export.md", first="load_for_export(")
    assert names["logits"].shape == (2, 5) and names["session"].get_inputs()[0].name == "images"
    assert capsys.readouterr().out.split()[-1] == names["classes"][names["scores"].argmax()]


def test_the_page_on_maps(folder):
    leave_run(folder / "runs/digits", "vilonghornv2_nano", stem_stride=2)
    (folder / "data/digits/val/3").mkdir(parents=True)
    Image.new("RGB", (16, 16), "gray").save(folder / "data/digits/val/3/0059.png")
    names = run_blocks("docs/interpret.md", leave_out=None if find_spec("pytorch_grad_cam") else "pytorch_grad_cam")
    tokens = names["maps"].shape[-1] ** 2
    assert names["weights"].shape == (1, 1, 1, 1, tokens) and names["rows"].shape == (1, 1, tokens, tokens, 96)
    assert names["y"].shape == (1, 1, tokens, 96)


def test_the_page_on_predictions(folder, capsys):
    leave_run(folder / "runs/photos")
    (folder / "holiday").mkdir()
    Image.new("RGB", (40, 30), "gray").save(folder / "holiday/1.jpg")
    names = run_blocks("docs/predict.md")
    likeliest = names["photos"].class_names[int(names["probabilities"].argmax())]
    assert capsys.readouterr().out == f"{likeliest} {NAMES}\n"


def commands(page: Path) -> list[list[list[str]]]:
    """The arguments of `vilonghorn` in each block of commands of a page."""
    blocks = re.findall(r"```(\w*)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    lines = [block.replace("\\\n", " ").split("\n") for language, block in blocks if not language]
    start = "vilonghorn "
    return [[shlex.split(line, comments=True)[1:] for line in block if line.startswith(start)] for block in lines]


def test_a_command_reads_the_run_that_one_before_it_has_trained(monkeypatch):
    monkeypatch.setattr(command_line, "check", lambda config: None)  # a model of a package that is not installed
    read = set()
    for page in (ROOT / "docs").rglob("*.md"):
        for block in commands(page):
            trains = [args for name, *args in block if name == "train" and "--resume" not in args]
            written = {parse(build_parser(), args, "digits")[0].run.dir for args in trains}
            runs = {args[0] for name, *args in block if written and args and args[0].startswith("runs/")}
            assert runs <= written, page
            read |= runs
    assert "runs/mambavision" in read
