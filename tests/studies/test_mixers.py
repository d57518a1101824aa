"""The mixers of `recall_mixer` follow their equations, token by token, and read in pieces what they read at once."""

from __future__ import annotations

import math

import pytest
import timm
import torch
import torch.nn.functional as F
from million import in_pieces, whole
from study.mixers import MIXERS, Attention, LastTile
from study.tasks import Recall
from torch import nn

H, K, V, L = 4, 16, 18, 130  # more than two chunks


def attend(q, k, v, t):
    """Softmax over the tokens up to t, of one head."""
    scores = k[: t + 1] @ q[t] / K**0.5
    return scores.softmax(0) @ v[: t + 1]


def rotated(x, t):
    """Channels j and j + K/2 of a token as a complex number, turned by t / 10000^(2j/K)."""
    half = K // 2
    turned = torch.complex(x[:half], x[half:]) * torch.exp(1j * t * 10000.0 ** (-2 * torch.arange(half).double() / K))
    return torch.cat([turned.real, turned.imag])


def naive(name, mixer, q, k, v, gates, g, h):
    """The outputs of head h of direction g, (L, V), one token after the other."""
    S, n, outputs = q.new_zeros(K, V), q.new_zeros(K), []
    for t in range(L):
        if name == "attention":
            y = attend(q, k, v, t)
        elif name == "rotary":
            turned = [torch.stack([rotated(x, i) for i, x in enumerate(s[: t + 1])]) for s in (q, k)]
            y = attend(*turned, v, t)
        elif name == "log_scaled":
            y = attend(q * mixer.scale[g, 0, h] * math.log(t + 1), k, v, t)
        elif name == "linear":
            weights = (F.elu(k[: t + 1]) + 1) @ (F.elu(q[t]) + 1)
            y = weights @ v[: t + 1] / weights.sum()
        elif name == "gated_delta":
            a = torch.exp(-mixer.decay_log[g, 0, h].exp() * F.softplus(gates[0][t] + mixer.step_bias[g, 0, h]))
            b, key = gates[1][t].sigmoid(), k[t] / k[t].norm()
            S = a * (S - b * torch.outer(key, key @ S)) + b * torch.outer(key, v[t])
            y = S.T @ (q[t] / q[t].norm())
        else:
            f, i = gates[0][t].sigmoid(), gates[1][t].exp()
            S, n = f * S + i * torch.outer(k[t], v[t]), f * n + i * k[t]
            y = S.T @ q[t] / K**0.5 / (n @ q[t] / K**0.5).abs().clamp(min=1)
        outputs.append(mixer.norm(y) if hasattr(mixer, "norm") else y)
    return torch.stack(outputs)


@pytest.mark.parametrize("name", MIXERS)
def test_a_mixer_follows_its_equation_token_by_token(name):
    mixer = MIXERS[name](H * V // 2, 2).double()
    q, k, v = (2 * torch.randn(2, 1, H, L, size, dtype=torch.double) for size in (K, K, V))
    gates = [torch.randn(2, 1, H, L, dtype=torch.double) for _ in range(mixer.num_gates)]
    with torch.no_grad():
        found, _ = mixer.mix(q, k, v, *gates, state=None)
        short, _ = mixer.mix(q[..., :9, :], k[..., :9, :], v[..., :9, :], *(t[..., :9] for t in gates), state=None)
        assert torch.allclose(short, found[..., :9, :], rtol=1e-9, atol=1e-9)
        for g, h in ((0, 0), (0, 3), (1, 2)):
            expected = naive(name, mixer, q[g, 0, h], k[g, 0, h], v[g, 0, h], [t[g, 0, h] for t in gates], g, h)
            assert torch.allclose(found[g, 0, h], expected, rtol=1e-9, atol=1e-9), (g, h)


def make(name: str, **kwargs) -> nn.Module:
    """A model of the study, with less width."""
    mixer = {"mixer": name} if name in MIXERS else {}
    kwargs = dict(embed_dim=32, depth=2, patch_size=8, global_pool="avg", pos_embed="none", num_classes=10, **kwargs)
    return timm.create_model("recall_mixer" if mixer else name, **mixer, **kwargs)


@pytest.mark.parametrize("name", MIXERS)
def test_a_model_learns_all_it_has_and_its_second_direction_reads_from_the_end(name):
    model = make(name)
    model(torch.randn(2, 3, 16, 32)).square().sum().backward()
    missing = [key for key, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert not missing
    mixer, tokens = model.blocks[0].mixer, torch.randn(1, 100, 32)
    with torch.no_grad():
        expected = mixer(tokens.flip(1)).flip(1)
        for parameter in mixer.parameters():
            if parameter.shape[0] == 2:
                parameter.copy_(parameter.flip(0))
        assert torch.allclose(mixer(tokens), expected, atol=1e-5)


STREAMED = ["vilonghorn_nano_exact", "vilonghorn_nano", "vim_nano"]
STREAMED += [name for name, kind in MIXERS.items() if not issubclass(kind, Attention)]


@pytest.mark.parametrize("options", [dict(base="vilonghorn_nano_exact", dynamic_img_size=True), dict(mixer="rotary")])
def test_a_head_on_the_last_tile_reads_its_token(options):
    model = timm.create_model("recall_last", patch_size=8, embed_dim=32, depth=2, img_size=32, **options)
    images = torch.rand(2, 3, 64, 64)
    tokens = model.eval().forward_features(images)
    assert tokens.shape == (2, 65, 32)
    torch.testing.assert_close(model(images), F.linear(tokens[:, -1], model.head.weight, model.head.bias))


@pytest.mark.parametrize(
    "name, last", [*((name, False) for name in STREAMED), ("gated_delta", True), (STREAMED[0], True)]
)
def test_an_image_in_pieces_gives_what_the_whole_image_gives(name, last):
    model = make(name, img_size=512).eval()
    if last:
        model.global_pool, model.head = "", LastTile(32, 10)
    with torch.no_grad():
        model.cls_token.normal_()
        model.head.weight.normal_()
    task = Recall("test", pairs=4, grid=64, colours=6, distractors=True)
    expected, labels = whole(model, task, range(2))
    found, same = in_pieces(model, task, range(2), piece=1000, together=2)
    assert expected.abs().max() > 0.1
    assert (found - expected).abs().max() < 1e-5 and same.tolist() == labels.tolist()


def test_a_mixer_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="mixer is 'delta', expected one of attention, rotary, log_scaled, linear, "):
        timm.create_model("recall_mixer", mixer="delta")
    with pytest.raises(ValueError, match="dim is 31: 2 . dim is to give 4 heads equal values of at least 16"):
        MIXERS["linear"](31, num_branches=2)
