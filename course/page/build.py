"""Build: the page as one HTML file, `python -m course.page.build`.

The weights are rounded to int8 here, one scale per row; `rounded` loads the same numbers back into a model,
so that what the page says can be held against kvlab.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor

import kvlab
from kvlab.calibrate.skew import skew
from kvlab.methods import METHODS
from kvlab.models import WORKSHOP, load

from ..harness import harness
from ..teaching import contract, lease
from .assemble import assemble
from .bills import tables

corpus, words = harness("tasks.corpus"), harness("tasks.words")
HERE = Path(__file__).resolve().parent
BUILT = HERE.parents[1] / "notebooks" / "page.html"  # chapters link to it; git ignores it
STORY = BUILT.with_name("drawings") / "story.svg"
WORKER = (
    "kernel", "weights", "tokenizer", "formats", "keep", "fetch", "cache", "record", "engine", "session",
    "worker",
)  # fmt: skip
PAGE = ("client", "facts", "state", "picture", "tokens", "tour", "panel", "app")

SHOWN = ("full", "int4", "int2", "sinks", "h2o", "snapkv", "topk", "infinigen")


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix `[rows, cols]` as int8 codes and fp32 scales `[rows]`: w ~ code * scale."""
    scale = weight.float().abs().amax(1) / 127
    codes = (weight.float() / scale.clamp(min=1e-30)[:, None]).round().to(torch.int8)
    return codes, scale


@torch.no_grad()
def rounded(model):
    """The model with every matrix as the page holds it, in place."""
    for weight in model.parameters():
        if weight.dim() == 2:
            codes, scale = quantized(weight)
            weight.copy_(codes * scale[:, None])
    return model


def tensors(model) -> dict[str, Tensor]:
    """The model's weights by the names that engine.js asks for; what is used together lies together."""
    body = model.model
    named = {"embedding": body.embed_tokens.weight, "norm": body.norm.weight}
    for index, block in enumerate(body.layers):
        attention, mlp = block.self_attn, block.mlp
        asking = attention.q_proj, attention.k_proj, attention.v_proj
        named |= {
            f"{index}.norm1": block.input_layernorm.weight,
            f"{index}.qkv": torch.cat([part.weight for part in asking]),
            f"{index}.out": attention.o_proj.weight,
            f"{index}.norm2": block.post_attention_layernorm.weight,
            f"{index}.gate_up": torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
            f"{index}.down": mlp.down_proj.weight,
        }  # fmt: skip
    return {name: weight.detach() for name, weight in named.items()}


def packed(named: dict[str, Tensor]) -> tuple[bytes, dict]:
    """All tensors one after the other, and where each begins (see weights.js)."""
    parts, places, at = [], {}, 0
    for name, weight in named.items():
        if weight.dim() == 1:
            kind, data = "float", weight.float().numpy().tobytes()
        else:
            codes, scale = quantized(weight)
            kind, data = "int8", codes.numpy().tobytes() + scale.numpy().tobytes()
        places[name] = {"kind": kind, "shape": list(weight.shape), "at": at}
        parts.append(data)
        at += len(data)
    return b"".join(parts), places


def config_of(model) -> dict:
    """What engine.js must know of the model. ValueError for one that it cannot run."""
    config = model.config
    width = config.hidden_size // config.num_attention_heads
    sizes = config.hidden_size, config.intermediate_size
    plain = config.model_type == "llama" and config.tie_word_embeddings and not config.attention_bias
    if not plain or config.num_key_value_heads != config.num_attention_heads or any(n % 8 for n in sizes):
        raise ValueError("the page runs a Llama with tied embeddings, one KV head per head, no biases")
    return {
        "layers": config.num_hidden_layers, "heads": config.num_attention_heads, "width": width,
        "hidden": config.hidden_size, "middle": config.intermediate_size, "vocabulary": config.vocab_size,
        "theta": config.rope_parameters["rope_theta"], "epsilon": config.rms_norm_eps,
    }  # fmt: skip


def vocabulary(tokenizer) -> dict:
    """Words by number, merges and special tokens (see tokenizer.js)."""
    known = json.loads(tokenizer.backend_tokenizer.to_str())
    words = sorted(known["model"]["vocab"], key=known["model"]["vocab"].get)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in known["model"]["merges"]]
    special = {token["content"]: token["id"] for token in known["added_tokens"]}
    return {"words": words, "merges": merges, "special": special}


def told() -> dict:
    """Words for facts (facts.js), what comes between who is asked for and the name, the lease, which is shown
    first, the course's bill, and the methods with their summaries."""
    context, question, _ = lease.asked_of_workshop()[0]
    bill = {"model": contract.MODEL, "device": contract.DEVICE, "context": str(contract.TOKENS), "users": "1"}
    forms = corpus.WORDINGS["named"].facts + corpus.WORDINGS["called"].facts[:1]
    leads = {form.partition("{key}")[2].partition("{value}")[0].rstrip() for form in forms} - {""}
    return {
        "names": words.NAMES, "colours": words.COLOURS, "animals": words.ANIMALS, "places": words.PLACES,
        "forms": forms, "leads": sorted(leads), "bill": bill,
        "first": {"facts": context, "question": question.removeprefix("\nQuestion: ")},
        "methods": {name: METHODS[name].summary for name in SHOWN},
    }  # fmt: skip


def defaults() -> dict:
    """{method: its parameters' defaults}, of those that the page shows, as keep.js and fetch.js read them."""
    plain = bool, int, float, str
    return {
        name: {key: value for key, value in METHODS[name].parameters.items() if isinstance(value, plain)}
        for name in SHOWN
    }


def text64(data: bytes, zipped: bool = True) -> str:
    """base64, of a gzip file where `zipped`."""
    return base64.b64encode(gzip.compress(data, 9, mtime=0) if zipped else data).decode()


def embedded(value) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def scripts(names: tuple[str, ...]) -> str:
    """JavaScript files one after the other; each says "use strict", the first one's counts."""
    return "\n".join((HERE / f"{name}.js").read_text(encoding="utf-8") for name in names)


def page(model, tokenizer) -> str:
    """The page as one string of HTML; it needs no other file and no network. The model is `rounded`."""
    matrices = torch.stack(skew(rounded(model)))
    data, places = packed(tensors(model))
    header = {"config": config_of(model), "tensors": places, "tokenizer": vocabulary(tokenizer)}
    filled = {
        "digest": digest(),
        "story": STORY.read_text(encoding="utf-8"),
        "style": (HERE / "page.css").read_text(encoding="utf-8"),
        "worker": f'"use strict";\nconst DEFAULTS = {embedded(defaults())};\n{scripts(WORKER)}',
        "script": scripts(PAGE),
        "header": embedded(header),
        "told": embedded(told()),
        "charged": embedded(tables()),
        "kernel": text64(assemble((HERE / "kernel.wat").read_text(encoding="utf-8")), zipped=False),
        "weights": text64(data),
        "skewing": text64(matrices.float().numpy().tobytes()),
    }
    html = (HERE / "page.html").read_text(encoding="utf-8")
    for name, text in filled.items():
        html = html.replace(f"<!--{name}-->", text)
    return html


def digest() -> str:
    """What the page is made from: the model, the files beside this one, the words, and kvlab, which computes
    the bill."""
    made = hashlib.sha256(embedded(told()).encode())
    ours = [path for kind in ("py", "json") for path in Path(kvlab.__file__).parent.rglob(f"*.{kind}")]
    for path in (WORKSHOP / "checkpoint" / "sha256.txt", STORY, *sorted([*HERE.glob("*.*"), *ours])):
        made.update(path.read_bytes())
    return made.hexdigest()[:16]


def built() -> Path:
    """The page beside the chapters, built now unless the one that is there is made from the same."""
    there = BUILT.open(encoding="utf-8").read(2000) if BUILT.exists() else ""
    if digest() not in there:
        BUILT.write_text(page(*load()), encoding="utf-8")
    return BUILT


def main(given=None) -> None:
    parser = argparse.ArgumentParser(prog="python -m course.page.build", description=__doc__)
    parser.add_argument("--out", type=Path, default=BUILT, metavar="FILE", help="the HTML file to write")
    out = parser.parse_args(given).out
    html = page(*load())
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(html, encoding="utf-8")
    except OSError as error:
        parser.error(f"--out {out}: {error.strerror}")
    print(f"{out}: {len(html.encode()) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
