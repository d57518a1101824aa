"""Keeps transformers from renaming our parameters when it loads a detector that has one of our backbones.

transformers 5 loads DETR and its kin after renaming every `out_proj` of a checkpoint to `o_proj`, wherever it is. The mixers of
a backbone have an `out_proj` too, and it would be lost with no more than a warning.
"""

from __future__ import annotations

from collections.abc import Sequence

BROAD = "out_proj"
NARROW = r"(?<!mixer\.)out_proj"
KINDS = (
    "DetrModel",
    "rt_detr",
    "rt_detr_v2",
    "d_fine",
)  # those of transformers 5.23 that take a backbone and rename so


def keep_names(kinds: Sequence[str] = KINDS) -> list[str]:
    """Lets renamings of `out_proj` pass by our mixers, from here on in this process; what else they rename stays.

    To be called before `from_pretrained`; again, it does nothing more.

    Args:
        kinds: classes or `model_type`s of transformers, as its table of renamings has them.

    Returns:
        Those whose renamings were narrowed.

    Raises:
        ImportError: transformers is older than 5, or not installed.
    """
    try:
        from transformers.conversion_mapping import (
            WeightRenaming,
            get_checkpoint_conversion_mapping,
            register_checkpoint_conversion_mapping,
        )
    except ImportError as error:
        raise ImportError("keep_names needs transformers 5; run: pip install 'transformers>=5'") from error
    narrowed = []
    for kind in kinds:
        renamings = get_checkpoint_conversion_mapping(kind) or []
        broad = [type(r) is WeightRenaming and r.source_patterns == [BROAD] for r in renamings]
        if any(broad):
            kept = [WeightRenaming(NARROW, r.target_patterns) if wide else r for r, wide in zip(renamings, broad)]
            register_checkpoint_conversion_mapping(kind, kept, overwrite=True)
            narrowed.append(kind)
    return narrowed
