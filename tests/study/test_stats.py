"""What is said of a study's results is what statistics and the results say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vilonghorn.study import stats
from vilonghorn.study import tables as study_tables
from vilonghorn.study.plots import draw

scipy_stats = pytest.importorskip("scipy.stats", reason="scipy comes with scikit-learn")


def report(ours=(90.0, 92.0, 94.0), theirs=(70.0, 75.0, 74.0), **changes):
    """Two contenders on a task with two test sets, three seeds."""
    cells = [
        dict(
            task="recall",
            contender=name,
            rate=rate,
            seed=seed,
            counts=True,
            parameters=1000,
            commit="abc",
            seconds=36.0,
            val=dict(top1=50.0 + seed, loss=1.0),
            ms_per_image=2.0 + seed,
            kept_bytes_per_image=3e6,
            curve=[dict(images=100, top1=30.0), dict(images=200, top1=value)],
            tests=dict(test=dict(top1=value, chance=10.0), far=dict(top1=value / 2, chance=10.0)),
        )
        for name, rate, values in (("longhorn", 0.01, ours), ("mamba", 0.02, theirs))
        for seed, value in enumerate(values)
    ]
    plan = dict(
        title="A toy.",
        reference="longhorn",
        seeds=[0, 1, 2],
        sweep_seeds=[0],
        thresholds=[60, 99],
        contenders=dict(longhorn=dict(title="Longhorn"), mamba=dict(title="Mamba")),
        tasks=dict(recall=dict(contenders=None, sweep=[0.01, 0.02, 0.03])),
        tables=dict(
            far=dict(title="Far", axis="tokens", log=True, points=[["recall", "test", 16], ["recall", "far", 64]])
        ),
    )
    whole = dict(
        study="toy",
        command=["python", "-m", "x y"],
        commit="abc",
        date="2025-01-02T03",
        finished=True,
        machine=dict(cpu="a processor"),
        seconds=10.0,
        plan=plan,
        cells=cells,
    )
    return whole | changes


def test_intervals_are_students():
    values = [3.0, 4.5, 2.2, 7.1]
    found = stats.interval(values)
    low, high = scipy_stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((low, high)) and found.spread == pytest.approx(
        np.std(values, ddof=1)
    )
    assert found.beyond == (scipy_stats.ttest_1samp(values, 0).pvalue < 0.05)
    one = stats.interval([3.0])
    assert one.mean == 3 and math.isnan(one.spread) and not one.beyond


def test_differences_are_taken_seed_by_seed():
    found = stats.difference({1: 10.0, 2: 20.0, 3: 1.0}, {1: 9.0, 2: 17.0, 4: 99.0})
    assert found.mean == 2 and found.count == 2
    assert stats.difference({1: 10.0}, {2: 10.0}) is None


def test_images_to_an_accuracy_are_interpolated_between_epochs():
    curve = [dict(images=100, top1=30.0), dict(images=200, top1=50.0), dict(images=300, top1=40.0)]
    assert stats.images_to(curve, 30, 10) == 100
    assert stats.images_to(curve, 20, 10) == 50
    assert stats.images_to(curve, 45, 10) == 175
    assert stats.images_to(curve, 51, 10) is None
    assert stats.images_to(curve, 5, 10) == 0


def test_a_ratio_is_a_geometric_mean_of_seeds_that_both_reached_it():
    found = stats.ratio({1: 200.0, 2: 800.0, 3: None}, {1: 100.0, 2: 100.0, 3: 100.0})
    assert found.mean == pytest.approx(4) and found.count == 2
    assert stats.ratio({1: None}, {1: 5.0}) is None


def test_tables_say_what_the_cells_say():
    text = study_tables.tables(report())
    assert "| Longhorn | 92.0 ± 2.0 | 46.0 ± 1.0 |" in text
    assert "| chance | 10.0 | 10.0 |" in text
    low, high = scipy_stats.ttest_1samp([-20, -17, -20], 0).confidence_interval(0.95)
    assert f"| Mamba | **-19.0 [{low:+.1f}, {high:+.1f}]** |" in text
    assert "Worse than Longhorn: Mamba at tokens 16" in text
    assert "Of 2 comparisons, 0.1 would" in text
    assert "recall | 3.00 (3.00) | 3.00 (3.00) |" in text  # median of 2, 3 and 4 ms
    reached = np.mean([100 + 100 * 30 / (value - 30) for value in (90, 92, 94)])
    assert f"| recall | 60% | {reached:,.0f} |" in text and "99%" not in text
    assert (
        "| recall, Longhorn | **50.0** (edge) | diverged |" in text
        and "| recall, Mamba | diverged | **50.0** |" in text
    )
    assert "Seed 0 serves for both" in text and "not finished" not in text


def test_a_rate_that_diverged_from_some_seed_of_the_sweep_is_called_so_and_one_that_was_not_run_is_not():
    found = report(finished=False)
    found["plan"]["sweep_seeds"] = [0, 1]
    lost = {**found["cells"][0], "rate": 0.03, "counts": False, "tests": None}
    found["cells"] += [lost, {**lost, "seed": 1, "diverged": "11 updates in a row"}]
    del found["cells"][-1]["val"]  # the other seed's 50% is not what the rate reached
    assert stats.sweep(found, "recall", "longhorn") == {0.01: 50.5}
    assert "| recall, Longhorn | **50.5** (edge) | – | diverged |" in study_tables.rates(found)


def test_seeds_that_diverged_are_named_and_left_out():
    made = report()
    lost = made["cells"][4]
    for name in ("val", "curve", "ms_per_image", "kept_bytes_per_image"):
        del lost[name]
    lost |= {"diverged": "11 updates in a row", "tests": None}
    text = study_tables.tables(made)
    assert "Diverged and left out: mamba on recall, seed 1." in text
    assert "| Mamba | 72.0 ± 2.8 (2 of 3 seeds) |" in text


def test_what_does_not_stand_out_is_not_said_to():
    text = study_tables.tables(report(theirs=(91.0, 91.0, 95.0)))
    assert "No difference from Longhorn leaves out 0" in text and "**+" not in text
    assert "**The study is not finished" in study_tables.tables(report(finished=False))


def test_plots_are_drawn_equal_for_equal_results(tmp_path):
    files = draw(report(), tmp_path)
    assert [file.name for file in files] == ["toy-far.svg", "toy-curves.svg"]
    first = [file.read_bytes() for file in files]
    assert [file.read_bytes() for file in draw(report(), tmp_path)] == first
