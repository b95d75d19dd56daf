"""Running real engines for the tests: a job goes to a process, what it said and did comes back."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fp8pass.report import Report, load_dump
from fp8pass.testing.checkpoints import write_smollm2, write_tiny
from fp8pass.testing.vllm_cpu import SMALL, plugin_folder

WAY_A = {"inductor_passes": {"post_grad_custom_post_pass": "fp8pass_vllm.PASS"}}
PROCESS = Path(__file__).parent / "engine_process.py"
#: What an engine may take, compiling included, on a small machine that others use too.
LIMIT = 900


@dataclass
class Seen:
    """What an engine did.

    Attributes:
        log: everything it printed.
        report: what the pass dumped, None if nothing.
        data: what :mod:`engine_process` wrote.
    """

    log: str
    report: Report | None
    data: dict[str, Any]

    @property
    def lines(self) -> list[str]:
        """fp8pass's lines in the log, from "fp8pass" on."""
        found = re.findall(r"\] (fp8pass[ ,(].*)", self.log)
        return [line.strip() for line in found]

    @property
    def tokens(self) -> list[list[int]]:
        return self.data["tokens"]

    def counts(self) -> dict[str, int]:
        """``"kind status"`` -> number of sites."""
        assert self.report is not None, "the pass dumped no report"
        return {f"{kind} {status}": n for (kind, status), n in self.report.counts().items()}


@dataclass
class Job:
    """An engine to run.

    Attributes:
        model: folder of a checkpoint.
        mode: compilation mode 2 or 3; 0 = eager.
        way: "" without fp8pass, "A" named in the configuration, "complement" or "replace" asked of
            the plugin.
        mends: of :mod:`fp8pass.testing.vllm_cpu`.
        compilation: further fields of the compilation configuration.
        arguments: further arguments of ``LLM``.
        env: further environment; None removes a variable.
        prompts: token ids.
        forced: also take the log-probabilities of the prompts' own tokens.
        batch: number of prompts to continue.
        tokens: length of a continuation.
        rounds: how often it is made (and timed).
    """

    model: Path
    mode: int = 2
    way: str = ""
    mends: tuple[str, ...] = ("mode3", "quantise", "operators")
    compilation: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str | None] = field(default_factory=dict)
    prompts: list[list[int]] = field(default_factory=lambda: PROMPTS)
    forced: bool = False
    batch: int = 3
    tokens: int = 8
    rounds: int = 1

    def run(self, folder: Path, cache_root: Path | None = None) -> Seen:
        """Run it in a process; its files, and vLLM's cache unless one is given, lie in ``folder``.

        Raises:
            AssertionError: the engine failed; the message ends with its log's end.
        """
        shutil.rmtree(folder / "dump", ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        compilation = {"mode": self.mode, **self.compilation}
        if self.way == "A":
            compilation |= WAY_A
        arguments = {**SMALL, **self.arguments, "compilation_config": compilation}
        if self.mode == 0:
            arguments["enforce_eager"] = True
        result = folder / "result.json"
        result.unlink(missing_ok=True)
        job = {
            "model": str(self.model),
            "arguments": arguments,
            "prompts": self.prompts,
            "forced": self.forced,
            "batch": self.batch,
            "tokens": self.tokens,
            "rounds": self.rounds,
            "result": str(result),
        }
        (folder / "job.json").write_text(json.dumps(job), "utf-8")
        env = self.environment(folder, cache_root or folder / "cache")
        log = run_process([sys.executable, str(PROCESS), str(folder / "job.json")], env)
        (folder / "log.txt").write_text(log, "utf-8")
        assert result.is_file(), f"the engine failed, see {folder}/log.txt:\n{_errors(log)}"
        dumped = folder / "dump" / "report.json"
        report = load_dump(folder / "dump") if dumped.is_file() else None
        return Seen(log, report, json.loads(result.read_text("utf-8")))

    def environment(self, folder: Path, cache_root: Path) -> dict[str, str]:
        """The environment of the engine's process."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("FP8PASS_", "VLLM_"))}
        env.pop("TORCHINDUCTOR_CACHE_DIR", None)
        env |= plugin_folder(folder.parent / "plugin", *self.mends)
        env["PYTHONPATH"] += os.pathsep + str(PROCESS.parent)
        env |= {
            "VLLM_CACHE_ROOT": str(cache_root),
            "FP8PASS_DUMP": str(folder / "dump"),
            "OMP_NUM_THREADS": str(os.cpu_count() or 1),
        }
        if self.way in ("complement", "replace"):
            env["FP8PASS_VLLM"] = self.way
        for name, value in self.env.items():
            if value is None:
                env.pop(name, None)
            else:
                env[name] = value
        return env


def _errors(log: str) -> str:
    """The lines of a log that say what went wrong; its end if none does."""
    found = [line for line in log.splitlines() if re.search(r"\w(Error|Exception): ", line)]
    return "\n".join(found[:5]) or log[-4000:]


#: Three prompts for the tiny models, whose vocabulary has 512 words.
PROMPTS = [[510] + [(7 * i + 13 * j) % 500 for i in range(12 + 5 * j)] for j in range(3)]


def run_process(command: list[str], env: dict[str, str], limit: float = LIMIT) -> str:
    """Output and errors of a process, which is ended with its children if it takes too long."""
    process = subprocess.Popen(
        command,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=limit)[0]
    except subprocess.TimeoutExpired:
        end(process)
        return process.communicate()[0] + f"\nended after {limit} s"
    except BaseException:
        end(process)
        raise


def end(process: subprocess.Popen[str]) -> None:
    """End a process that leads a session of its own, and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@cache
def models_folder() -> Path:
    """Where checkpoints are kept between tests, and between runs of the tests."""
    from fp8pass.demo.weights import cache_root

    return cache_root() / "vllm-tests"


def tiny(recipe: str, **sizes: Any) -> Path:
    """A random Llama of two layers as a checkpoint; made anew, which takes a second."""
    name = "-".join(["tiny", recipe, *(f"{k}={v}" for k, v in sorted(sizes.items()))])
    return write_tiny(models_folder() / name, recipe, **sizes)


def smollm2(recipe: str) -> Path:
    """SmolLM2-135M as a checkpoint, kept.

    Raises:
        UnsupportedError: the package with its weights is not installed.
    """
    folder = models_folder() / f"smollm2-{recipe}"
    if not (folder / "done").is_file():
        write_smollm2(folder, recipe)
        (folder / "done").write_text(time.strftime("%F"), "utf-8")
    return folder


def measured_prompts(count: int, length: int) -> list[list[int]]:
    """Windows of the demo's text as SmolLM2's token ids."""
    from transformers import AutoTokenizer

    from fp8pass.demo import text
    from fp8pass.demo.weights import converted

    tokenizer = AutoTokenizer.from_pretrained(converted(), local_files_only=True)
    ids = tokenizer.encode(text.measured_text())
    return [ids[i * length : (i + 1) * length] for i in range(count)]
