"""Stats: the bytes that a cache holds and moves, counted in the storage of its tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from .hybrid import states_of
from .layer import Layer


@dataclass(frozen=True)
class Stats:
    """A cache's bytes and tokens. Bytes are those of the tensors' storage, scales, scores and positions
    included; `spare_bytes` are allocated in addition, by buffers that grow, for tokens to come; `moved_bytes`
    crossed the link between host and device, either way, in the last pass, `fetched_bytes` of them to the
    device; `index_bytes`, a part of the device's, are the tensors that a fetch policy chooses by. `scored`:
    of the slots that stayed when the prompt was compressed, the share that the keep chose by its score, not
    by a rule such as a recent window, over all layers that dropped tokens; None if none did. `clipped`:
    numbers stored as the largest of their format (with `nonfinite=clip`), or of a scale that the prompt has
    fixed."""

    device_bytes: int
    host_bytes: int
    moved_bytes: int
    tokens_seen: int  # tokens fed so far, padding included (the length that drives positions)
    tokens_held: int  # tokens that a row holds, mean over layers and KV heads: of the row that holds most
    scored: float | None = field(default=None, repr=False)
    index_bytes: int = field(default=0, repr=False)
    fetched_bytes: int = field(default=0, repr=False)
    spare_bytes: int = field(default=0, repr=False)
    clipped: int = field(default=0, repr=False)

    def __getitem__(self, name: str) -> int:
        return asdict(self)[name]

    def keys(self):
        return asdict(self).keys()


def stats_of(cache) -> Stats:
    """The stats of this cache now."""
    sizes = {False: {}, True: {}}
    for layer in cache.layers:
        ours = isinstance(layer, Layer)
        for on_host, tensor in layer.tensors() if ours else ((False, x) for x in states_of(layer)):
            storage = tensor.untyped_storage()
            if storage.nbytes():  # an empty one may begin where another one does
                sizes[on_host][storage.data_ptr()] = storage.nbytes()
    places = [layer.place for layer in cache.attending]
    index = {x.untyped_storage().data_ptr(): x.untyped_storage() for p in places for x in p.index}
    chosen = [layer.scored for layer in cache.attending if layer.scored is not None]
    spare = {False: 0, True: 0}
    for layer in cache.attending:
        spare[layer.place.on_host] += layer.store.spare_bytes
        spare[False] += layer.keep.spare_bytes + layer.place.spare_bytes
    resident = sum(layer.place.resident_bytes(layer) for layer in cache.attending)
    held = list(zip(*(layer.mean_held for layer in cache.attending), strict=False))
    return Stats(
        device_bytes=sum(sizes[False].values()) - spare[False] + resident,
        host_bytes=sum(sizes[True].values()) - spare[True] - resident,
        spare_bytes=sum(spare.values()),
        moved_bytes=sum(layer.moved_bytes for layer in cache.attending),
        tokens_seen=cache.get_seq_length(),
        tokens_held=round(max((sum(row) / len(row) for row in held), default=0)),
        scored=sum(chosen) / len(chosen) if chosen else None,
        clipped=sum(layer.store.clipped for layer in cache.attending),
        index_bytes=sum(x.nbytes() for x in index.values()) - sum(p.spare_bytes for p in places),
        fetched_bytes=sum(place.fetched_bytes for place in places),
    )
