"""A study chooses learning rates on the validation split, tests once, and reuses what is finished."""

from __future__ import annotations

import json
import math
import shutil
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from toy_study import write_plan

pytest.importorskip("sklearn", reason="the tasks are made of the digits that come with scikit-learn")

from vilonghorn.data.files import only_writer  # noqa: E402
from vilonghorn.study import __main__ as command  # noqa: E402
from vilonghorn.study.cell import plan_hash, run_config  # noqa: E402
from vilonghorn.study.match import match_size  # noqa: E402
from vilonghorn.study.plan import Cell, read_study  # noqa: E402
from vilonghorn.study.results import (  # noqa: E402
    cell_of,
    choose_rate,
    read_report,
    remaining_cells,
    sweep_runs,
)


@pytest.fixture
def write(tmp_path):
    return partial(write_plan, tmp_path / "toy.yaml")


@pytest.fixture
def study(write):
    return read_study(write())


def result(cell, top1=0.0, loss=1.0, **more):
    """The results of a finished cell."""
    tests = {"test": {"top1": top1}, "large": {"top1": top1}}
    return {**asdict(cell), "val": {"top1": top1, "loss": loss}, "seconds": 1.0, "tests": tests, **more}


def remaining(study, results, tasks=None):
    return remaining_cells(study, results, study.tasks if tasks is None else tasks)


def test_a_sweep_comes_first_then_the_seeds_at_the_best_rate(study):
    sweep = remaining(study, [])
    assert [(cell.candidate, cell.rate, cell.seed) for cell in sweep] == [
        (name, rate, 0) for name in ("longhorn", "vit") for rate in (0.001, 0.01)
    ]
    results = [result(cell, top1=90 if cell.rate == 0.01 else 80) for cell in sweep[:3]]
    assert choose_rate(study, results, "recall", "longhorn") == 0.01
    assert choose_rate(study, results, "recall", "vit") is None  # one of its rates is not run yet
    assert remaining(study, results, ["recall", "copy"]) == [  # in this order
        sweep[3],
        Cell("recall", "longhorn", 0.01, 1),  # the seed of the sweep is run already
        Cell("copy", "longhorn", 0.01, 0),  # which takes its rate from the sweep of another task
        Cell("copy", "longhorn", 0.01, 1),
    ]
    assert remaining(study, results, ["copy"]) == [Cell("copy", "longhorn", 0.01, seed) for seed in (0, 1)]
    results.append(result(sweep[3], top1=85))
    assert choose_rate(study, results, "recall", "vit") == 0.01
    while left := remaining(study, results):
        results += [result(cell) for cell in left]
    assert len(results) == 8


def test_a_task_may_have_seeds_of_its_own(write):
    study = read_study(write(tasks__copy__seeds=[7]))
    results = [result(cell) for cell in remaining(study, [])]
    assert remaining(study, results, ["copy"]) == [Cell("copy", "longhorn", 0.001, 7)]
    assert {cell.seed for cell in remaining(study, results, ["recall"])} == {1}


def test_of_equal_rates_the_smaller_loss_counts(study):
    results = [result(cell, top1=50, loss=1 + cell.rate) for cell in remaining(study, [])]
    assert choose_rate(study, results, "recall", "vit") == 0.001


def test_a_rate_that_diverged_comes_last(study):
    results = [result(cell, top1=5) for cell in remaining(study, [])]
    results[1] = {**asdict(Cell("recall", "longhorn", 0.01, 0)), "seconds": 1.0, "tests": None, "diverged": "why"}
    assert choose_rate(study, results, "recall", "longhorn") == 0.001


def test_a_candidate_may_have_rates_of_its_own(write):
    study = read_study(write(candidates__vit__sweep=[0.5]))
    rates = {(cell.task, cell.candidate, cell.rate) for cell in remaining(study, [])}
    assert rates == {("recall", "longhorn", 0.001), ("recall", "longhorn", 0.01), ("recall", "vit", 0.5)}


def test_a_sweep_is_widened_until_the_best_rate_is_inside(write):
    study = read_study(write(tasks__recall__candidates=["longhorn"], tasks__recall__widen=3))
    best, results = 0.0002, []
    for expected in ([0.001, 0.01], [0.0001], [1e-05], []):
        new = [cell for cell in remaining(study, results, ["recall"]) if cell.seed == 0]
        assert [cell.rate for cell in new] == expected
        results += [result(cell, top1=100 - abs(math.log10(cell.rate / best))) for cell in new]
    assert choose_rate(study, results, "recall", "longhorn") == 0.0001
    assert list(sweep_runs(study, results, "recall", "longhorn")) == [1e-05, 0.0001, 0.001, 0.01]
    study.tasks["recall"].widen = 1  # the best rate may stay at the end
    assert list(sweep_runs(study, results, "recall", "longhorn")) == [0.0001, 0.001, 0.01]
    rising = [result(Cell("recall", "longhorn", rate, 0), top1=rate) for rate in (0.001, 0.01)]
    assert remaining(study, rising, ["recall"])[0] == Cell("recall", "longhorn", 0.1, 0)


def test_candidates_have_the_parameters_of_the_reference(study, write):
    kwargs, ours = match_size(study, "recall", "longhorn")
    assert kwargs == {"embed_dim": 16, "depth": 1, "patch_size": 8}
    kwargs, theirs = match_size(study, "recall", "vit")
    assert abs(theirs / ours - 1) < 0.03 and kwargs["num_heads"] == 2
    with pytest.raises(ValueError, match=r"vit has [\d,]+ parameters on task recall, [+-].*at most 3% is allowed"):
        match_size(read_study(write(candidates__vit__match={})), "recall", "vit")
    with pytest.raises(ValueError, match="timm cannot make vit_colossal"):
        match_size(read_study(write(candidates__vit__model="vit_colossal")), "recall", "vit")


def test_of_a_removed_candidate_no_run_is_started_and_finished_ones_stay(write, tmp_path):
    study = read_study(write(candidates__vit=dict(title="ViT", model="gone", kwargs={"gone": 1}, removed=True)))
    assert {cell.candidate for cell in remaining(study, [])} == {"longhorn"}
    cell = Cell("recall", "vit", 0.001, 0)
    row = {**result(cell), "plan": plan_hash(study, tmp_path, cell)}
    report = SimpleNamespace(plan=study, cells=[row])
    command.check_unchanged(report, tmp_path, tmp_path / "results.json")
    study.candidates["vit"].kwargs["gone"] = 2
    with pytest.raises(ValueError, match="has another recipe, model, data or tests than the study"):
        command.check_unchanged(report, tmp_path, tmp_path / "results.json")
    with pytest.raises(ValueError, match="candidate longhorn is removed: .* take another reference"):
        read_study(write(candidates__longhorn__removed=True))


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(reference="mamba"), "there is no candidate 'mamba'; expected one of longhorn, vit"),
        (dict(tasks__copy__rates_of="digits"), "there is no task 'digits'"),
        (dict(tasks__copy__sweep=[0.1]), "task copy: give either sweep"),
        (dict(tasks__copy__candidates=["vit"]), "task copy lacks the reference longhorn"),
        (
            dict(tasks__recall__candidates=["longhorn"], tasks__copy__candidates=["longhorn", "vit"]),
            "which has no sweep for all candidates of copy",
        ),
        (dict(tasks__recall__options__pairs=20), "pairs 20: expected 1 to 7"),
        (dict(tasks__recall__tests__large__grid=7), "grid 7"),
        (dict(tables__recall__points=[["recall", "huge", 1]]), "there is no test set 'huge'"),
        (
            dict(candidates__vit__match={"mlp_ratio": [1, 2, 1], "depth": [1, 2, 1]}),
            "matches depth, mlp_ratio; expected one argument",
        ),
        (dict(tasks__copy__epochs=3), "epochs"),
        (dict(tasks__copy__widen=1), "task copy: widen is 1, expected 0, or more with at least two rates"),
        (dict(tables__recall__metric="top2"), "metric"),
        (dict(tasks__copy__sides=[8, 24]), r"task copy: sides are \[8, 24\], expected 1 to 16, the side of its images"),
        (dict(tasks__copy__min_lr_ratio=1.5), "task copy: min_lr_ratio is 1.5, expected 0 to 1"),
        (dict(seeds=[1, 1]), "a standard deviation needs at least two"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(changes, message, write):
    with pytest.raises(ValueError, match=message):
        read_study(write(**changes))


def test_an_empty_plan_and_a_base_without_a_recipe_are_refused(tmp_path):
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(ValueError, match="title"):
        read_study(tmp_path / "empty.yaml")
    (tmp_path / "more.yaml").write_text("base: empty.yaml\ntitle: More.")
    (tmp_path / "empty.yaml").write_text("title: Empty.")
    with pytest.raises(ValueError, match="reference"):
        read_study(tmp_path / "more.yaml")


def test_the_rate_at_the_end_is_a_share_of_the_cells_own(write, tmp_path):
    study = read_study(write(tasks__copy__min_lr_ratio=0.5))
    ends = [
        run_config(study, tmp_path, Cell(task, "longhorn", 0.004, 1))["schedule"].get("min_lr")
        for task in ("recall", "copy")
    ]
    assert ends == [study.recipe["schedule"].get("min_lr"), 0.002]


def test_a_candidates_recipe_overrides_that_of_the_task(write, tmp_path):
    recipes = dict(
        tasks__copy__recipe={"schedule": {"epochs": 5}}, candidates__longhorn__recipe={"schedule": {"epochs": 3}}
    )
    study = read_study(write(**recipes))
    for task, candidate, epochs in (("copy", "longhorn", 3), ("copy", "vit", 5), ("recall", "longhorn", 3)):
        assert run_config(study, tmp_path, Cell(task, candidate, 0.004, 1))["schedule"]["epochs"] == epochs


def test_a_study_takes_over_what_it_does_not_say(write, tmp_path):
    write()
    (tmp_path / "larger.yaml").write_text("{base: toy.yaml, seeds: [7, 8], recipe: {schedule: {epochs: 9}}}")
    larger = read_study(tmp_path / "larger.yaml")
    assert larger.seeds == [7, 8] and larger.tasks == read_study(tmp_path / "toy.yaml").tasks
    assert larger.recipe["schedule"] == {"epochs": 9, "warmup_epochs": 1} and larger.recipe["ema"] == {"decay": 0.0}


def test_a_missing_study_is_named_with_those_there_are(write, capsys):
    path = write()
    assert command.main([str(path.with_name("other.yaml"))]) == 2
    assert "there is no study" in capsys.readouterr().err


@pytest.mark.needs_ffcv
def test_a_study_runs_to_its_end_is_never_run_again_and_refuses_another_plan(write, tmp_path, capsys, monkeypatch):
    small = dict(
        tasks__copy__candidates=["longhorn"], tasks__recall__candidates=["longhorn"], tasks__recall__sweep=[0.01]
    )
    path, folder = write(**small, thresholds=[5.0]), tmp_path / "runs"
    target = tmp_path / "toy.json"
    arguments = [str(path), "--dir", str(folder), "--processes", "1", "--json", str(target)]
    assert command.main([*arguments, "--list"]) == 0
    assert capsys.readouterr().out == "recall/longhorn/rate0.01-seed0\n"
    assert command.main(arguments) == 0
    report = json.loads(target.read_text())
    assert report["finished"] and len(report["cells"]) == 4 and all(cell["tests"] for cell in report["cells"])
    assert sum(line.startswith("  {") for line in target.read_text().splitlines()) == 4  # a line for each run
    out = capsys.readouterr().out
    assert "### Recall" in out and (folder / "toy-recall.svg").is_file()

    monkeypatch.setattr(command, "worker_pool", lambda workers: nullcontext())  # has no `submit`
    shutil.rmtree(folder)  # the JSON file is all that is needed
    assert command.main(arguments) == 0
    assert json.loads(target.read_text())["cells"] == report["cells"]
    for change in (
        {"recipe__optimizer": {"weight_decay": 0.3}},
        {"tasks__recall__test_count": {"large": 4}},
        {
            "candidates": {"other": {"title": "Longhorn", "model": "vilonghorn_nano"}},
            "reference": "other",
            "tasks__copy__candidates": ["other"],
            "tasks__recall__candidates": ["other"],
        },
    ):
        write(**{**small, **change})
        assert command.main([*arguments, "--list"]) == 2
        message = capsys.readouterr().err
        assert f"{target}: run recall/longhorn/rate0.01-seed0 has another recipe, model, data or tests" in message
    target.write_text("[]")
    assert command.main(arguments) == 2
    assert "toy.json is not the JSON file of a study (TypeError" in capsys.readouterr().err


def test_runs_that_ended_before_an_error_are_kept(write, tmp_path, capsys, monkeypatch):
    study = read_study(write())
    first, second, *_ = remaining(study, [])
    futures = {cell: Future() for cell in (first, second)}

    class Pool:
        def submit(self, call, plan, folder, cell, commit):
            return futures[cell]

    @contextmanager
    def pool(workers):
        futures[first].set_exception(ValueError("no room"))
        try:
            yield Pool()
        finally:
            futures[second].set_result(result(second, top1=12.0, plan=plan_hash(study, tmp_path, second)))

    monkeypatch.setattr(command, "worker_pool", pool)
    monkeypatch.setattr(command, "write_data", lambda *arguments: None)
    arguments = [str(tmp_path / "toy.yaml"), "--dir", str(tmp_path / "runs"), "--processes", "2"]
    assert command.main(arguments) == 2
    assert capsys.readouterr().err == "error: no room\n"
    report = read_report(tmp_path / "runs" / "results.json")
    assert [cell_of(cell) for cell in report.cells] == [second] and not report.finished


def test_a_place_for_the_results_that_is_not_there_is_refused_before_any_work(write, tmp_path, capsys):
    target, folder = tmp_path / "nowhere" / "toy.json", tmp_path / "runs"
    assert command.main([str(write()), "--dir", str(folder), "--json", str(target)]) == 2
    assert f"{target.parent}: no such folder to write toy.json into" in capsys.readouterr().err
    assert not folder.exists()


def test_a_missing_package_is_named_before_any_work(write, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert command.main([str(write()), "--dir", str(tmp_path / "runs")]) == 2
    assert "scipy, which comes with scikit-learn; run: pip install scikit-learn" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_results_that_another_study_writes_are_left_alone(write, tmp_path, capsys):
    file = tmp_path / "results.json"
    with only_writer(file):
        assert command.main([str(write()), "--dir", str(tmp_path / "runs"), "--json", str(file)]) == 2
    assert "is being written by another process" in capsys.readouterr().err and not file.exists()


def test_an_interrupted_study_says_how_to_resume_it(write, tmp_path, capsys, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run", interrupted)
    assert command.main([str(write()), "--dir", str(tmp_path / "runs")]) == 130
    assert "run the same command to resume" in capsys.readouterr().err


def test_the_committed_studies_can_be_run():
    files = list((Path(__file__).parents[2] / "configs" / "studies").glob("*.yaml"))
    assert files
    for file in files:
        study = read_study(file)
        for pair in study.pairs():
            match_size(study, *pair)
