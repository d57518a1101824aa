"""Weights of Mamba's rule, those of Vim, in a model of one of Longhorn's rules with the same trunk and sizes."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .hierarchy import HierarchicalSSM
from .trunk import VisionSSM

RULES = ("longhorn", "longhorn_exact")  # with the gate of the derivation below
CHANGES = "of Mamba's rule, B is k, C is q and the step is log(1 / (1 - beta)); A_log is left"


def is_from_mamba(state_dict: Mapping[str, Tensor], model: VisionSSM | HierarchicalSSM) -> bool:
    """Whether weights have Mamba's decay rates, in our names or Vim's, and all blocks of a model a rule of Longhorn."""
    if not isinstance(model, VisionSSM):
        return False
    blocks: Any = model.blocks
    return all(b.mixer.rule in RULES for b in blocks) and any(name.endswith("mixer.A_log") for name in state_dict)


def from_mamba(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Drops Mamba's decay rates. All other tensors have the same name, shape and place in Longhorn's rules.

    Derivation, for channel i, state n, u = dt + dt_bias, Mamba's step delta = softplus(u), and x of the token:

        Mamba     s_n <- exp(-delta |A_n|) s_n + delta B_n x,   y = sum C_n s_n
        Longhorn  s_n <- (1 - eps k_n^2) s_n + eps k_n x,       y = sum q_n s_n,   eps = beta / (1 + beta |k|^2)
        The key is what writes x and the query what reads: k = B, q = C.
        beta = sigmoid(u) = 1 - exp(-softplus(u)) = 1 - exp(-delta): the same dt_proj and dt_bias, no constant to fit.
        So eps k_n q_n = delta B_n C_n (1 + O(delta)): what a token adds to the output agrees to first order.
        Forgetting is delta k_n^2 where Mamba has delta |A_n|: training has to learn it, in x_proj.
    """
    return {name: value for name, value in state_dict.items() if not name.endswith("mixer.A_log")}
