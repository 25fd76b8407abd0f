"""What tests share: the real default model, and a tiny random Llama saved by transformers, our oracle."""

import contextlib
import json
import os
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest

# Threads that wait for each other's part of a product sleep instead of spinning: where several tests share the cores, a
# spinning thread takes the core from the thread it waits for. Read when torch is imported, and by the servers that
# tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Without a card, Triton's kernels run in its interpreter; read when they are imported.
if shutil.which("nvidia-smi") is None:
    os.environ["TRITON_INTERPRET"] = "1"
    with contextlib.suppress(ImportError):  # some systems have no Triton
        import tests.interpreter  # noqa: F401

# A shell that runs the tests in the background lets them ignore Ctrl-C, which tests send to the processes they start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from quire.checkpoint.find import find

with contextlib.suppress(ImportError):  # machines with a GPU may lack it: the tests that run there do without
    from hypothesis import settings

    settings.register_profile("busy machines", deadline=None)  # where much runs at once a slow case is no failure
    settings.load_profile("busy machines")


# -- virtual machines whose host takes the cores away ------------------------------------------------------------------

TESTS = Path(__file__).parent
STARVED_SHARE = 0.1  # of all cores' time, taken away while a test ran
_before = (0, 1)


def cpu_ticks() -> tuple[int, int]:
    """(taken away by the host, all) since the machine started."""
    try:
        all_cores = Path("/proc/stat").read_text().splitlines()[0]
    except OSError:
        return 0, 0
    ticks = [int(word) for word in all_cores.split()[1:9]]
    return ticks[7], sum(ticks)


def was_starved() -> bool:
    """Since the test at hand began."""
    stolen, everything = (now - before for now, before in zip(cpu_ticks(), _before))
    return stolen > STARVED_SHARE * everything


def pytest_runtest_logstart(nodeid: str) -> None:
    global _before
    _before = cpu_ticks()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that fails while the host takes cores away says nothing about the engine: it is run again, and this shows.

    On a machine that has its cores, the first failure counts. Where tests are spread over processes, those of a file
    that starts servers or loads the real model stay together: they share it.
    """
    for item in items:
        item.add_marker(pytest.mark.flaky(reruns=3, reruns_delay=5, condition=was_starved))
        if item.path.parent == TESTS or TESTS / "api" in item.path.parents or TESTS / "security" in item.path.parents:
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(TESTS))))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tests of the page need a browser: where there is none, the end of the run says what was left out."""
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if "tests/ui/" in report.nodeid]
    for reason, count in Counter(report.longrepr[2] for report in skipped).items():
        terminalreporter.write_line(f"{count} tests of tests/ui were left out: {reason.removeprefix('Skipped: ')}")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's file, fetched once per machine."""
    return find("smollm2").path


@pytest.fixture(scope="session")
def served_llama(tmp_path_factory, smollm2) -> list[str]:
    """For `quire serve`: a random Llama of a few layers that knows the default model's tokens, and goes by its name.

    Its steps take milliseconds: for tests of servers that need many tokens and do not read them.
    """
    from quire.models.llama import TINY

    folder = tmp_path_factory.mktemp("served-llama")
    config = TINY | {"vocab_size": 49152, "max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(config))
    flags = ["--load-format", "dummy", "--dtype", "float32", "--served-model-name", "smollm2"]
    return [str(folder), "--tokenizer", str(smollm2), *flags]


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> Path:
    """A Hugging Face folder: random weights at models/llama.py's TINY."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from quire.models.llama import TINY

    folder = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(0)
    sizes = {name: value for name, value in TINY.items() if name not in ("architectures", "model_type")}
    config = LlamaConfig(**sizes)
    model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return folder
