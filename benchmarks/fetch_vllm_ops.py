"""Fetch vLLM's compiled operators without vLLM: the peers of ``block.py`` and ``triton_gemm.py``.

    python benchmarks/fetch_vllm_ops.py build/vllm_ops

Downloads one pinned wheel from the package index (about 250 MB, for Linux on x86-64 whatever runs
this), and unpacks its two libraries. They need torch 2.11 for CUDA 13; ``--vllm-libs`` of the
benchmarks loads them, and nothing of vLLM's Python is imported.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSION = "0.21.0"
#: In the order in which they are loaded: the second one links torch's C++ interface.
LIBRARIES = ("_C_stable_libtorch.abi3.so", "_C.abi3.so")
#: pip compares platform tags literally, and the tag of a wheel is that of its build machine.
PLATFORMS = ("manylinux2014", *(f"manylinux_2_{minor}" for minor in (24, 28, 31, 34, 35, 36)))


def download(folder: Path, version: str) -> Path:
    """The wheel of ``version``, saved in ``folder``.

    Raises:
        subprocess.CalledProcessError: pip found none, or no package index.
    """
    platforms = [flag for name in PLATFORMS for flag in ("--platform", f"{name}_x86_64")]
    command = [sys.executable, "-m", "pip", "download", f"vllm=={version}", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", "3.12", *platforms, "--dest", folder]
    subprocess.run([str(word) for word in command], check=True)
    (wheel,) = folder.glob(f"vllm-{version}-*.whl")
    return wheel


def unpack(wheel: Path, folder: Path) -> list[Path]:
    """The libraries of ``wheel``, written to ``folder``.

    Raises:
        KeyError: the wheel has no such library (another version may have joined the two).
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with zipfile.ZipFile(wheel) as archive:
        for name in LIBRARIES:
            path = folder / name
            path.write_bytes(archive.read(f"vllm/{name}"))
            written.append(path)
    return written


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the two libraries are put")
    parser.add_argument("--version", default=VERSION, help=f"of vLLM (default {VERSION})")
    parser.add_argument("--wheel", type=Path, help="a wheel that is here already")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        wheel = args.wheel or download(Path(temporary), args.version)
        for path in unpack(wheel, args.folder):
            print(f"{path}  {path.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
