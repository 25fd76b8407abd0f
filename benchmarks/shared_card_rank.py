"""A worker that shares its GPU with others: started by the executor of `shared_card.py`."""

import sys

from quire.distributed.base import Ranks
from quire.worker.process import RankProcess, main


class SharedCardRank(RankProcess):
    def ranks(self) -> Ranks:
        import torch
        import torch.distributed as dist

        from quire.distributed.cuda_ipc import CudaIpcGroup

        torch.cuda.set_device(0)
        size = self.setup.config.parallel.tensor_parallel_size
        store = dist.FileStore(f"/proc/self/fd/{self.setup.shared.store}", size)
        return Ranks(CudaIpcGroup(store, self.setup.place, size))


if __name__ == "__main__":
    sys.exit(main(SharedCardRank))
