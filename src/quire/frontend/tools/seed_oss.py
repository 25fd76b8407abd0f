"""Seed-OSS: <seed:tool_call><function=name><parameter=key>value</parameter></function></seed:tool_call>.

Chosen by `tools.choose`, used by the server. Its template writes objects and lists as Python does. What is shared with
other formats of tags is in _tagged.
"""

from quire.frontend.tools import base
from quire.frontend.tools._tagged import TaggedCalls, Tags, tagged_structure

MODEL_TYPES = ("seed_oss",)
TEMPLATE_MARKS = ("<seed:tool_call>",)
NEEDS_SPECIAL_TOKENS = True

_TAGS = Tags(
    block="<seed:tool_call>",
    block_end="</seed:tool_call>",
    call="<function=",
    name_end=">",
    call_end="</function>",
    key="<parameter=",
    key_end=">",
    value_end="</parameter>",
)


class Parser(TaggedCalls):
    TAGS = _TAGS


def structure(tools: list[base.Tool], *, required: bool, parallel: bool) -> base.Format:
    return tagged_structure(_TAGS, tools, required=required, parallel=parallel)
