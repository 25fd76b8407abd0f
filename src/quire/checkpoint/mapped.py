"""A file mapped into memory read-only: pages are loaded when they are read, and can be dropped again.

Called by the readers of GGUF and safetensors. Knows nothing of formats.
"""

import mmap
from pathlib import Path

from quire.errors import BadModelFileError, ModelNotFoundError
from quire.utils.files import open_file


class MappedFile:
    """`raw` is the mapping itself, for parsing; weights are handed out as views, which outlive `close()`."""

    def __init__(self, path: Path) -> None:
        try:
            with open_file(path) as file:
                self.raw = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelNotFoundError(f"there is no file {path.name}.") from None
        except ValueError:  # mmap's way of saying that there is nothing to map
            raise BadModelFileError(f"{path.name} is empty: fetch it again.") from None
        except OSError as error:
            raise BadModelFileError(f"{path.name} cannot be read ({error.strerror}): fetch it again.") from None

    def view(self, offset: int, num_bytes: int) -> memoryview:
        return memoryview(self.raw)[offset : offset + num_bytes]

    def forget(self, offset: int, num_bytes: int) -> None:
        """Drops the whole pages in this range from the process's memory; views stay valid, reading loads them again."""
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        page_bytes = (offset + num_bytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
        if page_bytes > 0:
            self.raw.madvise(mmap.MADV_DONTNEED, start, page_bytes)

    def close(self) -> None:
        try:
            self.raw.close()
        except BufferError:
            pass  # a view is still in use: the mapping goes when the last one does
