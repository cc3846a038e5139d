"""The timed models and prompts, and the bytes that a decode step reads."""

from __future__ import annotations

import torch

import kvlab
from kvlab.faster import compiled, graphed
from kvlab.models import source_of

STEPS = 16  # tokens decoded per repeat
WIDE_CONTEXT = 16384  # the wide suite's longest


WIDE = {  # the wide suite's Llama: 4 layers, hidden 1024, 8 heads of 128
    "vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": WIDE_CONTEXT,
    "tie_word_embeddings": True,
}  # fmt: skip


def wide_model():
    """The wide suite's Llama with random weights, the same every time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**WIDE)).eval()


def load(options: dict, attention: str):
    """The model to time, in eval mode: options name `suite`, `model`, `device`, `dtype`, `engine`,
    `weights`."""
    from transformers import AutoModelForCausalLM

    device = options.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
    if options["suite"] == "wide":
        model = wide_model().to(device)
        if options.get("dtype"):
            model = model.to(getattr(torch, options["dtype"]))
        if attention == "kvlab":
            kvlab.prepare(model)
            if options.get("engine") == "compiled":
                compiled(model, options.get("weights", "fp32"))
            elif options.get("engine") == "graph":
                graphed(model)
        else:
            model.set_attn_implementation(attention)
        return model
    if attention == "kvlab":
        how = {"dtype": options.get("dtype"), "engine": options.get("engine", "eager")}
        how["weights"] = options.get("weights", "fp32")
        return kvlab.load(options["model"], device=device, **how)[0]
    dtype = options.get("dtype") or ("float32" if device == "cpu" else "auto")
    model = AutoModelForCausalLM.from_pretrained(
        source_of(options["model"]), attn_implementation=attention, dtype=dtype, trust_remote_code=False
    )
    return model.to(device).eval()


def prompt(model, context: int) -> torch.Tensor:
    """Random token ids `[1, context - STEPS]`, the same for every method."""
    generator = torch.Generator().manual_seed(context)
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(0, vocabulary, (1, context - STEPS), generator=generator).to(model.device)


def weight_bytes(model) -> int:
    """Bytes of weights that a decode step reads: all but an input embedding of its own (one row)."""
    table, head = next(model.get_input_embeddings().parameters()), model.get_output_embeddings()
    tied = head is not None and next(head.parameters()).data_ptr() == table.data_ptr()
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    return total if tied else total - table.numel() * table.element_size()


def tensor_bytes(cache) -> int:
    """Bytes of the storages that a transformers cache's layers hold."""
    found = {}
    for layer in cache.layers:
        for value in vars(layer).values():
            for item in value if isinstance(value, tuple | list) else (value,):
                if isinstance(item, torch.Tensor):
                    for part in parts(item):
                        storage = part.untyped_storage()
                        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that one is made of: itself, or those inside a subclass, as quanto's packed ones."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    inside = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return [part for one in inside for part in parts(one)]
