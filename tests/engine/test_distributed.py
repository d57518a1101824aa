"""Several processes train as one: the same updates, the same counts, one of them writing."""

import json

import pytest
from rank_run import ended, some_digits, start_ranks, train

from vilonghorn.engine.checkpoint import load_weights


def log_of(directory, kind):
    records = [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == kind]


def assert_same_course(directory, reference):
    """The same losses, gradients, rates and weights within the rounding of float32, and the very same counts."""
    for kind, names in (("train", ("loss", "grad_norm", "lr")), ("epoch", ("train_loss",))):
        pairs = list(zip(log_of(directory, kind), log_of(reference, kind), strict=True))
        assert pairs
        for own, other in pairs:
            assert own["update"] == other["update"]
            for name in names:
                assert own[name] == pytest.approx(other[name], rel=2e-4), (kind, name)
    for own, other in zip(log_of(directory, "epoch"), log_of(reference, "epoch")):
        for weights in ("model", "ema"):
            assert [own[weights][name] for name in ("top1", "top5")] == [
                other[weights][name] for name in ("top1", "top5")
            ]
            assert own[weights]["loss"] == pytest.approx(other[weights]["loss"], rel=1e-4)
    own, other = (load_weights(run / "last.safetensors")[0] for run in (directory, reference))
    for name, value in other.items():
        assert (own[name] - value).abs().max() < 1e-4, name


def test_two_processes_that_accumulate_two_batches_take_the_course_of_one_process(tmp_path):
    digits = some_digits(tmp_path)
    train([*digits, "--data.batch_size=32", f"--run.dir={tmp_path}/one"])
    options = [*digits, "--data.batch_size=8", "--optimizer.accumulate=2", f"--run.dir={tmp_path}/two"]
    assert ended(start_ranks(2, train, options)) == [0, 0]
    assert len(log_of(tmp_path / "two", "train")) == 10
    assert_same_course(tmp_path / "two", tmp_path / "one")
