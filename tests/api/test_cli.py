"""The command line: what it prints, what it exits with, and that --help comes from the options."""

import json
import subprocess
import sys

import pytest

from quire.api.cli import run
from quire.bench import workloads
from quire.registry import names


def quire(*argv: str, stdin: str = "", timeout: float = 120) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "quire", *argv]
    return subprocess.run(command, capture_output=True, text=True, input=stdin, timeout=timeout)


TINY_FLAGS = "--dtype float32 --skip-tokenizer-init --num-threads 1 --kv-cache-memory-bytes 64M".split()


def test_every_command_has_help_from_its_options(capsys):
    for command in names("quire.api.commands"):
        with pytest.raises(SystemExit) as exit:
            run([command, "--help"])
        text = capsys.readouterr().out
        assert exit.value.code == 0
        if command not in ("models", "pull", "list", "rm"):  # no model is run
            assert "--max-model-len N" in text and "default: smollm2" in text


def test_without_a_command_help_is_shown(capsys):
    assert run([]) == 0
    assert "commands:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["nonsense"], 2, "choose from"),
        (["generate", "--dtype", "int1", "x"], 2, "--help"),
        (["generate", "--model", "no-such-model", "x"], 3, "smollm2"),
        (["generate", "--temperature", "nan", "x"], 4, "finite"),
        (["bench", "latency", "--workload", "mixed64"], 2, "stream-128"),
        (["bench", "throughput"], 2, "mixed64"),
        (["info", "no/such-model-anywhere"], 3, "no/such-model-anywhere"),
        (["rm", "../x"], 2, "is no name that `quire list` shows"),
        (["rm"], 2, "MODEL"),
        (["pull"], 2, "MODEL"),
        (["run"], 2, "MODEL"),
    ],
)
def test_errors_are_one_line_and_an_exit_code(argv, code, words, capsys):
    assert run(argv) == code
    captured = capsys.readouterr()
    assert words in captured.err and "Traceback" not in captured.err
    assert captured.err.startswith("quire: ") and captured.err.count("\n") == 1


def test_generate_streams_a_continuation(smollm2):
    flags = "--temperature 0 --max-tokens 8 --max-model-len 512"
    done = quire("generate", *flags.split(), "The capital of France is")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_generate_reads_standard_input(smollm2):
    done = quire("generate", "--temperature", "0", "--max-tokens", "8", stdin="The capital of France is\n")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_run_answers_once_by_the_template(smollm2):
    done = quire("run", "smollm2", "--temperature", "0", "--max-tokens", "30", "What is the capital", "of France?")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout and ">" not in done.stdout


def test_run_takes_what_is_piped_in_before_the_question(smollm2):
    flags = "--executor echo --ignore-eos --max-tokens 60".split()
    done = quire("run", "smollm2", *flags, "--system", "Brief!", "What is this?", stdin="some\ntext\n")
    assert done.returncode == 0, done.stderr
    assert "some\ntext\n\nWhat is this?" in done.stdout and "Brief!" in done.stdout
    done = quire("run", "smollm2", *flags, stdin="only this")
    assert "only this" in done.stdout
    done = quire("run", "smollm2", *flags)
    assert done.returncode == 4 and "there is nothing to answer" in done.stderr


def test_flags_may_stand_between_a_model_and_a_prompt(capsys, monkeypatch):
    from quire.api.cli import parser

    for argv in (["m", "--temperature", "0", "a", "b"], ["--temperature", "0", "m", "a", "b"], ["m", "a", "b"]):
        args = parser(["run", *argv]).parse_args(["run", *argv])
        assert (args.name, args.prompt) == ("m", ["a", "b"])
    argv = ["run", "m", "--max-tokens", "3", "--", "--temperature", "is", "a", "word"]
    assert parser(argv).parse_args(argv).prompt == ["--temperature", "is", "a", "word"]


def test_show_is_another_name_of_info_and_ls_of_list(smollm2, capsys):
    assert run(["show", "smollm2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["architecture"] == "LlamaForCausalLM"
    assert run(["ls"]) == 0
    assert "smollm2" in capsys.readouterr().out


def test_a_prompt_too_long_is_one_line(smollm2):
    done = quire("generate", "--max-model-len", "16", "word " * 100)
    assert done.returncode == 4
    assert "--max-model-len" in done.stderr and "Traceback" not in done.stderr


def test_chat_answers_and_remembers(smollm2):
    typed = "What is the capital of France?\n/reset\n/exit\n"
    done = quire("chat", "smollm2", "--temperature", "0", "--max-tokens", "20", stdin=typed)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout and "(forgotten)" in done.stdout


def test_info_tells_what_fits(smollm2, capsys):
    assert run(["info", "smollm2", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["architecture"] == "LlamaForCausalLM"
    assert facts["num_parameters"] == 134_515_008
    assert facts["kv_bytes_per_token"] == 30 * 2 * 3 * 64 * 2
    assert run(["info"]) == 0
    assert "requests of max_model_len" in capsys.readouterr().out


def test_bench_ends_with_one_json_object(tiny_llama, capsys, monkeypatch):
    def small(name, device):
        tasks = [workloads.Task([1 + i, 2, 3], 4) for i in range(3)]
        return workloads.Workload(name, tasks, 0.0)

    monkeypatch.setattr(workloads, "build", small)
    for kind, name, keys in (
        ("latency", "stream-128", {"ttft_ms", "tpot_ms", "decode_tok_s"}),
        ("throughput", "mixed64", {"out_tok_s", "req_s"}),
        ("startup", None, set()),
    ):
        argv = ["bench", kind, "--model", str(tiny_llama), "--json", *TINY_FLAGS]
        assert run(argv + (["--workload", name] if name else [])) == 0
        result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
        assert keys | {"startup_s", "duration_s"} <= result.keys()


def test_workloads_are_the_published_ones():
    stream = workloads.build("stream-128", "cpu").tasks
    assert len(stream) == 1 and len(stream[0].prompt_token_ids) == 128 and stream[0].num_output_tokens == 129
    mixed = workloads.build("mixed64", "cpu").tasks
    assert len(mixed) == 64
    assert all(32 <= len(task.prompt_token_ids) <= 256 for task in mixed)
    assert all(32 <= task.num_output_tokens <= 128 for task in mixed)
    assert workloads.build("mixed256", "cuda").max_model_len <= 2048
    assert len(workloads.build("p1024d128", "cuda").tasks) == 1000


def test_dummy_weights_need_only_a_config(tmp_path, capsys):
    from quire.models.llama import TINY

    (tmp_path / "config.json").write_text(json.dumps(TINY))
    argv = ["bench", "startup", "--model", str(tmp_path), "--load-format", "dummy", "--json", *TINY_FLAGS]
    assert run(argv) == 0
    assert json.loads(capsys.readouterr().out)["duration_s"] > 0
