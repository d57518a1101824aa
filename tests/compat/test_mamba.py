"""The mixers of `vilonghorn.compat` and their functions against plain loops in float64."""

import plain_mamba as plain
import pytest
import torch
from torch import nn

from vilonghorn.compat import mamba
from vilonghorn.compat.norms import RMSNorm

DIM, N, R, K, L = 6, 4, 2, 3, 9


def inputs(seed=0, constant=(), **absent):
    generator = torch.Generator().manual_seed(seed)
    shapes = dict(xz=(2, 2 * DIM, L), conv1d_weight=(DIM, 1, K), conv1d_bias=(DIM,), x_proj_weight=None)
    shapes |= dict(delta_proj_weight=(DIM, R), out_proj_weight=(5, DIM), out_proj_bias=(5,), A=(DIM, N), B=(DIM, N))
    shapes |= dict(C=(DIM, N), D=(DIM,), delta_bias=(DIM,))
    shapes["x_proj_weight"] = (R + N * (2 - len(constant)), DIM)
    tensors = {n: torch.randn(*shape, generator=generator) for n, shape in shapes.items()}
    tensors["A"] = -tensors["A"].abs()
    absent |= {n: None for n in ("B", "C") if n not in constant}
    return tensors | dict.fromkeys(absent)


def reference(A_b=None, **t):
    t = {n: None if v is None else v.double() for n, v in t.items()}
    y = plain.inner(
        t["xz"], t["conv1d_weight"], t["conv1d_bias"], t["x_proj_weight"], t["delta_proj_weight"], t["A"], t["B"],
        t["C"], t["D"], t["delta_bias"], A_b,
    )  # fmt: skip
    y = y.mT @ t["out_proj_weight"].mT
    return y if t["out_proj_bias"] is None else y + t["out_proj_bias"]


@pytest.mark.parametrize("constant", [(), ("B",), ("C",), ("B", "C")])
@pytest.mark.parametrize("absent", [(), ("conv1d_bias", "out_proj_bias", "D", "delta_bias")])
def test_the_fused_function_has_the_values_and_gradients_of_loops(constant, absent):
    plain.agree(mamba.mamba_inner_fn, reference, inputs(constant=constant, **dict.fromkeys(absent)))


def test_biases_and_norms_of_keys_and_queries():
    generator = torch.Generator().manual_seed(1)
    sizes = dict(B_proj_bias=N, C_proj_bias=N, b_rms_weight=N, c_rms_weight=N, dt_rms_weight=R)
    extra = {n: torch.randn(size, generator=generator) for n, size in sizes.items()}

    def by_hand(B_proj_bias, C_proj_bias, b_rms_weight, c_rms_weight, dt_rms_weight, **t):
        def norm(x, weight):
            return x * weight[:, None] / (x.square().mean(1, keepdim=True) + 1e-6).sqrt()

        x, z = t["xz"].chunk(2, 1)
        u = plain.causal_conv1d(x, t["conv1d_weight"][:, 0], t["conv1d_bias"], activation="silu")
        rows = t["x_proj_weight"] @ u
        B = norm(rows[:, R : R + N] + B_proj_bias[:, None], b_rms_weight)
        C = norm(rows[:, R + N :] + C_proj_bias[:, None], c_rms_weight)
        delta = t["delta_proj_weight"] @ norm(rows[:, :R], dt_rms_weight)
        y, _ = plain.selective_scan(u, delta, t["A"], B, C, t["D"], z, t["delta_bias"], True)
        return y.mT @ t["out_proj_weight"].mT + t["out_proj_bias"]

    plain.agree(mamba.mamba_inner_fn, by_hand, inputs() | extra)


@pytest.mark.parametrize("constant", [(), ("B",)])
def test_two_directions_that_share_their_weights(constant):
    tensors = inputs(constant=constant) | dict(A_b=-torch.rand(DIM, N))
    plain.agree(mamba.bimamba_inner_fn, reference, tensors)


NAMES = set("in_proj.weight conv1d.weight conv1d.bias x_proj.weight dt_proj.weight dt_proj.bias A_log D".split())
NAMES |= {"out_proj.weight"}
OF_V2 = {"conv1d_b.weight", "conv1d_b.bias", "x_proj_b.weight", "dt_proj_b.weight", "dt_proj_b.bias", "A_b_log", "D_b"}
OF_V3 = OF_V2 | {name.replace("_b", "_s") for name in OF_V2}


@pytest.mark.parametrize(
    "options, names",
    [
        ({}, NAMES),
        (dict(conv_bias=False, bias=True), NAMES - {"conv1d.bias"} | {"in_proj.bias", "out_proj.bias"}),
        (dict(bimamba_type="v1"), NAMES | {"A_b_log"}),
        (dict(bimamba_type="v2", if_divide_out=True, init_layer_scale=0.1), NAMES | OF_V2 | {"gamma"}),
        (dict(bimamba_type="v2", if_devide_out=True, layer_idx=3), NAMES | OF_V2),
        (dict(bimamba=True), NAMES | OF_V2),
        (dict(bimamba_type="v3", nslices=3), NAMES | OF_V3),
    ],
)
def test_the_mixer_has_the_parameters_of_its_forks_and_their_values(options, names):
    mixer = mamba.Mamba(8, d_state=N, d_conv=K, **options)
    assert set(mixer.state_dict()) == names
    assert mixer.A_log._no_weight_decay and mixer.D._no_weight_decay and mixer.dt_proj.bias._no_reinit
    for parameter in mixer.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)

    def loops(x, **p):
        def inner(tokens, suffix, A, flipped_A=None):
            conv_bias = p.get(f"conv1d{suffix}.bias")
            weights = [p[f"{name}{suffix}.weight"] for name in ("conv1d", "x_proj", "dt_proj")]
            return plain.inner(
                tokens, weights[0], conv_bias, *weights[1:], A, D=p[f"D{suffix}"], dt_bias=p[f"dt_proj{suffix}.bias"],
                flipped_A=flipped_A,
            )  # fmt: skip

        xz = (x @ p["in_proj.weight"].mT + p.get("in_proj.bias", 0)).mT
        A, A_b = -p["A_log"].exp(), -p["A_b_log"].exp() if "A_b_log" in p else None
        is_v1 = options.get("bimamba_type") == "v1"
        y = inner(xz, "", A, A_b if is_v1 else None)
        if A_b is not None and not is_v1:
            y = y + inner(xz.flip(-1), "_b", A_b).flip(-1)
            y = y / 2 if mixer.if_divide_out else y
        if "A_s_log" in p:  # the first token of each of three slices, then the second
            order = [0, 3, 6, 1, 4, 7, 2, 5, 8]
            y_s = inner(xz[..., order], "_s", -p["A_s_log"].exp())
            y = y + y_s[..., [order.index(i) for i in range(L)]]
        return (y.mT @ p["out_proj.weight"].mT + p.get("out_proj.bias", 0)) * p.get("gamma", 1)

    x = torch.randn(2, L, 8)
    plain.agree(lambda x, **p: torch.func.functional_call(mixer, p, (x,)), loops, dict(x=x, **mixer.state_dict()), 4e-6)


def test_the_mixer_compiles_and_exports_in_one_graph():
    x = torch.randn(2, L, 8)
    for bimamba_type in ("none", "v1", "v2"):
        mixer = mamba.Mamba(8, d_state=N, bimamba_type=bimamba_type)
        expected = mixer(x)
        plain.close(torch.compile(mixer, fullgraph=True, backend="aot_eager")(x), expected)
        plain.close(torch.export.export(mixer, (x,)).module()(x), expected)


def test_what_the_mixer_has_not_has_a_sentence():
    with pytest.raises(NotImplementedError, match="bimamba_type is 'v4'"):
        mamba.Mamba(8, bimamba_type="v4")
    with pytest.raises(ValueError, match="9 tokens, expected a multiple of nslices=5"):
        mamba.Mamba(8, bimamba_type="v3")(torch.zeros(1, 9, 8))
    with pytest.raises(NotImplementedError, match="generation token by token"):
        mamba.Mamba(8)(torch.zeros(1, 2, 8), inference_params=object())
    with pytest.raises(NotImplementedError, match="A is complex"):
        mamba.mamba_inner_fn(**inputs() | dict(A=torch.zeros(DIM, N, dtype=torch.complex64)))
    with pytest.raises(ValueError, match="x_proj has shape"):
        mamba.mamba_inner_fn(**inputs() | dict(x_proj_weight=torch.zeros(3, 3)))


class OtherNorm(nn.Module):
    """RMSNorm by another package, with the attributes of `RMSNorm`."""

    def __init__(self, dim):
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(dim, dtype=torch.bfloat16)), None, 1e-5

    def forward(self, x):
        assert x.dtype == self.weight.dtype
        return x * (x.float().square().mean(-1, keepdim=True) + self.eps).rsqrt().to(x.dtype) * self.weight


@pytest.mark.parametrize("norm", [nn.LayerNorm, RMSNorm, OtherNorm])
def test_a_block_adds_the_residual_before_its_norm(norm):
    class Double(nn.Module):
        def forward(self, tokens, inference_params):
            return 2 * tokens

    block = mamba.Block(8, lambda dim: Double(), norm, residual_in_fp32=True)
    x, residual = torch.randn(2, 3, 8).bfloat16(), torch.randn(2, 3, 8)
    y, total = block(x, residual)
    wide = x.double() + residual.double()
    centred = wide - wide.mean(-1, keepdim=True) if norm is nn.LayerNorm else wide
    expected = centred / (centred.square().mean(-1, keepdim=True) + block.norm.eps).sqrt()
    assert total.dtype == torch.float32 and y.dtype == torch.bfloat16
    plain.close(total, wide), plain.close(y, 2 * expected, 2**-7)
    assert block(x)[1].dtype == torch.float32
