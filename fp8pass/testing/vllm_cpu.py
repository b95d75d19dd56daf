"""vLLM's CPU build as a test bench for what a GPU would do: for tests only, it patches vLLM.

On a CPU vLLM compiles in another mode (2) than on a GPU (3), crashes while loading most FP8 models,
and has none of CUDA's operators. :func:`install` mends these in the process that calls it;
:func:`plugin_folder` makes a folder which, put into ``PYTHONPATH``, does so in every process of an
engine, also in spawned workers::

    env = dict(os.environ, **plugin_folder(tmp_path, "mode3", "quantise"))
    subprocess.run([python, "serve.py"], env=env)

The names of what can be mended:

``mode3``      compilation mode 3 stays what it is asked to be
``quantise``   ``scaled_fp8_quant`` in torch; without it online and static FP8 models fail to load
``operators``  CUDA's operators with reference code (:mod:`fp8pass.testing.vllm_operators`)
``cutlass``    with ``operators``: vLLM chooses its CUTLASS products, so graphs look like CUDA's;
               also the only way to run blocks on a CPU without AMX
``serve``      in :func:`plugin_folder`: ``vllm serve`` finds the version of the package "vllm",
               which on a CPU has another name
``fusions``    with ``operators``: vLLM's own fusion passes run on the CPU
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp8pass.errors import OptionError, choices

#: Environment variable that :func:`plugin_folder` sets and :func:`install_asked` reads.
VARIABLE = "FP8PASS_TESTING_VLLM_CPU"
#: Settings with which a small engine starts fast on a CPU.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
#: Arguments of ``LLM`` for the same; the warm-up runs a whole batch, so it is small.
SMALL: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "seed": 0,
    "disable_log_stats": True,
}
_done: set[str] = set()


def install(*what: str) -> None:
    """Mend this process's vLLM; see the top of this module. Again does nothing.

    Raises:
        OptionError: an unknown name.
    """
    for name in what:
        if name not in _MENDS:
            raise OptionError(f"unknown mend {name!r}; allowed: {choices(_MENDS)}")
        if name not in _done:
            _done.add(name)
            _MENDS[name]()


def install_asked() -> None:
    """Entry point of the plugin in :func:`plugin_folder`."""
    install(*os.environ.get(VARIABLE, "").split())


def plugin_folder(folder: Path, *what: str) -> dict[str, str]:
    """Make ``folder`` a place where vLLM finds a plugin that calls :func:`install`.

    Returns:
        the environment for a process of vLLM, ``PYTHONPATH`` and :data:`ENVIRONMENT` included.
    """
    about = folder / "fp8pass_testing_vllm_cpu-0.dist-info"
    _describe(about, "fp8pass-testing-vllm-cpu", "0")
    (about / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\nfp8pass_testing_vllm_cpu = {__name__}:install_asked\n", "utf-8"
    )
    if "serve" in what:
        version = f"{importlib.metadata.version('vllm-cpu')}+cpu"
        _describe(folder / f"vllm-{version}.dist-info", "vllm", version)
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))
    return {**ENVIRONMENT, "PYTHONPATH": path, VARIABLE: " ".join(what)}


def _describe(about: Path, name: str, version: str) -> None:
    about.mkdir(parents=True, exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (about / "METADATA").write_text(text, "utf-8")


def _keep_mode_3() -> None:
    """Undo what the CPU's platform does to mode 3: it would make it mode 2."""
    from vllm.config import CompilationMode
    from vllm.platforms.cpu import CpuPlatform

    original = vars(CpuPlatform)["check_and_update_config"].__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        compilation = vllm_config.compilation_config
        asked = compilation.mode == CompilationMode.VLLM_COMPILE
        original(cls, vllm_config)
        if not asked:
            return
        compilation.mode = CompilationMode.VLLM_COMPILE
        compilation.ir_enable_torch_wrap = True
        if compilation.compile_sizes is None:  # no range would be compiled
            compilation.compile_sizes = []
        if "fusions" not in _done:  # their classes are imported on GPUs alone
            compilation.pass_config.fuse_norm_quant = False
            compilation.pass_config.fuse_act_quant = False

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def _quantise() -> None:
    """Give ``vllm._custom_ops.scaled_fp8_quant`` code that a CPU can run."""
    import vllm._custom_ops as operators

    from fp8pass.testing import vllm_operators as reference

    def scaled_fp8_quant(
        input: Any,
        scale: Any = None,
        num_token_padding: int | None = None,
        scale_ub: Any = None,
        use_per_token_if_dynamic: bool = False,
        output: Any = None,
        group_shape: Any = None,
    ) -> tuple[Any, Any]:
        if scale is None:
            per_token = use_per_token_if_dynamic
            scale = (reference.token_scale if per_token else reference.tensor_scale)(input)
        codes = reference.quantise(input, scale)
        if output is not None:
            codes = output.copy_(codes)
        return codes, scale

    operators.scaled_fp8_quant = scaled_fp8_quant


def _operators() -> None:
    from vllm.platforms import current_platform

    from fp8pass.testing.vllm_operators import install as define

    current_platform.import_kernels()  # first, so that no name is defined twice
    define()


def _cutlass() -> None:
    """Put CUDA's CUTLASS products before a CPU's own among the kernels to choose from."""
    install("operators")
    import vllm.model_executor.kernels.linear as linear
    from vllm.model_executor.kernels.linear.scaled_mm.cutlass import (
        CutlassFp8BlockScaledMMKernel,
        CutlassFP8ScaledMMLinearKernel,
    )
    from vllm.platforms import PlatformEnum

    def supported(cls: Any, compute_capability: Any = None) -> tuple[bool, None]:
        return True, None

    for table, kernel in (
        (linear._POSSIBLE_FP8_KERNELS, CutlassFP8ScaledMMLinearKernel),
        (linear._POSSIBLE_FP8_BLOCK_KERNELS, CutlassFp8BlockScaledMMKernel),
    ):
        made = type(kernel.__name__, (kernel,), {"is_supported": classmethod(supported)})
        table[PlatformEnum.CPU].insert(0, made)


def _fusions() -> None:
    """Import vLLM's fusion passes into its pass manager, as it does on a GPU."""
    install("operators")
    from vllm.compilation.passes import pass_manager
    from vllm.compilation.passes.fusion.act_quant_fusion import ActivationQuantFusionPass
    from vllm.compilation.passes.fusion.rms_quant_fusion import RMSNormQuantFusionPass

    pass_manager.ActivationQuantFusionPass = ActivationQuantFusionPass
    pass_manager.RMSNormQuantFusionPass = RMSNormQuantFusionPass


_MENDS: dict[str, Callable[[], None]] = {
    "mode3": _keep_mode_3,
    "quantise": _quantise,
    "operators": _operators,
    "cutlass": _cutlass,
    "fusions": _fusions,
    "serve": lambda: None,
}
