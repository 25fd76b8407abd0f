"""The programs of examples/ run as they are, each in a process of its own, and say what they promise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SAYS = {
    "async_streaming.py": "'The capital of France is' -> ' Paris",
    "beam_search.py": "The capital of France is Paris",
    "chat.py": "The capital of France is Paris",
    "data_files.py": "The capital of France is Paris",
    "logits_processor.py": "' sea sea sea sea sea sea'",
    "metrics.py": "quire:generation_tokens = 32",
    "offline.py": "'The capital of France is' -> ' Paris",
    "own_flags.py": "- ",
    "prefix_caching.py": "forgotten: True\n0 of ",
    "server.py": "The capital of France is Paris",
    "sleep.py": "the answer is the same: True",
    "structured_outputs.py": "age next year:",
}
ARGUMENTS = {"own_flags.py": ["--topic", "trains", "--max-model-len", "256"]}


def test_every_example_is_run():
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs(name, smollm2):
    run = [sys.executable, str(EXAMPLES / name), *ARGUMENTS.get(name, [])]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "80"})
    assert done.returncode == 0, done.stderr
    assert SAYS[name] in done.stdout
