"""What every command does with a file that cannot be written, and with numbers that are none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fp8pass.cli import main
from fp8pass.errors import OptionError
from fp8pass.report.files import check_writable, write_atomic

#: Commands that write a file, without its name.
WRITERS = {
    "demo": ("demo", "--model", "tiny", "--json"),
    "compile": ("compile", "a_program:pair", "--target", "sm90", "--json"),
    "coverage": ("coverage", "--family", "llama", "--recipe", "dynamic", "--json"),
    "coverage table": ("coverage", "--family", "llama", "--recipe", "dynamic", "--markdown"),
    "tune": ("tune", "--shapes", "64,64", "--json"),
    "tune table": ("tune", "--shapes", "64,64", "--table"),
}


@dataclass
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


Command = Callable[..., Done]


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Command]:
    """Run a command in an empty folder, with nothing set in the environment."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("FP8PASS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FP8PASS_TUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> Done:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        return Done(int(ended.value.code or 0), *capsys.readouterr())

    yield run


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(
    ("file", "why"),
    [
        ("missing/out.json", "its folder does not exist"),
        ("a/b/c/out.json", "its folder does not exist"),
        ("taken/out.json", "its folder does not exist"),
        (".", "Is a directory"),
        ("y" * 300, "File name too long"),
    ],
)
def test_a_file_that_cannot_be_written_is_known_before_the_work(
    name: str, file: str, why: str, command: Command, tmp_path: Path
) -> None:
    """Nothing is made on the way: a path without its folder is most often a slip."""
    (tmp_path / "taken").write_text("")
    done = command(*WRITERS[name], file)
    assert done.code == 2 and not done.out
    (line,) = done.err.strip().splitlines()
    assert "cannot be written" in line and why in line
    assert sorted(os.listdir(tmp_path)) == ["taken"]


@pytest.mark.parametrize("name", sorted({arguments[0] for arguments in WRITERS.values()}))
def test_the_help_says_so(name: str, command: Command) -> None:
    done = command(name, "--help")
    wanted = sum(arguments[0] == name for arguments in WRITERS.values())
    words = " ".join(done.out.replace("│", " ").split())
    assert words.count("folder must exist") == wanted


def test_a_file_that_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    for bad in ("\0", "\ud800"):
        with pytest.raises(OptionError, match="cannot be written"):
            check_writable(tmp_path / bad)
    file = tmp_path / "out.json"
    check_writable(file)
    assert not file.exists()
    file.write_text("old")
    check_writable(file)
    assert file.read_text() == "old"


@pytest.mark.skipif(os.name != "posix", reason="POSIX has such files")
def test_what_is_no_regular_file_is_never_replaced(tmp_path: Path) -> None:
    """``--json /dev/null`` of somebody who may write to /dev."""
    pipe, real, link = tmp_path / "pipe", tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    link.symlink_to(real)
    write_atomic(link, "new")
    assert link.is_symlink() and real.read_text() == "new"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomic(pipe, "through")
        assert os.read(reader, 100) == b"through" and pipe.is_fifo()
    finally:
        os.close(reader)
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe", "real"]


NUMBERS = ("0", "-1", "", "9-2", "\u0663", "1e3", "1_0", "9" * 30, "9" * 5000)


@pytest.mark.parametrize("number", NUMBERS, ids=lambda text: text[:12])
@pytest.mark.parametrize(
    "arguments",
    [
        ("kernels", "--target", "sm90", "--problem", "row, n={}"),
        ("kernels", "--target", "sm90", "--problem", "row, k={}"),
        ("kernels", "--target", "sm90", "--problem", "row, m={}"),
        ("kernels", "--target", "sm90", "--problem", "group{}x128 x channel"),
        ("tune", "--shapes", "{},64"),
        ("tune", "--shapes", "64,{}"),
        ("tune", "--shapes", "64,64", "--rows", "{}"),
        ("tune", "--shapes", "64,64", "--more", "n={}"),
        ("advise", "--target", "sm90", "--model-shapes", "{},64"),
        ("advise", "--target", "sm90", "--workload", "{}x4+4"),
    ],
    ids=" ".join,
)
def test_what_is_no_number_is_an_error_that_names_it(
    number: str, arguments: tuple[str, ...], command: Command
) -> None:
    done = command(*(text.format(number) for text in arguments))
    assert done.code == 2 and not done.out
    (line,) = done.err.strip().splitlines()
    assert (
        line.startswith("fp8pass: ") and number[:12] in line and len(line) < 500 + 2 * len(number)
    )


@pytest.mark.parametrize("name", ["tokens", "window"])
@pytest.mark.parametrize("number", ["0", "-1", str(-(10**30))])
def test_numbers_of_the_demo(name: str, number: str, command: Command) -> None:
    done = command("demo", "--model", "tiny", f"--{name}", number)
    assert done.code == 2 and not done.out and number in done.err


def test_the_same_commands_with_numbers(command: Command) -> None:
    for arguments in (
        ("kernels", "--target", "sm90", "--problem", f"row, m=1-{2**63 - 1}, n=1, k={2**63 - 1}"),
        ("kernels", "--target", "sm90", "--problem", "group1x128 x group128x128, m=0-"),
        ("advise", "--target", "sm90", "--model-shapes", "1,64;2,3", "--workload", "1x0+4"),
    ):
        done = command(*arguments)
        assert done.code == 0 and done.out, done.err


def test_a_library_version_is_a_version(command: Command) -> None:
    for version in ("", "x", "1", "\u0663.\u0662", f"{'9' * 5000}.1"):
        done = command("kernels", "--target", f"sm90+vllm=={version}")
        assert done.code == 2 and "has no version such as 0.21" in done.err
    assert command("kernels", "--target", "sm90+vllm==0.21").code == 0
