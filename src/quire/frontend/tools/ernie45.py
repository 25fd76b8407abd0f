"""ERNIE 4.5: each call is <tool_call>{"name": …, "arguments": {…}}</tool_call>, as in hermes, under vLLM's name.

Named with --tool-call-parser, used by the server. Its <response> tags are the reasoning format's to read.
"""

from quire.frontend.tools import hermes

MODEL_TYPES = ()
TEMPLATE_MARKS = ()  # no real template is at hand
NEEDS_SPECIAL_TOKENS = True

Parser = hermes.Parser
structure = hermes.structure
