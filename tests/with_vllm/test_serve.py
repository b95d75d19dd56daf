"""``vllm serve`` with the plugin: the endpoint of OpenAI's protocol answers."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from engines import LIMIT, PROMPTS, SMALL, Job, end, tiny


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def ask(url: str, data: dict[str, Any] | None = None) -> Any:
    body = None if data is None else json.dumps(data).encode()
    asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=120) as reply:
        text = reply.read()
    return json.loads(text) if text else None


def test_serve(tmp_path: Path) -> None:
    model, port = tiny("dynamic"), free_port()
    job = Job(model, way="complement", mends=("serve",))
    env = job.environment(tmp_path / "run", tmp_path / "cache")
    arguments = [f"--{name.replace('_', '-')}={SMALL[name]}" for name in SMALL if name != "seed"]
    arguments = [a.removesuffix("=True") for a in arguments]
    (tmp_path / "log.txt").touch()
    with (tmp_path / "log.txt").open("w") as log:
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
        server = subprocess.Popen(
            [*command, "--port", str(port), "--host", "127.0.0.1", *arguments],
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(f"{url}/health", server)
            data = {"model": str(model), "prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0}
            answer = ask(f"{url}/v1/completions", data)
        finally:
            end(server)
            server.wait()
    text = (tmp_path / "log.txt").read_text("utf-8")
    assert answer["usage"]["completion_tokens"] >= 1
    assert "fp8pass (complement), 1 graph compiled: 17 sites" in text
    assert (tmp_path / "run" / "dump" / "report.json").is_file()


def wait_for(url: str, server: subprocess.Popen[str]) -> None:
    started = time.monotonic()
    while time.monotonic() - started < LIMIT:
        assert server.poll() is None, "the server ended"
        try:
            ask(url)
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(1)
    raise AssertionError(f"{url} does not answer")
