"""Tiny FP8 models, their reference, and ways to watch a compile: for the tests of the pass."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.compile_fx as compile_fx_module
import torch._inductor.config as inductor_config
import torch._inductor.fx_passes.post_grad as post_grad
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.virtualized import V
from torch.utils._python_dispatch import TorchDispatchMode

from fp8pass.nn import calibrate, quantize_
from fp8pass.report import Report
from fp8pass.target import Target

RECIPES = ("static", "dynamic", "dynamic_tensor")
WIDTH = 64


class Norm(nn.Module):
    """Llama's: float32 inside, rounded to the model's dtype before the weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * h.to(x.dtype)


class Block(nn.Module):
    """A Llama layer with gates in the place of attention: ``[..., 64]`` to ``[..., 64]``.

    Sites: 2 norms and 1 activation that are fused, 7 products, and the quantise before ``o_proj``,
    which has no producer. With per-tensor and per-token recipes alike.
    """

    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.mlp_norm = Norm(WIDTH), Norm(WIDTH)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=name == "o_proj"))
        self.gate_proj = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.up_proj = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.input_norm(x)
        x = x + self.o_proj(torch.sigmoid(self.q_proj(h) + self.k_proj(h)) * self.v_proj(h))
        h = self.mlp_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class Pair(nn.Module):
    """The smallest model with a fusion: a norm and a linear, ``[..., 64]`` to ``[..., 32]``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = Norm(WIDTH), nn.Linear(WIDTH, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


class Twin(Pair):
    """A norm with two linears as its readers, so that there are two equal quantises to merge."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, 32, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.linear(h) * self.other(h)


def build(kind: type[nn.Module] = Block, recipe: str | None = "dynamic", seed: int = 0) -> Any:
    """A model in bf16 with random weights; ``recipe=None``: without FP8."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind().to(torch.bfloat16).eval()
    if recipe == "static":
        quantize_(model, recipe, calibration=calibrate(model, [rows(16, seed=9)]))
    elif recipe is not None:
        quantize_(model, recipe)
    return model


def functional(model: nn.Module, *inputs: Tensor) -> tuple[Any, ...]:
    """(function, inputs, parameters, buffers): the model as a function of all its tensors."""
    named = [*model.named_parameters(), *model.named_buffers()]
    names = [name for name, _ in named]

    def function(*values: Tensor) -> Any:
        own = dict(zip(names, values[len(inputs) :], strict=True))
        return torch.func.functional_call(model, own, values[: len(inputs)])

    return (function, *inputs, *(value for _, value in named))


def rows(*shape: int, seed: int = 1) -> Tensor:
    """Random bf16 ``[*shape, 64]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, WIDTH, generator=generator).to(torch.bfloat16)


# ---- numbers -------------------------------------------------------------------------------------


class _Products64(TorchDispatchMode):
    """Every scaled product from dequantised float64 operands, rounded once."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.ops.aten._scaled_mm.default:
            return func(*args, **(kwargs or {}))
        a, b, scale_a, scale_b, bias, result_scale, out_dtype = (*args, *[None] * 3)[:7]
        named = {"bias": bias, "out_dtype": out_dtype, **(kwargs or {})}
        assert result_scale is None
        product = (a.double() * scale_a.double()) @ (b.double() * scale_b.double())
        if named["bias"] is not None:
            product = product + named["bias"].double()
        return product.to(named["out_dtype"])


def reference(model: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """What the model means: all its roundings in eager's places, products exact before theirs."""
    with torch.no_grad(), _Products64():
        return model(*inputs)


def ideal(model: nn.Module, x: Tensor) -> Tensor:
    """The model in float64 with its quantises, but no rounding to the model's dtype, in float64."""
    wide = copy.deepcopy(model).double()
    with torch.no_grad(), _Products64():
        for module in wide.modules():
            if hasattr(module, "weight_scale"):
                module.forward = _forward64.__get__(module)
            elif isinstance(module, Norm):
                module.forward = _norm64.__get__(module)
        return wide(x.double())


def _norm64(self: Norm, x: Tensor) -> Tensor:
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


def _forward64(self: Any, x: Tensor) -> Tensor:
    if self.input_scale is not None:
        scale = self.input_scale.double()
    elif self.recipe == "dynamic":
        scale = x.abs().amax(-1, keepdim=True) / 448
    else:
        scale = x.abs().amax() / 448
    scale = scale.clamp(min=1e-12)
    codes = (x / scale).clamp(-448, 448).float().to(self.weight.dtype)
    weight = self.weight.double() * self.weight_scale.double().reshape(-1, 1)
    bias = 0 if self.bias is None else self.bias
    return (codes.double() * scale) @ weight.t() + bias


#: Relative distance from :func:`reference` that compiled code may have: another order of a sum
#: moves a few codes. What older versions generate for a CPU leaves out roundings, as stock does.
CLOSE = 5e-3 if Target.parse("cpu").torch_version >= (2, 13) else 2e-2


def distance(value: Tensor, wanted: Tensor) -> float:
    """Relative L2 distance."""
    difference = (value.double() - wanted.double()).norm()
    return float(difference / wanted.double().norm().clamp(min=1e-30))


# ---- watching ------------------------------------------------------------------------------------


@contextmanager
def messages(level: int = logging.WARNING) -> Iterator[list[str]]:
    """What is logged to ``fp8pass`` meanwhile."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger, handler = logging.getLogger("fp8pass"), Keep(level)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


class Watch:
    """A pass of somebody else: keeps the text of each graph that it sees, and changes nothing."""

    def __init__(self, name: str = "", log: list[str] | None = None) -> None:
        self.name, self.log, self.texts = name, log if log is not None else [], []

    def __call__(self, graph: fx.Graph) -> None:
        self.log.append(self.name)
        self.texts.append(text_of(graph))

    def __deepcopy__(self, memo: object) -> Watch:
        return self


def text_of(graph: fx.Graph) -> str:
    """Every node with its name, arguments and value: equal texts are equal graphs."""
    lines = []
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            value = (value.dtype, tuple(value.shape), tuple(value.stride()), value.device)
        lines.append(f"{node.op} {node.name} {node.target} {node.args} {node.kwargs} {value}")
    return "\n".join(lines)


@contextmanager
def without_code(final: list[str] | None = None) -> Iterator[None]:
    """Within, Inductor runs all its graph passes, hooks included, and interprets the result.

    No code is generated and no cache is asked, so that a compile takes a fraction of a second.

    Args:
        final: gets the text of each graph after all passes.
    """
    real = compile_fx_module.compile_fx

    def inner(gm: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        with V.set_fake_mode(torch._guards.detect_fake_mode(inputs)):
            post_grad.view_to_reshape(gm)
            post_grad.post_grad_passes(gm, is_inference=not torch.is_grad_enabled())
        if final is not None:
            final.append(text_of(gm.graph))
        gm.recompile()
        return make_boxed_func(gm.forward)

    def compile_fx(gm: Any, inputs: Any, inner_compile: Any = None, **rest: Any) -> Any:
        return real(gm, inputs, inner_compile=inner, **rest)

    compile_fx_module.compile_fx = compile_fx
    torch._dynamo.reset()
    caches = inductor_config.patch(force_disable_caches=True)
    autograd_cache = functorch_config.patch(enable_autograd_cache=False)
    try:
        with torch.no_grad(), caches, autograd_cache:
            yield
    finally:
        compile_fx_module.compile_fx = real
        torch._dynamo.reset()


def run(function: Any, *inputs: Any, **arguments: Any) -> tuple[Any, str]:
    """The result of a compile :func:`without_code`, and the text of the one graph that it ran."""
    with without_code(final := []):
        result = torch.compile(function, fullgraph=True, **arguments)(*inputs)
    (text,) = final
    return result, text


def count_ours(text: str) -> int:
    """Number of operators of fp8pass in the text of a graph."""
    return sum(" fp8pass." in line for line in text.splitlines())


def codes(*found: Report) -> set[str]:
    """The codes of the verdicts on all graphs; "" for one that was worked on."""
    verdicts = [record.verdict for report in found for record in report.graphs]
    return {"" if verdict is None else verdict.code for verdict in verdicts}


def digest(value: Tensor) -> str:
    """The bits of a tensor, in short."""
    raw = value.detach().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()[:16]
