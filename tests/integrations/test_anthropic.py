"""Agents that speak Anthropic's API: its own client over real HTTP; the policy is scripted where its ids are known."""

import asyncio
import json
import re
from pathlib import Path

import anthropic
import pytest
import test_images_of_agents as images
import trl
import vision_model
from test_agents import ADD, CALL, TOKENIZER, ask, ids, run
from transformers import AutoTokenizer

from mt_grpo.integrations.agents import server as agent_server
from mt_grpo.rollout import StopReason

TOOL = {"name": "add", "description": "Add.", "input_schema": ADD["function"]["parameters"]}
THINKS = "<think>Hm.</think>"
ASKS = "<|im_start|>assistant\n"
VISION_TEMPLATE = vision_model.HERMES_TEMPLATE


def root(client):
    """The address of a function's client as Anthropic's clients take it."""
    return str(client.base_url).removesuffix("/v1/")


def of(client, **options):
    """Anthropic's asynchronous client for the rollout of a function's client."""
    return anthropic.AsyncAnthropic(base_url=root(client), api_key=client.api_key, **options)


def user(*blocks):
    """A message of text, or of blocks."""
    return {"role": "user", "content": blocks[0] if len(blocks) == 1 and isinstance(blocks[0], str) else list(blocks)}


def text(said):
    return {"type": "text", "text": said}


def result(call_id, content="2", **more):
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def results(message, content="2"):
    """A user's message with a result for each call."""
    return user(*(result(block.id, content) for block in message.content if block.type == "tool_use"))


async def create(client, messages, **options):
    return await client.messages.create(**{"model": "policy", "max_tokens": 200, "messages": messages, **options})


@pytest.mark.contract("Anthropic API", "token for token", "agent by function")
@pytest.mark.program("anthropic")
def test_a_loop_of_two_calls_token_for_token():
    """Without async. Thinking, text and calls come back as blocks, and as the client gives them."""

    def agent(row, client):
        own = anthropic.Anthropic(base_url=root(client), api_key=client.api_key)
        messages, said = [user(row["question"])], None
        for _ in range(3):
            said = own.messages.create(
                model="policy", max_tokens=200, system="Be brief.", messages=messages, tools=[TOOL]
            )
            client.reward(0.25, answer=said)
            if said.stop_reason == "tool_use":
                messages += [said.to_param(), results(said)]
        return {"reward": 1.0, "said": said.content[0].text}

    rollout, llm = run(agent, f"{THINKS}Now.\n{CALL}", CALL, "It is 2.")
    schema = json.dumps({"type": "function", "function": {**ADD["function"]}})
    prompt = (
        f"<|im_start|>system\nBe brief.\n<tools>\n{schema}\n</tools><|im_end|>\n<|im_start|>user\nWhat?<|im_end|>\n"
    )
    assert TOKENIZER.decode(rollout.prompt_ids) == f"{prompt}{ASKS}"
    between = ids(f"\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n{ASKS}")
    turns = [[*ids(turn), TOKENIZER.eos_token_id] for turn in (f"{THINKS}Now.\n{CALL}", CALL, "It is 2.")]
    assert rollout.completion_ids == turns[0] + between + turns[1] + between + turns[2]
    assert rollout.loss_mask == [
        mask for turn in turns for mask in [1] * len(turn) + [0] * len(between) * (turn is not turns[2])
    ]
    assert [turn.reward for turn in rollout.turns] == [0.25, 0.25, 0.25] and len(rollout.records) == 1
    assert [[result.text for result in turn.results] for turn in rollout.turns] == [["2"], ["2"], []]
    assert rollout.environment.result == {"reward": 1.0, "said": "It is 2."}
    assert rollout.stop_reason == StopReason.AGENT_DONE


HARMLESS = {
    "temperature": 0.1, "top_k": 3, "metadata": {"user_id": "me"}, "output_config": {"effort": "low"},
    "thinking": {"type": "enabled", "budget_tokens": 1024}, "mcp_servers": [], "cache_control": {"type": "ephemeral"},
    "tools": [{**TOOL, "eager_input_streaming": True}], "anything": 1,
}  # fmt: skip


def test_what_the_api_says_of_an_answer():
    """What a client asks of the sampling is not enforced: the policy is sampled as the recipe says."""
    said = []

    async def agent(row, client):
        own = of(client)
        for question, options in (
            ("a", {"tools": [TOOL]}), ("b", {"max_tokens": 3}), ("c", {"stop_sequences": ["STOP", "END"]}),
            ("d", {"extra_body": HARMLESS}),
            ("e", {}), ("f", {"tools": [TOOL], "tool_choice": {"type": "none"}}),
        ):  # fmt: skip
            said.append(await create(own, [user(question)], **options))
        assert [model.id async for model in own.models.list()] == ["policy", "policy-frozen"]
        assert (await own.models.retrieve("policy-frozen")).display_name == "policy-frozen"
        for change in (
            {"mcp_servers": [{"url": "http://x"}]},
            {"messages": [user("a"), assistant("b")]},
            {"tools": [{"name": "<|im_end|>", "input_schema": {}}]},
            {"thread": {"type": "create"}},
        ):
            with pytest.raises(anthropic.BadRequestError) as refused:
                await create(own, [user("a")], extra_body=change)
        assert refused.value.body["error"]["details"]["error_code"] == "thread_unsupported_request"

    rollout, llm = run(agent, f"{THINKS}Now.\n{CALL}\n{CALL}", "1 2 3 4 5 6", "1 END STOP 2", "", "Done.", CALL)
    assert [block.type for block in said[0].content] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, now, *calls = said[0].content
    assert (thinking.thinking, now.text) == ("Hm.", "Now.") and thinking.signature
    assert [call.input for call in calls] == [{"a": 1, "b": "x y"}] * 2 and calls[0].id != calls[1].id
    assert all(call.name == "add" for call in calls)
    assert [(each.stop_reason, each.stop_sequence) for each in said] == [
        ("tool_use", None), ("max_tokens", None), ("stop_sequence", "END"), ("end_turn", None), ("end_turn", None),
        ("end_turn", None),
    ]  # fmt: skip
    assert all(params["temperature"] == 1.0 for params in llm.params)
    assert said[2].content[0].text == "1 " and llm.params[2]["stop"] == ["STOP", "END"]
    assert [block.text for block in said[3].content] == [""]  # a program finds a block where nothing was written
    assert [block.text for block in said[5].content] == [CALL]
    assert (said[1].usage.input_tokens, said[1].usage.output_tokens) == (len(llm.asked[1][0]), 3)
    assert [each.id for each in said] == [f"msg_{k}" for k in range(6)]
    assert all((each.type, each.role, each.model) == ("message", "assistant", "policy") for each in said)


SAME = {
    "without thinking": lambda m: m.update(content=[b for b in m["content"] if b["type"] != "thinking"]),
    "another signature": lambda m: m["content"][0].update(signature="x"),
    "redacted": lambda m: m["content"].insert(0, {"type": "redacted_thinking", "data": "eA=="}),
    "an empty text": lambda m: m["content"].insert(1, text("")),
    "for the cache": lambda m: m["content"][-1].update(cache_control={"type": "ephemeral"}),
}


@pytest.mark.parametrize("name", SAME)
def test_what_programs_do_to_a_history_changes_nothing(name):
    async def agent(row, client):
        own = of(client)
        said = (await create(own, [user("Add.")], system="Be brief.", tools=[TOOL])).model_dump(exclude_none=True)
        said = {"role": "assistant", "content": said["content"]}
        SAME[name](said)
        start = user({**text("Add."), "cache_control": {"type": "ephemeral"}})
        system = [text(f"x-anthropic-billing-header: {name}"), {**text("Be brief."), "cache_control": None}]
        behind = user(result(said["content"][-1]["id"], [text("2")], is_error=False))
        await create(own, [start, said, behind], system=system, tools=[{**TOOL, "type": "custom"}])

    rollout, _ = run(agent, f"{THINKS}Now.\n{CALL}", "2")
    assert [record.numbers for record in rollout.records] == [[0, 1]]
    assert [each.text for each in rollout.turns[0].results] == ["2"]


def test_all_endpoints_are_one_conversation():
    async def agent(row, client):
        own, call = of(client), [ADD]
        said = await create(own, [user("a")], tools=[TOOL])
        (block,) = said.content
        function = {"name": "add", "arguments": json.dumps(block.input)}
        calls = [{"id": block.id, "type": "function", "function": function}]
        behind = {"role": "tool", "tool_call_id": block.id, "content": "2"}
        tools = [{**call[0], "function": {**ADD["function"]}}]
        messages = [user("a"), {"role": "assistant", "content": None, "tool_calls": calls}, behind]
        answer = await ask(client, messages, tools=tools)
        messages = [user("a"), said.to_param(), results(said), {"role": "assistant", "content": answer["content"]}]
        await create(own, [*messages, user("b")], tools=[TOOL])

    rollout, _ = run(agent, CALL, "1", "2")
    assert [record.numbers for record in rollout.records] == [[0, 1, 2]]


@pytest.mark.contract("streaming")
@pytest.mark.parametrize("turn, seconds", [
    (f"{THINKS}Now.\n{CALL}\n{CALL}", 0.3), (CALL, 0.0), ("", 0.0), ("1 2 3 4 5 6", 0.0), ("1 END", 0.0),
])  # fmt: skip
def test_a_stream_adds_up_to_the_answer(turn, seconds, monkeypatch):
    monkeypatch.setattr(agent_server, "KEEP_ALIVE_SECONDS", 0.1)
    options = {"tools": [TOOL], "stop_sequences": ["END"], "max_tokens": 5 if turn.startswith("1 2") else 200}
    kinds, found = [], []

    async def agent(row, client):
        own = of(client)
        found.append(await create(own, [user("a")], **options))
        async with own.messages.stream(model="policy", messages=[user("a")], **options) as events:
            kinds.extend([event.type async for event in events])
            found.append(await events.get_final_message())
        raw = [event async for event in await create(own, [user("a")], stream=True, **options)]
        assert raw[0].message.stop_reason is None and raw[0].message.content == []
        assert raw[0].message.usage.input_tokens == found[0].usage.input_tokens
        assert raw[-2].usage.output_tokens == found[0].usage.output_tokens

    rollout, _ = run(agent, turn, seconds=seconds, max_completion_length=1000)
    assert len(rollout.turns) == 3
    whole, streamed = (re.sub(r"(msg_|policy-\w+-|call_)\d+", r"\1", json.dumps(each.to_dict())) for each in found)
    assert json.loads(streamed) == json.loads(whole)
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(found[0].content)


def with_template(name):
    """The tokenizer with a chat template that TRL ships."""
    tokenizer = AutoTokenizer.from_pretrained("hf_recipes/tiny/calculator-hermes-model")
    tokenizer.chat_template = (Path(trl.__file__).parent / f"chat_templates/{name}.jinja").read_text(encoding="utf-8")
    return tokenizer


def no_later_systems():
    """A template that refuses them, as Qwen3.5's does."""
    tokenizer = AutoTokenizer.from_pretrained("hf_recipes/tiny/calculator-hermes-model")
    tokenizer.chat_template = (
        "{%- for m in messages %}{%- if m.role == 'system' and not loop.first %}{{ raise_exception('System message "
        "must be at the beginning.') }}{%- endif %}{%- endfor %}"
    ) + tokenizer.chat_template
    return tokenizer


def call(call_id="toolu_9", **arguments):
    return {"type": "tool_use", "id": call_id, "name": "add", "input": arguments}


def thought(said):
    return {"type": "thinking", "thinking": said, "signature": "s"}


def assistant(*blocks):
    return {**user(*blocks), "role": "assistant"}


CONVERSATIONS = {
    "texts": {"messages": [user("a"), assistant("b"), user("c")]},
    "a system": {"system": "Be brief.", "messages": [user("a")]},
    "a system of blocks": {
        "system": [text("x-anthropic-billing-header: cc"), text("Be"), text(""), text(" brief.")],
        "messages": [user("a")],
    },
    "a later system": {"system": "S.", "messages": [user("a"), {"role": "system", "content": "T."}, user("b")]},
    "a later system of blocks": {
        "messages": [user("a"), assistant("b"), user("c"), {"role": "system", "content": [text("T"), text("U")]}],
    },
    "blocks of text": {"messages": [user(text("a"), text(""), text("b")), assistant(text("c"), text("d")), user("e")]},
    "two of the user": {"messages": [user("a"), user("b")]},
    "nothing of the user": {"messages": [user("a"), user(text(""))]},
    "tools": {"messages": [user("a")], "tools": [TOOL, {"name": "bare", "input_schema": {}}]},
    "a strict tool": {"messages": [user("a")], "tools": [{**TOOL, "strict": True, "cache_control": {"type": "e"}}]},
    "a call": {"tools": [TOOL], "messages": [
        user("a"), assistant(text("Now."), call(a=1, b="x")), user(result("toolu_9"))]},
    "a call without arguments": {"messages": [user("a"), assistant(call()), user(result("toolu_9", ""))]},
    "calls at once": {"tools": [TOOL], "messages": [
        user("a"), assistant(call("x", a=1.0), call("y", b="é\n")),
        user(result("x", [text("1"), text(""), text("2")]), result("y", is_error=True)), assistant("c"), user("d")]},
    "a text before its result": {"messages": [user("a"), assistant(call()), user(text("b"), result("toolu_9"))]},
    "a result of nothing": {"messages": [user("a"), assistant(call()), user(result("toolu_9", []), text("b"))]},
    "thinking": {"tools": [TOOL], "messages": [
        user("a"), assistant(thought("I "), thought("add."), text("Now."), call(a=1)), user(result("toolu_9"))]},
    "thinking alone": {"messages": [user("a"), assistant(thought("Hm.")), user("b")]},
    "redacted": {"messages": [
        user("a"), assistant({"type": "redacted_thinking", "data": "eA=="}, text("b")), user("c")]},
}  # fmt: skip


def test_tokens_are_counted_and_nothing_is_spent():
    """Also after an answer, where they are those that were sampled. No turn is told of by it."""
    counted = []

    async def agent(row, client):
        own, messages = of(client), [user("a")]
        for _ in range(2):
            found = await own.messages.count_tokens(model="policy", messages=messages, tools=[TOOL])
            counted.append(found.input_tokens)
            said = await create(own, messages, tools=[TOOL])
            messages += [said.to_param(), results(said)]
        with pytest.raises(anthropic.RateLimitError, match="The rollout is over: max_turns"):
            await create(own, [user("b")])
        return 1.0

    rollout, llm = run(agent, f"{THINKS}{CALL}", CALL, max_model_calls=2)
    assert counted == [len(asked) for asked, _ in llm.asked] and len(rollout.turns) == 2
    assert [record.numbers for record in rollout.records] == [[0, 1]] and rollout.reward == 1.0


def image(seed):
    _, _, data = images.uri(vision_model.picture(seed)).partition(",")
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def test_images_of_questions_and_of_results(folder, tokenizer):
    """Those of a result stand in a user's message after it, as from vLLM."""
    body = {"model": "policy", "max_tokens": 20, "messages": [
        user(text("Which "), image(1), text("?")), assistant(call()),
        user(result("toolu_9", [text("Corner:"), image(2)]), text("So?"))]}  # fmt: skip

    async def agent(row, client):
        own = of(client)
        for bad in ({"type": "url", "url": "https://example.org/a.png"}, {**image(1)["source"], "data": "eA=="}):
            with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content"):
                await create(own, [user({"type": "image", "source": bad})])
        said = await own.messages.create(**body)
        await own.messages.create(**{**body, "messages": [*body["messages"], said.to_param(), user(image(3))]})
        count = await own.messages.count_tokens(model="policy", messages=body["messages"])
        return float(count.input_tokens)

    rollout, llm = images.run(agent, tokenizer, "four", "six")
    pictures = [tokenizer.pictures.read(vision_model.picture(k), "") for k in (1, 2, 3)]
    begin = f"<|im_start|>user\nWhich {images.PLACE}?<|im_end|>\n{ASKS}\n<tool_call>\n"
    begin += '{"name": "add", "arguments": {}}\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nCorner:\n'
    begin += (
        f"</tool_response><|im_end|>\n<|im_start|>user\n{images.PLACE}<|im_end|>\n<|im_start|>user\nSo?<|im_end|>\n"
    )
    begin += ASKS
    assert llm.asked[0][0] == images.expected_ids(folder, begin, pictures[:2])
    after = f"four<|im_end|>\n<|im_start|>user\n{images.PLACE}<|im_end|>\n{ASKS}"
    assert llm.asked[1][0] == images.expected_ids(folder, begin + after, pictures)
    assert [record.numbers for record in rollout.records] == [[0, 1]] and rollout.reward == len(llm.asked[0][0])


def test_the_end_of_a_rollout_inside_a_stream_is_told(monkeypatch):
    """The status was sent with the first comment, so the error is an event."""
    monkeypatch.setattr(agent_server, "KEEP_ALIVE_SECONDS", 0.05)
    seen = []

    async def agent(row, client):
        own = of(client)

        async def one(name):
            return [event async for event in await create(own, [user(name)], stream=True)]

        found = await asyncio.gather(*map(one, "abcd"), return_exceptions=True)
        seen.extend(each for each in found if isinstance(each, anthropic.APIStatusError))
        return 0.5

    rollout, _ = run(agent, "1 2 3 4 5 6 7 8", max_completion_length=20, seconds=0.3)
    assert rollout.reward == 0.5 and seen
    for error in (each.body["error"] for each in seen):
        assert error["type"] == "rate_limit_error" and "over: max_tokens" in error["message"]


def test_equal_texts_are_told_apart_by_their_thinking():
    """By its signature; where a program makes one of its own, by what was thought; an answer without any, by that."""
    turns = ["<think>A</think>Now.", "<think>B</think>Now.", "Now."]

    def unsigned(message):
        blocks = [block.to_dict() for block in message.content]
        return assistant(*({**block, "signature": "s"} if block["type"] == "thinking" else block for block in blocks))

    async def agent(row, client):
        own = of(client)
        said = [await create(own, [user("a")]) for _ in turns]
        for each in (said[1], said[2], said[0]):
            await create(own, [user("a"), each.to_param(), user("b")])
        for each in (said[1], said[0], said[2]):
            await create(own, [user("a"), unsigned(each), user("c")])
        thinks = {"type": "thinking", "thinking": "B", "signature": said[0].content[0].signature}
        await create(own, [user("a"), assistant(thinks, text("Now.")), user("d")])  # the signature counts more

    rollout, llm = run(agent, *turns, *"4567890", max_completion_length=3000, max_model_calls=10)
    read = [TOKENIZER.decode(prompt).partition(f"a<|im_end|>\n{ASKS}")[2] for prompt, _ in llm.asked[3:]]
    for asked, k in zip(read, (1, 2, 0, 1, 0, 2, 0), strict=True):
        assert asked.startswith(f"{turns[k]}<|im_end|>"), (asked, turns[k])


def test_results_that_are_errors_and_arguments_that_no_client_could_write():
    """Turns say so to rewards. What the model reads is the content, as from vLLM. Half a character and deep brackets:
    the client of the package would raise where it writes the history."""

    async def agent(row, client):
        own, messages = of(client), [user("a")]
        for fails in (True, False):
            said = await create(own, messages, tools=[TOOL])
            messages += [said.to_param(), user(result(said.content[-1].id, is_error=fails))]
        await create(own, messages, tools=[TOOL])

    rollout, _ = run(agent, CALL, CALL, "1", max_completion_length=2000)
    assert [turn.error for turn in rollout.turns] == ["tool", None, None]
    assert rollout.turns[0].observation_ids == rollout.turns[1].observation_ids

    async def agent(row, client):
        claude, messages = of(client), [user("1 + 1?")]
        for kind in ("tool_use", "text"):
            said = await create(claude, messages, tools=[TOOL], max_tokens=900)
            assert said.content[-1].type == kind
            messages += [said.to_param(), results(said) if kind == "tool_use" else user("Go on.")]
        await create(claude, messages, tools=[TOOL], max_tokens=900)

    arguments = '"\\ud83d"', "[" * 300 + "]" * 300
    turns = [f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": 1}}}}\n</tool_call>' for a in arguments]
    rollout, _ = run(agent, *turns, "2", max_completion_length=99_999, max_model_len=9999)
    assert len(rollout.turns) == 3 and len(rollout.records) == 1
