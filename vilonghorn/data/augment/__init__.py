"""Augmentation of batches on their device: the policy chooses, `ops` has the operations, `batch` applies them."""

from .batch import Augmentation
