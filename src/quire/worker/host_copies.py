"""Weights in the host's memory while an engine sleeps.

Used by the worker. Tensors stay what they are, views of each other included: only the memory behind them is given back,
and taken again.
"""

from collections.abc import Iterable

from torch import Tensor, UntypedStorage


class HostCopies:
    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Copies what these tensors hold, and gives their memory back."""
        self.copies: list[tuple[UntypedStorage, UntypedStorage]] = []  # the device's, the host's
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        for storage in storages.values():
            copy = UntypedStorage(storage.nbytes())
            copy.copy_(storage)
            self.copies.append((storage, copy))
            storage.resize_(0)

    def restore(self) -> None:
        """The tensors hold again what they held."""
        while self.copies:
            storage, copy = self.copies.pop()
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
