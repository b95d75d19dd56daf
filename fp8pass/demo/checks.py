"""What must hold for the demo to succeed; each check says its value and its limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fp8pass.demo.measure import difference
from fp8pass.demo.variants import Variant, site_counts

#: Largest relative difference of perplexity, give or take the noise of its measurement (see
#: :meth:`~fp8pass.demo.measure.Difference.within`): fp8pass against the reference, ...
TO_REFERENCE = 0.005
#: ... and the FP8 reference against bf16.
TO_BF16 = 0.05


def check(ok: bool, value: Any, limit: Any) -> dict[str, Any]:
    """One check as plain data."""
    return {"ok": bool(ok), "value": value, "limit": limit}


def checks_of(
    record: dict[str, Any],
    bf16: Variant,
    reference: Variant,
    ours: Sequence[Variant],
    products: int,
) -> dict[str, dict[str, Any]]:
    """The checks of one recipe: name -> ``{"ok", "value", "limit"}``.

    Args:
        record: what :mod:`fp8pass.demo.run` has so far.
        ours: the variants under fp8pass.
        products: scaled products of one forward.
    """
    found = {}
    identical = record["reference"]["bit_identical"]
    values = [item["differing"] for item in identical]
    found["reference_bit_identical_to_scaled_mm"] = check(
        all(value == 0 for value in values), values, 0
    )
    found["perplexity_reference_vs_bf16"] = _close(reference, bf16, TO_BF16)
    expected = record["expected_sites"]
    for variant in ours:
        fast = variant.options.get("fp8pass.numerics") == "fast"
        if variant.call is None:
            found[f"{variant.key}_runs"] = check(False, variant.error, "no error")
            continue
        found[f"perplexity_{variant.key}_vs_reference"] = _close(
            variant, reference, 2 * TO_REFERENCE if fast else TO_REFERENCE
        )
        counts = {} if variant.report is None else site_counts(variant.report)
        found[f"sites_{variant.key}"] = check(counts == expected, counts, expected)
        executed = variant.executed
        wanted = {"fp8pass::cpu_scaled_mm": products}
        found[f"products_executed_{variant.key}"] = check(executed == wanted, executed, wanted)
    return found


def _close(variant: Variant, other: Variant, limit: float) -> dict[str, Any]:
    """Two perplexities on the same windows: relative difference and its standard error."""
    found = difference(variant, other)
    if found is None:
        return check(False, None, limit)
    return {
        **check(found.within(limit), found.relative, limit),
        "standard_error": found.standard_error,
        "tokens": found.tokens,
    }
