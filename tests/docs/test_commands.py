"""Commands of the README and of pages that are run; a training takes one small step instead of minutes.

The tour's: tests/docs/test_tour.py. Which options the programs of all pages have: tests/docs/test_docs.py.
"""

import doctest
import re
import tomllib

import quickstart
from test_docs import PAGES, ROOT, block, blocks


def test_the_quickstart_runs(tmp_path, monkeypatch, capsys):
    """What quickstart.sh starts behind the installation, with fewer problems and one step."""
    assert 'exec .venv/bin/python scripts/quickstart.py "$@"' in (ROOT / "scripts/quickstart.sh").read_text()
    assert block(PAGES["README.md"], "bash", "quickstart.sh") == "bash scripts/quickstart.sh\n"
    for path in ROOT.iterdir():  # a folder that looks like the clone, in which the run may write
        if path.name not in ("runs", ".git", "data"):
            (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quickstart, "NUM_PROBLEMS", 16)
    quickstart.main(["--max_steps", "1", "--per_device_train_batch_size", "8", "--disable_tqdm", "true"])
    said = capsys.readouterr().out
    shown = block(PAGES["README.md"], "", "1/3 evaluating")
    for line in shown.splitlines():
        if line.strip(" .") and not re.match(r" +\d+/60 ", line):
            begin = re.split(r"[\d.]+;?(?:$|\s)", line.replace("512", "16").replace("for 60", "for 1"))[0].rstrip()
            assert begin.strip() in said, line
    assert (tmp_path / "runs/chain-sparse/model.safetensors").is_file()


def test_the_method_page_computes_what_it_shows():
    """Its blocks go on from each other."""
    body = "\n".join(blocks(PAGES["docs/method.md"], "python"))
    test = doctest.DocTestParser().get_doctest(body, {}, "docs/method.md", None, 0)
    result = doctest.DocTestRunner().run(test)
    assert result.failed == 0 and result.attempted > 10


def test_extras_that_pages_install_exist():
    """`pip install -e '.[name]'` of all pages."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"pip install -e '?\.\[(\w+)\]", "".join(PAGES.values()))
    assert named and set(named) <= set(extras)
