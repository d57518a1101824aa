"""Maps of what a backbone does with an image: attention, memory, receptive field, features, class activation."""

from .draw import COLORMAP, EXPLANATIONS, KINDS, Row, Sheet, draw, make_sheet
from .model import (
    attention,
    check_backbone,
    grad_cam,
    grid_of,
    memory,
    patch_token,
    pca,
    receptive_field,
    reshape_transform,
    scan_position,
    scans,
    to_map,
)
from .scan import ScanInputs, attention_rows, half_life, retention, scan_inputs
