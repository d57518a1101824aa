"""A study chooses learning rates on the validation split, tests once, and reuses what is finished."""

from __future__ import annotations

import json
import math
import shutil
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from study import command
from study.plan import Cell, match_size, read_study
from study.results import choose_rate, read_report, remaining_cells, sweep_runs
from toy_study import write_plan

pytest.importorskip("sklearn", reason="the tasks are made of the digits that come with scikit-learn")


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
    assert remaining(study, results, ["recall", "copy"]) == [
        sweep[3],
        Cell("recall", "longhorn", 0.01, 1),  # the seed of the sweep is run already
        Cell("copy", "longhorn", 0.01, 0),  # takes its rate from the sweep of another task
        Cell("copy", "longhorn", 0.01, 1),
    ]
    results.append(result(sweep[3], top1=85))
    while left := remaining(study, results):
        results += [result(cell) for cell in left]
    assert len(results) == 8


def test_a_sweep_is_widened_until_the_best_rate_is_inside(write):
    study = read_study(write(tasks__recall__candidates=["longhorn"], tasks__recall__widen=3, tasks__copy__seeds=[7]))
    best, results = 0.0002, []
    for expected in ([0.001, 0.01], [0.0001], [1e-05], []):
        new = [cell for cell in remaining(study, results, ["recall"]) if cell.seed == 0]
        assert [cell.rate for cell in new] == expected
        results += [result(cell, top1=100 - abs(math.log10(cell.rate / best))) for cell in new]
    assert choose_rate(study, results, "recall", "longhorn") == 0.0001
    assert remaining(study, results, ["copy"]) == [Cell("copy", "longhorn", 0.0001, 7)]
    study.tasks["recall"].widen = 1  # the best rate may stay at the end
    assert list(sweep_runs(study, results, "recall", "longhorn")) == [0.0001, 0.001, 0.01]


def test_candidates_have_the_parameters_of_the_reference_and_may_have_rates_of_their_own(study, write):
    ours, (kwargs, theirs) = match_size(study, "recall", "longhorn")[1], match_size(study, "recall", "vit")
    assert abs(theirs / ours - 1) < 0.03 and kwargs["num_heads"] == 2
    with pytest.raises(ValueError, match=r"vit has [\d,]+ parameters on task recall, [+-].*at most 3% is allowed"):
        match_size(read_study(write(candidates__vit__match={})), "recall", "vit")
    with pytest.raises(ValueError, match="timm cannot make vit_colossal"):
        match_size(read_study(write(candidates__vit__model="vit_colossal")), "recall", "vit")
    rates = {(cell.candidate, cell.rate) for cell in remaining(read_study(write(candidates__vit__sweep=[0.5])), [])}
    assert rates == {("longhorn", 0.001), ("longhorn", 0.01), ("vit", 0.5)}


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(reference="mamba"), "there is no candidate 'mamba'; expected one of longhorn, vit"),
        (dict(tasks__copy__rates_of="digits"), "there is no task 'digits'"),
        (dict(tasks__copy__sweep=[0.1]), "task copy: give either sweep"),
        (dict(tasks__copy__candidates=["vit"]), "task copy lacks the reference longhorn"),
        (dict(tasks__recall__candidates=["longhorn"], tasks__copy__candidates=["longhorn", "vit"]), "has no sweep for"),
        (dict(tables__recall__points=[["recall", "huge", 1]]), "there is no test set 'huge'"),
        (dict(tasks__copy__epochs=3), "epochs"),
        (dict(seeds=[1, 1]), "a standard deviation needs at least two"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(changes, message, write):
    with pytest.raises(ValueError, match=message):
        read_study(write(**changes))


@pytest.mark.needs_ffcv
def test_a_study_runs_to_its_end_is_never_run_again_and_refuses_another_plan(write, tmp_path, capsys, monkeypatch):
    small = dict(tasks__recall__candidates=["longhorn"], tasks__recall__sweep=[0.01], tasks__copy__seeds=[0])
    small["recipe__schedule"] = {"epochs": 2, "warmup_epochs": 1}
    path, folder, target = write(**small), tmp_path / "runs", tmp_path / "toy.json"
    arguments = [str(path), "--dir", str(folder), "--processes", "1", "--json", str(target)]
    assert command.main([*arguments, "--list"]) == 0
    assert capsys.readouterr().out == "recall/longhorn/rate0.01-seed0\n"
    assert command.main(arguments) == 0
    report = json.loads(target.read_text())
    assert report["finished"] and len(report["cells"]) == 3 and all(cell["tests"] for cell in report["cells"])
    assert sum(line.startswith("  {") for line in target.read_text().splitlines()) == 3  # a line for each run
    assert "### Recall" in capsys.readouterr().out and (folder / "toy-recall.svg").is_file()

    monkeypatch.setattr(command, "worker_pool", lambda workers: nullcontext())  # has no `submit`
    shutil.rmtree(folder)  # the JSON file is all that is needed
    assert command.main(arguments) == 0
    assert json.loads(target.read_text())["cells"] == report["cells"]
    write(**small, recipe__optimizer={"weight_decay": 0.3})
    assert command.main([*arguments, "--list"]) == 2
    assert f"{target}: run recall/longhorn/rate0.01-seed0 has another recipe" in capsys.readouterr().err
    target.write_text("[]")
    assert command.main(arguments) == 2
    assert "toy.json is not the JSON file of a study (TypeError" in capsys.readouterr().err


def test_the_committed_plans_can_be_run_and_the_committed_results_are_theirs():
    results = Path(__file__).parents[2] / "studies" / "results"
    for file in sorted(command.PLANS.glob("*.yaml")):
        study = read_study(file)
        for pair in study.pairs():
            match_size(study, *pair)
        if file.stem != "quick":
            report = SimpleNamespace(plan=study, cells=read_report(results / f"{file.stem}.json").cells)
            command.check_unchanged(report, Path("anywhere"), file)
