"""MiniMax M2: calls in <minimax:tool_call>, each <invoke name="…"><parameter name="key">value</parameter></invoke>.

Chosen by `tools.choose`, used by the server. What is shared with other formats of tags is in _tagged.
"""

from quire.frontend.tools import base
from quire.frontend.tools._tagged import TaggedCalls, Tags, tagged_structure

MODEL_TYPES = ("minimax_m2",)
TEMPLATE_MARKS = ("<minimax:tool_call>",)
NEEDS_SPECIAL_TOKENS = True

_TAGS = Tags(
    block="<minimax:tool_call>",
    block_end="</minimax:tool_call>",
    call='<invoke name="',
    name_end='">',
    call_end="</invoke>",
    key='<parameter name="',
    key_end='">',
    value_end="</parameter>",
    holds_several=True,
)


class Parser(TaggedCalls):
    TAGS = _TAGS


def structure(tools: list[base.Tool], *, required: bool, parallel: bool) -> base.Format:
    return tagged_structure(_TAGS, tools, required=required, parallel=parallel)
