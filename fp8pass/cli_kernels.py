"""The commands about kernels: targets, kernels, tune, advise."""

# Without "from __future__ import annotations": typer reads the annotations of the commands, which
# are local functions.

import json as json_module
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    import typer


def add_commands(application: "typer.Typer") -> None:
    """Add the commands; what they need is loaded when one of them runs."""
    import typer

    @application.command()
    def targets(
        json: Annotated[bool, typer.Option("--json", help="print them as JSON")] = False,
    ) -> None:
        """Every architecture that a graph can be made for: kind, fp8 dtype, kernels."""
        from fp8pass.survey import targets as listed
        from fp8pass.survey import targets_text

        rows = listed()
        _print(rows if json else targets_text(rows) + "\n")

    @application.command()
    def kernels(
        target: Annotated[
            str, typer.Option(help="architecture, and libraries behind +: sm90, gfx942, sm90+vllm")
        ],
        problem: Annotated[
            list[str] | None,
            typer.Option(
                help="a product, such as 'token x channel, m=1-, n=4096, k=4096, out=bf16, bias'; "
                "may be repeated; default: the usual ones"
            ),
        ] = None,
        option: Annotated[
            list[str] | None,
            typer.Option(metavar="NAME=VALUE", help="an option of fp8pass; may be repeated"),
        ] = None,
        json: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False,
    ) -> None:
        """Every kernel's answer on a device: chosen, able or refused, and why."""
        _run(lambda: _kernels(target, problem or [], option or [], json))

    @application.command()
    def tune(
        model: Annotated[
            str | None,
            typer.Option(
                metavar="MODULE:NAME",
                help="measure every product of this model: a function that returns (model or "
                "function, inputs), made on the CPU",
            ),
        ] = None,
        shapes: Annotated[
            list[str] | None,
            typer.Option(metavar="N,K", help="measure products of this size; may be repeated"),
        ] = None,
        scales: Annotated[
            list[str] | None,
            typer.Option(
                help="of the products of --shapes: row, static, block, 'token x tensor', ...; "
                "may be repeated"
            ),
        ] = None,
        rows: Annotated[
            list[str] | None,
            typer.Option(
                metavar="M", help="a number of rows, or a range such as 0-; default: any number"
            ),
        ] = None,
        more: Annotated[
            list[str] | None,
            typer.Option(
                help="fields of the products of --shapes: 'bias, fast_accum'; may be repeated, "
                "'' among them: products with none"
            ),
        ] = None,
        option: Annotated[
            list[str] | None,
            typer.Option(metavar="NAME=VALUE", help="an option of fp8pass; may be repeated"),
        ] = None,
        json: Annotated[
            Path | None,
            typer.Option(help="write what was measured to this file; its folder must exist"),
        ] = None,
        table: Annotated[
            Path | None,
            typer.Option(
                help="write a table as in fp8pass/lowerings/tables to this file; its folder must "
                "exist"
            ),
        ] = None,
        again: Annotated[
            bool, typer.Option("--again", help="also what was measured before")
        ] = False,
    ) -> None:
        """Measure kernels on this device; compiles use it from then on (docs/tuning.md).

        Example: fp8pass tune --shapes 4096,4096 --shapes 28672,4096 --scales row --scales static
        """
        _run(
            lambda: _tune(
                model,
                shapes or [],
                scales or ["row"],
                rows or [],
                more or [""],
                option or [],
                json,
                table,
                again,
            )
        )

    @application.command()
    def advise(
        target: Annotated[
            str | None, typer.Option(help="default: the device that is here, with measurements")
        ] = None,
        model_shapes: Annotated[
            str, typer.Option(help="llama-3-8b, llama-3-70b, smollm2-135m, or 'N,K;N,K'")
        ] = "llama-3-8b",
        workload: Annotated[
            list[str] | None,
            typer.Option(
                help="sequences x prompt + generated: decode:32x256+512, prefill, mixed; may be "
                "repeated; default: these three"
            ),
        ] = None,
        measure: Annotated[
            bool, typer.Option("--measure", help="measure what is missing, on this device")
        ] = False,
        calibrated: Annotated[bool, typer.Option(help="whether static scales can be had")] = True,
        option: Annotated[
            list[str] | None,
            typer.Option(metavar="NAME=VALUE", help="an option of fp8pass; may be repeated"),
        ] = None,
        json: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False,
    ) -> None:
        """Which recipe suits a device, a model and a workload, and why."""
        _run(
            lambda: _advise(
                target, model_shapes, workload or [], measure, calibrated, option or [], json
            )
        )


def _run(command: Any) -> None:
    """Run a command; what the user can mend is one line and status 2."""
    from fp8pass.errors import Fp8PassError

    try:
        command()
    except (Fp8PassError, OSError) as error:
        print(f"fp8pass: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _print(found: Any) -> None:
    if isinstance(found, str):
        sys.stdout.write(found)
        return
    sys.stdout.write(json_module.dumps(found, indent=1, ensure_ascii=False) + "\n")


def named_options(options: list[str]) -> dict[str, Any]:
    """``NAME=VALUE`` texts as arguments of ``Options.resolve``.

    Raises:
        OptionError: a text without a name.
    """
    from fp8pass.errors import OptionError

    named: dict[str, Any] = {}
    for text in options:
        key, equals, value = text.partition("=")
        if not equals or key == "target":
            raise OptionError(f"option {text!r} is not NAME=VALUE with a name beside 'target'")
        named[key] = value
    return named


def _kernels(name: str, problems: list[str], options: list[str], json: bool) -> None:
    from fp8pass.options import Options
    from fp8pass.survey import default_problems, problems_of, survey, survey_text
    from fp8pass.target import Target

    target = Target.parse(name)
    resolved = Options.resolve(**{"tune": "off", "target": name, **named_options(options)})
    asked = [p for text in problems for p in problems_of(text, target)]
    found = survey(target, asked or default_problems(target), resolved)
    _print(found if json else survey_text(found, detail=bool(problems)))


def _tune(
    model: str | None,
    shapes: list[str],
    scales: list[str],
    rows: list[str],
    more: list[str],
    options: list[str],
    json_file: Path | None,
    table_file: Path | None,
    again: bool,
) -> None:
    from fp8pass.errors import OptionError
    from fp8pass.options import Options
    from fp8pass.report.files import check_writable, write_atomic
    from fp8pass.tuning import run, shipping

    if (model is None) == (not shapes):
        raise OptionError("name one of --model MODULE:NAME and --shapes N,K")
    resolved = Options.resolve(**{"tune": "measure", **named_options(options)})
    for file in (json_file, table_file):
        if file is not None:
            check_writable(file)
    if model is not None:
        problems = run.products_of(model, rows)
    else:
        each = [run.products_of_shapes(shapes, scales, rows, fields) for fields in more]
        problems = [problem for products in each for problem in products]
    found = run.tune(problems, resolved, again=again)
    if json_file is not None:
        write_atomic(json_file, json_module.dumps(found.to_dict(), indent=1) + "\n")
    if table_file is not None:
        write_atomic(table_file, shipping.render(found.table()))
    _print(found.text())


def _advise(
    name: str | None,
    model_shapes: str,
    workloads: list[str],
    measure: bool,
    calibrated: bool,
    options: list[str],
    json: bool,
) -> None:
    from fp8pass import advice
    from fp8pass.errors import OptionError
    from fp8pass.options import Options
    from fp8pass.target import Target

    if measure and name is not None:
        raise OptionError("only the device that is here can be measured: leave --target out")
    resolved = Options.resolve(**{**({"target": name} if name else {}), **named_options(options)})
    target = Target.detect() if name is None else Target.parse(name)
    shapes = advice.shapes_of(model_shapes)
    loads = [advice.Workload.parse(text) for text in workloads or advice.WORKLOADS]
    if measure:
        from fp8pass.tuning import run

        rows = sorted({str(rows) for load in loads for rows, _ in load.steps})
        sizes = [f"{n},{k}" for n, k in dict.fromkeys(shapes)]
        run.tune(run.products_of_shapes(sizes, list(advice.SCALES.values()), rows), resolved)
    found = [advice.advise(target, shapes, w, resolved, calibrated=calibrated) for w in loads]
    _print([each.to_dict() for each in found] if json else "\n".join(a.text() for a in found))
