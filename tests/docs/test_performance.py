"""The pages on performance, on choosing and the README say what the committed runs say."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "performance"
REMEDY = "run python docs/performance/make.py"


@pytest.fixture
def make(script):
    return script("performance/make")


def test_the_committed_pages_are_made_from_the_committed_runs(make):
    for path, contents in make.tables(FOLDER).items():
        assert make.filled(ROOT / path, contents) == (ROOT / path).read_text(), REMEDY
    title = make.plot_title(make.load(FOLDER / make.DRAWN))  # matplotlib writes each title in a comment
    assert f"<!-- {title} -->" in (ROOT / make.PLOT).read_text(), REMEDY


def test_the_first_lines_of_the_readme_are_true_of_every_run(make):
    runs, ratios = [make.load(FOLDER / f"{name}.json") for name in ("cpu-1", "cpu-2", "v2", "v2-highest")], []
    for run in runs:
        models = make.by(run["models"], "model", "size")
        for train in (False, True):
            ours, theirs = (models[name, 1024, train] for name in (make.TINY, make.DEIT_TINY))
            ratios.append(make.ratio(ours, theirs))
    said = f"takes {min(ratios):.2f} to {max(ratios):.2f} of the time of timm's DeiT-Ti on three kinds of CPUs"
    assert said in (ROOT / "README.md").read_text().partition("\n## ")[0]


def test_the_figures_of_a_gpu_in_the_readme_are_those_of_its_files(make):
    def to_other(file, ours, theirs, step="forward + backward"):
        run = json.loads((FOLDER / "gpu" / f"{file}.json").read_text())
        return make.figure(make.ratio(run[step][ours], run[step][theirs]))

    text = (ROOT / "README.md").read_text().partition("\n## ")[0]
    v2, tiny, deit = (f"{name}, captured" for name in ("vilonghornv2_tiny", make.TINY, make.DEIT_TINY))
    by_size = " / ".join(to_other(f"models-{size}", v2, deit) for size in (224, 512, 1024))
    scans = [to_other("peers", "mamba, cuda", "mamba, mamba_ssm", step) for step in make.STEPS.values()]
    assert (
        f"timm's DeiT-Ti | {by_size} |" in text
        and f"takes {scans[0]} of the time of `mamba_ssm`'s CUDA kernel on an H100, and {scans[1]} with" in text
    )
    assert f"`vim_tiny` | {to_other('models-first', tiny, 'vim_tiny, captured')} / - / - |" in text
