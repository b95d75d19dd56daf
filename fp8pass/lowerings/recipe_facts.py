"""What is known of granularities on a kind of device without measuring: facts with their source."""

from __future__ import annotations

from fp8pass.target import Target

#: Products that apply their scales in a pass of their own, behind a result in float32.
UNFUSED = frozenset({"torch_channel", "torch_int8", "torch_int8_cpu"})
#: Products on operands that are made wide first.
WIDE = frozenset({"torch_dequant"})


def preferred_recipe(target: Target) -> tuple[str, str] | None:
    """(recipe, why) where the maker of a device says which dynamic scales suit it."""
    if target.kind == "xpu":
        return (
            "dynamic_tensor",
            "the documented default for dynamic activations on XPU is one scale per tensor",
        )
    return None


def cost_class(kernel: str | None) -> tuple[int, str]:
    """(class, words): 0 for a product that applies its scales itself, more for what costs more."""
    if kernel is None:
        return 3, "no kernel takes it"
    if kernel in WIDE:
        return 2, f"{kernel} makes both operands wide at each call"
    if kernel in UNFUSED:
        return 1, f"{kernel} applies the scales in a pass behind the product"
    return 0, f"{kernel} applies the scales inside the product"
