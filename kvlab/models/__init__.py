"""Models: load one, its shape and kinds of layers, and the question a layer would ask."""

from .fetching import PACKAGES, fetch
from .guest import check_outside, inside
from .lean import Narrow
from .loading import (
    EMBEDDED,
    LISTED,
    WORKSHOP,
    calibration_ids,
    configuration,
    load,
    masks_are_known,
    prepare,
    preparing,
    source_of,
    tokenizer_of,
)
from .passes import bodies_of, cache_name, fed_to
from .rehearsal import attention_of, blocks_of, query_of, report_block_inputs
from .rope import Rotation, Switch, renumbered, rotation_of, rotations_of
from .shape import ModelShape, is_latent, layers_of, refusal, refused_layers

__all__ = [
    "EMBEDDED", "LISTED", "PACKAGES", "WORKSHOP", "ModelShape", "Narrow", "Rotation", "Switch",
    "attention_of", "blocks_of", "bodies_of", "cache_name", "calibration_ids", "check_outside",
    "configuration", "fed_to", "fetch", "inside", "is_latent", "layers_of", "load",
    "masks_are_known", "prepare", "preparing", "query_of", "refusal", "refused_layers", "renumbered",
    "report_block_inputs", "rotation_of", "rotations_of", "source_of", "tokenizer_of",
]  # fmt: skip
