"""What core and workers say to each other survives the way between two processes."""

import msgspec
import numpy as np

from quire.step import Masks


def test_masks_survive_encoding_and_decoding():
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (4, 7)).astype(np.int32)
    expected = words[:3].copy()
    masks = Masks([5, 0, 2], words[:3].data.cast("B"))
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(masks), type=Masks)
    assert arrived == masks and arrived.places == [5, 0, 2]
    words[:] = 0  # the sender uses its memory again: what arrived is a copy
    assert np.array_equal(np.frombuffer(arrived.words, np.int32).reshape(3, -1), expected)
