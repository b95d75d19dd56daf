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
