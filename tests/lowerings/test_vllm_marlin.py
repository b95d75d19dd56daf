"""``vllm_marlin``: what it takes, and how the library is called.

No GPU was at hand: the library's operators are stood in for, after vLLM's source. The stand-ins
keep the weight in the order in which it comes, and read scales in the order of the kernel.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lowering_sites import operands, problem

from fp8pass.errors import OptionError, UnsupportedError
from fp8pass.lowerings import choose, find, vllm_marlin
from fp8pass.lowerings.vllm_names import backend_kernels
from fp8pass.ops.weight_only import weight_only_product
from fp8pass.options import Options
from fp8pass.target import Target

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
Tensor = torch.Tensor
SM80 = Target.parse("sm80+vllm")
ROUNDED = "weight,bfloat16,bfloat16,after"
SCHEMAS = json.loads((Path(__file__).parents[1] / "golden/schemas.json").read_text())
SPACE = "fp8pass_test_marlin"


def site(weight: str = "channel", target: Target = SM80, **more: Any) -> Any:
    given = {"dtypes": (BF16, E4), "n": 256, "k": 512, **more}
    given.setdefault("out_dtype", given["dtypes"][0])
    return problem("tensor", weight, target=target, **given)


def reason(p: Any, target: Target = SM80) -> Any:
    """None where it can be chosen."""
    choice = choose(target, p, Options(prefer=("vllm_marlin",)))
    if choice.kernel is vllm_marlin.VLLM_MARLIN:
        return None
    return next(r.verdict for r in choice.rejected if r.kernel == "vllm_marlin")


def test_taken_on_request_alone() -> None:
    for name in ("sm80", "sm86", "sm89", "sm90", "sm100", "sm120"):
        where = Target.parse(f"{name}+vllm")
        for weight in ("tensor", "channel"):
            for form in ("", ROUNDED, "product,float32,bfloat16,after"):
                p = site(weight, where, form=form)
                assert reason(p, where) is None
                kernel = choose(where, p, Options()).kernel
                assert kernel is not None and kernel.name in ("triton_w8a16", "torch_w8a16")
                alone = Options(disable=("triton_w8a16", "torch_w8a16"))
                assert not choose(where, p, alone).plan
                told = {r.kernel: r.verdict.code for r in choose(where, p, alone).rejected}
                assert told["vllm_marlin"] == "FP8-L069"
        assert reason(site("group128x128", where, form=ROUNDED), where) is None
        assert reason(site(target=where), Target.parse(name)).code == "FP8-L011"
    codes = choose(SM80, problem("token", "channel", target=SM80), Options())
    assert not any(kernel.weight_only for _, kernel in codes.plan)


def test_turing() -> None:
    half = {"dtypes": (F16, E4)}
    new, old = Target.parse("sm75+vllm==0.32"), Target.parse("sm75+vllm==0.21")
    assert reason(site(target=new, **half), new) is None
    assert reason(site(target=new), new).code == "FP8-L007"
    for where in (old, Target.parse("sm75+vllm")):
        assert reason(site(target=where, **half), where).code == "FP8-L062"


def test_linear_backend_and_vllms_class_name_it() -> None:
    assert backend_kernels("marlin") == ("vllm_marlin",)
    p = site("channel")
    assert choose(SM80, p, Options(linear_backend="marlin")).kernel is vllm_marlin.VLLM_MARLIN
    with pytest.raises(OptionError, match="no kernel"):
        backend_kernels("machete")


@pytest.mark.parametrize(
    ("weight", "changes", "control", "code", "word"),
    [
        ("channel", {"dtypes": (F32, E4)}, {}, "FP8-L007", "float32"),
        ("channel", {"dtypes": (BF16, E5)}, {}, "FP8-L007", "e5m2"),
        ("channel", {"out_dtype": F32}, {}, "FP8-L007", "float32"),
        ("channel", {"n": 96}, {"n": 64}, "FP8-L009", "96"),
        ("channel", {"n": 64, "k": 192}, {"n": 128, "k": 192}, "FP8-L009", "192"),
        ("channel", {"k": None}, {}, "FP8-L009", "not known"),
        ("channel", {"b_layout": "row"}, {}, "FP8-L008", "row"),
        ("channel", {"bias": BF16}, {"bias": BF16, "form": ROUNDED}, "FP8-L017", "bias"),
        (
            "channel",
            {"bias": BF16, "form": "weight,bfloat16,bfloat16,inside"},
            {"form": "weight,bfloat16,bfloat16,inside"},
            "FP8-L017",
            "bias",
        ),
        ("channel", {"form": "weight,float16,bfloat16,after"}, {}, "FP8-L017", "float16"),
        ("group128x128", {"form": ""}, {"form": ROUNDED}, "FP8-L017", "per block"),
        (
            "group128x128",
            {"form": ROUNDED, "n": 128, "k": 192},
            {"form": ROUNDED, "n": 128, "k": 256},
            "FP8-L009",
            "192",
        ),
    ],
    ids=str,
)
def test_refused_beside_what_is_taken(
    weight: str, changes: dict[str, Any], control: dict[str, Any], code: str, word: str
) -> None:
    assert reason(site(weight, **control)) is None
    verdict = reason(site(weight, **changes))
    assert verdict.code == code and word in verdict.message


def test_groups_refused() -> None:
    for weight in ("group64x64", "group256x128"):
        assert reason(site(weight, form=ROUNDED)).code == "FP8-L003"


# ---- the calls -----------------------------------------------------------------------------------


def repack(b: Tensor, *rest: Any) -> Tensor:
    """``[K / 4, N]`` to ``[K / 16, 4 N]``: here the same words in the same order."""
    if isinstance(rest[0], Tensor):
        perm, *rest = rest  # type: ignore[assignment]
        assert perm.numel() == 0 and perm.dtype == torch.int32
    k, n, bits, a_8bit = rest
    assert b.dtype == torch.int32 and b.shape == (k // 4, n) and b.is_contiguous()
    assert bits == 8 and not a_8bit
    assert not (n % 64 or k % 128) or not (n % 128 or k % 64)
    return b.reshape(k // 16, 4 * n).clone()


def in_order(scale: Tensor) -> Tensor:
    """From the order of the threads to that of the columns, written from the other side."""
    rows, n = scale.shape
    columns = torch.arange(n)
    if rows > 1:  # of 64 columns a thread's eight are eight apart
        block, place = columns // 64, columns % 64
        at = block * 64 + (place % 8) * 8 + place // 8
    else:  # of 32 columns a thread's eight are four neighbouring pairs, eight apart
        block, place = columns // 32, columns % 32
        pair, quarter, one = place % 8 // 2, place // 8, place % 2
        at = block * 32 + pair * 8 + quarter * 2 + one
    return scale[:, at]


def gemm(a: Tensor, given: dict[str, Any]) -> Tensor:
    m, n, k = (given[f"size_{name}"] for name in "mnk")
    assert a.shape == (m, k) and a.is_contiguous() and a.dtype in (BF16, F16)
    assert given["b_type_id"] == 0xA000000010304, "vLLM's number for e4m3fn"
    assert given["use_fp32_reduce"] and not given["use_atomic_add"] and not given["is_zp_float"]
    assert given.get("is_k_full", True)
    assert given["workspace"].dtype == torch.int32 and not given["workspace"].any()
    assert all(given[name] is None for name in given if name.endswith("_or_none"))
    assert given["a_scales"] is None and given["global_scale"] is None
    words = given["b_q_weight"]
    assert words.shape == (k // 16, 4 * n)
    codes = words.reshape(k // 4, n).t().contiguous().view(E4)  # [N, K]
    scale = given["b_scales"]
    assert scale.dtype == a.dtype and scale.is_contiguous()
    assert scale.shape in ((1, n), (k // 128, n))
    wide = in_order(scale).float() / {BF16: 2.0**120, F16: 2.0**8}[a.dtype]
    if scale.shape[0] == 1:
        return (a.float() @ codes.t().float() * wide).to(a.dtype)
    weight = (codes.t().float() * wide.repeat_interleave(128, 0)).to(a.dtype)
    return (a.float() @ weight.float()).to(a.dtype)


@pytest.fixture(params=["", " with a permutation"], ids=["new", "old"])
def library(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made = torch.library.Library(SPACE, "FRAGMENT")
    schemas = {
        name: SCHEMAS[f"_C::{name}{request.param}"]["schema"].removeprefix("_C::")
        for name in ("gptq_marlin_repack", "marlin_gemm")
    }
    for schema in schemas.values():
        made.define(schema)
    names = [a.name for a in torch._C.parse_schema(f"_C::{schemas['marlin_gemm']}").arguments]
    made.impl("gptq_marlin_repack", repack, "CPU")
    made.impl("marlin_gemm", lambda *v: gemm(v[0], dict(zip(names, v, strict=True))), "CPU")
    space = getattr(torch.ops, SPACE)
    monkeypatch.setattr(vllm_marlin, "vllm_operator", lambda name: getattr(space, name))
    monkeypatch.setattr(vllm_marlin, "_locks", lambda device: 4 * 108)
    try:
        yield
    finally:
        made._destroy()
        for name in schemas:
            space.__dict__.pop(name, None)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize(
    ("weight", "n", "k"),
    [("tensor", 64, 128), ("channel", 256, 192), ("channel", 192, 256), ("group128x128", 192, 384),
     ("group128x64", 256, 128)],
    ids=str,
)  # fmt: skip
def test_calls(library: None, weight: str, n: int, k: int, dtype: Any) -> None:
    name = str(dtype).removeprefix("torch.")
    for form, bias in ((f"weight,{name},{name},after", dtype), ("", None)):
        if weight.startswith("group") and not form:
            continue
        for m in (0, 1, 17):
            p = site(weight, dtypes=(dtype, E4), n=n, k=k, form=form, bias=bias, m=m)
            assert reason(p) is None
            v = operands(p, m, "cpu", seed=m)
            args = (v["a"], v["b"], v["scale_b"], v.get("bias"), dtype, str(p.weight), form)
            out = vllm_marlin.w8a16_mm(*args)
            wanted = weight_only_product(*args)
            assert out.shape == wanted.shape and out.dtype == dtype and out.is_contiguous()
            torch.testing.assert_close(out, wanted, rtol=2**-6, atol=2**-7)


def test_a_version_with_another_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.library.Library(SPACE, "FRAGMENT")
    made.define("gptq_marlin_repack(Tensor b_q_weight, int strange) -> Tensor")
    op = getattr(torch.ops, SPACE).gptq_marlin_repack
    monkeypatch.setattr(vllm_marlin, "vllm_operator", lambda name: op)
    try:
        with pytest.raises(UnsupportedError, match="'strange'"):
            vllm_marlin.packed(torch.zeros(64, 128).to(E4).t())
    finally:
        made._destroy()
        getattr(torch.ops, SPACE).__dict__.pop("gptq_marlin_repack", None)


def test_without_the_library() -> None:
    if hasattr(torch.ops._C, "marlin_gemm"):
        pytest.skip("vLLM's library is loaded")
    x, w = torch.zeros(3, 128, dtype=BF16), torch.zeros(64, 128).to(E4).t()
    key = "float8_e4m3fn/static/tensor"
    monkey = pytest.MonkeyPatch()
    monkey.setattr(vllm_marlin, "_locks", lambda device: 432)
    try:
        with pytest.raises(UnsupportedError, match="vLLM"):
            vllm_marlin.w8a16_mm(x, w, torch.ones(1), None, BF16, key)
    finally:
        monkey.undo()
    with pytest.raises(UnsupportedError, match="float32"):
        vllm_marlin.w8a16_mm(x.float(), w, torch.ones(1), None, F32, key)
    assert find("vllm_marlin").weight_only
