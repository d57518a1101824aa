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
    assert text == make.page(reports), REMEDY
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text):
        assert (ROOT / "docs" / picture).is_file(), picture


def test_the_readmes_comparison_is_made_of_the_committed_studies(reports):
    text = make.README.read_text()
    assert text == make.readme(text, reports), REMEDY
    with pytest.raises(ValueError, match="lacks the lines <!-- comparison -->"):
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


def test_training_images_say_what_the_cells_say():
    report = toy_report()
    reached = np.mean([100 + 100 * 30 / (value - 30) for value in (90, 92, 94)])
    text = make.efficiency(report)
    assert f"| recall | 60% | {reached:,.0f} |" in text and "99%" not in text


def test_a_seed_that_diverged_does_not_count_for_images():
    report = toy_report()
    for name in ("val", "curve"):
        del report.cells[4][name]
    report.cells[4] |= {"diverged": "11 updates in a row", "tests": None}
    assert make.images_to(report, "recall", "vit", 60).keys() == {0, 2}


def test_accuracies_in_the_text_are_means_of_the_report():
    figures = make.Figures({"toy": toy_report()})
    assert figures["toy/recall/large"] == "Longhorn 46.0 ± 1.0%, ViT 36.5 ± 1.3%"
    assert make.Text("at 64: ${toy/recall/large}.").substitute(figures).endswith("36.5 ± 1.3%.")
    points = {name: figures.reports["toy"].accuracies("recall", "large", name) for name in ("longhorn", "vit")}
    for seeds in (tuple(points["vit"]), tuple(points["vit"])[:2]):
        low = np.mean([points["vit"][seed] - points["longhorn"][seed] for seed in seeds])
        assert figures["/".join(["toy/recall/large/vit/longhorn", *map(str, seeds)])].startswith(f"{low:+.1f} [")
    assert figures["toy/recall/large/vit/longhorn"].startswith("-9.5 [")
    with pytest.raises(KeyError):
        figures["other/recall/large"]


def test_published_figures_stand_beside_ours():
    runs = [
        dict(task="parity", rule="mamba", epochs=30, tests={"40": 50.04, "256": 49.0}),
        dict(task="parity", rule="longhorn_exact, eps up to 2", epochs=3, tests={"40": 99.96, "256": 80.0}),
        dict(task="mqar64", rule="longhorn", epochs=2, tests={"accuracy": 99.0}),
    ]
    head, _, *lines = make.outside(runs, {"parity": {"Mamba": 50.0, "DeltaNet": 50.9}}).splitlines()
    ours = "task | Mamba, ours | Longhorn, ours | Longhorn exact, ours | exact, four heads, eps up to 2, ours"
    assert head == f"| {ours} | Mamba, published | DeltaNet, published |"
    assert lines == [
        "| parity, length 40 | 50.0 (30) | – | – | 100.0 (3) | 50.0 | 50.9 |",
        "| parity, length 256 | 49.0 (30) | – | – | 80.0 (3) | 50.0 | 50.9 |",
        "| mqar64 | – | 99.0 (2) | – | – | – | – |",
    ]


def test_a_training_step_costs_what_was_measured():
    rows = [
        {"candidate": name, "ms": ms, "memory_gb": 1.5} for name, ms in (("a", [9.0, 8.0, 7.0]), ("b", [4.0, 5.0, 3.0]))
    ]
    lines = make.step_cost({"batch": 4, "rows": rows}).splitlines()
    assert lines[2:] == ["| a | 2.00 | 1.00 | 1.50 |", "| b | 1.00 | 0.50 | 1.50 |"]


def test_runs_that_did_not_learn_are_counted(reports):
    recall, rates = next(r for r in reports if r.study == "recall"), {"longhorn": 0.016, "mamba": 0.008, "exact": 0.004}
    tasks = ["recall6", "recall4", *(f"recall4_state{size}" for size in (4, 8, 32, 64))]
    found = {name: [] for name in rates}
    for cell in recall.cells:
        if cell["task"] in tasks and cell["rate"] == rates[cell["candidate"]]:
            found[cell["candidate"]].append(cell["tests"]["test"]["top1"])
    counts = {name: (sum(np.array(values) < 90), len(values)) for name, values in found.items()}
    expected = [f"{recall.title(name)} {below} of {runs}" for name, (below, runs) in counts.items()]
    assert make.unlearned(recall) == ", ".join(expected) and {runs for _, runs in counts.values()} == {30}


def test_a_row_of_larger_icons_says_what_the_reports_say(reports):
    icons, large = (next(r for r in reports if r.study == name) for name in ("icons", "icons_large"))
    rows = [line.strip("| ").split(" | ") for line in make.larger(icons, large).splitlines()[2:]]
    assert len(rows) == 10 and {len(row) for row in rows} == {6}
    trained = icons.tested("icons", "mamba").values()
    again = [cell for cell in large.cells if (cell["task"], cell["candidate"]) == ("icons128", "mamba")]
    for runs, sizes in ((trained, "64"), (again, "64, then 128")):
        (found,) = (row for row in rows if row[:2] == ["Mamba", sizes])
        for side, text in zip(("64", "96", "128", "256"), found[2:]):
            means = [run["tests"][side]["top1"] for run in runs if side in run["tests"]]
            assert text.startswith(f"{np.mean(means):.1f} ±") if means else text == make.NONE


def test_a_row_of_switches_says_what_the_reports_say(reports):
    icons, recall = (next(r for r in reports if r.study == name) for name in ("v2", "v2_recall"))
    times = [{"candidate": title, "ms": ms} for title, ms in (("Longhorn exact", [4.0]), ("Four heads", [2, 6, 5, 4]))]
    rows = [line.strip("| ").split(" | ") for line in make.switches(icons, recall, {"rows": times}).splitlines()[2:]]
    (found,) = (row for row in rows if row[0] == "Four heads")
    cells = [[c for c in r.cells if c["candidate"] == "heads" and c["tests"]] for r in (icons, recall)]
    tests = [(cells[0], "64", found[1]), (cells[1], "16", found[3]), (cells[1], "4096", found[4])]
    for runs, test, text in tests:
        assert text.startswith(f"{np.mean([run['tests'][test]['top1'] for run in runs]):.1f}")
    reference = {c["seed"]: c["tests"]["64"]["top1"] for c in icons.cells if c["candidate"] == "exact"}
    gains = [c["tests"]["64"]["top1"] - reference[c["seed"]] for c in cells[0] if c["seed"] in reference]
    assert found[2].startswith(f"{np.mean(gains):+.1f}") and found[5] == "1.12"
    assert {len(row) for row in rows} == {6} and [row[5] for row in rows if row[0] == "Mamba"] == [make.NONE]


def test_every_score_of_a_study_comes_from_its_report():
    for report, other in zip(make.read_reports(make.FOLDER), make.read_reports(make.FOLDER)):
        for cell in other.cells:
            for test in (cell["tests"] or {}).values():
                test |= {metric: test[metric] / 2 + 0.05 for metric in ("top1", "top5")}
        before, after = (make.render(r).splitlines() for r in (report, other))
        scores = [line for line in before if "±" in line]
        assert scores and not set(scores) & set(after)


@pytest.mark.parametrize("epochs", [None, 1, 2])
def test_a_study_has_curves_where_an_epoch_follows_another(epochs, tmp_path):
    report = toy_report(finished=False, cells=[])
    if epochs:
        report = toy_report()
        for cell in report.cells:
            cell["curve"] = [{"images": 10 * (i + 1), "top1": 5.0} for i in range(epochs)]
    assert ("The study is not finished" in make.section(report)) == (epochs is None)
    assert ("Training images to an accuracy" in make.section(report)) == (epochs == 2)
    curves = ["toy-curves.svg"] if epochs == 2 else []
    assert [path.name for path in make.draw_all(report, tmp_path)] == ["toy-recall.svg", *curves]
