"""Loading: a model and its tokenizer, ready for kvlab caches."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
import weakref
from pathlib import Path

import torch
from torch import Tensor

from .. import scratch
from ..attention import as_it_was
from ..devices import device_of, entry_of, read_map
from ..errors import first_line
from ..interface import Asked, register, stopping, told
from ..parameters import check_kind
from ..ranks import split
from . import fetching, gguf
from .files import check_said, damage, unlike, weights, whole_numbers
from .guest import answer
from .passes import report_passes
from .shape import ModelShape, check_model, refused_layers

WORKSHOP = Path(__file__).parents[1] / "workshop"
EMBEDDED = {"workshop": WORKSHOP / "checkpoint", "workshop-opt": WORKSHOP / "checkpoint-opt"}
# Model types that tests/families tries with every method; others are tried when a cache is made for them.
LISTED = frozenset((
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi", "phi3", "gemma2", "gemma3_text",
    "olmo2", "smollm3", "glm4", "cohere2", "stablelm", "granite", "gpt_oss", "opt", "gpt2", "gpt_neox",
    "llama4_text", "qwen3_next", "lfm2", "granitemoehybrid", "jamba", "falcon_h1", "deepseek_v2",
    "deepseek_v3",
))  # fmt: skip
LAYERS = 10_000  # more, and a configuration is damaged: a model would be built without end
_prepared: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # model -> whether its masks are known
_tokenizers: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # model -> its tokenizer
preparing = threading.RLock()  # one thread at a time prepares a model, or lets torch export one


def load(name_or_path=None, *, device=None, dtype=None, device_map=None, tensor_parallel=False):
    """Load a model ready for kvlab caches, and its tokenizer.

    name_or_path: "workshop" (default) or "workshop-opt", the embedded models (no network); "smollm2", once
    `kvlab fetch smollm2` has brought it; a GGUF file, converted at its first use; else a folder or a hub id.
    device: "cpu", "cuda", ... (default: cuda where there is one). dtype: torch dtype or its name (default:
    float32 on the CPU, the checkpoint's own elsewhere). device_map: in the place of `device`,
    "auto", a dictionary {module: device} or a JSON file of one, for accelerate ("disk" is a device too;
    `devices.py`). tensor_parallel: the heads are split among the processes of `torchrun` (`ranks.py`).
    Returns (model in eval mode, tokenizer).
    The model computes what it did before, unless a pass is given a kvlab cache.
    Raises ValueError when a model was not fetched or a GGUF file cannot be converted, the folder holds no
    model or no tokenizer, a file of an embedded model is missing or damaged, weights are missing, too many or
    of another shape than the model's, or the model does not use transformers' attention interface.
    """
    scratch.set_up()  # before transformers looks where its own caches are
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, logging
    from transformers.utils import cached_file

    source = source_of(name_or_path)
    if source in EMBEDDED.values() and (wrong := damage(source)):
        raise ValueError(
            f"the embedded model {wrong}; install kvlab again (in a kit: start.sh or start.bat does), "
            "or restore it from its repository"
        )
    check_kind("tensor_parallel", tensor_parallel, bool, "true or false")
    if (device_map is not None) + (device is not None) + tensor_parallel > 1:
        raise ValueError(
            f"device={device!r}, device_map={device_map!r}, tensor_parallel={tensor_parallel}: expected one"
        )
    where = split(source) if tensor_parallel else {}
    if device_map is not None:
        where = {"device_map": read_map(device_map), "offload_folder": offloaded()}
    wanted = "cuda" if torch.cuda.is_available() else "cpu"
    device = device_of(wanted if device is None else device)
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError, NotImplementedError) as error:
        raise ValueError(f"device={str(device)!r}: {first_line(error)}") from error
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else "auto"
    elif isinstance(dtype, str) and dtype != "auto":
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ValueError(f"dtype={dtype!r}: expected a torch dtype such as float32 or bfloat16")
        dtype = getattr(torch, dtype)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:
        raise _none("tokenizer", source, error) from error
    if not set(tokenizer.get_vocab()).difference(tokenizer.all_special_tokens):
        raise _none("tokenizer", source, ValueError("it knows no words"))
    _check_templates(source, tokenizer)
    bars = logging.is_progress_bar_enabled()
    try:
        if source is not name_or_path:
            logging.disable_progress_bar()  # a small model of ours: a bar for a fifth of a second
        said = AutoConfig.from_pretrained(source, trust_remote_code=False).get_text_config(decoder=True)
        if (layers := getattr(said, "num_hidden_layers", 0)) > LAYERS:
            raise ValueError(f"num_hidden_layers={layers}: expected at most {LAYERS}")
        folder = Path(cached_file(source, "config.json")).parent  # of a hub id, what has come of it
        weights(folder)  # looked at before transformers opens them
        model, found = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, output_loading_info=True, trust_remote_code=False, **where
        )
        check_said(folder, set(tokenizer.get_added_vocab()))
        plain = getattr(said, "quantization_config", None) is None
        if plain and (name := whole_numbers(folder, model)):
            raise ValueError(f"{name!r} holds whole or complex numbers, but config.json no quantization")
    except Exception as error:
        raise _none("model", source, error) from error
    finally:
        if bars:
            logging.enable_progress_bar()
    if why := unlike(found):
        raise ValueError(f"{str(source)!r} {why}: it is no checkpoint of a {type(model).__name__}")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = prepare((model if where else model.to(device)).eval())
    _tokenizers[model] = tokenizer
    return model, tokenizer


def _check_templates(source, tokenizer) -> None:
    """ValueError for a chat template that is cut: it would end a chat much later."""
    from jinja2 import TemplateSyntaxError

    given = tokenizer.chat_template
    for template in given.values() if isinstance(given, dict) else [given] if given else []:
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": "x"}], template, tokenize=False)
        except TemplateSyntaxError as error:
            raise _none("tokenizer", source, error) from error
        except Exception:  # what a whole template says of this chat is said when somebody chats
            continue


def _none(what: str, source, error: Exception) -> ValueError:
    """What a broken file raises says seldom that it is broken."""
    begins = f"no {what} could be loaded from {str(source)!r}{fetching.near(source)}"
    if os.path.isdir(source) and not Path(source, "config.json").is_file():
        return ValueError(f"{begins}: the folder has no config.json")
    return ValueError(f"{begins}: {first_line(error).rstrip(': ')} (is every file of it there, and whole?)")


def offloaded() -> str:
    """A folder for weights that a map puts on disk, for as long as this process runs."""
    folder = tempfile.mkdtemp(prefix="kvlab-offload-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def source_of(name_or_path=None):
    """The folder of an embedded model (None: workshop), of a fetched one or of a converted GGUF file; a
    folder or a hub id as it is. ValueError for a model that was not fetched, a file that cannot be converted.
    """
    name = "workshop" if name_or_path is None else name_or_path
    check_kind("name_or_path", name, str | Path, "a name, a folder or a file")
    if name in EMBEDDED:
        return EMBEDDED[name]
    if name in fetching.PACKAGES:
        return fetching.folder_of(name)
    return gguf.folder_of(name) if str(name).lower().endswith(".gguf") else name


def configuration(name_or_path=None):
    """The configuration of a model named as for `load`; ValueError where none can be read."""
    from transformers import AutoConfig

    source = source_of(name_or_path)
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # a broken one can raise anything
        raise _none("configuration", name_or_path, error) from error


def prepare(model):
    """Let passes of the model that carry a kvlab cache attend through kvlab, and no others; returns the
    model. ValueError for a model that cannot."""
    scratch.set_up()
    check_model(model)
    register()
    with preparing:
        if model not in _prepared and model.config.is_encoder_decoder:
            raise ValueError(_cannot(model))
        text = model.config.get_text_config(decoder=True)
        kinds = model.config.__class__ | text.__class__
        for config in (model.config, text, *(getattr(module, "config", None) for module in model.modules())):
            if isinstance(config, kinds):  # a layer that was copied, and has come since, has one of its own
                answer(config)
        report_passes(model)
        if model not in _prepared:
            known = _masks_are_known(model)
            if known is None and not refused_layers(model.config):
                raise ValueError(_cannot(model))
            _prepared[model] = bool(known)
    return model


def masks_are_known(model) -> bool:
    """Whether every layer of a prepared model sees by a rule that `Visibility` knows."""
    return _prepared[model]


@torch.no_grad()
def _masks_are_known(model) -> bool | None:
    """As `masks_are_known`, from a pass that ends at the first attention; None where none comes to it."""
    ids = torch.zeros(1, 2, dtype=torch.long, device=entry_of(model))
    with torch.random.fork_rng(), as_it_was(model), told() as visibilities, stopping():
        try:
            model(ids, use_cache=False)
        except Exception as error:  # `Asked`; or one of the model's own, of which a twin will tell
            if isinstance(error, Asked) or getattr(model, "_supports_attention_backend", False):
                return all(visibility.known for visibility in visibilities)
    return None


def _cannot(model) -> str:
    return (
        f"{type(model).__name__} does not use transformers' attention interface as a decoder, or is "
        "compiled, so kvlab caches cannot serve it (docs/families.md lists models that they serve)"
    )


def tokenizer_of(model):
    """The tokenizer that `load` found beside the model; None for a model that was made otherwise."""
    return _tokenizers.get(model)


def calibration_ids(model) -> Tensor:
    """Default calibration tokens `[1, tokens]`: the text shipped with the package through the tokenizer
    that `load` found, or, for a model made otherwise, 256 random tokens from a fixed seed."""
    limit = ModelShape.of(model).context or 2048
    tokenizer = tokenizer_of(model)
    if tokenizer is not None:
        text = (WORKSHOP / "calibration.txt").read_text(encoding="utf-8")
        return torch.tensor([tokenizer(text).input_ids[: min(limit, 512)]], device="cpu")
    generator = torch.Generator().manual_seed(0)
    shape = 1, min(limit, 256)
    return torch.randint(0, ModelShape.of(model).vocabulary, shape, generator=generator, device="cpu")
