"""Your own cache. It decodes a real model, and every chapter replaces one of its parts.

    class MyCache(mine.Cache):
        def append(self, layer, k, v): ...        # where a new token's key and value go
        def read(self, layer, q): ...             # the keys and values that a step looks at
        def attend(self, layer, q, k, v): ...     # what the layer gives back
        def ahead(self, layer, guess): ...        # what the next layer will want, guessed (chapter 7)
        def leave(self, layer, q): ...            # what goes when the pass is over

`mine.part(snapkv)` gives your function once its check accepts it, and the course's until then.
`mine.keep(snapkv)` also writes it to my_cache.py beside the notebooks, where later chapters find it by name,
`mine.part("snapkv")`. A cache of this kind serves one text at a time, on models built like Llama.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from kvlab.stats import Stats

from . import check, lease

FILE = "my_cache.py"
HEAD = f'''"""My cache: a part from each chapter of the course, written by mine.keep(...)."""

import math

import torch

import kvlab
from {__package__} import mine
from kvlab.keep import Keep
'''


class Cache:
    """One text's keys and values. Chapter 2's: everything is kept, and grows.

    q `[heads, new, d]`; k, v `[kv_heads, new, d]` of the tokens that a pass feeds, keys after RoPE; K, V
    `[kv_heads, held, d]` of what is held. `self.K` and `self.V` hold them by the number of the layer, and
    `self.seen` is how many tokens came before this pass.
    """

    def __init__(self):
        self.K, self.V, self.seen, self.moved = {}, {}, 0, 0

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The layer's output for the new tokens, `[heads, new, d]`."""
        K, V = self.read(layer, q) if layer in self.K else (k[:, :0], v[:, :0])
        out, _, _ = part("attend_step")(q, k, v, K, V)
        self.append(layer, k, v)
        self.leave(layer, q)
        return out

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Hold the new keys and values."""
        held = layer in self.K
        self.K[layer] = torch.cat([self.K[layer], k], dim=1) if held else k
        self.V[layer] = torch.cat([self.V[layer], v], dim=1) if held else v

    def read(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """K and V that a step looks at, before its own token joins them."""
        return self.K[layer], self.V[layer]

    def ahead(self, layer: int, guess: Tensor) -> None:
        """The block before `layer` begins: guess `[heads, 1, d]` is the query that `layer` will ask, if the
        two blocks' inputs are alike. Called in decode steps, with a cache that overrides it."""

    def leave(self, layer: int, q: Tensor) -> None:
        """The pass is over: let go of what need not be held."""

    def stats(self) -> Stats:
        """Tokens and bytes held, from the tensors of the cache; a chapter that counts otherwise says so."""
        held = max((K.shape[1] for K in self.K.values()), default=0)
        size = sum(one.nbytes for both in (self.K, self.V) for one in both.values())
        return Stats(size, 0, self.moved, self.seen, held)


def weights(q: Tensor, K: Tensor) -> Tensor:
    """What each query gives to each token held, `[heads, new, held]`; the new tokens are the last of K."""
    K = K.repeat_interleave(len(q) // len(K), 0)
    new, held = q.shape[1], K.shape[1]
    later = torch.ones(new, held, device=q.device).triu(held - new + 1).bool()
    return (q @ K.mT / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf).softmax(-1)


class Reader:
    """Feeds a text to a model built like Llama, through a cache of one's own: as `kvlab.Stepper` does."""

    def __init__(self, model, cache: Cache):
        self.model, self.cache = model, cache

    @torch.no_grad()
    def feed(self, ids: Tensor, last: bool = False) -> Tensor:
        """Logits `[1, vocabulary]` of the last token, once `ids` `[1, new]` are read; last: as in Stepper."""
        body, cache, new = self.model.model, self.cache, ids.shape[1]
        x = body.embed_tokens(ids)  # [1, new, h]
        turns = body.rotary_emb(x, torch.arange(cache.seen, cache.seen + new)[None])
        guesses, inputs = new == 1 and type(cache).ahead is not Cache.ahead, []
        for number, block in enumerate(body.layers):
            inputs.append(x[0, -1])
            if guesses and number + 1 < len(body.layers):
                cache.ahead(number + 1, _turned(self._rehearsed(number + 1, inputs), *turns))
            attention, y = block.self_attn, block.input_layernorm(x)
            q, k, v = (
                project(y)[0].view(new, -1, attention.head_dim).transpose(0, 1)  # [heads, new, d]
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            out = cache.attend(number, _turned(q, *turns), _turned(k, *turns), v)
            if not isinstance(out, Tensor) or out.shape != q.shape:
                shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
                raise ValueError(f"attend gave {shape}, and {tuple(q.shape)} is expected, [heads, new, d]")
            x = x + attention.o_proj(out.transpose(0, 1).reshape(1, new, -1))
            x = x + block.mlp(block.post_attention_layernorm(x))
        cache.seen += new
        return self.model.lm_head(body.norm(x[:, -1]))

    def _rehearsed(self, layer: int, inputs: list[Tensor]) -> Tensor:
        """The query `[heads, 1, d]` of a layer before RoPE, by `rehearse` and from what is known so far."""
        blocks = self.model.model.layers
        query = blocks[layer].self_attn.q_proj
        gains = [block.input_layernorm.weight for block in blocks]
        guess = part("rehearse")(layer, inputs, gains, [block.self_attn.q_proj.weight for block in blocks])
        guess = guess if query.bias is None else guess + query.bias
        return guess.view(-1, 1, blocks[layer].self_attn.head_dim)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE: each pair of channels is turned by the token's position."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


def write(model, tokenizer, text: str, cache: Cache, new: int = 12) -> str:
    """What the model writes after a text, token by token, through the cache; or why it cannot yet."""
    reader, ids, said = Reader(model, cache), tokenizer(text, return_tensors="pt").input_ids, []
    try:
        for _ in range(new):
            ids = reader.feed(ids).argmax(-1, keepdim=True)
            said.append(int(ids))
    except Exception as error:  # a learner's own code: whatever it raises is an answer
        return not_yet(type(cache), error)
    return tokenizer.decode(said)


def clause17(model, tokenizer, made: Callable[[], Cache]) -> int | None:
    """Ask a cache about clause 17 of six leases, which differ in the name that this clause gives.

    Prints the first clause, question and answer, how many answers are right, and what the cache holds.
    Returns how many are right; None for a cache that is not finished, which gets one line.
    """
    found = answered(model, tokenizer, made)
    return found and found[0]


def answered(model, tokenizer, made: Callable[[], Cache]) -> tuple[int, Stats] | None:
    """As `clause17`; with the stats of the last lease's cache."""
    asked, said, cache = lease.asked_of_workshop(), [], None
    try:
        for context, question, _ in asked:
            ids, cache = tokenizer(context + question, return_tensors="pt").input_ids, made()
            reader = Reader(model, cache)
            reader.feed(ids[:, :-1])
            said.append(tokenizer.decode(reader.feed(ids[:, -1:]).argmax(-1)).strip())
        stats = cache.stats()
    except Exception as error:  # a learner's own code: whatever it raises is an answer
        print(not_yet(made, error))
        return None
    right = sum(bool(one) and name.startswith(one) for one, (_, _, name) in zip(said, asked, strict=True))
    print(
        f'Clause 17: "{lease.DOG.format(asked[0][2])}"  You: "{asked[0][1].strip()}"  Your cache: "{said[0]}"'
    )
    print(
        f"{right} of {len(asked)} leases answered; {stats.tokens_held} of {stats.tokens_seen} tokens held,"
        f" {stats.device_bytes / 1e3:,.0f} kB on the device, {stats.host_bytes / 1e3:,.0f} kB on the host,"
        f" {stats.moved_bytes / 1e3:,.0f} kB moved by the last step"
    )
    if not stats.tokens_held:
        print(
            "It holds nothing: a step sees its own tokens alone until self.K[layer] and self.V[layer]"
            " are set."
        )
    return right, stats


check.ASKS["clause17"] = answered


def not_yet(made, error: Exception) -> str:
    """The line for a cache that is not finished."""
    return f"not yet: {made.__name__} stopped with {type(error).__name__}: {error}"


# Parts: functions of the learner's own, and where they are kept.


def part(wanted: Callable | str) -> Callable:
    """A part of the cache: yours once its check accepts it, the course's until then.

    wanted: your function, or the name of one that an earlier chapter kept in my_cache.py.
    """
    name = wanted if isinstance(wanted, str) else wanted.__name__
    if name not in _parts or not isinstance(wanted, str):
        exercise = check.EXERCISES[name]
        own = _saved(name) if isinstance(wanted, str) else wanted
        accepted = own is not None and exercise.accepts(own)
        if isinstance(wanted, str) and own is not None and not accepted:
            print(f"{name}: the course's, because the check does not accept what {FILE} has")
        _parts[name] = own if accepted else exercise.right
    return _parts[name]


_parts: dict[str, Callable] = {}


def keep(made: Callable) -> Callable:
    """Write a function or a class to my_cache.py, and return it. A function that has a check is written once
    its check accepts it; until then the course's is returned, and one line says so."""
    name = getattr(made, "__name__", "<lambda>")
    if not (inspect.isfunction(made) or inspect.isclass(made)) or name == "<lambda>":
        print(f"mine.keep takes a function or a class that a cell defines by name, not {made!r}")
        return made
    if name in check.EXERCISES and part(made) is not made:
        print(f"{name}: the course's for now; it becomes yours when its check accepts it")
        return part(made)
    with _alone():
        _write(name, _source(made))
    sys.modules.pop(Path(FILE).stem, None)  # a method of that file is read again
    print(f"{name}: yours, kept in {FILE}")
    if name in check.EXERCISES and not _works(name):
        print(f"   but {FILE} alone cannot run it: write inside of it what it takes from other cells")
    return made


def _write(name: str, source: str) -> None:
    """Put a source into my_cache.py, in place of one of that name; the rest of the file stays as it is."""
    text, nodes = _read()
    if nodes is None:
        os.replace(_file(), _file().with_name("my_cache.bak.py"))
        print(f"{FILE} was no Python any more; it is kept as my_cache.bak.py")
        text, nodes = HEAD, []
    lines, old = text.splitlines(), next((node for node in nodes if node.name == name), None)
    if old is None:
        lines += ["", "", *source.splitlines()]
    else:
        lines[old.lineno - 1 : old.end_lineno] = source.splitlines()
    new = _file().with_suffix(".new")
    new.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    os.replace(new, _file())


def _works(name: str) -> bool:
    """Whether the function that my_cache.py has is accepted by its check."""
    own = _saved(name)
    return own is not None and check.EXERCISES[name].accepts(own)


@contextmanager
def _alone():
    """No other notebook of this folder writes meanwhile; a lock that was left behind is passed after 5 s."""
    lock = _file().with_suffix(".lock")
    for _ in range(100):
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
            break
        except FileExistsError:
            time.sleep(0.05)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)


def _file() -> Path:
    return Path.cwd() / FILE


def _read() -> tuple[str, list | None]:
    """The text of my_cache.py and its functions and classes; None for these where it is no Python."""
    try:
        text = _file().read_text(encoding="utf-8")
        nodes = ast.parse(text).body
    except OSError:
        return HEAD, []
    except (SyntaxError, ValueError):
        return "", None
    return text, [node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)]


def _saved(name: str) -> Callable | None:
    """A function from my_cache.py, or None."""
    text, nodes = _read()
    if name not in [node.name for node in nodes or []]:
        return None
    scope: dict = {}
    try:
        exec(compile(text, FILE, "exec"), scope)
    except Exception:  # a learner's file: whatever is wrong with it, the course's part serves
        return None
    return scope[name]


def _source(made: Callable) -> str:
    """The source of a function or class from the cell that defined it, without the marks of a solution."""
    code = inspect.unwrap(
        made if inspect.isfunction(made) else next(filter(inspect.isfunction, vars(made).values()))
    )
    text = "".join(linecache.getlines(code.__code__.co_filename))
    node = next(
        one for one in ast.walk(ast.parse(_plain(text))) if getattr(one, "name", None) == made.__name__
    )
    lines = _plain(text).splitlines()[node.lineno - 1 : node.end_lineno]
    return textwrap.dedent("\n".join(line for line in lines if not line.strip().startswith("###")))


def _plain(cell: str) -> str:
    """A cell without its magics, which are no Python."""
    return "\n".join("" if line.startswith(("%", "!")) else line for line in cell.splitlines())
