"""A minute of benchmarks/soak.py on a real server, and that its judgement can fail."""

import json
import subprocess
import sys

from benchmarks.server_process import ServerProcess, children, cpu_s, memory_bytes, num_files, state
from benchmarks.soak import Sample, growth, soak

# Tokens are guessed however many requests run.
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens_per_batch_size": [[1, 1000, 3]]}


def test_a_minute_of_mixed_load_leaves_nothing_behind(served_llama):
    model, *flags = served_llama
    small_cache = ["--kv-cache-memory-bytes", "2M"]  # that of the default model would not be touched everywhere so soon
    guesses = ["--speculative-config", json.dumps(NGRAM)]
    assert soak(60, model=model, flags=[*flags, *small_cache, *guesses]) == []


def test_growth_after_the_warm_up_is_found():
    still = [100] * 30
    leaks = [50, 60, 70, 80, 90, 95, 98, 99, 100, 100, *range(100, 120)]
    found = growth([Sample(api, core, api, core) for api, core in zip(still, leaks)])
    assert found["api_bytes"] == found["api_files"] == 0
    assert 0.1 < found["core_bytes"] < 0.2
    assert growth([Sample(10 + min(i, 10), 1, 1, 1) for i in range(30)])["api_bytes"] == 0  # the warm-up may grow


def test_processes_are_seen_as_they_are():
    program = (
        "import os, sys, time; data = b'x' * (64 << 20); files = [open(os.devnull) for _ in range(50)]\n"
        "end = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"
        "if not os.fork(): os._exit(0)\n"
        "os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)  # ended, and not reaped\n"
        "print('up', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert cpu_s(process.pid) >= 0.29
        assert memory_bytes(process.pid) > 64 << 20
        assert 53 <= num_files(process.pid) <= 60
        (child,) = children(process.pid)
        assert state(process.pid) in "SR" and state(child) == "Z"
        process.stdin.close()
    assert state(process.pid) == "X"


def test_what_a_server_forgets_is_found():
    program = (
        "import http.server, os, pathlib, signal, sys, tempfile, time\n"
        "port = int(sys.argv[2]); signal.signal(signal.SIGTERM, lambda *_: os._exit(3))\n"
        "server = http.server.HTTPServer(('127.0.0.1', port), http.server.SimpleHTTPRequestHandler)\n"
        "if not os.fork(): signal.alarm(20); server.serve_forever()\n"
        "pathlib.Path(tempfile.gettempdir(), 'forgotten').touch(); time.sleep(60)"
    )
    with ServerProcess([sys.executable, "-c", program], "/") as server:
        orphan = server.core_pid
        assert server.stop() == 3
        found = server.leftovers()
        subprocess.run(["kill", str(orphan)], check=True)
    assert any("forgotten" in line for line in found) and any("port" in line for line in found)
