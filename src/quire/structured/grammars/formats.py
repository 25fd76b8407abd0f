"""The formats of JSON Schema that are honoured, as regular expressions: each a subset of what its standard allows.

Read by the schema compiler. A subset suffices: what is generated must be valid, not every valid text be generated.
"""

from functools import cache

from quire.structured.grammars.pattern import whole
from quire.structured.grammars.regular import Node

_OCTET = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL = r"[a-zA-Z0-9]([a-zA-Z0-9]|-[a-zA-Z0-9]){0,11}"  # short, so that few states are needed
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,2}}"
_WORD = r"[a-zA-Z0-9_]"
_LEAP = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][48]|[2468]0|[13579][26])00)"
_YEAR = r"([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_DATE = (
    rf"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    rf"|{_LEAP}-02-29)"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
_HEX = r"[0-9a-fA-F]"
_GROUP = rf"{_HEX}{{1,4}}"  # of an IPv6 address
_UNRESERVED = r"[a-zA-Z0-9\-._~]"

_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}T{_TIME}",
    "duration": r"P([0-9]{1,4}W|[0-9]{1,4}Y([0-9]{1,4}M([0-9]{1,4}D)?)?|[0-9]{1,4}M([0-9]{1,4}D)?|[0-9]{1,4}D|"
    r"([0-9]{1,4}D)?T([0-9]{1,4}H([0-9]{1,4}M([0-9]{1,4}S)?)?|[0-9]{1,4}M([0-9]{1,4}S)?|[0-9]{1,4}S))",
    "email": rf"{_WORD}[a-zA-Z0-9_+\-]*(\.[a-zA-Z0-9_+\-]+)*@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
    "ipv6": rf"({_GROUP}:){{7}}{_GROUP}|({_GROUP}:){{1,6}}:({_GROUP})?|::({_GROUP}:){{0,5}}{_GROUP}",
    "uuid": rf"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "uri": rf"[a-zA-Z][a-zA-Z0-9+\-.]*://{_HOST}(:[0-9]{{1,4}})?(/({_UNRESERVED}|%{_HEX}{{2}})*)*"
    rf"(\?({_UNRESERVED}|[&=/]|%{_HEX}{{2}})*)?(#({_UNRESERVED}|[/])*)?",
    "json-pointer": r"(/([^/~]|~[01])*)*",
}
HONOURED = frozenset(_PATTERNS)


@cache
def language(name: str) -> Node:
    return whole(_PATTERNS[name])
