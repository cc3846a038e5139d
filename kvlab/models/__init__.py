"""Models: load one, its shape and kinds of layers, and the question a layer would ask."""

from .fetching import PACKAGES, fetch
from .loading import (
    EMBEDDED,
    WORKSHOP,
    calibration_ids,
    check_files,
    load,
    prepare,
    source_of,
    tokenizer_of,
)
from .passes import bodies_of, fed_to
from .rehearsal import attention_of, blocks_of, query_of, report_block_inputs
from .shape import ModelShape, is_latent, layers_of, refusal

__all__ = [
    "EMBEDDED", "PACKAGES", "WORKSHOP", "ModelShape", "attention_of", "blocks_of", "bodies_of",
    "calibration_ids", "check_files", "fed_to", "fetch", "is_latent", "layers_of", "load", "prepare",
    "query_of", "refusal", "report_block_inputs", "source_of", "tokenizer_of",
]  # fmt: skip
