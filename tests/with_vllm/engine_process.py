"""One real engine of vLLM in a process of its own: ``python engine_process.py JOB.json``.

The job is a JSON object, see :class:`engines.Job`; what was seen is written to its ``result``. The
process is a program as a user would write it: it imports vLLM and nothing of fp8pass, unless the
job mends the CPU build (``mends``), which an in-process engine needs here and a spawned one in its
workers.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main(path: str) -> None:
    job = json.loads(Path(path).read_text("utf-8"))
    started = time.perf_counter()
    from vllm import LLM, SamplingParams

    llm = LLM(job["model"], **job["arguments"])
    ready = time.perf_counter()
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    seen: dict[str, Any] = {"start_seconds": ready - started}
    config = llm.llm_engine.vllm_config.compilation_config
    seen["mode"] = int(config.mode)
    if job["forced"]:
        asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        found = llm.generate(prompts, asked, use_tqdm=False)
        seen["logprobs"] = [_logprobs(output) for output in found]
    seen["seconds"] = []
    asked = SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True)
    for _ in range(job["rounds"]):
        begun = time.perf_counter()
        found = llm.generate(prompts[: job["batch"]], asked, use_tqdm=False)
        seen["seconds"].append(time.perf_counter() - begun)
        seen["tokens"] = [list(output.outputs[0].token_ids) for output in found]
    Path(job["result"]).write_text(json.dumps(seen), "utf-8")


def _logprobs(output: Any) -> list[float]:
    """Log-probability of each token of a prompt, given those before it; not of the first."""
    pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    return [seen[token].logprob for token, seen in pairs if seen is not None]


if __name__ == "__main__":
    main(sys.argv[1])
