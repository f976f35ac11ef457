"""The tools: values and limits of the calculator, and the search over a real corpus and real local servers."""

import importlib.util
import json
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from conftest import data_file
from fault_proxy import Fault, FaultProxy
from project import ROOT, json_lines

TOOLS = ROOT / "tools"


def load(name: str):
    """Loads a tool file by its path, as a recipe does; every call gives a fresh module."""
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


calculator = load("calculator").calculator
plain_calculator = load("agents/calculator").calculator


VALUES = """
1 + 2 * 3 = 7                  (1 + 2) * 3 = 9              48 / 2 + 48 = 72
6/3 = 2                        10/4 = 2.5                   1/3 = 0.333333333333
0.1 + 0.2 = 0.3                0.1 * 3 * 10 = 3             4.35 * 100 = 435
7 // 2 = 3                     -7 // 2 = -4                 -7 % 3 = 2
5 % 3.5 = 1.5                  2 ** 10 = 1024               2 ** -1 = 0.5
-2 ** 2 = -4                   2 ** 3 ** 2 = 512            (-8) ** 2.0 = 64
2 ** 0.5 = 1.41421356237       --3 = 3                      +-3 = -3
-0.0 = 0                       1_000 * 2 = 2000             .5 + 5. = 5.5
1e3 = 1000                     1e-7 = 1e-07                 1e16 = 1e+16
1234567.891 * 2 = 2469135.782  999999999999.5 = 999999999999.5
12345678901.25 * 2 = 24691357802.5
2 ** 100 = 1267650600228229401496703205376
123456789123456789 * 987654321987654321 = 121932631356500531347203169112635269
10 ** 308 - 10 ** 308 = 0      1 ** 10 ** 300 = 1           0 ** 10 ** 300 = 0
10 ** -400 = 0
"""


def test_calculator_value():
    values = re.findall(r"(\S.*?) = (\S+)(?:\s|$)", VALUES)
    assert len(values) == 36
    values += [("10 ** 308", "1" + "0" * 308), ("-" * 498 + "1", "1"), ("(" * 50 + "1" + ")" * 50, "1")]
    for expression, value in values:
        assert calculator(f"  {expression} ") == value, expression


@pytest.mark.timeout(60)  # some would take minutes
@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "empty expression"), ("2 3", "syntax error at character 3"), ("\ud800", "cannot be read"),
        ("x + 1", "unknown name 'x'"), ("__import__('os').system('true')", "functions cannot be called"),
        ("2(3 + 4)", "write products with *"), ("(1).__class__", "Attribute is not allowed"),
        ("'a' * 9", "Constant is not allowed"), ("1,000 + 1", "write 1000, not 1,000"),
        ("lambda: 1", "Lambda is not allowed"), ("2 ^ 3", r"use \*\* for powers"),
        ("(-8) ** 0.5", "not a real number"), ("50% + 20", "write 50 / 100 for 50%"),
        *((text, "^division by zero$") for text in ("1 / 0", "1 % 0", "1.5 // 0", "0 ** -1")),
        *((text, "too large") for text in ("9**9**9", "10**309", "9" * 400, "1e308 * 10", "10**308 / 0.1",
                                           "*".join(["10**300"] * 50))),
        ("(" * 240 + "1" + ")" * 240, "too many nested parentheses|cannot be read"),
        ("1" * 501, "too long: 501 characters"), ("9**" * 10**6 + "9", "too long"),
    ],
)  # fmt: skip
def test_calculator_refuses(expression, message):
    with pytest.raises((ValueError, ZeroDivisionError), match=message):
        calculator(expression)


def test_the_calculator_of_the_sample_agents_keeps_whole_numbers_whole():
    assert [plain_calculator(text) for text in ("99999999*99999999", "1/3")] == ["9999999800000001", "0.333333333333"]


@pytest.fixture
def wiki(monkeypatch):
    """A fresh module without settings from outside, whose waits are short."""
    for name in [name for name in os.environ if name.startswith("WIKI_SEARCH_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    module = load("wiki_search")
    module.BACKOFF_SECONDS = 0.01
    return module


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({}, ValueError, "WIKI_SEARCH_CORPUS is not set"),
        ({"WIKI_SEARCH_CORPUS": "/nowhere/corpus.jsonl"}, FileNotFoundError, "/nowhere/corpus.jsonl"),
        ({"WIKI_SEARCH_BACKEND": "retrieval", "WIKI_SEARCH_URL": "u:secret@host:80"}, ValueError, "with http://"),
    ],
)
def test_wrong_settings(wiki, monkeypatch, settings, error, message):
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error, match=message) as raised:
        wiki.wiki_search("Normandy")
    assert "secret" not in str(raised.value)
    with pytest.raises(error, match=message):
        wiki.CHECK_TOOLS()  # before training


@pytest.mark.parametrize("query", ["", "  \n\t ", "\0"])
def test_empty_query(wiki, query):
    with pytest.raises(ValueError, match="empty query"):
        wiki.wiki_search(query)


@pytest.fixture
def squad(wiki, monkeypatch, tmp_path):
    """The search over the passages of three Wikipedia articles."""
    monkeypatch.setenv("WIKI_SEARCH_CORPUS", str(data_file("squad/corpus.jsonl")))
    monkeypatch.setenv("WIKI_SEARCH_INDEX", str(tmp_path / "squad.fts5"))
    return wiki


@pytest.fixture
def small(wiki, monkeypatch, tmp_path):
    """The search over a corpus that the test writes, with the index beside it."""
    corpus = tmp_path / "data" / "corpus.jsonl"
    corpus.parent.mkdir()
    monkeypatch.setenv("WIKI_SEARCH_CORPUS", str(corpus))

    def write(*passages: tuple[str, str]) -> None:
        rows = [{"id": str(i), "title": title, "text": text} for i, (title, text) in enumerate(passages)]
        corpus.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    wiki.corpus, wiki.index, wiki.write = corpus, corpus.with_name("corpus.jsonl.fts5"), write
    return wiki


def test_more_passages_never_find_fewer_answers(squad, monkeypatch):
    """The share of 473 questions whose result has an accepted answer. Measured: 0.854 with 1 passage, 0.958 with 3."""
    questions = json_lines(data_file("squad/qa.jsonl"))
    assert len(questions) == 473
    recalls = []
    for topk in (1, 3, 20):
        monkeypatch.setenv("WIKI_SEARCH_TOPK", str(topk))
        results = [squad.wiki_search(row["question"]) for row in questions]
        assert all(len(result) <= squad.MAX_RESULT_CHARS for result in results)
        answers = [row["answer"]["aliases"] for row in questions]
        found = [any(a.lower() in result.lower() for a in some) for result, some in zip(results, answers, strict=True)]
        recalls.append(sum(found) / len(questions))
    assert recalls == sorted(recalls)
    assert recalls[0] >= 0.84 and recalls[1] >= 0.94 and recalls[2] >= 0.96


def test_a_result_is_a_whole_passage_and_more_are_numbered_and_ranked(squad, monkeypatch):
    rows = {row["id"]: row for row in json_lines(data_file("squad/corpus.jsonl"))}
    text = rows["Normans-0"]["text"]
    assert squad.wiki_search("Rollo agreed to swear fealty to King Charles III") == f"[1] Normans\n{text}"
    for query in ("Rollo " + "zz " * 10**5, "Rollo " + " ".join(f"q{i}" for i in range(10**4))):
        assert "Rollo" in squad.wiki_search(query)
    assert len(squad.wiki_search("x" * 10**6)) < 400
    best = squad.wiki_search("Norse leader Rollo")
    monkeypatch.setenv("WIKI_SEARCH_TOPK", "3")
    three = squad.wiki_search("Norse leader Rollo")
    assert three.startswith(best + "\n\n[2] Normans\n") and "\n\n[3] " in three and "\n\n[4] " not in three


def test_titles_count_more_than_texts_and_words_are_matched_by_stem_case_and_accent(small):
    small.write(
        ("Lyon", "A city of two rivers, unlike Paris or Rouen, in the valley."),
        ("Paris", "A city of two rivers, unlike Lyon or Rouen, in the valley."),
        ("Zürich", "Bankers are counting."), ("The Who", "A band."), ("Genesis", "One more band."),
    )  # fmt: skip
    for query, title in (("paris", "Paris"), ("lyon", "Lyon"), ("the who", "The Who")):  # stop words alone, too
        assert small.wiki_search(query).startswith(f"[1] {title}\n"), query
    for query in ("zurich", "ZÜRICH", "Zu\u0308rich", "banker", "counted"):
        assert small.wiki_search(query).startswith("[1] Zürich\n"), query


@pytest.mark.parametrize("query", [
    'Rollo"', '"Rollo', '""" Rollo """', "'; DROP TABLE passages; -- Rollo", "Rollo AND", "NOT Rollo",
    "NEAR(Rollo, 2)", "Rollo*", "^Rollo", "title:Rollo", "{title text}: Rollo", "- (Rollo", "Rollo)) OR ((",
    "Rollo\0\\", "Rollo \ud800", "Rollo ☃ 日本語 🙂 _ ²", "_Rollo_",
])  # fmt: skip
def test_search_syntax_in_a_query_is_harmless(small, query):
    small.write(("Paris", "A city."), ("Normans", "The leader Rollo."), ("Rouen", "Another city."))
    assert small.wiki_search(query) == "[1] Normans\nThe leader Rollo."


@pytest.mark.parametrize("query", ["xylophone", "日本語", "?!", '"', "***", "_", "🙂", "id:0", "Normans-0000"])
def test_no_results_is_an_answer(small, query):
    small.write(("Paris", "A city."))
    assert small.wiki_search(query) == "No results. Try other words."


@pytest.mark.contract("wiki_search")
def test_passages_stay_whole_while_they_fit_and_the_first_is_cut_where_it_is_too_long(small, monkeypatch):
    """Of 1000 characters each: two are whole, of the third what is left of 3000, and nothing of the others. After 2769
    characters of the first passage, too few are left for the second."""
    small.write(*[(name, "word " * 199 + name) for name in "ABCDE"])
    results = []
    for topk in ("1", "2", "3", "5"):
        monkeypatch.setenv("WIKI_SEARCH_TOPK", topk)
        results.append(small.wiki_search("word"))
    one, two, three, five = results
    assert len(one) == len("[1] A\n") + 996
    assert two.startswith(one + "\n\n[2] ") and "cut" not in two
    assert three.startswith(two + "\n\n[3] ") and 2980 < len(three) <= 3000
    assert three.endswith(" ... [cut, 1002 characters in all]") and five == three
    monkeypatch.setenv("WIKI_SEARCH_TOPK", "3")
    small.write(("Long", "word " * 550 + "very rares"), ("Short", "word " * 100))
    assert "cut" not in small.wiki_search("word rares") and "[2]" not in small.wiki_search("word rares")
    small.write(("Long", "word " * 5000))
    result = small.wiki_search("word")
    assert 2990 < len(result) <= 3000
    assert result.endswith(" ... [cut, 25008 characters in all]")


def test_index_is_built_once_and_rebuilt_when_the_corpus_changes(small, monkeypatch):
    builds, build = [], small._build_index
    monkeypatch.setattr(small, "_build_index", lambda *args: (builds.append(args), build(*args)))
    small.write(("Paris", "The mayor is Anne."))
    with ThreadPoolExecutor(1) as pool:  # another thread opens a connection of its own
        assert "Anne" in pool.submit(small.wiki_search, "mayor of Paris").result()
    assert "Anne" in small.wiki_search("mayor of Paris")
    other = load("wiki_search")  # as another process
    monkeypatch.setattr(other, "_build_index", lambda *args: pytest.fail("built again"))
    assert "Anne" in other.wiki_search("mayor of Paris")
    small.write(("Paris", "The mayor is Bertrand."))
    assert "Bertrand" in small.wiki_search("mayor of Paris")
    small.write(("Paris", "The mayor is Jacqueso."))  # of the same size, but changed later
    os.utime(small.corpus, ns=(0, small.corpus.stat().st_mtime_ns + 10**9))
    assert "Jacqueso" in small.wiki_search("mayor of Paris")
    assert len(builds) == 3


def test_index_path_that_names_another_file_is_not_overwritten(squad, monkeypatch, tmp_path):
    precious = tmp_path / "notes.txt"
    precious.write_text("precious " * 1000)
    monkeypatch.setenv("WIKI_SEARCH_INDEX", str(precious))
    with pytest.raises(ValueError, match=r"notes\.txt is not an index of this tool"):
        squad.wiki_search("Rollo")
    assert precious.read_text() == "precious " * 1000


def test_malformed_corpus_names_the_line_and_leaves_nothing(small):
    small.corpus.write_text('{"id": "0", "title": "a", "text": "b"}\n{"id": "1", "title"\n')
    with pytest.raises(ValueError, match="line 2: expected"):
        small.wiki_search("Paris")
    assert {path.name for path in small.corpus.parent.iterdir()} == {"corpus.jsonl", "corpus.jsonl.fts5.lock"}
    small.write(("Paris", "A city."))
    assert "A city." in small.wiki_search("Paris")


def test_searches_that_start_together_build_one_index(squad, monkeypatch, tmp_path):
    """Each with a module and a connection of its own, as processes have. The lock is the file's."""
    modules, builds, everyone = [load("wiki_search") for _ in range(4)], [], threading.Barrier(4)

    def first_search(module):
        everyone.wait(30)
        return module.wiki_search("Who was the Norse leader Rollo?")

    for module in modules:
        build = module._build_index
        monkeypatch.setattr(module, "_build_index", lambda *args, build=build: (builds.append(args), build(*args)))
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(first_search, modules))
    assert results == [squad.wiki_search("Who was the Norse leader Rollo?")] * 4 and len(builds) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["squad.fts5", "squad.fts5.lock"]


PASSAGES = [
    ("Normans", "The Norse leader Rollo swore fealty."),
    ("Rollo", "First ruler of Normandy.\nDied about 930."),
    ("Rouen", "A city on the Seine."),
]


@pytest.fixture
def server(wiki, monkeypatch):
    """Search-R1's retrieval server, and the tool set to it: scored documents, or what a test puts into `replies`."""
    served = SimpleNamespace(requests=[], replies=[])

    def answer(request):
        served.requests.append(request.payload)
        assert request.path == "/retrieve" and request.payload.keys() == {"queries", "topk", "return_scores"}
        found = [] if request.payload["queries"] == ["nothing"] else PASSAGES[: request.payload["topk"]]
        documents = [{"document": {"contents": f'"{title}"\n{text}'}, "score": 0.9} for title, text in found]
        said = {"status": 200, "text": json.dumps({"result": [documents]})}
        reply = {**said, **(served.replies.pop(0) if served.replies else {})}
        return Fault("said", status=reply["status"], body=reply["text"].encode(), headers=reply.get("headers", {}))

    monkeypatch.setenv("WIKI_SEARCH_BACKEND", "retrieval")
    with FaultProxy("http://127.0.0.1:9", answer) as proxy:
        monkeypatch.setenv("WIKI_SEARCH_URL", proxy.url)
        served.url, served.server_close = proxy.url, proxy.close
        yield served


@pytest.mark.contract("wiki_search")
def test_search_by_http(wiki, server, monkeypatch):
    assert wiki.wiki_search("Norse leader") == "[1] Normans\nThe Norse leader Rollo swore fealty."
    monkeypatch.setenv("WIKI_SEARCH_TOPK", "3")
    assert wiki.wiki_search("Norse leader") == (
        "[1] Normans\nThe Norse leader Rollo swore fealty.\n\n"
        "[2] Rollo\nFirst ruler of Normandy.\nDied about 930.\n\n"
        "[3] Rouen\nA city on the Seine."
    )
    assert wiki.wiki_search("nothing") == "No results. Try other words."
    query = 'Zürich & "Köln"? #1 + 100% 日本 \'x\'; {"queries": []}'
    monkeypatch.setenv("WIKI_SEARCH_URL", f"{server.url}/retrieve/")
    wiki.wiki_search(f" {query}\n")
    assert [request["queries"] for request in server.requests] == [*[["Norse leader"]] * 2, ["nothing"], [query]]
    wiki.CHECK_TOOLS()


@pytest.mark.timeout(60)
def test_a_busy_server_is_asked_again_and_not_much_later(wiki, server):
    server.replies = [{"status": 503}, {"status": 429, "headers": {"Retry-After": "3600"}}]
    assert "Rollo" in wiki.wiki_search("Rollo")
    assert len(server.requests) == 3


def test_a_server_that_fails_is_asked_three_times_and_once_where_the_address_is_wrong(wiki, server):
    server.replies = [{"status": 500, "text": "out of memory " * 100}] * 3
    with pytest.raises(RuntimeError, match=f"{server.url}.* answered with status 500 and 'out of memory") as raised:
        wiki.wiki_search("Rollo")
    assert len(str(raised.value)) < 500 and len(server.requests) == 3
    server.replies = [{"status": 404, "text": "no such page"}]
    with pytest.raises(RuntimeError, match="answered with status 404 and 'no such page': .*WIKI_SEARCH_URL"):
        wiki.wiki_search("Rollo")
    assert len(server.requests) == 4
    assert "Rollo" in wiki.wiki_search("Rollo")  # the session is still good


def test_no_server(wiki, server, monkeypatch):
    server.server_close()
    monkeypatch.setenv("WIKI_SEARCH_URL", server.url.replace("127.0.0.1", "user:secret@127.0.0.1"))
    with pytest.raises(ConnectionError, match="no answer from .*: check that it is running") as raised:
        wiki.wiki_search("Rollo")
    assert server.url in str(raised.value)
    assert "secret" not in str(raised.value)


def test_title_of_retrieved_contents_and_no_more_than_asked_for(wiki, server, monkeypatch):
    contents = {
        "Rollo\nA ruler.": "Rollo\nA ruler.",
        '""Weird Al" Yankovic"\nA singer.': '"Weird Al" Yankovic\nA singer.',
        '"Weird Al" Yankovic\nA singer.': '"Weird Al" Yankovic\nA singer.',
        "A passage without a title.": "A passage without a title.",
    }
    documents = [{"document": {"contents": text}, "score": 1.0} for text in contents]
    monkeypatch.setenv("WIKI_SEARCH_TOPK", "3")
    server.replies = [{"text": json.dumps({"result": [each]})} for each in (documents, documents[::-1])]
    shown = [f"[{k}] {text}" for k, text in enumerate(contents.values(), 1)]
    assert wiki.wiki_search("Rollo") == "\n\n".join(shown[:3])
    monkeypatch.setenv("WIKI_SEARCH_TOPK", "1")
    assert wiki.wiki_search("Rollo") == "A passage without a title."


@pytest.mark.parametrize("text", ["[]", '{"result": []}', "<html>"])
def test_another_answer_is_an_error(wiki, server, text):
    server.replies = [{"text": text}]
    with pytest.raises(RuntimeError, match="answered with status 200 and .*WIKI_SEARCH_BACKEND"):
        wiki.wiki_search("Rollo")
