"""SQuAD: rewards by hand, rows and corpus by the script, the examples of the recipes."""

import json
import re
import zlib

import pytest
from build import squad_search
from conftest import data_file
from project import json_lines
from test_rewards import load

from mt_grpo.rollout import ToolCall, ToolResult, Turn
from tools.wiki_search import wiki_search

squad = load("squad_reward")
GOLD = {"value": "the Duke of Normandy", "aliases": ["the Duke of Normandy", "William I"]}


def search(*texts, error=None):
    calls = [ToolCall("wiki_search", {"query": "x"}) for _ in texts]
    return Turn([], None, "", "stop", calls, [ToolResult(text, error) for text in texts])


def says(answer):
    return Turn([], None, "", "stop", answer=answer)


@pytest.mark.parametrize(
    ("answer", "exact", "f1"),
    [
        ("Duke of Normandy", 1.0, 0.5), ("the duke of  normandy!", 1.0, 0.5), ("William I", 1.0, 0.5),
        ("William I of England", 0.0, 0.5 * 2 * 2 / (4 + 2)), ("A Duke", 0.0, 0.5 * 2 * 1 / (1 + 3)),
        ("Rollo", 0.0, 0.0), (None, 0.0, 0.0), ("the", 0.0, 0.0), ("duke duke", 0.0, 0.5 * 2 * 1 / (2 + 3)),
    ],
)  # fmt: skip
def test_answers_are_judged_as_squad_judges_them(answer, exact, f1):
    turns = [[search("William"), says(answer)]]
    assert squad.exact_match_reward_func(turns, answer=[GOLD]) == [exact]
    assert squad.f1_reward_func(turns, answer=[GOLD]) == pytest.approx([f1])


def test_a_copied_sentence_is_no_close_answer():
    """Its F1 is sure and small: that of the F1 alone teaches to copy."""
    copied = "William, the Duke of Normandy, conquered England in 1066, behind a long war"  # 3 of 11 words
    texts = copied, "William I of England", "A Duke", "William I", "", None
    said = [[search("William"), says(text)] for text in texts]
    f1s = [0.5 * 2 * 3 / (11 + 3), 0.5 * 2 * 2 / (4 + 2), 0.5 * 2 * 1 / (1 + 3), 0.5, 0.0, 0.0]
    assert squad.f1_reward_func(said, answer=[GOLD] * 6) == pytest.approx(f1s)
    assert squad.close_answer_reward_func(said, answer=[GOLD] * 6) == pytest.approx([0.0, *f1s[1:]])
    assert squad.close_answer_reward_func(said[:1], answer=[[]]) == [None]


def test_each_search_is_judged_by_itself_and_none_finds_yes_or_no():
    """The first that finds the answer is paid; words inside other words are none; a failed call found nothing. Any
    text may have these words. The answer itself is judged as always."""
    turns = [search("King William II"), search("It was the Duke of Normandy.", "no"),
             search("Error: Duke of Normandy", error="tool"), search("no", "It was the Duke of Normandy."),
             search("The Duke of Normandy"), says("Duke of Normandy")]  # fmt: skip
    found = squad.answer_in_search_results_reward_func([turns, []], answer=[GOLD, GOLD])
    assert found == [[0.0, 0.0, 0.0, 0.5, 0.0, None], []]
    assert squad.call_ran_reward_func([turns, []]) == [[0.1, 0.1, 0.0, 0.1, 0.1, None], []]
    turns = [[search("There is no doubt: yes."), says("Yes.")]] * 3
    golds = ["yes", {"value": "no", "aliases": ["No."]}, ["no", "no doubt"]]
    assert squad.answer_in_search_results_reward_func(turns, answer=golds) == [None, None, [0.5, None]]
    assert squad.exact_match_reward_func(turns, answer=golds) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("gold", [None, [], {"value": None, "aliases": None}, ["the"]])
def test_a_row_without_an_answer_gets_no_reward(gold):
    turns = [[search("x"), says("x")]]
    assert squad.answer_in_search_results_reward_func(turns, answer=[gold]) == [None]
    assert squad.exact_match_reward_func(turns, answer=[gold]) == squad.f1_reward_func(turns, answer=[gold]) == [None]


def test_rows_and_corpus_of_a_folder(tmp_path, capsys):
    folder = data_file("squad/qa.jsonl").parent
    squad_search.main([str(tmp_path / "out"), "--source", str(folder)])
    assert capsys.readouterr().out.startswith("train: 373 questions\ntest: 100 questions\n126 passages;")
    rows = {split: json_lines(tmp_path / f"out/{split}.jsonl") for split in ("train", "test")}
    asked = {split: {row["question"] for row in rows[split]} for split in rows}
    assert not asked["train"] & asked["test"] and len(asked["train"]) == 373
    given = {row["question"]: row["answer"] for row in json_lines(folder / "qa.jsonl")}
    assert all(row["answer"] == given[row["question"]] for split in rows.values() for row in split)
    assert (tmp_path / "out/corpus.jsonl").read_text().count("\n") == 126
    squad_search.main([str(tmp_path / "again"), "--source", str(folder)])
    assert (tmp_path / "again/test.jsonl").read_bytes() == (tmp_path / "out/test.jsonl").read_bytes()


NORMANS = "Rollo led. They came by St. Malo in 911.  He was paid (well). He stayed!"
PASSAGES = [
    {"id": "Normans-0", "title": "Normans", "text": NORMANS},
    {"id": "Rome-0", "title": "Rome", "text": "It burnt."},
]


@pytest.fixture
def source(tmp_path):
    """A folder of two passages and a question."""
    folder = tmp_path / "source"
    folder.mkdir()
    question = {"question": "Who led?", "answer": {"value": "Rollo", "aliases": []}, "id": "Normans-0"}
    for name, rows in (("corpus", PASSAGES), ("qa", [question])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_sentences_are_passages_without_a_title(source, tmp_path, monkeypatch):
    """The whole passages stand beside them, and the questions are the same."""
    for name, options in (("whole", ()), ("one", ("--sentences", "1")), ("two", ("--sentences", "2"))):
        squad_search.main([str(tmp_path / name), "--source", source, *options])
    assert json_lines(tmp_path / "one/passages.jsonl") == json_lines(tmp_path / "whole/corpus.jsonl") == PASSAGES
    assert not (tmp_path / "whole/passages.jsonl").exists()
    texts = ["Rollo led.", "They came by St. Malo in 911.", "He was paid (well).", "He stayed!"]
    for name, count in (("one", 1), ("two", 2)):
        sentences = [" ".join(texts[k : k + count]) for k in range(5 - count)]
        assert json_lines(tmp_path / name / "corpus.jsonl") == [
            *({"id": f"Normans-0.{k}", "title": "", "text": text} for k, text in enumerate(sentences)),
            {"id": "Rome-0.0", "title": "", "text": "It burnt."},
        ]
    for split in ("train", "test"):
        assert (tmp_path / f"one/{split}.jsonl").read_bytes() == (tmp_path / f"whole/{split}.jsonl").read_bytes()
    monkeypatch.setenv("WIKI_SEARCH_CORPUS", str(tmp_path / "one/corpus.jsonl"))
    assert wiki_search("Who led?") == "Rollo led."  # as it stands, without a number
    monkeypatch.setenv("WIKI_SEARCH_TOPK", "2")
    assert re.fullmatch(r"\[1\] (Rollo led.|He stayed!)\n\n\[2\] \w+ \w+[.!]", wiki_search("Who led and stayed?"))


def test_a_split_is_of_the_question_and_titles_of_its_passage():
    """By a hash of its text, the same in every process: about one in five is held out. Else the questions about the
    other articles would stay, and no search could find their answers."""
    held_out = [k for k in range(100) if squad_search.split_of(f"Question {k}?") == "test"]
    assert held_out == [k for k in range(100) if zlib.crc32(f"Question {k}?".encode()) % 5 == 0]
    assert 10 < len(held_out) < 30
    passages = [{"id": title, "title": title, "text": "x"} for title in ("Normans", "Rome")]
    questions = [{"question": "Who?", "answer": "He"}]
    assert squad_search.of_titles(passages, questions, ["Normans", "Rome"]) == (passages, questions)
    with pytest.raises(KeyError, match="passage"):
        squad_search.of_titles(passages, questions, ["Normans"])


def test_rows_of_squads_own_form(tmp_path, monkeypatch):
    """As `load_dataset` gives them, and what `--titles` takes."""
    rows = [
        {"title": title, "context": f" {title} {k // 2}. ", "question": f"{title} {k}?",
         "answers": {"text": ["one", "one", "two"] if k else []}}
        for title in ("New_York", "Rome") for k in range(4)
    ]  # fmt: skip
    monkeypatch.setattr(squad_search, "from_hub", lambda: squad_search.from_squad(rows))
    squad_search.main([str(tmp_path), "--titles", "New York"])
    assert json_lines(tmp_path / "corpus.jsonl") == [
        {"id": f"New York-{k}", "title": "New York", "text": f"New_York {k}."} for k in range(2)
    ]
    questions = json_lines(tmp_path / "train.jsonl") + json_lines(tmp_path / "test.jsonl")
    assert sorted(row["question"] for row in questions) == [f"New_York {k}?" for k in (1, 2, 3)]
    assert all(row["answer"] == {"value": "one", "aliases": ["one", "two"]} for row in questions)
    assert {row["question"][-2]: row["passage"] for row in questions} == {
        "1": "New York-0", "2": "New York-1", "3": "New York-1"
    }  # fmt: skip
    with pytest.raises(SystemExit, match="error: There is no article 'New_York'"):
        squad_search.main([str(tmp_path), "--titles", "Rome", "New_York"])
