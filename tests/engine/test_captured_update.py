"""Which runs capture their updates as a CUDA graph, and that they train as any other; a call stands for a graph."""

import pytest
import torch
from toy_run import toy_trainer

from vilonghorn.engine import build_parser, parse, train_state
from vilonghorn.engine.captured_update import EAGER_UPDATES, CapturedUpdate, why_not_captured

FUSED = ["--optimizer.name=adamw", "--optimizer.kwargs={fused: true}"]
CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    "options, place, word",
    [
        ([], dict(device=torch.device("cpu")), "need an NVIDIA GPU"),
        ([], dict(processes=2), "2 processes"),
        (["--optimizer.accumulate=2"], {}, "accumulate is 2"),
        (["--run.amp=fp16"], {}, "make it bf16"),
        (["--run.compile=reduce-overhead"], {}, "'reduce-overhead'"),
        (["--augmentation.sizes=[96, 128]"], {}, "3 sizes"),
        (["--task.teacher=resnet18"], {}, "teacher"),
        (["--task.kind=masked"], {}, "only classification"),
        (["--optimizer.name=lamb"], dict(is_capturable=False), "'lamb'"),
    ],
    ids=str,
)
def test_a_run_that_a_graph_cannot_hold_says_why(options, place, word):
    place = dict(device=CUDA, processes=1, is_capturable=True) | place
    assert word in why_not_captured(parse(build_parser(), options)[0], **place)


def test_a_run_of_the_default_recipe_can_be_captured():
    assert why_not_captured(parse(build_parser(), [])[0], CUDA, 1, True) is None


def test_a_run_on_a_cpu_refuses_to_capture_before_it_writes_anything(tmp_path):
    with pytest.raises(ValueError, match="run.capture is true, but the run is on cpu"):
        toy_trainer(tmp_path, *FUSED, "--run.capture=true")
    assert not (tmp_path / "last.pt").exists()


@pytest.mark.parametrize("name, is_capturable", [("sgd", False), ("adamw", True)])
def test_a_fused_optimizer_that_cannot_be_captured_is_known(tmp_path, monkeypatch, name, is_capturable):
    found = []
    monkeypatch.setattr(train_state, "why_not_captured", lambda *given: found.append(given[-1]) or "no")
    with pytest.raises(ValueError, match="run.capture is true, but no"):
        toy_trainer(tmp_path, f"--optimizer.name={name}", FUSED[1], "--run.capture=true")
    assert found == [is_capturable]


def test_a_captured_run_trains_the_same_weights(tmp_path):
    plain, captured = (toy_trainer(tmp_path / name, *FUSED, "--optimizer.layer_decay=0.7") for name in ("a", "b"))
    state, graphs = captured.train_state, []

    def capture(call):
        graphs.append([group["capturable"] for group in state.optimizer.param_groups])
        return call

    state.captured = CapturedUpdate(state._update, state.optimizer, capture)
    expected, found = plain.fit(), captured.fit()
    assert state.captured.calls > EAGER_UPDATES + 1 and len(graphs) == 1 and all(graphs[0])
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    torch.testing.assert_close(state.model.state_dict(), plain.train_state.model.state_dict(), rtol=1e-4, atol=5e-5)
    for group, other in zip(state.optimizer.param_groups, plain.train_state.optimizer.param_groups):
        assert group["lr"] == other["lr"] and not group["capturable"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
def test_a_run_captured_on_a_gpu_trains_the_same_weights(tmp_path):
    options = [*FUSED, "--run.device=cuda", "--run.amp=off", "--run.compile=false"]
    plain, captured = (toy_trainer(tmp_path / flag, *options, f"--run.capture={flag}") for flag in ("false", "true"))
    assert captured.fit()["loss"] == pytest.approx(plain.fit()["loss"], rel=1e-3)
    found, expected = (run.train_state.model.state_dict() for run in (captured, plain))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-4)


def test_a_batch_of_another_shape_is_not_broadcast_into_the_captured_one():
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], fused=True)
    update = CapturedUpdate(lambda x: (x * weight).sum().detach(), optimizer, lambda call: call)
    for _ in range(EAGER_UPDATES + 1):
        assert update(torch.ones(4, 3)) == 12
    with pytest.raises(ValueError, match=r"\[\(1, 3\)\], but \[\(4, 3\)\] were captured"):
        update(torch.ones(1, 3))
    assert optimizer.param_groups[0]["lr"] == 1e-3
