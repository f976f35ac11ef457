"""The task with search: the encyclopedia, its questions in the real index, the model and what warmed it up."""

import random
from collections import Counter
from statistics import mean
from unittest import mock

import pytest
from build import search as build
from evaluate import evaluate
from project import ROOT, json_lines, trained

from tools.wiki_search import wiki_search

DATA = ROOT / "hf_recipes/tiny/encyclopedia"
FACTS = build.make_facts()


@pytest.fixture(autouse=True)
def own_index(tmp_path_factory):
    """The corpus of the recipe, with an index elsewhere. A recipe's `env:` is set in this process: undone after it."""
    index = tmp_path_factory.getbasetemp() / "encyclopedia.fts5"
    with mock.patch.dict("os.environ", WIKI_SEARCH_CORPUS=str(DATA / "corpus.jsonl"), WIKI_SEARCH_INDEX=str(index)):
        yield


def rows_of(split: str) -> list[dict]:
    return json_lines(DATA / f"{split}.jsonl")


def test_the_files_are_the_generators_and_no_held_out_question_is_trained(tmp_path):
    build.write_data(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "test.jsonl", "train.jsonl"]
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (DATA / path.name).read_bytes()
    begin = {split: {build.read_question(row["question"])[1] for row in rows_of(split)} for split in build.NUM_ROWS}
    assert {split: len(rows_of(split)) for split in build.NUM_ROWS} == {"train": 2048, "test": 512}
    assert not begin["train"] & begin["test"]
    questions = [row["question"] for split in build.NUM_ROWS for row in rows_of(split)]
    assert len(set(questions)) == len(questions)


@pytest.mark.slow
def test_every_question_is_answered_by_searches():
    """Through the real index: a search per relation, each for what the one before it found."""
    hops = Counter()
    for row in rows_of("test") + rows_of("train")[::4]:
        relations, entity = build.read_question(row["question"])
        assert build.make_question(tuple(relations), entity) == row["question"]
        for relation in relations:
            query, value = build.title_of(relation, entity), FACTS[relation, entity]
            assert wiki_search(query) == f"[1] {query}\n{value}"
            assert build.look_up(query, dict(FACTS), random.Random(0)) == wiki_search(query)
            entity = value
        assert row["answer"] == [entity]
        hops[len(relations)] += 1
    assert set(hops) == {1, 2} and min(hops.values()) > 450


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_model_learns_to_search(tmp_path):
    """The whole recipe: two minutes on two cores."""
    exact = [row["rewards/exact_match_reward_func/mean"] for row in trained(build.RECIPE, tmp_path)]
    assert len(exact) == 75 and mean(exact[:2]) < 0.5 and mean(exact[-10:]) > 0.8
    assert evaluate(str(tmp_path), build.RECIPE, 256, progress=False)["exact_match"] > 0.8
