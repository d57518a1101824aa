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
