import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.frontend.stop import StopStream, StopStrings


def run(stream: StopStream, pieces: list[str]) -> str:
    text = "".join(stream.feed(piece) for piece in pieces)
    return text + stream.flush()


def first_match(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The plain definition: the first character at which a string is complete, and the longest string there."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return end - len(longest), longest
    return None


def cut(text: str, positions: list[int]) -> list[str]:
    places = [0, *sorted(position % (len(text) + 1) for position in positions), len(text)]
    return [text[start:end] for start, end in zip(places, places[1:], strict=False)]


alphabet = st.text("ab.\n", max_size=40)


@given(
    text=alphabet,
    stops=st.lists(st.text("ab.\n", min_size=1, max_size=5), max_size=4),
    positions=st.lists(st.integers(0, 100), max_size=8),
    include=st.booleans(),
)
def test_any_cutting_gives_the_plain_definitions_result(
    text: str, stops: list[str], positions: list[int], include: bool
) -> None:
    stream = StopStream(stops, include_stop=include)
    shown = run(stream, cut(text, positions))
    match = first_match(text, stops)
    if match is None:
        assert (shown, stream.matched) == (text, None)
    else:
        start, stop = match
        assert (shown, stream.matched) == (text[: start + len(stop) * include], stop)


@given(text=alphabet, stops=st.lists(st.text("ab.\n", min_size=1, max_size=5), min_size=1, max_size=4))
def test_only_what_can_still_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    stream = StopStream(stops)
    shown = ""
    for idx, char in enumerate(text):
        shown += stream.feed(char)
        if stream.matched:
            return
        seen = text[: idx + 1]
        beginnings = [stop[:length] for stop in stops for length in range(len(stop) + 1)]
        begun = max(len(beginning) for beginning in beginnings if seen.endswith(beginning))
        assert shown == seen[: len(seen) - begun]


def test_a_stop_string_across_tokens_is_found() -> None:
    stream = StopStream(["\nUser:"])
    assert [stream.feed(piece) for piece in ["Hi", "\n", "Us", "er", ":", " more"]] == ["Hi", "", "", "", "", ""]
    assert stream.matched == "\nUser:"


def test_overlapping_beginnings_do_not_hide_a_match() -> None:
    stream = StopStream(["aab"])
    assert run(stream, ["a", "a", "a", "b", "c"]) == "a"
    assert stream.matched == "aab"


def test_a_false_start_is_released() -> None:
    stream = StopStream(["###"])
    assert stream.feed("a##") == "a"
    assert stream.feed("b") == "##b"
    assert stream.feed("#") == "" and stream.flush() == "#"
    assert stream.matched is None


def test_the_stop_string_can_be_kept() -> None:
    stream = StopStream(["END"], include_stop=True)
    assert run(stream, ["the E", "ND of it"]) == "the END"


def test_without_stop_strings_text_passes_at_once() -> None:
    assert StopStream([]).feed("anything") == "anything"


def test_strings_complete_within_min_tokens_do_not_stop() -> None:
    stream = StopStream(["ab"], min_tokens=3)
    shown = [stream.feed(text, num_tokens) for num_tokens, text in enumerate(["ab", "ab", "a", "b", "x"], start=1)]
    assert "".join(shown) == "abab" and stream.matched == "ab"  # the match that ends in the fourth token


def test_one_compiled_set_serves_many_choices() -> None:
    compiled = StopStrings(["x", "yy"])
    one, other = StopStream(compiled), StopStream(compiled)
    one.feed("y")
    assert other.feed("ax") == "a" and one.matched is None and one.feed("y") == "" and one.matched == "yy"


@pytest.mark.parametrize("num_strings", [1, 32])
def test_the_time_per_character_does_not_grow_with_the_strings(num_strings: int) -> None:
    """The worst text for a search that starts over: every string is begun everywhere and never complete."""

    def cpu_s(length: int) -> float:
        stream = StopStream(["a" * length + chr(0x4E00 + idx) for idx in range(num_strings)])
        pieces = ["aaaa"] * 5_000
        start = time.process_time()
        run(stream, pieces)
        return time.process_time() - start

    short, long = min(cpu_s(4) for _ in range(3)), min(cpu_s(1000) for _ in range(3))
    assert long < 5 * short + 0.05
