"""The pool in whole models, and under pressure for two thousand steps; its definition: tests/reference."""

import pytest
from tiny import prompt, tiny

import kvlab
from kvlab.keep import Pool
from kvlab.place import Host


def test_a_capacity_in_bytes():
    model = tiny("llama")
    token = 4 * 2 * 2 * 8 * 4  # K and V of 4 layers, 2 heads of 8
    cache = kvlab.KVCache(model, keep=Pool(3 * 20 * token, unit="bytes"), place=Host())
    trace = kvlab.decode(model, prompt(30, rows=3), cache, 5)
    assert trace.tokens_held == [20] * 5
    assert trace.host_bytes[-1] <= 3 * 20 * token
    with pytest.raises(ValueError, match="expected room for two tokens, 1024 bytes"):
        kvlab.decode(model, prompt(30), kvlab.KVCache(model, keep=Pool(1000, unit="bytes")), 2)
