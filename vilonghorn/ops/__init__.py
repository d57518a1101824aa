"""The scan and what surrounds it: operators on tensors, without modules."""

from . import flops
from .conv import conv_silu
from .dispatch import backends
from .mix import mix
from .norm import rms_norm
from .operator import scan
from .project import project, project_normed

__all__ = ["backends", "conv_silu", "flops", "mix", "project", "project_normed", "rms_norm", "scan"]
