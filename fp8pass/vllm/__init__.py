"""fp8pass inside vLLM: a compilation pass that every worker runs, and the plugin that adds it.

Two ways in (docs/vllm.md):

* name the pass in vLLM's configuration, without any plugin::

      -cc.inductor_passes.post_grad_custom_post_pass=fp8pass_vllm.PASS

* ask the plugin, which vLLM finds by itself: ``FP8PASS_VLLM=complement vllm serve ...`` or
  ``additional_config={"fp8pass": {"mode": "complement"}}``.

Importing this package imports no vLLM; :mod:`fp8pass.vllm.vllm_pass` does, and is loaded when a
pass is made.

=====================  =============================================================
:mod:`.asking`         what the user asked for: environment and ``additional_config``
:mod:`.versions`       which vLLM this works with
:mod:`.plugin`         the entry point, and the one function of vLLM that it wraps
:mod:`.vllm_pass`      the pass
:mod:`.announcing`     one line per engine, the report in folders, after a warm start too
=====================  =============================================================
"""

from __future__ import annotations
