"""A rule that is one record runs everywhere at once, gradients included; what has no kernel for it is passed over."""

import pytest
import timm
import torch
from oracle import inputs, value_and_grads

import vilonghorn  # noqa: F401  (registers the models)
from vilonghorn.layers import Mixer
from vilonghorn.ops import Rule, register_rule, scan
from vilonghorn.ops.rules import RULES

pytestmark = pytest.mark.filterwarnings("ignore:vilonghorn scans")


@pytest.fixture
def leaky():
    """s <- (1 - g) s + g x k, with g = sigmoid(dt)."""
    rule = Rule("leaky", lambda dt, k: dt.sigmoid(), lambda s, x, g, k, A: (1 - g) * s + g * x * k, flops=6)
    yield register_rule(rule).name
    RULES.pop("leaky")


def written_out(x, dt, k, q, z, D, dt_bias):
    """The scan of `leaky` forwards, token by token, for one direction."""
    gate, state, outputs = torch.sigmoid(dt + dt_bias[:, None, None])[0], 0, []
    for t in range(x.shape[2]):
        g = gate[:, t, :, None]
        state = (1 - g) * state + g * x[0, :, t, :, None] * k[0, :, t, None]
        outputs.append((state * q[0, :, t, None]).sum(-1))
    return (torch.stack(outputs, 1) + D[0] * x[0]) * z * torch.sigmoid(z)


def test_the_scan_and_its_gradients_are_those_of_the_equations(leaky):
    values = inputs(1, 2, 37, 5, 3, rule=leaky, dtype=torch.float64)
    expected = value_and_grads(written_out, values)
    actual = value_and_grads(scan, values, rule=leaky, reduce="mean")
    for name, truth in expected.items():
        torch.testing.assert_close(actual[name], truth, rtol=1e-10, atol=1e-12)
    reverse = scan(**values, rule=leaky, reverse=(True,), reduce="mean")
    flipped = {name: value.flip(-2) if value.dim() > 2 else value for name, value in values.items()}
    torch.testing.assert_close(reverse.flip(1), scan(**flipped, rule=leaky, reduce="mean"))


def test_a_mixer_with_heads_and_a_model_train(leaky):
    mixer = Mixer(8, rule=leaky, num_heads=2, dtype=torch.float64)
    tokens = torch.randn(1, 4, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(mixer, tokens)
    model = timm.create_model("vilonghorn_nano", rule=leaky, img_size=32, patch_size=8, depth=2, num_classes=3)
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
    with torch.no_grad():
        assert model.eval()(torch.randn(1, 3, 32, 32)).isfinite().all()


def test_a_backend_without_the_rule_is_passed_over_or_refused(leaky):
    values = inputs(1, 1, 3, 2, 2, rule=leaky)
    assert torch.equal(scan(**values, rule=leaky), scan(**values, rule=leaky, backend="reference"))
    for backend in ("cpu", "triton"):
        with pytest.raises(RuntimeError, match="no kernel for rule 'leaky'|cannot run"):
            scan(**values, rule=leaky, backend=backend)


def test_names_are_unique_and_unknown_ones_refused_with_those_known():
    for name in ("longhorn", "none"):
        with pytest.raises(ValueError, match=f"there is a rule '{name}' already"):
            register_rule(Rule(name, lambda dt, k: dt, lambda *state: state[0], flops=1))
    with pytest.raises(ValueError, match="scan: rule is 'none', expected one of 'longhorn', 'longhorn_exact', 'mamba'"):
        scan(**inputs(1, 1, 3, 2, 2, rule="longhorn"), rule="none")
