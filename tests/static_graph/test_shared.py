"""What is held once and made once: weights, the file of every S, and folders that a killed export left."""

import copy
import platform
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from tiny import prompt, tiny

import kvlab
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
    bound = {weight.data_ptr(): weight.nbytes for weight in made.graph.weights.values()}
    assert bound == inside  # every parameter, whole, and none twice
    named = {node.name for node in made.graph.engine.get_inputs()}
    assert set(made.graph.weights) <= named
    # nothing else in the file is as large as the smallest matrix of the model
    least = min(weight.nbytes for weight in model.parameters() if weight.dim() > 1)
    kept = sum(len(value.raw_data) for value in graph_of(model, graphs).initializer)
    assert kept < least


def test_a_weight_that_is_changed_in_place_changes_the_graph():
    model = copy.deepcopy(tiny("llama", **SMALL))
    made = StaticGraphEngine(model, S)
    before = made.feed(made.manager(), [3])
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(2)
    after = made.feed(made.manager(), [3])
    with torch.no_grad():
        expected = model(torch.tensor([[3]]), use_cache=False).logits[0].numpy()
    assert np.allclose(after, expected, atol=1e-4) and not np.allclose(after, before, atol=1e-2)


def doubled(model):
    for weight in model.parameters():
        weight.data = weight.data * 2


def replaced(model):
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach() * 2)


CHANGES = {
    "shared with processes": lambda model: model.share_memory(),
    "data replaced": doubled,
    "there and back": lambda model: model.half().float(),
    "loaded anew": lambda model: model.load_state_dict(
        {name: weight * 2 for name, weight in model.state_dict().items()}, assign=True
    ),
    "parameter replaced": replaced,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_weights_that_went_elsewhere_are_read_there(change):
    """What was freed is never read: the graph would answer from another tensor's numbers."""
    model = copy.deepcopy(tiny("llama", **SMALL))
    made = StaticGraphEngine(model, S)
    before = {weight.data_ptr() for weight in model.parameters()}
    change(model)
    assert before != {weight.data_ptr() for weight in model.parameters()}
    kept = [torch.full_like(weight, 7.0) for weight in model.parameters()]  # where they were, perhaps
    with torch.no_grad():
        expected = model(torch.tensor([[3]]), use_cache=False).logits[0].numpy()
    assert np.allclose(made.feed(made.manager(), [3]), expected, atol=1e-4) and kept


def test_weights_that_became_narrow_are_refused():
    model = copy.deepcopy(tiny("llama", **SMALL))
    made = StaticGraphEngine(model, S)
    model.half()
    for _ in range(2):
        with pytest.raises(ValueError, match="a static graph needs float32"):
            made.manager()


def test_a_graph_is_made_once_for_every_length(tmp_path, monkeypatch):
    made, exports = [], export.export
    monkeypatch.setattr(export, "export", lambda *args: (made.append(args[1]), exports(*args)))
    model, ids = tiny("llama", **SMALL), prompt(13)
    full = kvlab.decode(model, ids, kvlab.make_cache(model, "full"), 8)
    for length in (21, 24, 57):
        engine = StaticGraphEngine(model, length, cache=tmp_path)
        shapes = {node.name: node.shape for node in engine.graph.engine.get_inputs()}
        assert shapes["past.0.k.0"][2] == length - 1 and shapes["mask"] == [1, 1, 1, length]
        sizes = [size for shape in shapes.values() for size in shape]
        assert all(isinstance(size, int) for size in sizes)  # the engine compiles fixed sizes
        trace = engine.generate(ids, 8)
        assert torch.equal(trace.tokens, full.tokens)
        assert torch.allclose(trace.logprobs, full.logprobs, atol=1e-4)
    assert len(made) == 1 and len(list(tmp_path.iterdir())) == 1


def test_two_models_of_one_shape_have_graphs_of_their_own(tmp_path):
    one, other = tiny("llama", **SMALL), copy.deepcopy(tiny("llama", **SMALL))
    with torch.no_grad():
        other.get_output_embeddings().weight.mul_(3)
    engines = [StaticGraphEngine(model, S, cache=tmp_path) for model in (one, other)]
    assert len(list(tmp_path.iterdir())) == 2
    places = [set(engine.graph.places) for engine in engines]
    assert places[0].isdisjoint(places[1])
    for engine in engines:
        expected = engine.model(torch.tensor([[3]]), use_cache=False).logits[0].detach().numpy()
        assert np.allclose(engine.feed(engine.manager(), [3]), expected, atol=1e-4)


@pytest.mark.parametrize("form", ["single", "multi"])
def test_torch_and_the_graph_round_int8_alike(form):
    """A prompt's chunks are torch's, a step is the graph's; the codes are the same but for a last digit."""
    model, ids = tiny("llama", **SMALL), prompt(20)[0].tolist()
    rows, logits = [], []
    for chunk in (1, 7):
        made = StaticGraphEngine(model, S, form=form, quantized=True, chunk=chunk)
        manager = made.manager()
        logits.append(made.feed(manager, ids))
        rows.append(manager.rows().astype(int))
    assert made.steps == 0  # 7, 7 and 6: nothing went through the graph
    apart = np.abs(rows[0] - rows[1])
    assert apart.max() <= 1 and (apart == 0).mean() > 0.99
    assert np.median(np.abs(logits[0] - logits[1])) < 1e-4


def test_under_the_compiled_engine():
    """The model's forward is another one there; a step's graph and a prompt's chunks are what they were."""
    pytest.importorskip("kvlab.fast.compiled")
    ids = prompt(15)
    plain = StaticGraphEngine(tiny("llama", **SMALL), S, chunk=6).generate(ids, 6)
    model = compiled(copy.deepcopy(tiny("llama", **SMALL)))
    trace = StaticGraphEngine(model, S, chunk=6).generate(ids, 6)
    assert torch.equal(trace.tokens, plain.tokens)


def test_what_a_killed_export_left_is_removed_and_nothing_else(tmp_path):
    """That of a process which still runs, and of another machine, is left alone."""
    here, there = (f"abc.{name}.unfinished" for name in (platform.node(), f"not-{platform.node()}"))
    killed = [f".99999999-{here}"]
    others = [f".1-{here}", f".99999999-{there}", "0123456789abcdef-multi-float32-00000000", ".other"]
    for name in [*killed, *others]:
        graph = tmp_path / name / "graph"
        graph.mkdir(parents=True)
        (graph / "graph.onnx").write_bytes(b"half a graph")
    StaticGraphEngine(tiny("llama", **SMALL), S, cache=tmp_path)  # an export clears before it begins
    left = {path.name for path in tmp_path.iterdir()}
    assert len(left - {*others}) == 1 and not left & set(killed)
    assert all((tmp_path / name / "graph" / "graph.onnx").exists() for name in others)


def test_a_weight_in_pieces_is_refused(tmp_path):
    model = copy.deepcopy(tiny("llama", **SMALL))
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data.t().contiguous().t()
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight is not contiguous"):
        StaticGraphEngine(model, S, cache=tmp_path)


def test_graphs_of_another_version_are_not_used():
    """Inputs of a graph have transformers' names, and torch's exporter made it."""
    script = """
import importlib, torch, transformers
from kvlab.static_graph import export
print(export.MAKER)
for package in (torch, transformers):
    known, package.__version__ = package.__version__, "0"
    print(importlib.reload(export).MAKER)
    package.__version__ = known
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True)
    same, *others = done.stdout.splitlines()
    assert same == export.MAKER and len({same, *others}) == 3


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "phi", "gpt_neox"])
def test_no_weight_is_turned_at_every_step(family, tmp_path):
    """The session's own optimizer has to take the transpositions into its products."""
    model = tiny(family, **SMALL)
    path = export.graph_file(model, GraphSpec(model_digest(model), "multi"), cache=tmp_path)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "made.onnx"), 3
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    before, after = onnx.load(path).graph, onnx.load(tmp_path / "made.onnx").graph
    turned = lambda graph: [
        node for node in graph.node if node.op_type == "Transpose" and node.input[0].startswith("model.")
    ]
    assert not turned(after)
    assert turned(before) or family == "gpt2"  # whose weights lie the other way round


def test_a_finished_graph_needs_no_writing(tmp_path, monkeypatch):
    """As in a folder that cannot be written; root may write everywhere, so the calls are what is watched."""
    model = tiny("llama", **SMALL)
    StaticGraphEngine(model, S, cache=tmp_path)

    def refuse(*args, **kwargs):
        raise PermissionError("read-only")

    monkeypatch.setattr(export.scratch.tempfile, "mkdtemp", refuse)
    monkeypatch.setattr(export.Path, "mkdir", refuse)
    monkeypatch.setattr(export.scratch.shutil, "rmtree", refuse)
    StaticGraphEngine(model, S + 5, cache=tmp_path)
