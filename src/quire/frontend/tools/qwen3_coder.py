"""Qwen 3 Coder: <tool_call><function=name><parameter=key>value</parameter></function></tool_call>, values on lines.

Chosen by `tools.choose`, used by the server; also Qwen 3.5, Nemotron 3 and Step 3.5. What is shared with other formats
of tags is in _tagged.
"""

from quire.frontend.tools import base
from quire.frontend.tools._tagged import TaggedCalls, Tags, tagged_structure

MODEL_TYPES = ()  # Qwen 3 Coder has Qwen 3's type
TEMPLATE_MARKS = ("<tool_call>\n<function=",)
NEEDS_SPECIAL_TOKENS = True

_TAGS = Tags(
    block="<tool_call>",
    block_end="</tool_call>",
    call="<function=",
    name_end=">",
    call_end="</function>",
    key="<parameter=",
    key_end=">",
    value_end="</parameter>",
    has_lines=True,
)


class Parser(TaggedCalls):
    TAGS = _TAGS


def structure(tools: list[base.Tool], *, required: bool, parallel: bool) -> base.Format:
    return tagged_structure(_TAGS, tools, required=required, parallel=parallel)
