"""How large the project may be. The numbers of `CEILINGS` are today's, and a change may only lower them.

Lines are physical ones, as `ruff format` writes them, blank lines and docstrings included. Code tokens leave comments
and docstrings out, so that dense lines are no way to a small number.
"""

import ast
import io
import re
import subprocess
import tokenize
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = "mt_grpo_trainer.py"

CEILINGS = {
    "script": 1250,
    "core": 12907,
    "core modules": 57,
    "modules that the script imports": 25,
    "script and package": 20907,
    "scripts": 8430,
    "tools and rewards": 2780,
    "tests": 33950,
    "docs": 3915,
    "recipes": 2565,
    "root": 437,
    "results, bytes": 97600,
    "notebooks, bytes": 106336,
    "data, bytes": 2181236,
    "own recipe keys": 59,
    "fmt: skip and fmt: off": 475,
    "public names without a docstring": 39,
}

# (lines, code tokens) before the first line left: tokens have to fall at least 0.8 times as fast as lines.
BEFORE = {
    "script": (1381, 8878),
    "script and package": (40669, 262754),
    "scripts": (15124, 99434),
    "tools and rewards": (3263, 18175),
    "tests": (61830, 536208),  # without the hand-written mutants, tables of 11,335 lines of strings
}

KEYS_OF_TRL = {  # which have another default here
    "vllm_importance_sampling_mode", "max_completion_length", "lr_scheduler_type", "warmup_steps", "lora_dropout",
}  # fmt: skip

ROWS = {  # every tracked text file belongs to one row, the first whose pattern fits
    "script": r"mt_grpo_trainer\.py",
    "package": r"mt_grpo/.*\.py",
    "results, bytes": r"docs/results/.*",
    "notebooks, bytes": r"docs/notebooks/.*",
    "data, bytes": r".*\.(jsonl?|svg|jinja)|tests/.*\.yaml",
    "scripts": r"scripts/.*\.(py|sh|js|html|css)|docs/_hooks/.*\.(py|css)",
    "tools and rewards": r"(tools|rewards)/.*\.py",
    "tests": r"tests/.*\.py",
    "docs": r"docs/[^/]*\.md",
    "recipes": r"(hf_recipes|tools)/.*|mkdocs\.yml",
    "root": r"[^/]*|\.ci/.*",
}
LOADED_BY_NAME = re.compile(r"mt_grpo\.integrations\b|image|sglang")


@cache
def tracked() -> dict[str, str]:
    """Path -> text of each text file that git tracks."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in names.split("\0")]
    data = {str(path.relative_to(ROOT)): path.read_bytes() for path in paths if path.is_file()}
    return {name: content.decode() for name, content in data.items() if b"\0" not in content}


def row_of(name: str) -> str | None:
    """The row that a file belongs to."""
    return next((row for row, pattern in ROWS.items() if re.fullmatch(pattern, name)), None)


def files(*rows: str) -> dict[str, str]:
    """Path -> text of the files of some rows."""
    return {name: text for name, text in tracked().items() if row_of(name) in rows}


def num_lines(texts: dict[str, str]) -> int:
    """Lines of some files."""
    return sum(len(text.splitlines()) for text in texts.values())


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(tracked()[name])


def num_tokens(texts: dict[str, str]) -> int:
    """Code tokens of Python files: no comments, docstrings, line ends or indentation."""
    total, layout = 0, {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    for name in filter(lambda name: name.endswith(".py"), texts):
        nodes = [node for node in ast.walk(tree(name)) if isinstance(getattr(node, "body", None), list) and node.body]
        strings = [node.body[0] for node in nodes if ast.unparse(node.body[0])[:1] in ("'", '"')]
        docstrings = {node.lineno for node in strings}
        for token in tokenize.generate_tokens(io.StringIO(texts[name]).readline):
            is_docstring = token.type == tokenize.STRING and token.start[0] in docstrings
            total += token.type not in layout and not is_docstring
    return total


def module_file(module: str) -> str | None:
    path = module.replace(".", "/")
    return next((file for file in (f"{path}.py", f"{path}/__init__.py") if file in tracked()), None)


def imported(name: str, in_functions: bool) -> set[str]:
    """Modules of ours that a file imports when it is loaded, and, if asked, those that its functions import.

    An import in a function is left out if it names images, SGLang or an integration, which are loaded by name.
    """
    found, todo = set(), [(node, False) for node in tree(name).body]
    while todo:
        node, inside = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}: write the import with the package's name"
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        found |= {m for m in modules if module_file(m) and not (inside and LOADED_BY_NAME.search(m))}
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if in_functions or not inside:
            todo += [(child, inside) for child in ast.iter_child_nodes(node)]
    return found


def core() -> dict[str, str]:
    """The script, and the modules of ours that it loads."""
    seen, todo = set(), [SCRIPT]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            for module in imported(name, in_functions=True):
                parts = module.split(".")
                parents = [module_file(".".join(parts[:k])) for k in range(1, len(parts) + 1)]
                todo += [parent for parent in parents if parent]
    return {name: tracked()[name] for name in seen}


def undocumented() -> list[str]:
    """Public functions, classes and methods without a docstring. A method inherits one, as `inspect.getdoc` does."""
    kinds, names = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, []
    nodes = [node for name in files("script", "package") for node in tree(name).body]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    has_doc = {(node.name, each.name) for node in classes for each in node.body
               if isinstance(each, kinds) and ast.get_docstring(each)}  # fmt: skip
    for name in files("script", "package"):
        for node in tree(name).body:
            members = node.body if isinstance(node, ast.ClassDef) else []
            for each in [node, *members]:
                if isinstance(each, kinds) and not f"{node.name}.{each.name}".startswith("_"):
                    bases = getattr(node, "bases", []) if each is not node else []
                    inherits = any((ast.unparse(base), each.name) in has_doc for base in bases)
                    if not each.name.startswith("_") and not ast.get_docstring(each) and not inherits:
                        names.append(f"{name}: {node.name}.{each.name}")
    return names


@cache
def sizes() -> dict[str, int]:
    """Today's number for each ceiling."""
    loaded, ours = core(), files("script", "package")
    python = "".join(text for name, text in tracked().items() if name.endswith(".py"))
    modules = [name for name in imported(SCRIPT, in_functions=True) if not module_file(name).endswith("__init__.py")]
    return {
        **{row: num_lines(files(row)) for row in ROWS if row != "package" and "bytes" not in row},
        **{row: sum(len(text.encode()) for text in files(row).values()) for row in ROWS if "bytes" in row},
        "core": num_lines(loaded),
        "core modules": len(loaded),
        "modules that the script imports": len(modules),
        "script and package": num_lines(ours),
        "own recipe keys": len(
            set(re.findall(r"^    (\w+): .* = key\(", "\n".join(ours.values()), re.M)) - KEYS_OF_TRL
        ),
        "fmt: skip and fmt: off": len(re.findall(r"# fmt: (?:skip|off)", python)),
        "public names without a docstring": len(undocumented()),
    }


def lines_and_tokens(row: str) -> tuple[int, int]:
    """(lines, code tokens) of a row of `BEFORE`."""
    texts = files("script", "package") if row == "script and package" else files(row)
    return num_lines(texts), num_tokens(texts)


def test_each_tracked_text_file_belongs_to_a_row():
    assert [name for name in tracked() if row_of(name) is None] == []
    assert len(tracked()) > 200


@pytest.mark.parametrize("size", CEILINGS)
def test_a_size_only_goes_down(size):
    number, ceiling = sizes()[size], CEILINGS[size]
    assert number <= ceiling, f"{size}: {number:,}, more than {ceiling:,}. A line enters with the name of what leaves."
    assert number >= 0.99 * ceiling - 5, f"{size}: {number:,}. Lower the number in CEILINGS, so that it stays so."


@pytest.mark.parametrize("row", BEFORE)
def test_code_is_not_made_denser(row):
    (lines, tokens), (lines_before, tokens_before) = lines_and_tokens(row), BEFORE[row]
    assert 1 - tokens / tokens_before >= 0.8 * (1 - lines / lines_before), f"{row}: {lines:,} lines, {tokens:,} tokens"


def test_the_line_length_stays():
    assert tomllib.loads(tracked()["pyproject.toml"])["tool"]["ruff"]["line-length"] <= 119


if __name__ == "__main__":
    for size, number in sizes().items():
        print(f"{size:34}{number:11,}")
    for row in BEFORE:
        print(f"{row:34}{lines_and_tokens(row)} lines and code tokens")
