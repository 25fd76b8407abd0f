"""Estimates what decoding a body will cost, without decoding it: how deep its JSON nests, how many values it holds.

Used by `guard.py` before a body is decoded, which cannot be interrupted. Reads in pieces, so that other calls do not
wait for a large body.
"""

import re
from array import array
from itertools import accumulate

from quire.utils.loop_share import LoopShare

CHEAP_BYTES = 16_384  # bodies up to this size hold few values, whatever they are
PIECE_BYTES = 32_768  # read without a pause: a few milliseconds at worst
LIST_VALUES = 3  # a list or object takes as long to decode as this many numbers
MEMBER_VALUES = 8  # and so does a member of an object
MAX_NUMBER_CHARS = 64  # no number needs more, and decoding takes time quadratic in the length

_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_SIGNS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # as signed bytes: +1 and -1
_LONG_NUMBER = re.compile(rb"[0-9.eE+-]{%d}" % (MAX_NUMBER_CHARS + 1))


class JsonCost:
    """Fed with all of a body, piece by piece. For what is not JSON the numbers mean nothing: decoding refuses it."""

    def __init__(self) -> None:
        self.max_depth = 0  # of lists and objects
        self.num_values = 0
        self.has_long_number = False
        self._depth = 0
        self._in_string = False

    def feed(self, piece: bytes | bytearray) -> None:
        """`piece` does not end between a backslash and what it escapes."""
        parts = piece.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        outside = b'"'.join(parts[self._in_string :: 2])
        self._in_string ^= len(parts) % 2 == 0
        self.num_values += outside.count(b",") + MEMBER_VALUES * outside.count(b":")
        self.num_values += LIST_VALUES * (outside.count(b"[") + outside.count(b"{"))
        self.has_long_number |= _LONG_NUMBER.search(outside) is not None
        steps = array("b", outside.translate(_SIGNS, _NO_BRACKETS))
        depths = list(accumulate(steps, initial=self._depth))
        self.max_depth = max(self.max_depth, *depths)
        self._depth = depths[-1]


async def json_cost(body: bytes | bytearray) -> JsonCost:
    cost = JsonCost()
    share = LoopShare()
    start = 0
    while start < len(body):
        end = start + PIECE_BYTES
        num_backslashes = len(body[start:end]) - len(body[start:end].rstrip(b"\\"))
        end += num_backslashes % 2
        cost.feed(body[start:end])
        start = end
        await share.pause()
    return cost
