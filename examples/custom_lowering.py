"""A backend in one file outside the package: a kernel of one's own, chosen like every other.

The kernel here multiplies in float64, for those who want no rounding but the last.
docs/add-a-backend.md walks through it.
"""

import torch
from torch import Tensor, fx, nn

import fp8pass
from fp8pass.lowerings import EmitSite, Kernel, register
from fp8pass.lowerings import conditions as need
from fp8pass.lowerings.emit import call
from fp8pass.nn import quantize_
from fp8pass.problem import MRange, ScaledMMProblem
from fp8pass.reasons import Verdict
from fp8pass.target import Target

NAME = "float64"

# 1. The call: a functional operator, with a fake that says shape and dtype of its result.


@torch.library.custom_op("custom_lowering::scaled_mm", mutates_args=())
def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out: torch.dtype
) -> Tensor:
    """``[M, K] @ [K, N]``, scales of one element, ``[M, 1]`` and ``[1, N]``; one rounding."""
    value = a.double() @ b.double() * scale_a * scale_b
    return (value if bias is None else value + bias).to(out)


@scaled_mm.register_fake
def _(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out: torch.dtype
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out)


# 2. What it takes: a pure function, which names the first condition that fails and its value.


def takes(target: Target, problem: ScaledMMProblem) -> Verdict:
    return need.all_of(
        lambda: need.granularity(NAME, problem, need.OUTER_PRODUCTS),
        lambda: need.plain_scales(NAME, problem),
        lambda: need.out_dtype(NAME, problem, need.MODEL_DTYPES),
        lambda: need.bias_dtype(NAME, problem, need.MODEL_DTYPES),
    )


# 3. How it is written into a graph, and called as part of a plan over several ranges of M.


def emit(graph: fx.Graph, site: EmitSite) -> fx.Node:
    args = (site.a, site.b, site.scale_a, site.scale_b, site.bias, site.out_dtype)
    return call(graph, torch.ops.custom_lowering.scaled_mm.default, args, val=site.val)


def run(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None,
    out: torch.dtype, fast_accum: bool,
) -> Tensor:  # fmt: skip
    return scaled_mm(a, b, scale_a, scale_b, bias, out)


# 4. The record. Registering it is all that there is to do.

register(
    Kernel(
        name=NAME,
        summary="product in float64",
        kinds=frozenset({"cpu"}),
        requirements=need.always,
        can_implement=takes,
        priority=lambda target, problem: 300,  # behind all others, unless asked for
        emit=emit,
        provenance="run by this example",
        rows=MRange(),
        run=run,
    )
)


# 5. See it chosen, and where it is not, why.


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 64)).bfloat16().eval()
    x = torch.randn(16, 128, dtype=torch.bfloat16)
    expected = model(x).float()
    quantize_(model, "dynamic")

    # The second linear alone; "prefer" would fall back where it cannot, "force" raises.
    options = {"fp8pass.force": f"2={NAME}"}
    actual = torch.compile(model, backend="fp8pass", options=options)(x).float()
    error = ((actual - expected).norm() / expected.norm()).item()
    print(f"relative L2 error against bf16: {error:.2e}")
    assert error < 0.08, error  # that of FP8 itself

    report = fp8pass.explain(model, x, force=f"2={NAME}")
    print(report.table())
    chosen = [site.kernel for site in report.sites if site.kind == "scaled_mm"]
    assert len(chosen) == 2 and chosen[1] == NAME != chosen[0], chosen
    told = {r.kernel: r.message for s in report.sites for r in s.rejected}
    print(told[NAME])


if __name__ == "__main__":
    main()
