"""/v1/responses: references, namespaces, custom tools, OpenAI's own tools, streams; and models that are not policy."""

import json

import pytest
from scripted import hermes_call
from test_agents import CALL, FLAT, TOKENIZER, ask, ids, post, respond, run, user
from test_anthropic import with_template

from mt_grpo.training.batch import trained_records

SPACE = {"type": "namespace", "name": "sums", "description": "Sums.", "tools": [FLAT]}
SHELL = {"type": "custom", "name": "shell", "description": "Run a line."}
THINKS = "<think>Hm.</think>"
ASKS = "<|im_start|>assistant\n"
SUM, LINE = hermes_call("sums__add", a=1, b="x y"), hermes_call("shell", input="ls -l\n")


def outputs(said, text="2"):
    """A result for each call of a response."""
    return [
        {"type": f"{item.type}_output", "call_id": item.call_id, "output": text}
        for item in said.output if item.type.endswith("call")
    ]  # fmt: skip


def reference(item):
    return {"type": "item_reference", "id": item.id}


def plain(item):
    """An item as the client gives it, without its id, as a program that stores nothing sends it."""
    return {key: value for key, value in item.to_dict().items() if key != "id"}


SENT = {
    "whole": lambda item: item.to_dict(),
    "without ids": plain,
    "references": reference,
    "references without a type": lambda item: {"id": item.id},
    "the ids of texts": lambda item: item.to_dict() if item.type == "message" else plain(item),
    "the ids of reasoning": lambda item: item.to_dict() if item.type == "reasoning" else plain(item),
}
TURN = f"{THINKS}Now.\n{CALL}\n{SUM}\n{LINE}"


@pytest.mark.contract("OpenAI Responses API")
@pytest.mark.program("openai")
@pytest.mark.parametrize("way_back", [*SENT, "by id"])
def test_what_was_answered_goes_on_however_it_is_told(way_back):
    """Text, reasoning, calls of functions, of a namespace and of a custom tool, token for token."""

    async def agent(row, client):
        options = {"instructions": "Be brief.", "tools": [FLAT, SPACE, SHELL]}
        items, previous = [{"role": "user", "content": "Add."}], {}
        for number in range(2):
            said = await respond(client, items, **previous, **options)
            assert [item.type for item in said.output] == [
                "reasoning", "message", "function_call", "function_call", "custom_tool_call",
            ]  # fmt: skip
            function, of_space, line = said.output[2:]
            assert (function.name, function.namespace) == ("add", None)
            assert (of_space.name, of_space.namespace) == ("add", "sums") and line.input == "ls -l\n"
            if way_back == "by id":
                items, previous = outputs(said, str(number)), {"previous_response_id": said.id}
            else:
                items += [*map(SENT[way_back], said.output), *outputs(said, str(number))]
        client.reward(0.5, answer=said)
        return float((await respond(client, items, **previous, **options)).output_text == "Done.")

    rollout, _ = run(agent, TURN, TURN, "Done.", max_completion_length=2000, max_model_len=4000)
    assert rollout.reward == 1.0
    assert [record.numbers for record in rollout.records] == [[0, 1, 2]]
    assert [[each.text for each in turn.results] for turn in rollout.turns] == [["0"] * 3, ["1"] * 3, []]
    assert [turn.reward for turn in rollout.turns] == [None, 0.5, None]
    result = "<tool_response>\n{}\n</tool_response>"
    between = [f"\n<|im_start|>user\n{chr(10).join([result.format(k)] * 3)}<|im_end|>\n{ASKS}" for k in "01"]
    turns = [[*ids(turn), TOKENIZER.eos_token_id] for turn in (TURN, TURN, "Done.")]
    assert rollout.completion_ids == turns[0] + ids(between[0]) + turns[1] + ids(between[1]) + turns[2]


@pytest.mark.parametrize("with_ids", [(), (1,), (0, 2)])
def test_calls_between_whose_results_are_of_one_answer_whichever_have_ids(with_ids):
    """By the calls' own ids. A call that is there once more is another one."""

    async def agent(row, client):
        said = await respond(client, "a", tools=[FLAT])
        items = [item.to_dict() if k in with_ids else plain(item) for k, item in enumerate(said.output)]
        results = outputs(said)
        between = [each for pair in zip(items, results, strict=True) for each in pair]
        await respond(client, [user("a"), *between], tools=[FLAT])
        again = [*between, plain(said.output[0]), results[0]]
        await respond(client, [user("a"), *again, user("b")], tools=[FLAT])

    rollout, llm = run(agent, f"{CALL}\n{CALL}\n{CALL}", "2", "3", max_completion_length=2000)
    assert [record.numbers for record in rollout.records] == [[0, 1], [2]]
    shown = [TOKENIZER.decode(prompt).split(ASKS)[1:-1] for prompt, _ in llm.asked]
    assert [len(each) for each in shown] == [0, 1, 2]  # the messages of the assistant
    assert [text.count("<tool_call>") for text in shown[2]] == [3, 1]


def test_reasoning_is_kept_where_a_record_begins():
    """By reference and by the response's id, as where it is sent whole."""

    async def agent(row, client):
        first = await respond(client, "a", instructions="A.", tools=[FLAT])
        start, end = user("a"), outputs(first)
        for way in (
            {"input": end, "previous_response_id": first.id}, {"input": [start, *map(reference, first.output), *end]},
            {"input": [start, *first.output, *end]},
        ):  # fmt: skip
            await client.responses.create(model="policy", instructions="B.", tools=[FLAT], **way)

    qwen = {"tokenizer": with_template("qwen3"), "max_completion_length": 3000}
    rollout, llm = run(agent, f"{THINKS}Now.\n{CALL}", "2", **qwen)
    read = [TOKENIZER.decode(prompt) for prompt, _ in llm.asked[1:]]
    assert len(set(read)) == 1 and "<think>\nHm.\n</think>" in read[0] and "A." not in read[0], read


def test_what_cannot_be_served_is_refused_and_no_answer_is_read_twice():
    """Neither behind its own id nor as an item that is sent twice."""

    async def agent(row, client):
        said = await respond(client, "a", tools=[FLAT])
        item = said.output[0]
        behind = {"input": [item.to_dict(), user("b")], "previous_response_id": said.id}
        for more in (behind, {"input": [user("a"), reference(item), item.to_dict()]}):
            answer = await post(client, {"model": "policy", **more}, "responses")
            assert answer.status_code == 400 and "Duplicate item" in answer.json()["error"]["message"], answer.text

    run(agent, "It is 2.")

    async def agent(row, client):
        for change, param in REFUSED:
            answer = await post(client, {"model": "policy", "input": "a", **change}, "responses")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        await respond(client, "a")

    assert len(run(agent, "1")[0].turns) == 1


def test_what_another_conversation_was_answered_is_refused():
    """Its ids name it: `resp_...` of one rollout is not taken for that of the other at the same place."""
    seen = {}

    async def first(row, client):
        seen["said"] = await respond(client, "a", tools=[FLAT])

    async def second(row, client):
        said, own = seen["said"], await respond(client, "a", tools=[FLAT])
        bodies = [{"input": "b", "previous_response_id": said.id}, {"input": [{"type": "item_reference", "id": "x"}]}]
        for body in (*bodies, *({"input": [reference(item)]} for item in said.output)):
            answer = await post(client, {"model": "policy", **body}, "responses")
            assert answer.status_code in (400, 404) and "not found" in answer.json()["error"]["message"], answer.text
        with pytest.raises(ValueError, match="no trained answer"):
            client.reward(1.0, answer=said)
        client.reward(0.25, answer=own)
        # Whole items are what they say, whoever said it.
        await respond(client, [user("a"), *said.output, user("b")])

    run(first, f"{THINKS}Now.\n{CALL}")
    rollout, _ = run(second, f"{THINKS}Now.\n{CALL}", "2", max_completion_length=2000)
    assert [turn.reward for turn in rollout.turns] == [0.25, None]
    assert [record.numbers for record in rollout.records] == [[0], [1]]


def test_arguments_that_are_no_text_for_a_custom_tool_come_back_as_they_were():
    """The program gets them as its text, as from vLLM, and what it sends is known for what was sampled."""
    odd = hermes_call("shell", command="ls")

    async def agent(row, client):
        said = await respond(client, "a", tools=[SHELL])
        (line,) = said.output
        assert (line.type, json.loads(line.input)) == ("custom_tool_call", {"command": "ls"})
        await respond(client, [user("a"), plain(line), *outputs(said)], tools=[SHELL])
        changed = {**plain(line), "input": "other"}
        await respond(client, [user("a"), changed, *outputs(said)], tools=[SHELL])

    rollout, llm = run(agent, odd, "2")
    assert [record.numbers for record in rollout.records] == [[0, 1], [2]]
    assert '"arguments": {"input": "other"}' in TOKENIZER.decode(llm.asked[2][0])


OF_OPENAI = [
    {"type": "web_search"}, {"type": "web_search_preview_2025_03_11"}, {"type": "file_search"}, {"type": "mcp"},
    {"type": "local_shell"}, {"type": "apply_patch"}, {"type": "tool_search"},
]  # fmt: skip


def test_tools_of_openais_servers_are_left_out_and_told_once(caplog, monkeypatch):
    monkeypatch.setattr("mt_grpo.base.errors._told", set())

    async def agent(row, client):
        for _ in range(2):
            said = await respond(client, "Add.", tools=[*OF_OPENAI, FLAT])
            assert [item.type for item in said.output] == ["function_call"]
        alone = await respond(client, "Add.", tools=OF_OPENAI)
        assert alone.output_text == CALL  # without a tool nothing is a call
        await respond(client, "Add.", tools=[{**SPACE, "tools": [FLAT, {"type": "web_search"}, SHELL]}])

    rollout, llm = run(agent, CALL, max_completion_length=2000)
    read = [TOKENIZER.decode(prompt) for prompt, _ in llm.asked]
    assert [text.count('"name"') for text in read] == [1, 1, 0, 1] and '"sums__add"' in read[3]
    assert "<tools>" not in read[2] and not any(tool["type"] in read[0] for tool in OF_OPENAI)
    assert len([line for line in caplog.messages if "An agent offered a tool" in line]) == len(OF_OPENAI) + 1


REFUSED = [  # a change of a request, and the parameter that the error names
    ({"tools": [SPACE, {**FLAT, "name": "sums__add"}]}, "tools"),
    ({"background": True}, "background"),
    ({"input": [{"type": "web_search_call", "id": "w"}]}, "input[0]"),
    ({"input": [{"type": "reasoning", "encrypted_content": "g"}]}, "input[0].encrypted_content"),
]


CALLED = {"type": "function_call", "call_id": "a", "name": "add", "arguments": '{"a": 1, "b": "x"}'}
CONVERSATIONS = {
    "text": {"input": "a"},
    "instructions": {"instructions": "Be brief.", "input": [user("a")]},
    "a developer": {"input": [{"role": "developer", "content": "Be brief."}, user("a")]},
    "an answer": {"input": [user("a"), {"role": "assistant", "content": "b"}, user("c")]},
    "two answers": {"input": [
        user("a"), {"role": "assistant", "content": "b"}, {"role": "assistant", "content": "c"}, user("d")]},
    "functions": {"input": "a", "tools": [FLAT, {"type": "function", "name": "bare", "parameters": None}]},
    "a strict function": {"input": "a", "tools": [{**FLAT, "strict": True}]},
    "a namespace": {"input": "a", "tools": [SPACE, FLAT]},
    "a custom tool": {"input": "a", "tools": [SHELL]},
    "tools of OpenAI's": {"input": "a", "tools": [{"type": "web_search"}, FLAT]},
    "a call": {"tools": [FLAT], "input": [
        user("a"), CALLED, {"type": "function_call_output", "call_id": "a", "output": "2"}]},
    "a call of a namespace": {"tools": [SPACE], "input": [
        user("a"), {**CALLED, "namespace": "sums"}, {"type": "function_call_output", "call_id": "a", "output": "2"}]},
    "a call of a custom tool": {"tools": [SHELL], "input": [
        user("a"), {"type": "custom_tool_call", "call_id": "a", "name": "shell", "input": "ls \"é\"\n"},
        {"type": "custom_tool_call_output", "call_id": "a", "output": "2"}]},
    "reasoning, text and calls": {"tools": [FLAT], "input": [
        user("a"), {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Now."}]}, CALLED,
        {**CALLED, "call_id": "b"}, {"type": "function_call_output", "call_id": "a", "output": "2"},
        {"type": "function_call_output", "call_id": "b", "output": "3"}]},
    "reasoning twice": {"input": [
        user("a"), {"type": "reasoning", "summary": [{"type": "summary_text", "text": "A."}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "B."}]},
        {"role": "assistant", "content": "c"}, user("d")]},
}  # fmt: skip


def test_the_events_of_a_stream():
    """In their order, with their numbers; what they add up to is the answer."""
    seen = {}

    async def agent(row, client):
        body = {"model": "policy", "input": "a", "tools": [FLAT, SPACE, SHELL], "stream": True}
        answer = await post(client, body, "responses")
        lines = [event.split("\n") for event in answer.text.strip().split("\n\n")]
        seen["events"] = [json.loads(data.removeprefix("data: ")) for _, data in lines]
        assert [name for name, _ in lines] == [f"event: {event['type']}" for event in seen["events"]]

    rollout, _ = run(agent, TURN, max_completion_length=2000)
    part = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]
    inner = [[each.format(f"{kind}_text") for each in part] for kind in ("reasoning", "output")]
    inner += 2 * [["function_call_arguments.delta", "function_call_arguments.done"]]
    inner += [["custom_tool_call_input.delta", "custom_tool_call_input.done"]]
    expected = ["created", "in_progress"]
    for each in inner:
        expected += ["output_item.added", *each, "output_item.done"]
    events = seen["events"]
    assert [event["type"] for event in events] == [f"response.{name}" for name in [*expected, "completed"]]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    done = events[-1]["response"]["output"]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == done
    deltas = [event["delta"] for event in events if event["type"].endswith(".delta")]
    assert deltas == ["Hm.", "Now.", *[call.get("arguments", call.get("input")) for call in done[2:]]]


def test_equal_texts_go_on_once_each_where_thinking_is_never_sent():
    """By chat, of which a program that drops thinking says nothing of what was thought."""

    async def agent(row, client):
        for _ in range(2):
            await ask(client, [user("a")])
        for _ in range(2):
            await ask(client, [user("a"), {"role": "assistant", "content": "Now."}, user("b")])

    rollout, _ = run(agent, "<think>A</think>Now.", "Now.", "1", "2")
    assert all(turn.went_on for turn in rollout.turns[:2]), [record.numbers for record in rollout.records]


@pytest.mark.parametrize("first, then, records", [
    (["policy-frozen", "policy"], ["policy-frozen", "policy"], [[1, 3]]),
    (["policy-frozen", "policy"], ["policy", "policy-frozen"], [[1, 2]]),
    (["policy", "policy-frozen"], ["policy-frozen", "policy"], [[0, 3]]),
    (["policy"], ["policy-frozen", "policy"], [[0, 2]]),
])  # fmt: skip
def test_the_policy_goes_on_from_its_own_answer_and_keeps_its_record(first, then, records):
    """Of equal texts of both models; and where the other one repeats the policy's conversation first."""

    async def agent(row, client):
        messages = [user("a")]
        for model in first:
            await client.chat.completions.create(model=model, messages=messages)
        messages += [{"role": "assistant", "content": "4"}, user("b")]
        for model in then:
            await client.chat.completions.create(model=model, messages=messages)

    rollout, _ = run(agent, *["4"] * len(first), "5", "6")
    assert [turn.trained for turn in rollout.turns] == [model == "policy" for model in [*first, *then]]
    assert [record.numbers for record in trained_records(rollout)] == records
