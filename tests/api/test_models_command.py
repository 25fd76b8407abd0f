"""`quire models` and docs/models.md: everything the library has is listed."""

import json

from quire import registry
from quire.api.cli import run
from tests.models.report import PAGE

LISTED = registry.literals("quire.models", "ARCHITECTURES").values()
ARCHITECTURES = {architecture for names in LISTED for architecture in names}


def test_every_architecture_is_listed_with_its_file_cache_and_proof(capsys):
    assert run(["models", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    models = {model["architecture"]: model for model in told["models"]}
    assert models.keys() == ARCHITECTURES
    assert models["LlamaForCausalLM"]["file"] == "models/llama.py" and models["LlamaForCausalLM"]["gguf"]
    assert models["LlamaForCausalLM"]["kv"] == ["full"] and models["Qwen3ForCausalLM"]["kv"] == ["full", "sliding"]
    assert all(model["parity"] < 1e-4 for model in models.values() if model["parity"] is not None)
    assert "transformers" in told["fallback"]


def test_people_get_a_table_and_a_word_on_the_fallback(capsys):
    assert run(["models"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["architecture", "file", "KV", "cache", "GGUF", "parity"]
    assert {row.split()[0] for row in rows if row.count("models/")} == ARCHITECTURES
    assert "fallback" in rows[-1]


def test_the_page_has_every_architecture_with_a_measured_error():
    """If not: python -m tests.models.report"""
    cells = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    errors = {row[0].removeprefix("| "): row[-1].removesuffix(" |") for row in cells}
    assert not ARCHITECTURES - errors.keys()
    assert all(float(errors[architecture]) < 1e-4 for architecture in ARCHITECTURES)
