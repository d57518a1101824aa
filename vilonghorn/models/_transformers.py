"""Prevents transformers from renaming the parameters of our backbones when it loads a detector.

When transformers 5 loads DETR and similar models, it renames every `out_proj` of the checkpoint to `o_proj`. The mixers
of our backbones have an `out_proj` too, and would lose it with only a warning.
"""

import sys
import warnings

# Classes and `model_type`s of transformers 5.23 that take a backbone and rename `out_proj`.
KINDS = ("DetrModel", "rt_detr", "rt_detr_v2", "d_fine")


def keep_names() -> None:
    """Excludes our mixers from the renaming of `out_proj`, in this process, if transformers is imported.

    A backbone calls it when it is made: transformers makes a model before it loads its weights.
    """
    mapping = sys.modules.get("transformers.conversion_mapping")  # which loading and saving need
    if mapping is None:
        return
    try:
        get, register = mapping.get_checkpoint_conversion_mapping, mapping.register_checkpoint_conversion_mapping
        renaming = mapping.WeightRenaming
    except AttributeError as error:
        warnings.warn(f"this transformers may lose out_proj of the backbone on loading: {error}", stacklevel=2)
        return
    for kind in KINDS:
        entries = get(kind) or []
        for i, entry in enumerate(entries):
            if type(entry) is renaming and entry.source_patterns == ["out_proj"]:
                entries[i] = renaming(r"(?<!mixer\.)out_proj", entry.target_patterns)
                register(kind, entries, overwrite=True)
