"""A corpus for tools/wiki_search.py from a copy of TriviaQA's evidence in its schema: whole, cut off, bad input."""

import json
import os
import re
from pathlib import Path

import datasets
import pytest
from build import wiki_corpus
from datasets import Dataset, Features, List, Value
from launch import launch_plan

from tools.wiki_search import wiki_search

ROOT = Path(__file__).resolve().parents[2]
CARD = """---
dataset_info:
- config_name: rc.wikipedia
  features:
  - {name: question, dtype: string}
  - name: entity_pages
    sequence: [{name: doc_source, dtype: string}, {name: filename, dtype: string}, {name: title, dtype: string},
               {name: wiki_context, dtype: string}]
configs:
- config_name: rc.wikipedia
  data_files:
  - {split: train, path: rc.wikipedia/train-*}
  - {split: validation, path: rc.wikipedia/validation-*}
- config_name: pages
  data_files:
  - {split: train, path: pages.parquet}
---
"""
PAGE = {name: List(Value("string")) for name in ("doc_source", "filename", "title", "wiki_context")}
OF_PAGES = ["--config", "pages", "--split", "train"]


def article(subject: str, sentences: int) -> str:
    return " ".join(f"Sentence number {k} of this page tells of the {subject}." for k in range(sentences)) + "\n\n"


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """A folder like TriviaQA's on the Hub; without further arguments the script reads it."""
    towns = [{f"Town {i}": article(f"town{i}", 30), "Rollo": article("Viking", 12)} for i in range(4)]
    files = {"train-0": towns[:2], "train-1": [*towns[2:], {}, {"Empty": " \n"}]}
    files["validation-0"] = [{"Danube": article("river", 1)}]
    folder = tmp_path / "hub"
    (folder / "rc.wikipedia").mkdir(parents=True)
    (folder / "README.md").write_text(CARD)
    features = Features({"question": Value("string"), "entity_pages": PAGE})
    for name, rows in files.items():
        pages = [{"title": [*row], "wiki_context": [*row.values()]} for row in rows]
        pages = [page | dict.fromkeys(("doc_source", "filename"), ["TagMe"] * len(page["title"])) for page in pages]
        table = Dataset.from_list([{"question": "Who?", "entity_pages": page} for page in pages], features=features)
        table.to_parquet(folder / f"rc.wikipedia/{name}.parquet")
    lines = [{"title": "Seine", "text": ["It runs through Paris.", " It is long."], "number": 3}]
    Dataset.from_list(lines).to_parquet(folder / "pages.parquet")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setitem(wiki_corpus.SOURCES, str(folder), wiki_corpus.SOURCES["mandarjoshi/trivia_qa"])
    return folder


def rows_of(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_evidence_pages_become_a_corpus_that_the_tool_finds(hub, tmp_path, monkeypatch, capsys):
    output = tmp_path / "data/wiki.jsonl"
    wiki_corpus.main([str(output), "--dataset", str(hub)])
    rows = rows_of(output)
    assert {row["title"] for row in rows} == {*(f"Town {i}" for i in range(4)), "Rollo", "Danube"}
    assert [row["id"] for row in rows if row["title"] == "Rollo"] == ["Rollo-0", "Rollo-1"]  # once, of four
    words = [len(row["text"].split()) for row in rows if row["title"].startswith("Town")]
    assert len(words) == 4 * 4 and all(60 <= count <= 120 for count in words) and sum(words) == 4 * 300
    assert all(row["text"].startswith("Sentence") and row["text"].endswith(".") for row in rows)
    said = capsys.readouterr().out.splitlines()
    size = output.stat().st_size / 1e6
    assert said[-2] == f"6 pages, {len(rows)} passages, {size:.1f} MB"
    assert f"{output} is written" in said[-1]
    assert os.listdir(output.parent) == ["wiki.jsonl"]
    monkeypatch.setenv("WIKI_SEARCH_CORPUS", str(output))
    assert wiki_search("the Viking").startswith("[1] Rollo\nSentence")


def test_other_data_sets_name_their_columns(hub, tmp_path):
    wiki_corpus.main([str(tmp_path / "a"), "--dataset", str(hub), *OF_PAGES, "--title", "title", "--text", "text"])
    (row,) = rows_of(tmp_path / "a")
    assert row == {"id": "Seine-0", "title": "Seine", "text": "It runs through Paris. It is long."}
    hotpot = {"context": {"title": ["Loire", "Po"], "sentences": [["It is long."], ["So", " is it."]]}}
    pairs = [("Loire", "It is long."), ("Po", "So  is it.")]
    assert list(wiki_corpus.pages_of(hotpot, *wiki_corpus.SOURCES["hotpotqa/hotpot_qa"][1:])) == pairs


@pytest.mark.parametrize(
    ("row", "pages"),
    [
        ({"p": None}, []),
        ({"p": {"t": None, "x": None}}, []),
        ({"p": {"t": ["A", None, "C"], "x": ["a", "b", None]}}, [("A", "a")]),
        ({"p": [{"t": "A", "x": ["a", "b"]}, None]}, [("A", "a b")]),
        ({"p": {"t": ["A"], "x": "a"}}, "['A'] and 'a'"),
        ({"p": {"t": ["A"], "x": ["a", "b"]}}, "['A'] and ['a', 'b']"),
        ({"p": {"t": ["A"], "x": [[["a"]]]}}, "'A' and [['a']]"),
        ({"p": {"t": "A", "x": ["a", None]}}, "'A' and ['a', None]"),
        ({"p": {"t": 0, "x": "a"}}, "0 and 'a'"),
    ],
)
def test_what_a_row_holds_is_texts_or_nothing(row, pages):
    if isinstance(pages, list):
        assert list(wiki_corpus.pages_of(row, "p.t", "p.x")) == pages
        return
    with pytest.raises(ValueError, match="'p.t' and 'p.x' hold " + re.escape(pages) + ". Expected texts"):
        list(wiki_corpus.pages_of(row, "p.t", "p.x"))


@pytest.mark.parametrize(
    ("before", "long"), [(0, 121), (19, 105), (20, 119), (79, 71), (79, 41), (115, 10), (60, 500)]
)
def test_no_passage_is_longer_than_a_fifth_more(before, long):
    text = " ".join([*["word"] * (before - 1), "End."] * bool(before) + ["w"] * (long - 1) + ["Last."])
    passages = [row["text"].split() for row in wiki_corpus.passages_of("A", f"{text} One. Two.")]
    assert [word for passage in passages for word in passage] == f"{text} One. Two.".split()
    assert max(map(len, passages)) <= 120 and min(map(len, passages[:-1]), default=20) >= 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--title", "entity_pages.name"],
            "there is no 'entity_pages.name' .--title, --text.. The columns are questi",
        ),
        (
            [*OF_PAGES, "--title", "title", "--text", "number"],
            "'title' and 'number' hold 'Seine' and 3. Expected text",
        ),
        (["--config", "rc.web"], r"'rc.web' not found. Available: \['rc.wikipedia', 'pages'\]"),
        (["--split", "tset"], r"Unknown split .tset.. Should be one of \['train', 'validation'\]"),
        (["--dataset", "/nowhere/data"], "name its splits, such as --split train"),
        (["--dataset", "/nowhere/data", "--split", "train"], "Couldn't find any data file at /nowhere/data"),
    ],
)
def test_what_is_no_corpus_is_one_sentence(arguments, message, hub, tmp_path):
    output = tmp_path / "wiki.jsonl"
    with pytest.raises(SystemExit, match=f"^error: no corpus from .*{message}[^\n]*$"):
        wiki_corpus.main([str(output), "--dataset", str(hub), *arguments])
    assert not list(tmp_path.glob("wiki.jsonl*"))  # nothing is in the way of the right command
    wiki_corpus.main([str(output), "--dataset", str(hub)])


def test_without_a_network(hub, tmp_path, monkeypatch):
    """At the start, and with a file that came in half: then the same command makes the corpus."""

    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'mandarjoshi/trivia_qa' on the Hub")

    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="error: no corpus .*Couldn't reach"):
        patch.setattr(datasets, "load_dataset", unreachable)
        wiki_corpus.main([str(tmp_path / "a")])
    lost = hub / "rc.wikipedia/train-1.parquet"
    content = lost.read_bytes()
    lost.write_bytes(content[:100])
    with pytest.raises(SystemExit, match="^error: no corpus from [^\n]*Parquet[^\n]*$"):
        wiki_corpus.main([str(tmp_path / "a"), "--dataset", str(hub)])
    assert not list(tmp_path.glob("a*"))
    lost.write_bytes(content)
    wiki_corpus.main([str(tmp_path / "a"), "--dataset", str(hub)])
    assert len(rows_of(tmp_path / "a")) == 19


def test_what_is_there_is_not_overwritten(hub, tmp_path):
    output = tmp_path / "wiki.jsonl"
    output.write_text("mine")
    with pytest.raises(SystemExit, match="exists. Delete it"):
        wiki_corpus.main([str(output), "--dataset", str(hub)])
    assert output.read_text() == "mine"


def test_a_data_set_with_a_script_is_one_sentence(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old/old.py").write_text("import datasets\n")
    with pytest.raises(SystemExit, match="^error: no corpus from .*Dataset scripts are no longer supported[^\n]*$"):
        wiki_corpus.main([str(tmp_path / "a"), "--dataset", str(tmp_path / "old"), "--split", "train"])
    assert not list(tmp_path.glob("a*"))


def test_a_launch_without_its_corpus_says_how_to_make_it(tmp_path, monkeypatch):
    """Before a server is started. The recipe sets the variable, which the test undoes."""
    monkeypatch.setenv("WIKI_SEARCH_CORPUS", "")
    monkeypatch.setattr(launch_plan, "check_installed", lambda engine: None)
    recipe = (ROOT / "hf_recipes/tiny/encyclopedia.yaml").read_text() + "use_vllm: true\nvllm_mode: server\n"
    (tmp_path / "recipe.yaml").write_text(
        recipe.replace("hf_recipes/tiny/encyclopedia/corpus.jsonl", "x/hotpot.jsonl")
    )
    with pytest.raises(OSError, match="x/hotpot.jsonl does not exist. The recipe's first lines .*wiki_corpus.py"):
        launch_plan.make_plan(str(tmp_path / "recipe.yaml"), ["--output_dir", str(tmp_path)])
