"""A model's config in Hugging Face's vocabulary, whichever kind of file it comes from.

Called by the frontend and by the worker's builder, with what `find` found. Knows the spellings of config.json; not what
a model does with them. Code in a model's folder (`auto_map`) is never run.
"""

import json
from pathlib import Path
from typing import Any

from quire.checkpoint.find import ModelFiles
from quire.checkpoint.gguf_config import config_from_gguf, generation_config_from_gguf
from quire.checkpoint.sanity import checked
from quire.errors import BadModelFileError, ModelNotFoundError
from quire.utils.files import is_there, read_file

_MAX_JSON_BYTES = 1 << 24

_OTHER_NAMES = {
    "n_embd": "hidden_size",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "num_local_experts": "num_experts",
}


def read_config(files: ModelFiles) -> dict[str, Any]:
    """config.json's dict, or what it would be for a GGUF file.

    In one spelling: RoPE as `rope_theta` and `rope_scaling` (None or a dict with `rope_type`), precision as `dtype`.
    """
    if files.kind == "gguf":
        return config_from_gguf(files.gguf)
    config = _read_json(files.path / "config.json")
    architectures = config.get("architectures")
    if not isinstance(architectures, list):
        architectures = []
    if not architectures or not all(isinstance(name, str) for name in architectures):
        raise BadModelFileError(f"{files.name}/config.json names no architectures: use a language model's config.")
    _use_one_spelling(config)
    if is_there(files.path / "hf_quant_config.json"):
        _use_modelopt_settings(config, files.path / "hf_quant_config.json")
    return checked(config, f"{files.name}/config.json")


def read_generation_config(files: ModelFiles) -> dict[str, Any]:
    """The model's sampling defaults and end tokens, in generation_config.json's vocabulary; empty if it has none."""
    if files.kind == "gguf":
        return generation_config_from_gguf(files.gguf)
    path = files.path / "generation_config.json"
    return _read_json(path) if is_there(path) else {}


def _use_modelopt_settings(config: dict[str, Any], path: Path) -> None:
    """Those of modelopt's own file, if config.json tells nothing; if it does, it must tell of the same algorithm."""
    own = config.get("quantization_config")
    if not own:
        config["quantization_config"] = _modelopt_settings(path)
    elif isinstance(own, dict) and str(own.get("quant_method")).startswith("modelopt"):
        first, second = own.get("quant_algo"), _modelopt_settings(path).get("quant_algo")
        if first and second and first != second:
            raise BadModelFileError(f"config.json has quant_algo {first!r:.60}, and {path.name} has {second!r:.60}")


def _modelopt_settings(path: Path) -> dict[str, Any]:
    """The quantization in modelopt's own file, which older checkpoints have beside a config.json that tells nothing."""
    settings = _read_json(path).get("quantization")
    if not isinstance(settings, dict):
        raise BadModelFileError(f"{path.name} names no quantization: fetch it again.")
    return {**settings, "quant_method": "modelopt"}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_file(path, _MAX_JSON_BYTES))
    except FileNotFoundError:
        raise ModelNotFoundError(f"there is no file {path.name}.") from None
    except OSError as error:
        raise BadModelFileError(f"{path.name} cannot be read ({error.strerror}): fetch it again.") from None
    except (ValueError, RecursionError) as error:  # ValueError: also bad UTF-8 and absurdly long numbers
        raise BadModelFileError(f"{path.name} is not valid JSON ({error}): fetch it again.") from None
    if not isinstance(value, dict):
        raise BadModelFileError(f"{path.name} holds no JSON object: fetch it again.")
    return value


def _use_one_spelling(config: dict[str, Any]) -> None:
    """Older spellings of config.json's keys become today's, so that other code knows only one."""
    if "torch_dtype" in config:
        config.setdefault("dtype", config.pop("torch_dtype"))
    if config.get("sliding_window") == 0:  # how some say that there is none
        config["sliding_window"] = None
    for theirs, ours in _OTHER_NAMES.items():
        if theirs in config:
            config.setdefault(ours, config.pop(theirs))
    rope = config.get("rope_parameters")
    # A model with several kinds of layers has one dict per kind instead: its model file reads those.
    if isinstance(rope, dict) and not any(isinstance(value, dict) for value in rope.values()):
        del config["rope_parameters"]
        top_level = ("rope_theta", "partial_rotary_factor")
        config["rope_scaling"] = {key: value for key, value in rope.items() if key not in top_level}
        config.update({key: rope[key] for key in top_level if key in rope})
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict):
        if "type" in scaling:
            scaling.setdefault("rope_type", scaling.pop("type"))
        if scaling.get("rope_type", "default") == "default":
            config["rope_scaling"] = None
