"""What a config says of each layer."""

import pytest

from quire.errors import UnsupportedModelError
from quire.layers.config import DecoderConfig

SIZES = dict(hidden_size=64, num_hidden_layers=5, num_attention_heads=4, vocab_size=256, intermediate_size=96)


def windows(**fields):
    config = DecoderConfig(**SIZES, sliding_window=24, **fields)
    return [config.window(layer_idx) for layer_idx in range(config.num_hidden_layers)]


def test_without_types_or_pattern_every_layer_sees_everything():
    assert windows() == [None] * 5


def test_a_pattern_of_two_lets_every_second_layer_see_everything():
    assert windows(sliding_window_pattern=2) == [24, None, 24, None, 24]


def test_types_win_over_the_pattern():
    types = ["full_attention"] * 4 + ["sliding_attention"]
    assert windows(layer_types=types, sliding_window_pattern=2) == [None, None, None, None, 24]


def test_a_type_of_layers_that_nobody_computes_is_refused():
    with pytest.raises(UnsupportedModelError, match="chunked_attention"):
        windows(layer_types=["chunked_attention"] * 5)
