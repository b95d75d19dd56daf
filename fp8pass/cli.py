"""The command ``fp8pass``: demo, compile, explain, coverage, targets, kernels, tune, env.

Importing this file imports neither typer nor rich (extra ``cli``), nor torch; each command loads
what it needs.
"""

# Without "from __future__ import annotations": typer reads the annotations of the commands, which
# are local functions.

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    import typer

MISSING = (
    "the command fp8pass needs typer and rich, and {name} is not installed: "
    "pip install 'fp8pass[cli]'"
)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the script. Exits with 0, with 1 if a check of the demo failed, or with 2 and
    one line if the user can mend it."""
    try:
        application = build()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich", "click"):
            raise
        print(MISSING.format(name=error.name), file=sys.stderr)
        raise SystemExit(2) from None
    application(args=arguments)


def build() -> "typer.Typer":
    """The application.

    Raises:
        ModuleNotFoundError: typer or rich is not installed.
    """
    import rich  # noqa: F401  used by the commands; missing it is to be known now
    import typer

    application = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        help="FP8 fusion and kernel choice for torch.compile.",
        pretty_exceptions_enable=False,
    )

    @application.command()
    def demo(
        model: Annotated[
            str, typer.Option(help="smollm2, or tiny (random weights, no download)")
        ] = "smollm2",
        recipe: Annotated[
            str, typer.Option(help="dynamic, static, dynamic_tensor or all")
        ] = "dynamic",
        json: Annotated[
            Path | None,
            typer.Option(
                help="write everything that was found to this file; its folder must exist"
            ),
        ] = None,
        tokens: Annotated[
            int, typer.Option(help="perplexity is measured on so many tokens")
        ] = 2048,
        window: Annotated[int, typer.Option(help="tokens of one forward")] = 256,
        numerics: Annotated[str, typer.Option(help="exact, fast or both")] = "exact",
        skip_stock: Annotated[
            bool, typer.Option("--skip-stock", help="leave stock Inductor out")
        ] = False,
        dump: Annotated[
            Path | None, typer.Option(help="folder for graphs and reports, made if missing")
        ] = None,
    ) -> None:
        """A real model in bf16, in FP8 under stock Inductor, and in FP8 under fp8pass."""
        _demo(json, model=model, recipe=recipe, tokens=tokens, window=window, numerics=numerics,
              skip_stock=skip_stock, dump=dump)  # fmt: skip

    @application.command("compile")
    def compile_for(
        program: Annotated[
            str,
            typer.Argument(
                metavar="MODULE:NAME",
                help="a function that returns (model or function, inputs), made on the CPU; or a "
                "module that has example_inputs()",
            ),
        ],
        target: Annotated[
            str, typer.Option(help="architecture, and libraries behind +: sm90, gfx942, sm90+vllm")
        ],
        dynamic: Annotated[
            bool, typer.Option("--dynamic", help="symbolic sizes, as torch.compile(dynamic=True)")
        ] = False,
        dynamic_dim: Annotated[
            list[int] | None,
            typer.Option(help="only this dim of every input is symbolic; may be repeated"),
        ] = None,
        graph: Annotated[str, typer.Option(help="before, after, both or none")] = "after",
        option: Annotated[
            list[str] | None,
            typer.Option(metavar="NAME=VALUE", help="an option of fp8pass; may be repeated"),
        ] = None,
        json: Annotated[
            Path | None,
            typer.Option(help="write graphs and report to this file; its folder must exist"),
        ] = None,
    ) -> None:
        """The graph that a device would get, and every site of it, without the device."""
        _compile(program, target, dynamic_dim or dynamic or None, graph, option or [], json)

    @application.command()
    def explain(
        folder: Annotated[
            Path, typer.Argument(help="a folder made with FP8PASS_DUMP, or a report.json")
        ],
        json: Annotated[bool, typer.Option("--json", help="print the report as JSON")] = False,
    ) -> None:
        """What fp8pass did at every site of a compile, from its dump folder."""
        _explain(folder, json)

    @application.command()
    def coverage(
        json: Annotated[
            Path | None,
            typer.Option(
                help="write everything that was found to this file; its folder must exist"
            ),
        ] = None,
        family: Annotated[
            list[str] | None, typer.Option(help="only this model family; may be repeated")
        ] = None,
        recipe: Annotated[
            list[str] | None, typer.Option(help="only this recipe; may be repeated")
        ] = None,
        markdown: Annotated[
            Path | None,
            typer.Option(
                help="write the tables of docs/coverage.md to this file; its folder must exist"
            ),
        ] = None,
    ) -> None:
        """What is fused and lowered in tiny models of real families, recipe by recipe.

        Needs transformers, no network and no GPU. Ends with 1 if a family has less than 95 % of
        its pairs fused or a product that is not lowered.

        Example: fp8pass coverage --family llama --family qwen3 --recipe dynamic --json out.json
        """
        _coverage(json, markdown, family or [], recipe or [])

    from fp8pass.cli_kernels import add_commands

    add_commands(application)

    @application.command()
    def env() -> None:
        """Versions, target, compiler and cache folders, for a bug report."""
        _env()

    return application


def _fail(error: BaseException) -> None:
    print(f"fp8pass: {error}", file=sys.stderr)
    raise SystemExit(2) from None


def _demo(json_file: Path | None, **choices: Any) -> None:
    from rich.console import Console

    from fp8pass.errors import Fp8PassError

    try:
        from fp8pass.demo.run import Plan, passed, run
        from fp8pass.demo.show import show
        from fp8pass.report.files import check_writable, write_atomic

        if json_file is not None:
            check_writable(json_file)
        result = run(Plan(**choices))
    except (Fp8PassError, OSError) as error:
        _fail(error)
        return
    if json_file is not None:
        import json

        write_atomic(json_file, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    console = Console()
    # A log has no width; rich would take that of a small terminal.
    show(result, console if console.is_terminal else Console(width=120))
    if not passed(result):
        raise SystemExit(1)


_GRAPHS = {"before": ("before",), "after": ("after",), "both": ("before", "after"), "none": ()}


def _compile(
    name: str,
    target: str,
    dynamic: list[int] | bool | None,
    graph: str,
    options: list[str],
    json_file: Path | None,
) -> None:
    from fp8pass.errors import Fp8PassError, OptionError, choices

    try:
        from fp8pass.crossing import graphs_for
        from fp8pass.loading import load
        from fp8pass.options import Options
        from fp8pass.report.files import check_writable, write_atomic

        if graph not in _GRAPHS:
            raise OptionError(f"unknown graph {graph!r}; allowed: {choices(_GRAPHS)}")
        named: dict[str, Any] = {}
        for text in options:
            key, equals, value = text.partition("=")
            if not equals or key == "target":
                raise OptionError(f"option {text!r} is not NAME=VALUE with a name beside 'target'")
            named[key] = value
        Options.resolve(target=target, **named)  # before anything that takes long
        if json_file is not None:
            check_writable(json_file)
        program = load(name)
        found = graphs_for(
            program.model, *program.inputs, target=target, dynamic=dynamic, kwargs=program.kwargs,
            **named,
        )  # fmt: skip
    except (Fp8PassError, OSError) as error:
        _fail(error)
        return
    if json_file is not None:
        import json

        text = json.dumps(found.to_dict(), indent=1, ensure_ascii=False)
        write_atomic(json_file, text + "\n")
    blocks = [found.text(which) for which in _GRAPHS[graph] if found.graphs]
    sys.stdout.write("\n\n".join([*blocks, found.report.table()]))


def _coverage(
    json_file: Path | None, markdown: Path | None, families: list[str], recipes: list[str]
) -> None:
    from rich.console import Console

    from fp8pass.errors import Fp8PassError
    from fp8pass.report.files import check_writable, write_atomic

    errors = Console(stderr=True)
    try:
        from fp8pass.coverage.families import FAMILIES
        from fp8pass.coverage.recipes import RECIPES
        from fp8pass.coverage.run import cover
        from fp8pass.coverage.show import failures, show

        for file in (json_file, markdown):
            if file is not None:
                check_writable(file)
        with errors.status("coverage") as status:
            data = cover(families or FAMILIES, recipes or RECIPES, status.update)
    except (Fp8PassError, OSError) as error:
        _fail(error)
        return
    if json_file is not None:
        import json

        write_atomic(json_file, json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    if markdown is not None:
        from fp8pass.coverage.spelled import spellings
        from fp8pass.coverage.table import markdown as document

        write_atomic(markdown, document(data, spellings()))
    console = Console()
    show(data, console if console.is_terminal else Console(width=120))
    if failures(data):
        raise SystemExit(1)


def _explain(folder: Path, as_json: bool) -> None:
    from fp8pass.errors import Fp8PassError
    from fp8pass.report import describe_dump, load_dump

    try:
        text = load_dump(folder).to_json() if as_json else describe_dump(folder)
    except Fp8PassError as error:
        _fail(error)
        return
    # a file may name what no encoding has, such as half of a surrogate pair
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))


def _env() -> None:
    from fp8pass.demo.facts import environment

    facts = environment()
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")


if __name__ == "__main__":
    main()
