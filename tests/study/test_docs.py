"""The page of the comparison says what the committed studies say, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("scipy", reason="scipy comes with scikit-learn")

from vilonghorn.study import docs as study_docs  # noqa: E402
from vilonghorn.study.plots import draw, plot_file  # noqa: E402

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / study_docs.FOLDER


def test_the_committed_page_is_made_of_the_committed_studies():
    assert (ROOT / study_docs.PAGE).read_text() == study_docs.page(FOLDER, ROOT / study_docs.BENCHMARK), (
        "run python -m vilonghorn.study.docs"
    )


def test_the_readmes_figure_is_of_the_committed_studies():
    text = (ROOT / study_docs.README).read_text()
    assert study_docs.readme(text, study_docs.reports(FOLDER)) == text, "run python -m vilonghorn.study.docs"


def test_a_readme_without_marks_is_refused():
    with pytest.raises(ValueError, match="lacks the marks <!-- comparison -->"):
        study_docs.readme("# A README", study_docs.reports(FOLDER))


def test_a_step_costs_what_the_benchmark_measured():
    rows = [
        dict(model="a", size=32, train=True, ms=[9.0, 4.0, 5.0], batch=2, memory_gb=0.25),
        dict(model="a", size=32, train=False, ms=[1.0], batch=2, memory_gb=0.1),
        dict(model="b", size=64, train=True, ms=[], batch=1, memory_gb=0.5),
        dict(model="b", size=32, train=True, ms=[8.0], batch=1, memory_gb=0.5),
    ]
    lines = study_docs.cost([dict(models=rows), dict(models=rows[:1])]).splitlines()
    assert lines[2:] == ["| 32 | 4 | 2 (0.25) / 2 (0.25) | 8 (0.50) |"]


def test_the_committed_plots_are_of_the_committed_studies(tmp_path):
    """matplotlib leaves a comment with the text of each title."""
    for report in study_docs.reports(FOLDER):
        for made in draw(report, tmp_path):
            committed = (FOLDER / made.name).read_text()
            assert re.findall("<!-- (.*) -->", committed) == re.findall("<!-- (.*) -->", made.read_text())


def test_every_picture_of_the_page_is_there():
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", (ROOT / study_docs.PAGE).read_text()):
        assert (ROOT / "docs" / picture).is_file(), picture


def test_every_number_of_a_section_comes_from_its_report(tmp_path):
    """Other accuracies make another section; the prose around them holds none of its own."""
    for path in FOLDER.glob("*.json"):
        text = path.read_text()
        report, other = json.loads(text), json.loads(text)
        for cell in other["cells"]:
            for test in (cell["tests"] or {}).values():
                test["top1"] = test["top1"] / 2 + 0.05
        before, after = (study_docs.section(r, FOLDER.name).splitlines() for r in (report, other))
        scores = [line for line in before if "±" in line]
        assert scores and not set(scores) & set(after)
        assert plot_file(report, "curves") in study_docs.section(report, FOLDER.name)


def test_an_unfinished_study_is_refused(tmp_path):
    (tmp_path / "half.json").write_text(
        json.dumps(dict(finished=False, command=["python", "-m", "vilonghorn.study", "half"]))
    )
    with pytest.raises(ValueError, match="half.json is of a study that is not finished: go on with python -m"):
        study_docs.reports(tmp_path)
