"""How much memory loading takes: `python benchmarks/load_memory.py MODEL [--kinds none int8 …] [--device cpu] [-tp N]`.

Each kind (`--quantization`), and each rank's part of it, is loaded in a process of its own. Printed are the bytes of
the weights that stay, also as a multiple of what the checkpoint's tensors take, and the peak above what the process had
before, as a multiple of the weights: of anonymous memory (RssAnon), and on GPUs of torch's allocations. On CPUs also as
a multiple of all that stays of anonymous memory: beside weights of some 50 MB, modules and headers count. A GGUF file
is dequantized to bfloat16 safetensors first for the kinds that start from those. A folder without weights, one of
`shapes/`, is filled with random ones first (`--kinds auto`: kept as its config says).
"""

import argparse
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

KINDS = ("gguf", "none", "fp8", "int8", "int4", "mxfp4")


def anonymous_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


@contextmanager
def watched_peak() -> Iterator[list[int]]:
    """The largest anonymous memory seen meanwhile, looked at every two milliseconds."""
    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def checkpoint_bytes(model: str) -> int:
    """What its tensors take."""
    from quire.checkpoint.find import find
    from quire.checkpoint.safetensors import SafetensorsFolder

    files = find(model)
    if files.kind == "gguf":
        return sum(tensor.nbytes for tensor in files.gguf.tensors.values())
    with SafetensorsFolder(files.path) as folder:
        return sum(tensor.nbytes for tensor in folder.tensors.values())


def load(model: str, kind: str, device: str, rank: int, num_ranks: int) -> str:
    """In a process of its own."""
    import torch

    from quire.config import EngineConfig
    from quire.distributed.base import Group, Ranks
    from quire.frontend.model import ModelInfo
    from quire.worker.worker import Worker

    group = Group()  # loading exchanges nothing
    group.rank, group.size = rank, num_ranks
    options = {"model": model, "quantization": kind, "device": device, "max_model_len": 128}
    options["skip_tokenizer_init"] = True
    info = ModelInfo.open(EngineConfig.from_kwargs(**options))
    if device == "cpu":
        from quire.ops.packed_linear.cpu import supported

        supported()  # compiled before memory is counted
    else:
        torch.zeros(1, device=device)
    before = anonymous_bytes()
    with watched_peak() as peak:
        worker = Worker(info.config, Ranks(group))
    stays = anonymous_bytes() - before
    size, in_file = worker.weight_bytes, checkpoint_bytes(model)
    line = f"| {kind} | {rank} | {size / 1e6:.0f} | {size / in_file:.3f} | {(peak[0] - before) / size:.2f} |"
    last = (peak[0] - before) / stays if device == "cpu" else torch.cuda.max_memory_allocated() / size
    return f"{line} {last:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    parser.add_argument("--one", help="load this kind in this process")
    parser.add_argument("--rank", type=int, default=0, help="of the ranks, the one that it loads it as")
    args = parser.parse_args()
    if args.one:
        print(load(args.model, args.one, args.device, args.rank, args.tensor_parallel_size))
        return
    last = "times all that stays" if args.device == "cpu" else "peak of the GPU's, times the weights"
    print(f"| kept as | rank | MB | times the checkpoint's | peak of host memory, times the weights | {last} |")
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as drawn:
        given = args.model
        if Path(given).is_dir() and not any(Path(given).glob("*.safetensors")):
            from benchmarks.random_checkpoint import write

            given = str(write(Path(given), Path(drawn), args.device))
        for kind in args.kinds:
            model = given
            if kind != "gguf" and model.endswith(".gguf"):
                model = folder
                if not any(Path(folder).iterdir()):
                    from benchmarks.quality import dequantized

                    dequantized(Path(given), Path(folder))
            for rank in range(args.tensor_parallel_size):
                command = [sys.executable, __file__, model, "--one", kind, "--device", args.device]
                command += ["-tp", str(args.tensor_parallel_size), "--rank", str(rank)]
                print(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip(), flush=True)


if __name__ == "__main__":
    main()
