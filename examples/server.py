"""Start a server, ask it over HTTP as any client would, and stop it: python examples/server.py"""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def ask(url: str, body: dict | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def wait_until_ready(url: str) -> None:
    for _ in range(600):
        try:
            ask(url + "/ready")
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise TimeoutError("the server did not start")


def main() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "quire", "serve", "smollm2", "--port", str(port), "--max-model-len", "1024"]
    with subprocess.Popen(command) as server:
        try:
            wait_until_ready(url)
            question = {"role": "user", "content": "What is the capital of France?"}
            answer = ask(url + "/v1/chat/completions", {"messages": [question], "temperature": 0, "max_tokens": 32})
            print(answer["choices"][0]["message"]["content"])
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
