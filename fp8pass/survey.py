"""Every kernel's answer to a list of problems on a target, as plain data, text and Markdown.

For ``fp8pass targets``, ``fp8pass kernels`` and docs/backends.md. Nothing is measured and no device
is asked: the same target and problems give the same answer on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import torch

from fp8pass.lowerings import choose, consider, kernels
from fp8pass.lowerings.producers import (
    INDUCTOR,
    ProducerProblem,
    choose_producer,
    producer_kernels,
)
from fp8pass.options import Options
from fp8pass.problem import MRange, ScaledMMProblem
from fp8pass.problem_spec import SHORT, parse_problem, problem_text
from fp8pass.quant_key import dtype_name
from fp8pass.target import LIBRARIES, Target, architectures

#: Numbers of rows that are asked for where a problem does not say: decode, few rows, any number.
ROWS = (MRange(1, 1), MRange(4, 4), MRange(17, 17), MRange())
#: Sizes N and K: what every library's alignment likes, and what none does.
SIZES = {"aligned": 4096, "odd": 4095}
SCHEMA = 1


# ---- targets -------------------------------------------------------------------------------------


def targets() -> list[dict[str, Any]]:
    """Every architecture: name, kind of device, fp8 dtype and its maximum, compute units, notes."""
    return [_target(Target.parse(name)) for name in architectures()]


def _target(target: Target) -> dict[str, Any]:
    fp8 = target.fp8_dtype
    ready = [k for k in kernels() if target.kind in k.kinds and k.requirements(target)]
    if fp8 is None:
        notes = ["no fp8 products of its own"]
    elif target.fp8_max is not None and target.fp8_max < torch.finfo(torch.float8_e4m3fn).max:
        notes = ["weights in e4m3fn are converted, their scales doubled"]
    else:
        notes = []
    if not ready:
        notes.append("no kernel of fp8pass: graphs stay as they are")
    return {
        "name": target.arch,
        "kind": target.kind,
        "fp8_dtype": None if fp8 is None else dtype_name(fp8),
        "fp8_max": target.fp8_max,
        "units": target.units,
        "kernels": [kernel.name for kernel in ready],
        "notes": notes,
    }


# ---- kernels -------------------------------------------------------------------------------------


def default_problems(target: Target) -> list[ScaledMMProblem]:
    """Each quantisation of :data:`SHORT` and its mirror image, with and without bias, at sizes that
    are aligned and odd, for :data:`ROWS`."""
    names = [*SHORT, "token x tensor"]
    return [
        parse_problem(f"{name}, m={m}, n={size}, k={size}{bias}", target)
        for name, bias, size, m in product(names, ("", ", bias"), SIZES.values(), ROWS)
    ]


def problems_of(text: str, target: Target) -> list[ScaledMMProblem]:
    """The problem of a text; for each of :data:`ROWS` if it names no number of rows."""
    named = any(part.strip().startswith("m=") for part in text.split(","))
    if named:
        return [parse_problem(text, target)]
    return [parse_problem(f"{text}, m={m}", target) for m in ROWS]


def survey(
    target: Target, problems: Iterable[ScaledMMProblem], options: Options | None = None
) -> dict[str, Any]:
    """What every registered kernel, for products and for producers, says on ``target``.

    Args:
        target: the device, present or not.
        problems: the products to ask about.
        options: force, prefer and disable count; default: none of them, and no measurements.

    Returns:
        plain data: ``kernels`` and ``producer_kernels`` describe them; each of ``problems`` has the
        chosen plan, why, and for each kernel ``answer`` (``chosen``, ``able`` or ``refused``) with
        code, message and hint; ``producers`` likewise.

    Raises:
        NoKernelError: ``options`` force a kernel that cannot take one of the problems.
    """
    options = Options(tune="off") if options is None else options
    described = [
        {
            "name": kernel.name,
            "summary": kernel.summary,
            "kinds": sorted(kernel.kinds),
            "rows": str(kernel.rows),
            "in_plans": kernel.run is not None,
            "provenance": kernel.provenance,
        }
        for kernel in kernels()
    ]
    producers = [
        {
            "name": kernel.name,
            "summary": kernel.summary,
            "kinds": sorted(kernel.kinds),
            "provenance": kernel.provenance,
        }
        for kernel in producer_kernels()
    ]
    return {
        "schema": SCHEMA,
        "target": _target(target) | {"spec": target.spec},
        "kernels": described,
        "producer_kernels": producers,
        "problems": [_asked(target, problem, options) for problem in problems],
        "producers": [_asked_producer(target, p, options) for p in default_producers(target)],
    }


def _asked(target: Target, problem: ScaledMMProblem, options: Options) -> dict[str, Any]:
    choice = choose(target, problem, options)
    refused = {r.kernel: r.verdict for r in choice.rejected}
    answers = []
    for kernel in kernels():
        verdict = refused.get(kernel.name)
        if verdict is None:
            said = {"answer": "chosen", "code": "", "message": "", "hint": ""}
            if len(choice.plan) > 1:
                said["message"] = "for " + " and ".join(
                    f"{m} rows" for m, k in choice.plan if k is kernel
                )
        else:
            able = verdict.code == "FP8-L013"
            said = {
                "answer": "able" if able else "refused",
                "code": verdict.code,
                "message": verdict.message,
                "hint": verdict.hint,
            }
        answers.append({"kernel": kernel.name, **said})
    return {
        "problem": problem_text(problem),
        "m": str(problem.m),
        "plan": choice.text,
        "why": choice.why,
        "note": choice.note,
        "code": choice.verdict.code,
        "message": choice.verdict.message,
        "kernels": answers,
    }


def default_producers(target: Target) -> list[ProducerProblem]:
    """Fused producers of a usual model in bfloat16, quantised per token and by a given scale."""
    from fp8pass.ops import dynamic_form, static_form

    fp8, bf16 = target.fp8_dtype or torch.float8_e4m3fn, torch.bfloat16
    norm, act = "mean,rsqrt,after_cast,bfloat16", "div,bfloat16,bfloat16"
    shapes: tuple[tuple[str, str, tuple[torch.dtype | None, ...]], ...] = (
        ("rms_norm_quant", norm, (bf16, bf16)),
        ("add_rms_norm_quant", norm, (bf16, bf16, bf16)),
        ("silu_mul_quant", act, (bf16, bf16)),
        ("act_mul_quant", "gelu_tanh,bfloat16,bfloat16", (bf16, bf16)),
        ("quantize", "", (bf16,)),
    )
    forms = (str(dynamic_form("token", fp8)), str(static_form(fp8)))
    return [
        ProducerProblem(op, form, quant, 4096, dtypes, target.device_type)
        for (op, form, dtypes), quant in product(shapes, forms)
    ]


def _asked_producer(target: Target, problem: ProducerProblem, options: Options) -> dict[str, Any]:
    choice = choose_producer(target, problem, options)
    answers = []
    chosen = INDUCTOR if choice.kernel is None else choice.kernel.name
    refused = dict(choice.rejected)
    for name in [*(kernel.name for kernel in producer_kernels()), INDUCTOR]:
        verdict = refused.get(name)
        code, message = ("", "") if verdict is None else (verdict.code, verdict.message)
        answer = "chosen" if name == chosen else "able" if code == "FP8-L013" else "refused"
        answers.append({"kernel": name, "answer": answer, "code": code, "message": message})
    return {
        "op": problem.op,
        "form": problem.form,
        "quant_form": problem.quant_form,
        "chosen": chosen,
        "why": choice.why,
        "kernels": answers,
    }


# ---- as text -------------------------------------------------------------------------------------


def targets_text(rows: Sequence[dict[str, Any]]) -> str:
    """The list of :func:`targets` as a table."""
    head = ("target", "kind", "fp8 dtype", "max", "units", "kernels", "notes")
    cells = [
        (
            row["name"],
            row["kind"],
            row["fp8_dtype"] or "-",
            "-" if row["fp8_max"] is None else f"{row['fp8_max']:g}",
            "-" if row["units"] is None else str(row["units"]),
            str(len(row["kernels"])),
            "; ".join(row["notes"]),
        )
        for row in rows
    ]
    return columns(head, cells)


def survey_text(found: dict[str, Any], *, detail: bool) -> str:
    """A survey for people: the plan of each problem, and with ``detail`` every kernel's answer."""
    target = found["target"]
    fp8 = target["fp8_dtype"] or "no fp8 dtype"
    rows: list[tuple[str, ...]]
    blocks = [f"{target['spec']}: {target['kind']}, {fp8}"]
    if not detail:
        rows = [(p["problem"], p["plan"] or f"none ({p['code']})", p["why"]) for p in
                found["problems"]]  # fmt: skip
        blocks.append(columns(("problem", "plan", "why"), rows))
    for asked in found["problems"] if detail else ():
        plan = asked["plan"] or f"no kernel ({asked['code']})"
        why = f" ({asked['why']})" if asked["why"] else ""
        rows = [_answer(answer) for answer in asked["kernels"]]
        lines = [f"{asked['problem']}", f"  {plan}{why}"]
        if asked["note"]:
            lines.append(f"  {asked['note']}")
        table = columns(("kernel", "answer", "code", "why"), rows)
        blocks.append("\n".join([*lines, *("  " + line for line in table.splitlines())]))
    rows = [(p["op"], p["quant_form"], p["chosen"], p["why"]) for p in found["producers"]]
    blocks.append(columns(("producer", "quantised", "kernel", "why"), rows))
    if not detail:
        rows = [(k["name"], k["summary"], k["provenance"]) for k in found["kernels"]]
        rows += [(k["name"], k["summary"], k["provenance"]) for k in found["producer_kernels"]]
        blocks.append(columns(("kernel", "what it is", "tested"), rows))
        blocks.append("--problem TEXT shows every kernel's answer to one problem, --json all")
    return "\n\n".join(blocks) + "\n"


def _answer(answer: dict[str, Any]) -> tuple[str, str, str, str]:
    return answer["kernel"], answer["answer"], answer["code"], answer["message"]


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Text in columns, without spaces at the end of a line."""
    table = [tuple(head), *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    )


# ---- docs/backends.md ----------------------------------------------------------------------------

#: What a row of the matrix asks: scales of activation and weight.
_MATRIX = ("static", "row", "mixed", "token x tensor", "block", "block-ue8m0", "int8", "int8-azp")
_INTRO = """# Backends

Which kernel takes which product on which device. This page is generated from the registry of
kernels by `python -m fp8pass.survey docs/backends.md`, and a test compares them; `fp8pass kernels
--target T` says the same for one device, with the reason of every refusal, and `--problem TEXT` for
one product. The products here have N = K = 4096, any number of rows, bfloat16 results and no bias.

A name in **bold** is chosen where nothing was measured and nothing is asked for; others can be
forced or preferred by name. What stands behind `+` is a library that has to be loaded. Kernels that
were not run on such hardware are marked with `†`: their calls follow the library's own sources and
are checked against its recorded signatures, nothing more.
"""


def markdown() -> str:
    """docs/backends.md: kernels with what was tested, and backend x scales x target."""
    lines = [_INTRO, "## Kernels", "", "| kernel | what it is | runs on | rows | tested |",
             "|---|---|---|---|---|"]  # fmt: skip
    lines += [
        f"| `{k.name}` | {k.summary} | {', '.join(sorted(k.kinds))} | {k.rows} | {k.provenance} |"
        for k in kernels()
    ]
    lines += ["", "Producers (norm, activation and quantise in one):", "",
              "| kernel | what it is | runs on | tested |", "|---|---|---|---|"]  # fmt: skip
    lines += [
        f"| `{k.name}` | {k.summary} | {', '.join(sorted(k.kinds))} | {k.provenance} |"
        for k in producer_kernels()
    ]
    lines.append(
        f"| `{INDUCTOR}` | written out for the code generator | every kind | with each target |"
    )
    lines += ["", "## By target", ""]
    lines += [f"| target | {' | '.join(_MATRIX)} |", "|---" * (len(_MATRIX) + 1) + "|"]
    for name in architectures():
        target = _with_libraries(Target.parse(name))
        cells = [_cell(target, text) for text in _MATRIX]
        lines.append(f"| {target.spec} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _with_libraries(target: Target) -> Target:
    """The target with every library that some kernel of its kind asks for."""
    useful = []
    for library in LIBRARIES:
        with_it = Target.parse(f"{target.arch}+{library}")
        if any(
            target.kind in k.kinds and k.requirements(with_it) and not k.requirements(target)
            for k in kernels()
        ):
            useful.append(library)
    return Target.parse("+".join([target.arch, *useful]))


def _cell(target: Target, text: str) -> str:
    found = []
    plain = parse_problem(text, target)
    choice = choose(Target.parse(target.arch), plain, Options(tune="off"))
    chosen = {kernel.name for _, kernel in choice.plan}
    for kernel in kernels():
        able = consider(kernel, target, plain) or consider(
            kernel, target, parse_problem(f"{text}, fast_accum", target)
        )
        if not able and not consider(kernel, target, parse_problem(f"{text}, prepared", target)):
            continue
        mark = "" if _tested(kernel.provenance, target) else "†"
        name = f"{kernel.name}{mark}"
        found.append(f"**{name}**" if kernel.name in chosen else name)
    return ", ".join(found) or "-"


def _tested(provenance: str, target: Target) -> bool:
    """Whether the kernel was run on such hardware: its statement names the architecture."""
    tested = provenance.partition(";")[0]
    return "not run" not in tested and (
        target.arch in tested or (target.host and "x86" in tested and "x86" in target.arch)
    )


if __name__ == "__main__":
    import sys
    from pathlib import Path

    Path(sys.argv[1]).write_text(markdown(), encoding="utf-8")
