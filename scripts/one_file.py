"""Print the script and all that it stands on as one self-contained file, for a fork outside the clone.

    python scripts/one_file.py > my_idea.py

The file registers the package `mt_grpo` and its modules as names of itself, so that a plug-in's
`from mt_grpo.rollout import Turn` finds the very class that the file trains with.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RULE = "# " + "=" * 117


def modules() -> list[str]:
    """The modules that the script stands on, each after those that it imports.

    Integrations, whose names stand in a table, are not among them.
    """
    ordered: list[str] = []
    seen: set[str] = set()

    def visit(source: str) -> None:
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("mt_grpo."):
                name = node.module.removeprefix("mt_grpo.")
                if name not in seen:
                    seen.add(name)
                    visit((ROOT / f"mt_grpo/{name.replace('.', '/')}.py").read_text())
                    ordered.append(name)

    visit((ROOT / "mt_grpo_trainer.py").read_text())
    return ordered


def take_apart(source: str) -> tuple[str, set[tuple[str, str]], str]:
    """(docstring, imports of other packages, the rest) of a module; an import is (module, name), no name for all."""
    tree, lines = ast.parse(source), source.splitlines()
    imports, last = set(), 0
    for node in tree.body:
        if isinstance(node, ast.Import):
            imports |= {(ast.unparse(alias), "") for alias in node.names}
            last = node.end_lineno
        elif isinstance(node, ast.ImportFrom):
            own = node.module.split(".")[0] == "mt_grpo"
            if own and (renamed := next((alias for alias in node.names if alias.asname), None)):
                raise ValueError(f"{node.module}: {ast.unparse(renamed)}. In one file each name is its module's own.")
            if not own and node.module != "__future__":
                imports |= {(node.module, ast.unparse(alias)) for alias in node.names}
            last = node.end_lineno
    body = "\n".join(lines[last:]).replace("logger = logging.getLogger(__name__)\n", "").strip()
    return ast.get_docstring(tree, clean=False) or "", imports, body


def one_file() -> str:
    """The script and its modules as the text of one module."""
    names = modules()
    parts = [take_apart((ROOT / f"mt_grpo/{name.replace('.', '/')}.py").read_text()) for name in names]
    docstring, imports, script = take_apart((ROOT / "mt_grpo_trainer.py").read_text())
    imports = {("logging", ""), ("sys", "")}.union(imports, *(found for _, found, _ in parts))
    lines = [f"import {module}" for module, name in sorted(imports) if not name]
    for module in sorted({module for module, name in imports if name}):
        names_of = ", ".join(sorted(name for source, name in imports if source == module and name))
        lines.append(f"from {module} import {names_of}")
    folders = dict.fromkeys(name.rpartition(".")[0] for name in names if "." in name)
    parents = dict.fromkeys(parent for folder in folders for parent in (folder.partition(".")[0], folder))
    aliases = ", ".join(f'"{name}"' for name in ("mt_grpo", *(f"mt_grpo.{name}" for name in (*parents, *names))))
    first = (ROOT / "mt_grpo/__init__.py").read_text()
    text = [
        f'"""{docstring}"""\n\nfrom __future__ import annotations\n\nimport os\nimport warnings\n',
        first[first.index("# INVARIANT") : first.index("_MODULES")],
        "\n".join(lines),
        "\nlogger = logging.getLogger(__name__)\n",
        "# A plug-in that imports the package finds this file: its classes exist once.",
        f"for name in ({aliases}):\n    sys.modules[name] = sys.modules[__name__]\n"
        '    globals().setdefault(name.rpartition(".")[2], sys.modules[__name__])\n',
    ]
    for name, (about, _, body) in zip(names, parts, strict=True):
        text.append(f"\n{RULE}\n# mt_grpo/{name.replace('.', '/')}.py: {about.splitlines()[0]}\n{RULE}\n\n{body}\n")
    return "\n".join([*text, f"\n{script}\n"])


if __name__ == "__main__":
    sys.stdout.write(__doc__ if "--help" in sys.argv else one_file())
