"""ModelShape: the numbers that formulas, caches and kernels need of a model."""

from __future__ import annotations

from dataclasses import dataclass


def other_model(made_for) -> str:
    """Why a cache serves no other model than the one it was made for (None: that one is gone)."""
    name = "model that is gone" if made_for is None else f"model, a {type(made_for).__name__}"
    return f"this cache was made for another {name}: kvlab.make_cache(model, ...) makes one for this model"


@dataclass(frozen=True)
class ModelShape:
    """A decoder's shape, by one set of names for all families.

    head_dim: of a KV head (default: hidden / heads). value_dim: of its V (default: head_dim). vocabulary:
    token ids. context: tokens that the model was trained for, None where it does not say.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int = 0
    head_dim: int = 0
    context: int | None = None
    value_dim: int = 0

    def __post_init__(self):
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden // self.heads)
        if not self.value_dim:
            object.__setattr__(self, "value_dim", self.head_dim)

    @classmethod
    def of(cls, model) -> ModelShape:
        """The shape of a transformers model, from its configuration."""
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            vocabulary=config.vocab_size,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            context=getattr(config, "max_position_embeddings", None),
        )
