from pathlib import Path

import pytest

from quire.checkpoint.gguf import GGUFFile
from quire.errors import BadModelFileError, UnsupportedModelError
from quire.frontend import gguf_tokenizer
from quire.frontend.tokenizer import Tokenizer

CLAIMED = """
    command-r deepseek-coder deepseek-llm falcon gemma-4 gpt-2 llama-bpe llama-spm mpt phi-3
    qwen2 qwen35 refact starcoder
""".split()
CONTROL = gguf_tokenizer.CONTROL
USER_DEFINED = gguf_tokenizer.USER_DEFINED


def expected(vocab_dir: Path, name: str) -> list[tuple[str, list[int]]]:
    texts = (vocab_dir / f"ggml-vocab-{name}.gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = (vocab_dir / f"ggml-vocab-{name}.gguf.out").read_text().removesuffix("\n").split("\n")
    if texts[-1] == "" and len(texts) == len(lines) + 1:  # some files end with the separator
        texts.pop()
    return [(text, list(map(int, line.split()))) for text, line in zip(texts, lines, strict=True)]


@pytest.mark.parametrize("name", CLAIMED)
def test_ids_equal_the_expected_files(vocab_dir: Path, name: str) -> None:
    tokenizer = Tokenizer.from_path(vocab_dir / f"ggml-vocab-{name}.gguf")
    cases = expected(vocab_dir, name)
    assert len(cases) >= 46
    for text, ids in cases:
        assert tokenizer.encode_as_text(text) == ids, text
        if name not in ("mpt", "qwen2", "command-r"):  # these compose characters, so their text may change
            assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(("name", "kind"), [("bert-bge", "bert"), ("nomic-bert-moe", "t5")])
def test_a_kind_we_do_not_have_is_named(vocab_dir: Path, name: str, kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match=kind):
        Tokenizer.from_path(vocab_dir / f"ggml-vocab-{name}.gguf")


def test_bos_is_added_as_the_file_says(vocab_dir: Path) -> None:
    def first_ids(name: str) -> list[int]:
        return Tokenizer.from_path(vocab_dir / f"ggml-vocab-{name}.gguf").encode("hi")[:1]

    assert first_ids("deepseek-coder") == [32013]  # add_bos_token is true
    assert first_ids("llama-spm") == [1]
    assert first_ids("llama-bpe") == [128000]  # the file does not say; Llama 3 does
    assert first_ids("gpt-2") == [5303]  # "hi" itself


def test_phi_3_swallows_the_line_end_after_its_special_tokens(vocab_dir: Path) -> None:
    phi = Tokenizer.from_path(vocab_dir / "ggml-vocab-phi-3.gguf")
    assert phi.encode("<|user|>\nhi<|end|>\n") == phi.encode("<|user|>hi<|end|>")
    assert phi.encode("<s>\nhi") != phi.encode("<s>hi")


def metadata(**changes: object) -> dict[str, object]:
    """A byte-level vocabulary of ten tokens."""
    tokens = ["a", "b", "c", "ab", "Ġ", "<s>", "</s>", "<tool>", "Ċ", "<|eot_id|>"]
    types = [1, 1, 1, 1, 1, CONTROL, CONTROL, USER_DEFINED, 1, CONTROL]
    fields: dict[str, object] = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": types}
    fields |= {"merges": ["a b"], "bos_token_id": 5, "eos_token_id": 6, **changes}
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items() if value is not None}


def test_bos_and_eos_are_added_when_the_file_says_so() -> None:
    tokenizer = Tokenizer.from_gguf(metadata(add_bos_token=True, add_eos_token=True))
    assert tokenizer.encode("ab") == [5, 3, 6]
    assert tokenizer.encode("ab", add_special_tokens=False) == [3]
    assert Tokenizer.from_gguf(metadata(add_bos_token=False)).encode("ab") == [3]


def test_user_defined_tokens_are_always_matched_and_shown_but_control_tokens_are_not() -> None:
    tokenizer = Tokenizer.from_gguf(metadata())
    assert tokenizer.encode("a<tool></s>") == [0, 7, 6]
    assert 7 in tokenizer.encode_as_text("a<tool>b") and 6 not in tokenizer.encode_as_text("a</s>")
    assert tokenizer.decode([0, 7, 6]) == "a<tool>"
    assert tokenizer.is_special(6) and not tokenizer.is_special(7)


def test_tokens_that_end_a_turn_are_found_beside_eos() -> None:
    assert Tokenizer.from_gguf(metadata()).eos_token_ids == {6, 9}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "no tokenizer"),
        ({"tokens": []}, "empty"),
        ({"tokens": ["a"] * 10}, "twice"),
        ({"tokens": [*"abcdefghi", "x" * 5000]}, "absurdly long"),
        ({"tokens": 7}, "tokens does not hold"),
        ({"token_type": [1]}, "token types"),
        ({"merges": ["a z"]}, "damaged"),
        ({"merges": ["ab"]}, "damaged"),
        ({"model": "llama"}, "scores"),
    ],
)
def test_a_damaged_vocabulary_is_one_sentence(changes: dict[str, object], message: str) -> None:
    with pytest.raises(BadModelFileError, match=message):
        Tokenizer.from_gguf(metadata(**changes))


def test_an_unknown_cutting_rule_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match="no-such-rule"):
        Tokenizer.from_gguf(metadata(pre="no-such-rule"))


def test_special_token_ids_out_of_range_are_ignored() -> None:
    tokenizer = Tokenizer.from_gguf(metadata(bos_token_id=99, eos_token_id=-1, add_bos_token=True))
    assert tokenizer.bos_token_id is None and tokenizer.encode("ab") == [3]


def test_scored_merges_equal_sentencepiece_itself(vocab_dir: Path, tmp_path: Path) -> None:
    """A small SentencePiece model, trained here, tokenizes as our reading of its pieces and scores does."""
    import sentencepiece

    from tests.frontend.corpus import texts

    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(text.replace("\n", " ") for text in texts()), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(tmp_path / "spm"),
        vocab_size=1500,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    truth = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spm.model"))

    def kind(token_id: int) -> int:
        if truth.is_unknown(token_id):
            return gguf_tokenizer.UNKNOWN
        if truth.is_control(token_id):
            return CONTROL
        return gguf_tokenizer.BYTE if truth.is_byte(token_id) else gguf_tokenizer.NORMAL

    ids = range(truth.get_piece_size())
    fields = {
        "model": "llama",
        "tokens": list(map(truth.id_to_piece, ids)),
        "scores": list(map(truth.get_score, ids)),
        "token_type": list(map(kind, ids)),
        "unknown_token_id": truth.unk_id(),
    }
    ours = Tokenizer.from_gguf({f"tokenizer.ggml.{name}": value for name, value in fields.items()})
    for text in texts(seed=1):
        assert ours.encode_as_text(text) == truth.encode(text), text
        assert ours.decode(truth.encode(text)) == text


def test_smollm2_loads_fast(smollm2_path: Path) -> None:
    import time

    def cpu_s() -> float:
        start = time.process_time()
        with GGUFFile(smollm2_path) as file:
            Tokenizer.from_gguf(file.metadata)
        return time.process_time() - start

    assert min(cpu_s() for _ in range(3)) < 0.5  # 0.12 s on an idle core; transformers' way to load it takes seconds
