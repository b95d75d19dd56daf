"""Two engines in one process, with and without fp8pass, that generate in turn: seconds of each.

``python interleaved_process.py JOB.json``, see :func:`test_speed.seconds_in_turn`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main(path: str) -> None:
    job = json.loads(Path(path).read_text("utf-8"))
    from vllm import LLM, SamplingParams

    engines = {name: LLM(job["model"], **given) for name, given in job["engines"].items()}
    sampling = SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True)
    prompts: Any = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    tokens: dict[str, list[list[int]]] = {}
    for number in range(job["rounds"] + 1):
        for name in sorted(engines, reverse=bool(number % 2)):
            started = time.perf_counter()
            found = engines[name].generate(prompts, sampling, use_tqdm=False)
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - started)
            tokens[name] = [list(output.outputs[0].token_ids) for output in found]
    Path(job["result"]).write_text(json.dumps({"seconds": seconds, "tokens": tokens}), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
