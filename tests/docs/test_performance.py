"""The pages on performance, on choosing and the README say what the committed runs say."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "performance"
REMEDY = "run python docs/performance/make.py"


@pytest.fixture
def make(monkeypatch):
    """The module docs/performance/make.py, which imports those beside it."""
    monkeypatch.syspath_prepend(str(FOLDER))
    sys.modules.pop("make", None)
    import make

    yield make
    del sys.modules["make"]


def test_the_committed_pages_are_made_from_the_committed_runs(make):
    for path, contents in make.tables(FOLDER).items():
        assert make.filled(ROOT / path, contents) == (ROOT / path).read_text(), REMEDY
    title = make.plot_title(make.load(FOLDER / make.DRAWN))  # matplotlib writes each title in a comment
    assert f"<!-- {title} -->" in (ROOT / make.PLOT).read_text(), REMEDY


def test_the_first_lines_of_the_readme_are_true_of_every_run(make):
    runs, ratios = [make.load(FOLDER / f"{name}.json") for name in ("cpu-1", "cpu-2", "v2", "v2-highest")], []
    for run in runs:
        models = make.by(run["models"], "model", "size")
        for train in (False, True):
            ours, theirs = (models[name, 1024, train] for name in (make.TINY, make.DEIT_TINY))
            ratios.append(make.ratio(ours, theirs))
    said = f"takes {min(ratios):.2f} to {max(ratios):.2f} of the time of timm's DeiT-Ti on three kinds of processors"
    assert said in (ROOT / make.README).read_text().partition("\n## ")[0]


def test_new_runs_change_pages_and_plot_and_runs_with_gaps_are_refused(make, tmp_path, monkeypatch):
    for path in (*make.tables(FOLDER), *FOLDER.glob("*.json")):
        target = tmp_path / (ROOT / path).relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text((ROOT / path).read_text())
    monkeypatch.chdir(tmp_path)
    (make.FOLDER / "cpu-2.json").unlink()
    run = json.loads((make.FOLDER / "cpu-1.json").read_text())
    for row in run["models"]:
        row["ms"] = [300.0 if "deit" in row["model"] else 100.0] * 3
    (make.FOLDER / "cpu-1.json").write_text(json.dumps(run))
    assert make.main() == 0
    assert "| `vilonghorn_tiny`, 224 px | timm's `deit_tiny_patch16_224` | 0.33 times" in make.README.read_text()
    assert "| 1248 | 6,084 | 0.33 | 0.33 |" in make.PAGE.read_text() and "| 0.33 |" in make.CHOOSING.read_text()
    assert f"<!-- {make.plot_title(make.load(make.FOLDER / make.DRAWN))} -->" in make.PLOT.read_text()
    run["models"][0].update(ms=None, problem="out of memory")
    (make.FOLDER / "cpu-1.json").write_text(json.dumps(run))
    with pytest.raises(SystemExit, match="1 rows without figures, such as 'out of memory'"):
        make.main()
