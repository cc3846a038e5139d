"""Heads of different lengths: what is held, in bytes and in numbers, against lists of tokens."""

import copy

import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import started

from kvlab.store import Float8, Growing, Int, Ragged

CPU = torch.device("cpu")
HEADS, WIDTH = 3, 4

changes = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 6)),
    st.tuples(st.just("rows"), st.lists(st.integers(0, 9), min_size=1, max_size=4)),
    st.tuples(st.just("keep"), st.integers(0, 999)),
    st.tuples(st.just("copy"), st.just(0)),
)


def drawn(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def some(lists, seed):
    """What stays of lists of slots, for every row and head its own number; the last one always."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for row in lists:
        found.append([])
        for held in row:
            stays = torch.rand(len(held), generator=generator) < 0.5
            found[-1].append([slot for slot in range(len(held) - 1) if stays[slot]] + [len(held) - 1])
    return found


def padded(lists):
    """Lists of numbers by row and head -> `[batch, heads, n]`, -1 at the end."""
    most = max(len(one) for row in lists for one in row)
    return torch.tensor([[one + [-1] * (most - len(one)) for one in row] for row in lists])


def storages(state):
    held = [x.untyped_storage() for x in state.tensors()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())


@given(st.lists(changes, min_size=1, max_size=12), st.sampled_from([None, Int(8), Int(4), Float8()]))
def test_whatever_happens_every_head_holds_its_own_tokens(story, form):
    store, held, slot_of = started(Ragged(form), WIDTH, HEADS), [[[]] * HEADS] * 2, []
    for seed, (what, value) in enumerate([("append", 3), *story]):
        if what == "append":  # held: numbers as they are read; slot_of: the slots that they are in
            new = drawn((len(held), HEADS, value, WIDTH), seed)
            read = started(Growing(form), WIDTH, HEADS)
            read.append(new, new + 1)
            keys, values = read.read(CPU)
            first = store.length
            store.append(new, new + 1)
            slot_of = slot_of or [[[]] * HEADS for _ in held]
            slot_of = [[one + list(range(first, first + value)) for one in row] for row in slot_of]
            held = [
                [one + list(zip(keys[r, h], values[r, h], strict=True)) for h, one in enumerate(row)]
                for r, row in enumerate(held)
            ]
        elif what == "rows":
            rows = [row % len(held) for row in value]
            store.select_rows(torch.tensor(rows))
            held, slot_of = [held[row] for row in rows], [slot_of[row] for row in rows]
        elif what == "keep":
            stay = some(held, value)
            named = [[[s[i] for i in one] for s, one in zip(*pair, strict=True)]
                     for pair in zip(slot_of, stay, strict=True)]  # fmt: skip
            store.keep_slots(padded(named))
            held = [[[h[i] for i in one] for h, one in zip(*pair, strict=True)]
                    for pair in zip(held, stay, strict=True)]  # fmt: skip
            slot_of = [[list(range(len(one))) for one in row] for row in stay]
        else:
            store = copy.deepcopy(store)
        keys, values = store.read(CPU)
        assert keys.shape[2] == store.length
        for row, heads in enumerate(held):
            for head, tokens in enumerate(heads):
                mine = slot_of[row][head]
                assert torch.equal(keys[row, head, mine], torch.stack([key for key, _ in tokens]))
                assert torch.equal(values[row, head, mine], torch.stack([value for _, value in tokens]))
        count = sum(len(tokens) for heads in held for tokens in heads)
        counts = 0 if store.left.counts is None else 8 * len(held) * HEADS
        assert storages(store) == count * store.bytes_per_slot + counts
