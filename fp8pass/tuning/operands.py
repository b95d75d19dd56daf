"""Random operands for a problem, and the callables of the kernels that can take it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8pass.lowerings.registry import EmitSite, Kernel
from fp8pass.ops.linear import shaped_scale, spread_scale
from fp8pass.problem import ScaledMMProblem
from fp8pass.quant_key import QuantKey
from fp8pass.target import HOST, Target

#: No operand is made with more elements: it is either a slip or has no place beside the others.
_MOST = 2**35

_NAMES = ("a", "b", "scale_a", "scale_b", "bias", "prepared")


@dataclass(slots=True)
class Operands:
    """The inputs of one product of ``m`` rows, on the live device."""

    a: torch.Tensor
    b: torch.Tensor
    scale_a: torch.Tensor
    scale_b: torch.Tensor
    bias: torch.Tensor | None
    prepared: torch.Tensor | None

    @property
    def bytes(self) -> int:
        """Memory of what a product reads."""
        found = (getattr(self, name) for name in _NAMES)
        return sum(t.numel() * t.element_size() for t in found if t is not None)


def why_not_measured(problem: ScaledMMProblem) -> str:
    """Why no operands can be made for a problem; "" if they can."""
    if problem.n is None or problem.k is None:
        return "N or K is symbolic"
    if problem.weight_only:
        return "its activations are not quantised"
    if problem.zero != "none" or problem.form:
        return f"the zero point {problem.zero} {problem.form}".rstrip()
    if problem.prepared and problem.prepared_dtype not in (None, torch.bfloat16):
        return f"a prepared copy in {problem.prepared_dtype}"
    if min(problem.n, problem.k) == 0:
        return "the product is empty"
    rows = problem.m.lo if problem.m.hi is None else problem.m.hi if problem.m.static else 0
    if max(problem.n * problem.k, rows * problem.k, rows * problem.n) > _MOST:
        return f"an operand or the result has more than {_MOST} elements"
    if (problem.a_layout, problem.b_layout) != ("row", "col"):
        return f"operands in layout {problem.a_layout} and {problem.b_layout}"
    for key in (problem.activation, problem.weight):
        if key.scale.format != "fp32" or key.scale.dtype != torch.float32 or not key.symmetric:
            return f"the quantisation {key}"
    return ""


def operands(problem: ScaledMMProblem, m: int, device: torch.device, seed: int) -> Operands:
    """Operands with random codes and random scales; ``why_not_measured`` must be ``""``."""
    n, k = problem.n, problem.k
    assert n is not None and k is not None
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    def codes(rows: int, dtype: torch.dtype) -> torch.Tensor:
        width = k if problem.packed else k + 16
        made = torch.empty((rows, width), dtype=dtype, device=device)
        step = max(1, (64 << 20) // width)  # a wide copy of a large weight would not fit beside it
        for start in range(0, rows, step):
            part = normal(min(step, rows - start), width) * 16
            made[start : start + step] = part.to(dtype)
        return made[:, :k]

    def scale(key: QuantKey, rows: int, cols: int) -> torch.Tensor:
        group = key.scale.group
        shape = [1 if g == -1 else -(-s // g) for s, g in ((rows, group.row), (cols, group.col))]
        made = torch.rand(shape, device=device, generator=generator) * 0.01 + 1e-3
        return made.reshape(()) if key.granularity == "tensor" else made

    weight = codes(n, problem.weight.dtype)
    prepared = None
    if problem.prepared:
        from fp8pass.tuning.live import prepared_weight

        prepared = prepared_weight(weight)
    scale_b = scale(problem.weight, k, n)
    if problem.weight.granularity.startswith("group"):
        scale_b = scale_b.t().contiguous().t()  # laid out beside a row-major weight
    return Operands(
        codes(m, problem.activation.dtype), weight.t(), scale(problem.activation, m, k), scale_b,
        None if problem.bias is None else normal(n).to(problem.bias), prepared,
    )  # fmt: skip


def caller(
    kernel: Kernel, target: Target, problem: ScaledMMProblem, like: Operands, numerics: str
) -> Callable[[Operands], Any]:
    """The kernel as a function of operands like those given.

    A kernel of one call is that call. One of several is its graph, node by node, without what a
    code generator would fuse: it is measured at its worst.
    """
    fast = problem.use_fast_accum or numerics == "fast"
    run = kernel.run
    if run is not None:
        return lambda s: run(s.a, s.b, s.scale_a, s.scale_b, s.bias, problem.out_dtype, fast)
    graph = fx.Graph()
    mode = FakeTensorMode(allow_non_fake_inputs=False)
    nodes: dict[str, fx.Node | None] = {}
    for name in _NAMES:
        value = getattr(like, name)
        if value is None:
            nodes[name] = None
            continue
        node = nodes[name] = graph.placeholder(name)
        node.meta["val"] = mode.from_tensor(value)
    output = graph.output(None)
    a, b, scale_a, scale_b = (nodes[name] for name in _NAMES[:4])
    assert a is not None and b is not None and scale_a is not None and scale_b is not None
    with mode, graph.inserting_before(output):
        val = torch.empty(
            (like.a.shape[0], like.b.shape[1]), dtype=problem.out_dtype, device=like.a.device
        )
        site = EmitSite(
            a, b, scale_a, scale_b, nodes["bias"], nodes["prepared"], problem.out_dtype, problem,
            target, numerics, val,
        )  # fmt: skip
        output.args = (kernel.emit(graph, site),)
    module = fx.GraphModule(torch.nn.Module(), graph)
    given = [name for name in _NAMES if nodes[name] is not None]
    forward: Callable[..., Any] = module.forward
    return lambda s: forward(*(getattr(s, name) for name in given))


# ---- numbers -------------------------------------------------------------------------------------


def why_wrong(out: Any, s: Operands, problem: ScaledMMProblem, rows: int = 48) -> str:
    """What is wrong with a product, compared with float64 on some of its rows; "" if nothing.

    The contract of docs/numerics.md: 2 ulp of the result + 2^-10 of the sum of magnitudes (2^-6
    where reduced accumulation is allowed), and a mean error below 0.5 %.
    """
    m, n = s.a.shape[0], s.b.shape[1]
    if not isinstance(out, torch.Tensor) or out.shape != (m, n) or out.dtype != problem.out_dtype:
        return f"it gave {getattr(out, 'dtype', type(out))} of {getattr(out, 'shape', '?')}"
    pick = torch.arange(m, device=out.device)
    if m > rows:  # the first, the last, and some between
        pick = torch.linspace(0, m - 1, rows, device=out.device).round().long()
    # float64 for all that follows; the host's is slow enough to take fewer columns of a wide weight
    step = max(1, n // 2048) if out.device.type == HOST else 1
    a = _wide(s.a, s.scale_a, problem.activation)[pick]
    b = _wide(s.b, s.scale_b, problem.weight)[:, ::step]
    exact, size = a @ b, a.abs() @ b.abs()
    if s.bias is not None:
        bias = s.bias.double()[::step]
        exact, size = exact + bias, size + bias.abs()
    found = out[pick][:, ::step].double()
    if not bool(found.isfinite().all()):
        return "it gave a value that is not finite"
    error = (found - exact).abs()
    bits = 6 if problem.use_fast_accum else 10
    allowed = 2 * torch.finfo(out.dtype).eps * exact.abs() + size * 2.0**-bits
    worst = float((error / allowed.clamp_min(1e-300)).max())
    mean = float(error.mean() / exact.abs().mean().clamp_min(1e-300))
    if worst > 1 or mean > 0.005:
        return f"largest error {worst:.2g} times what is allowed, mean error {100 * mean:.2g} %"
    return ""


def _wide(codes: torch.Tensor, scale: torch.Tensor, key: QuantKey) -> torch.Tensor:
    group = key.scale.group
    shaped = shaped_scale(scale, group.name)
    if group.name.startswith("group"):
        shaped = spread_scale(shaped, group, codes.shape)
    return codes.double() * shaped.double()
