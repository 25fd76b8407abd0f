"""Folders with a tokenizer.model only, beside the `sentencepiece` package, and files that mean harm."""

import io
import json
import shutil
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.errors import BadModelFileError, ModelError, UnsupportedModelError
from quire.frontend.sentencepiece_tokenizer import build
from quire.frontend.tokenizer import Tokenizer

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "def add(a, b):  return a + b",
    "Die Größe zählt, aber nicht immer: 12345 Äpfel.",
    "a  b   c    d",
] * 20


def train(**options: object) -> bytes:
    written = io.BytesIO()
    common = {"model_type": "bpe", "vocab_size": 330, "byte_fallback": True, "normalization_rule_name": "identity"}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=written,
        minloglevel=2,
        hard_vocab_limit=False,
        **{**common, "remove_extra_whitespaces": False, **options},
    )
    return written.getvalue()


@pytest.fixture(scope="module")
def model() -> bytes:
    return train()


def folder_of(raw: bytes, folder: Path, **config: object) -> Path:
    (folder / "tokenizer.model").write_bytes(raw)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_dummy_prefix": False},
        {"remove_extra_whitespaces": True},
        {"user_defined_symbols": ["<|im_start|>", "▁▁"]},
        {"byte_fallback": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("legacy", [True, False])
def test_texts_become_the_ids_that_sentencepiece_gives(options: dict, legacy: bool, tmp_path: Path) -> None:
    raw = train(**options)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=raw)
    ours = Tokenizer.from_path(folder_of(raw, tmp_path, legacy=legacy))
    for text in [*SENTENCES[:4], "Hello, wörld", "  two before", "after  ", "漢字 🙂", "x\ny\t"]:
        if not legacy and text.startswith(" "):
            continue  # transformers' newer rule: no second space
        ids = theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert ours.encode(text) == [theirs.bos_id(), *ids]
        if theirs.unk_id() not in ids:
            assert ours.decode(ids) == theirs.decode(ids), text


def test_special_tokens_are_those_of_the_model_and_of_its_config(model: bytes, tmp_path: Path) -> None:
    folder = folder_of(model, tmp_path, add_bos_token=False, add_eos_token=True, chat_template="{{ messages }}")
    ours = Tokenizer.from_path(folder)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert ours.encode("a") == [*theirs.encode("a"), theirs.eos_id()]
    assert ours.special_tokens["bos_token"] == "<s>" and ours.eos_token_ids == {theirs.eos_id()}
    assert ours.chat_template == "{{ messages }}" and ours.vocab_size == theirs.vocab_size()
    assert Tokenizer.from_path(folder / "tokenizer.model").vocab_size == ours.vocab_size


def test_tokens_added_later_get_their_ids(model: bytes, tmp_path: Path) -> None:
    folder = folder_of(model, tmp_path, eos_token="<|im_end|>")
    size = sentencepiece.SentencePieceProcessor(model_proto=model).vocab_size()
    added = {"<|im_end|>": size + 1, "<|im_start|>": size, "<far>": size + 100, "<bad>": "x"}
    (folder / "added_tokens.json").write_text(json.dumps(added))
    ours = Tokenizer.from_path(folder)
    assert ours.encode("<|im_start|>a<|im_end|>", False)[0::2][-1] == size + 1
    assert ours.token_id("<|im_start|>") == size and ours.is_special(size + 1) and ours.vocab_size == size + 2


def test_tokenizer_json_goes_first(model: bytes, tmp_path: Path) -> None:
    Tokenizer.from_path(folder_of(model, tmp_path)).backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer.model").write_bytes(b"never read")
    assert Tokenizer.from_path(tmp_path).encode("a")


@pytest.mark.parametrize(
    "options",
    [{"model_type": "unigram"}, {"normalization_rule_name": "nmt_nfkc"}, {"escape_whitespaces": False}],
    ids=str,
)
def test_other_kinds_of_models_are_refused_in_a_sentence(options: dict, tmp_path: Path) -> None:
    try:
        raw = train(**options)
    except (OSError, RuntimeError):
        pytest.skip("this sentencepiece cannot train it")
    with pytest.raises(
        UnsupportedModelError, match="tokenizer.model of .* cannot be used.*name another with --tokenizer"
    ):
        Tokenizer.from_path(folder_of(raw, tmp_path))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff" * 20,
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"\x0b",
        b"{}",
        b"\x0a\x05\x0a\x01",
        b"\x0a\x03\x0a\x01\xff",
    ],
)
def test_what_is_no_model_is_refused_in_a_sentence(raw: bytes, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="tokenizer.model of .* cannot be used") as caught:
        Tokenizer.from_path(folder_of(raw, tmp_path))
    assert "\n" not in str(caught.value)


def test_every_truncation_is_refused_or_a_smaller_model(model: bytes) -> None:
    for length in range(0, len(model), 37):
        try:
            assert build(model[:length], {}).tokenizer.get_vocab_size() > 0
        except (BadModelFileError, UnsupportedModelError):
            pass


@settings(max_examples=150, deadline=3000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_bytes_are_refused_or_give_a_tokenizer(data: st.DataObject, model: bytes) -> None:
    content = bytearray(model)
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        tokenizer = build(bytes(content), {}).tokenizer
    except (BadModelFileError, UnsupportedModelError):
        return
    assert isinstance(tokenizer.encode("The quick brown fox").ids, list)


def test_a_folder_without_any_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="neither tokenizer.json nor tokenizer.model"):
        Tokenizer.from_path(tmp_path)


def test_a_model_of_such_a_folder_answers(tmp_path: Path, tiny_llama: Path) -> None:
    from quire import LLM, SamplingParams

    folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    folder_of(train(vocab_size=120, byte_fallback=False), folder)
    with LLM(str(folder), dtype="float32", max_model_len=64, kv_cache_memory_bytes=16 << 20, num_threads=1) as llm:
        output = llm.generate("The", SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) >= 1
