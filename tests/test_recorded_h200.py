"""What an H200 really ran, recorded by tests/gpu/record_h200.py, against the graphs made here.

The golden graphs of sm90 are made without a device. This holds them against one: the same calls in
the same order, and for each call the kernel that it stands for, no more and no less.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import golden_graphs
import pytest

from fp8pass.lowerings.planned import parse_plan

RECORDED = Path(__file__).parent / "golden" / "h200.json"
KERNELS = Path(__file__).parent.parent / "fp8pass" / "kernels"
TARGET = "sm90"
CLOSE = 2e-2

#: Our operator -> the file whose kernel it launches, once.
FILES = {
    "fp8pass.triton_rms_norm_quant.default": "triton_norm.py",
    "fp8pass.triton_add_rms_norm_quant.default": "triton_norm.py",
    "fp8pass.triton_silu_mul_quant.default": "triton_activation.py",
    "fp8pass.triton_quantize.default": "triton_quantize.py",
    "fp8pass.triton_scaled_mm.default": "triton_gemm.py",
    "fp8pass.triton_block_mm.default": "triton_block.py",
}
#: Kernel of a plan -> the call that it makes.
PARTS = {
    "triton_skinny": "fp8pass.triton_scaled_mm.default",
    "triton_general": "fp8pass.triton_scaled_mm.default",
    "triton_int8": "fp8pass.triton_scaled_mm.default",
    "triton_block": "fp8pass.triton_block_mm.default",
    "torch_block": "aten._scaled_mm.default",
    "torch_row": "aten._scaled_mm.default",
    "torch_tensor": "aten._scaled_mm.default",
    "torch_rescaled": "fp8pass.torch_rescaled_mm.default",
    "vllm_cutlass_int8": "fp8pass.vllm_cutlass_scaled_mm.default",
    "vllm_cutlass_block": "fp8pass.vllm_cutlass_block_mm.default",
    "deepgemm_block": "fp8pass.deepgemm_block_mm.default",
    "flashinfer_tensor": "fp8pass.flashinfer_scaled_mm.default",
    "flashinfer_block": "fp8pass.flashinfer_block_mm.default",
    "vllm_cutlass": "fp8pass.vllm_cutlass_scaled_mm.default",
}
#: Products of torch: cuBLASLt's and CUTLASS's kernels. One product is one of them.
TORCH_PRODUCT = re.compile(r"cutlass|nvjet|cublas|sm90_xmma|gemm", re.IGNORECASE)
#: What such a product may run besides: the second half of a split-K product, clearing its scratch.
BESIDES = re.compile(r"splitKreduce|^Memset", re.IGNORECASE)
#: Code that Inductor generated.
GENERATED = re.compile(r"^triton_(poi|per|red|tem)_")


@cache
def recorded() -> dict[str, Any]:
    if not RECORDED.exists():
        pytest.skip("not recorded yet: python tests/gpu/record_h200.py tests/golden/h200.json")
    data: dict[str, Any] = json.loads(RECORDED.read_text())
    assert data["schema"] == 1
    return data


def of(name: str) -> dict[str, Any]:
    model: dict[str, Any] = recorded()["models"][name]
    return model


def ours(calls: list[str]) -> list[str]:
    """The calls that fp8pass chose; the rest of a graph differs between versions of torch."""
    return [name for name in calls if name.startswith("fp8pass.") or "_scaled_mm" in name]


def launched_by(file: str) -> set[str]:
    """The Triton functions of a kernel's file; one that no host function launches never shows."""
    tree = ast.parse((KERNELS / file).read_text())
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    }


def wanted(model: dict[str, Any], rows: int) -> Counter[str]:
    """Call -> how often it runs for so many rows; a plan is resolved as it is at run time."""
    found: Counter[str] = Counter()
    plans = list(model["plans"])
    for call in ours(model["calls"]):
        if call == "fp8pass.scaled_mm_planned.default":
            parts = parse_plan(plans.pop(0))
            (part,) = [p for m, p, _ in parts if m.lo <= rows and (m.hi is None or rows <= m.hi)]
            call = PARTS[part]
        found[call] += 1
    assert not plans
    return found


names = pytest.mark.parametrize("name", golden_graphs.RECORDED)


def test_it_is_an_h200() -> None:
    assert recorded()["target"].split("+")[0] == TARGET
    assert "H200" in recorded()["device"]
    assert set(recorded()["models"]) == set(golden_graphs.RECORDED)


@names
def test_same_calls_as_the_golden_graph(name: str) -> None:
    graph = golden_graphs.found(TARGET, name).graph
    assert ours(of(name)["calls"]) == ours(graph.calls())


@names
def test_graphs_made_without_the_device_were_the_same(name: str) -> None:
    """With one version of torch, on one machine, with the device and without: node for node."""
    assert of(name)["crossed_is_equal"]


@names
def test_results_were_those_of_the_reference(name: str) -> None:
    assert of(name)["distance"] and max(of(name)["distance"].values()) < CLOSE


@names
def test_each_call_ran_its_kernel(name: str) -> None:
    model = of(name)
    assert model["kernels"]
    for rows, seen in model["kernels"].items():
        remaining = dict(seen)
        calls = wanted(model, int(rows))
        per_tensor = name == "block-dynamic-tensor"  # the scale needs all rows: more than a launch
        for file in sorted({FILES[call] for call in calls if call in FILES}):
            expected = sum(n for call, n in calls.items() if FILES.get(call) == file)
            # adding up the parts of a split depth is the second half of a product
            halves = remaining.pop("_combine_kernel", 0) if file == "triton_gemm.py" else 0
            assert halves <= expected, (rows, file, seen)
            mine = [kernel for kernel in remaining if kernel in launched_by(file)]
            count = sum(remaining.pop(kernel) for kernel in mine)
            if per_tensor and file != "triton_gemm.py":
                assert count >= expected, (rows, file, seen)
            else:
                assert count == expected, (rows, file, seen)
        if per_tensor:
            for kernel in launched_by("triton_quantize.py"):
                remaining.pop(kernel, None)
        for kernel in [k for k in remaining if GENERATED.match(k) or BESIDES.search(k)]:
            del remaining[kernel]
        products = [kernel for kernel in remaining if TORCH_PRODUCT.search(kernel)]
        count = sum(remaining.pop(kernel) for kernel in products)
        assert count == calls["aten._scaled_mm.default"], (rows, seen)
        assert not remaining, f"kernels that no call accounts for, at {rows} rows"


# ---- of this test itself -------------------------------------------------------------------------


def test_operators_and_files_are_those_of_the_package() -> None:
    from fp8pass.lowerings import kernels
    from fp8pass.ops import SPECS

    for call in FILES:
        assert call.split(".")[1] in SPECS
    assert set(PARTS) == {k.name for k in kernels() if k.run is not None and "cuda" in k.kinds}


def test_a_plan_is_resolved_by_rows() -> None:
    model = {
        "calls": [
            "fp8pass.scaled_mm_planned.default",
            "aten.add.Tensor",
            "aten._scaled_mm.default",
        ],
        "plans": ["2-64=triton_skinny;65-=torch_row"],
    }
    skinny, torch_product = PARTS["triton_skinny"], PARTS["torch_row"]
    assert wanted(model, 5) == {skinny: 1, torch_product: 1}
    assert wanted(model, 80) == {torch_product: 2}


@pytest.mark.parametrize(
    ("kernel", "product"),
    [
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass>>", True),
        ("nvjet_sm90_qqtst_128x128_128x6_1x2_h_bz_TNN", True),
        ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x128", True),
        ("_scaled_mm_kernel", False),
        ("triton_poi_fused_add_0", False),
    ],
)
def test_which_kernels_are_products_of_torch(kernel: str, product: bool) -> None:
    assert bool(TORCH_PRODUCT.search(kernel)) is product
