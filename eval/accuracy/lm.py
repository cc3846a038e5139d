"""The lm-eval model that scores *through* the cache.

lm-eval's own model scores a continuation in one forward pass: no decode step happens, so a cache
method changes nothing (lm-eval issues 3298 and 1105). Here a score is made the way text is decoded:

- log-likelihood: all but the last context token (TAIL = 1) are prefilled once per distinct context
  and compressed; the last one, then the continuation, go through the cache token by token. The
  context is forked to its choices when they part. Where steps do not depend on each other, since nothing
  is evicted any more and every token is stored by itself (`batching.steps_at_once`), known tokens pass at
  once.
- rolling log-likelihood: windows as lm-eval makes them; the first 90 % of each window
  (PREFILLED) are prefilled and scored from the prefill, the rest is decoded through the cache.
- generation: greedy, through the cache, until a stop string, an end token or the limit; the model's own
  generation_config is followed (`choosing.py`).

Under another protocol than `question-inside` (`protocols.py`) the context alone is prefilled and compressed,
and the question goes through the cache, in one pass except for its last token, then the continuation token by
token.

`recompute` stores nothing, so one pass over known tokens is what it would compute token by token,
and it is scored that way. Under `full` every log-likelihood and text equals that of lm-eval's HFLM. The
model is scored in eval mode, and then given back as it was.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import chain
from typing import ClassVar

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

import kvlab
from kvlab.devices import entry_of
from kvlab.models import ModelShape, source_of
from kvlab.modes import evaluating
from kvlab.parameters import shown
from kvlab.spec import Spec, parse

from .. import PROGRAM
from ..core.digests import code_digest, method_digest
from ..core.measurement import USUAL, rows_at_once
from .batching import PREFILLED, Meter
from .boundaries import check_until
from .choosing import choice
from .continuing import continuations
from .kept import Kept
from .protocols import INSIDE, PROTOCOLS, REUSE, checked, eviction
from .reuse import reusing
from .samples import sought, told
from .scoring import Scorer
from .settings import UNHEARD, generation
from .texts import Texts
from .windows import windows
from .writing import generate

# lm-eval would fork this process, with its model and its threads, for every standard error of a perplexity; a
# child that was told to end at a bad moment is waited for without end.
os.environ.setdefault("DISABLE_MULTIPROC", "1")

KEPT = (
    "use_cache: lm-eval knows kept answers by their text alone, so they may be another method's; "
    f"`{PROGRAM} accuracy` keeps what is finished and resumes"
)


def with_parameters(method: str | Spec, parameters: dict) -> str | Spec:
    """A method whose further parameters came as arguments of their own, since lm-eval splits at commas."""
    extra = ",".join(f"{name}={value}" for name, value in parameters.items())
    return f"{method}{',' if ':' in str(method) else ':'}{extra}" if extra else method


def without_cuda(device: str | None) -> str | None:
    """The CPU in the place of a CUDA device that is not there, with a note."""
    if str(device).startswith("cuda") and not torch.cuda.is_available():
        print(f"kvlab: device {device} is not there; the model runs on the CPU", file=sys.stderr)
        return "cpu"
    return device


class KVLabLM(Texts):
    """lm-eval model `kvlab`.

    pretrained: folder, hub id, a loaded model (with `tokenizer`), or None for the workshop model.
    method: a method as everywhere, `h2o:budget=0.2`, or its Spec; since lm-eval's --model_args splits at
    commas, the method's parameters may also be given as further arguments (`method=h2o,budget=0.2`).
    batch_size: rows decoded together ("auto": 64). max_length: tokens, default the model's own.
    engine: eager, compiled or graph, as `kvlab.load` takes it; a model that is already loaded has its own.
    The compiled one takes eight rows at most, 32 with narrow weights; steps of more are the eager one's.
    protocol: question-inside, context-first, many-questions or reuse. evict: once or every-step, what a keep
    does after the prompt (default: every-step under question-inside, else once). context_until: the text
    before which a prompt is cut (default: by its task, see `boundaries.py`).
    """

    untils_of_tasks: ClassVar[dict[str, str]] = {}  # task -> the text before which its own YAML says to cut
    shots_of_tasks: ClassVar[dict[str | None, int]] = {}  # task -> its examples; None: those of any other one

    def __init__(
        self, pretrained=None, method="full", *, tokenizer=None, batch_size=USUAL, device=None,
        dtype=None, engine="eager", max_length=None, max_batch_size=None, protocol=INSIDE, evict=None,
        context_until=None, device_map=None, tp=False, **parameters,
    ):  # fmt: skip
        super().__init__()
        self.protocol = checked("protocol", protocol, PROTOCOLS)
        self.evict = eviction(self.protocol, evict)
        check_until(context_until, protocol)
        self.context_until = context_until
        self.untils, self.shots = dict(self.untils_of_tasks), dict(self.shots_of_tasks)
        self._ends: list[int | None] = []  # of each request's prompt: the character at which its context ends
        if pretrained is None or isinstance(pretrained, str):
            if tokenizer not in (None, pretrained, str(source_of(pretrained))):
                raise ValueError(f"tokenizer={shown(tokenizer)}: a named model has its own; load both")
            where = {"device": without_cuda(device), "device_map": device_map, "tensor_parallel": tp}
            self.model, self.tokenizer = kvlab.load(pretrained, dtype=dtype, engine=engine, **where)
        elif tokenizer is None:
            raise ValueError("tokenizer=None: a model that is already loaded needs its tokenizer")
        else:
            self.model, self.tokenizer = pretrained, tokenizer
        try:
            self.batch_size = rows_at_once(batch_size)
        except ArgumentTypeError as error:
            raise ValueError(f"batch_size={batch_size!r}: {error}") from None
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        try:
            self.max_length = int((limit or 2048) if max_length is None else max_length)
        except ValueError:
            self.max_length = 0
        if self.max_length < 2:
            raise ValueError(f"max_length={max_length!r}: expected a number of tokens from 2 on")
        self._device = entry_of(self.model)
        self._vocabulary = ModelShape.of(self.model).vocabulary
        self._encoded: dict[str, list[int]] = {}
        self.on_progress: Callable[[int, int], None] | None = None
        self.kept = Kept()  # where finished batches are kept
        self.evidence: Callable[[object], list[tuple[int, int]]] | None = None  # of a request's prompt
        self.together((with_parameters(method, parameters),))

    def get_model_info(self) -> dict:
        """What lm-eval writes beside its results."""
        spec = parse(self.method)
        told = {"method": spec.text, "protocol": self.protocol, "evict": self.evict}
        digests = {"method_digest": method_digest(spec), "code_digest": code_digest()}
        return told | digests

    def together(self, methods: Iterable[str | Spec]) -> None:
        """Score for all these methods at once, the first of them being used: prefills are shared."""
        specs = {spec.text: spec for spec in map(parse, methods)}
        self.methods = tuple(specs)
        self._reusing = {}
        with evaluating(self.model):
            self._caches = {name: kvlab.make_cache(self.model, spec) for name, spec in specs.items()}
            if self.protocol == REUSE:
                self._reusing = {name: reusing(self.model, spec) for name, spec in specs.items()}
        self._known: dict[str, tuple[Scorer, dict, set[str], dict]] = {}  # who was told, too
        self.use(self.methods[0])

    def use(self, method: str) -> None:
        """Answer for this one of the methods from now on; what was computed for it is at hand."""
        if method not in self.methods:
            raise ValueError(f"method={method!r}: expected one of {', '.join(self.methods)}")
        self.method, self.meter = method, Meter()
        self._own = self._shared = self._computing = 0.0
        self._contexts = self._tokens = 0
        self._shortened: set[str] = set()  # prompts that lost their beginning
        self._spanned: list[tuple[str, str]] = []  # (context, continuation) without a token of its own
        self.held: dict[str, list[dict]] = {}  # what was held of each prompt's evidence, see `samples.py`

    def seconds(self, elapsed: float) -> dict:
        """Of the seconds since `use`: those of this method, and those of the prefills that `together` methods
        share, whichever of them was asked for first."""
        own = max(0.0, elapsed - self._computing) + self._own
        return {"seconds": own, "prefill_seconds": self._shared, "together": len(self.methods)}

    def prefills(self) -> dict:
        """How many contexts this method was filled from since `use`, each once for all that is asked of it,
        and how many tokens, whichever methods shared the pass; none where nothing was prefilled. How many
        prompts were longer than the model takes, and lost their beginning; how many continuations had no
        token of their own, and have no score."""
        prefilled = {"contexts": self._contexts or None, "prefilled_tokens": self._tokens or None}
        return prefilled | {"shortened": len(self._shortened) or None, "spanned": len(self._spanned) or None}

    def _answers(self, kind: str, asked, compute: Callable, total: int, hidden: bool, prompts=()) -> list:
        """This method's answers: `compute(scorer)` is done once for all methods, and remembered for others.
        Who asks again has them computed again: the model may be another one by then. prompts: as `sought`."""
        key = f"{kind} {hash(repr(asked))}"
        if key not in self._known or self.method in self._known[key][2]:
            hidden = hidden or self.on_progress is not None  # then someone else draws
            with tqdm(total=total, desc=f"{self.method}: {kind}", disable=hidden) as bar:
                done = 0

                def advance(items: int) -> None:
                    nonlocal done
                    done += items
                    bar.update(items)
                    if self.on_progress:
                        self.on_progress(done, total)

                if self.on_progress:
                    self.on_progress(0, total)
                evidence = sought(self.tokenizer, self.evidence, prompts) if self.evidence else {}
                scorer = Scorer(
                    self.model, self._caches, self.batch_size, self.max_length,
                    protocol=self.protocol, evict=self.evict, reusing=self._reusing,
                )  # fmt: skip
                scorer.advance, scorer.kept, scorer.name = advance, self.kept, self.kept.of(kind, asked)
                scorer.sought = {index: [*chain(*some)] for index, (_, _, some) in evidence.items()}
                usual = torch.get_default_device().type == "cpu"  # else what is counted would be elsewhere
                with evaluating(self.model), nullcontext() if usual else torch.device("cpu"):
                    self._known[key] = scorer, compute(scorer), set(), evidence
                scorer.clock.stop()
            self._computing += scorer.clock.total
        scorer, answers, heard, evidence = self._known[key]
        heard.add(self.method)
        self._own += scorer.clock.own[self.method]
        self._shared += scorer.clock.shared
        self._contexts += scorer.contexts[self.method]
        self._tokens += scorer.tokens[self.method]
        if self.method in scorer.errors:
            raise scorer.errors[self.method]
        self.meter.join(scorer.meters[self.method])
        self.held |= told(self.tokenizer, evidence, scorer.held[self.method])
        return answers[self.method]

    def set_cache_hook(self, cache_hook) -> None:
        """Where lm-eval is told to keep answers: refused."""
        raise ValueError(KEPT)

    def loglikelihood(self, requests, disable_tqdm=False) -> list[tuple[float, bool]]:
        """As lm-eval's, without its bar where `on_progress` is told instead."""
        if any(request.args == ("", "") for request in requests):
            raise ValueError("loglikelihood: a request has no text at all, neither context nor continuation")
        has = [
            bool(context or self.tok_encode(said, add_special_tokens=False))
            for context, said in (request.args for request in requests)
        ]
        asked = [request for request, some in zip(requests, has, strict=True) if some]
        self._spanned += [request.args for request, some in zip(requests, has, strict=True) if not some]
        self._ends, self._requests = self._cut(asked), asked
        answers = iter(super().loglikelihood(asked, disable_tqdm or self.on_progress is not None))
        self._warn()
        return [next(answers) if some else (-math.inf, False) for some in has]

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **_) -> list[tuple[float, bool]]:
        """requests: (texts, context ids, continuation ids) -> (log-likelihood, is it greedy); in the order of
        those that `loglikelihood` was asked."""
        contexts: dict[tuple, list] = {}
        pieces: dict[tuple, tuple] = {}  # one prompt of each context
        answers: list = [(-math.inf, False)] * len(requests)
        for index, ((text, said), context, continuation) in enumerate(requests):
            if not continuation:
                self._spanned.append((text, said))
                continue
            if len(continuation) > self.max_length:
                found = f"continuation {said[:40]!r}... of {len(continuation)} tokens"
                raise ValueError(f"{found}: expected at most {self.max_length}")
            if max(continuation) >= self._vocabulary:
                wrong = f"{max(continuation)} is none of the model's {self._vocabulary} token ids"
                raise ValueError(f"continuation {said[:40]!r}: {wrong}")
            context = context or [self.prefix_token_id]  # of spaces alone, which belong to the continuation
            kept = tuple((context + continuation)[-(self.max_length + 1) :][: -len(continuation)])
            gone, end = len(context) - len(kept), self._ends[index]
            if gone:
                self._shortened.add(text)
            cut = None if end is None else self._context(text, context, gone, end)
            contexts.setdefault((kept, cut), []).append((index, continuation))
            pieces.setdefault((kept, cut), (self._requests[index], context, gone))
        groups = [(context, [t for _, t in members]) for (context, _), members in contexts.items()]
        if not groups:
            return answers
        at = None if self.protocol == INSIDE else [cut for _, cut in contexts]
        count = sum(len(targets) for _, targets in groups)
        compute = lambda scorer: continuations(scorer, groups, at)
        scores = self._answers("choices", (groups, at), compute, count, disable_tqdm, pieces.values())
        for members, found in zip(contexts.values(), scores, strict=True):
            for (index, _), answer in zip(members, found, strict=True):
                answers[index] = tuple(answer)
        return answers

    def loglikelihood_rolling(self, requests, disable_tqdm=False) -> list[float]:
        """Log-likelihood of each whole text, by windows (see the module's text)."""
        if self.protocol != INSIDE:
            raise ValueError(
                f"protocol={self.protocol}: of a text that is scored whole nothing is a question"
            )
        rows, owners = [], []
        for owner, (text,) in enumerate(request.args for request in requests):
            ids, first = self.tok_encode(text), self.prefix_token_id
            parts = get_rolling_token_windows(ids, first, self.max_length, context_len=1)
            for context, targets in map(make_disjoint_window, parts):
                rows.append((context + targets[:-1], targets))
                owners.append(owner)
        totals = [0.0] * len(requests)
        if not rows:
            return totals
        scores = self._answers(
            "windows", rows, lambda scorer: windows(scorer, rows, PREFILLED), len(rows), disable_tqdm
        )
        for owner, (score, _) in zip(owners, scores, strict=True):
            totals[owner] += score
        return totals

    def generate_until(self, requests, disable_tqdm=False) -> list[str]:
        """Greedy continuations, cut at the stop strings; sampling is refused."""
        ends = self._cut(requests)
        answers: list[str] = [""] * len(requests)
        by_options: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            by_options.setdefault(repr(request.args[1]), []).append(index)
        for members in by_options.values():
            some = [requests[index] for index in members]
            found = self._generate(some, [ends[index] for index in members], disable_tqdm)
            for index, answer in zip(members, found, strict=True):
                answers[index] = answer
        self._warn()
        return answers

    def _generate(self, requests: list, ends: list[int | None], hidden: bool) -> list[str]:
        texts = [request.args[0] for request in requests]
        options = normalize_gen_kwargs(requests[0].args[1], default_max_gen_toks=256)
        generation({k: v for k, v in options.items() if k not in UNHEARD}, "generation_kwargs")
        end = self.eot_token_id
        until = handle_stop_sequences(list(options["until"]), eos=self.tokenizer.decode(end))
        limit = options["max_gen_toks"]
        rest = {name: options[name] for name in ("num_beams", "repetition_penalty") if name in options}
        rest["pad_token_id"] = end
        if limit >= self.max_length:
            raise ValueError(f"max_gen_toks={limit}: expected less than the context {self.max_length}")
        whole = [self._before_writing(text) for text in texts]
        prompts, cuts = [ids[-(self.max_length - limit) :] for ids in whole], None
        gone = [len(ids) - len(prompt) for ids, prompt in zip(whole, prompts, strict=True)]
        self._shortened |= {text for text, some in zip(texts, gone, strict=True) if some}
        if self.protocol != INSIDE:
            cuts = [self._context(*one) for one in zip(texts, whole, gone, ends, strict=True)]
        choices = [choice(self.model, ids, limit, self._device, rest) for ids in prompts]
        ends_of_text = choices[0].ends | {end}

        def stop(tokens: list[int]) -> bool:
            text = self.tokenizer.decode(tokens)
            return tokens[-1] in ends_of_text or any(word in text for word in until)

        asked = prompts, cuts, until, limit, rest, str(self.model.generation_config)
        compute = lambda scorer: generate(scorer, choices, stop, cuts)
        given = zip(requests, whole, gone, strict=True)
        made = self._answers("generation", asked, compute, len(prompts), hidden, given)
        decoded = [self.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in made]
        return [postprocess_generated_text(text, until, None) for text in decoded]


with contextlib.suppress(ValueError):  # a checkout's `eval` and the installed name are one and the same
    register_model("kvlab")(KVLabLM)
