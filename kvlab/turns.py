"""Turns: which passes are a prompt, and when it has ended.

A prompt is all tokens before the first single new token, in one pass or in pieces; a later turn of several
tokens is a prompt again. No token is dropped before the prompt has ended. `Stepper`, `decode` and the harness
say where it ends, and later tokens continue the text. A bare pass of `model(...)` or `generate` does not: its
prompt ends before the next single token, or when the cache is used otherwise (`stats`, `save`, copies,
`hold`, forks, `crop`).

- A bare prompt's first pass is taken as the whole of it. Each layer whose state depends on where the prompt
  ends keeps its inputs. If a piece follows, these layers start again and wait: pieces attend to the exact
  earlier tokens, and when the prompt has ended they are taken as one pass (`Layer.fill`).
- Tokens of a later turn are written as they come, as in `KVCache.prefill`. When it ends, the keep decides
  about all tokens held, with a budget of all that the row has seen. For a row with at most one token in it
  there is no turn; nor is there one after `hold()`, in assisted decoding and with `turns="first"`.
- The positions of a piece of `generate(prefill_chunk_size=n)` are a slice of the prompt's. If these continue,
  more pieces follow; if they end, a single token is the last piece. Those of a new token are of another
  tensor than those of the pass before.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from .attention import Recorded
from .gather import in_order
from .parameters import check_kind
from .reread import note
from .store import Growing, Static

PARTS = ("query", "keys", "values")


def begin(cache, body, args, kwargs) -> None:
    """A bare pass begins. ValueError for a single token that is ambiguous, and for a later turn if the keep
    cannot take one; nothing has changed then."""
    _forget_broken(cache)
    layers, seen = cache.attending, cache.get_seq_length()
    ids, positions = given_to(body, args, kwargs)
    if seen and kwargs.get("use_cache") is False:  # `generate` then feeds the whole text at every step
        raise ValueError("use_cache=False beside a cache that holds tokens: leave it out, or pass no cache")
    last = kwargs.get("logits_to_keep")  # how many, or a tensor of which
    if ids.shape[1] > 1 and isinstance(last, int) and last == 1:
        _check_last(kwargs.get("attention_mask"), ids.shape[1])
    single = ids.shape[1] == 1 and seen > 0
    before, cache.cut_from = cache.cut_from, None if single else positions
    goes_on = _of_longer(positions) if single and _of_one(before, positions) else None
    if single and not (cache.open and _last_piece(goes_on, seen == cache.pieces)):
        if not cache.open and goes_on and any(layer.place.chooses for layer in layers):
            raise ValueError(
                "prefill_chunk_size: a later turn ends with a piece of one token, which would be read as a "
                "new token is; expected pieces of another size"
            )
        end(cache)
    elif cache.open:
        with half_done(cache):
            for layer in layers:
                if layer.raw is not None and not layer.waits:
                    _start_again(layer)
            cache.pieces += 1
    elif cache.takes_back:
        return
    elif not seen:
        mask = kwargs.get("attention_mask")
        real = isinstance(mask, Tensor) and mask.dim() == 2
        none = real and not bool(mask.any(-1).all())  # a row without a token
        with half_done(cache):
            cache.open, cache.pieces, cache.fed_pieces = True, 1, []
            for layer in layers:
                layer.open = True
                layer.waits = (none or _of_longer(positions) is False) and _depends(layer)
    elif _reopens(cache):
        with half_done(cache):
            cache.open, cache.pieces = True, 1
            for layer in layers:
                layer.in_prompt = layer.prefilling = True
                layer.later = list(layer.lengths)


@contextmanager
def half_done(cache) -> Iterator[None]:
    """An interruption in here leaves a broken cache."""
    before, cache._began = cache._began if cache.broken else None, -1
    yield
    cache._began = before


def _check_last(mask, tokens: int) -> None:
    """ValueError if only the last logits of a pass are asked for, as `generate` does, and a row ends with
    padding: such a query sees nothing that is defined."""
    if isinstance(mask, Tensor) and mask.dim() == 2:
        new = mask[:, -tokens:].bool()
        if new.shape[1] and bool((new.any(-1) & ~new[:, -1]).any()):
            raise ValueError(
                "attention_mask: a row ends with padding, where the next token is asked for; expected "
                "padding on the left"
            )


def end(cache) -> None:
    """End the open prompt or turn, if there is one. RuntimeError while another thread is in a pass."""
    if cache._began is None and not cache.open:
        return
    with cache.thread.alone():
        if not cache.broken:
            _forget_broken(cache)
            if cache.open:
                check_begun(cache)
                _end(cache)


def _end(cache) -> None:
    with cache._changing():
        cache.open, waited = False, any(layer.waits for layer in cache.attending)
        for layer in cache.attending:
            given, layer.raw, layer.open = layer.raw, None, False
            if layer.waits:
                layer.waits = False
                layer.fill_pieces(given)
            elif layer.prefilling:
                layer.prefilling = False
                layer.end_prefill()
        if waited and cache.rereads:
            for fed in cache.fed_pieces:
                note(cache, *fed)
            cache._end_prompt()
        cache.fed_pieces = []


def check_begun(cache) -> None:
    """ValueError if the prompt ends before a row has a token, where it decides what the row may hold."""
    if 0 in cache.lengths and any(map(_decided, cache.attending)):
        raise ValueError(
            f"attention_mask: row {cache.lengths.index(0)} has a prompt of 0 tokens, and when it ends the "
            "cache decides what the row may hold; expected a token in every row"
        )


def _decided(layer) -> bool:
    """Whether the end of a prompt decides more about a row than a later pass can: a share of it may be held,
    it is compressed once, or a fetch learns from it."""
    keep, fetch = layer.keep.policy, getattr(layer.place.policy, "fetch", None)
    if layer.evicts and (keep.once or keep.budget < 1):
        return True
    return layer.place.learns and (fetch is None or fetch.speculates)


def chosen(layer, view) -> tuple[Tensor | None, list[int] | None]:
    """What the keep chooses (`Keep.chosen`). To a row with at most one token in it, a later turn is a decode
    step."""
    policy, keep = layer.keep.policy, layer.keep
    if not (layer.in_prompt and layer.later):
        return policy.chosen(view)
    steps = [now - then < 2 for then, now in zip(layer.later, layer.lengths, strict=True)]
    before, keep.shares = _copied(keep) if any(steps) else None, None
    slots, most = policy.chosen(view)
    if before is None:
        return slots, most
    of_turn = dict(vars(keep))
    vars(keep).update(vars(before))
    layer.in_prompt = False
    stays, held = policy.chosen(view)
    layer.in_prompt = True
    if (keep.shares is None) != (of_turn["shares"] is None):
        for found in (vars(keep), of_turn):
            found["shares"] = _shares(found, layer.kv_heads, view.slot_positions.device)
    for name in (*keep.per_row, *keep.per_slot):
        setattr(keep, name, _with_rows(getattr(keep, name), of_turn[name], steps))
    if slots is None and stays is None:
        return None, None
    all_stay = in_order(view.slot_positions >= 0), layer.rows_held
    found = [all_stay if one[0] is None else one for one in ((stays, held), (slots, most))]
    width = max(one.shape[2] for one, _ in found)
    shape = len(steps), layer.kv_heads, width
    both = [pad(one, (0, width - one.shape[2]), value=-1).expand(shape) for one, _ in found]
    return _with_rows(*both, steps), _with_rows(*[most for _, most in found], steps)


def _copied(keep):
    """A copy of a keep's state, in which models, and what nobody can copy, stay the same objects."""
    same = {}
    for x in vars(keep).values():
        try:
            if isinstance(x, torch.nn.Module):
                same[id(x)] = x
            elif not isinstance(x, Tensor):
                copy.deepcopy(x)
        except Exception:  # such as a lock
            same[id(x)] = x
    return copy.deepcopy(keep, same)


def _shares(found: dict, heads: int, device) -> Tensor:
    """How many tokens each head may hold, `[batch, kv_heads]`, if they were even too."""
    own, limits = found["shares"], found["limits"]
    return torch.tensor(limits, device=device)[:, None].expand(-1, heads) if own is None else own


def _with_rows(old, new, rows: list[bool]):
    """`new`, a list or tensor with an entry for each row, with those of these rows as in `old`."""
    if isinstance(old, list) and isinstance(new, list):
        return [one if mine else other for one, other, mine in zip(old, new, rows, strict=True)]
    if isinstance(old, Tensor) and isinstance(new, Tensor) and old.shape == new.shape:
        return old.where(torch.tensor(rows, device=new.device).view(-1, *[1] * (new.dim() - 1)), new)
    return new


def _forget_broken(cache) -> None:
    """The last pass, if it broke off before it changed anything, was no piece, and opened nothing."""
    if not cache.open or cache._began is None:
        return
    cache._began, cache.pieces = None, cache.pieces - 1
    if not cache.pieces:
        cache.open = False
        for layer in cache.attending:
            layer.open = layer.waits = False
            if layer.lengths:
                layer.in_prompt = layer.prefilling = False


def cannot_go_back(layer) -> str | None:
    """Why removing tokens would change the text, or is impossible; None: the text stays the same. There,
    passes of several tokens replace steps, and the first has candidates after the prompt."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return f"the state of a {type(layer).__name__} cannot go back"
    if layer.evicts:
        return f"{type(layer.keep.policy).__name__} lets tokens go"
    if layer.local is not None:
        return f"tokens leave the window of layer {layer.index}"
    if not layer.store.policy.as_they_are:
        return "candidates are read with the prompt, before it is rounded"
    return "several tokens together choose nothing to fetch" if layer.place.chooses else None


def forget_turns(cache) -> None:
    """Close the open turn; the layers forget their pieces when they are reset."""
    for layer in cache.attending if cache.open else ():
        layer.open = layer.prefilling = False
    cache.open, cache.takes_back, cache.fed_pieces, cache.cut_from = False, False, [], None


def keep_raw(layer, given: Recorded) -> None:
    """A layer has taken the first pass of a bare prompt: keep its inputs, since pieces may follow."""
    if layer.open and _depends(layer):
        layer.raw = _shortened(layer, given)


def wait(layer, given: Recorded) -> Tensor:
    """One more piece attends to earlier tokens and to itself, and waits. Returns `[batch, heads, tokens,
    head_dim]`."""
    join(layer, given)
    return of_piece(given, layer.raw.keys, layer.raw.values)


def fed_lengths(layer) -> list[int]:
    """Real tokens of every row in the pieces that wait."""
    raw = layer.raw
    return [] if raw is None else raw.visibility.real(len(raw.keys), raw.keys.shape[2], 0)[1]


def of_piece(given: Recorded, keys: Tensor, values: Tensor) -> Tensor:
    """The attention of a piece's queries to all keys and values of its prompt so far."""
    positions = given.visibility.positions(keys)
    allowed = given.visibility.allowed(positions[:, -given.query.shape[2] :], positions[:, None])
    return given.attend_to(keys, values, allowed)[0]


def join(layer, given: Recorded) -> None:
    """A piece joins those before it, as one pass."""
    raw = layer.raw or replace(given, **{n: getattr(given, n)[:, :, :0] for n in PARTS})
    batch, _, seen = raw.keys.shape[:3]
    before = raw.visibility.real(batch, seen, 0)[1] if seen else None
    given.visibility.real(batch, given.keys.shape[2], seen, before)
    parts = {name: torch.cat([getattr(raw, name), getattr(given, name).detach()], 2) for name in PARTS}
    layer.raw = _shortened(layer, replace(given, **parts))
    layer.moved_bytes = 0


def _shortened(layer, given: Recorded) -> Recorded:
    """Without all but the last query, if no policy needs them."""
    asked = layer.evicts or layer.place.on_host
    return replace(given, query=given.query.detach() if asked else given.query[:, :, -1:].detach())


def _start_again(layer) -> None:
    """Drop a layer's result of the first piece; the piece waits."""
    raw, on_top = layer.raw, layer.keep.on_top
    layer.restart()
    layer.raw, layer.waits, layer.keep.on_top = raw, True, on_top


def _depends(layer) -> bool:
    """Whether a layer's state after a prompt, or its pieces' view of it, depends on where it ends: tokens are
    dropped or rounded, a fetch policy learns or chooses, or a place is one's own."""
    store = layer.store.policy
    plain = type(store) in (Growing, Static) and store.as_they_are
    place = layer.place
    return layer.evicts or place.learns or place.chooses or not place.policy.ours or not plain


def _reopens(cache) -> bool:
    """Whether a later turn matters to a keep or a fetch. ValueError if the keep cannot take one."""
    layer = cache.attending[0]
    keep = layer.keep.policy
    if layer.in_prompt or layer.keep.on_top or keep.turns == "first":
        return False
    if not keep.evicts:  # a last piece of one token is read like the whole turn, windows included
        chooses = [one.place.chooses for one in cache.attending]
        if any(chooses):
            return hasattr(layer.place.policy, "fetch")
        return any(one.local is not None for one in cache.attending)
    if keep.rereads:
        raise ValueError(
            f"turns={keep.turns}: {type(keep).__name__} reads a prompt again, and of the turns before this "
            "one not all is there; expected turns=first, with which later turns all stay"
        )
    return True


def given_to(body, args, kwargs) -> tuple[Tensor, Tensor | None]:
    """(Token ids or embeddings, `[batch, tokens, ...]`, position ids) of a pass through `body`."""
    ids, positions = kwargs.get("input_ids", args[0] if args else None), kwargs.get("position_ids")
    if ids is None or len(args) > 1:
        given = inspect.signature(body.forward).bind_partial(*args, **kwargs).arguments
        ids, positions = given.get("input_ids"), given.get("position_ids")
        ids = given.get("inputs_embeds") if ids is None else ids
    check_kind("input_ids", ids, Tensor, "a tensor [batch, tokens], or inputs_embeds")
    if isinstance(ids, Tensor) and ids.dim() < 2:
        raise ValueError(f"input_ids of shape {tuple(ids.shape)}: expected [batch, tokens]")
    check_kind("position_ids", positions, Tensor | None, "a tensor [batch, tokens] or none")
    return ids, positions


def _of_longer(positions: Tensor | None) -> bool | None:
    """Whether positions are a slice of a longer tensor: True at its end, False before it; None if they are a
    separate tensor."""
    if positions is None or positions.dim() != 2:
        return None
    (rows, tokens), size = positions.shape, positions.element_size()
    start, whole = positions.storage_offset(), positions.untyped_storage().nbytes() // size
    if start == 0 and whole <= rows * tokens:
        return None
    return start + (rows - 1) * positions.stride(0) + tokens == whole


def _of_one(before: Tensor | None, positions: Tensor | None) -> bool:
    """Whether these positions are cut from the tensor of those before, which is still held."""
    given = before is not None and positions is not None
    return given and before.untyped_storage().data_ptr() == positions.untyped_storage().data_ptr()


def _last_piece(goes_on: bool | None, singles: bool) -> bool:
    """Whether one token is a prompt's last piece. goes_on: whether its positions end the tensor that those of
    the pass before were cut from, None if they are of another. singles: all pieces were single tokens."""
    if goes_on is False and singles:
        raise ValueError(
            "prefill_chunk_size=1, or position_ids cut out of a longer tensor: pieces of one token cannot be "
            "told from new tokens; expected pieces of at least 2, or position_ids.clone()"
        )
    return bool(goes_on)
