"""The measuring command on a tiny model: what it counts is right, whatever the clock says."""

import pytest
from tiny import tiny

from eval.studies import static_graph

SMALL = {"num_hidden_layers": 2}
S = 24


@pytest.fixture(autouse=True, scope="module")
def small(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLAB_CACHE", str(tmp_path_factory.mktemp("graphs")))
        patch.setattr(static_graph, "workshop", lambda attention: tiny("llama", attention, **SMALL))
        patch.setattr(
            static_graph.models, "load", lambda options, attention: tiny("llama", attention, **SMALL)
        )
        patch.setattr(static_graph, "PADDED", {"padded": {}})
        patch.setattr(static_graph, "TOKENS", 8)
        patch.setattr(static_graph.models, "STEPS", 0)
        yield


def test_every_way_gives_the_tokens_of_generate():
    found = static_graph.engines(S, repeats=1, compiled=False)
    assert len(found) == 4 and all(row["equal"] and row["ms"] > 0 for row in found.values())
    assert found["transformers generate, growing"]["ratio"] == 1
    assert 0 < found["padded"]["manage"] < 1


def test_managing_counts_what_is_copied():
    found = static_graph.managing((S,), steps=2)
    row = 2 * 2 * 2 * 8 * 4  # K and V, layers, KV heads, head dimension, fp32
    assert found["24 single double"]["copied_bytes"] == 0
    assert found["24 single shift"]["copied_bytes"] == (S - 1) * row
    assert found["24 multi double"]["copied_bytes"] == row
    assert found["24 single double"]["reserved_bytes"] == 2 * (S - 1) * row
    assert found["24 multi double"]["reserved_bytes"] == 1.5 * (S - 1) * row  # two heads share the spare rows


def test_memory_and_requests():
    found = static_graph.memory(S)
    assert {name: row["predicted"] // (23 * 256) for name, row in found.items()} == {
        "shift": 1, "compromise": 1, "double": 2,
    }  # fmt: skip
    found = static_graph.requests(count=4, context=128, prompt=40, steps=9)
    assert found["4 requests, growing"]["reserved"] == found["4 requests, growing"]["used"]
    assert found["4 requests, static"]["reserved"] == 4 * 128 * 256
    assert found["4 requests, padded, double"]["reserved"] == 4 * 2 * 127 * 256
    assert found["16 continuations, growing"]["reserved"] == 16 * 49 * 256
    # two full blocks are shared, the third is each row's own, and so is the fourth
    assert found["16 continuations, paged"]["reserved"] == (2 + 16 * 2) * 16 * 256


def test_several_tokens_and_every_way_to_hold_them():
    (row,) = static_graph.wide(S, 8, (4,), repeats=2).values()
    assert row["ratio"] == row["one by one"] / row["together"] > 0
    found = static_graph.numbers((S,), steps=3)
    size = {
        name: row["reserved_bytes"] * 8 // found["24 integers"]["reserved_bytes"]
        for name, row in found.items()
    }
    assert size == {"24 fp32": 32, "24 fp16": 16, "24 int8": 8, "24 integers": 8}
    errors = [row["kl"] for row in found.values()]
    assert errors[0] == 0 <= errors[1] < 1e-5 < min(errors[2:]) and max(errors) < 0.01
