"""scripts/view_rollouts.py: the newest rollouts of a log, the server, and the page in a real Chromium."""

import json
import math
import re
import signal
import socket
import subprocess
import time
from pathlib import Path
from urllib.parse import urlencode

import pytest
import requests
import view_rollouts
import warm_python
from aiohttp import web
from PIL import Image
from project import ROOT
from viewer import log as viewer_log
from viewer.log import LogReader

from mt_grpo.base.event_loop import run_async
from mt_grpo.reports import rollout_log
from mt_grpo.reports.rollout_log import write_rollouts

LOG = "rollouts.rank0.jsonl"
EVIL = '</script><script>window.hit = 1</script><img src=x onerror="window.hit = 1">\'" \x1b[31m\x00\u202e'


def turn(text, calls=(), results=(), **more):
    """A turn of a row: calls as (name, arguments), results as (text, error)."""
    called = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
    return {
        "text": text, "answer": None, "finish_reason": "stop", "seconds": 0.5,
        "calls": [{"name": name, "arguments": arguments, "error": None} for name, arguments in called],
        "results": [{"text": said, "error": error, "seconds": 0.25, "reward": None} for said, error in results],
        "observation": None, "num_tokens": 3, "num_read": 4, "num_trained": 3, "reward": None, "mean_logprob": -0.5,
        "min_logprob": -1.0, "policy_versions": [3, 4], **more,
    }  # fmt: skip


def row(step, index, question, turns, reward=0.0, stop="answered", mode="train", **more):
    """A row of the log, with two reward functions."""
    messages = [{"role": "system", "content": "Search."}, {"role": "user", "content": question}]
    for each in turns:
        messages.append({"role": "assistant", "content": each["text"]})
        messages += [{"role": "tool", "content": result["text"]} for result in each["results"]]
    return {
        "schema": 1, "rank": 0, "step": step, "mode": mode, "index": index, "group": index // 2, "messages": messages,
        "stop_reason": stop, "reward": reward, "rewards": {"exact_reward_func": reward, "style": None},
        "turn_rewards": [0.10000000149] * len(turns), "turn_advantages": [1.0 - 2.0 * (index % 2)] * len(turns),
        "answer": "Paris", "turns": turns, "num_prompt_tokens": 9, "num_tokens": 7 * len(turns), "records": 1,
        "policy_version": step, "error": None, "info": ["{}"] * len(turns), "num_prompt_messages": 2, **more,
    }  # fmt: skip


def rows():
    """Six rollouts: two groups of step 0, one of step 1; their ids are 1 to 6."""
    search, calculator = ("search", {"query": "crème brûlée"}), ("calculator", {"expression": "19 - 3"})
    return [
        row(0, 0, "Where is the Louvre?", [turn("I look.", [search], [("A dish.", None)]), turn("Paris")], 1.0),
        row(0, 1, "Where is the Louvre?", [turn("London")], 0.0, stop="no_tool_call"),
        row(0, 2, "What is 19 - 3?", [turn("Hm.", [calculator], [("too slow", "timeout")]), turn("16")], 0.5),
        row(0, 3, "What is 19 - 3?", [turn("Well.", [calculator, search], [("16", None), ("", "call")])], 0.25,
            stop="max_turns"),
        row(1, 0, "Who wrote Faust?", [turn("Goethe")], -0.5),
        row(1, 1, "Who wrote Faust?", [turn("Marlowe did")], None, stop="environment_error", error="it broke"),
    ]  # fmt: skip


CASES = [  # filters, and the rollouts that they leave, in order
    ({}, [1, 2, 3, 4, 5, 6]),
    ({"step_from": "1"}, [5, 6]),
    ({"step_to": "0"}, [1, 2, 3, 4]),
    ({"prompt": "louvre"}, [1, 2]),
    ({"stop": "max_turns"}, [4]),
    ({"tool": "search"}, [1, 4]),
    ({"error": "any"}, [3, 4, 6]),
    ({"error": "timeout"}, [3]),
    ({"error": "rollout"}, [6]),
    ({"reward_min": "0.5"}, [1, 3]),
    ({"reward_max": "0"}, [2, 5]),
    ({"reward_name": "exact_reward_func", "reward_min": "0.25", "reward_max": "0.5"}, [3, 4]),
    ({"text": "creme"}, [1, 4]),  # accents and case are no difference
    ({"text": "rème"}, []),
    ({"text": "19-3"}, [3, 4]),  # in this order, whatever is between
    ({"text": "3-19"}, []),
    ({"text": "paris"}, [1, 2, 3, 4, 5, 6]),  # the answer of the row
    ({"text": "broke"}, [6]),
    ({"sort": "reward"}, [6, 5, 2, 4, 3, 1]),
    ({"sort": "turns", "descending": "true"}, [3, 1, 6, 5, 4, 2]),
    ({"stop": "answered", "tool": "calculator", "text": "slow"}, [3]),
    ({"groups": "true"}, [1, 3, 5]),  # the first rollout of each
]


def write_log(folder, logged, fresh=True):
    for old in Path(folder).glob("rollouts.rank0.*") if fresh else ():
        old.unlink()
    write_rollouts(Path(folder) / LOG, logged)
    return Path(folder)


def write_metrics(folder, metrics):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in metrics))
    return folder


def log_of(folder, **arguments):
    log = LogReader(Path(folder), **arguments)
    log.refresh()
    return log


def ids(found):
    return [each["id"] for each in found]


# -- reading a log --


@pytest.mark.parametrize("query, expected", CASES, ids=lambda value: str(value)[:40])
def test_filters(query, expected, tmp_path):
    found = log_of(write_log(tmp_path, rows())).table(query)
    assert (ids(found["rows"]), found["total"]) == (expected, len(expected))


def test_a_line_of_the_table_and_a_group(tmp_path):
    log = log_of(write_log(tmp_path, rows()))
    (line,) = log.table({"offset": "3", "limit": "1"})["rows"]
    assert line == {
        "id": 4, "rank": 0, "step": 0, "mode": "train", "number": 3, "attempt": 0, "team": "train/0/0/1",
        "prompt": "What is 19 - 3?", "prompt_messages": 2, "stop": "max_turns", "reward": 0.25,
        "rewards": {"exact_reward_func": 0.25, "style": None}, "turns": 1, "tokens": 7, "seconds": 1.0,
        "tools": ["calculator", "search"], "errors": ["call"], "version": 0, "batch": 0, "schema": 1,
    }  # fmt: skip
    assert ids(log.group(4)) == [3, 4] and log.rollout(4)["row"] == rows()[3]
    info = log.info()
    assert (info["count"], info["tools"]) == (6, ["calculator", "search"])
    assert info["steps"] == [(0, "train"), (1, "train")]
    assert info["errors"] == ["call", "rollout", "timeout"] and info["modes"] == ["train"] and info["notes"] == []
    assert info["stops"] == ["answered", "environment_error", "max_turns", "no_tool_call"]
    assert info["rewards"] == ["exact_reward_func", "style"]
    with pytest.raises(KeyError, match="There is no rollout 7"):
        log.rollout(7)


def test_another_attempt_is_another_group_and_a_new_run_begins_anew(tmp_path):
    """A resumed run, and the batches of an evaluation, use the same numbers of rollouts."""
    first = rows()[:2]
    again = [{**each, "messages": [{"role": "user", "content": "B?"}] * 2 + each["messages"][2:]} for each in first]
    evaluated = [{**each, "mode": "eval"} for each in first + again]
    log = log_of(write_log(tmp_path, first + again + evaluated))
    groups = [ids(log.group(number)) for number in (1, 4, 5, 8)]
    assert groups == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert log.rollout(4)["prompt"] == "B?" and log.rollout(4)["attempt"] == 1
    log = log_of(write_log(tmp_path, rows()))
    generation = log.info()["generation"]
    write_log(tmp_path, [row(0, 0, "New?", [turn("Yes")])])
    assert log.refresh() == 1 and log.info()["generation"] != generation
    (line,) = log.table({})["rows"]
    assert line["prompt"] == "New?" and log.table({"text": "louvre"})["total"] == 0
    write_log(tmp_path, [row(0, 0, "Newer?", [turn("word " * 999)])] * 3)  # longer than what was read
    assert log.refresh() == 3 and {line["prompt"] for line in log.table({})["rows"]} == {"Newer?"}


def test_it_follows_a_run(tmp_path, monkeypatch):
    """Rows of the open segment, of one that was closed meanwhile, of a second rank; a line that is not whole yet."""
    monkeypatch.setattr(rollout_log, "SEGMENT_BYTES", 4000)
    log = log_of(write_log(tmp_path, rows()[:1]))
    line = json.dumps(rows()[1]).encode()
    with open(tmp_path / LOG, "ab") as file:
        file.write(line[:50])
        file.flush()
        assert log.refresh() == 0
        file.write(line[50:] + b"\n")
    assert log.refresh() == 1
    for each in rows()[2:] + rows():
        write_log(tmp_path, [each], fresh=False)
    assert len(list(tmp_path.glob("rollouts.rank0.0*.jsonl"))) >= 2
    (tmp_path / "rollouts.rank1.jsonl").write_text(json.dumps({**rows()[0], "rank": 1, "index": 8}) + "\n")
    assert log.refresh() == 11 and log.refresh() == 0
    assert [each["stop"] for each in log.table({})["rows"]].count("max_turns") == 2
    assert log.info()["count"] == 13 and log.info()["notes"] == []


def test_the_newest_rows_of_a_large_log_are_read(tmp_path, monkeypatch, capsys):
    """Of each rank the same share, of a log that is there and of one that grows; the page and the terminal say so."""
    logged = [row(step, 0, "?", [turn("x")]) for step in range(10, 50)]
    size = len(json.dumps(logged[0])) + 1
    monkeypatch.setattr(rollout_log, "SEGMENT_BYTES", 10 * size)
    monkeypatch.setattr(viewer_log, "SEGMENT_BYTES", 10 * size)
    for rank in (0, 1):
        for each in logged:
            write_rollouts(tmp_path / f"rollouts.rank{rank}.jsonl", [{**each, "rank": rank}])
    run = view_rollouts.Run(tmp_path)
    log = run.log
    log.most_bytes = 30 * size
    run.read()
    kept = [[line["step"] for line in log.table({})["rows"] if line["rank"] == rank] for rank in (0, 1)]
    assert kept == [list(range(35, 50))] * 2
    note = "only the newest 30 rollouts are shown"
    assert note in capsys.readouterr().out and note in run.info()["notes"][0]
    write_log(tmp_path, [row(60, 0, "?", [turn("x")])], fresh=False)
    assert log.refresh() == 1 and log.info()["count"] == 30
    assert [line["step"] for line in log.table({})["rows"] if line["rank"] == 0] == [*range(36, 50), 60]


def test_a_page_in_one_file_has_the_last_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(view_rollouts, "MOST_ROLLOUTS", 3)
    write_rollouts(tmp_path / "rollouts.rank1.jsonl", [row(0, 0, "?", [turn("x")], rank=1)])  # it is read last
    which = view_rollouts.write_page([write_log(tmp_path, rows())], tmp_path / "page.html")
    assert which == f"{tmp_path.name}: the newest 3 of 7 rollouts"
    data = json.loads(re.search('id="data">(.*?)</script>', (tmp_path / "page.html").read_text())[1])
    assert ids(data["rollouts"]) == [7, 5, 6]


def changed(**columns):
    """A row like the first one, but for some columns."""
    return {**rows()[0], **columns}


NO_ROLLOUTS = ["{not json", '{"step": 1}', '{"turns": 5, "messages": []}', changed(rewards=3), changed(index="3"),
               "[1]", changed(step=None), changed(num_tokens=math.nan), changed(num_prompt_messages=None)]  # fmt: skip
ODD_ROLLOUTS = [  # with what the table makes of them; the fourth has an example in its prompt
    (changed(turns=[turn("x", [("\ud83d", {})])]), {"tools": ["?"]}),  # half a character
    (changed(reward=math.nan, rewards={"a": math.inf, "b": 0.5}), {"reward": None, "rewards": {"a": None, "b": 0.5}}),
    (changed(messages=[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Where?"}]}],
             num_prompt_messages=1), {"prompt": "[image]\nWhere?"}),
    (changed(messages=[{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "I look. 2"},
                       *rows()[0]["messages"]], num_prompt_messages=4), {"prompt": "Where is the Louvre?"}),
    (changed(schema=2, colour="red", turns=[turn("x", mood="good")]), {"schema": 2}),  # of a newer version
]  # fmt: skip


def test_an_odd_row_hides_no_other(tmp_path):
    """What is no rollout is left out, with its last line that is cut off, and the page says how many rows that are."""
    lines = [each if isinstance(each, str) else json.dumps(each) for each in (rows()[0], *NO_ROLLOUTS, rows()[1])]
    lines += [json.dumps(each) for each, _ in ODD_ROLLOUTS]
    (tmp_path / LOG).write_text("\n".join([*lines, lines[0][:40]]))
    log = log_of(tmp_path)
    shown = log.table({})["rows"]
    notes = "\n".join(log.info()["notes"])
    assert len(shown) == 2 + len(ODD_ROLLOUTS) and log.refresh() == 0 and "1 rollouts are not of schema 1" in notes
    assert sum(map(int, re.findall(r"(\d+) rows that are no rollout", notes))) == len(NO_ROLLOUTS)
    for line, (_, columns) in zip(shown[2:], ODD_ROLLOUTS, strict=True):
        assert {column: line[column] for column in columns} == columns
    json.dumps([log.info(), *(log.rollout(line["id"]) for line in shown)], allow_nan=False)


def test_what_panels_show_and_leave_out(tmp_path):
    """To step 4, again from 2, and at 3 now. The evaluation at 4 is of the attempt that is gone, too. Numbers alone,
    by their short names; shares that stay near 0 are left out. Evaluations have a panel."""
    written = [{"step": step, "reward": value} for step, value in ((1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4))]
    written += [{"step": 2, "eval_reward": 2.0}, {"step": 4, "eval_reward": 4.0}, {"step": 3, "reward": 3.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written) + '{"step": 4, "rew')
    found = view_rollouts.read_metrics(tmp_path)
    assert [(row["step"], row.get("reward"), row.get("eval_reward")) for row in found] == [
        (1, 0.1, None), (2, None, 2.0), (2, 0.2, None), (3, 3.0, None)
    ]  # fmt: skip
    shares = {"stop/answered": 0.9, "stop/max_turns": 0.001, "rewards/calls/mean": 0.5, "rewards/calls/std": 0.1}
    logs = [{"step": n, "reward": n / 10, "rewards/match_reward_func/mean": math.nan, **shares} for n in (1, 2)]
    tests = {"eval_reward": 0.25, "eval_rewards/a_reward_func/mean": 0.75}, {"eval_hard_reward": 0.5}
    logs += [{"step": 2, **log} for log in ({"train_runtime": 3.0}, *tests)]
    write_metrics(write_log(tmp_path, rows()), logs)
    panels = view_rollouts.curves([view_rollouts.Run(tmp_path)])["panels"]
    assert [
        (each["title"], each["mode"], {line["label"]: line["points"] for line in each["lines"]}) for each in panels
    ] == [
        ("Rewards", "", {"total reward": [[1, 0.1], [2, 0.2]], "calls": [[1, 0.5], [2, 0.5]]}),
        ("Stop reasons", "", {"answered": [[1, 0.9], [2, 0.9]]}),
        ("Evaluation", "eval_", {"total reward": [[2, 0.25]], "hard: total reward": [[2, 0.5]], "a": [[2, 0.75]]}),
    ]


# -- the program --


@pytest.fixture
def served():
    """A function that serves folders from a thread of this process, as the program does; the address."""
    runners = []

    def serve(*folders):
        runners.append(runner := web.AppRunner(view_rollouts.Viewer(list(folders)).app()))

        async def start():
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            return runner.addresses[0][1]

        return f"http://127.0.0.1:{run_async(start(), 60)}"

    yield serve
    for runner in runners:
        run_async(runner.cleanup(), 60)


@pytest.mark.contract("viewer")
def test_the_server_answers_this_machine_alone(tmp_path):
    """The program, which ends by Ctrl+C without an error."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address, folder = f"http://127.0.0.1:{port}", write_log(tmp_path / "run", rows())
    command = [warm_python.executable(), "scripts/view_rollouts.py", folder, "--port", str(port)]
    program = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert "6 rollouts" in program.stdout.readline() and address in program.stdout.readline()
        assert ids(requests.get(f"{address}/api/rollouts/0?tool=search").json()["rows"]) == [1, 4]
        assert requests.get(f"{address}/api/rollout/0/4").json()["row"] == rows()[3]
        for path in ("rollouts/0?step_from=x", "rollouts/1", "rollout/0/99", "group/5/1", f"rollout/0/{'9' * 30}"):
            answer = requests.get(f"{address}/api/{path}")
            assert answer.status_code == 400 and answer.json()["error"]
        foreign = requests.get(f"{address}/api/info", headers={"Host": "evil.example"})
        assert foreign.status_code == 403 and "expected 127.0.0.1" in foreign.json()["error"]
        page = requests.get(address)
        assert page.headers["X-Content-Type-Options"] == "nosniff" and "Louvre" not in page.text
        others = {each[4][0] for each in socket.getaddrinfo(socket.gethostname(), None)} - {"127.0.0.1", "::1"}
        for other in others:
            with pytest.raises(OSError):
                socket.create_connection((other, port), timeout=2).close()
        program.send_signal(signal.SIGINT)
        assert program.wait(timeout=60) == 0 and program.stderr.read() == ""
    finally:
        program.kill()
        program.communicate()


# -- the page --


def table_ids(page):
    page.wait_for_selector("#count")
    return [int(link.get_attribute("href").split("/")[-1]) for link in page.query_selector_all("tbody a")]


def go(page, place):
    """Another view of the page; returns when it is there."""
    page.evaluate("document.querySelector('main').replaceChildren()")
    page.evaluate("place => { location.hash = place; }", place)
    page.wait_for_selector("main *", state="attached")


def until(page, expression):
    """Wait until JavaScript says true. (Playwright's own wait is against the policy of the page.)"""
    end = time.monotonic() + 30
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        time.sleep(0.05)


def paint(page, colour):
    page.click(f"button:has-text('{colour}')")
    page.wait_for_selector(f"button[aria-pressed=true]:has-text('{colour}')")


def one_page(folder, *more):
    path = Path(folder) / "page.html"
    view_rollouts.main([str(folder), *map(str, more), "--html", str(path)])
    return path.as_uri()


def test_filters_of_a_page(served, open_page, tmp_path, capsys):
    """One in a file filters by itself as the server does, which a served page asks."""
    folder = write_log(tmp_path / "run", rows())
    address = one_page(folder)
    assert re.search(r"page.html: .*: all 6 rollouts, \d+\.\d MB", capsys.readouterr().out)
    for page, cases in ((open_page(address), CASES), (open_page(served(folder)), CASES[::6])):
        go(page, "curves")
        for query, expected in cases:
            go(page, "rollouts?" + urlencode(query or {"limit": "50"}))
            assert table_ids(page) == expected, query


def test_a_rollout_cannot_bring_a_script(served, open_page, tmp_path):
    """Everything that is shown of a row holds tags, control characters and direction marks."""
    evil = row(0, 0, EVIL, [turn(EVIL, [(EVIL, {EVIL: EVIL})], [(EVIL, EVIL)], observation=EVIL, finish_reason=EVIL,
                                 token_ids=[1], token_texts=[EVIL], read_texts=[EVIL], read_ids=[2],
                                 loss_mask=[1], advantages=[1.0])],
               stop=EVIL, error=EVIL, answer=[EVIL], rewards={EVIL: 1.0}, mode=EVIL)  # fmt: skip
    folder = write_log(tmp_path / "<b>run", [evil, {**rows()[0], EVIL: 1}])
    write_metrics(folder, [{"step": 1, "reward": 1.0, f"rewards/{EVIL}/mean": 1.0}])
    for address in (one_page(folder), served(folder)):
        page = open_page(address)
        assert "default-src 'none'; script-src 'sha256-" in page.content()  # should text ever get in as HTML
        for place in ("curves", "rollouts", "rollout/0/1", "group/0/1"):
            go(page, place)
            if place == "group/0/1":
                assert page.inner_text(".group").count("<script>window.hit = 1</script>") >= 5
            for colour in ("none", "advantage") if place == "rollout/0/1" else ():
                paint(page, colour)
                assert page.inner_text("main").count("<script>window.hit = 1</script>") >= 5
            assert page.evaluate("[...document.querySelectorAll('main img, main script, header b')].length") == 0
            assert not set("\x00\x1b\u202e") & set(page.inner_text("body"))
        page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
        page.wait_for_timeout(200)
        assert page.evaluate("window.hit") is None
        assert "␛[31m␀⟨U+202E⟩" in page.inner_text("main")


@pytest.mark.contract("viewer")
def test_tokens_are_coloured(open_page, tmp_path):
    """One span per token with its numbers; the strongest has the full colour; what is out of the loss has none."""
    tokens = {
        "token_ids": [5, 6, 7], "token_texts": ["Pa", "\n", "ris"], "logprobs": [-0.5, -2.0, 0.0],
        "trainer_logprobs": [-0.5, -2.25, 0.0], "loss_mask": [1, 1, 0], "advantages": [2.0, -1.0, 9.0],
        "read_ids": [8], "read_texts": ["  "],
    }  # fmt: skip
    page = open_page(one_page(write_log(tmp_path, [row(0, 0, "?", [turn("Pa\nris", **tokens)])])) + "#rollout/0/1")

    def spans(colour):
        paint(page, colour)
        return page.evaluate(
            "[...document.querySelectorAll('.t')].map(t => [t.textContent, t.className, t.style.background, t.title])"
        )

    found = spans("advantage")
    assert [each[:2] for each in found] == [["Pa", "t"], ["↵\n", "t"], ["ris", "t out"], ["··", "t out"]]
    assert [each[2] for each in found] == ["rgba(0, 110, 230, 0.65)", "rgba(235, 125, 0, 0.325)", "", ""]
    numbers = "advantage +2.0000, logprob -0.5000, trainer's logprob -0.5000, difference 0.000000"
    assert found[0][3] == f"id 5, in the loss yes, {numbers}"
    assert found[2][3].startswith("id 7, in the loss no,") and "logprob 0.0000" in found[2][3]
    assert page.inner_text(".scale").split() == ["-2.00", "+2.00"]
    assert [each[2] for each in spans("logprob")] == ["rgba(150, 70, 220, 0.165)", "rgba(150, 70, 220, 0.65)", "", ""]
    assert page.inner_text(".scale").split() == ["-2.00", "0.00"]
    assert [each[2] for each in spans("difference")] == ["", "rgba(220, 40, 90, 0.65)", "", ""]
    assert page.inner_text(".scale").split() == ["-0.25", "+0.25"]
    assert spans("none") == [] and page.inner_text(".part.policy pre") == "Pa\nris"


@pytest.mark.contract("viewer")
def test_a_conversation_tells_its_parts_apart(open_page, tmp_path):
    page = open_page(one_page(write_log(tmp_path, rows())) + "#rollout/0/4")
    parts = page.evaluate("[...document.querySelectorAll('.part')].map(part => [part.className, part.innerText])")
    kinds = [kind.split()[1] for kind, _ in parts]
    assert kinds == ["given", "given", "policy", "call", "result", "error", "error"]
    text = " ".join(text for _, text in parts)
    for said in ("What is 19 - 3?", "turn 0", "advantage -1.00", "turn reward 0.10", "call calculator",
                 "expression\n19 - 3", "error: call", "mean logprob -0.50, lowest -1.00",
                 "policy versions 3 to 4"):  # fmt: skip
        assert said in text
    assert "exact 0.25, style - (before weights)" in page.inner_text("article")
    page.click("text=all fields")
    page.wait_for_selector("article > details pre")
    fields = page.inner_text("article > details pre")
    assert '"policy_version": 0' in fields and '"turn_rewards": [\n  0.1\n ]' in fields


def test_what_a_further_record_read_is_shown(open_page, tmp_path):
    """A turn of the main loop, one of a sub-agent with a prompt of its own, and the main loop again."""
    context = [{"role": "system", "content": "Sum up the zebra.", "more": None},
               {"role": "assistant", "content": "", "more": '{"tool_calls": []}'}]  # fmt: skip
    turns = [
        turn("one", record=0, after=None, context=None, tools='[{"name": "add"}]'),
        turn("two", record=1, after=None, context=context, tools=None),
        turn("three", record=0, after=0, context=None, tools=None),
    ]
    logged = [row(0, 0, "Main?", turns, records=2), row(0, 1, "Other?", [turn("x", context="odd")])]
    folder = write_log(tmp_path, logged)
    assert ids(log_of(folder).table({"text": "zebra"})["rows"]) == [1]
    page = open_page(one_page(folder) + "#rollout/0/1")
    read = page.evaluate("[...document.querySelectorAll('details')].map(each => each.textContent)")
    assert "tools that were offered" in read[1] and '[{"name": "add"}]' in read[1]
    assert "record 1: 2 messages that the model read before this turn" in read[2] and "Sum up the zebra." in read[2]
    turns = page.evaluate("[...document.querySelectorAll('.part.policy .who')].map(each => each.innerText)")
    assert ["record 0" in turns[0], "record 1" in turns[1], "continues turn 0" in turns[2]] == [True] * 3


def test_two_runs_are_compared(open_page, tmp_path):
    """The curves of both, and the rollouts of each."""
    for name, gain in (("first", 1), ("second", 2)):
        folder = write_log(tmp_path / name, rows()[: 2 + 2 * gain])
        write_metrics(folder, [{"step": step, "reward": gain * step} for step in (1, 2, 3)])
    page = open_page(one_page(tmp_path / "first", tmp_path / "second") + "#curves")
    page.wait_for_selector(".panel:has-text('Rewards') .curve")
    curves = page.locator(".panel:has-text('Rewards') .curve")
    assert [curves.nth(i).get_attribute("stroke-dasharray") for i in range(curves.count())] == [None, "5 3"]
    page.locator(".panel svg").first.focus()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    shown = page.locator(".readout").first.inner_text()
    assert shown == "step 2 (rollouts of step 1): first total reward 2, second total reward 4"
    page.keyboard.press("Enter")
    until(page, "location.hash === '#rollouts?step_from=1&step_to=1&mode=train'")
    go(page, "rollouts?run=1")
    assert table_ids(page) == [1, 2, 3, 4, 5, 6]
    page.select_option("select[name=run]", "0")
    until(page, "document.querySelector('#count').textContent.includes('of 4')")


def test_it_follows_a_running_job(served, open_page, tmp_path):
    """A page that was opened after the first steps shows the last ones without being asked."""
    folder = write_log(tmp_path / "out", rows())
    page = open_page(served(folder) + "#rollouts")
    until(page, "document.querySelector('#count').textContent.includes('of 6')")
    write_log(folder, [{**each, "step": 2} for each in rows()[:2]], fresh=False)
    until(page, "document.querySelector('#count').textContent.includes('of 8')")
    assert "8 rollouts, step 0 to 2" in page.inner_text("#total")
    go(page, "group")
    assert page.locator(".group thead a").count() == 2 and page.inner_text("main > h2").startswith("step 2:")
    write_log(folder, [{**each, "step": 3} for each in rows()[:2]], fresh=False)
    until(page, "document.querySelector('main > h2').textContent.startsWith('step 3:')")  # the newest group


def group_line(page, head):
    """The texts of a line of the table of a group."""
    line = "[...document.querySelectorAll('.group tr')].find(tr => tr.cells[0].textContent === head)"
    return page.evaluate(f"head => [...{line}.cells].slice(1).map(cell => cell.textContent)", head)


@pytest.mark.contract("viewer")
def test_the_page_opens_on_the_newest_group(served, open_page, tmp_path):
    """Its turns are cells with calls, results and answers; one chooses step and prompt; a click opens a turn."""
    called = [turn("I look.", [("search", {"query": "dish"})], [("A dish.", None)]), turn("Paris", answer="Paris")]
    folder = write_log(tmp_path / "run", [*rows()[:4], row(0, 4, "Long?", [turn("w " * 999)] * 9), *rows()[4:]])
    write_log(folder, [row(1, 2, "Where?", called, 1.0), row(1, 0, "Held out?", called, mode="eval")], fresh=False)
    for address in (one_page(folder), served(folder)):
        page = open_page(address)
        page.wait_for_selector(".group")
        assert "step 1: 2 rollouts" in page.inner_text("main") and group_line(page, "error") == ["", "it broke"]
        page.select_option("select[name=prompt]", label="group 1: Where?")
        until(page, "document.querySelector('.group thead a').textContent === 'rollout 2'")
        assert group_line(page, "turn 0") == ["searchquery: dish→ A dish.+1.00"]
        assert group_line(page, "turn 1") == ["answer: Paris+1.00"]
        assert group_line(page, "exact") == group_line(page, "total reward") == ["1.00"]
        assert group_line(page, "turn rewards") == ["0.10, 0.10"]
        page.select_option("select[name=step]", label="step 1, eval")
        until(page, "document.querySelector('main > h2').textContent.startsWith('step 1, eval: 1 rollout,')")
        page.select_option("select[name=step]", label="step 0")
        until(page, "document.querySelector('select[name=prompt]').options.length === 3")
        page.select_option("select[name=prompt]", label="group 2: Long?")
        page.click(".group tbody a >> nth=7")
        page.wait_for_selector("article h2:has-text('step 0, rollout 4')")
        until(page, "location.hash.endsWith('?turn=7') && scrollY > 900")


# -- images --


def with_images(folder):
    """A rollout that reads one image in its prompt and one in a result, and whose policy writes the name of one."""
    names = ["3f2a0c9d11e4", "00112233aabb"]
    (folder / "images").mkdir(parents=True)
    for k, name in enumerate(names):
        Image.new("RGB", (40 + k, 20), (200, 40 * k, 0)).save(folder / f"images/{name}.png")
    turns = [
        turn(f"<image {names[1]}>", [("zoom", {})], [(f"Corner: <image {names[1]}>.", None)]),
        turn("<image ffffffffffff>"),
    ]
    logged = row(0, 0, f"<image {names[0]}>Which digit?", turns)
    logged["images"] = [{"name": name, "width": 40 + k, "height": 20, "tokens": 4} for k, name in enumerate(names)]
    return write_log(folder, [logged, row(0, 1, "<image 3f2a0c9d11e4>?", [turn("x")])]), names


SHOWN = """[...document.querySelectorAll('.part')].map(part => [part.className.split(' ')[1],
    ...[...part.querySelectorAll('img')].map(image => [image.alt, image.naturalWidth])])"""


def test_images_are_shown_where_they_were_read(served, open_page, tmp_path):
    """In a page of one file and in a served one; what the policy wrote, and what no image is known of, is text."""
    folder, names = with_images(tmp_path / "run")
    words = [f"image {name}, {40 + k} x 20 pixels, 4 tokens" for k, name in enumerate(names)]
    expected = [["given"], ["given", [words[0], 40]], ["policy"], ["call"], ["result", [words[1], 41]], ["policy"]]
    for address in (one_page(folder), served(folder)):
        page = open_page(address + "#rollout/0/1?colour=none")
        until(page, "[...document.querySelectorAll('img')].every(image => image.complete && image.naturalWidth)")
        assert page.evaluate(SHOWN) == expected
        go(page, "rollout/0/2")  # of a log that has no images
        assert page.evaluate("document.querySelectorAll('img').length") == 0
        assert "<image 3f2a0c9d11e4>?" in page.inner_text("article")
    good = requests.get(f"{address}/api/image/0/{names[0]}")
    assert good.status_code == 200 and good.headers["Content-Type"] == "image/png"
    assert good.content == (folder / f"images/{names[0]}.png").read_bytes()
    for path in (f"0/{'0' * 12}", f"7/{names[0]}", "0/..%2F..%2Fsecret", f"0/{names[0]}.png"):
        assert requests.get(f"{address}/api/image/{path}").status_code in (404, 400)
