"""Prevents transformers from renaming the parameters of our backbones when it loads a detector.

When transformers 5 loads DETR and similar models, it renames every `out_proj` of the checkpoint to `o_proj`. The mixers
of our backbones have an `out_proj` too, and would lose it with only a warning.
"""

# Classes and `model_type`s of transformers 5.23 that take a backbone and rename `out_proj`.
KINDS = ("DetrModel", "rt_detr", "rt_detr_v2", "d_fine")


def keep_names() -> list[str]:
    """Excludes our mixers from the renaming of `out_proj`, in this process. Call it before `from_pretrained`.

    Returns those of KINDS whose renamings this call changed. Raises ImportError without transformers 5.
    """
    try:
        from transformers import conversion_mapping as mapping
        from transformers.conversion_mapping import WeightRenaming
    except ImportError as error:
        raise ImportError("keep_names needs transformers 5; run: pip install 'transformers>=5'") from error
    changed = []
    for kind in KINDS:
        renamings = mapping.get_checkpoint_conversion_mapping(kind) or []
        for i, renaming in enumerate(renamings):
            if type(renaming) is WeightRenaming and renaming.source_patterns == ["out_proj"]:
                renamings[i] = WeightRenaming(r"(?<!mixer\.)out_proj", renaming.target_patterns)
                changed.append(kind)
        if kind in changed:
            mapping.register_checkpoint_conversion_mapping(kind, renamings, overwrite=True)
    return changed
