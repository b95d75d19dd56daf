"""``xpu`` and ``xpu_woq``: what they take, how the library is called, and the graphs of all pairs.

No XPU was at hand: the library's operators are stood in for (:mod:`xpu_library`), after its source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import xpu_library
from golden_graphs import check_fakes
from lowering_sites import operands, problem
from torch import nn

from fp8pass.crossing import TargetGraphs, graphs_for
from fp8pass.errors import NoKernelError, UnsupportedError
from fp8pass.lowerings import choose, xpu
from fp8pass.ops import dynamic_form, static_form
from fp8pass.ops.linear import scaled_product
from fp8pass.ops.weight_only import weight_only_product
from fp8pass.options import Options
from fp8pass.target import Target

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
SPEC = "xpu-bmg+vllm_xpu"
TARGET = Target.parse(SPEC)
BLOCKS = ("group1x128", "group128x128")
WHEN = ("static", "dynamic")
PAIRS = [
    (f"{when}/{act}", weight)
    for when, act, weight in product(WHEN, ("tensor", "token"), ("tensor", "channel"))
]


@pytest.fixture
def library() -> Iterator[list[tuple[Any, ...]]]:
    with xpu_library.loaded() as seen:
        yield seen


def chosen(*pair: str, options: Options | None = None, **more: Any) -> tuple[str | None, Any]:
    p = problem(*pair, target=TARGET, **more)
    choice = choose(TARGET, p, options or Options())
    reasons = {r.kernel: r.verdict for r in choice.rejected}
    return (None if choice.kernel is None else choice.kernel.name), reasons


# ---- what is taken -------------------------------------------------------------------------------


@pytest.mark.parametrize(("act", "weight"), PAIRS)
def test_all_pairs(act: str, weight: str) -> None:
    when, granularity = act.split("/")
    p = problem(granularity, weight, target=TARGET)
    key = dataclasses.replace(
        p.activation, scale=dataclasses.replace(p.activation.scale, static=when == "static")
    )
    p = dataclasses.replace(p, activation=key)
    assert str(p.activation) == f"float8_e4m3fn/{act}"
    choice = choose(TARGET, p, Options())
    assert choice.kernel is xpu.XPU


REFUSED = {
    "e4m3 x e5m2": ({"dtypes": (E4, E5)}, {"dtypes": (E5, E5)}, "FP8-L007", "one dtype"),
    "fnuz": ({"dtypes": (torch.float8_e4m3fnuz,) * 2}, {}, "FP8-L007", "fnuz"),
    "result": ({"out_dtype": F32}, {"out_dtype": F16}, "FP8-L007", "float32"),
    "bias": ({"bias": F32}, {"bias": BF16}, "FP8-L010", "float32"),
    "a by columns": ({"a_layout": "col"}, {}, "FP8-L008", "col"),
    "b by rows": ({"b_layout": "row"}, {"b_layout": "col"}, "FP8-L008", "row"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_beside_what_is_taken(name: str) -> None:
    changes, control, code, word = REFUSED[name]
    assert chosen("token", "channel", **control)[0] == "xpu"
    kernel, reasons = chosen("token", "channel", **changes)
    assert kernel is None and reasons["xpu"].code == code and word in reasons["xpu"].message


@pytest.mark.parametrize(
    ("pair", "changes", "code"),
    [
        (BLOCKS, {"k": 320, "n": 256}, "FP8-L009"),  # a rest of K
        (BLOCKS, {"k": 256, "n": 264}, "FP8-L017"),  # gcd 8
        (BLOCKS, {"k": 256, "n": 257}, "FP8-L017"),  # gcd 1
        (BLOCKS, {"k": 128, "n": 256}, "FP8-L017"),  # one group: its scales look per-token
        (BLOCKS, {"k": 256, "n": None}, "FP8-L009"),
        (("group1x64", "group128x128"), {"k": 256, "n": 256}, "FP8-L003"),
        (("group1x128", "channel"), {"k": 256, "n": 256}, "FP8-L003"),
        (("token", "group128x128"), {"k": 256, "n": 256}, "FP8-L003"),
        (("group1x128/ue8m0", "group128x128/ue8m0"), {"k": 256, "n": 256}, "FP8-L007"),
    ],
    ids=str,
)
def test_blocks_refused(pair: tuple[str, str], changes: dict[str, Any], code: str) -> None:
    assert chosen(*BLOCKS, k=256, n=256)[0] == chosen(*BLOCKS, k=256, n=144)[0] == "xpu"
    kernel, reasons = chosen(*pair, **changes)
    assert kernel is None and reasons["xpu"].code == code


def test_nothing_without_the_library() -> None:
    where = Target.parse("xpu-bmg")
    choice = choose(where, problem("token", "channel", target=where), Options())
    assert not choice.plan
    reasons = {r.kernel: r.verdict for r in choice.rejected}
    assert reasons["xpu"].code == "FP8-L011" and "vllm-xpu-kernels" in reasons["xpu"].message
    where = Target.parse("xpu-pvc+vllm_xpu")
    assert not choose(where, problem("token", "channel", target=where), Options()).plan


WEIGHT_ONLY_REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "activations": ("channel", {"dtypes": (F32, E4), "out_dtype": F32}, "FP8-L007"),
    "result": ("channel", {"out_dtype": F32}, "FP8-L007"),
    "bias": ("channel", {"bias": F32}, "FP8-L010"),
    "rounded product": ("channel", {"form": "product,bfloat16,bfloat16,after"}, "FP8-L017"),
    "bias behind a rounding": (
        "channel", {"form": "weight,bfloat16,bfloat16,after", "bias": BF16}, "FP8-L017",
    ),
    "oblong blocks": ("group128x64", {"k": 256, "n": 256}, "FP8-L003"),
    "a rest of N": ("group128x128", {"k": 256, "n": 144}, "FP8-L009"),
    "a rest of K": ("group128x128", {"k": 320, "n": 256}, "FP8-L009"),
    "one block": ("group128x128", {"k": 128, "n": 256}, "FP8-L017"),
}  # fmt: skip


@pytest.mark.parametrize("name", WEIGHT_ONLY_REFUSED)
def test_weight_only_refused_beside_what_is_taken(name: str) -> None:
    weight, changes, code = WEIGHT_ONLY_REFUSED[name]
    sizes = {"k": 256, "n": 256, "dtypes": (BF16, E4)}
    assert chosen("tensor", weight.replace("x64", "x128"), **sizes)[0] == "xpu_woq"
    kernel, reasons = chosen("tensor", weight, **{**sizes, **changes})
    assert kernel is None and reasons["xpu_woq"].code == code


def test_weight_only_on_request_alone() -> None:
    kernel, reasons = chosen("token", "channel")
    assert kernel == "xpu" and reasons["xpu_woq"].code == "FP8-L040"
    with pytest.raises(NoKernelError, match="FP8-L040"):
        chosen("token", "channel", options=Options(force="xpu_woq"))


# ---- the calls -----------------------------------------------------------------------------------


def test_the_library_is_asked_for_only_when_it_is_called() -> None:
    p = problem("token", "channel", n=48)
    given = operands(p, 5, "cpu")
    keys = str(p.activation), str(p.weight)
    args = (given["a"], given["b"], given["scale_a"], given["scale_b"], None, BF16)
    with pytest.raises(UnsupportedError, match=r"import vllm_xpu_kernels\._xpu_C.*fp8_gemm"):
        xpu.scaled_mm(*args, *keys)
    x = given["a"].to(BF16)
    with pytest.raises(UnsupportedError, match="fp8_gemm_w8a16 is not there"):
        xpu.w8a16_mm(x, given["b"], given["scale_b"], None, BF16, keys[1])


SHAPES: dict[tuple[str, str], tuple[tuple[int, ...], tuple[int, ...]]] = {
    ("tensor", "tensor"): ((1,), (1,)),
    ("tensor", "channel"): ((1,), (144,)),
    ("token", "tensor"): ((17, 1), (1,)),
    ("token", "channel"): ((17, 1), (144,)),
    BLOCKS: ((17, 2), (2, 9)),  # 144 columns in blocks of gcd(144, 128) = 16
}


@pytest.mark.parametrize("bias", [None, BF16])
@pytest.mark.parametrize("pair", SHAPES, ids=str)
def test_call(pair: tuple[str, str], bias: Any, library: list[tuple[Any, ...]]) -> None:
    p = problem(*pair, n=144, k=256, bias=bias, packed=False)
    given = operands(p, 17, "cpu")
    keys = str(p.activation), str(p.weight)
    scales = given["scale_a"], given["scale_b"]
    copies = [scale.clone() for scale in scales]
    args = (given["a"], given["b"], *scales, given.get("bias"), BF16, *keys)
    result = xpu.scaled_mm(*args)
    assert torch.equal(result, scaled_product(*args, ""))
    ((a, b, out_dtype, scale_a, scale_b, vector),) = library
    assert out_dtype == BF16 and b is given["b"] and (vector is None) == (bias is None)
    assert (tuple(scale_a.shape), tuple(scale_b.shape)) == SHAPES[pair]
    for scale, copy in zip(scales, copies, strict=True):
        assert torch.equal(scale, copy)  # never altered


@pytest.mark.parametrize("n", [256, 144, 1168])
@pytest.mark.parametrize("m", [1, 5])
def test_blocks_over_columns_that_leave_a_rest(n: int, m: int, library: Any) -> None:
    p = problem(*BLOCKS, n=n, k=256)
    given = operands(p, m, "cpu")
    keys = str(p.activation), str(p.weight)
    # as a model has it: the view of [N / 128, K / 128]
    scale_b = given["scale_b"].t().contiguous().t()
    args = (given["a"], given["b"], given["scale_a"], scale_b, None, F16, *keys)
    assert torch.equal(xpu.scaled_mm(*args), scaled_product(*args, ""))


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("weight", ["tensor", "channel", "group128x128"])
def test_call_weight_only(weight: str, dtype: Any, library: list[tuple[Any, ...]]) -> None:
    p = problem("tensor", weight, n=256, k=512, bias=dtype, dtypes=(dtype, E4))
    given = operands(p, 17, "cpu")
    args = (given["a"], given["b"], given["scale_b"], given["bias"], dtype, str(p.weight))
    assert torch.equal(xpu.w8a16_mm(*args), weight_only_product(*args))
    ((a, b, scale, _),) = library
    assert a.dtype == dtype and b is given["b"]
    assert tuple(scale.shape) == {"tensor": (1,), "channel": (1, 256)}.get(weight, (4, 2))


def test_codes_never_reach_the_weight_only_operator(library: list[Any]) -> None:
    p = problem("tensor", "channel", n=48)
    given = operands(p, 5, "cpu")
    with pytest.raises(UnsupportedError, match="float8_e4m3fn"):
        xpu.w8a16_mm(given["a"], given["b"], given["scale_b"], None, BF16, str(p.weight))
    assert not library


def test_no_rows(library: list[Any]) -> None:
    p = problem("token", "channel", n=48)
    given = operands(p, 0, "cpu")
    args = (given["a"], given["b"], given["scale_a"], given["scale_b"], None, BF16)
    assert xpu.scaled_mm(*args, str(p.activation), str(p.weight)).shape == (0, 48)
    empty = given["a"].to(BF16)
    key = str(p.weight)
    assert xpu.w8a16_mm(empty, given["b"], given["scale_b"], None, BF16, key).shape == (0, 48)
    assert not library


# ---- whole graphs --------------------------------------------------------------------------------

WIDTH, ROWS = 256, 5


class Linear(nn.Module):
    """A linear whose activations are quantised in one of the ways of vLLM's keys."""

    def __init__(self, act: str, weight: str, bias: bool = False) -> None:
        super().__init__()
        self.act, self.kind = act, weight
        g = torch.Generator().manual_seed(0)
        n = 144 if weight.startswith("group") else 48
        sizes = {"tensor": (), "channel": (n, 1)}.get(weight, (-(-n // 128), WIDTH // 128))
        self.register_buffer("weight", (torch.randn(n, WIDTH, generator=g) * 16).to(E4))
        self.register_buffer("weight_scale", torch.rand(sizes, generator=g) * 0.01 + 0.001)
        rows = (ROWS, 1) if act.endswith("token") else ()
        self.register_buffer("input_scale", torch.rand(rows, generator=g) * 0.01 + 0.01)
        self.register_buffer("bias", torch.randn(n, generator=g).to(BF16) if bias else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        when, granularity = self.act.split("/")
        granularity = "group128" if granularity.startswith("group") else granularity
        if self.act == "static/token":  # no quantise of the model's own has it
            q = (x.float() / self.input_scale).clamp(-448.0, 448.0).to(E4)
            scale = self.input_scale
        else:
            form = static_form() if when == "static" else dynamic_form(granularity)
            own = self.input_scale if when == "static" else None
            q, scale = torch.ops.fp8pass.quantize(x, own, str(form))
            scale = self.input_scale if when == "static" else scale
        scale_b = self.weight_scale.t() if self.weight_scale.dim() else self.weight_scale
        out: torch.Tensor = torch.ops.fp8pass.scaled_mm(
            q, self.weight.t(), scale, scale_b, self.bias, x.dtype, f"float8_e4m3fn/{self.act}",
            f"float8_e4m3fn/static/{self.kind}", False, None,
        )  # fmt: skip
        return out


class WeightOnly(Linear):
    """A linear that multiplies its activations as they are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = (self.weight.float() * self.weight_scale).to(x.dtype)
        return torch.nn.functional.linear(x, wide, self.bias)


W8A8 = {f"{act} x {weight}": Linear(act, weight) for act, weight in PAIRS}
W8A8["blocks"] = Linear("dynamic/group1x128", "group128x128")
W8A8["bias"] = Linear("dynamic/token", "channel", bias=True)
W8A16 = {weight: WeightOnly("dynamic/token", weight, bias=True) for weight in ("tensor", "channel")}


def graph_of(model: nn.Module, **options: Any) -> TargetGraphs:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(BF16)
    return graphs_for(model, x, target=SPEC, **options)


def text_of(found: TargetGraphs) -> str:
    sites = [
        "  ".join(word for word in (s.kind, s.status, s.rule or s.code, s.kernel, s.key) if word)
        for s in found.report.sites
    ]
    version = ".".join(torch.__version__.split(".")[:2])
    return "\n".join([f"torch {version}", found.graph.text(), "", "sites", *sites])


def check_golden(name: str, found: TargetGraphs, golden: Callable[[str, str], None]) -> None:
    check_fakes(found.graph, "xpu")
    if torch.__version__.startswith("2.13"):  # graphs of other versions may differ
        golden(f"xpu/{name}", text_of(found))


def calls(found: TargetGraphs) -> list[str]:
    return [str(n.target) for n in found.graph.after.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("name", W8A8)
def test_graphs_of_products_of_codes(name: str, golden: Callable[[str, str], None]) -> None:
    found = graph_of(W8A8[name])
    assert calls(found).count("fp8pass.xpu_scaled_mm.default") == 1
    (site,) = found.report.select("scaled_mm")
    assert (site.status, site.kernel) == ("lowered", "xpu")
    check_golden(f"w8a8-{name.replace('/', '-').replace(' x ', '-')}", found, golden)


@pytest.mark.parametrize("name", W8A16)
def test_graphs_of_weight_only_products(name: str, golden: Callable[[str, str], None]) -> None:
    found = graph_of(W8A16[name])
    assert calls(found).count("fp8pass.xpu_w8a16_mm.default") == 1
    check_golden(f"w8a16-{name}", found, golden)


@pytest.mark.parametrize("name", ["dynamic/token x channel", "static/tensor x tensor"])
def test_graphs_of_products_made_weight_only(name: str, golden: Callable[[str, str], None]) -> None:
    found = graph_of(W8A8[name], force="xpu_woq")
    names = calls(found)
    assert names.count("fp8pass.xpu_w8a16_mm.default") == 1
    assert not any("amax" in n or "scaled_mm" in n or "clamp" in n for n in names)
    used = {found.graph.inputs[n.name] for n in found.graph.after.graph.nodes if n.users
            and n.op == "placeholder"}  # fmt: skip
    # a scale that is given says where values are cut off, as they were before, and nothing else
    assert ("input_scale" in used) == name.startswith("static")
    (product,) = [n for n in found.graph.after.graph.nodes if "w8a16" in str(n.target)]
    assert "input_scale" not in {found.graph.inputs.get(n.name) for n in product.all_input_nodes}
    golden_name = f"made-w8a16-{name.replace('/', '-').replace(' x ', '-')}"
    check_golden(golden_name, found, golden)
