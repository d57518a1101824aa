"""Tables and plots say what statistics and the results say."""

from __future__ import annotations

import math

import numpy as np
import pytest
from toy_study import toy_report as report
from vilonghorn.study import results, tables
from vilonghorn.study.plots import draw

scipy_stats = pytest.importorskip("scipy.stats", reason="scipy is a dependency of scikit-learn")


def test_intervals_are_students():
    values = [3.0, 4.5, 2.2, 7.1]
    found, test = results.interval(values), scipy_stats.ttest_1samp(values, 0)
    assert (found.low, found.high) == pytest.approx(tuple(test.confidence_interval(0.95)))
    assert found.std == pytest.approx(np.std(values, ddof=1)) and found.pvalue == pytest.approx(test.pvalue)
    one = results.interval([3.0])
    assert one.mean == 3 and math.isnan(one.std) and math.isnan(one.pvalue)
    assert results.interval([3.0, 3.0]) == (3, 0, 3, 3, 2, 0)
    assert results.interval([0.0, 0.0]).pvalue == 1


def test_holms_correction_rejects_step_by_step():
    """By definition: the k-th smallest of m p-values is rejected while it is below level / (m - k + 1)."""
    rng = np.random.default_rng(0)
    for values in (rng.uniform(size=9) ** 4, [0.01, 0.04, 0.03, 0.005], [0.02, 0.02], [0.9], []):
        adjusted = results.holm(list(values))
        for level in (0.01, 0.03, 0.05, 0.2, 0.6):
            rejected, order = set(), np.argsort(values, kind="stable")
            for k, index in enumerate(order):
                if values[index] > level / (len(order) - k):
                    break
                rejected.add(index)
            assert {i for i, value in enumerate(adjusted) if value <= level} == rejected
    assert results.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_bold_differences_are_those_that_holms_correction_leaves():
    made = report()
    pvalue = scipy_stats.ttest_1samp([-20, -17, -20], 0).pvalue  # of both test sets: one is half of the other
    assert made.adjusted() == pytest.approx({("recall", test, "vit", "top1"): 2 * pvalue for test in ("test", "large")})
    made = report(theirs=(89.0, 91.2, 93.1))
    low, high = scipy_stats.ttest_1samp([-1, -0.8, -0.9], 0).confidence_interval(0.95)
    assert f"| ViT | **-0.9 [{low:+.1f}, {high:+.1f}]** |" in tables.render(made)
    made = report(theirs=(88.5, 91.2, 93.1))  # a p-value between 0.025 and 0.05
    assert high < 0 and "| ViT | -1.1 [" in tables.render(made)


def test_a_table_of_top_5_has_its_own_scores_and_chance():
    made = report()
    made.plan.tables["recall"].metric = "top5"
    for cell in made.cells:
        for test in (cell["tests"] or {}).values():
            test["top5"] = test["top1"] + 1
    text = tables.render(made)
    assert "| test top-5, % |" in text and "| Longhorn | 93.0 ± 2.0 | 47.0 ± 1.0 |" in text
    assert "| chance | 50.0 | 50.0 |" in text


def test_differences_are_taken_seed_by_seed():
    made = report(ours=(10.0, 20.0, 1.0), theirs=(9.0, 17.0))
    found = made.difference("recall", "test", "vit")
    assert found.mean == -2 and found.count == 2
    assert report(theirs=()).difference("recall", "test", "vit") is None


def test_tables_say_what_the_cells_say():
    text = tables.render(report())
    assert "| Longhorn | 92.0 ± 2.0 | 46.0 ± 1.0 |" in text
    assert "| chance | 10.0 | 10.0 |" in text
    low, high = scipy_stats.ttest_1samp([-20, -17, -20], 0).confidence_interval(0.95)
    assert f"| ViT | **-19.0 [{low:+.1f}, {high:+.1f}]** |" in text
    assert "| recall, Longhorn | **50.0** (edge) | diverged | diverged |" in text
    assert "| recall, ViT | diverged | **50.0** | diverged |" in text
    assert (
        "Seeds 0, 1, 2; for the learning rates 0." in text
        and "not finished" not in text
        and "Commit 0123456789+ (" in text
    )


def test_a_rate_that_diverged_with_some_seed_says_so_and_one_that_was_not_run_does_not():
    made = report(finished=False)
    made.plan.sweep_seeds = [0, 1]
    del made.cells[-4]  # longhorn at 0.02
    made.cells += [{**made.cells[0], "rate": 0.03, "seed": 1, "tests": None}]
    text = tables.rates(made)
    assert "| recall, Longhorn | 50.5 | – | diverged |" in text  # none is chosen before the sweep is finished
    assert results.choose_rate(made.plan, made.cells, "recall", "longhorn") is None


def test_seeds_that_diverged_are_named_and_left_out():
    made = report()
    lost = made.cells[4]
    for name in ("val", "curve"):
        del lost[name]
    lost |= {"diverged": "11 updates in a row", "tests": None}
    text = tables.render(made)
    assert "Diverged and left out: vit on recall, seed 1" in text
    assert "| ViT | 72.0 ± 2.8 (2 of 3 seeds) |" in text


def test_a_difference_within_chance_is_not_bold():
    low, high = scipy_stats.ttest_1samp([1, -1, 1], 0).confidence_interval(0.95)
    assert f"| ViT | +0.3 [{low:+.1f}, {high:+.1f}] |" in tables.render(report(theirs=(91.0, 91.0, 95.0)))
    assert "**The study is not finished" in tables.render(report(finished=False))


def test_equal_results_make_equal_plots(tmp_path):
    files = draw(report(), tmp_path)
    assert [file.name for file in files] == ["toy-recall.svg"]
    first = [file.read_bytes() for file in files]
    assert [file.read_bytes() for file in draw(report(), tmp_path)] == first
