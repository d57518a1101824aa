"""Maps of what a backbone does with an image: attention, memory, receptive field, features, class activation."""

from .draw import COLORMAP, EXPLANATIONS, KINDS, Row, Sheet, draw, make_sheet
from .model import attention, grad_cam, memory, pca, receptive_field, reshape_transform, scans
from .scan import ScanInputs, attention_rows, half_life, retention, scan_inputs
from .tokens import check_backbone, grid_of, patch_token, scan_position, to_map
