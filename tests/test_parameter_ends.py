"""Every number that a method takes has an upper end: beyond it, one line at once."""

import random

import pytest
from tiny import tiny

import kvlab
from kvlab.methods import METHODS
from kvlab.parameters import MOST

FREE = ("seed", "link")  # any seed draws; a link's speed holds nothing up
NUMBERS = [
    (name, parameter)
    for name, method in METHODS.items()
    for parameter, default in method.parameters.items()
    if not isinstance(default, bool | str) and parameter not in FREE
]


@pytest.mark.parametrize("name, parameter", NUMBERS)
def test_numbers_without_end_are_refused(name, parameter):
    dice = random.Random(f"{name} {parameter}")
    for value in (2**63 - 1, MOST + 1, dice.randrange(MOST + 1, 2**62) | 1, 1e300, "inf", "1e400", "nan"):
        if parameter == "alpha" and value in ("inf", "1e400"):
            continue  # InfiniGen's alone may be infinite
        with pytest.raises(ValueError, match=rf"^[^\n]*{parameter}[^\n]*$"):
            kvlab.make_cache(tiny("llama"), f"{name}:{parameter}={value}")
