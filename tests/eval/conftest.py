"""A tiny random Llama with a tokenizer of its own, saved as a folder: quick, offline, no checkpoint."""

import functools
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

TEXT = (
    "Once there was a small boat on a wide lake. Mira found a red key under the old bridge. "
    "The baker gave Tom a warm loaf and he ran home. Where is the key? It is under the bridge. "
)


@pytest.fixture(autouse=True, scope="session")
def lm_eval_is_set_up_once():
    """It reads its 14,000 YAML files once in a session, not at every command. It logs to the session's own
    standard error, since that of a test is closed when the test ends."""
    from lm_eval.tasks import _index
    from lm_eval.utils import setup_logging

    setup_logging()
    build, own = _index.TaskIndex.build, Path(_index.__file__).parent
    known = functools.cache(lambda: pickle.dumps(build([own])))

    def built(paths, **how):
        found = {}
        for root in paths:
            found |= pickle.loads(known()) if root == own else build([root], **how)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_index.TaskIndex, "build", staticmethod(built))
        yield


@pytest.fixture(autouse=True)
def nothing_of_another_command(monkeypatch):
    """lm-eval's command leaves what it has read of the tasks for the models that lm-eval then makes."""
    from eval.accuracy import KVLabLM

    monkeypatch.setattr(KVLabLM, "untils_of_tasks", {})
    monkeypatch.setattr(KVLabLM, "shots_of_tasks", {})


@pytest.fixture
def refused(capsys, monkeypatch):
    """Runs a command that must be refused; returns its one line."""
    from eval.command import main

    def line(*words: str) -> str:
        for patience in ("SILENT", "PATIENT"):  # a busy machine would say where it is meanwhile
            monkeypatch.setattr(f"eval.core.progress.{patience}", 1e6)
        assert main(list(words)) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.startswith("error: ")
        return line

    return line


@pytest.fixture
def no_pictures(monkeypatch):
    """They take their time."""
    monkeypatch.setattr("eval.report.draw", lambda *_: [])


@pytest.fixture
def store(tmp_path):
    """An empty folder of results, whose warnings are in `lines`."""
    from eval.core.results import Store

    lines = []
    made = Store(tmp_path / "deep" / "out", lines.append)
    made.prepare()
    made.lines = lines
    return made


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Folder of a Llama with 3 layers, 4 heads on 2 KV heads, context 512, and a byte-level BPE."""
    from tiny import COMMON, GQA
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("models") / "tiny"
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([TEXT * 4], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>", pad_token="<|end|>")
    own = {"vocab_size": 400, "num_hidden_layers": 3, "max_position_embeddings": 512}
    config = LlamaConfig(**COMMON | GQA | own | {"initializer_range": 0.3})
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def loaded(folder):
    """(model, tokenizer) of the tiny folder, ready for kvlab caches."""
    import kvlab

    return kvlab.load(str(folder))


@pytest.fixture(scope="session")
def precise(folder):
    """The same in fp64, so that rounding cannot flip a quantized value, and what differs is no rounding."""
    import kvlab

    return kvlab.load(str(folder), dtype="float64")


STORY = "Once there was a small boat on a wide lake. Mira found a red key under the old bridge."
WORDS = STORY.split(" ")


def text(start: int, words: int) -> str:
    return " ".join(WORDS[(start + 3 * i) % len(WORDS)] for i in range(words))


def requests(kind: str, arguments: list[tuple], task: str = "t") -> list:
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type=kind, doc={}, arguments=args, idx=0, metadata=(task, i, 1))
        for i, args in enumerate(arguments)
    ]


CHOICES = [
    (text(start, words), f" {choice}")
    for start, words in ((0, 5), (1, 40), (2, 17), (3, 1), (4, 90))
    for choice in ("key", "small boat on", text(start, 9))
] + [("", "Mira found a key"), ("a", "n"), (text(5, 600), " the bridge")]
STORIES = [(text(start, words),) for start, words in ((0, 3), (1, 150), (2, 700), (3, 40), (4, 151))]
PROMPTS = [
    (text(start, words), {"until": until, "max_gen_toks": 12, "do_sample": False})
    for start, words, until in ((0, 4, ["."]), (1, 60, ["e"]), (2, 200, []), (3, 7, ["."]), (5, 1, ["\n"]))
]


@pytest.fixture(scope="session")
def asked():
    """Requests of every kind, short and long, as lm-eval hands them to a model."""
    return SimpleNamespace(
        choices=requests("loglikelihood", CHOICES),
        stories=requests("loglikelihood_rolling", STORIES),
        prompts=requests("generate_until", PROMPTS),
        make=requests,
        text=text,
    )


@pytest.fixture
def quick(folder, tmp_path):
    """Words of a run of two cells; results in tmp_path/out."""
    words = ["--model", str(folder), "--limit", "1", "--out", str(tmp_path / "out"), "--tasks", "recall"]
    return [*words, "--methods", "full", "sinks:budget=0.5", "--jobs"]
