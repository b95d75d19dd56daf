"""``PASS``: fp8pass's pass for vLLM, in a module of its own.

vLLM looks the name up in a top-level module only::

    vllm serve MODEL --compilation-config \
        '{"inductor_passes": {"post_grad_custom_post_pass": "fp8pass_vllm.PASS"}}'

Options come from the environment (``FP8PASS_...``, see :mod:`fp8pass.options`). The slot
``post_grad_custom_post_pass`` comes after vLLM's own fusions, ``post_grad_custom_pre_pass`` before.
"""

from fp8pass.vllm.vllm_pass import VllmPass

PASS = VllmPass()
