"""A corpus for tools/wiki_search.py from a copy of TriviaQA's evidence in its schema: whole, stopped, bad input."""

import os
from pathlib import Path

import pytest
from build import wiki_corpus
from datasets import Dataset, Features, List, Value
from project import json_lines

from tools.wiki_search import wiki_search

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
    monkeypatch.setitem(wiki_corpus.SOURCES, str(folder), wiki_corpus.SOURCES["mandarjoshi/trivia_qa"])
    return folder


def test_the_evidence_pages_become_a_corpus_that_the_tool_finds(hub, tmp_path, monkeypatch, capsys):
    output = tmp_path / "data/wiki.jsonl"
    wiki_corpus.main([str(output), "--dataset", str(hub)])
    rows = json_lines(output)
    assert {row["title"] for row in rows} == {*(f"Town {i}" for i in range(4)), "Rollo", "Danube"}
    assert [row["id"] for row in rows if row["title"] == "Rollo"] == ["Rollo-0", "Rollo-1"]  # once, of four
    words = [len(row["text"].split()) for row in rows if row["title"].startswith("Town")]
    assert len(words) == 4 * 4 and all(60 <= count <= 120 for count in words) and sum(words) == 4 * 300
    assert all(row["text"].startswith("Sentence") and row["text"].endswith(".") for row in rows)
    said = capsys.readouterr().out.splitlines()
    size = output.stat().st_size / 1e6
    assert said[-2] == f"6 pages, {len(rows)} passages, {size:.1f} MB, 0.0 minutes"
    assert f"{output} is written" in said[-1]
    assert os.listdir(output.parent) == ["wiki.jsonl"]
    monkeypatch.setenv("WIKI_SEARCH_CORPUS", str(output))
    assert wiki_search("the Viking").startswith("[1] Rollo\nSentence")


def test_other_data_sets_name_their_columns(hub, tmp_path):
    wiki_corpus.main([str(tmp_path / "a"), "--dataset", str(hub), *OF_PAGES, "--title", "title", "--text", "text"])
    (row,) = json_lines(tmp_path / "a")
    assert row == {"id": "Seine-0", "title": "Seine", "text": "It runs through Paris. It is long."}
    hotpot = {"context": {"title": ["Loire", "Po"], "sentences": [["It is long."], ["So", " is it."]]}}
    pairs = [("Loire", "It is long."), ("Po", "So  is it.")]
    assert list(wiki_corpus.pages_of(hotpot, *wiki_corpus.SOURCES["hotpotqa/hotpot_qa"][1:])) == pairs


@pytest.mark.parametrize("before, long", [(0, 121), (19, 105), (20, 119), (79, 71), (79, 41), (115, 10), (60, 500)])
def test_no_passage_is_longer_than_a_fifth_more(before, long):
    text = " ".join([*["word"] * (before - 1), "End."] * bool(before) + ["w"] * (long - 1) + ["Last."])
    passages = [row["text"].split() for row in wiki_corpus.passages_of("A", f"{text} One. Two.")]
    assert [word for passage in passages for word in passage] == f"{text} One. Two.".split()
    assert max(map(len, passages)) <= 120 and min(map(len, passages[:-1]), default=20) >= 20


def test_a_corpus_that_was_stopped_goes_on(hub, tmp_path, monkeypatch, capsys):
    """After any row the file that results is the same, also if more had been written than the last state says."""
    wiki_corpus.main([str(tmp_path / "whole"), "--dataset", str(hub)])
    monkeypatch.setattr(wiki_corpus, "SAVE_SECONDS", 0.0)
    whole_rows = wiki_corpus.rows_of
    for stop in (0, 1, 3, 6):

        def stopped(stream, stop=stop):
            for k, row in enumerate(whole_rows(stream)):
                if k == stop:
                    raise KeyboardInterrupt
                yield row

        output = tmp_path / f"stopped-{stop}"
        with monkeypatch.context() as patch, pytest.raises(SystemExit, match="stopped. Run the same command again"):
            patch.setattr(wiki_corpus, "rows_of", stopped)
            wiki_corpus.main([str(output), "--dataset", str(hub)])
        assert not output.exists()
        with open(f"{output}.part", "ab") as part:
            part.write(b'{"id": "Town')  # half a line
        capsys.readouterr()
        wiki_corpus.main([str(output), "--dataset", str(hub)])
        assert output.read_bytes() == (tmp_path / "whole").read_bytes()
        pages = [int(line.split()[0]) for line in capsys.readouterr().out.splitlines()[:-1]]
        assert pages == sorted(pages) and (pages[0] > 0) == (stop > 0)  # it did not begin again
        assert not list(tmp_path.glob(f"stopped-{stop}.*"))


@pytest.mark.parametrize("state", [None, '{"of', "{}"])
@pytest.mark.parametrize("name", ["wiki.jsonl", "wiki.jsonl.part"])
def test_what_is_there_is_not_overwritten(name, state, hub, tmp_path):
    (tmp_path / name).write_text('{"id": "mine", "title": "mine", "text": "mine"}\n')
    if state is not None:
        (tmp_path / "wiki.jsonl.part.json").write_text(state)
    with pytest.raises(SystemExit, match="exists. Delete it|is half of another corpus, or damaged|Delete both"):
        wiki_corpus.main([str(tmp_path / "wiki.jsonl"), "--dataset", str(hub)])
    assert "mine" in (tmp_path / name).read_text()
