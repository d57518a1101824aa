"""The committed page, its plots and the README's comparison are what docs/comparison/make.py makes of the reports."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
from toy_study import toy_report

pytest.importorskip("scipy", reason="scipy is a dependency of scikit-learn")

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("make_comparison", ROOT / "docs" / "comparison" / "make.py")
make = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make)
REMEDY = "run python docs/comparison/make.py"


@pytest.fixture(scope="module")
def reports():
    return make.read_reports(make.FOLDER)


def test_the_committed_page_is_made_of_the_committed_studies(reports):
    text = make.PAGE.read_text()
    assert text == make.page(reports, ROOT / "docs" / "performance"), REMEDY
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text):
        assert (ROOT / "docs" / picture).is_file(), picture


def test_the_readmes_comparison_is_made_of_the_committed_studies(reports):
    text = make.README.read_text()
    assert text == make.readme(text, reports), REMEDY
    with pytest.raises(ValueError, match="lacks the marks <!-- comparison -->"):
        make.readme("# A README", reports)


def test_the_committed_plots_are_made_of_the_committed_studies(reports, tmp_path):
    """Compares texts only, as the paths depend on the version of matplotlib."""
    for made in (path for report in reports for path in make.draw_all(report, tmp_path)):
        committed, new = (
            re.findall("<text[^>]*>([^<]*)", path.read_text()) for path in (make.FOLDER / made.name, made)
        )
        assert committed == new and new, REMEDY


def test_a_step_costs_what_the_benchmark_measured():
    rows = [
        dict(model="a", size=32, train=True, ms=[9.0, 4.0, 5.0], batch=2, memory_gb=0.25),
        dict(model="a", size=32, train=False, ms=[1.0], batch=2, memory_gb=0.1),
        dict(model="b", size=64, train=True, ms=[], batch=1, memory_gb=0.5),
        dict(model="b", size=32, train=True, ms=[8.0], batch=1, memory_gb=0.5),
    ]
    lines = make.cost([dict(models=rows), dict(models=rows[:1])]).splitlines()
    assert lines[2:] == ["| 32 | 4 | 2 (0.25) / 2 (0.25) | 8 (0.50) |"]


def test_images_to_an_accuracy_are_interpolated_between_epochs():
    curve = [dict(images=100, top1=30.0), dict(images=200, top1=50.0), dict(images=300, top1=40.0)]
    expected = {30: 100, 20: 50, 45: 175, 51: None, 5: 0}
    assert {accuracy: make.first_reached(curve, accuracy, 10) for accuracy in expected} == expected


def test_a_ratio_is_a_geometric_mean_of_seeds_that_both_reached_it():
    found = make.geometric_ratio({1: 200.0, 2: 800.0, 3: None}, {1: 100.0, 2: 100.0, 3: 100.0})
    assert found.mean == pytest.approx(4) and found.count == 2
    assert make.geometric_ratio({1: None}, {1: 5.0}) is None


def test_training_images_and_costs_say_what_the_cells_say():
    report = toy_report()
    reached = np.mean([100 + 100 * 30 / (value - 30) for value in (90, 92, 94)])
    text = make.efficiency(report)
    assert f"| recall | 60% | {reached:,.0f} |" in text and "99%" not in text
    assert "recall | 3.00 (3.00) | 3.00 (3.00) |" in make.costs(report)  # median of 2, 3 and 4 ms


def test_a_seed_that_diverged_counts_neither_for_images_nor_for_costs():
    report = toy_report()
    for name in ("val", "curve", "ms_per_image", "kept_bytes_per_image"):
        del report.cells[4][name]
    report.cells[4] |= {"diverged": "11 updates in a row", "tests": None}
    assert make.images_to(report, "recall", "vit", 60).keys() == {0, 2}
    assert "recall | 3.00 (3.00) | 3.00 (3.00) |" in make.costs(report)  # median of 2 and 4 ms


def test_every_score_of_a_study_comes_from_its_report():
    for path in make.FOLDER.glob("*.json"):
        report, other = (make.read_report(path) for _ in range(2))
        for cell in other.cells:
            for test in (cell["tests"] or {}).values():
                test["top1"] = test["top1"] / 2 + 0.05
        before, after = (make.render(r).splitlines() for r in (report, other))
        scores = [line for line in before if "±" in line]
        assert scores and not set(scores) & set(after)


def test_a_study_without_results_has_a_section_and_plots_too(tmp_path):
    report = toy_report(finished=False, cells=[])
    assert "The study is not finished" in make.section(report)
    assert [path.name for path in make.draw_all(report, tmp_path)] == ["toy-recall.svg", "toy-curves.svg"]
