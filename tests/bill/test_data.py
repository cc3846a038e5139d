"""Models of the bill: what follows from their configurations."""

import json

import pytest
from billed import MODELS
from described import described


@pytest.mark.parametrize("name", MODELS)
def test_figures_of_a_model_follow_from_its_configuration(name):
    assert json.loads(json.dumps(described(MODELS[name]))) == MODELS[name]
