"""Llama 3: a call is {"name": …, "parameters": {…}}, bare or after <|python_tag|>; several are separated by ";".

Chosen by `tools.choose`, used by the server. Bare JSON anywhere in the text is a call only if it has the members of one
and a tool's name. Code after <|python_tag|> (Llama's own interpreter) is content. Meta's templates write one call per
message; ";" is what models were seen to put between two.
"""

from quire.frontend.tools import base

MODEL_TYPES = ()  # model type "llama" is also every small model without a format
TEMPLATE_MARKS = (
    '{"name": function name, "parameters": dictionary of argument name and its value}',
    """'{"name": "' + tool_call.name + '", ' }}""",
)
NEEDS_SPECIAL_TOKENS = True


class Parser(base.JsonCalls):
    OPENERS = ("<|python_tag|>",)
    BARE = ("{",)
    SEPARATORS = (";",)


def structure(tools: list[base.Tool], *, required: bool, parallel: bool) -> base.Format:
    """Without `required`, text in which {"name": "… stands must be a call."""
    calls = base.json_tags(tools, key="parameters")
    if required:
        return base.separated(calls, "; ", parallel=parallel)
    return base.triggered(['{"name": "'], calls, parallel=parallel)
