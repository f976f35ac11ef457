"""Programs that people run, as tests install them: from npm and by pip, into folders of their own."""

import functools
import shutil
import subprocess
import sys

import pytest

VERSIONS = {
    "@openai/codex": "0.171.0", "@mariozechner/pi-coding-agent": "0.73.1", "@qwen-code/qwen-code": "0.15.10",
    "ai": "7.0.173", "@ai-sdk/openai": "4.0.118", "@ai-sdk/anthropic": "4.0.105",
}  # fmt: skip
OF_PYTHON = {
    "mini-swe-agent": "2.4.6", "qwen-agent": "0.0.34", "crewai": "1.15.30", "dspy": "3.4.1", "langchain": "1.5.2",
    "verifiers": "0.4.0",
}  # fmt: skip
BESIDE = {  # what they import and do not require
    "qwen-agent": ["soundfile", "python-dateutil", "tqdm"], "langchain": ["langchain-openai==1.7.4"],
    "verifiers": ["uv"],
}  # fmt: skip


def installed(command, folder):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{command[0]} cannot install them: {done.stderr.strip()[-300:]}")


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """The folder into which npm has installed all of them."""
    missing = [command for command in ("node", "npm") if shutil.which(command) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not there: these programs need Node.js")
    folder = tmp_path_factory.mktemp("npm")
    folder.chmod(0o755)  # as root's trainer, programs in sandboxes run as other users
    names = [f"{name}@{version}" for name, version in VERSIONS.items()]
    installed(
        ["npm", "install", "--no-audit", "--no-fund", "--fetch-retries=1", "--prefix", str(folder), *names], folder
    )
    return folder


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """By the name of a program of Python's: the interpreter of an environment of its own."""

    @functools.cache
    def made(name):
        folder = tmp_path_factory.mktemp("venv")
        folder.chmod(0o755)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        names = [f"{name}=={OF_PYTHON[name]}", *BESIDE.get(name, [])]
        installed([folder / "bin/python", "-m", "pip", "install", "--quiet", *names], folder)
        return folder / "bin/python"

    with pytest.MonkeyPatch.context() as patch:  # what they import is their own
        patch.delenv("PYTHONPATH", raising=False)
        yield made
