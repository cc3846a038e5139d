"""What is held once and made once: weights, the file of every S, and folders that a killed export left."""

import copy
import importlib.util
import sys
from collections import Counter

import numpy as np
import onnx
import pytest
import torch
import transformers
from tiny import prompt, tiny
from torch.nn.utils import parametrize
from transformers import LlamaForCausalLM

import kvlab
from kvlab.arithmetic import padded_buffer_bytes
from kvlab.faster import compiled
from kvlab.saved import model_digest
from kvlab.static_graph import GraphSpec, StaticGraphEngine, export

S, SMALL = 24, {"num_hidden_layers": 2}


def graph_of(model, folder, form="multi"):
    spec = GraphSpec(model_digest(model), form)
    return onnx.load(export.graph_file(model, spec, cache=folder)).graph


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "opt", "phi"]
)  # tied or not, [out, in] or [in, out], biases
def test_the_session_reads_the_models_own_weights(family, graphs):
    model = tiny(family, **SMALL)
    made = StaticGraphEngine(model, S)
    inside = {weight.data_ptr(): weight.nbytes for weight in model.parameters()}
    bound = {weight.data_ptr(): weight.nbytes for weight in made.graphs[1].weights.values()}
    assert bound == inside  # every parameter, whole, and none twice
    named = {node.name for node in made.graphs[1].engine.get_inputs()}
    assert set(made.graphs[1].weights) <= named
    # nothing else in the file is as large as the smallest matrix of the model
    least = min(weight.nbytes for weight in model.parameters() if weight.dim() > 1)
    kept = sum(len(value.raw_data) for value in graph_of(model, graphs).initializer)
    assert kept < least


def doubled(model):
    for weight in model.parameters():
        weight.data = weight.data * 2


def replaced(model):
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach() * 2)


WEIGHTS = {
    "changed in place": lambda model: model.get_output_embeddings().weight.data.mul_(2),
    "shared with processes": lambda model: model.share_memory(),
    "data replaced": doubled,
    "there and back": lambda model: model.half().float(),
    "loaded anew": lambda model: model.load_state_dict(
        {name: weight * 2 for name, weight in model.state_dict().items()}, assign=True
    ),
    "parameter replaced": replaced,
}


@pytest.mark.parametrize("change", WEIGHTS.values(), ids=WEIGHTS)
def test_weights_that_changed_or_went_elsewhere_are_read_where_they_are(change):
    """What was freed is never read: the graph would answer from another tensor's numbers."""
    model = copy.deepcopy(tiny("llama", **SMALL))
    made = StaticGraphEngine(model, S)
    change(model)
    kept = [torch.full_like(weight, 7.0) for weight in model.parameters()]  # where they were, perhaps
    with torch.no_grad():
        expected = model(torch.tensor([[3]]), use_cache=False).logits[0].numpy()
    assert np.allclose(made.feed(made.manager(), [3]), expected, atol=1e-4) and kept


@pytest.mark.parametrize("numbers", ["fp16", "integers"])
def test_a_prompt_and_a_step_round_alike(numbers):
    """Each has a graph; what they hold is the same but for a last digit, and errs as far from float32."""
    model, ids = tiny("llama", **SMALL), prompt(22)[0].tolist()
    rows, logits = [], []
    for chunk, held in ((1, numbers), (8, numbers), (8, "fp32")):
        made = StaticGraphEngine(model, S, form="single", numbers=held, chunk=chunk)
        manager = made.manager()
        if chunk > 1:
            made.graphs[1].run = None  # 8, 8 and 6: nothing goes through the graph of one token
        logits.append(torch.from_numpy(made.feed(manager, ids)))
        rows.append(manager.rows())
    assert (rows[0] == rows[1]).mean() > 0.98
    kl = [(f.softmax(-1) * (f.log_softmax(-1) - logits[2].log_softmax(-1))).sum(-1).mean() for f in logits]
    most = {"fp16": 1e-6, "integers": 1e-3}[numbers]
    assert all(0 < one < most for one in kl[:2]), kl


@pytest.mark.parametrize("numbers, products", [("int8", 0), ("integers", 8)])
def test_what_a_graph_computes_in_integers(numbers, products, graphs):
    """q·K and p·V of both layers and both heads; weights are no integers, so the other products stay."""
    made = StaticGraphEngine(tiny("llama", **SMALL), S, form="single", numbers=numbers)
    spec = GraphSpec(made.digest, "single", 1, numbers, export.scales_digest(made.scales))
    kinds = Counter(node.op_type for node in onnx.load(graphs / spec.folder / "graph.onnx").graph.node)
    assert kinds["MatMulInteger"] == products and kinds["DequantizeLinear"] == 8 - products


def test_sixteen_bits_take_what_the_document_prints():
    """Its formula, by the bytes that are there; Llama-7B's own numbers stand in tests/oracles."""
    made = StaticGraphEngine(tiny("llama", **SMALL), S, form="single", numbers="fp16", chunk=8)
    manager = made.manager()
    assert manager.buffers.dtype == np.float16
    assert manager.reserved_bytes == manager.buffers.nbytes == padded_buffer_bytes(made.shape, S, 2, bits=16)
    made.feed(manager, prompt(9)[0].tolist())
    full = StaticGraphEngine(made.model, S, form="single", chunk=8)
    exact = full.manager()
    full.feed(exact, prompt(9)[0].tolist())
    assert np.array_equal(manager.rows()[:4], exact.rows()[:4].astype(np.float16))  # the first layer's


def test_under_the_compiled_engine():
    """The model's forward is another one there; a step's graph and a prompt's chunks are what they were."""
    pytest.importorskip("kvlab.fast.compiled")
    ids = prompt(13)
    plain = StaticGraphEngine(tiny("llama", **SMALL), S, chunk=5).generate(ids, 6)
    model = compiled(copy.deepcopy(tiny("llama", **SMALL)))
    trace = StaticGraphEngine(model, S, chunk=5).generate(ids, 6)
    assert torch.equal(trace.tokens, plain.tokens)


def test_a_weight_in_pieces_is_refused(tmp_path):
    model = copy.deepcopy(tiny("llama", **SMALL))
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data.t().contiguous().t()
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight is not contiguous"):
        StaticGraphEngine(model, S, cache=tmp_path)


def test_weights_that_became_narrow_are_refused():
    model = copy.deepcopy(tiny("llama", **SMALL))
    made = StaticGraphEngine(model, S)
    model.half()
    with pytest.raises(ValueError, match="a static graph needs float32"):
        made.manager()


def test_two_models_of_one_shape_have_graphs_of_their_own(tmp_path):
    one, other = tiny("llama", **SMALL), copy.deepcopy(tiny("llama", **SMALL))
    with torch.no_grad():
        other.get_output_embeddings().weight.mul_(3)
    engines = [StaticGraphEngine(model, S, cache=tmp_path) for model in (one, other)]
    assert len(list(tmp_path.iterdir())) == 2
    places = [{x.data_ptr() for x in engine.graphs[1].weights.values()} for engine in engines]
    assert places[0].isdisjoint(places[1])
    for engine in engines:
        expected = engine.model(torch.tensor([[3]]), use_cache=False).logits[0].detach().numpy()
        assert np.allclose(engine.feed(engine.manager(), [3]), expected, atol=1e-4)


@pytest.mark.parametrize("package", [None, torch, transformers])
def test_graphs_of_another_version_are_not_used(package, monkeypatch):
    """Inputs of a graph have transformers' names, and torch's exporter made it."""
    if package is not None:
        monkeypatch.setattr(package, "__version__", "0")
    spec = importlib.util.spec_from_file_location("kvlab.static_graph.another", export.__file__)
    another = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, another)
    spec.loader.exec_module(another)
    assert (another.MAKER == export.MAKER) == (package is None)


CHANGES = {  # what else a model's stamp sees: fast/test_stamp.py
    "hook on the model": lambda model: model.register_forward_hook(
        lambda module, args, out: setattr(out, "logits", -out.logits) or out
    ),
    "hook on some tokens": lambda model: model.get_input_embeddings().register_forward_hook(
        lambda module, args, out: torch.where((args[0] > 50)[..., None], out * 2, out)
    ),
    "number": lambda model: [setattr(layer.self_attn, "scaling", 0.9) for layer in model.model.layers],
}


@pytest.mark.parametrize(
    "change, training, chunk",
    [("hook on the model", False, 4), ("hook on some tokens", False, 1), ("number", True, 1)],
)
def test_a_graph_is_the_models_own_whatever_its_name_leaves_out(change, training, chunk, tmp_path):
    """Hooks, buffers and numbers are no weights: a graph of the model before, or of another process."""
    model, ids, made = copy.deepcopy(tiny("llama", **SMALL)), prompt(15)[0].tolist(), []
    for step in range(2):
        engine = StaticGraphEngine(model, S, cache=tmp_path, chunk=chunk)
        made.append(engine)
        for one in made:  # a new row of an engine from before
            found = torch.from_numpy(one.feed(one.manager(), [*ids]))
            with torch.no_grad():
                expected = model.eval()(torch.tensor([ids])).logits[0]
            assert torch.allclose(found, expected, atol=1e-3)
        if step == 0:
            CHANGES[change](model)
        model.train(training)
    assert model.training == training and all(part.training == training for part in model.modules())


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_may_change_inside_a_text(change):
    """A text goes on as with `full`, which asks the model itself: adapters that are switched off, say."""
    model = copy.deepcopy(tiny("llama", **SMALL))
    steppers = [
        kvlab.Stepper(model, kvlab.make_cache(model, spec)) for spec in (f"padded:length={S}", "full")
    ]
    for step in range(5):
        ids = prompt(9 if step == 0 else 1, seed=step)
        with torch.autocast("cpu", torch.bfloat16, enabled=step == 3):  # a graph knows nothing of it
            found = steppers[0].feed(ids)
        assert torch.allclose(found, steppers[1].feed(ids), atol=1e-3)
        if step == 2:
            CHANGES[change](model)


class Added(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.more = torch.nn.Parameter(torch.zeros_like(weight))

    def forward(self, weight):
        return weight + self.more


def test_weights_that_came_later():
    """An adapter that adds nothing at first and is then trained, as PEFT's are."""
    model, ids = copy.deepcopy(tiny("llama", **SMALL)), prompt(15)[0].tolist()
    engine, head = StaticGraphEngine(model, S), model.model.layers[1].mlp.up_proj
    parametrize.register_parametrization(head, "weight", Added(head.weight))
    for _ in range(2):
        found = torch.from_numpy(engine.feed(engine.manager(), ids))
        with torch.no_grad():
            assert torch.allclose(found, model(torch.tensor([ids])).logits[0], atol=1e-3)
            head.parametrizations.weight[0].more.normal_()


def test_a_hook_that_tells_a_step_from_a_prompt_is_refused():
    model = copy.deepcopy(tiny("llama", **SMALL))
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * (1 + (out.shape[1] == 1)))
    with pytest.raises(ValueError, match="computes other logits"):
        StaticGraphEngine(model, S)


def test_what_torch_cannot_export_is_one_line():
    """Frequencies that follow the text's length are chosen by it."""
    config = copy.deepcopy(tiny("llama", **SMALL).config)
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = LlamaForCausalLM(config).eval()
    with pytest.raises(ValueError, match=r"^torch cannot export LlamaForCausalLM as a static graph: [^\n]*$"):
        StaticGraphEngine(model, S)


def test_a_prompt_in_pieces_is_no_longer_than_s():
    model = tiny("llama", **SMALL)
    stepper = kvlab.Stepper(model, kvlab.make_cache(model, f"padded:length={S}"))
    with pytest.raises(ValueError, match=f"a prompt of 32 tokens is longer than max_length={S}"):
        stepper.feed(prompt(40), chunk=16)
    stepper.cache.reset()
    stepper = kvlab.Stepper(model, stepper.cache)
    with stepper.cache.prefill():
        stepper.feed(prompt(S))
    stepper.feed(prompt(3))  # a later turn slides
