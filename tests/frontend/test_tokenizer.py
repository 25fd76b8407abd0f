import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from quire.checkpoint.find import ModelFiles
from quire.errors import BadModelFileError, ModelNotFoundError, RequestError
from quire.frontend.tokenizer import Tokenizer
from tests.frontend.corpus import texts


def rules_disagree(text: str) -> bool:
    """Whether the rule SmolLM2's file names ("smollm": numerals apart first) can differ from GPT-2's alone.

    transformers 5 does not read the name and applies GPT-2's. They part at a numeral behind two or more characters of
    white space, and at one that is no ASCII digit behind a space.
    """
    triples = zip(" x" + text, "x" + text, text, strict=False)
    after_space = [(before, char) for before, space, char in triples if space.isspace() and char.isnumeric()]
    return any(before.isspace() or not numeral.isascii() for before, numeral in after_space)


def test_smollm2_ids_equal_those_of_transformers(smollm2: Tokenizer, hf_smollm2) -> None:
    corpus = [text for text in texts() if not rules_disagree(text)]
    assert len(corpus) > 350
    for text in corpus:
        assert smollm2.encode(text) == hf_smollm2.encode(text), text


def test_smollm2_text_equals_that_of_transformers(smollm2: Tokenizer, hf_smollm2) -> None:
    for text in texts():
        ids = smollm2.encode(text)
        assert smollm2.decode(ids) == hf_smollm2.decode(ids, skip_special_tokens=True)
        assert smollm2.decode(ids, skip_special_tokens=False) == hf_smollm2.decode(ids) == text


def test_where_transformers_skips_the_rule_the_file_names_we_follow_the_file(smollm2: Tokenizer, hf_smollm2) -> None:
    """The rule as llama.cpp has it for this name, and as StarCoder's tokenizer.json writes it."""
    truth = Backend.from_str(hf_smollm2._tokenizer.to_str())
    truth.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    disputed = [text for text in texts() if rules_disagree(text)]
    assert any(truth.encode(text).ids != hf_smollm2.encode(text) for text in disputed)
    for text in disputed:
        assert smollm2.encode(text) == truth.encode(text).ids, text


def test_text_of_every_kind_survives_a_round_trip(smollm2: Tokenizer) -> None:
    for text in texts(seed=1):
        assert smollm2.decode(smollm2.encode_as_text(text), skip_special_tokens=False) == text


def test_spellings_of_special_tokens_are_parsed_or_stay_text(smollm2: Tokenizer) -> None:
    im_end = smollm2.token_id("<|im_end|>")
    assert smollm2.encode("a<|im_end|>").count(im_end) == 1
    assert im_end not in smollm2.encode_as_text("a<|im_end|>")
    assert smollm2.decode(smollm2.encode_as_text("a<|im_end|>")) == "a<|im_end|>"
    assert smollm2.decode(smollm2.encode("a<|im_end|>")) == "a"


def test_what_the_gguf_says_about_special_tokens_is_known(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.bos_token_id == 1
    assert smollm2.eos_token_ids == {0, 2}  # <|endoftext|> and <|im_end|>
    assert smollm2.is_special(2) and not smollm2.is_special(19556)
    assert smollm2.special_tokens["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in smollm2.chat_template
    assert smollm2.encode("hi") == smollm2.encode("hi", add_special_tokens=False)  # add_bos_token is false


def test_threads_share_one_tokenizer_with_and_without_parsing(smollm2: Tokenizer) -> None:
    text = "Hello <|im_end|> world " * 20
    parsed, plain = smollm2.encode(text), smollm2.encode_as_text(text)

    def agree(_: int) -> bool:
        ids = smollm2.encode(text), smollm2.encode_as_text(text)
        return ids == (parsed, plain) and smollm2.decode(plain) == text

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(agree, range(200)))


def test_lone_surrogates_are_refused(smollm2: Tokenizer) -> None:
    for encode in (smollm2.encode, smollm2.encode_as_text):
        with pytest.raises(RequestError, match="surrogates"):
            encode("broken \ud83d half")


def test_ids_beyond_the_vocabulary_decode_to_nothing(smollm2: Tokenizer) -> None:
    assert smollm2.decode([19556, 10**6]) == smollm2.decode([19556])
    assert smollm2.token_bytes(10**6) == b""


def test_neither_torch_nor_transformers_is_imported(smollm2_path: Path) -> None:
    code = (
        "import sys; from quire.frontend.tokenizer import Tokenizer\n"
        "from quire.frontend.chat import ChatTemplate, encode_chat\n"
        f"tokenizer = Tokenizer.from_path({str(smollm2_path)!r})\n"
        "encode_chat(tokenizer, ChatTemplate.of(tokenizer), [{'role': 'user', 'content': 'x'}])\n"
        "sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    """A folder as the hub has them, with everything a loader can trip over."""
    backend = Backend(models.BPE({"a": 0, "b": 1, "ab": 2, "Ġ": 3}, [("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 4)])
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}],
        "added_tokens_decoder": {"4": {"content": "<s>", "special": True}, "6": {"content": "<new>", "special": True}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_a_hugging_face_folder_is_read(hf_folder: Path) -> None:
    tokenizer = Tokenizer.from_files(ModelFiles("x", "hf", hf_folder))
    assert tokenizer.encode("abab") == [4, 2, 2]  # BOS by the post-processor; not cut to 2, not padded to 8
    assert tokenizer.encode("abab", add_special_tokens=False) == [2, 2]
    assert tokenizer.eos_token_ids == {5} and tokenizer.bos_token_id == 4
    assert tokenizer.chat_template == "D"
    assert tokenizer.encode("a<new>", add_special_tokens=False) == [0, 6]  # listed in tokenizer_config.json only
    assert tokenizer.vocab_size == 7


def test_a_template_in_its_own_file_comes_first(hf_folder: Path) -> None:
    (hf_folder / "chat_template.jinja").write_text("J", encoding="utf-8")
    assert Tokenizer.from_path(hf_folder).chat_template == "J"


def test_the_tokenizer_option_takes_folders_json_files_and_ggufs(hf_folder: Path, smollm2_path: Path) -> None:
    by_folder, by_file = Tokenizer.from_path(hf_folder), Tokenizer.from_path(hf_folder / "tokenizer.json")
    assert by_folder.encode("ab") == by_file.encode("ab")
    assert Tokenizer.from_path(str(smollm2_path)).vocab_size == 49152


def test_a_folder_without_tokenizer_json_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="--tokenizer"):
        Tokenizer.from_path(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_file_is_one_sentence(hf_folder: Path, name: str, content: bytes) -> None:
    (hf_folder / name).write_bytes(content)
    with pytest.raises(BadModelFileError, match=name):
        Tokenizer.from_path(hf_folder)
