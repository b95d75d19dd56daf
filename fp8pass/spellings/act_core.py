"""Reads the activation function alone: SiLU, GELU, ReLU and its square, in their closed forms.

    div             g / (exp(-g) + 1)
    sigmoid         g * sigmoid(g)
    gelu_quick      g * sigmoid(g * 1.702)
    gelu_erf        (g * 0.5) * (erf(g * sqrt(1/2)) + 1)
    gelu_erf_div    (g * 0.5) * (erf(g / sqrt(2)) + 1)
    gelu_tanh       (g * 0.5) * (tanh((g + (g * g * g) * 0.044715) * sqrt(2/pi)) + 1)
    gelu_tanh_pow   the same with pow(g, 3)
    relu, relu2     relu(g); pow(relu(g), 2) or relu(g) * relu(g)

Operands of sums and products may stand in either order, which changes no bit; another association
is another form. All steps have one dtype.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import fx

from fp8pass.ops.act_form import CUBIC, QUICK, SQRT_2_OVER_PI, SQRT_HALF, SQRT_TWO
from fp8pass.ops.forms import MODEL_DTYPES
from fp8pass.spellings.walk import ADD, DIV, MUL, aten, commuted, dtype_of, is_call, scalar


class Core(NamedTuple):
    """An activation of ``gate``: the word of its form."""

    gate: fx.Node
    act: str


def match_core(node: Any) -> Core | None:
    """The activation whose last step is ``node``; None if it is none of the closed forms."""
    found = _core(node)
    if found is None or dtype_of(node) not in MODEL_DTYPES:
        return None
    return found if dtype_of(found.gate) == dtype_of(node) else None


def is_activation_step(node: fx.Node) -> bool:
    """Whether a node hints at an activation: erf, tanh, sigmoid, relu, or 1 + exp(x)."""
    if is_call(node, aten.erf.default, aten.tanh.default, aten.sigmoid.default, aten.relu.default):
        return True
    raised = commuted(node, ADD, lambda a: scalar(a) == 1.0)
    return raised is not None and is_call(raised[1], aten.exp.default)


def _core(node: Any) -> Core | None:
    if is_call(node, aten.relu.default):
        return _made(node.args[0], "relu")
    if is_call(node, aten.pow.Tensor_Scalar):
        base, power = node.args
        if scalar(power) == 2.0 and is_call(base, aten.relu.default):
            return _made(base.args[0], "relu2")
        return None
    if is_call(node, aten.div.Tensor) and not node.kwargs:
        return _silu_div(node)
    if not is_call(node, aten.mul.Tensor):
        return None
    first, second = node.args
    if first is second and is_call(first, aten.relu.default):
        return _made(first.args[0], "relu2")
    return _times_sigmoid(node) or _gelu(node)


def _made(gate: Any, act: str) -> Core | None:
    return Core(gate, act) if isinstance(gate, fx.Node) else None


def _silu_div(node: fx.Node) -> Core | None:
    shifted = commuted(node.args[1], ADD, lambda a: scalar(a) == 1.0)
    if shifted is None or not is_call(shifted[1], aten.exp.default):
        return None
    negated = shifted[1].args[0]
    if is_call(negated, aten.neg.default) and negated.args[0] is node.args[0]:
        return _made(node.args[0], "div")
    return None


def _times_sigmoid(node: fx.Node) -> Core | None:
    for sigmoid, gate in (node.args, reversed(node.args)):
        if not is_call(sigmoid, aten.sigmoid.default):
            continue
        if sigmoid.args[0] is gate:
            return _made(gate, "sigmoid")
        if _times(sigmoid.args[0], QUICK) is gate:
            return _made(gate, "gelu_quick")
    return None


def _gelu(node: fx.Node) -> Core | None:
    for raised, halved in (node.args, reversed(node.args)):
        plus_one = commuted(raised, ADD, lambda a: scalar(a) == 1.0)
        gate = _times(halved, 0.5)
        if plus_one is None or gate is None:
            continue
        step = plus_one[1]
        if is_call(step, aten.erf.default):
            inner = step.args[0]
            if _times(inner, SQRT_HALF) is gate:
                return _made(gate, "gelu_erf")
            if is_call(inner, *DIV) and not inner.kwargs and scalar(inner.args[1]) == SQRT_TWO:
                return _made(gate, "gelu_erf_div") if inner.args[0] is gate else None
        elif is_call(step, aten.tanh.default):
            act = _cubic(_times(step.args[0], SQRT_2_OVER_PI), gate)
            return None if act is None else _made(gate, act)
    return None


def _cubic(node: Any, gate: Any) -> str | None:
    """The form of GELU whose ``g + 0.044715 g^3`` is ``node``."""
    found = commuted(node, ADD, lambda a: a is gate)
    cube = None if found is None else _times(found[1], CUBIC)
    if is_call(cube, aten.pow.Tensor_Scalar):
        return "gelu_tanh_pow" if cube.args[0] is gate and scalar(cube.args[1]) == 3.0 else None
    outer = commuted(cube, (aten.mul.Tensor,), lambda a: a is gate)
    square = None if outer is None else outer[1]
    is_square = is_call(square, aten.mul.Tensor) and all(a is gate for a in square.args)
    return "gelu_tanh" if is_square else None


def _times(node: Any, factor: float) -> fx.Node | None:
    """``x`` for ``x * factor`` or ``factor * x``."""
    found = commuted(node, MUL, lambda a: scalar(a) == factor)
    return found[1] if found is not None and isinstance(found[1], fx.Node) else None
