"""Ranks: communication between processes when tensor parallelism splits a layer's heads among them.

Every process holds the K and V of its own heads, and most methods choose head by head, without communication.
Methods that pool over a layer's heads gather those of all processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import Tensor


def split(source) -> dict:
    """The arguments of `from_pretrained` that split a model's heads among the processes of `torchrun`. It
    makes their group if there is none: gloo on a CPU, nccl on GPUs. source: a folder or a hub id.

    Raises ValueError, before anything is loaded, for one process, for a family without a plan, and for heads
    that the processes do not divide.
    """
    from transformers import AutoConfig
    from transformers.distributed import DistributedConfig

    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks < 2:
        raise ValueError(
            "tensor parallelism: there is one process; start several: torchrun --nproc-per-node 2 -m eval ..."
        )
    config = AutoConfig.from_pretrained(source, trust_remote_code=False).get_text_config()
    if not getattr(config, "base_model_tp_plan", None):
        raise ValueError(f"tensor parallelism: transformers has no plan for {config.model_type!r}")
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % ranks or kv_heads % ranks:
        raise ValueError(
            f"tensor parallelism: {ranks} processes do not divide {heads} heads with {kv_heads} KV heads"
        )
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return {"distributed_config": DistributedConfig(tp_size=ranks)}


def ranks_of(model) -> int:
    """The number of processes that share a model's heads, by transformers' tensor parallelism; usually 1."""
    return getattr(model, "tp_size", None) or 1


def rank_of(model) -> int:
    """The rank of this process among them."""
    return torch.distributed.get_rank() if ranks_of(model) > 1 else 0


def check_splits(store) -> None:
    """ValueError for a store of formats in which all KV heads share numbers: the heads are split."""
    if store.format.over_heads or store.values.over_heads:
        raise ValueError(
            "all KV heads share numbers in this format, and tensor parallelism splits the heads among "
            "processes: choose one whose scales are of a head's own"
        )


def all_heads(layer, x: Tensor) -> Tensor:
    """x `[batch, own heads, ...]` of a layer or a `View` -> that of all processes, `[batch, heads, ...]`."""
    if layer.ranks == 1:
        return x
    found = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(layer.ranks)]
    torch.distributed.all_gather(found, x.contiguous())
    return torch.cat(found, dim=1)


def own_heads(layer, x: Tensor) -> Tensor:
    """The part of x `[batch, heads, ...]` for this process's heads."""
    return x.chunk(layer.ranks, dim=1)[layer.rank]


def added(ranks: int, numbers: Iterable[float]) -> list[float]:
    """Each of these numbers, summed over all `ranks` processes."""
    if ranks == 1:
        return list(numbers)
    total = torch.tensor(list(numbers), dtype=torch.float64, device="cpu")
    if torch.distributed.get_backend() == "nccl":
        total = total.cuda()
    torch.distributed.all_reduce(total)
    return total.tolist()


def summed(model, stats):
    """`cache.stats()` of all processes together: the sum of bytes (each process counts its own). `scored`
    already covers all. Token counts are the same in all, or one process's largest."""
    ranks, own = ranks_of(model), vars(stats)
    sizes = [name for name in own if name.endswith("_bytes")]
    held = added(ranks, [own[name] for name in sizes])
    return type(stats)(**own | dict(zip(sizes, map(int, held), strict=True)))
