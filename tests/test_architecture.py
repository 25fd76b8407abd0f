"""The rules of docs/architecture.md that a reader relies on, checked against the source."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "quire"
FILES = sorted(SOURCE.rglob("*.py"))

BASE = set(
    "config params outputs messages ranks step errors env utils registry kv.specs kv.prefix checkpoint metrics".split()
)
MAY_IMPORT = {
    "api": {"frontend", "api", "bench"},
    "bench": {"bench"},
    "frontend": {"frontend", "structured.spec"},
    "core": {"core", "kv", "executor.base", "structured", "spec.proposer", "spec.prediction", "spec.suffix"},
    "structured": {"structured"},
    "kv": {"kv"},
    "executor": {"executor"},
    "worker": {"worker", "models", "layers", "quant", "sampling", "spec", "ops", "kv.groups", "distributed"},
    "spec": {"spec", "ops"},
    "models": {"layers"},
    "layers": {"layers", "ops", "quant.base", "distributed.base"},
    "quant": {"quant", "ops"},
    "sampling": {"sampling", "ops"},
    "distributed": {"distributed", "ops"},
    "ops": {"ops"},
    # the base: each stands on less than itself
    "config": {"config", "errors", "registry", "utils.files"},
    "params": {"errors"},
    "outputs": set(),
    "messages": {"config", "params", "step", "structured.spec"},
    "ranks": {"config", "errors", "kv.specs", "step", "utils"},
    "step": {"params"},
    "errors": set(),
    "env": {"errors"},
    "utils": {"utils", "errors", "env"},
    "registry": {"errors"},
    "metrics": {"metrics", "messages", "outputs", "params", "config"},
    "checkpoint": {"checkpoint", "errors", "env", "utils"},
    "__init__": {"api", "frontend", "config", "outputs", "params", "sampling.custom"},
    "__main__": {"api"},
}
DECIDES = set(
    """
    api bench frontend core kv executor
    checkpoint config params outputs messages ranks step errors env utils registry
    """.split()
)


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "quire":
                found += [f"quire.{alias.name}" for alias in node.names]
            else:
                found.append(node.module)
    return found


def identifiers(path: Path) -> set[str]:
    """The variables that a file's code names, in lower case."""
    return {node.id.lower() for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_one_way(path):
    own = room(path)
    allowed = MAY_IMPORT[own] | (BASE if own not in BASE else set())
    for name in imports(path):
        if name.startswith("quire."):
            target = name.removeprefix("quire.")
            fits = any(target == rule or target.startswith(rule + ".") for rule in allowed)
            assert fits or target in ("__version__", "env"), f"{path.relative_to(SOURCE)} must not import {name}"


DECIDING_FILES = [path for path in FILES if room(path) in DECIDES]


@pytest.mark.parametrize("path", DECIDING_FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_deciding_tower_never_imports_torch(path):
    assert not {name.split(".")[0] for name in imports(path)} & {"torch", "triton", "numpy", "transformers"}


def test_a_chat_is_rendered_and_tokenized_without_torch():
    program = (
        "import sys; from quire.config import EngineConfig; from quire.frontend.model import ModelInfo\n"
        "from quire.frontend.chat import encode_chat; from quire.frontend.inputs import InputProcessor\n"
        "from quire.params import SamplingParams\n"
        "m = ModelInfo.open(EngineConfig.from_kwargs(model='smollm2'))\n"
        "ids = encode_chat(m.tokenizer, m.template, [{'role': 'user', 'content': 'Hello'}])\n"
        "InputProcessor(m).request('r', ids, SamplingParams())\n"
        "assert ids and 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_the_environment_is_read_only_in_env():
    for path in FILES:
        if path != SOURCE / "env.py":
            assert not re.search(r"os\.environ|os\.getenv", path.read_text()), path


def test_no_model_is_named_outside_its_file():
    names = {p.stem for p in (SOURCE / "models").glob("*.py")} - {"__init__"}
    for path in FILES:
        if room(path) in {"core", "kv", "executor", "worker", "layers", "quant", "ops"}:
            assert not names & identifiers(path), f"{path}: names a model"
        if room(path) in {"core", "kv", "executor"}:
            words = set(re.findall(r"[a-z]+\d*", path.read_text().lower()))
            assert not names & words, f"{path}: names a model"


def test_triton_code_lives_in_ops():
    for path in FILES:
        if room(path) != "ops":
            assert not {"triton.jit", "gluon.jit"} & set(re.findall(r"\w+\.jit", path.read_text())), path


def test_no_pickle_eval_or_exec():
    unsafe = {"pickle", "dill", "cloudpickle", "marshal", "shelve"}
    for path in FILES:
        assert not {name.split(".")[0] for name in imports(path)} & unsafe, path
        nodes = ast.walk(ast.parse(path.read_text()))
        calls = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        assert not calls & {"eval", "exec"}, path


def test_no_check_of_input_is_an_assert():
    for path in FILES:
        nodes = ast.walk(ast.parse(path.read_text()))
        assert not any(isinstance(node, ast.Assert) for node in nodes), path


def test_every_module_says_what_it_is():
    for path in FILES:
        text = path.read_text()
        if text.strip():
            assert ast.get_docstring(ast.parse(text)), path


def test_model_files_open_with_their_architectures_and_a_tiny_config():
    from quire.registry import literals, names

    architectures = literals("quire.models", "ARCHITECTURES")
    tiny_configs = literals("quire.models", "TINY")
    for name in names("quire.models"):
        assert architectures[name]
        assert tiny_configs[name]["architectures"][0] in architectures[name]


def test_public_names_are_these():
    import quire

    assert quire.__all__ == [
        "AsyncEngineArgs",
        "AsyncLLM",
        "AsyncLLMEngine",
        "BeamSearchOutput",
        "BeamSearchParams",
        "CompletionOutput",
        "EngineArgs",
        "EngineConfig",
        "LLM",
        "LogitsProcessor",
        "RepetitionDetectionParams",
        "RequestOutput",
        "RequestOutputKind",
        "SamplingParams",
        "StructuredOutputs",
        "StructuredOutputsParams",
        "TextPrompt",
        "TokensPrompt",
        "__version__",
    ]
    for name in quire.__all__:
        assert getattr(quire, name)
