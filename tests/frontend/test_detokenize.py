import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from quire.frontend.detokenize import Detokenizer
from quire.frontend.tokenizer import Tokenizer
from tests.frontend.corpus import texts


@pytest.fixture(scope="module")
def llama(vocab_dir: Path) -> Tokenizer:
    return Tokenizer.from_path(vocab_dir / "ggml-vocab-llama-spm.gguf")


@pytest.fixture(scope="module")
def wordpiece() -> Tokenizer:
    """A decoder that puts spaces between tokens: none of the kinds whose text is their bytes."""
    words = ["[UNK]", "hello", "world", "##ing", "##s", ",", ".", "'", "t", "don", "日", "##本", "é"]
    backend = Backend(models.WordPiece({word: idx for idx, word in enumerate(words)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([AddedToken("[SEP]", special=True), AddedToken("[CLS]", special=True)])
    tokenizer = Tokenizer(backend)
    assert tokenizer.pieces is None
    return tokenizer


@pytest.fixture(scope="module")
def metaspace() -> Tokenizer:
    """Another: the first token loses its leading space, and bytes stand alone."""
    words = ["▁hello", "▁", "world", "▁▁", "x", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Backend(models.BPE({word: idx for idx, word in enumerate(words)}, []))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer = Tokenizer(backend)
    assert tokenizer.pieces is None
    return tokenizer


def deltas(tokenizer: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [*(detokenizer.feed([token_id]) for token_id in ids), detokenizer.flush()]


def random_ids(tokenizer: Tokenizer, seed: int, count: int) -> list[int]:
    return [random.Random(seed * 1000 + idx).randrange(tokenizer.vocab_size) for idx in range(count)]


@pytest.mark.parametrize("skip", [True, False])
def test_deltas_of_random_byte_level_tokens_add_up_to_the_full_decode(smollm2: Tokenizer, skip: bool) -> None:
    for seed in range(100):
        ids = random_ids(smollm2, seed, 60)
        truth = smollm2.backend.decode(ids, skip_special_tokens=skip)  # Hugging Face's, of all tokens at once
        assert "".join(deltas(smollm2, ids, skip_special_tokens=skip)) == truth == smollm2.decode(ids, skip)


@pytest.fixture(scope="module")
def all_bytes() -> Tokenizer:
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: idx for idx, char in enumerate(alphabet)}, []))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


@given(data=st.binary(max_size=24))
def test_any_bytes_come_out_as_the_full_decode_has_them(all_bytes: Tokenizer, data: bytes) -> None:
    """Invalid UTF-8 of every shape, byte by byte."""
    id_of = {all_bytes.token_bytes(token_id): token_id for token_id in range(256)}
    ids = [id_of[bytes([byte])] for byte in data]
    assert "".join(deltas(all_bytes, ids)) == all_bytes.backend.decode(ids) == data.decode(errors="replace")


@pytest.mark.parametrize("name", ["smollm2", "llama"])
def test_text_in_every_script_streams_without_a_broken_character(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    for text in texts():
        ids = tokenizer.encode_as_text(text)
        pieces = deltas(tokenizer, ids)
        assert "".join(pieces) == text == tokenizer.backend.decode(ids, skip_special_tokens=True)
        assert not any("\ufffd" in piece for piece in pieces)


def test_an_emoji_of_four_tokens_appears_whole(llama: Tokenizer) -> None:
    ids = llama.encode_as_text("a🦙b")
    assert len(ids) > 5
    assert [piece for piece in deltas(llama, ids) if piece] == ["a", "🦙", "b"]


def test_random_sentencepiece_tokens_stream_as_they_decode(llama: Tokenizer) -> None:
    for seed in range(100):
        ids = random_ids(llama, seed, 60)
        assert "".join(deltas(llama, ids)) == llama.decode(ids)
        # Without byte tokens: Hugging Face replaces a whole run of them for one bad byte.
        valid = [token_id for token_id in ids if not 3 <= token_id < 259]
        assert llama.decode(valid) == llama.backend.decode(valid)


def test_bytes_that_never_become_a_character_are_not_lost(smollm2: Tokenizer, llama: Tokenizer) -> None:
    half_emoji = [llama.token_id("<0xF0>"), llama.token_id("<0x9F>")]
    assert deltas(llama, half_emoji) == ["", "", "\ufffd\ufffd"] and llama.backend.decode(half_emoji) == "\ufffd\ufffd"
    half_emoji = smollm2.encode("🦙")[:-1]
    assert "".join(deltas(smollm2, half_emoji)) == smollm2.backend.decode(half_emoji)
    assert "\ufffd" in deltas(smollm2, half_emoji)[-1]


def test_a_leading_space_is_dropped_at_the_start_of_a_text_and_kept_in_a_continuation(llama: Tokenizer) -> None:
    ids = llama.encode_as_text("Paris")
    assert "".join(deltas(llama, ids)) == "Paris"
    continuation = Detokenizer(llama, prompt_ids=llama.encode("The capital is"))
    assert continuation.feed(ids) == " Paris"
    after_bos = Detokenizer(llama, prompt_ids=[llama.bos_token_id])
    assert after_bos.feed(ids) == "Paris"


@pytest.mark.parametrize("name", ["wordpiece", "metaspace"])
@pytest.mark.parametrize("skip", [True, False])
def test_other_decoders_stream_as_they_decode(name: str, skip: bool, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    for seed in range(50):
        ids = random_ids(tokenizer, seed, 40)
        if name == "metaspace":
            ids = [token_id if token_id < 5 else 5 + ord("~") - token_id % 90 for token_id in ids]  # ASCII bytes
            ids += [5 + byte for byte in "é漢🦙".encode()]
        truth = tokenizer.backend.decode(ids, skip_special_tokens=skip)
        assert "".join(deltas(tokenizer, ids, skip_special_tokens=skip)) == truth


def test_bad_bytes_do_not_hold_other_decoders_back_for_ever(metaspace: Tokenizer) -> None:
    pieces = deltas(metaspace, [5 + 0xFF] * 1000)
    assert "".join(pieces) == "\ufffd" * 1000
    assert all(len(piece) <= 8 for piece in pieces)


def test_special_tokens_can_be_shown_without_spaces_between_them(wordpiece: Tokenizer) -> None:
    ids = [wordpiece.token_id(token) for token in ("hello", "[SEP]", "[CLS]", "world")]
    shown = "".join(deltas(wordpiece, ids, skip_special_tokens=False))
    assert shown == "hello [SEP] [CLS] world"
    tight = "".join(deltas(wordpiece, ids, skip_special_tokens=False, spaces_between_special_tokens=False))
    assert tight == "hello [SEP][CLS] world"


@settings(max_examples=30)
@given(cut=st.integers(0, 80), seed=st.integers(0, 50))
def test_a_new_detokenizer_fed_with_the_old_tokens_goes_on_where_the_old_one_was(
    smollm2: Tokenizer, cut: int, seed: int
) -> None:
    ids = random_ids(smollm2, seed, 80)
    old = Detokenizer(smollm2)
    shown = "".join(old.feed([token_id]) for token_id in ids[:cut])
    replayed = Detokenizer(smollm2)
    assert replayed.feed(ids[:cut]) == shown
    assert [replayed.feed(ids[cut:]), replayed.flush()] == [old.feed(ids[cut:]), old.flush()]


@pytest.mark.parametrize("name", ["smollm2", "llama", "wordpiece"])
def test_the_ten_thousandth_token_takes_as_long_as_the_hundredth(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    ids = random_ids(tokenizer, 7, 10_200)
    Detokenizer(tokenizer).feed(ids)  # fills the table of pieces

    def cpu_s(detokenizer: Detokenizer, some: list[int]) -> float:
        start = time.process_time()
        for token_id in some:
            detokenizer.feed([token_id])
        return time.process_time() - start

    def measure() -> tuple[float, float]:
        detokenizer = Detokenizer(tokenizer)
        detokenizer.feed(ids[:100])
        early = cpu_s(detokenizer, ids[100:200])
        detokenizer.feed(ids[200:10_000])
        return early, cpu_s(detokenizer, ids[10_000:10_100])

    early, late = map(min, zip(*(measure() for _ in range(7)), strict=True))
    assert late < 1.5 * early + 1e-4


def test_the_text_so_far_is_always_the_beginning_of_the_final_text(smollm2: Tokenizer) -> None:
    ids = smollm2.encode_as_text("".join(texts()))
    final, so_far = smollm2.decode(ids), ""
    for piece in deltas(smollm2, ids):
        so_far += piece
        assert final.startswith(so_far[-200:], max(0, len(so_far) - 200))
    assert so_far == final
