"""Hooks of mkdocs, and an extension of griffe: what the site needs beyond the plain files.

README.md is the first page, and a file of the repository that a page links to is a page of its own. Formulas become
MathML, which browsers draw without a script.
"""

import posixpath
import re
from pathlib import Path

from griffe import Extension
from latex2mathml.converter import convert
from mkdocs.structure.files import File

LINK = re.compile(r"(?<=\]\()(?!https?://|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.M | re.S)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".json": "json", ".sbatch": "bash"}


def page_of(path: str) -> str:
    """The page that shows a file of the repository.

    `README.md` is `index.md`, `docs/tour.md` is `tour.md`, and `tools/zoom.py` is `source/tools/zoom.py.md`.
    """
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/") or ("/" not in path and path.endswith(".md")):
        return path.removeprefix("docs/")
    return f"source/{path}.md"


def targets(path: str, text: str) -> set[str]:
    """The files of the repository that a page links to."""
    return {posixpath.normpath(posixpath.join(posixpath.dirname(path), found[0])) for found in LINK.findall(text)}


def on_files(files, config):
    """Add README.md and each file that a page links to."""
    root = Path(config.config_file_path).parent
    todo = ["README.md", *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    for path in todo:  # it grows
        text, page = (root / path).read_text(encoding="utf-8"), page_of(path)
        if path.endswith(".md"):
            known = {*todo, *(f"docs/{file.src_uri}" for file in files)}
            todo += sorted(targets(path, CODE.sub("", text)) - known)
        else:
            language = LANGUAGES.get(Path(path).suffix, "text")
            text = f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\n````{language}\n{text}````\n"
        if not files.get_file_from_path(page):
            files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Lead links to the pages of the site, and write formulas as MathML."""
    if page.file.src_uri.startswith("source/"):
        return markdown
    folder = "docs" if (Path(config.docs_dir) / page.file.src_uri).is_file() else ""  # of the page's plain file

    def link(found: re.Match) -> str:
        target = posixpath.normpath(posixpath.join(folder, found[1]))
        return page_of(target) + (found[2] or "")

    def formulas(text: str) -> str:
        text = LINK.sub(link, text)
        return re.sub(r"\$([^$\n]+)\$", lambda found: convert(found[1]), text) if "```math" in markdown else text

    parts = CODE.split(markdown)  # text and code by turns
    parts[::2] = map(formulas, parts[::2])
    parts[1::2] = [
        f'<div class="formula">{convert(part[8:-4], display="block")}</div>' if part.startswith("```math\n") else part
        for part in parts[1::2]
    ]
    return "".join(parts)


class Docstrings(Extension):
    """Doctests without a heading are examples, not quotations. The page has words of its own for a module."""

    def on_instance(self, *, obj, **kwargs):
        if obj.is_module:
            obj.docstring = None
        if obj.docstring is None:
            return
        text, found, rest = obj.docstring.value.partition("\n>>> ")
        if found and not re.search(r"^Examples?:", text, re.M):
            block = "\n".join("    " + line for line in (">>> " + rest).splitlines())
            obj.docstring.value = f"{text.rstrip()}\n\nExamples:\n{block}\n"
