"""GGUF files: the model and the tokenizer that come out are those that went in, or one line says why not."""

import json
import random

import pytest
import torch
from models import made

import kvlab
from kvlab import cli
from kvlab.models import gguf, source_of

package = pytest.importorskip("gguf", reason="the package gguf is not installed (pip install 'kvlab[gguf]')")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where conversions go."""
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def unpermuted(weight, heads):
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


def test_an_unquantized_file_is_the_model_it_was_made_from(tmp_path):
    expected, _ = made.write(tmp_path / "x.gguf")
    model, tokenizer = kvlab.load(tmp_path / "x.gguf", device="cpu")
    ids = torch.randint(4, len(made.TOKENS), (2, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(
            model.state_dict()["model.norm.weight"], expected.state_dict()["model.norm.weight"]
        )
        assert torch.allclose(model(ids).logits, expected(ids).logits, atol=1e-5)
    assert model.config.tie_word_embeddings and model.config.max_position_embeddings == 128
    assert model.config.rope_parameters["rope_theta"] == made.THETA
    assert not hasattr(model.config, "quantization_config")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.model_max_length == 128
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == (
        "<|im_start|>a<|im_end|>"
    )


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_blocks_become_the_numbers_that_they_stand_for(tmp_path, kind):
    """Bit by bit, by the package gguf, W_q and W_k in transformers' order of rows."""
    _, written = made.write(tmp_path / "x.gguf", kind)
    weights = kvlab.load(tmp_path / "x.gguf", device="cpu")[0].state_dict()
    for name, key, heads in (
        ("token_embd.weight", "model.embed_tokens.weight", 0),
        ("blk.1.attn_q.weight", "model.layers.1.self_attn.q_proj.weight", made.HEADS),
        ("blk.0.attn_k.weight", "model.layers.0.self_attn.k_proj.weight", made.KV_HEADS),
        ("blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj.weight", 0),
    ):
        decoded = package.dequantize(written[name], package.GGMLQuantizationType[kind])
        expected = torch.from_numpy(decoded.astype("float32"))
        assert torch.equal(weights[key], unpermuted(expected, heads) if heads else expected), name
    assert weights["model.embed_tokens.weight"].dtype == torch.float32
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])


def test_every_text_comes_back_and_digits_stand_alone(tmp_path):
    made.write(tmp_path / "x.gguf")
    _, tokenizer = kvlab.load(tmp_path / "x.gguf", device="cpu")
    for text in ("the  7 sails\n\n12. don't", " é 日本\t!", "<|im_start|>x<file_sep>"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("a  7\n\n1<file_sep>").input_ids)
    assert pieces == ["a", "ĠĠ", "7", "ĊĊ", "1", "<file_sep>"]


@pytest.mark.parametrize("pre", ["llama-bpe", "tekken", "pixtral"])
@pytest.mark.parametrize("begins", [True, False, None])
def test_words_are_taken_whole_and_texts_begin_where_llama_cpp_does_so(tmp_path, pre, begins, monkeypatch):
    monkeypatch.setattr(made, "TOKENS", [*made.TOKENS[:-1], "Ġthefoo"])  # no merge makes it
    monkeypatch.setattr(made, "MERGES", made.MERGES[:4])
    monkeypatch.setattr(package.GGUFWriter, "add_add_bos_token", lambda *_: None)
    said = [] if begins is None else [("add_bool", "tokenizer.ggml.add_bos_token", begins)]
    made.write(tmp_path / "x.gguf", pre=pre, more=said)
    _, tokenizer = kvlab.load(tmp_path / "x.gguf", device="cpu")
    found = tokenizer.convert_ids_to_tokens(tokenizer("a thefoo").input_ids)
    assert found == ["<|im_start|>", "a", "Ġthefoo"][begins is False :]


@pytest.mark.parametrize("token", ["<｜User｜>", "    ", "<file_sep>"])
@pytest.mark.parametrize("kind", [3, 4, 1])
def test_a_token_taken_whole_is_itself_in_a_text_or_the_file_is_refused(tmp_path, kind, token, monkeypatch):
    """As those of DeepSeek's files, whose bars are no bytes of the alphabet, and the blanks of GPT-NeoX."""
    monkeypatch.setattr(made, "TOKENS", [*made.CONTROL[:3], *made.TOKENS[4:-1], token])
    monkeypatch.setattr(made, "MERGES", made.MERGES[:4])
    kinds = [3] * 3 + [1] * (len(made.TOKENS) - 4) + [kind]
    write = package.GGUFWriter.add_token_types
    monkeypatch.setattr(package.GGUFWriter, "add_token_types", lambda self, _: write(self, kinds))
    made.write(tmp_path / "x.gguf")
    if kind == 1 or token == "<file_sep>":
        _, tokenizer = kvlab.load(tmp_path / "x.gguf", device="cpu")
        assert kind == 1 or tokenizer(f"a{token}b").input_ids[1] == len(kinds) - 1
    else:
        with pytest.raises(ValueError, match=f"would cut its token '{token}' into pieces"):
            kvlab.load(tmp_path / "x.gguf", device="cpu")


def test_a_text_ends_at_each_end_that_a_file_names(tmp_path, monkeypatch):
    made.write(tmp_path / "x.gguf", more=[("add_eot_token_id", 3), ("add_eom_token_id", 2)])
    model, _ = kvlab.load(tmp_path / "x.gguf", device="cpu")
    assert model.generation_config.eos_token_id == [2, 3]
    monkeypatch.setattr(package.GGUFWriter, "add_eos_token_id", lambda *_: None)
    made.write(tmp_path / "y.gguf")
    model, _ = kvlab.load(tmp_path / "y.gguf", device="cpu")
    assert model.generation_config.eos_token_id is None, "not the default of a configuration"


@pytest.mark.parametrize("end", [10**6, -1, "x"])
def test_an_end_that_is_no_token_is_refused(tmp_path, end):
    write = ("add_string" if end == "x" else "add_int32", "tokenizer.ggml.eot_token_id", end)
    made.write(tmp_path / "x.gguf", more=[write])
    with pytest.raises(ValueError, match=f"it says eot_token_id = {end}, and has {len(made.TOKENS)} tokens"):
        kvlab.load(tmp_path / "x.gguf", device="cpu")


@pytest.mark.parametrize("space", [True, False])
def test_a_space_before_a_text_is_put_there_or_the_file_is_refused(tmp_path, space, monkeypatch):
    monkeypatch.setattr(made, "TOKENS", [*made.TOKENS[:-1], "▁"])
    monkeypatch.setattr(made, "MERGES", made.MERGES[:4])
    scores = [0.0] * len(made.TOKENS)
    more = [("add_tokenizer_model", "llama"), ("add_token_scores", scores), ("add_add_space_prefix", space)]
    made.write(tmp_path / "x.gguf", pre="default", more=more)
    if space:
        _, tokenizer = kvlab.load(tmp_path / "x.gguf", device="cpu")
        assert tokenizer.tokenize("the")[0] == "▁"
    else:
        with pytest.raises(ValueError, match="puts no space before a text, and transformers would"):
            kvlab.load(tmp_path / "x.gguf", device="cpu")


@pytest.mark.parametrize("alignment", [16, 32, 64])
def test_a_file_may_say_how_its_tensors_are_aligned(tmp_path, alignment):
    expected, _ = made.write(tmp_path / "x.gguf", more=[("add_custom_alignment", alignment)])
    model, _ = kvlab.load(tmp_path / "x.gguf", device="cpu")
    assert torch.equal(model.model.embed_tokens.weight, expected.model.embed_tokens.weight)


@pytest.mark.parametrize("name", ["..gguf", "...gguf", "a b\udcff.gguf"])
def test_a_file_may_have_any_name(tmp_path, folder, name):
    expected, _ = made.write(tmp_path / name)
    model, _ = kvlab.load(tmp_path / name, device="cpu")
    assert torch.equal(model.model.embed_tokens.weight, expected.model.embed_tokens.weight)


def test_a_file_is_converted_once_and_again_when_it_or_the_code_changes(tmp_path, monkeypatch, folder):
    """And what was made of it before goes: such a folder takes four bytes per weight."""
    made.write(tmp_path / "y.gguf")
    other = source_of(tmp_path / "y.gguf")
    made.write(tmp_path / "x.gguf")
    first = source_of(tmp_path / "x.gguf")
    convert = gguf.convert
    monkeypatch.setattr(gguf, "convert", None)
    assert source_of(str(tmp_path / "x.gguf")) == first
    monkeypatch.setattr(gguf, "convert", convert)
    made.write(tmp_path / "x.gguf", "Q8_0")
    second = source_of(tmp_path / "x.gguf")
    assert second != first and sorted(folder.iterdir()) == sorted([second.parent, other.parent])
    assert json.loads((second / "config.json").read_text())["num_key_value_heads"] == 2
    older = tmp_path / "gguf.py"
    older.write_text("# other checks")
    monkeypatch.setattr(gguf, "CODE", (str(older), *gguf.CODE[1:]))
    third = source_of(tmp_path / "x.gguf")
    assert third not in (first, second) and sorted(folder.iterdir()) == sorted([third.parent, other.parent])


def one_line(arguments, capsys):
    """The error of a command that is refused."""
    assert cli.main(arguments) == 2
    said = capsys.readouterr().err
    last = said.splitlines()[-1]
    assert last.startswith("kvlab: error: ") and "Traceback" not in said
    return last


def with_number(file, key: str, value: int):
    """Let the file say another whole number."""
    made.write(file)
    content = bytearray(file.read_bytes())
    at = content.index(key.encode()) + len(key) + 4
    content[at : at + 4] = value.to_bytes(4, "little")
    file.write_bytes(content)


def saying(*more):
    """Writes a file that says one more thing."""
    return lambda file: made.write(file, more=[more])


def without_epsilon(file):
    made.write(file)
    file.write_bytes(file.read_bytes().replace(b"norm_rms_epsilon", b"norm_rms_nothing"))


BAD = {
    "how its tokenizer cuts text ('default') is not known": lambda file: made.write(file, pre="default"),
    "how its tokenizer cuts text ('qwen9') is not known": lambda file: made.write(file, pre="qwen9"),
    ".weight is of quantization type Q8_1, which": lambda file: made.write(file, "Q8_1"),
    "this is no GGUF file": lambda file: file.write_bytes(b"no model at all " * 9),
    "the package gguf cannot read it": lambda file: file.write_bytes(b"GGUF no model at all " * 9),
    "architecture nonesuch is not supported": lambda file: made.write(file, architecture="nonesuch"),
    "it is one of 2 parts; join them": saying("add_uint16", "split.count", 2),
    "it is one of [2, 3] parts": saying("add_array", "split.count", [2, 3]),
    "it lacks the list of its tokenizer's tokens": saying("add_string", "tokenizer.ggml.tokens", "one"),
    "it scales its rotary embedding": saying("add_string", "llama.rope.scaling.type", "yarn"),
    "scales its rotary embedding": saying("add_float32", "llama.rope.scaling.factor", 4.0),
    "its rotary embedding": saying("add_float32", "llama.rope.scale_linear", 4.0),  # of 2023
    "it lacks the epsilon of its norms": without_epsilon,
}
SIZES = (
    "block_count", "embedding_length", "feed_forward_length", "attention.head_count_kv", "vocab_size",
    "rope.dimension_count",
)  # fmt: skip


def assert_refused(file, folder) -> None:
    """In one line, and nothing is kept."""
    with pytest.raises(ValueError, match=r"x\.gguf") as error:
        kvlab.load(file)
    assert "\n" not in str(error.value) and list(folder.glob("*")) == []


@pytest.mark.parametrize("seed", range(6))
def test_a_file_that_lacks_a_tensor_is_never_kept(tmp_path, seed, folder):
    dice = random.Random(seed)
    names = [name for name, _ in made.tensors(made.model())]
    made.write(tmp_path / "x.gguf", without=dice.sample(names, dice.randint(1, 3)))
    for _ in range(2):
        assert_refused(tmp_path / "x.gguf", folder)


@pytest.mark.parametrize("seed", range(8))
def test_a_file_whose_numbers_are_not_its_tensors_is_refused_before_room_is_made(tmp_path, seed, folder):
    dice = random.Random(seed)
    key, value = dice.choice(SIZES), dice.choice([1, 2**31, 2**32 - 1, dice.randrange(3, 2**20)])
    with_number(tmp_path / "x.gguf", f"llama.{key}", value)
    assert_refused(tmp_path / "x.gguf", folder)


@pytest.mark.parametrize("seed", range(12))
def test_a_tensor_of_another_type_or_in_another_place_is_one_line(tmp_path, seed, folder):
    """Its numbers would be other bytes. Any type, known or not, for any of the tensors; any offset."""
    dice, file = random.Random(seed), tmp_path / "x.gguf"
    made.write(file)
    name, content = dice.choice(list(made.tensors(made.model())))[0].encode(), bytearray(file.read_bytes())
    at = content.index(name) + len(name)
    at += 4 + 8 * content[at]  # behind the number of dimensions, and these
    if seed % 2:
        content[at : at + 4] = dice.choice([*range(1, 45), dice.randrange(2**32)]).to_bytes(4, "little")
    else:
        content[at + 4 : at + 12] = dice.choice([1, 32, 2**63, 2**64 - 1, 32 * 77]).to_bytes(8, "little")
    file.write_bytes(content)
    assert_refused(file, folder)


@pytest.mark.parametrize("why", BAD)
def test_what_cannot_be_read_is_one_line_and_leaves_nothing(tmp_path, why, capsys, folder):
    BAD[why](tmp_path / "x.gguf")
    assert why in one_line(["doctor", "--model", str(tmp_path / "x.gguf")], capsys)
    assert list(folder.glob("*")) == []


def test_channels_that_a_model_would_not_rotate(tmp_path):
    """Of Llama's files transformers reads how many are rotated, of StableLM's not."""
    made.write(tmp_path / "x.gguf", more=[("add_uint32", "llama.rope.dimension_count", 8)])
    reader = gguf.package().GGUFReader(tmp_path / "x.gguf")
    with pytest.raises(
        ValueError, match=r"it rotates 8 channels of a head, and a LlamaForCausalLM rotates 16"
    ):
        gguf._check_positions(made.model(), reader, tmp_path / "x.gguf")


def test_a_file_that_is_cut_off_or_not_there(tmp_path, capsys, folder):
    made.write(tmp_path / "x.gguf")
    content = (tmp_path / "x.gguf").read_bytes()
    (tmp_path / "x.gguf").write_bytes(content[: len(content) // 2])
    assert "it is damaged, or was cut off" in one_line(
        ["doctor", "--model", str(tmp_path / "x.gguf")], capsys
    )
    assert list(folder.glob("*")) == []
    assert "there is no file" in one_line(["doctor", "--model", str(tmp_path / "y.gguf")], capsys)
