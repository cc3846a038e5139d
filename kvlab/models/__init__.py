"""Models: load one, its shape, and what InfiniGen must know of its family."""

from .families import FAMILIES, Family, blocks_of, query_of, report_block_inputs
from .kinds import is_latent, layers_of, refusal
from .loading import EMBEDDED, WORKSHOP, calibration_ids, check_files, load, prepare, source_of
from .shape import ModelShape

__all__ = [
    "EMBEDDED", "FAMILIES", "WORKSHOP", "Family", "ModelShape", "blocks_of", "calibration_ids", "check_files",
    "is_latent", "layers_of", "load", "prepare", "query_of", "refusal", "report_block_inputs", "source_of",
]  # fmt: skip
