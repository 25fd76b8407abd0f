"""GLM 4.5 and later: <tool_call>name<arg_key>…</arg_key><arg_value>…</arg_value></tool_call>, a pair per argument.

Chosen by `tools.choose`, used by the server. What is shared with other formats of tags is in _tagged.
"""

from quire.frontend.tools import base
from quire.frontend.tools._tagged import TaggedCalls, Tags, tagged_structure

MODEL_TYPES = ("glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa")
TEMPLATE_MARKS = ("<arg_key>",)
NEEDS_SPECIAL_TOKENS = True

_TAGS = Tags(
    call="<tool_call>",
    call_end="</tool_call>",
    key="<arg_key>",
    key_end="</arg_key>",
    value="<arg_value>",
    value_end="</arg_value>",
    may_join=True,
)


class Parser(TaggedCalls):
    TAGS = _TAGS


def structure(tools: list[base.Tool], *, required: bool, parallel: bool) -> base.Format:
    return tagged_structure(_TAGS, tools, required=required, parallel=parallel)
