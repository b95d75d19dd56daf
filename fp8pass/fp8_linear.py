"""Fp8Linear: a linear with an fp8 weight, and the recipes by which one is made.

The forward is plain torch, the generic *quantise -> torch._scaled_mm* graph that anyone could have
written: it runs without fp8pass, and fp8pass reads it like any other model's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fp8pass.errors import OptionError, UnsupportedError, choices
from fp8pass.fnuz import E4M3FNUZ, convert_linear, why_not_loaded
from fp8pass.quant_key import (
    QuantKey,
    fp8_max,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
)
from fp8pass.shared_scale import SharedScale
from fp8pass.target import HOST

FP8 = torch.float8_e4m3fn
FP8_MAX = fp8_max(FP8)
#: Smallest dequant scale: an all-zero row or channel is divided by this instead of by zero.
SCALE_FLOOR = 1e-12

#: The buffers that hold several linears' weights, scales and biases.
MERGED = ("weight_merged", "scale_merged", "bias_merged")

_CHANNEL_KEY = str(kFp8StaticChannelSym)
_CHANNEL_KEY_FNUZ = _CHANNEL_KEY.replace("e4m3fn/", "e4m3fnuz/")
_MODEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a linear is quantised: the key of its input and the key of its weight."""

    name: str
    act: QuantKey
    weight: QuantKey

    @staticmethod
    def get(recipe: str | Recipe) -> Recipe:
        """The recipe of that name. Raises :class:`OptionError` naming the allowed ones."""
        name = recipe.name if isinstance(recipe, Recipe) else recipe
        if name not in tuple(RECIPES):  # also what has no hash
            raise OptionError(f"unknown recipe {name!r}; allowed: {choices(RECIPES)}")
        return RECIPES[name]


#: static: per-tensor inputs (calibrated) x per-tensor weights; dynamic: per-token x per-channel;
#: dynamic_tensor: per-tensor x per-tensor, the input's scale computed at run time.
RECIPES: dict[str, Recipe] = {
    "static": Recipe("static", kFp8StaticTensorSym, kFp8StaticTensorSym),
    "dynamic": Recipe("dynamic", kFp8DynamicTokenSym, kFp8StaticChannelSym),
    "dynamic_tensor": Recipe("dynamic_tensor", kFp8DynamicTensorSym, kFp8StaticTensorSym),
}


class Fp8Linear(nn.Module):
    """A linear layer with an fp8 weight and an input that is quantised on the way in.

    Attributes (all buffers):
        weight: float8_e4m3fn ``[N, K]``, row-major; float8_e4m3fnuz with doubled scales after
            :func:`fp8pass.prepare` for a target whose FP8 that is.
        weight_scale: float32 dequant scale, 0-d (per-tensor) or contiguous ``[1, N]``.
        input_scale: float32 0-d dequant scale of the input; None unless the recipe is static.
        bias: ``[N]`` in the model's dtype, or None.
        weight_prepared: packed copy made by :func:`fp8pass.prepare`, not in the state
            dict; None unless prepared.
        weight_merged, scale_merged, bias_merged: ``[sum of N, K]``, ``[1, sum of N]``, ``[sum of
            N]`` (or None) of linears that :func:`fp8pass.prepare` merged, the same tensors in each
            of them, not in the state dict. ``weight`` then is a view of ``weight_merged``.

    Converting the module (``model.half()``) changes the dtype of ``bias`` alone. It has no
    gradients: unprepared, the forward runs and ``backward`` (or compiling with gradients on) ends
    in torch's own "derivative for aten::_scaled_mm is not implemented"; prepared, the forward
    raises. Use it under ``torch.no_grad()``. Under autocast it follows the dtype of its input.

    Args:
        in_features: K.
        out_features: N.
        recipe: ``"static"``, ``"dynamic"`` or ``"dynamic_tensor"``.
        bias: whether there is one.
        dtype: of the bias; default ``torch.get_default_dtype()``.
        device: of the buffers, which are empty until a state dict is loaded.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor
    input_scale: torch.Tensor | None
    bias: torch.Tensor | None
    weight_prepared: torch.Tensor | None
    weight_merged: torch.Tensor | None
    scale_merged: torch.Tensor | None
    bias_merged: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        recipe: str | Recipe,
        *,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        found = Recipe.get(recipe)
        self.in_features = in_features
        self.out_features = out_features
        # Plain strings rather than the recipe: the fewer attributes the forward reads, the fewer
        # guards Dynamo checks, and a model has hundreds of these.
        self.recipe = found.name
        self._act_key = str(found.act)
        self._weight_key = str(found.weight)
        #: Whether the codes are e4m3fnuz: :func:`fp8pass.fnuz.convert_linear`.
        self._fnuz = False
        #: Whether ``weight_prepared`` is a copy in tiles (ROCm), not the CPU's.
        self._tiles = False
        self._shared_scale: SharedScale | None = None
        #: First row in the merged weights, -1 if not merged.
        self._merged_at = -1
        #: (weight, its version) that ``weight_prepared`` was packed from.
        self._packed_from: tuple[torch.Tensor, int | None] | None = None
        shape = (1, out_features) if found.weight.granularity == "channel" else ()
        scale = torch.ones((), device=device) if found.act.scale.static else None
        vector = torch.zeros(out_features, dtype=dtype, device=device) if bias else None
        self.register_buffer(
            "weight", torch.empty(out_features, in_features, dtype=FP8, device=device)
        )
        self.register_buffer("weight_scale", torch.ones(shape, dtype=torch.float32, device=device))
        self.register_buffer("input_scale", None if scale is None else scale.float())
        self.register_buffer("bias", vector)
        for name in ("weight_prepared", *MERGED):
            self.register_buffer(name, None, persistent=False)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        recipe: str | Recipe,
        input_scale: torch.Tensor | float | None = None,
    ) -> Fp8Linear:
        """Quantise a linear: weight scale = amax / 448 (at least 1e-12), divided in float32.

        Args:
            linear: with weight ``[N, K]`` in bf16, fp16 or fp32; left as it is.
            recipe: see :data:`RECIPES`.
            input_scale: dequant scale of the input, > 0; for the static recipe, and only for it.

        Raises:
            OptionError: unknown recipe, or ``input_scale`` missing, superfluous or not usable.
            UnsupportedError: the weight cannot be quantised; the message says why.
        """
        found = Recipe.get(recipe)
        reason = weight_reason(linear)
        if reason:
            raise UnsupportedError(f"this linear cannot be quantised: {reason}")
        scale = _checked_input_scale(found, input_scale)
        # Not even inside torch.inference_mode: buffers made there could never be used outside.
        with torch.inference_mode(False), torch.no_grad():
            weight = linear.weight.detach()
            bias = None if linear.bias is None else linear.bias.detach()
            codes, weight_scale = _quantize_weight(weight, found.weight.granularity == "channel")
            out, width = weight.shape
            new = cls(width, out, found, device="meta")
            new._buffers["weight"] = codes
            new._buffers["weight_scale"] = weight_scale
            new._buffers["bias"] = None if bias is None else bias.clone()
            if scale is not None:
                new._buffers["input_scale"] = torch.tensor(
                    scale, dtype=torch.float32, device=weight.device
                )
        new.training = linear.training
        return new

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` ``[..., K]`` in bf16, fp16 or fp32 -> ``[..., N]`` in the dtype of ``x``.

        Raises:
            UnsupportedError: another dtype or last dim; prepared and a gradient is asked for.
        """
        if x.dtype not in _MODEL_DTYPES:
            raise UnsupportedError(
                f"Fp8Linear got an input of {x.dtype}; allowed: bfloat16, float16, float32. (A "
                "model that casts to `linear.weight.dtype` needs this layer in `skip`.)"
            )
        if x.shape[-1] != self.in_features:
            raise UnsupportedError(
                f"Fp8Linear got an input of shape {tuple(x.shape)}; its last dim must be "
                f"{self.in_features}"
            )
        shape = (*x.shape[:-1], self.out_features)
        # Row-major, as every product wants it; no copy and no node where it already is.
        x2 = x.reshape(-1, self.in_features).contiguous()
        # Not the module's constants: under dynamic=True Dynamo makes a graph input of a global
        # float, and then nobody who reads the graph can know its value.
        # In e4m3fnuz every value is half as large: see fp8pass/fnuz.py.
        fnuz = self._fnuz
        fp8, largest, floor = (E4M3FNUZ, 224.0, 2e-12) if fnuz else (FP8, 448.0, 1e-12)
        if self.recipe == "static":
            scale = self.input_scale
            assert scale is not None
            q = (x2.float() / scale).clamp(-largest, largest).to(fp8)
        else:
            xf = x2.float()
            if self.recipe == "dynamic":
                amax = xf.abs().amax(-1, keepdim=True)
            elif x2.numel() == 0:  # amax of nothing is an error
                return x.new_empty(shape)
            else:
                amax = xf.abs().amax()
            scale = (amax / largest).clamp(min=floor)
            q = (xf / scale).clamp(-largest, largest).to(fp8)

        if self.weight_merged is not None:
            return self._merged_product(q, scale, x).reshape(shape)
        # torch has no product of e4m3fnuz on a CPU.
        if self.weight_prepared is not None or (fnuz and self.weight.device.type == HOST):
            return self._prepared_product(q, scale, x).reshape(shape)
        bias = self.bias
        if bias is not None and x.dtype == torch.float32:
            # On CUDA a float32 product takes no bias.
            out = torch._scaled_mm(
                q, self.weight.t(), scale, self.weight_scale, out_dtype=torch.float32
            )
            return (out + bias.float()).reshape(shape)
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)  # what autocast does; on CUDA the two must agree
        out = torch._scaled_mm(
            q, self.weight.t(), scale, self.weight_scale, bias=bias, out_dtype=x.dtype
        )
        return out.reshape(shape)

    def _prepared_product(
        self, q: torch.Tensor, scale: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        return self._product(
            q, self.weight, scale, self.weight_scale, self.bias, x, self._weight_key
        )

    def _merged_product(
        self, q: torch.Tensor, scale: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        """The rows of this linear in the merged tensors: the pass sees that they are neighbours."""
        weights, scales, biases = self.weight_merged, self.scale_merged, self.bias_merged
        assert weights is not None and scales is not None
        start, size = self._merged_at, self.out_features
        bias = None if biases is None else biases.narrow(0, start, size)
        return self._product(
            q,
            weights.narrow(0, start, size),
            scale,
            scales.narrow(1, start, size),
            bias,
            x,
            _CHANNEL_KEY_FNUZ if self._fnuz else _CHANNEL_KEY,
        )

    def _product(
        self,
        q: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
        x: torch.Tensor,
        weight_key: str,
    ) -> torch.Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            # The operator has no autograd formula: the gradient would be dropped in silence.
            raise UnsupportedError("a prepared Fp8Linear has no gradient; use torch.no_grad()")
        out: torch.Tensor = torch.ops.fp8pass.scaled_mm(
            q,
            weight.t(),
            scale,
            weight_scale,
            bias,
            x.dtype,
            self._act_key,
            weight_key,
            False,
            self.weight_prepared,
        )
        return out

    def extra_repr(self) -> str:
        """As for ``nn.Linear``, plus the recipe."""
        text = f"in_features={self.in_features}, out_features={self.out_features}"
        text += f", bias={self.bias is not None}, recipe={self.recipe!r}"
        text += ", merged" if self.weight_merged is not None else ""
        text += ", e4m3fnuz" if self._fnuz else ""
        return text + (", prepared" if self.weight_prepared is not None else "")

    # -- moving, loading, copying: the codes keep their dtype, shared scales stay shared, and the
    # -- prepared copy is never older than the weight

    def share_input_scale(self, holder: SharedScale) -> None:
        """Let ``holder`` decide which tensor is the input scale, from now on."""
        self._shared_scale = holder
        self._rejoin_scale(None)

    def _rejoin_scale(self, made_from: torch.Tensor | None) -> None:
        scale = self.input_scale
        if self._shared_scale is not None and scale is not None:
            self._buffers["input_scale"] = self._shared_scale.shared(scale, made_from)

    def merge_into(
        self,
        weights: torch.Tensor,
        scales: torch.Tensor,
        biases: torch.Tensor | None,
        start: int,
    ) -> None:
        """Use rows ``[start, start + N)`` of tensors that hold this linear's values already."""
        import fp8pass.ops  # noqa: F401  registers the operator that the forward now calls

        rows = slice(start, start + self.out_features)
        self.unprepare_weight()
        self._merged_at = start
        self._buffers["weight"] = weights[rows]
        if self.weight_scale.dim():
            self._buffers["weight_scale"] = scales[:, rows]
        self._buffers.update(zip(MERGED, (weights, scales, biases), strict=True))

    def unmerge(self) -> bool:
        """Leave the merged tensors; whether it was in them. The weight stays a view of them."""
        had = self.weight_merged is not None
        self._buffers.update(dict.fromkeys(MERGED))
        self._merged_at = -1
        return had

    def prepare_weight(self, tiles: bool = False) -> int:
        """Pack the weight for the CPU product, or lay it out in tiles for AITER's; bytes of the
        copy, 0 if it is there already."""
        version = None if self.weight.is_inference() else self.weight._version
        packed_from = self._packed_from
        if (
            self.weight_prepared is not None
            and self._tiles == tiles
            and packed_from is not None
            and packed_from[0] is self.weight
            and packed_from[1] == version
        ):
            return 0
        import fp8pass.ops  # noqa: F401  registers the operator that the forward now calls
        from fp8pass.kernels import cpu, rocm_operators

        with torch.inference_mode(False), torch.no_grad():
            packed = rocm_operators.shuffle(self.weight) if tiles else cpu.pack(self.weight)
        self._tiles = tiles
        self._buffers["weight_prepared"] = packed
        self._packed_from = (self.weight, version)
        return packed.numel() * packed.element_size()

    def unprepare_weight(self) -> bool:
        """Drop the packed copy; whether there was one."""
        had = self.weight_prepared is not None
        self._buffers["weight_prepared"] = None
        self._packed_from = None
        return had

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Fp8Linear:
        scale = self.input_scale
        device = self.weight.device
        prepared = self.weight_prepared is not None
        self.unmerge()  # conversions make a tensor of each view

        def same_dtype(tensor: torch.Tensor) -> torch.Tensor:
            """``fn`` without its conversion: half precision would ruin the codes and scales."""
            new = fn(tensor)
            return new if new.dtype == tensor.dtype else tensor.to(new.device)

        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer) if name == "bias" else same_dtype(buffer)
        self._rejoin_scale(scale)
        if prepared and self.weight.device != device and not self._tiles:
            self.unprepare_weight()  # its layout is one CPU kernel's own
        elif prepared:
            version = None if self.weight.is_inference() else self.weight._version
            self._packed_from = (self.weight, version)
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        new_weight, held = state_dict.get(prefix + "weight"), self.weight.dtype
        why = why_not_loaded(held, prefix, state_dict)
        if why is not None:
            error_msgs.append(why)
            return
        again = new_weight is not None and self.weight_prepared is not None
        if new_weight is not None and new_weight.dtype != held:
            convert_linear(self, FP8)  # and back again, behind the loading
        self.unmerge()  # scales and biases may be copied, and assigned weights are others
        if self.input_scale is not None and self._shared_scale is not None:
            # Loading copies in place, and this tensor may be other modules' as well.
            self._buffers["input_scale"] = self.input_scale.clone()
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        # load_state_dict(assign=True) takes the tensors as they are.
        self._buffers["weight"] = self.weight.contiguous()
        self._buffers["weight_scale"] = self.weight_scale.float().contiguous()
        if self.input_scale is not None:
            self._buffers["input_scale"] = self.input_scale.float()
        self._rejoin_scale(None)
        convert_linear(self, held)
        if again:
            self.unprepare_weight()
            self._pack_again()

    def __getstate__(self) -> dict[str, Any]:
        # The packed layout belongs to this machine's kernel; a copy or a pickle packs its own.
        state: dict[str, Any] = {**self.__dict__, "_buffers": dict(self._buffers)}
        state["_buffers"].update(dict.fromkeys(("weight_prepared", *MERGED)))
        state["_merged_at"] = -1
        # torch.save knows float8, but plain pickle fails to load it; bytes always work.
        weight = self.weight
        if weight.untyped_storage().nbytes() != weight.numel():
            weight = weight.clone()  # of a view, the whole storage would be written
        state["_buffers"]["weight"] = weight.view(torch.uint8)
        state["_packed_from"] = None
        state["_was_prepared"] = self.weight_prepared is not None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        fp8 = E4M3FNUZ if state.get("_fnuz") else FP8
        if fp8 != FP8:
            import fp8pass.ops  # noqa: F401  registers the operator that the forward calls
        state["_buffers"]["weight"] = state["_buffers"]["weight"].view(fp8)
        prepared = state.pop("_was_prepared", False)
        super().__setstate__(state)
        if prepared:
            self._pack_again()

    def _pack_again(self) -> None:
        # Meta and fake weights have no values to pack; such a layer is simply not prepared.
        real = type(self.weight) is torch.Tensor and not self.weight.is_meta
        if real and (self._tiles or self.weight.device.type == HOST):
            self.prepare_weight(self._tiles)


def _quantize_weight(weight: torch.Tensor, channel: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """``[N, K]`` weight -> fp8 codes ``[N, K]`` and dequant scale, 0-d or ``[1, N]``."""
    w = weight.float()
    amax = w.abs().amax(1, keepdim=True) if channel else w.abs().amax()
    if not bool(amax.isfinite().all()):
        raise UnsupportedError("this linear cannot be quantised: its weight is not finite")
    scale = (amax / FP8_MAX).clamp(min=SCALE_FLOOR)
    codes = (w / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).contiguous()
    return codes, scale.reshape(1, -1) if channel else scale


def _checked_input_scale(recipe: Recipe, scale: torch.Tensor | float | None) -> float | None:
    if not recipe.act.scale.static:
        if scale is not None:
            raise OptionError(f"recipe {recipe.name!r} computes its input scale; pass none")
        return None
    if scale is None:
        raise OptionError(
            f"recipe {recipe.name!r} needs input_scale, the dequant scale amax / {FP8_MAX:g}"
        )
    value = float(scale)
    if not (math.isfinite(value) and value > 0):
        raise OptionError(f"input_scale is {value}; it must be finite and greater than 0")
    return value


def weight_reason(linear: nn.Linear) -> str | None:
    """Why this linear's weight cannot be quantised, or None; without looking at its values."""
    weight = linear.weight
    if type(weight) not in (nn.Parameter, torch.Tensor) or type(weight.data) is not torch.Tensor:
        return f"its weight is a {type(weight).__name__}, not a plain tensor"
    if weight.is_meta:
        return "its weight is on the meta device"
    if weight.numel() == 0:
        return f"its weight is empty, {tuple(weight.shape)}"
    if weight.dtype not in _MODEL_DTYPES:
        return f"its weight is {weight.dtype}; allowed: bfloat16, float16, float32"
    return None
