"""Tables and plots say what statistics and the results say."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from drawn_text import misplaced
from page_tables import filled
from study import results, tables
from toy_study import toy_report as report

scipy_stats = pytest.importorskip("scipy.stats", reason="the statistics (the extra [comparison])")
REMEDY = "run python studies/pages.py"


@pytest.fixture
def pages(script):
    return script("studies/pages")


def test_intervals_are_students():
    values = [3.0, 4.5, 2.2, 7.1]
    found, test = results.interval(values), scipy_stats.ttest_1samp(values, 0)
    assert (found.low, found.high) == pytest.approx(tuple(test.confidence_interval(0.95)))
    assert found.std == pytest.approx(np.std(values, ddof=1)) and found.pvalue == pytest.approx(test.pvalue)
    one = results.interval([3.0])
    assert one.mean == 3 and math.isnan(one.std) and math.isnan(one.pvalue)
    assert results.interval([3.0, 3.0]) == (3, 0, 3, 3, 2, 0) and results.interval([0.0, 0.0]).pvalue == 1


def test_holms_correction_rejects_step_by_step():
    assert results.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert results.holm([0.9, 0.7]) == [1, 1] and results.holm([]) == []


def test_differences_are_paired_by_seed_and_bold_where_holms_correction_leaves_them():
    found = report(ours=(10.0, 20.0, 1.0), theirs=(9.0, 17.0)).difference("recall", "test", "vit")
    assert found.mean == -2 and found.count == 2
    assert report(theirs=()).difference("recall", "test", "vit") is None
    pvalue = scipy_stats.ttest_1samp([-20, -17, -20], 0).pvalue  # of both test sets: one is half of the other
    expected = {("recall", test, "vit", "top1"): 2 * pvalue for test in ("test", "large")}
    assert report().adjusted() == pytest.approx(expected)
    low, high = scipy_stats.ttest_1samp([-1, -0.8, -0.9], 0).confidence_interval(0.95)
    assert f"| ViT | **-0.9 [{low:+.1f}, {high:+.1f}]** |" in tables.render(report(theirs=(89.0, 91.2, 93.1)))
    made = report(theirs=(88.5, 91.2, 93.1))  # a p-value between 0.025 and 0.05
    assert "| ViT | -1.1 [" in tables.render(made)


def test_tables_say_what_the_runs_say():
    made = report()
    text = tables.render(made)
    assert "| Longhorn | 92.0 ± 2.0 | 46.0 ± 1.0 |" in text and "| chance | 10.0 | 10.0 |" in text
    assert "| recall, Longhorn | **50.0** (edge) | diverged | diverged |" in text
    assert "seeds 0, 1, 2, for the learning rates 0." in text and "not finished" not in text


def test_seeds_that_diverged_are_named_and_left_out(pages):
    made = report(finished=False)
    for name in ("val", "curve"):
        del made.cells[4][name]
    made.cells[4] |= {"diverged": "11 updates in a row", "tests": None}
    text = tables.render(made)
    assert "Diverged and left out: vit on recall, seed 1" in text and "**The study is not finished" in text
    assert "| ViT | 72.0 ± 2.8 (2 of 3 seeds) |" in text
    assert pages.images_to(made, "recall", "vit", 60).keys() == {0, 2}


def test_images_to_an_accuracy_are_interpolated_and_their_ratio_is_a_geometric_mean(pages, monkeypatch):
    curve = [dict(images=100, top1=30.0), dict(images=200, top1=50.0), dict(images=300, top1=40.0)]
    expected = {30: 100, 20: 50, 45: 175, 51: None, 5: 0}
    assert {accuracy: pages.first_reached(curve, accuracy, 10) for accuracy in expected} == expected
    found = pages.geometric_ratio({1: 200.0, 2: 800.0, 3: None}, {1: 100.0, 2: 100.0, 3: 100.0})
    assert found.mean == pytest.approx(4) and found.count == 2
    assert pages.geometric_ratio({1: None}, {1: 5.0}) is None
    reached = np.mean([100 + 100 * 30 / (value - 30) for value in (90, 92, 94)])
    monkeypatch.setattr(pages, "report", lambda study: report())
    assert f"| 60% | {reached:,.0f} |" in pages.images_table("toy", "recall")


def test_an_interval_of_folds_is_wider_by_the_photographs_that_they_share(pages):
    values = [1.0, 2.0, 0.5, 3.0, 2.5]
    plain, wider = results.interval(values), pages.corrected(values, 0.25)
    assert wider.mean == plain.mean and wider.high - wider.low == pytest.approx(1.5 * (plain.high - plain.low))


def test_the_committed_pages_have_the_tables_of_the_committed_results(pages):
    for path, contents in pages.tables().items():
        assert path.read_text(encoding="utf-8") == filled(path, contents), f"{path}: {REMEDY}"


def test_the_ratios_in_the_text_on_recall_are_those_of_its_table_of_costs(pages):
    text = (pages.DOCS / "comparison" / "recall.md").read_text(encoding="utf-8")
    exact, attention = ([pages.costs(name, key) for key in ("seconds", "mb")] for name in ("exact", "log_scaled"))
    time, memory = (long[2**16] / short[2**16] for long, short in zip(attention, exact))
    assert f"takes {time:.0f} times the time and {memory:.0f} times the memory" in text
    assert "memory more than doubles from 1,024 tiles to a million" in text
    assert 2 < exact[1][2**20] / exact[1][2**10] < 3


def test_the_committed_plots_are_made_of_the_committed_results(pages, tmp_path):
    """Compares texts only, as the paths depend on the version of matplotlib."""
    folder, again = pages.DOCS / "comparison", tmp_path / "again"
    again.mkdir()
    for made, same in zip(pages.draw_plots(tmp_path), pages.draw_plots(again), strict=True):
        committed, new = (re.findall("<text[^>]*>([^<]*)", p.read_text()) for p in (folder / made.name, made))
        assert committed == new and new, REMEDY
        assert made.read_bytes() == same.read_bytes()
    assert {file.name for file in folder.glob("*.svg")} == {file.name for file in tmp_path.glob("*.svg")}


def test_more_than_six_candidates_have_a_plot_each_with_their_titles_beside_the_reference(pages):
    drawn = tables.figure(pages.report("v2"), "top1")
    shown = [axes for axes in drawn.axes if axes.axison]
    titles = [" ".join(axes.get_title().split()) for axes in shown]
    assert "Convolution over the grid" in titles and len(titles) == len(set(titles)) > 6
    assert all(len(axes.containers) == 2 and axes.get_legend() is None for axes in shown)
    assert [pair for pair in misplaced(drawn) if not pair[0].isdigit()] == []  # ticks outside the limits are not drawn
    assert not tables.figure(report(cells=[]), "recall").legends
    one = tables.figure(pages.report("icons"), "top1")
    assert len(one.axes) == 1 and len(one.legends[0].get_texts()) == 4
