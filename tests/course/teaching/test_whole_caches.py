"""The doctor tries a whole cache of a learner's own, and says what is wrong with it."""

import pytest
import torch

from course.teaching import mine
from kvlab import trial


class Flat(mine.Cache):
    """Heads that share keys and values are forgotten."""

    def attend(self, layer, q, k, v):
        return super().attend(layer, q[: len(k)], k, v)


class Common(mine.Cache):
    """All caches of the class hold the same tokens."""

    def __init__(self, both=({}, {})):
        super().__init__()
        self.K, self.V = both


class Huge(mine.Cache):
    """Values are not those that came."""

    def append(self, layer, k, v):
        super().append(layer, k, v * 1e30)


class Stale(mine.Cache):
    """The newest token of what is held is left out."""

    def read(self, layer, q):
        return self.K[layer][:, :-1], self.V[layer][:, :-1]


class Deaf(mine.Cache):
    """Counts nothing."""

    def stats(self):
        return None


@pytest.mark.parametrize(
    "kind, said",
    ((Flat, "attend gave (2, 90, 32), and (4, 90, 32) is expected"), (Common, "is full: "),
     (Huge, "the logits differ by"), (Stale, "the logits differ by"), (Deaf, "bytes: ")),
)  # fmt: skip
def test_the_doctor_says_what_is_wrong_with_a_whole_cache(kind, said, capsys):
    assert trial.run(f"{__name__}.{kind.__name__}") == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[!!]")]
    assert any(said in line for line in wrong), wrong


class Hoards(mine.Cache):
    """Its rule names every token, whatever the budget."""

    def snapkv(self, layer, q):
        return torch.arange(self.K[layer].shape[1]).expand(len(self.K[layer]), -1)


def test_the_doctor_says_that_a_whole_cache_lets_nothing_go(capsys):
    assert trial.run(f"{__name__}.Hoards:keep=snapkv,budget=0.4") == 1
    assert "[!!] budget: all of 90 tokens are held after the prompt" in capsys.readouterr().out
    assert trial.run(f"{__name__}.Hoards:keep=snapkv,budget=1") == 0  # nothing has to go


class Idle(mine.Cache):
    """Its store rounds nothing."""

    def store(self, layer):
        pass


class Repeats(mine.Cache):
    """Its rule names the newest token again and again."""

    def snapkv(self, layer, q):
        return torch.full((len(self.K[layer]), self.count(layer)), self.K[layer].shape[1] - 1)


class Empty(mine.Cache):
    """The append of chapter 1."""

    def append(self, layer, k, v):
        pass


@pytest.mark.parametrize(
    "method, said",
    (("Idle:bits=4", "without: its numbers take more values than 4 bits"),
     ("Repeats:keep=snapkv,budget=0.4", "snapkv names a token twice"), ("Empty", "append holds nothing")),
)  # fmt: skip
def test_the_doctor_names_a_part_that_does_nothing(method, said, capsys):
    assert trial.run(f"{__name__}.{method}") == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[!!]")]
    assert wrong and said in wrong[0] + wrong[-1], wrong


def test_the_doctor_names_the_settings_of_a_whole_cache():
    with pytest.raises(ValueError, match="has no parameter 'bit', did you mean bits"):
        trial.run("course.teaching.mine.Cache:bit=4")


@pytest.mark.parametrize(
    "odd", ("bits=abc", "bits=1", "fetch=2", "budget=-1", "page=0.5", "pages=4", "keep=no")
)
def test_the_doctor_refuses_settings_that_no_cache_has(odd, capsys):
    assert trial.run(f"course.teaching.mine.Cache:{odd}") == 1
    assert "expected" in (told := capsys.readouterr().out) or "page=16" in told
