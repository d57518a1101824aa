"""Maps of what a backbone does with an image: attention, receptive field, features, class activation."""

from .draw import COLORMAP, KINDS, Sheet, draw, make_sheet, view
from .maps import attention, check_backbone, grad_cam, grid_of, patch_token, pca, receptive_field, scans, to_map
from .scan import ScanInputs, attention_rows, scan_inputs
