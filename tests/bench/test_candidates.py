"""Candidates of a rule do the same work, and rooflines count that work."""

import sys
from types import ModuleType

import pytest
import torch
from oracle import error, oracle

from vilonghorn.bench import candidates
from vilonghorn.bench.candidates import STEPS, Workload
from vilonghorn.ops import backends, scan
from vilonghorn.ops.backends import cpu as kernels
from vilonghorn.ops.validate import RULES

WORKLOAD = Workload(2, 17, 6, 4)


@pytest.mark.parametrize("rule", RULES)
def test_all_backends_of_a_rule_compute_the_same(rule):
    found = {backend: make() for (r, backend), make in candidates.scan_candidates(WORKLOAD, "cpu").items() if r == rule}
    assert set(found) == {candidates.LOOP} | {"cpu"} & {name for name, state in backends().items() if state == "ready"}
    inputs, _ = candidates.scan_inputs(rule, WORKLOAD, "cpu")
    expected = oracle(**inputs, rule=rule)
    reference = candidates.scan_steps(rule, "reference", WORKLOAD, "cpu")
    gradients = reference[STEPS[True]]()
    for steps in found.values():
        y = steps[STEPS[False]]()
        assert not y.requires_grad and error(y.view_as(expected), expected) < 1e-6
        for actual, wanted in zip(steps[STEPS[True]](), gradients, strict=True):
            torch.testing.assert_close(actual.view_as(wanted), wanted, rtol=1e-4, atol=1e-5)


def selective_scan(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False):
    """The interface of mamba_ssm over our scan: its tensors are (B, D, L) and (B, N, L)."""
    assert delta_softplus and all(t.is_contiguous() for t in (u, delta, B, C))
    x, dt, k, q = (t.mT[None] for t in (u, delta, B, C))
    return scan(x, dt, k, q, z=z.mT, A=A[None], D=D[None], dt_bias=delta_bias[None], rule="mamba")[0].mT


def test_mamba_ssm_gets_the_same_work(monkeypatch):
    interface = ModuleType("mamba_ssm.ops.selective_scan_interface")
    interface.selective_scan_fn = selective_scan
    for module in (ModuleType("mamba_ssm"), ModuleType("mamba_ssm.ops"), interface):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    peer = candidates.scan_steps("mamba", candidates.PEER, WORKLOAD, "cpu")
    loop = candidates.scan_steps("mamba", candidates.LOOP, WORKLOAD, "cpu")
    torch.testing.assert_close(peer[STEPS[False]]().mT, loop[STEPS[False]]())
    for actual, wanted in zip(peer[STEPS[True]](), loop[STEPS[True]](), strict=True):
        torch.testing.assert_close(actual.mT if wanted.ndim == 3 else actual, wanted, rtol=1e-4, atol=1e-5)


def test_two_directions_are_averaged():
    workload = WORKLOAD._replace(directions=2)
    inputs, _ = candidates.scan_inputs("longhorn", workload, "cpu")
    y = candidates.scan_steps("longhorn", "reference", workload, "cpu")[STEPS[False]]()
    assert error(y, oracle(**inputs, rule="longhorn", reverse=(False, True), reduce="mean")) < 1e-6


@pytest.mark.parametrize("directions", [1, 2])
def test_chunks_are_the_exact_rule_with_one_dt_for_a_head(directions):
    workload = WORKLOAD._replace(D=8, directions=directions)
    inputs, _ = candidates.scan_inputs("longhorn_exact", workload, "cpu")
    inputs |= {name: inputs[name][..., : candidates.HEADS].repeat_interleave(2, -1) for name in ("dt", "dt_bias")}
    options = dict(reverse=(False, True), reduce="mean") if directions == 2 else {}
    expected = oracle(**inputs, rule="longhorn_exact", **options)
    steps = candidates.scan_steps("longhorn_exact", candidates.CHUNKS, workload, "cpu")
    assert error(steps[STEPS[False]](), expected) < 1e-6
    assert len(steps[STEPS[True]]()) == len(inputs)


def test_a_model_infers_without_and_learns_with_gradients(monkeypatch):
    made, create = [], candidates.timm.create_model
    monkeypatch.setattr(candidates.timm, "create_model", lambda *a, **k: made.append(create(*a, **k)) or made[-1])
    steps = candidates.model_steps("vilonghorn_nano", batch=2, size=32)
    [model] = made
    seen = []
    model.head.register_forward_hook(lambda module, inputs, y: seen.append((model.training, y.requires_grad, y.shape)))
    model.head.weight.register_hook(lambda grad: seen.append(float(grad.norm())))
    steps[STEPS[False]]()
    assert seen == [(False, False, (2, 1000))]
    steps[STEPS[True]]()
    assert seen[1] == (True, True, (2, 1000)) and seen[2] > 0 and model.head.weight.grad is None


def test_larger_images_come_in_smaller_batches():
    assert [candidates.default_batch(size, "cpu") for size in (224, 384, 512, 768, 1248)] == [8, 3, 2, 1, 1]
    assert [candidates.default_batch(size, "cuda") for size in (224, 384, 512, 1024)] == [128, 44, 24, 6]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("directions", [1, 2])
def test_the_memory_bound_counts_each_tensor_once(rule, directions):
    workload = WORKLOAD._replace(directions=directions)
    inputs, dy = candidates.scan_inputs(rule, workload, "cpu")
    moved = sum(t.nbytes for t in inputs.values())
    assert candidates.scan_bytes(rule, False, workload, "cpu") == moved + dy.nbytes
    assert candidates.scan_bytes(rule, True, workload, "cpu") == 3 * moved + 2 * dy.nbytes
    halved = dy.nbytes + sum(t.nbytes for name, t in inputs.items() if name not in ("A", "D", "dt_bias"))
    assert candidates.scan_bytes(rule, False, workload, "cuda") == moved + dy.nbytes - halved // 2


@pytest.mark.parametrize(
    "rule, train, ms", [("longhorn", False, 1.1), ("longhorn_exact", False, 1.0), ("longhorn", True, 4.9)]
)
def test_the_compute_bound_at_117_gflops_is_that_of_the_targets(rule, train, ms):
    rates = {candidates.MULTIPLY_ADDS: [117e9 / 2], candidates.COPY: [1e9]}
    [bound] = candidates.bounds(rule, train, Workload(8, 197, 384, 16), "cpu", rates)["compute_bound_ms"]
    assert bound == pytest.approx(ms, rel=0.04)


def test_bounds_follow_the_rates_of_the_rounds():
    rates = {candidates.COPY: [1e9, 2e9]}
    found = candidates.bounds("mamba", False, WORKLOAD, "cpu", rates)
    moved = candidates.scan_bytes("mamba", False, WORKLOAD, "cpu")
    assert found == dict(compute_bound_ms=None, memory_bound_ms=[moved / 1e6, moved / 2e6])


@pytest.mark.skipif(not kernels.isas(), reason="the CPU kernels are not built")
def test_roofline_candidates_do_the_work_that_they_state():
    level, _ = list(kernels.isas().items())[-1]
    lanes = {"v2": 4, "v3": 8, "v4": 16, "vnni": 16, "amx": 16, "generic": 4}[level]
    found = candidates.roofline_candidates(WORKLOAD, "cpu", threads=2)
    work, make = found[candidates.MULTIPLY_ADDS]
    assert make()[STEPS[True]]() == work == 2 * candidates.LOOP_ROUNDS * 64 * 12 * lanes
    moved, make = found[candidates.COPY]
    assert moved == candidates.scan_bytes("longhorn", False, WORKLOAD, "cpu")
    assert 2 * make()[STEPS[True]]().nbytes == moved // 8 * 8
