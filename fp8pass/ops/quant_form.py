"""QuantForm: how a tensor is quantised (see :mod:`fp8pass.ops.forms`)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar

import torch

from fp8pass.errors import OptionError
from fp8pass.ops.form_words import DTYPES, MODEL_NAMES, NAMES, pick


@dataclass(frozen=True, slots=True)
class QuantForm:
    """How a tensor is quantised to fp8 or int8.

    ``q = clamp(x.to(compute) / scale, lo, hi).to(dtype)``; for int8 the quotient is rounded to the
    nearest integer first, ties to even.

    With a zero point (int8 alone) ``q = clamp(round(x / scale) + zero, lo, hi)``, and a dynamic
    scale comes from ``span = max - min`` of each group instead of ``amax``; the zero point is
    ``lo - min / scale``, rounded. Scale and zero point then travel as one float32 tensor whose last
    dim has the two.

    A dynamic scale comes from ``amax``, the largest ``|x|`` of each group, which is exact in every
    dtype. With ``amax' = max(min(amax, ceiling), floor_value)`` (as far as the form has them), all
    in ``scale_dtype`` (and ``upper`` as a further bound of ``amax`` or of the scale):

    - ``div``: ``scale = amax' / qmax``; ``mul``: ``scale = amax' * qmax`` (the factor itself);
    - ``inverse``: ``r = qmax / amax'`` is computed and rounded to float32, values are multiplied by
      ``r`` (``apply`` is ``mul_inverse``), and the dequant scale is ``1 / r``.

    Then the floor of the scale, the power of two, and the conversion to float32.

    Attributes:
        dtype: the dtype of the codes.
        granularity: ``tensor``, ``token`` (one scale per row, over the last dim) or ``group<n>``
            (one for each ``n`` neighbours in the last dim, whose size is a multiple of ``n``).
        compute: dtype in which ``x`` is divided; float32, or a model dtype where the source divides
            without an upcast (and so rounds once more).
        scale: ``given`` (static) or one of the three expressions above.
        qmax: the constant of that expression; for ``mul`` the factor itself.
        floor: ``none``; ``scale`` or ``amax`` (that is clamped from below by ``floor_value``);
            ``scale_add`` or ``amax_add`` (``floor_value`` is added to it); ``amax_zero``
            (``floor_value`` takes the place of an ``amax`` that is not above zero); ``divisor``
            (values are divided by ``max(scale, floor_value)``, the scale itself has no floor).
        floor_value: that number.
        apply: ``div``, ``mul_recip`` (multiply by the reciprocal of the scale) or ``mul_inverse``.
        lo, hi: the clamp before the cast.
        scale_dtype: dtype of the scale's arithmetic; amax is converted to it first.
        ceiling: upper bound of amax, inf if there is none.
        power: ``none``, or how the scale is made a power of two, ``ceil``: ``exp2(ceil(log2(s)))``;
            ``floor``, of ``r`` in the form ``inverse``: ``exp2(floor(log2(r)))``; ``e8m0``: by the
            cast to float8_e8m0fnu and back; ``ceil_e8m0``: ``ceil``, then that cast.
        upper: where an upper bound that is a tensor of one element (``scale_ub``) is taken:
            ``none``, ``amax`` or ``scale`` (``min(amax, scale_ub)``, before its floor), or
            ``amax_last``, ``scale_last`` (after that floor, which it then may undercut).
        layout: strides of the scale of a ``group<n>``: ``row`` (contiguous), ``col`` (column-major,
            ``(1, M)``) or ``tma`` (column-major, columns a multiple of 4 rows apart).
        zero: ``none``; ``given`` (with a given scale); ``lo_round``: ``lo - round(min / scale)``;
            ``round_lo``: ``round(lo - min / scale)``; both in the dtype of the scale.
        zero_at: ``after`` the quotient was rounded the zero point is added to it, or ``before``.
        zero_clamp: whether the zero point is clamped to ``[lo, hi]``: ``none`` or ``codes``.
        zero_dtype: dtype that a computed zero point is converted to before it is added.
        span: ``values``, or min and max are those of the values and of 0: ``zero`` by ``minimum``
            and ``maximum`` with zeros, ``clamped`` by a clamp at 0 (which keeps -0.0).
    """

    dtype: torch.dtype
    granularity: str
    compute: torch.dtype
    scale: str
    qmax: float
    floor: str
    floor_value: float
    apply: str
    lo: float
    hi: float
    scale_dtype: torch.dtype = torch.float32
    ceiling: float = math.inf
    power: str = "none"
    layout: str = "row"
    zero: str = "none"
    zero_at: str = "after"
    zero_clamp: str = "none"
    zero_dtype: torch.dtype = torch.float32
    span: str = "values"
    upper: str = "none"

    GRANULARITIES: ClassVar = ("tensor", "token", "group<n>")
    SCALES: ClassVar = ("given", "div", "mul", "inverse")
    FLOORS: ClassVar = (
        "none",
        "scale",
        "amax",
        "scale_add",
        "amax_add",
        "amax_zero",
        "divisor",
    )
    APPLIES: ClassVar = ("div", "mul_recip", "mul_inverse")
    POWERS: ClassVar = ("none", "ceil", "floor", "e8m0", "ceil_e8m0")
    LAYOUTS: ClassVar = ("row", "col", "tma")
    ZEROS: ClassVar = ("none", "given", "lo_round", "round_lo")
    ZERO_PLACES: ClassVar = ("after", "before")
    ZERO_CLAMPS: ClassVar = ("none", "codes")
    ZERO_DTYPES: ClassVar = ("float32", "bfloat16", "float16", "int32", "int8")
    SPANS: ClassVar = ("values", "zero", "clamped")
    UPPERS: ClassVar = ("none", "amax", "amax_last", "scale", "scale_last")

    @property
    def static(self) -> bool:
        """Whether the scale is an input of the quantisation."""
        return self.scale == "given"

    @property
    def group(self) -> int | None:
        """The number of values that share a scale of a ``group<n>``, else None."""
        return int(self.granularity[5:]) if self.granularity.startswith("group") else None

    @property
    def plain(self) -> bool:
        """Whether everything after ``hi`` has its usual value: what a kernel must not ignore."""
        return not self._extras()

    @property
    def key(self) -> str:
        """The text of this tensor's :class:`fp8pass.quant_key.QuantKey`."""
        when = "static" if self.static else "dynamic"
        group = self.group
        name = self.granularity if group is None else f"group1x{group}"
        return f"{NAMES[self.dtype]}/{when}/{name}{'/asym' if self.asymmetric else ''}"

    @property
    def asymmetric(self) -> bool:
        """Whether there is a zero point."""
        return self.zero != "none"

    def scale_shape(self, shape: tuple[Any, ...]) -> tuple[Any, ...]:
        """The shape of the scale (with the zero point, if any) for a value of ``shape``."""
        if self.asymmetric:
            return (2,) if self.granularity == "tensor" else (*shape[:-1], 2)
        if self.granularity == "tensor":
            return ()
        group = self.group
        return (*shape[:-1], 1 if group is None else shape[-1] // group)

    def _extras(self) -> dict[str, str]:
        extras = {}
        for field in fields(self)[10:]:
            value = getattr(self, field.name)
            if value != field.default:
                extras[field.name] = NAMES.get(value) or str(value)
        return extras

    def __str__(self) -> str:
        return ",".join(
            (
                NAMES[self.dtype],
                self.granularity,
                NAMES[self.compute],
                self.scale,
                repr(self.qmax),
                self.floor,
                repr(self.floor_value),
                self.apply,
                repr(self.lo),
                repr(self.hi),
                *(f"{name}={value}" for name, value in self._extras().items()),
            )
        )

    @staticmethod
    @cache
    def parse(text: str) -> QuantForm:
        """Raises :class:`OptionError` for anything that is not in the closed lists."""
        parts = text.split(",")
        if len(parts) < 10:
            raise OptionError(f"quantise form {text!r} has fewer than 10 parts")
        codes = tuple(name for name in DTYPES if name.startswith(("float8", "int8")))
        try:
            qmax, floor_value, lo, hi = (float(parts[i]) for i in (4, 6, 8, 9))
        except ValueError:
            raise OptionError(f"quantise form {text!r} has a part that is not a number") from None
        if not all(map(math.isfinite, (qmax, floor_value, lo, hi))):
            raise OptionError(f"quantise form {text!r} has a part that is not finite")
        granularity = parts[1]
        if re.fullmatch(r"group[1-9][0-9]*", granularity) is None:
            pick(granularity, QuantForm.GRANULARITIES[:2], "granularity (or group<n>)")
        form = QuantForm(
            dtype=DTYPES[pick(parts[0], codes, "dtype of codes")],
            granularity=granularity,
            compute=DTYPES[pick(parts[2], MODEL_NAMES, "compute dtype")],
            scale=pick(parts[3], QuantForm.SCALES, "scale"),
            qmax=qmax,
            floor=pick(parts[5], QuantForm.FLOORS, "floor"),
            floor_value=floor_value,
            apply=pick(parts[7], QuantForm.APPLIES, "apply"),
            lo=lo,
            hi=hi,
            **_parse_extras(text, parts[10:]),
        )
        if (form.scale == "inverse") != (form.apply == "mul_inverse"):
            raise OptionError(f"quantise form {text!r} mixes an inverse scale with a dequant scale")
        _check_zero(text, form)
        on_scale = form.upper.startswith("scale") and form.scale == "inverse"
        if form.upper != "none" and (form.static or on_scale or form.zero != "none"):
            raise OptionError(f"quantise form {text!r} bounds a scale that it does not compute")
        return form


def _parse_extras(text: str, parts: list[str]) -> dict[str, Any]:
    """The parts after the tenth, each ``name=value``."""
    found: dict[str, Any] = {}
    for part in parts:
        name, _, value = part.partition("=")
        if name in found:
            raise OptionError(f"quantise form {text!r} has {name!r} twice")
        if name == "scale_dtype":
            found[name] = DTYPES[pick(value, (*MODEL_NAMES, "float64"), "scale dtype")]
        elif name == "ceiling":
            try:
                found[name] = float(value)
            except ValueError:
                raise OptionError(f"quantise form {text!r}: ceiling {value!r}") from None
            if not found[name] > 0:
                raise OptionError(f"quantise form {text!r}: ceiling {value!r} is not positive")
        elif name == "power":
            found[name] = pick(value, QuantForm.POWERS, "power")
        elif name == "layout":
            found[name] = pick(value, QuantForm.LAYOUTS, "layout")
        elif name == "zero":
            found[name] = pick(value, QuantForm.ZEROS, "zero point")
        elif name == "zero_at":
            found[name] = pick(value, QuantForm.ZERO_PLACES, "place of the zero point")
        elif name == "zero_clamp":
            found[name] = pick(value, QuantForm.ZERO_CLAMPS, "clamp of the zero point")
        elif name == "zero_dtype":
            found[name] = DTYPES[pick(value, QuantForm.ZERO_DTYPES, "dtype of the zero point")]
        elif name == "span":
            found[name] = pick(value, QuantForm.SPANS, "span")
        elif name == "upper":
            found[name] = pick(value, QuantForm.UPPERS, "place of the upper bound")
        else:
            raise OptionError(f"quantise form {text!r} has the unknown part {part!r}")
    return found


def _check_zero(text: str, form: QuantForm) -> None:
    """A zero point goes with int8, one scale or one per row, and few of the other parts."""
    if not form.asymmetric:
        if form.zero_at != "after" or form.zero_clamp != "none" or form.span != "values":
            raise OptionError(f"quantise form {text!r} says how a zero point is made, without one")
        return
    fits = (
        form.dtype == torch.int8
        and form.group is None
        and form.compute == torch.float32
        and form.scale in ("given", "div", "mul")
        and form.floor in ("none", "scale", "scale_add")
        and (form.ceiling, form.power, form.layout) == (math.inf, "none", "row")
        and (form.zero == "given") == form.static
        and (form.zero_dtype != torch.int8 or form.zero_clamp == "codes")
    )
    if not fits:
        raise OptionError(f"quantise form {text!r} has parts that do not go with a zero point")


def static_form(dtype: torch.dtype = torch.float8_e4m3fn) -> QuantForm:
    """The usual static per-tensor quantise: float32 division, saturating."""
    top = float(torch.finfo(dtype).max)
    return QuantForm(dtype, "tensor", torch.float32, "given", top, "none", 0.0, "div", -top, top)


def dynamic_form(granularity: str, dtype: torch.dtype = torch.float8_e4m3fn) -> QuantForm:
    """The usual dynamic quantise: ``scale = max(amax / max, 1e-12)``, float32, saturating."""
    top = float(torch.finfo(dtype).max)
    return QuantForm(
        dtype, granularity, torch.float32, "div", top, "scale", 1e-12, "div", -top, top
    )
