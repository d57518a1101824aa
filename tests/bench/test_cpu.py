"""What races on a CPU: the same scan in every form, whole models with equal flags, larger images in smaller batches."""

import pytest
import torch

from vilonghorn.bench import cpu as bench_cpu
from vilonghorn.bench.floor import Shape
from vilonghorn.ops import backends
from vilonghorn.ops.backends import cpu as native
from vilonghorn.ops.validate import RULES

SHAPE = Shape(2, 17, 6, 4)


def test_every_rule_races_in_every_form_there_is():
    found = set(bench_cpu.scan_contenders(SHAPE))
    ready = {name for name, state in backends("cpu").items() if state == "ready"}
    assert found >= {(rule, form) for rule in RULES for form in {"torch loop", "torch chunked", "reference"} | ready}
    assert {form for _, form in found if form.startswith("cpu ")} == {f"cpu {n}" for n in list(native.levels())[:-1]}


@pytest.mark.parametrize("rule", RULES)
def test_all_forms_of_a_rule_do_the_same_work(rule):
    """A step of training gives the gradients of the same inputs in the same order, whoever runs it."""
    forms = {form: make() for (r, form), make in bench_cpu.scan_contenders(SHAPE).items() if r == rule}
    expected = bench_cpu.scan_steps(rule, "reference", SHAPE)
    y = expected["forward"]()
    grads = expected["forward + backward"]()
    assert not y.requires_grad
    for form, steps in forms.items():
        given = steps["forward"]()
        if form.startswith("cpu "):
            given, by_name = given[0], dict(zip("x dt k q z A D dt_bias".split(), steps["forward + backward"]()))
            found = [by_name[name] for name in bench_cpu.draw(rule, SHAPE)[0]]
        else:
            found = steps["forward + backward"]()
        torch.testing.assert_close(given.view_as(y), y, msg=form)
        for actual, wanted in zip(found, grads, strict=True):
            torch.testing.assert_close(actual.view_as(wanted), wanted, rtol=1e-4, atol=1e-5, msg=form)


def test_a_models_steps_infer_without_and_learn_with_gradients(monkeypatch):
    made = []
    create = bench_cpu.timm.create_model
    monkeypatch.setattr(bench_cpu.timm, "create_model", lambda *a, **k: made.append(create(*a, **k)) or made[-1])
    steps = bench_cpu.model_steps("vilonghorn_nano", batch=2, size=32)
    [model] = made
    assert next(iter(model.parameters())).device.type == "cpu" and model.patch_embed.img_size == (32, 32)
    seen = []
    model.head.register_forward_hook(lambda module, inputs, y: seen.append((model.training, y.requires_grad, y.shape)))
    model.head.weight.register_hook(lambda grad: seen.append(float(grad.norm())))
    steps["forward"]()
    assert seen == [(False, False, (2, 1000))]
    steps["forward + backward"]()
    assert seen[1] == (True, True, (2, 1000)) and seen[2] > 0
    assert model.head.weight.grad is None


def test_sizes_come_by_family_and_larger_images_in_smaller_batches(monkeypatch):
    tiny, small = bench_cpu.FAMILIES
    full = bench_cpu.model_cells(None, quick=False)
    assert full == [(family, size) for family in (tiny, small) for size in (224, 384, 512, 768, 1024, 1248)]
    assert bench_cpu.model_cells(None, quick=True) == [(tiny, 224), (tiny, 512), (small, 224)]
    assert bench_cpu.model_cells((32,), quick=True) == [(tiny, 32), (small, 32)]
    batches = []
    monkeypatch.setattr(bench_cpu, "model_steps", lambda name, batch, size: None)

    class Race:
        def __init__(self, contenders, threads):
            batches.append({make.args[1] for make in contenders.values()})
            self.names = contenders

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def run(self, step, rounds, seconds, lives):
            return {name: dict(ms=[1.0], memory_gb=None, problem=None) for name in self.names}

    monkeypatch.setattr(bench_cpu, "Race", Race)
    for family, size in full[:6]:
        list(bench_cpu.model_rows(family, size, None, bench_cpu.Effort(1, 1, 1, 1)))
    assert batches == [{8}, {3}, {2}, {1}, {1}, {1}]


def test_a_scan_moves_each_tensor_once_forward():
    B, L, D, N = SHAPE
    values = 4 * (4 * B * L * D + 2 * B * L * N + 2 * D)  # x, dt, z, y; k, q; D, dt_bias
    assert bench_cpu.scan_moves("longhorn", False, SHAPE) == values
    assert bench_cpu.scan_moves("mamba", False, SHAPE) == values + 4 * D * N
