"""The options of speculative decoding: what they mean, and what is refused."""

import argparse

import pytest

from quire.config import EngineConfig
from quire.config.flags import Parser, add_flags, from_args
from quire.config.speculation import OTHER_KEYS, OTHER_METHODS, Speculation, read_speculation
from quire.errors import ConfigError


def flags(*words: str) -> EngineConfig:
    parser = Parser(prog="quire")
    add_flags(parser, EngineConfig)
    return from_args(EngineConfig, parser.parse_args(words))


def test_nothing_is_guessed_unless_asked_for():
    assert EngineConfig().speculative.speculation is None


def test_the_json_and_the_short_flags_say_the_same():
    expected = Speculation("ngram", 6)
    given = {"method": "ngram", "num_speculative_tokens": 6}
    assert EngineConfig.from_kwargs(speculative_config=given).speculative.speculation == expected
    assert flags("--spec-method", "ngram", "--spec-tokens", "6").speculative.speculation == expected
    for name in ("--speculative-config", "-sc"):
        found = flags(name, '{"method": "ngram_gpu", "num-speculative-tokens": 6}')
        assert found.speculative.speculation == expected


def test_a_single_lookup_size_counts_for_both():
    for key in ("prompt_lookup_min", "prompt_lookup_max"):
        found = read_speculation({"method": "ngram", key: 3})
        assert (found.lookup_min, found.lookup_max) == (3, 3)


def test_a_draft_model_guesses_three_tokens():
    found = flags("--spec-method", "draft_model", "--spec-model", "small").speculative.speculation
    assert found == Speculation("draft_model", 3, "small")


def test_suffix_decoding_guesses_as_far_as_it_compares():
    expected = Speculation("suffix", 24)
    assert read_speculation({"method": "suffix"}) == expected
    given = {
        "method": "suffix",
        "suffix_decoding_max_tree_depth": 12,
        "suffix_decoding_max_cached_requests": 0,
        "suffix_decoding_max_spec_factor": 2,
        "suffix_decoding_min_token_prob": 0.5,
    }
    found = read_speculation(given)
    assert found == Speculation(
        "suffix", 12, max_tree_depth=12, max_cached_requests=0, max_spec_factor=2.0, min_token_prob=0.5
    )


SYNTHETIC = {"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic"}


def test_synthetic_acceptance_is_a_chance_per_place():
    found = read_speculation(SYNTHETIC | {"synthetic_acceptance_rates": [0.8, 0.4, 0]})
    assert found.chances == (0.8, 0.5, 0.0)
    chances = read_speculation(SYNTHETIC | {"synthetic_acceptance_length": 2.952}).chances
    assert chances == pytest.approx([0.8] * 3)
    assert read_speculation({"method": "ngram", "rejection_sample_method": "standard"}).chances == ()


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 0}, "max_tree_depth must be a whole number from 1"),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": -1}, "max_cached_requests must be"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "min_token_prob must be a number from 0 to 1"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": float("nan")}, "max_spec_factor must be a number"),
        ({"method": "draft_model"}, "the method draft_model needs a model"),
        ({"method": "draft_model", "model": 5}, "model must be text"),
        ({"method": "ngram", "model": "small"}, "model is for the method draft_model, not for ngram"),
        ({"method": "suffix", "prompt_lookup_min": 2}, "prompt_lookup_min is for the method ngram, not for suffix"),
        ({"method": "ngram", "suffix_decoding_max_tree_depth": 2}, "is for the method suffix, not for ngram"),
        ({}, "needs a method"),
        ({"method": "guess"}, "needs a method"),
        ({"method": ["ngram"]}, "needs a method"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens must be a whole number from 1"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": 129}, "to 128"),
        ({"method": "ngram", "num_speculative_token": 3}, "did you mean num_speculative_tokens"),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 2}, "is larger than"),
        ({"method": "ngram", "prompt_lookup_max": "5"}, "prompt_lookup_max must be"),
        ({"method": "ngram", "num_speculative_tokens_per_batch_size": 5}, "must be a list"),
        ({"method": "ngram", "num_speculative_tokens_per_batch_size": [[2, 4, 1]]}, "must begin at 1"),
        ({"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 4, 3], [4, 8, 1]]}, "without overlaps"),
        (SYNTHETIC, "needs either synthetic_acceptance_rates or"),
        (SYNTHETIC | {"synthetic_acceptance_rates": [0.5]}, "must be 3 numbers from 0 to 1"),
        (SYNTHETIC | {"synthetic_acceptance_rates": [0.5, 0.6, 0.1]}, "must not go up"),
        (SYNTHETIC | {"synthetic_acceptance_length": 4.5}, "must be a number from 1 to 4"),
        ({"method": "ngram", "synthetic_acceptance_length": 2}, "synthetic acceptance needs"),
        ({"method": "ngram", "rejection_sample_method": "block"}, "is standard or synthetic, not 'block'"),
        (SYNTHETIC | {"method": "suffix", "synthetic_acceptance_length": 2}, "needs the method ngram"),
        *(({"method": method}, f"the method {method} is not supported") for method in OTHER_METHODS),
        *(({"method": "ngram", key: 1}, f"{key} is not supported") for key in OTHER_KEYS),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused_by_name(settings, words):
    with pytest.raises(ConfigError, match=words):
        EngineConfig.from_kwargs(speculative_config=settings)


def test_json_and_short_flags_together_are_refused():
    with pytest.raises(ConfigError, match="leave out --spec-method"):
        EngineConfig.from_kwargs(speculative_config={"method": "ngram"}, spec_tokens=3)


@pytest.mark.parametrize("text", ["ngram", "[1]", "{", '{"method": ' * 5000])
def test_what_is_no_json_object_is_refused(text):
    with pytest.raises((ConfigError, argparse.ArgumentError), match="JSON object"):
        flags("--speculative-config", text)
