"""A study chooses learning rates on the validation split, tests once, and reuses what is finished."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
from toy_study import write_plan

pytest.importorskip("sklearn", reason="the tasks are made of the digits that come with scikit-learn")

from vilonghorn.study import __main__ as command  # noqa: E402
from vilonghorn.study.cell import result_file, run_config  # noqa: E402
from vilonghorn.study.match import match_size  # noqa: E402
from vilonghorn.study.plan import Cell, read_study  # noqa: E402
from vilonghorn.study.results import choose_rate  # noqa: E402


@pytest.fixture
def write(tmp_path):
    return partial(write_plan, tmp_path / "toy.yaml")


@pytest.fixture
def study(write):
    return read_study(write())


def finish(folder, cell, top1=0.0, loss=1.0, kind="train", **more):
    """Writes the results of a finished cell."""
    result_file(folder, cell, kind).parent.mkdir(parents=True, exist_ok=True)
    results = {"val": {"top1": top1, "loss": loss}, "seconds": 1.0} if kind == "train" else {"tests": {"test": {}}}
    result_file(folder, cell, kind).write_text(json.dumps({**results, **more}))


def sweep_cells(study):
    return [cell for pair in study.pairs() for cell in study.sweep(*pair)]


def chosen(study, folder, candidate):
    return choose_rate(study, command.read_results(study, folder).values(), "recall", candidate)


def test_a_sweep_comes_first_then_the_seeds_at_the_best_rate_then_the_tests(study, tmp_path):
    sweep = sweep_cells(study)
    assert len(sweep) == 4 and {cell.seed for cell in sweep} == {0}
    assert command.remaining_jobs(study, tmp_path) == [("train", cell) for cell in sweep]
    for cell in sweep[:3]:
        finish(tmp_path, cell, top1=90 if cell.rate == 0.01 else 80)
    assert chosen(study, tmp_path, "longhorn") == 0.01
    assert chosen(study, tmp_path, "vit") is None  # one of its rates is not run yet
    left = command.remaining_jobs(study, tmp_path)
    assert ("train", Cell("copy", "longhorn", 0.01, 1)) in left  # which takes its rate from the sweep of another task
    assert left[0] == ("test", Cell("recall", "longhorn", 0.01, 0))  # the seed of the sweep is trained already
    assert not any(kind == "test" and cell.rate == 0.001 for kind, cell in left)
    finish(tmp_path, sweep[3], top1=85)
    assert chosen(study, tmp_path, "vit") == 0.01
    while left := command.remaining_jobs(study, tmp_path):
        for kind, cell in left:
            finish(tmp_path, cell, kind=kind)
    assert not result_file(tmp_path, Cell("recall", "vit", 0.001, 0), "test").exists()  # what lost is never tested


def test_of_equal_rates_the_smaller_loss_counts(study, tmp_path):
    for cell in sweep_cells(study):
        finish(tmp_path, cell, top1=50, loss=1 + cell.rate)
    assert chosen(study, tmp_path, "vit") == 0.001


def test_a_rate_that_diverged_comes_last_and_such_a_run_is_not_tested(study, tmp_path):
    for cell in sweep_cells(study):
        finish(tmp_path, cell, top1=5)
    cell = Cell("recall", "longhorn", 0.01, 0)
    finish(tmp_path, cell, diverged="11 updates in a row")
    assert chosen(study, tmp_path, "longhorn") == 0.001
    finish(tmp_path, Cell("recall", "longhorn", 0.001, 1), diverged="again")
    left = command.remaining_jobs(study, tmp_path)
    assert ("test", Cell("recall", "longhorn", 0.001, 0)) in left
    assert not any(job[1] == Cell("recall", "longhorn", 0.001, 1) for job in left)


def test_candidates_have_the_parameters_of_the_reference(study, write):
    kwargs, ours = match_size(study, "recall", "longhorn")
    assert kwargs == {"embed_dim": 16, "depth": 1, "patch_size": 8}
    kwargs, theirs = match_size(study, "recall", "vit")
    assert abs(theirs / ours - 1) < 0.03 and kwargs["num_heads"] == 2
    with pytest.raises(ValueError, match=r"vit has [\d,]+ parameters on task recall, [+-].*at most 3% is allowed"):
        match_size(read_study(write(candidates__vit__match={})), "recall", "vit")
    with pytest.raises(ValueError, match="timm cannot make vit_colossal"):
        match_size(read_study(write(candidates__vit__model="vit_colossal")), "recall", "vit")


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
        (dict(tasks__copy__min_lr_ratio=1.5), "task copy: min_lr_ratio is 1.5, expected 0 to 1"),
        (dict(seeds=[1, 1]), "a standard deviation needs at least two"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(changes, message, write):
    with pytest.raises(ValueError, match=message):
        read_study(write(**changes))


def test_the_rate_at_the_end_is_a_share_of_the_cells_own(write, tmp_path):
    study = read_study(write(tasks__copy__min_lr_ratio=0.5))
    ends = [
        run_config(study, tmp_path, Cell(task, "longhorn", 0.004, 1))["schedule"].get("min_lr")
        for task in ("recall", "copy")
    ]
    assert ends == [study.recipe["schedule"].get("min_lr"), 0.002]


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


def test_a_study_runs_to_its_end_is_never_run_again_and_refuses_another_plan(write, tmp_path, capsys, monkeypatch):
    small = dict(
        tasks__copy__candidates=["longhorn"], tasks__recall__candidates=["longhorn"], tasks__recall__sweep=[0.01]
    )
    path, folder = write(**small, thresholds=[5.0]), tmp_path / "runs"
    target = tmp_path / "toy.json"
    arguments = [str(path), "--dir", str(folder), "--processes", "1", "--json", str(target)]
    assert command.main([*arguments, "--list"]) == 0
    assert capsys.readouterr().out == "train recall/longhorn/rate0.01-seed0\n"
    assert command.main(arguments) == 0
    report = json.loads(target.read_text())
    assert report["finished"] and len(report["cells"]) == 4 and all(cell["tests"] for cell in report["cells"])
    out = capsys.readouterr().out
    assert "### Recall" in out and (folder / "toy-recall.svg").is_file()

    monkeypatch.setattr(command, "worker_pool", lambda workers: nullcontext())  # has no `submit`
    before = {file: file.stat().st_mtime_ns for file in (folder / "runs").rglob("*") if file.is_file()}
    assert command.main(arguments) == 0
    assert before == {file: file.stat().st_mtime_ns for file in (folder / "runs").rglob("*") if file.is_file()}
    write(**small, recipe__optimizer={"weight_decay": 0.3})
    assert command.main(arguments) == 2
    assert "has another recipe, model or data than the study" in capsys.readouterr().err
    for tests in (
        {"tasks__recall__test_count": {"large": 4}},
        {"tasks__recall__tests": {"test": {}, "large": {"grid": 6}}},
    ):
        write(**small, **tests)
        assert command.main(arguments) == 2
        assert "seed0.test.json has other test sets than the study" in capsys.readouterr().err


def test_a_place_for_the_results_that_is_not_there_is_refused_before_any_work(write, tmp_path, capsys):
    target, folder = tmp_path / "nowhere" / "toy.json", tmp_path / "runs"
    assert command.main([str(write()), "--dir", str(folder), "--json", str(target)]) == 2
    assert f"there is no folder {target.parent}" in capsys.readouterr().err
    assert not folder.exists()


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
