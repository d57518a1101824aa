"""The page on performance says what the committed runs say, and nothing else."""

import json
import re
import statistics
from pathlib import Path

import pytest

from vilonghorn.bench import docs as bench_docs
from vilonghorn.bench import tables as bench_tables
from vilonghorn.bench.cpu import FAMILIES

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / bench_docs.FOLDER


def test_the_committed_page_is_made_of_the_committed_runs():
    assert (ROOT / bench_docs.PAGE).read_text() == bench_docs.page(FOLDER), "run python -m vilonghorn.bench.docs"


def test_the_readmes_table_is_made_of_the_committed_runs():
    text = (ROOT / bench_docs.README).read_text()
    assert bench_docs.readme(text, FOLDER) == text, "run python -m vilonghorn.bench.docs"


def test_the_committed_plot_is_of_the_first_run():
    """matplotlib leaves a comment with the text of each title."""
    plots = [f"<!-- {bench_docs.plot_title(report)} -->" for report in bench_docs.runs(FOLDER)[:1]]
    assert (ROOT / bench_docs.PLOT).exists() == bool(plots)
    assert all(title in (ROOT / bench_docs.PLOT).read_text() for title in plots)


def report(speed: float) -> dict:
    """A run in which models take a millisecond / speed a token, twice that with backward, and DeiT three times that."""

    def rounds(ms):
        return [ms / speed, 1.1 * ms / speed, 0.9 * ms / speed]

    scan = [
        dict(
            rule=rule,
            form=form,
            train=train,
            ms=rounds(ms * (1 + train)),
            memory_gb=0.5,
            problem=None,
            arithmetic_ms=[1.0 + train] * 3,
            bytes_ms=[0.5] * 3,
        )
        for rule in ("longhorn", "longhorn_exact")
        for form, ms in (("torch loop", 64.0), ("cpu", 1.6))
        for train in (False, True)
    ]
    models = [
        dict(
            model=name,
            size=size,
            train=train,
            compiled=False,
            batch=1,
            memory_gb=2.0 if "deit" in name else 1.0,
            ms=rounds((3 if "deit" in name else 1) * (1 + train) * ((size // 16) ** 2 + 1)),
            problem=None,
        )
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
        seconds=dict(scan=60.0, model=540.0),
        shape=dict(B=8, L=197, D=384, N=16),
        scan=scan,
        models=models,
        profile=dict(model="vilonghorn_tiny", batch=8, size=224, ms=sum(op["ms"] for op in ops), ops=ops),
    )


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """The prose of this checkout, with two runs of which the second is twice as fast."""
    folder = tmp_path / bench_docs.FOLDER
    folder.mkdir(parents=True)
    for name in ("text.md", "gpu.md", "kernels.json"):
        (folder / name).write_text((FOLDER / name).read_text())
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text())
    for i, speed in enumerate((1, 2), 1):
        (folder / f"cpu-{i}.json").write_text(json.dumps(report(speed)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_writes_page_plot_and_readme_from_the_runs(checkout):
    assert bench_docs.main([]) == 0
    text = (checkout / bench_docs.PAGE).read_text()
    assert bench_docs.NO_RUNS not in text and not re.search(r"\$\w", text)
    assert (
        "| longhorn | cpu | 1.60 / 0.80 | 1.44 to 1.76 / 0.72 to 0.88 | 40.0 / 40.0 times faster | 1.60 / 0.80 |"
        in text
    )
    assert "time to its arithmetic floor | 1.80 | 1.60 | 0.80 | met |" in text
    assert "| 448 | 1 | `vilonghorn_tiny` | 785 / 392 | 0.33 / 0.33 | 1570 / 785 | 0.33 / 0.33 | 1.00 / 1.00 |" in text
    assert "| `vim_tiny` | forward | 1000 / 500 | 1000 / 500 | 1.00 / 1.00 |" in text
    assert "| `aten::op0` | 2 | 12.0 | 15% |" in text and "| `2 others` | 4 | 3.0 | 4% |" in text
    rows = [r for r in json.loads((FOLDER / "kernels.json").read_text())["rows"] if r["architecture"] == 90]
    kinds = {
        (r["backend"], r["kernel"]): r["instructions"]
        for r in rows
        if r["rule"] == "longhorn_exact" and r.get("instructions") and r["dtype"] in ("bfloat16", "bf16")
    }
    counts = [kinds[backend, kernel] for backend in ("cuda", "triton") for kernel in ("forward", "backward")]
    assert f"| longhorn_exact, sm_90 | {' | '.join(map(str, counts))} |" in text
    assert text.count("None.") == 1  # nothing is lost to DeiT
    assert f"<!-- {bench_docs.plot_title(report(1))} -->" in (checkout / bench_docs.PLOT).read_text()
    found = (checkout / "README.md").read_text()
    assert "| `vilonghorn_tiny`, 224 px | timm's `deit_tiny_patch16_224` | 0.33 / 0.33 times its time | 0.33" in found
    before = (ROOT / "README.md").read_text()
    assert re.sub(bench_docs.MARK, "", found) == re.sub(bench_docs.MARK, "", before)


def test_losses_are_told(checkout):
    path = checkout / bench_docs.FOLDER / "cpu-2.json"
    changed = report(2)
    for row in changed["models"]:
        if (row["model"], row["size"], row["train"]) == ("vilonghorn_tiny", 224, True):
            row["ms"] = [5 * ms for ms in row["ms"]]
        if (row["model"], row["size"], row["train"]) == ("vilonghorn_small", 448, True):
            row["memory_gb"] = 2.5
        if (row["model"], row["size"], row["train"]) == ("vim_tiny", 448, False):
            row.update(ms=None, memory_gb=None, problem="out of memory")
    changed["not_measured"] = [dict(task="everything else", problem="not begun in the time there was")]
    path.write_text(json.dumps(changed))
    text = bench_docs.page(checkout / bench_docs.FOLDER)
    assert "- `vilonghorn_tiny`, 224 px, forward + backward: 0.33 / 1.67 times the time of `deit_tiny_" in text
    assert "- `vilonghorn_small`, 448 px, forward + backward: 0.50 / 1.25 times the memory of `deit_small_" in text
    assert text.count("times the time of") == text.count("times the memory of") == 1
    assert "- not measured: vim_tiny, 448, forward: out of memory" in text and "- not measured: everything else" in text
    assert "_tiny_patch16_224, 224 px, forward + backward | 1.30 | 0.33 | 1.67 | **met / NOT MET** |" in text
    assert "| 785 / - | 0.33 / - |" in text


def test_figures_are_those_of_the_rows():
    rows = report(1)["models"]
    row = next(row for row in rows if row["model"] == "vim_tiny")
    assert bench_tables._each([(row,), (None,)], lambda r: statistics.median(r["ms"]), 0) == "197 / -"


@pytest.mark.parametrize(
    "change, said",
    [(dict(finished=False), "is of a run that did not finish"), (dict(profile=None), "lacks profile")],
    ids=["cut", "part"],
)
def test_runs_that_are_not_whole_are_refused(change, said, checkout, capsys):
    (checkout / bench_docs.FOLDER / "cpu-2.json").write_text(json.dumps(report(1) | change))
    with pytest.raises(SystemExit):
        bench_docs.main([])
    assert f"cpu-2.json {said}" in " ".join(capsys.readouterr().err.split())
    assert not (checkout / bench_docs.PAGE).exists()


def test_without_marks_the_readme_is_refused(checkout):
    with pytest.raises(ValueError, match="lacks the marks"):
        bench_docs.readme("# A README", checkout / bench_docs.FOLDER)


def test_elsewhere_the_command_says_where_it_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        bench_docs.main([])
    assert "run it in the root of a checkout" in capsys.readouterr().err
