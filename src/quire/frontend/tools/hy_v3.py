"""Hunyuan 3 (Hy3): calls in <tool_calls:opensource>, each with its name and tags around keys and values.

Chosen by `tools.choose`, used by the server. All tags end with the suffix of the open models. What is shared with other
formats of tags is in _tagged. (Hunyuan A13B is hunyuan.)
"""

from quire.frontend.tools import base
from quire.frontend.tools._tagged import TaggedCalls, Tags, tagged_structure

MODEL_TYPES = ("hy_v3",)
TEMPLATE_MARKS = ("<tool_calls{}>", "<tool_calls:opensource>")
NEEDS_SPECIAL_TOKENS = True

_TAGS = Tags(
    block="<tool_calls:opensource>",
    block_end="</tool_calls:opensource>",
    call="<tool_call:opensource>",
    name_end="<tool_sep:opensource>",
    call_end="</tool_call:opensource>",
    key="<arg_key:opensource>",
    key_end="</arg_key:opensource>",
    value="<arg_value:opensource>",
    value_end="</arg_value:opensource>",
    holds_several=True,
)


class Parser(TaggedCalls):
    TAGS = _TAGS


def structure(tools: list[base.Tool], *, required: bool, parallel: bool) -> base.Format:
    return tagged_structure(_TAGS, tools, required=required, parallel=parallel)
