"""The result of the demo for people, as rich tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fp8pass.demo.facts import duration

if TYPE_CHECKING:
    from rich.console import Console

_MIB = 2**20


def show(result: dict[str, Any], console: Console) -> None:
    """Print a result of :func:`fp8pass.demo.run.run`."""
    machine = result["machine"]
    console.print(
        f"\n[bold]{result['model']}[/bold] on {machine['cpu']}, {machine['threads']} threads "
        f"({machine['target']}), torch {result['versions']['torch']}",
        highlight=False,
    )
    console.print(f"text: {result['text']}", highlight=False)
    if result["note"]:
        console.print(f"note: {result['note']}", highlight=False)
    records = result.get("recipes", {result["recipe"]: result})
    for recipe, record in records.items():
        _show_recipe(recipe, record, result, console)
    _show_checks(result["checks"], console)
    console.print(
        f"\n{result['seconds']:.0f} s in all, at most {result['peak_memory_bytes'] / _MIB:.0f} MiB "
        "of memory for everything together",
        highlight=False,
    )


def _show_recipe(
    recipe: str, record: dict[str, Any], result: dict[str, Any], console: Console
) -> None:
    from rich import box
    from rich.table import Table

    variants = record["variants"]
    title = f"recipe {recipe}, {result['window']} tokens a forward"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    names = ("perplexity", "tokens", "vs reference", "s/forward", "vs bf16", "compile s", "weights")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    base = variants["bf16"]["seconds_per_forward"]
    for variant in [*variants.values(), record["reference"]]:
        seconds = variant["seconds_per_forward"]
        full = variant["tokens_per_forward"] == result["window"]
        eager = variant is record["reference"]
        ratio = f"{seconds / base:.2f}x" if seconds and full and not eager else "-"
        if variant["error"]:
            table.add_row(variant["title"], "not available", *["-"] * 5, _size(variant))
            continue
        table.add_row(
            variant["title"],
            _number(variant["perplexity"], 3),
            str(variant["perplexity_tokens"] or "-"),
            _difference(variant.get("to_reference")),
            _number(seconds, 3),
            ratio,
            _number(variant["compile_seconds"], 1),
            _size(variant),
        )
    console.print()
    console.print(table, highlight=False)
    for line in _notes(record, result):
        console.print(line, highlight=False, markup=False)
    console.print(f'\n[bold]greedy continuation[/bold] of "{result["prompt"]}"', highlight=False)
    for variant in variants.values():
        if variant["continuation"] is not None:
            console.print(
                f"  {variant['title']:<28}{variant['continuation']!r}",
                highlight=False,
                markup=False,
            )
    console.print()
    console.print(record["report"] or "no report", highlight=False, markup=False, soft_wrap=True)


def _notes(record: dict[str, Any], result: dict[str, Any]) -> list[str]:
    """Sentences under the table: what is not comparable, and why."""
    variants, notes = record["variants"], []
    notes.append(
        "reference: the eager model, each _scaled_mm as float32 dequantise + mm, rounded once"
    )
    compared = next((v["to_reference"] for v in variants.values() if v.get("to_reference")), None)
    if compared is not None:
        notes.append(
            f"vs reference: on {compared['tokens']} tokens, ± one standard error of the FP8 noise"
        )
    stock = variants.get("stock")
    if stock is None:
        return notes
    if stock["error"]:
        notes.append(f"{stock['title']}: {stock['error']}")
    elif stock["tokens_per_forward"] != result["window"]:
        few = stock["tokens_per_forward"]
        ours = variants.get(f"fp8pass_{few}_tokens")
        estimate = duration(record["stock_probe"]["estimated_seconds_per_forward"])
        notes.append(
            f"stock is measured on {few} tokens: a forward of {result['window']} would take about "
            f"{estimate}"
        )
        if ours and stock["seconds_per_forward"] and ours["seconds_per_forward"]:
            times = stock["seconds_per_forward"] / ours["seconds_per_forward"]
            notes.append(f"on these {few} tokens fp8pass is {times:.0f} times faster")
    elif stock["perplexity_tokens"] != result["tokens"]:
        notes.append(
            f"stock is slow and was given {stock['perplexity_tokens']} tokens; bf16 has "
            f"perplexity {stock['bf16_perplexity_on_these']:.3f} on these"
        )
    return notes


def _show_checks(checks: dict[str, dict[str, Any]], console: Console) -> None:
    console.print("[bold]checks[/bold]")
    for name, item in checks.items():
        mark = "[green]ok    [/green]" if item["ok"] else "[red]FAILED[/red]"
        value, limit = _plain(item["value"]), _plain(item["limit"])
        if "standard_error" in item and item["value"] is not None:
            value = f"{_percent(item['value'], item['standard_error'])}, {item['tokens']} tokens"
        text = value if value == limit else f"{value} (limit {limit})"
        console.print(f"  {mark} {name}: {text}", highlight=False, soft_wrap=True)


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{100 * value:g} %"
    if isinstance(value, dict):
        return ", ".join(f"{number} {name}" for name, number in value.items()) or "none"
    return str(value)


def _difference(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    error = found["standard_error"]
    return _percent(found["relative"], error)


def _percent(value: float, error: float | None) -> str:
    return f"{100 * value:+.2f} %" + ("" if error is None else f" ± {100 * error:.2f}")


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _size(variant: dict[str, Any]) -> str:
    size = variant["weights_bytes"]["total"]
    return f"{size / _MIB:.0f} MiB" if size >= 10 * _MIB else f"{size / 1024:.0f} KiB"
