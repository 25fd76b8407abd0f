"""DeepSeek V3.1: as V3, but each call is the name, the separator and the arguments, without a fence.

Chosen by `tools.choose`, used by the server. Read as deepseek_v3, which knows both ways of writing.
"""

from quire.frontend.tools import base, deepseek_v3

MODEL_TYPES = ()  # V3.1 has V3's type
TEMPLATE_MARKS = ("tool['function']['name'] + '<｜tool▁sep｜>' + tool['function']['arguments']",)
NEEDS_SPECIAL_TOKENS = True

Parser = deepseek_v3.Parser


def structure(tools: list[base.Tool], *, required: bool, parallel: bool) -> base.Format:
    return deepseek_v3.block(deepseek_v3.plain_calls(tools, parallel), required)
