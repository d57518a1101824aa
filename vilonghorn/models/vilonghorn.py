"""Vision Longhorn: Vim's trunk with the state updates of Longhorn, an online learner (arXiv 2407.14207).

`vilonghorn_*` has the diagonal update that the paper trains, `vilonghorn_*_exact` the closed form before its diagonal
approximation, `vilonghorn_*_shared` the diagonal update in the bidirectional form of Longhorn's authors: directions that
share their projections, a norm for each, summed. Everything else is the trunk's.
"""

from __future__ import annotations

from typing import Dict

from torch import Tensor

from . import factory
from .trunk import VisionSSM
from .weights import fit_state_dict

MODELS = factory.variants(
    "vilonghorn",
    {
        "": dict(rule="longhorn"),
        "_exact": dict(rule="longhorn_exact"),
        "_shared": dict(rule="longhorn", directions="shared"),
    },
)

default_cfgs = factory.default_cfgs(MODELS, published={})


def checkpoint_filter_fn(state_dict: Dict[str, Tensor], model: VisionSSM) -> Dict[str, Tensor]:
    """Fits a Vision Longhorn checkpoint to a model of another image size, patch size, stride or class count.

    Raises:
        ValueError: values that are not finite, or a checkpoint that does not fit; the message names the first mismatches.
    """
    return fit_state_dict(state_dict, model)


factory.register(__name__, MODELS, checkpoint_filter_fn, "none are published yet")
