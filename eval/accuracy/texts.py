"""Texts: their tokens, in the form that lm-eval asks a model for, and where their contexts end."""

from __future__ import annotations

import contextlib
import sys
import warnings
from functools import cached_property

from jinja2 import TemplateError
from lm_eval.api.model import TemplateLM

from kvlab.errors import first_line

from ..core.errors import Problem
from .boundaries import boundary, character, rule_of
from .protocols import INSIDE


class Texts(TemplateLM):
    """What `KVLabLM` knows of texts; it has a `tokenizer`, `_encoded`, which remembers, and the protocol."""

    @property
    def eot_token_id(self) -> int:
        """The end token. Raises Problem where the tokenizer has none."""
        if self.tokenizer.eos_token_id is None:
            raise Problem("eos_token=None: text is written until an end token, and this tokenizer has none")
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context: the beginning token, else the end token. Raises Problem
        if the tokenizer has neither."""
        if self._first is None:
            raise Problem(
                "bos_token=None, eos_token=None: one of them comes before a text without a context, and "
                "this tokenizer has neither"
            )
        return self._first

    @property
    def _first(self) -> int | None:
        bos = self.tokenizer.bos_token_id
        return self.tokenizer.eos_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The tokenizer's chat template, for lm-eval's records."""
        return (self.tokenizer.chat_template or "") if chat_template else ""

    def apply_chat_template(self, chat_history, add_generation_prompt: bool = True) -> str:
        """The turns in the tokenizer's chat template; without the system's where the template refuses it, as
        lm-eval's own models leave it out. Raises Problem where there is no template."""
        if not self.tokenizer.chat_template:
            raise Problem("apply_chat_template: this model's tokenizer has no chat template")
        how = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
        how["continue_final_message"] = not add_generation_prompt
        try:
            return self.tokenizer.apply_chat_template(chat_history, **how)
        except TemplateError as error:
            rest = [turn for turn in chat_history if turn["role"] != "system"]
            if len(rest) == len(chat_history):
                raise Problem(f"apply_chat_template: {first_line(error)}") from error
            warnings.warn("the chat template refuses a system turn, which is left out", stacklevel=2)
            return self.tokenizer.apply_chat_template(rest, **how)

    @cached_property
    def _head(self) -> str:
        """What the chat template puts before a prompt of one turn; nothing where there is no template."""
        said = ""
        if self.tokenizer.chat_template:
            with contextlib.suppress(Exception):  # one that wants other turns says so where it is applied
                said = self.apply_chat_template([{"role": "user", "content": "PROMPT"}])
        return said.partition("PROMPT")[0]

    def tok_encode(self, string, add_special_tokens=None, **_) -> list[int]:
        """Token ids; the tokenizer's special tokens are added unless the text begins with them."""
        if add_special_tokens is not None:
            return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)
        if string not in self._encoded:
            begins = self._first is not None and string.startswith(self.tokenizer.decode(self._first))
            options = {"add_special_tokens": False} if begins else {}
            self._encoded[string] = self.tokenizer.encode(string, **options)
        return self._encoded[string]

    def _before_writing(self, prompt: str) -> list[int]:
        """Token ids of a prompt for generation, where lm-eval's own model knows no beginning but bos_token;
        for scores it takes the end token of a tokenizer without one."""
        bos = self.tokenizer.bos_token
        return self.tok_encode(prompt, add_special_tokens=None if bos else True) or [self.prefix_token_id]

    def _cut(self, requests) -> list[int | None]:
        """The character at which the context of every prompt ends; None where nothing is cut. Raises Problem
        where nobody says it."""
        if self.protocol == INSIDE:
            return [None] * len(requests)
        ends = []
        for request in requests:
            task, text = request.task_name, request.args[0]
            mine = self.untils.get(task) if self.context_until is None else self.context_until
            cut, shots = rule_of(task, mine), self.shots.get(task, self.shots.get(None))
            ends.append(character(cut, task, text, request.doc, self._head, shots) if text else 0)
        return ends

    def _context(self, text: str, ids: list[int], gone: int, end: int) -> int:
        """Tokens of a prompt that are its context, which ends at this character, when the first `gone` of
        `ids` have been cut off. Raises Problem where nothing is left of it."""
        ends = boundary(self.tokenizer, text, ids, end)
        if gone and ends <= gone:
            raise Problem(
                f"a prompt of {len(ids)} tokens loses its first {gone}, and with them its whole context: the "
                f"model takes {self.max_length} (max_length)"
            )
        return min(max(1, ends - gone), len(ids) - gone - 1)

    def _warn(self) -> None:
        """Warn the user of lm-eval's own command about truncation; ours shows it in the table."""
        lines = []
        if self._shortened and self.on_progress is None:
            most, count = self.max_length, len(self._shortened)
            lines.append(f"prompts longer than {most} tokens, which lose their beginning: {count}")
        if self._spanned:
            (text, said), count = self._spanned[0], len(self._spanned)
            lines.append(
                f"answers without a token apart from the context's, which have no score (-inf): {count}, the "
                f"first {said!r} after {text[-40:]!r}"
            )
        for line in lines:
            print(f"kvlab: {line}", file=sys.stderr)
