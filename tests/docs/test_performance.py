"""The page on performance and the README say what the committed runs say."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from vilonghorn.bench.candidates import FAMILIES
from vilonghorn.bench.tables import fill_page

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("make_performance", ROOT / "docs" / "performance" / "make.py")
make = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make)
FOLDER = ROOT / make.FOLDER


def test_the_committed_page_and_readme_are_made_from_the_committed_runs():
    remedy = "run python docs/performance/make.py"
    assert (ROOT / make.PAGE).read_text() == make.page(FOLDER), remedy
    for path, name in make.TABLES.items():
        text = (ROOT / path).read_text()
        assert make.fill(text, name, FOLDER) == text, remedy
    title = make.plot_title(make.load_runs(FOLDER)[0])  # matplotlib writes each title in a comment
    for plot in (make.PLOT, make.SPEED_PLOT):
        assert f"<!-- {title} -->" in (ROOT / plot).read_text(), remedy


def test_the_first_lines_of_the_readme_are_true_of_every_run():
    others = (json.loads((FOLDER / f"{name}.json").read_text()) for name in ("v2", "v2-highest"))
    runs, ratios = [*make.load_runs(FOLDER), *others], []
    for run in runs:
        models = make.bench.by(run["models"], "model", "size")
        for train in (False, True):
            ours, theirs = (models[name, 1024, train] for name in (make.bench.TINY, make.bench.DEIT_TINY))
            ratios.append(make.bench.ratio(ours, theirs))
    said = f"takes {min(ratios):.2f} to {max(ratios):.2f} of the time of timm's DeiT-Ti on three kinds of processors"
    assert said in (ROOT / make.README).read_text().partition("\n## ")[0] and len(runs) == 4


def report(speed: float) -> dict:
    """A run in which models take a millisecond / speed a token, twice that with backward, and DeiT three times that."""

    def rounds(ms):
        return [ms / speed, 1.1 * ms / speed, 0.9 * ms / speed]

    scan = [
        dict(workload="B=8", rule=rule, backend=backend, train=train, ms=rounds(ms * (1 + train)), problem=None)
        | dict(memory_gb=0.5, compute_bound_ms=[1.0 + train] * 3, memory_bound_ms=[0.5] * 3)
        for rule in ("longhorn", "longhorn_exact")
        for backend, ms in (("torch loop", 64.0), ("cpu", 1.6))
        for train in (False, True)
    ]
    models = [
        dict(model=name, size=size, train=train, compiled=False, batch=1, memory_gb=2.0, problem=None)
        | dict(ms=rounds((3 if "deit" in name else 1) * (1 + train) * ((size // 16) ** 2 + 1)))
        for family in FAMILIES
        for name in family
        for size in (224, 448)
        for train in (False, True)
    ]
    ops = [dict(op=f"aten::op{i}", calls=2.0, ms=12.0 - i) for i in range(12)]
    return dict(
        command=["python", "-m", "vilonghorn.bench"],
        date="2025-01-02T03:04:05+00:00",
        finished=True,
        machine=dict(cpu="a processor", cores=2, threads=2, load=0.01, python="3.11", torch="2", timm="1"),
        seconds=dict(scan=60.0, models=540.0),
        scan=scan,
        models=models,
        profile=dict(model="vilonghorn_tiny", batch=8, size=224, ms=sum(op["ms"] for op in ops), ops=ops),
    )


def test_the_command_writes_page_plot_and_readme_from_new_runs(tmp_path, monkeypatch):
    folder = tmp_path / make.FOLDER
    folder.mkdir(parents=True)
    for path in (
        make.FOLDER / "text.md",
        make.FOLDER / "kernels.json",
        make.FOLDER / "gpu.json",
        make.FOLDER / "v2.json",
        make.FOLDER / "v2-highest.json",
        make.FOLDER / "v2-high.json",
        make.README,
        make.CHOOSING,
    ):
        (tmp_path / path).write_text((ROOT / path).read_text())
    for i, speed in enumerate((1, 2), 1):
        (folder / f"cpu-{i}.json").write_text(json.dumps(report(speed)))
    monkeypatch.chdir(tmp_path)
    assert make.main() == 0
    text, readme = make.PAGE.read_text(), make.README.read_text()
    assert not re.search(r"\$\w", text)
    assert "time to its compute bound | 1.80 | 1.60 / 0.80 | met / met |" in text
    assert (
        "| longhorn | cpu | forward | 1.60 / 0.80 | 1.44 to 1.76 / 0.72 to 0.88 | 40.0 / 40.0 | 1.60 / 0.80 |" in text
    )
    assert "| 448 | 1 | `vilonghorn_tiny` | 785 / 392 | 1000 / 500 | 0.33 / 0.33 | 1570 / 785 | 2000 / 1000 |" in text
    assert "| `aten::op0` | 2 | 12.0 | 15% |" in text
    for plot in (make.PLOT, make.SPEED_PLOT):
        assert f"<!-- {make.plot_title(report(1))} -->" in plot.read_text()
    assert "| `vilonghorn_tiny`, 224 px | timm's `deit_tiny_patch16_224` | 0.33 / 0.33 times its time | 0.33" in readme
    assert "| scan, `longhorn` | the usual loop in torch | 40 / 40 times faster | 40 / 40 times faster |" in readme
    assert "| 224 | 196 | 0.33 / 0.33 | 0.33 / 0.33 | 1.00 / 1.00 |" in make.CHOOSING.read_text()
    before, after = (fill_page(text, "speed", "") for text in ((ROOT / make.README).read_text(), readme))
    assert before == after


def test_a_line_that_one_run_lacks_is_a_dash():
    first, second = [{"model": "a", "ms": "1"}, {"model": "b", "ms": "2"}], [{"model": "b", "ms": "3"}]
    assert make.merge([first, second], 1).splitlines()[2:] == ["| a | 1 / - |", "| b | 2 / 3 |"]


@pytest.mark.parametrize(
    "change, said",
    [(dict(finished=False), "cpu-1.json did not finish"), (dict(profile=None), "cpu-1.json lacks profile")],
)
def test_runs_that_are_not_complete_are_refused(change, said, tmp_path):
    (tmp_path / "cpu-1.json").write_text(json.dumps(report(1)))
    assert make.load_runs(tmp_path) == [report(1) | dict(file="cpu-1.json")]
    (tmp_path / "cpu-1.json").write_text(json.dumps(report(1) | change))
    with pytest.raises(ValueError, match=said):
        make.load_runs(tmp_path)


def test_kernel_tables_show_the_counts_of_the_file():
    rows = json.loads((FOLDER / "kernels.json").read_text())["rows"]
    counts = {
        (row["backend"], row["kernel"]): row["instructions"]
        for row in rows
        if (row["architecture"], row["rule"]) == (90, "longhorn_exact")
        and row.get("instructions")
        and row["dtype"] in ("bfloat16", "bf16")
    }
    cells = {str(counts[backend, kernel]) for backend in ("cuda", "triton") for kernel in ("forward", "backward")}
    [line] = [line for line in make.page(FOLDER).splitlines() if line.startswith("| longhorn_exact, sm_90")][:1]
    assert cells <= {cell.strip() for cell in line.split("|")}


def test_a_readme_without_markers_and_a_wrong_folder_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="lacks the lines <!-- speed -->"):
        make.fill("# A README", "speed", FOLDER)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="run it in the root of a checkout"):
        make.main()
