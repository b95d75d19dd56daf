"""The nodes that kernels insert: as text, as fake tensors, and as numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lowering_sites import Built, build, check_values, operands, problem, render
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fp8pass.errors import PassError
from fp8pass.kernels import cpu
from fp8pass.kernels.operators import BLOCK_KEYS
from fp8pass.lowerings import EmitSite, find, kernels, weight_only_names
from fp8pass.ops.linear import scaled_product
from fp8pass.problem import ScaledMMProblem
from fp8pass.target import Target

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ROW = ("token", "channel")
MIXES = (("tensor", "tensor"), ROW, ("tensor", "channel"), ("token", "tensor"))
BLOCKS = ("group1x128", "group128x128")
INT8 = (torch.int8, torch.int8)
FNUZ = (torch.float8_e4m3fnuz, torch.float8_e4m3fnuz)
#: Tested below with operands of their own, or in test_rocm_libraries.py.
SPECIAL = (
    "torch_int8", "torch_int8_cpu", "torch_block", "triton_block", "triton_int8",
    "vllm_cutlass_block", "vllm_cutlass_int8", "deepgemm_block", "flashinfer_block",
    "vllm_skinny", "aiter_row", "aiter_int8", "aiter_shuffled", "aiter_block",
    "xpu", "vllm_cpu_w8a8", "vllm_cpu_w8a8_block", "vllm_cpu_int8",
    *weight_only_names(),  # in files of their own
)  # fmt: skip
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

# golden name -> kernel, target, problem
ASYM = ("token/asym", "channel")
ZERO = {"dtypes": INT8, "zero": "int32", "zero_dtype": torch.int32}
GOLDEN: dict[str, tuple[str, str, dict[str, Any], tuple[str, str]]] = {
    "cpu": ("cpu", "cpu", {"bias": BF16}, ROW),
    "cpu_prepared": ("cpu_prepared", "cpu", {"prepared": True}, ROW),
    "triton_skinny": ("triton_skinny", "sm90", {"bias": BF16}, ROW),
    "triton_general": ("triton_general", "sm90", {"use_fast_accum": True}, ("tensor", "channel")),
    "triton_block": ("triton_block", "sm89", {"k": 200, "n": 72, "bias": F16}, BLOCKS),
    "triton_int8": ("triton_int8", "sm80", {"dtypes": INT8, "bias": BF16}, ROW),
    "vllm_cutlass": ("vllm_cutlass", "sm90+vllm", {"packed": False, "use_fast_accum": True}, ROW),
    "vllm_cutlass_block": ("vllm_cutlass_block", "sm90+vllm", {"k": 256, "n": 128}, BLOCKS),
    "vllm_cutlass_int8": ("vllm_cutlass_int8", "sm80+vllm", {"dtypes": INT8, "bias": BF16}, ROW),
    "vllm_cutlass_int8_zero_point": ("vllm_cutlass_int8", "sm80+vllm", ZERO, ASYM),
    "deepgemm_block": (
        "deepgemm_block",
        "sm90+deepgemm",
        {"k": 256, "n": 192, "packed": False},
        BLOCKS,
    ),
    "flashinfer_tensor": (
        "flashinfer_tensor",
        "sm100+flashinfer",
        {"use_fast_accum": True, "packed": False},
        ("tensor", "tensor"),
    ),
    "flashinfer_block": ("flashinfer_block", "sm90+flashinfer", {"k": 256, "n": 128}, BLOCKS),
    "xpu": ("xpu", "xpu-bmg+vllm_xpu", {"bias": BF16}, ROW),
    "vllm_cpu_w8a8": ("vllm_cpu_w8a8", "x86-amx-fp8+vllm", {"bias": BF16, "n": 64, "k": 96}, ROW),
    "vllm_cpu_w8a8_block": (
        "vllm_cpu_w8a8_block", "x86-amx-fp8+vllm", {"n": 160, "k": 256}, ("token", "group128x128"),
    ),
    "vllm_cpu_int8": ("vllm_cpu_int8", "x86-avx2+vllm", {"dtypes": INT8, "bias": BF16}, ROW),
    "xpu_blocks": ("xpu", "xpu-bmg+vllm_xpu", {"k": 256, "n": 144}, BLOCKS),
    "torch_tensor": ("torch_tensor", "sm90", {"use_fast_accum": True}, ("tensor", "tensor")),
    "torch_tensor_bias": ("torch_tensor", "sm90", {"bias": BF16}, ("tensor", "tensor")),
    "torch_row": ("torch_row", "sm90", {"bias": BF16}, ROW),
    "torch_row_odd_pitch": ("torch_row", "sm90", {"packed": False}, ROW),
    "torch_channel": ("torch_channel", "sm89", {"bias": BF16}, ROW),
    "torch_rescaled": ("torch_rescaled", "sm90", {"bias": BF16, "packed": False}, ROW),
    "torch_dequant": ("torch_dequant", "cpu", {"bias": BF16, "dtypes": FNUZ}, ROW),
    "torch_dequant_blocks": ("torch_dequant", "cpu", {"k": 200, "n": 72}, BLOCKS),
    "torch_int8": ("torch_int8", "sm80", {"dtypes": INT8, "bias": BF16}, ROW),
    "torch_int8_cpu": ("torch_int8_cpu", "cpu", {"dtypes": INT8}, ("tensor", "tensor")),
    "torch_int8_zero_point": ("torch_int8", "sm80", ZERO, ASYM),
    "torch_dequant_zero_point": (
        "torch_dequant", "sm80", {**ZERO, "zero": "codes", "zero_dtype": F32}, ASYM,
    ),
    "torch_block": ("torch_block", "sm90", {"k": 512, "n": 128}, BLOCKS),
    "vllm_skinny": (
        "vllm_skinny",
        "gfx942+vllm==0.21",
        {"bias": BF16, "packed": False},
        ("tensor", "tensor"),
    ),
    "aiter_row": ("aiter_row", "gfx950+aiter", {"bias": BF16}, ROW),
    "aiter_int8": ("aiter_int8", "gfx942+aiter", {"dtypes": INT8}, ROW),
    "aiter_shuffled": ("aiter_shuffled", "gfx942+aiter", {"prepared": True}, ROW),
    "aiter_block": ("aiter_block", "gfx942+aiter", {"k": 256, "n": 128}, BLOCKS),
    "torch_channel_mixed_f32": ("torch_channel", "gfx942", {"out_dtype": F32}, ("token", "tensor")),
}  # fmt: skip


def made(name: str, **more: Any) -> tuple[Built, ScaledMMProblem]:
    kernel, target_name, changes, pair = GOLDEN[name]
    target = Target.parse(target_name)
    p = problem(*pair, target=target, **changes)
    return build(find(kernel).emit, target, p, **more), p


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str, golden: Callable[[str, str], None]) -> None:
    built, _ = made(name)
    check_values(built)
    golden(f"lowerings/{name}", render(built.module.graph))


def test_a_golden_graph_for_every_kernel() -> None:
    assert {kernel for kernel, *_ in GOLDEN.values()} == {
        kernel.name for kernel in kernels() if not kernel.weight_only
    }


@pytest.mark.parametrize("name", GOLDEN)
def test_nothing_but_functional_operators(name: str) -> None:
    built, _ = made(name)
    for node in built.module.graph.nodes:
        if node.op == "call_function":
            assert isinstance(node.target, torch._ops.OpOverload)
            assert node.target.namespace in ("aten", "prims", "fp8pass")
            assert not node.target._schema.is_mutable


class Reference(fx.Interpreter):
    """Runs a graph with ``_scaled_mm`` written out, so that no version or device matters."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not torch.ops.aten._scaled_mm.default:
            return super().call_function(target, args, kwargs)
        a, b, scale_a, scale_b, bias, scale_result, out_dtype, _ = args
        assert scale_result is None
        out = a.float() @ b.float() * scale_a * scale_b
        return (out if bias is None else out + bias.float()).to(out_dtype)


def exact(values: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The result in float64, and the sum of magnitudes that bounds a float32 accumulation."""
    a, b = values["a"].double(), values["b"].double()
    scales = values["scale_a"].double() * values["scale_b"].double()
    out, size = a @ b * scales, a.abs() @ b.abs() * scales
    if "bias" in values:
        bias = values["bias"].double()
        out, size = out + bias, size + bias.abs()
    return out, size


def close(result: torch.Tensor, values: dict[str, torch.Tensor]) -> None:
    """No element further than 2 ulp + 2^-10 of the sum of magnitudes, mean error < 0.5 %."""
    out, size = exact(values)
    ulp = out.abs().clamp_min(1e-30) * torch.finfo(result.dtype).eps
    error = (result.double() - out).abs()
    assert bool((error <= 2 * ulp + size * 2.0**-10).all())
    if out.numel():
        assert float(error.mean() / out.abs().mean().clamp_min(1e-30)) < 0.005


ONLY = {"torch_tensor": MIXES[:1], "flashinfer_tensor": MIXES[:1], "torch_row": (ROW,)}
PAIRS = [
    (kernel.name, pair)
    for kernel in kernels()
    if kernel.name not in SPECIAL
    for pair in ONLY.get(kernel.name, MIXES)
]


@pytest.mark.parametrize(("bias", "out"), [(None, BF16), (BF16, BF16), (F32, F16), (F16, F32)])
@pytest.mark.parametrize(("kernel", "pair"), PAIRS, ids=str)
def test_numbers(kernel: str, pair: tuple[str, str], bias: Any, out: Any) -> None:
    """What is emitted, interpreted on a CPU, is the product in float32 rounded once."""
    for m in (0, 1, 3, 17):
        check_numbers(kernel, pair, bias, out, m)


def check_numbers(kernel: str, pair: tuple[str, str], bias: Any, out: Any, m: int) -> None:
    target = Target.parse("cpu" if kernel.startswith("cpu") else "sm90+vllm")
    p = problem(*pair, bias=bias, out_dtype=out)
    values = operands(p, m, "cpu", seed=m)
    emit = find(kernel).emit
    if kernel == "cpu_prepared":
        packed = cpu.pack(values["b"].t())
        p = problem(*pair, bias=bias, out_dtype=out, prepared=True)
        values["prepared"] = packed
    built = build(emit, target, p, m=m, device="cpu")
    result = Reference(built.module).run(*(values[name] for name in built.names))[0]
    assert result.dtype == out and result.shape == (m, p.n)
    close(result, values)
    if not kernel.startswith("cpu"):  # one rounding: equal to the reference, bit for bit
        scales = values["scale_a"], values["scale_b"]
        expected = values["a"].float() @ values["b"].float() * scales[0] * scales[1]
        expected = expected if bias is None else expected + values["bias"].float()
        assert torch.equal(result, expected.to(out))


@pytest.mark.parametrize("m", [0, 1, 17])
@pytest.mark.parametrize(
    ("how", "dtype"),
    [
        (how, dtype)
        for how in ("int32", "int64", "float32", "codes")
        for dtype in (torch.int8, torch.int32)
    ]
    + [("float32", F32), ("codes", F32)],
    ids=str,
)
@pytest.mark.parametrize("kernel", ["torch_int8", "torch_dequant", "vllm_cutlass_int8"])
def test_zero_points(kernel: str, how: str, dtype: torch.dtype, m: int) -> None:
    """Every way to take one off, where the kernel takes it, against the generic operator."""
    target = Target.parse("sm80")
    p = problem(*ASYM, target=target, dtypes=INT8, zero=how, zero_dtype=dtype, m=32)
    if not find(kernel).can_implement(target, p):
        pytest.skip("refused: see test_lowering_choice")
    values = operands(p, m, "cpu", seed=m)
    built = build(find(kernel).emit, target, p, m=m, device="cpu")
    got = Reference(built.module).run(*(values[name] for name in built.names))[0]
    keys = str(p.activation), str(p.weight)
    wanted = scaled_product(
        values["a"], values["b"], values["scale_a"], values["scale_b"], None, BF16, *keys,
        f"none,ab,{how}", values["zero"],
    )  # fmt: skip
    assert torch.equal(got, wanted)


REFERENCES = [
    ("torch_dequant", BLOCKS, {"k": 256, "n": 384}),
    ("torch_dequant", BLOCKS, {"k": 200, "n": 72, "bias": BF16}),
    ("torch_dequant", ("group1x64", "channel"), {"k": 192, "n": 24}),
    ("torch_dequant", ("token", "group128x128"), {"k": 256, "n": 128, "out_dtype": F32}),
    ("torch_dequant", ROW, {"dtypes": FNUZ}),
    ("torch_int8", ROW, {"dtypes": INT8, "bias": F32}),
    ("triton_int8", ROW, {"dtypes": INT8, "bias": F32}),
    ("triton_int8", ("tensor", "channel"), {"dtypes": INT8, "k": 8192, "out_dtype": F32}),
    ("triton_block", BLOCKS, {"k": 256, "n": 384}),
    ("vllm_cutlass_block", BLOCKS, {"k": 256, "n": 384, "packed": False}),
    ("vllm_cutlass_int8", ROW, {"dtypes": INT8, "k": 4096}),
    ("deepgemm_block", BLOCKS, {"k": 256, "n": 192}),
    ("flashinfer_block", BLOCKS, {"k": 256, "n": 128}),
    ("triton_block", BLOCKS, {"k": 200, "n": 72, "bias": F32, "out_dtype": F16}),
    ("torch_int8_cpu", ROW, {"dtypes": INT8, "bias": BF16, "out_dtype": F16}),
    ("torch_int8_cpu", ("tensor", "channel"), {"dtypes": INT8}),
]


@pytest.mark.parametrize("m", [0, 1, 3, 17])
@pytest.mark.parametrize(("kernel", "pair", "changes"), REFERENCES, ids=str)
def test_numbers_are_those_of_the_generic_operator(
    kernel: str, pair: tuple[str, str], changes: dict[str, Any], m: int
) -> None:
    p = problem(*pair, **changes)
    values = operands(p, m, "cpu", seed=m)
    built = build(find(kernel).emit, Target.parse("cpu"), p, m=m, device="cpu")
    check_values(built)
    result = built.module(*(values[name] for name in built.names))[0]
    scales = values["scale_a"], values["scale_b"]
    keys = str(p.activation), str(p.weight)
    bias = values.get("bias")
    wanted = scaled_product(values["a"], values["b"], *scales, bias, p.out_dtype, *keys, "")
    assert torch.equal(result, wanted)


def test_blocks_with_symbolic_rows_add_no_guard() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    p = problem(*BLOCKS, m=None, k=256, n=128)
    env = ShapeEnv()
    m = env.create_unbacked_symint()
    torch._check(m >= 2)
    for name in ("torch_dequant", "torch_block", "triton_block"):
        graph = fx.Graph()
        with FakeTensorMode(shape_env=env):
            fp8 = torch.float8_e4m3fn
            tensors = {
                "a": torch.empty((m, 256), dtype=fp8),
                "b": torch.empty((128, 256), dtype=fp8).t(),
                "scale_a": torch.empty(m, 2),
                "scale_b": torch.empty(2, 1),
            }
            val = torch.empty(m, 128, dtype=BF16)
        nodes = [graph.placeholder(key) for key in tensors]
        for node, tensor in zip(nodes, tensors.values(), strict=True):
            node.meta["val"] = tensor
        output = graph.output(())
        guards = len(env.guards)
        site = EmitSite(*nodes, None, None, BF16, p, Target.parse("cpu"), "exact", val)
        with graph.inserting_before(output):
            result = find(name).emit(graph, site)
        assert len(env.guards) == guards
        assert result.meta["val"].shape[0].node.expr == m.node.expr


@pytest.mark.parametrize("m", [0, 1, 3, 4, 16, 17])
def test_blocks_are_laid_out_as_torch_asks(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLASLt: rows a multiple of 4, the scales of both stored with their first dim innermost."""
    from fp8pass.lowerings.torch_block import run_operator

    p = problem(*BLOCKS, k=512, n=256)
    given = operands(p, m, "cpu")
    names = ("a", "b", "scale_a", "scale_b")
    a, b, scale_a, scale_b = (given[name] for name in names)
    called = []

    def product(
        a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor, **how: Any
    ) -> torch.Tensor:
        called.append(a.shape[0])
        assert a.shape[0] % 4 == 0 and a.stride() == (512, 1) and b.stride() == (1, 512)
        assert (sa.shape, sa.t().is_contiguous()) == ((a.shape[0], 4), True)
        assert (sb.shape, sb.t().is_contiguous()) == ((4, 2), True)
        return scaled_product(a, b, sa, sb, None, how["out_dtype"], *BLOCK_KEYS, "")

    monkeypatch.setattr(torch, "_scaled_mm", product)
    for layout in (scale_a, scale_a.t().contiguous().t()):
        got = run_operator(a, b, layout, scale_b, None, BF16, False)
        wanted = scaled_product(a, b, scale_a, scale_b, None, BF16, *BLOCK_KEYS, "")
        assert torch.equal(got, wanted) and got.is_contiguous()
    assert called == ([-(-m // 4) * 4] * 2 if m else [])


NATIVE = ["torch_tensor", "torch_channel", *(["torch_row"] if TORCH >= (2, 12) else [])]


@pytest.mark.parametrize("kernel", NATIVE)
def test_numbers_with_torchs_own_product(kernel: str) -> None:
    pair = ROW if kernel == "torch_row" else ("tensor", "tensor")
    p = problem(*pair, bias=BF16)
    values = operands(p, 3, "cpu")
    built = build(find(kernel).emit, Target.parse("sm90"), p, m=3, device="cpu")
    close(built.module(*(values[name] for name in built.names))[0], values)


@pytest.mark.parametrize("kernel", ["torch_tensor", "torch_row", "torch_channel"])
def test_operands_with_an_odd_pitch_are_copied(kernel: str) -> None:
    pair = ROW if kernel == "torch_row" else ("tensor", "tensor")
    p = problem(*pair, packed=False)
    built = build(find(kernel).emit, Target.parse("sm90"), p)
    check_values(built)
    copies = [n for n in built.module.graph.nodes if n.target is torch.ops.aten.clone.default]
    assert len(copies) == 2
    values = operands(p, 5, "cpu")
    assert values["a"].stride() == (35, 1)
    local = build(find(kernel).emit, Target.parse("sm90"), p, device="cpu")
    close(Reference(local.module).run(*(values[name] for name in local.names))[0], values)


def test_operands_with_an_aligned_pitch_are_not_copied() -> None:
    def pitched(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name, strides in (("a", (64, 1)), ("b", (1, 6656))):
            v = values[name]
            values[name] = torch.empty_strided(v.shape, strides, dtype=v.dtype, device=v.device)
        return values

    p = problem(*ROW, packed=False)
    built = build(find("torch_row").emit, Target.parse("sm90"), p, change=pitched)
    check_values(built)
    assert len([n for n in built.module.graph.nodes if n.op == "call_function"]) == 1


def test_scales_of_another_rank_or_stride() -> None:
    def ranks(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**values, "scale_a": values["scale_a"].reshape(1),
                "scale_b": values["scale_b"].reshape(())}  # fmt: skip

    def vectors(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**values, "scale_a": values["scale_a"].reshape(-1),
                "scale_b": values["scale_b"].reshape(-1)}  # fmt: skip

    def strided(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        a, b = values["scale_a"], values["scale_b"]
        return {
            **values,
            "scale_a": torch.empty_strided(a.shape, (1, 5), device=a.device),
            "scale_b": torch.empty_strided(b.shape, (1, 2), device=b.device),
        }

    sm90 = Target.parse("sm90")
    for kernel, pair, change in (
        ("torch_tensor", ("tensor", "tensor"), ranks),
        ("torch_row", ROW, vectors),
        ("torch_row", ROW, strided),
        ("torch_channel", ROW, vectors),
        ("torch_channel", ("tensor", "tensor"), ranks),
    ):
        built = build(find(kernel).emit, sm90, problem(*pair), change=change, device="cuda")
        check_values(built)
        product = next(
            n for n in built.module.graph.nodes if n.target is torch.ops.aten._scaled_mm.default
        )
        scale_a, scale_b = (n.meta["val"] for n in product.args[2:4])
        assert scale_a.dim() == scale_b.dim()
        if kernel == "torch_row":
            assert scale_a.shape == (5, 1) and scale_b.shape == (1, 48)
            assert scale_a.stride() == (1, 1) and scale_b.stride(1) == 1


def test_one_unit_scale_for_all_sites() -> None:
    built = build(
        find("torch_channel").emit, Target.parse("sm89"), problem(*ROW), copies=3, device="cuda"
    )
    ones = [n for n in built.module.graph.nodes if n.target is torch.ops.aten.full.default]
    assert len(ones) == 1
    products = [
        n for n in built.module.graph.nodes if n.target is torch.ops.aten._scaled_mm.default
    ]
    assert len(products) == 3
    assert all(n.args[2] is ones[0] and n.args[3] is ones[0] for n in products)


@pytest.mark.parametrize("kernel", ["torch_tensor", "torch_row", "torch_channel"])
def test_fast_accumulation_only_if_asked_for(kernel: str) -> None:
    pair = ROW if kernel == "torch_row" else ("tensor", "tensor")
    for source, numerics in ((False, "exact"), (True, "exact"), (False, "fast")):
        p = problem(*pair, use_fast_accum=source)
        built = build(find(kernel).emit, Target.parse("sm90"), p, numerics=numerics, device="cuda")
        product = next(
            n for n in built.module.graph.nodes if n.target is torch.ops.aten._scaled_mm.default
        )
        assert product.args[7] is (source or numerics == "fast")


@pytest.mark.parametrize("kernel", [k.name for k in kernels() if k.name not in SPECIAL])
def test_symbolic_rows(kernel: str) -> None:
    """A dynamic M adds no guard and is not specialised."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    target = Target.parse("cpu" if kernel.startswith("cpu") else "sm90+vllm")
    pair = ONLY.get(kernel, (ROW,))[0]
    p = problem(*pair, m=None, prepared=kernel == "cpu_prepared", packed=False)
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    m = env.create_unbacked_symint()
    torch._check(m >= 2)
    device = target.device_type
    graph = fx.Graph()
    with mode:
        fp8 = torch.float8_e4m3fn
        tensors = {
            "a": torch.empty_strided((m, 32), (35, 1), dtype=fp8, device=device),
            "b": torch.empty_strided((32, 48), (1, 32), dtype=fp8, device=device),
            "scale_a": torch.empty((m, 1) if pair == ROW else (1, 1), device=device),
            "scale_b": torch.empty((1, 48) if pair == ROW else (1, 1), device=device),
            "prepared": torch.empty(48 * 32, dtype=BF16, device=device),
        }
        val = torch.empty(m, 48, dtype=BF16, device=device)
    nodes = {}
    for name, tensor in tensors.items():
        nodes[name] = graph.placeholder(name)
        nodes[name].meta["val"] = tensor
    output = graph.output(())
    guards = len(env.guards)
    site = EmitSite(
        nodes["a"], nodes["b"], nodes["scale_a"], nodes["scale_b"], None, nodes["prepared"],
        BF16, p, target, "exact", val,
    )  # fmt: skip
    with graph.inserting_before(output):
        result = find(kernel).emit(graph, site)
    assert len(env.guards) == guards
    assert result.meta["val"].shape[0].node.expr == m.node.expr


def test_a_prepared_kernel_without_its_weight() -> None:
    p = problem(*ROW)  # says it is not prepared, so that no operand is made
    with pytest.raises(PassError, match="cpu_prepared"):
        build(find("cpu_prepared").emit, Target.parse("cpu"), p)
