"""A pass for vLLM that rewrites scaled products and nothing else: ``products_only.PASS``."""

from typing import Any

from torch import fx
from vllm.compilation.passes.inductor_pass import InductorPass

from fp8pass.options import Options
from fp8pass.passes import Fp8Pass


class ProductsOnly(InductorPass):
    def __call__(self, graph: fx.Graph) -> None:
        Fp8Pass(Options.resolve(), "post")(graph)

    def uuid(self) -> Any:
        return Fp8Pass(Options.resolve(), "post").identity_text()


PASS = ProductsOnly()
