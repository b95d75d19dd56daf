"""Problems as text: ``"token x channel, m=1-, n=4096, k=4096, out=bf16, bias"`` and back.

For command lines, tables and caches. The first part names the quantisation of both operands, the
others are fields in any order; what is left out has a default, and a name that is not known is an
error that lists what is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch

from fp8pass.errors import OptionError, choices
from fp8pass.outside import shortened, whole_number
from fp8pass.problem import MRange, ScaledMMProblem
from fp8pass.quant_key import QuantKey, dtype_name
from fp8pass.target import HOST, Target

#: One word for the quantisation of both operands. ``{fp8}`` is the target's own fp8 dtype.
SHORT: dict[str, tuple[str, str]] = {
    "tensor": ("{fp8}/dynamic/tensor", "{fp8}/static/tensor"),
    "static": ("{fp8}/static/tensor", "{fp8}/static/tensor"),
    "row": ("{fp8}/dynamic/token", "{fp8}/static/channel"),
    "mixed": ("{fp8}/dynamic/tensor", "{fp8}/static/channel"),
    "block": ("{fp8}/dynamic/group1x128", "{fp8}/static/group128x128"),
    "block-ue8m0": ("{fp8}/dynamic/group1x128/ue8m0", "{fp8}/static/group128x128/ue8m0"),
    "int8": ("int8/dynamic/token", "int8/static/channel"),
    "int8-azp": ("int8/dynamic/token/asym", "int8/static/channel"),
}
_OUT = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_OUT_NAMES = {dtype: name for name, dtype in _OUT.items()}
_FLAGS = ("bias", "fast_accum", "padded", "prepared")
_FIELDS = (
    "m", "n", "k", "out", "bias", "a", "b", "zero", "zero_dtype", "prepared_dtype", "form",
)  # fmt: skip
_ANY = "any"

T = TypeVar("T")


def parse_problem(text: str, target: Target | None = None) -> ScaledMMProblem:
    """The problem that ``text`` names, for ``target`` (its fp8 dtype, its kind of device).

    Parts are separated by commas. The first is the quantisation: a word of :data:`SHORT`, two
    granularities (``token x channel``), or two keys (``float8_e4m3fn/dynamic/token x
    float8_e4m3fn/static/channel``). Then, in any order:

    - ``m=17``, ``m=1-64``, ``m=0-`` (default: any number of rows), but not ``m=0``;
    - ``n=4096``, ``k=4096`` (the default), greater than 0, ``n=any`` for a size that is not known;
    - ``out=bf16`` (the default), ``fp16`` or ``fp32``;
    - ``bias`` (in the dtype of the result), ``bias=fp32``;
    - ``fast_accum``, ``prepared``, ``padded`` (rows with a gap between them), ``a=row|col|strided``
      and ``b=col|row|strided``;
    - ``zero``, ``zero_dtype``, ``prepared_dtype`` and ``form`` as in the problem, with ``;`` for
      ``,``.

    Raises:
        OptionError: a part that is not understood, with what is allowed.
    """
    scales, *parts = (part.strip() for part in text.split(","))
    activation, weight = parse_scales(scales, target)
    values: dict[str, str] = {}
    for part in parts:
        if not part:
            continue
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if (equals and name not in _FIELDS) or (not equals and name not in _FLAGS):
            allowed = choices([*(f"{field}=..." for field in _FIELDS), *_FLAGS])
            raise OptionError(f"problem {text!r}: {part!r} is not known; allowed: {allowed}")
        if name in values:
            raise OptionError(f"problem {text!r}: {name!r} is given twice")
        values[name] = value
    out = _one_of(text, "out", values.get("out", "bf16"), _OUT)
    bias = None
    if "bias" in values:
        bias = _one_of(text, "bias", values["bias"] or _OUT_NAMES[out], _OUT)
    layouts = {name: name for name in ("row", "col", "strided")}
    return ScaledMMProblem(
        activation=activation,
        weight=weight,
        m=parse_rows(values.get("m", _ANY), f"problem {text!r}: "),
        n=_size(text, "n", values.get("n", "4096")),
        k=_size(text, "k", values.get("k", "4096")),
        out_dtype=out,
        bias=bias,
        use_fast_accum="fast_accum" in values,
        a_layout=_one_of(text, "a", values.get("a", "row"), layouts),
        b_layout=_one_of(text, "b", values.get("b", "col"), layouts),
        packed="padded" not in values,
        prepared="prepared" in values,
        zero=values.get("zero", "none"),
        zero_dtype=_any_dtype(text, values.get("zero_dtype")),
        prepared_dtype=_any_dtype(text, values.get("prepared_dtype")),
        form=values.get("form", "").replace(";", ","),
        device_type=HOST if target is None else target.device_type,
    )


def problem_text(problem: ScaledMMProblem) -> str:
    """The inverse of :func:`parse_problem`, with the keys written out; its device is not in it."""
    parts = [f"{problem.activation} x {problem.weight}"]
    parts.append(f"m={problem.m}")
    for name, size in (("n", problem.n), ("k", problem.k)):
        parts.append(f"{name}={_ANY if size is None else size}")
    parts.append(f"out={_dtype(problem.out_dtype)}")
    if problem.bias is not None:
        parts.append(f"bias={_dtype(problem.bias)}")
    if problem.use_fast_accum:
        parts.append("fast_accum")
    if problem.a_layout != "row":
        parts.append(f"a={problem.a_layout}")
    if problem.b_layout != "col":
        parts.append(f"b={problem.b_layout}")
    if not problem.packed:
        parts.append("padded")
    if problem.prepared:
        parts.append("prepared")
    if problem.prepared_dtype is not None:
        parts.append(f"prepared_dtype={_dtype(problem.prepared_dtype)}")
    if problem.zero != "none":
        parts.append(f"zero={problem.zero}")
    if problem.zero_dtype is not None:
        parts.append(f"zero_dtype={_dtype(problem.zero_dtype)}")
    if problem.form:
        parts.append(f"form={problem.form.replace(',', ';')}")
    return ", ".join(parts)


def _dtype(dtype: torch.dtype) -> str:
    return _OUT_NAMES.get(dtype) or dtype_name(dtype)


def parse_scales(text: str, target: Target | None = None) -> tuple[QuantKey, QuantKey]:
    """The keys of activation and weight: a word of :data:`SHORT`, or two of them around ``x``.

    Raises:
        OptionError: neither.
    """
    fp8 = dtype_name((target and target.fp8_dtype) or torch.float8_e4m3fn)
    if text in SHORT:
        activation, weight = SHORT[text]
    else:
        parts = [part.strip() for part in text.split(" x ")]
        if len(parts) != 2 or not all(parts):
            raise OptionError(
                f"scales {text!r} are not known; allowed: {choices(SHORT)}, or the scales of "
                "activation and weight as 'token x channel'"
            )
        activation, weight = (
            part if part.count("/") >= 2 else f"{{fp8}}/{when}/{part}"
            for part, when in zip(parts, ("dynamic", "static"), strict=True)
        )
    return (
        QuantKey.parse(activation.replace("{fp8}", fp8)),
        QuantKey.parse(weight.replace("{fp8}", fp8)),
    )


def with_rows(problem: ScaledMMProblem, rows: int) -> ScaledMMProblem:
    """The same product of ``rows`` rows."""
    return replace(problem, m=MRange(rows, rows))


def _one_of(text: str, name: str, value: str, allowed: dict[str, T]) -> T:
    if value not in allowed:
        raise OptionError(f"problem {text!r}: {name}={value!r}; allowed: {choices(allowed)}")
    return allowed[value]


def _any_dtype(text: str, name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    found = _OUT.get(name) or getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise OptionError(f"problem {text!r}: {name!r} is not a dtype")
    return found


def parse_rows(value: str, where: str = "") -> MRange:
    """The range of rows that ``17``, ``1-64``, ``1-`` or ``any`` names; not one of no rows alone.

    Raises:
        OptionError: anything else; ``where`` stands before the message.
    """
    if value == _ANY:
        return MRange()
    try:
        found = MRange.parse(value)
    except ValueError:
        found = None
    if found is None or found.hi == 0:
        raise OptionError(
            f"{where}m={shortened(value)}; allowed: a number > 0, 'LO-HI' with LO <= HI, 'LO-' or "
            f"{_ANY!r}"
        )
    return found


def parse_sizes(text: str) -> tuple[int, int] | None:
    """N and K of ``"N,K"``, both greater than 0; None for anything else."""
    try:
        n, k = (whole_number(part.strip()) for part in text.split(","))
    except ValueError:
        return None
    return (n, k) if n and k else None


def _size(text: str, name: str, value: str) -> int | None:
    if value == _ANY:
        return None
    try:
        number = whole_number(value)
    except ValueError:
        number = 0
    if not number:
        raise OptionError(
            f"problem {text!r}: {name}={shortened(value)}; allowed: a number > 0 or {_ANY!r}"
        )
    return number
