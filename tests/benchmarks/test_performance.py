"""The pages on speed and the README say what the committed runs say."""

import re
from pathlib import Path

import pytest
from page_tables import filled

ROOT = Path(__file__).parents[2]
REMEDY = "run python benchmarks/pages.py"


@pytest.fixture
def pages(script):
    return script("benchmarks/pages")


def test_the_committed_pages_have_the_tables_of_the_committed_runs(pages):
    for path, contents in pages.tables().items():
        assert path.read_text(encoding="utf-8") == filled(path, contents), f"{path}: {REMEDY}"
    title = pages.plot_title(pages.load(pages.V2_RUN))  # matplotlib writes each title in a comment
    assert f"<!-- {title} -->" in (ROOT / "docs/performance/speed.svg").read_text(), REMEDY


def test_the_ratios_of_the_readme_are_those_of_the_committed_runs(pages):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    said = re.findall(r"(?<![\d.])(?:\d\.\d\d to \d\.\d\d|[01]\.\d\d)(?!\d)", text)
    assert said and [figures for figures in said if figures not in pages.claims().values()] == []


def test_a_range_has_both_ends_once(pages):
    assert pages.extent([0.3, 0.104, None, 0.126]) == "0.10 to 0.30"
    assert pages.extent([0.301, 0.3]) == "0.30" and pages.extent([None]) == "-"


def test_models_without_figures_are_named(pages):
    row = dict(model="shvit_s2", form="int8", problem=None)
    rows = [dict(row, model=name) for name in pages.front.RIVALS]
    assert pages.front_gaps(dict(rows=rows)) == "All models of the pool were timed."
    found = pages.front_gaps(dict(rows=[*rows[1:], dict(row, problem="RuntimeError: no operator")]))
    assert found == (
        "Not timed yet, so the ratios to their class may be too low: `efficientvit_b0`.\n\n"
        "`shvit_s2`, int8: `RuntimeError: no operator`"
    )


def test_the_range_of_ratios_says_where_the_model_is_slower(pages):
    row = dict(model=pages.V2, form="ort", size=224, batch=1, threads=1, run="a", ms=[4.0], problem=None)
    rows = [row, dict(row, model="shvit_s2", ms=[2.0]), dict(row, model="repvit_m1", ms=[8.0])]
    rows += [dict(row, threads=2), dict(row, threads=2, model="shvit_s2", ms=[8.0])]
    other = [dict(row, ms=[12.0]), dict(row, model="repvit_m1", ms=[8.0])]
    found = [list(line.values()) for line in pages.front_ranges([dict(rows=rows), dict(rows=other)])]
    assert found[0] == ["float32", "71 to 76%", "0.50 to 2.00", "0.50 to 2.00", "-", "1 of 2"]
    assert found[1] == ["float32", "77 to 80%", "0.50 to 1.50", "0.50", "1.50", "1 of 2"]
    assert found[2:] == [["int8", title, "-", "-", "-", "0 of 0"] for title in ("71 to 76%", "77 to 80%")]
