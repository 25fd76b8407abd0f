"""Writes docs/from-vllm.md from the tables of `quire.config.vllm`: `python -m tests.config.from_vllm`.

A test holds the page to what this writes.
"""

from pathlib import Path

from quire.config.vllm import ALIASES, REFUSED, SHORT, VALUES, WITHOUT_EFFECT, kind_of

PAGE = Path(__file__).parents[2] / "docs" / "from-vllm.md"

HEAD = """# Coming from vLLM

Replace `vllm` by `quire` in an import or a command. This page is written from the table in `src/quire/config/vllm.py`
(`python -m tests.config.from_vllm`), which knows every flag and keyword of vLLM 0.32.0: those not listed here mean the
same. Flags may be written with underscores; every switch has its `--no-…` form; `8k` is 8,000 and `8K` 8,192;
`--speculative-config.method ngram` is the same as the JSON.

```bash
quire serve org/model --max-model-len 8k --enable-auto-tool-choice --tool-call-parser hermes
```

```python
from quire import LLM, SamplingParams
```

## Different on purpose

| | vLLM | Quire |
| --- | --- | --- |
| address | all interfaces | 127.0.0.1; `--host 0.0.0.0` lets other machines in |
| keys | `/v1` only | every path but `/live`, `/ready`, `/health` and `/ping`; operators' need `--admin-api-key` |
| `/metrics` | open | needs a key where others do, or has a port of its own (`--metrics-port`) |
| code of checkpoints | with `--trust-remote-code` | never: models are files of `quire/models`, or transformers' |
| a crash of the engine | ends all streams | the engine is replaced, and streams go on with the same tokens |
| sampling with a seed | depends on the batch | the same tokens alone, in a batch, after preemption |
"""


def words(names: str) -> str:
    flags = ["--" + entry.partition("=")[0].rstrip("?*").replace("_", "-") for entry in names.split()]
    return ", ".join(f"`{flag}`" for flag in flags)


def allowed(names: str) -> str:
    """Which values are accepted, of those that have any beside none."""
    found = [entry.partition("=") for entry in names.split() if "=" in entry]
    each = [f"`{name.replace('_', '-')}` {' or '.join(values.split('|'))}" for name, _, values in found]
    return "; ".join(each)


def page() -> str:
    lines = [HEAD, "## Other names\n", "| vLLM | Quire |", "| --- | --- |"]
    for name, (becomes, value) in ALIASES.items():
        own = "--" + becomes.replace("_", "-")
        if kind_of(name) == "switch" and value is False:
            own = "--no-" + becomes.replace("_", "-")
        lines.append(f"| `--{name.rstrip('?*').replace('_', '-')}` | `{own}` |")
    lines += ["", "Short flags: " + ", ".join(f"`{flag}`" for flag in SHORT) + ".\n"]
    lines += ["| option | words of vLLM's | become |", "| --- | --- | --- |"]
    for option, values in VALUES.items():
        for own in dict.fromkeys(values.values()):
            others = ", ".join(f"`{word}`" for word, value in values.items() if value == own)
            lines.append(
                f"| `--{option.replace('_', '-')}` | {others} | {'the default' if own is None else f'`{own}`'} |"
            )
    lines += ["", "## Without effect\n", "Accepted, and said once in the log.\n", "| because | flags and keywords |"]
    lines += ["| --- | --- |", *(f"| {reason} | {words(names)} |" for reason, names in WITHOUT_EFFECT.items())]
    lines += ["", "## Refused\n", "Accepted where they are off, or have the value that changes nothing.\n"]
    lines += ["| because | flags and keywords | accepted |", "| --- | --- | --- |"]
    lines += [f"| {reason} | {words(names)} | {allowed(names)} |" for reason, names in REFUSED.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
