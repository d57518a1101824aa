"""The page on models says what the registry says."""

import re
from pathlib import Path

import pytest
import timm
import torch

from vilonghorn.ops import backends

ROOT = Path(__file__).parents[2]


@pytest.fixture
def make_table(script):
    return script("benchmarks/models_table")


@pytest.mark.skipif(
    backends()["cpu"] != "ready", reason="the page's memory is that of the CPU kernels, which are not built"
)
def test_the_committed_page_is_made_of_the_registry(make_table):
    text, names = (ROOT / make_table.PAGE).read_text(encoding="utf-8"), make_table.names()
    lines = re.search("<!-- models.*?<!-- end of models", text, re.DOTALL)[0].splitlines()
    listed = [line.split("`")[1] for line in lines if line.startswith("| `")]
    assert listed == names, "run python benchmarks/models_table.py"
    modules = ("vilonghorn", "vilonghornv2", "vim")
    assert sorted(listed) == sorted(name for module in modules for name in timm.list_models(module=module))
    for row in make_table.table(names[::9]).splitlines():  # some, because all take a minute
        assert row in lines, "run python benchmarks/models_table.py"


def test_the_cost_estimated_from_two_blocks_is_that_of_all(make_table, name="vilonghorn_nano"):
    estimated = make_table.cost(name, 96)
    assert estimated == pytest.approx(make_table.count(name, 96), rel=1e-9)
    model = timm.create_model(name, img_size=96).train()
    saved = make_table.saved_bytes(model, torch.randn(1, 3, 96, 96))
    assert saved / 1e6 == pytest.approx(estimated.training_mb)


def test_what_the_page_shows_runs(make_table, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": timm.create_model("vim_tiny").state_dict()}, "vim_t_midclstok_76p1acc.pth")
    names = {}  # one block goes on with those of the one before
    for block in re.findall(r"```python\n(.*?)```", (ROOT / make_table.PAGE).read_text(encoding="utf-8"), re.DOTALL):
        exec(block, names)
    assert "[1, 192, 14, 20]" in capsys.readouterr().out
