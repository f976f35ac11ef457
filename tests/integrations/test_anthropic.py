"""Agents that speak Anthropic's API: its own client over real HTTP; the policy is scripted where its ids are known."""

import asyncio
import json
import random
import re
import sys
from pathlib import Path

import anthropic
import httpx
import pytest
import test_images_of_agents as images
import trl
import vision_model
from accelerate import Accelerator
from test_agents import ADD, CALL, RECIPE, RETRY, TOKENIZER, ask, ids, run
from transformers import AutoConfig, AutoTokenizer

import mt_grpo_trainer as mt
from mt_grpo.conversation.pictures import PictureReader, with_pictures
from mt_grpo.integrations.agents import server as agent_server
from mt_grpo.integrations.agents.anthropic_api import anthropic_error, anthropic_error_event, read_anthropic_request
from mt_grpo.integrations.agents.chat_api import read_chat_request
from mt_grpo.integrations.agents.messages import ApiError
from mt_grpo.integrations.agents.programs import environment_of
from mt_grpo.reports.metrics import conversation_columns, conversation_metrics
from mt_grpo.rollout import StopReason

pytestmark = pytest.mark.faults  # a group of scripts/test.sh

TOOL = {"name": "add", "description": "Add.", "input_schema": ADD["function"]["parameters"]}
THINKS = "<think>Hm.</think>"
ASKS = "<|im_start|>assistant\n"


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


async def post(client, body, path="v1/messages", **headers):
    """A body as it is, also one that the client would not send."""
    async with httpx.AsyncClient(trust_env=False) as http:
        headers = {"x-api-key": client.api_key, "anthropic-version": "2023-06-01", **headers}
        content = body if isinstance(body, bytes) else json.dumps(body)
        return await http.post(f"{root(client)}/{path}", content=content, headers=headers)


BODY = {"model": "policy", "max_tokens": 50, "messages": [user("a")]}


# -- token for token --


@pytest.mark.contract("Anthropic API", "token for token")
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
    assert rollout.error is None, rollout.error
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


def test_what_the_api_says_of_an_answer():
    said = []

    async def agent(row, client):
        own = of(client)
        for question, options in (
            ("a", {"tools": [TOOL]}), ("b", {"max_tokens": 3}), ("c", {"stop_sequences": ["STOP", "END"]}), ("d", {}),
            ("e", {}), ("f", {"tools": [TOOL], "tool_choice": {"type": "none"}}),
        ):  # fmt: skip
            said.append(await create(own, [user(question)], **options))
        assert [model.id async for model in own.models.list()] == ["policy", "policy-frozen"]
        assert (await own.models.retrieve("policy-frozen")).display_name == "policy-frozen"

    rollout, llm = run(agent, f"{THINKS}Now.\n{CALL}\n{CALL}", "1 2 3 4 5 6", "1 END STOP 2", "", "Done.", CALL)
    assert rollout.error is None, rollout.error
    assert [block.type for block in said[0].content] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, now, *calls = said[0].content
    assert (thinking.thinking, now.text) == ("Hm.", "Now.") and thinking.signature
    assert [call.input for call in calls] == [{"a": 1, "b": "x y"}] * 2 and calls[0].id != calls[1].id
    assert all(re.fullmatch(r"toolu_\w+", call.id) and call.name == "add" for call in calls)
    assert [(each.stop_reason, each.stop_sequence) for each in said] == [
        ("tool_use", None), ("max_tokens", None), ("stop_sequence", "END"), ("end_turn", None), ("end_turn", None),
        ("end_turn", None),
    ]  # fmt: skip
    assert said[2].content[0].text == "1 " and llm.params[2]["stop"] == ["STOP", "END"]
    assert [block.text for block in said[3].content] == [""]  # a program finds a block where nothing was written
    assert [block.text for block in said[5].content] == [CALL]
    assert (said[1].usage.input_tokens, said[1].usage.output_tokens) == (len(llm.asked[1][0]), 3)
    assert [each.id for each in said] == [f"msg_{k}" for k in range(6)]
    assert all((each.type, each.role, each.model) == ("message", "assistant", "policy") for each in said)


def test_a_cut_off_call_says_so():
    """Also where the call is whole, and something behind it is cut."""

    async def agent(row, client):
        said = await create(of(client), [user("a")], tools=[TOOL], max_tokens=len(ids(CALL)) + 1)
        assert said.stop_reason == "max_tokens" and [block.type for block in said.content][-1] == "tool_use"

    assert run(agent, f"{CALL} and so on")[0].error is None


SAME = {
    "as it was": lambda m: None,
    "without thinking": lambda m: m.update(content=[b for b in m["content"] if b["type"] != "thinking"]),
    "another signature": lambda m: m["content"][0].update(signature="x"),
    "redacted": lambda m: m["content"].insert(0, {"type": "redacted_thinking", "data": "eA=="}),
    "another order of arguments": lambda m: m["content"][-1].update(input={"b": "x y", "a": 1.0}),
    "an empty text": lambda m: m["content"].insert(1, text("")),
    "white space": lambda m: m["content"][1].update(text=" Now. \n"),
    "for the cache": lambda m: m["content"][-1].update(cache_control={"type": "ephemeral"}),
    "another id": lambda m: m["content"][-1].update(id="toolu_01A09q90qw90lq917835lq9"),
    "further keys": lambda m: m.update(id="msg_1", usage=None),
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
    assert rollout.error is None, rollout.error
    assert [record.numbers for record in rollout.records] == [[0, 1]]
    assert [each.text for each in rollout.turns[0].results] == ["2"]


OTHER = {
    "another argument": lambda m, s: m["content"][-1].update(input={"a": 2, "b": "x y"}),
    "a text": lambda m, s: m["content"].insert(0, text("I call.")),
    "another prompt": lambda m, s: s.update(content="Add. "),
    "a call less": lambda m, s: m["content"].pop(),
}


@pytest.mark.parametrize("name", OTHER)
def test_what_was_not_said_begins_a_record(name):
    async def agent(row, client):
        own, start = of(client), user("Add.")
        said = (await create(own, [start], tools=[TOOL])).model_dump(exclude_none=True)
        said = {"role": "assistant", "content": said["content"]}
        behind = user(result(said["content"][-1]["id"]), text("So?"))
        OTHER[name](said, start)
        await create(own, [start, said, behind], tools=[TOOL])

    rollout, _ = run(agent, f"Now.\n{CALL}", "2")
    assert rollout.error is None and [record.numbers for record in rollout.records] == [[0], [1]], rollout.error


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
    assert rollout.error is None and [record.numbers for record in rollout.records] == [[0, 1, 2]], rollout.error


# -- streams --


@pytest.mark.contract("streaming")
@pytest.mark.parametrize("seconds", [0.0, 0.3])
@pytest.mark.parametrize("turn", [f"{THINKS}Now.\n{CALL}\n{CALL}", "It is 2.", CALL, "", "1 2 3 4 5 6", "1 END"])
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
    assert rollout.error is None and len(rollout.turns) == 3, rollout.error
    whole, streamed = (re.sub(r"(msg_|policy-\w+-|toolu_)\d+", r"\1", json.dumps(each.to_dict())) for each in found)
    assert json.loads(streamed) == json.loads(whole)
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(found[0].content)


def test_the_events_of_a_stream():
    """As they stand on the wire: each has its name, and `ping` is one of them."""

    async def agent(row, client):
        answer = await post(client, {**BODY, "tools": [TOOL], "stream": True})
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line.split("\n") for line in answer.text.strip().split("\n\n")]
        values = [json.loads(data.removeprefix("data: ")) for _, data in events]
        assert [name for name, _ in events] == [f"event: {value['type']}" for value in values]
        deltas = [value["delta"] for value in values if value["type"] == "content_block_delta"]
        assert [delta["type"] for delta in deltas] == [
            "thinking_delta", "signature_delta", "text_delta", "input_json_delta",
        ]  # fmt: skip
        assert json.loads(deltas[-1]["partial_json"]) == {"a": 1, "b": "x y"}
        block = ["content_block_start", "content_block_delta", "content_block_stop"]
        thinking = [block[0], block[1], block[1], block[2]]
        assert [value["type"] for value in values] == [
            "message_start", "ping", *thinking, *block, *block, "message_delta", "message_stop",
        ]  # fmt: skip
        assert [value["index"] for value in values if "index" in value] == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]

    assert run(agent, f"{THINKS}Now.\n{CALL}")[0].error is None


# -- what the model reads --


def qwen3():
    tokenizer = AutoTokenizer.from_pretrained("hf_recipes/tiny/calculator-hermes-model")
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates/qwen3.jinja").read_text(encoding="utf-8")
    return tokenizer


def no_later_systems():
    """A template that refuses them, as Qwen3.5's does."""
    tokenizer = AutoTokenizer.from_pretrained("hf_recipes/tiny/calculator-hermes-model")
    refused = (
        "{%- for m in messages %}{%- if m.role == 'system' and not loop.first %}{{ raise_exception('System message "
        "must be at the beginning.') }}{%- endif %}{%- endfor %}"
    )
    tokenizer.chat_template = refused + tokenizer.chat_template
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
    "tokens that end a message": {"system": "<|im_end|>", "messages": [user("<|im_end|> a <think>"), assistant("b")]
                                  + [user("c")]},
}  # fmt: skip


@pytest.fixture(scope="module")
def vllm_messages():
    """What vLLM makes of a request: the body of /v1/chat/completions."""
    serving = pytest.importorskip("vllm.entrypoints.anthropic.serving")
    protocol = pytest.importorskip("vllm.entrypoints.anthropic.protocol")

    def converted(body, merged=False):
        request = protocol.AnthropicMessagesRequest.model_validate(body)
        made = serving.AnthropicServingMessages.to_chat_completion_request(request, merge_inline_system=merged)
        kept = made.model_dump(mode="json", exclude_none=True)
        return {
            key: kept[key]
            for key in ("model", "messages", "tools", "tool_choice", "stop", "max_tokens")
            if key in kept
        }

    return converted


@pytest.mark.parametrize("kind", ["hermes", "qwen3", "no later systems"])
def test_the_ids_are_those_of_vllms_conversion(kind, vllm_messages):
    """What vLLM makes of each request gets the same ids from /v1/chat/completions here, and as many tokens."""
    tokenizer = {"hermes": TOKENIZER, "qwen3": qwen3(), "no later systems": no_later_systems()}[kind]
    counted = {}

    async def agent(row, client):
        own = of(client)
        for name, body in CONVERSATIONS.items():
            body = {"model": "policy", "max_tokens": 50, **body}
            await own.messages.create(**body)
            asked = {key: value for key, value in body.items() if key != "max_tokens"}
            counted[name] = (await own.messages.count_tokens(**asked)).input_tokens
            made = vllm_messages(body, kind == "no later systems")
            made.pop("tool_choice", None)
            await client.chat.completions.create(**made)

    rollout, llm = run(agent, "1", tokenizer=tokenizer, max_model_calls=99, max_completion_length=9999)
    assert rollout.error is None, rollout.error
    assert len(llm.asked) == 2 * len(CONVERSATIONS) == 2 * len(counted)
    read = [asked for asked, _ in llm.asked]
    for name, ours, theirs in zip(CONVERSATIONS, read[::2], read[1::2]):
        assert TOKENIZER.decode(ours) == TOKENIZER.decode(theirs), name
        assert ours == theirs and counted[name] == len(ours), name
    if kind == "qwen3":
        assert "<think>\nI add.\n</think>" in tokenizer.decode(read[2 * list(CONVERSATIONS).index("thinking")])


def test_a_request_is_the_same_in_the_middle(vllm_messages):
    """Limits, stop texts, choices and tools, too."""
    body = {
        "model": "policy-frozen", "max_tokens": 7, "stop_sequences": ["x"], "tools": [TOOL], "top_k": 3, "top_p": 0.5,
        "tool_choice": {"type": "none"}, "metadata": {"user_id": "me"}, "temperature": 0.3,
        **CONVERSATIONS["thinking"],
    }  # fmt: skip
    ours, theirs = read_anthropic_request(body), read_chat_request(vllm_messages(body))
    assert ours == theirs and not ours.trained and not ours.may_call and ours.max_tokens == 7 and ours.stops == ("x",)


def test_a_template_that_takes_no_later_system_reads_it_at_the_beginning():
    """A record begins there. Another template reads it where it stands, and the record goes on."""

    def agent(row, client):
        own = anthropic.Anthropic(base_url=root(client), api_key=client.api_key)
        messages = [user("a")]
        said = own.messages.create(model="policy", max_tokens=9, system="S.", messages=messages)
        messages += [said.to_param(), user("b"), {"role": "system", "content": "T."}]
        own.messages.create(model="policy", max_tokens=9, system="S.", messages=messages)

    rollout, llm = run(agent, "1", tokenizer=no_later_systems())
    assert [record.numbers for record in rollout.records] == [[0], [1]]
    assert TOKENIZER.decode(llm.asked[1][0]).startswith("<|im_start|>system\nS.T.<|im_end|>\n<|im_start|>user\na<")
    rollout, llm = run(agent, "1")
    assert [record.numbers for record in rollout.records] == [[0, 1]]
    assert TOKENIZER.decode(llm.asked[1][0]).endswith(f"b<|im_end|>\n<|im_start|>system\nT.<|im_end|>\n{ASKS}")


def test_an_agent_that_counts_cannot_leave_a_full_context():
    """It raises by itself, as where a request does not fit: that was the policy's doing, and is trained."""

    async def agent(row, client):
        own = of(client)
        said = await create(own, [user("a")], tools=[TOOL])
        long = [user("a"), said.to_param(), user("b" * 2000)]
        if (await own.messages.count_tokens(model="policy", messages=long, tools=[TOOL])).input_tokens > 300:
            raise RuntimeError("too long for me")

    rollout, _ = run(agent, "1", max_model_len=700)
    assert rollout.stop_reason == StopReason.CONTEXT_LENGTH and rollout.reward == 0.0


def test_tokens_are_counted_and_nothing_is_spent():
    """Also behind an answer, where they are those that were sampled. No turn is told of by it."""
    counted = []

    async def agent(row, client):
        own, messages = of(client), [user("a")]
        for k in range(2):
            for _ in range(3):
                found = await own.messages.count_tokens(model="policy", messages=messages, tools=[TOOL])
            counted.append(found.input_tokens)
            said = await create(own, messages, tools=[TOOL])
            if k == 0:
                messages += [said.to_param(), results(said)]
        with pytest.raises(anthropic.RateLimitError, match="The rollout is over: max_turns"):
            await create(own, [user("b")])
        with pytest.raises(anthropic.RateLimitError, match="The rollout is over"):
            await own.messages.count_tokens(model="policy", messages=messages)
        return 1.0

    rollout, llm = run(agent, f"{THINKS}{CALL}", "1", max_model_calls=2)
    assert rollout.error is None, rollout.error
    assert counted == [len(asked) for asked, _ in llm.asked] and len(rollout.turns) == 2
    assert [record.numbers for record in rollout.records] == [[0, 1]] and rollout.reward == 1.0


# -- images --


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return vision_model.save(tmp_path_factory.mktemp("vision"), template=vision_model.HERMES_TEMPLATE)


@pytest.fixture
def sees(folder):
    found = AutoTokenizer.from_pretrained(folder)
    return with_pictures(found, PictureReader.of(str(folder), AutoConfig.from_pretrained(folder), found))


def image(seed):
    _, _, data = images.uri(vision_model.picture(seed)).partition(",")
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def test_images_are_those_of_vllms_conversion(folder, sees, vllm_messages):
    """In a question, and in a result, where they stand in a user's message behind it."""
    body = {"model": "policy", "max_tokens": 20, "messages": [
        user(text("Which "), image(1), text("?")), assistant(call()),
        user(result("toolu_9", [text("Corner:"), image(2)]), text("So?"))]}  # fmt: skip

    async def agent(row, client):
        own = of(client)
        said = await own.messages.create(**body)
        await client.chat.completions.create(**vllm_messages(body))
        await own.messages.create(**{**body, "messages": [*body["messages"], said.to_param(), user(image(3))]})
        count = await own.messages.count_tokens(model="policy", messages=body["messages"])
        return float(count.input_tokens)

    rollout, llm = images.run(agent, sees, "four", "six")
    assert rollout.error is None, rollout.error
    pictures = [sees.pictures.read(vision_model.picture(k), "") for k in (1, 2, 3)]
    begin = f"<|im_start|>user\nWhich {images.PLACE}?<|im_end|>\n{ASKS}\n<tool_call>\n"
    begin += '{"name": "add", "arguments": {}}\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nCorner:\n'
    begin += (
        f"</tool_response><|im_end|>\n<|im_start|>user\n{images.PLACE}<|im_end|>\n<|im_start|>user\nSo?<|im_end|>\n"
    )
    begin += ASKS
    assert llm.asked[0][0] == llm.asked[1][0] == images.expected_ids(folder, begin, pictures[:2])
    behind = f"four<|im_end|>\n<|im_start|>user\n{images.PLACE}<|im_end|>\n{ASKS}"
    assert llm.asked[2][0] == images.expected_ids(folder, begin + behind, pictures)
    assert [record.numbers for record in rollout.records] == [[0, 2], [1]]
    assert rollout.reward == len(llm.asked[0][0])


def test_images_that_cannot_be_read(sees):
    source = image(1)["source"]
    refused = [
        ({"type": "url", "url": "https://example.org/a.png"}, "got type 'url', expected base64"),
        ({**source, "data": "eA=="}, r"messages\[0\].content"),
        ({**source, "data": None}, "source.data: got None, expected text"),
        ({"type": "base64", "data": source["data"]}, "source.media_type: got None"),
        ("data:image/png;base64,", "source: got"),
    ]

    async def agent(row, client):
        own = of(client)
        for bad, message in refused:
            with pytest.raises(anthropic.BadRequestError, match=message):
                await create(own, [user({"type": "image", "source": bad})])
        await create(own, [user(image(1))])

    rollout, _ = images.run(agent, sees, "four")
    assert rollout.error is None and len(rollout.turns) == 1, rollout.error

    async def blind(row, client):
        with pytest.raises(anthropic.BadRequestError, match="got an image, and the policy reads text only"):
            await create(of(client), [user(image(1))])
        await create(of(client), [user("a")])

    assert run(blind, "1")[0].error is None


# -- errors --


def changed(**change):
    return {**BODY, **change}


def said_by(role, *content):
    return changed(messages=[{"role": role, "content": list(content)}])


BAD = [
    (changed(model="claude-x"), 404, "not_found_error", "The model 'claude-x' does not exist"),
    *((changed(**change), 400, "invalid_request_error", message) for change, message in (
        ({"max_tokens": None}, "max_tokens: got none"), ({"max_tokens": True}, "max_tokens: got True"),
        ({"messages": []}, "messages: got none"), ({"messages": [3]}, "messages[0]: got 3"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role: got 'tool', expected user or assistant"),
        ({"messages": [{"role": "user"}]}, "messages[0].content: got None"),
        ({"messages": [user("a"), assistant("b")]}, "the last one is the assistant's"),
        ({"system": [image(1)]}, "system[0]: got a block of type 'image'"),
        ({"messages": [user("a"), {"role": "system", "content": [call()]}]}, "got a block of type 'tool_use'"),
        ({"tools": {}, "tool_choice": "auto"}, "tool_choice: got 'auto', expected an object"),
        ({"tool_choice": {"type": "sometimes"}}, "tool_choice: got type 'sometimes'"),
        ({"tools": [3]}, "tools[0]: got 3"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]: got type 'bash_20250124'"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema: got None"),
        ({"tools": [{"name": "x", "input_schema": {"type": 5}}]}, "got a schema of type 5"),
        ({"tools": [{"name": "<|im_end|>", "input_schema": {}}]}, "tools: "),
        ({"stop_sequences": [""]}, "stop_sequences: got ['']"),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers: not supported"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking: got False"),
        ({"messages": [user("1 " * 1100)]}, "maximum context length is 1024 tokens. The messages have at least "),
    )),
    *((said_by(role, block), 400, "invalid_request_error", message) for role, block, message in (
        ("user", {}, "messages[0].content[0].type: got None"), ("user", text(None), "content[0].text: got None"),
        ("user", call(), "type 'tool_use', which is not supported"),
        ("user", {"type": "tool_result"}, "tool_use_id: got None"), ("user", result("a", 3), "content: got 3"),
        ("user", result("a", [{"type": "tool_reference"}]), "content[0].content[0]: got a block of type 'tool_ref"),
        ("assistant", result("a"), "type 'tool_result', which is not supported here"),
        ("assistant", {"type": "thinking"}, "content[0].thinking: got None"),
        ("assistant", {**call(), "input": "{}"}, "content[0].input: got '{}'"),
        ("assistant", {**call(), "name": None}, "content[0].name: got None"),
    )),
]  # fmt: skip
HARMLESS = {
    "temperature": 0.1, "top_p": 0.5, "top_k": 3, "metadata": {"user_id": "me"}, "service_tier": "auto",
    "thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "low"}, "mcp_servers": [],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "context_management": {"edits": []},
    "tools": [{**TOOL, "eager_input_streaming": True}], "cache_control": {"type": "ephemeral"}, "anything": 1,
}  # fmt: skip


def error_of(answer):
    """(status, type, message) of an error, which has the API's form."""
    value = answer.json()
    assert set(value) == {"type", "error"} and value["type"] == "error", value
    assert set(value["error"]) == {"type", "message"}, value
    return answer.status_code, value["error"]["type"], value["error"]["message"]


def test_bad_requests_get_the_apis_errors_and_harm_nothing():
    async def agent(row, client):
        for body, status, kind, message in BAD:
            for path in ("v1/messages", "v1/messages/count_tokens"):
                if path.endswith("tokens") and ("max_tokens" in message or "context" in message):
                    continue
                answer = await post(client, body, path)
                found = error_of(answer)
                assert found[:2] == (status, kind) and message in found[2], (body, found)
                assert answer.headers["x-should-retry"] == "false"
        own = of(client, default_headers={"anthropic-beta": "a-2025-01-01,b", "anthropic-version": "2099-01-01"})
        for kind in ("any", "tool", "auto"):
            choice = {"type": kind, **({"name": "add"} if kind == "tool" else {})}
            await create(own, [user("a")], extra_body={**HARMLESS, "tool_choice": choice})
        await own.beta.messages.create(model="policy", max_tokens=9, messages=[user("b")], betas=["c-2025-01-01"])
        return 1.0

    rollout, llm = run(agent, "1", max_model_calls=99)
    assert rollout.reward == 1.0, rollout.error
    assert len(llm.asked) == 4 and all(params["temperature"] == 1.0 for params in llm.params)
    assert "content[0].name: got None" in rollout.turns[-1].info["refused"]


def test_keys_and_paths():
    """A key is known by each way in which clients send one. What looks like Anthropic's gets its errors."""

    async def agent(row, client):
        key, none = client.api_key, {"x-api-key": "none"}
        for ways in ({"x-api-key": key}, {**none, "Authorization": f"Bearer {key}"}, {**none, "X-Session-ID": key}):
            assert (await post(client, BODY, **ways)).status_code == 200, ways
        assert (await post(client, BODY, f"{key}/v1/messages?beta=true", **none)).status_code == 200
        other = anthropic.AsyncAnthropic(base_url=client.base_url, auth_token=key)  # with /v1 behind the address
        assert (await create(other, [user("a")])).content[0].text == "1"
        assert error_of(await post(client, BODY, **none))[:2] == (401, "authentication_error")
        for path in ("v1/embeddings", "v1/complete", "v1/messages/batches", "nothing", "v1/messages/msg_1"):
            status, kind, message = error_of(await post(client, BODY, path))
            assert (status, kind) == (404, "not_found_error") and "/v1/messages" in message
        with pytest.raises(anthropic.NotFoundError, match="'x' does not exist"):
            await of(client).models.retrieve("x")
        for bad in (b"{", b"[]", b"\xff", b'{"model"' + b":[" * 5000):
            assert error_of(await post(client, bad))[:2] == (400, "invalid_request_error"), bad[:20]
        encoded = await post(client, b"no such thing", **{"Content-Encoding": "gzip"})
        assert error_of(encoded)[:2] == (400, "invalid_request_error")
        async with httpx.AsyncClient(trust_env=False) as http:  # without the headers of a client
            answer = await http.post(f"{root(client)}/v1/messages", json=BODY)
            assert error_of(answer)[:2] == (401, "authentication_error")
            answer = await http.get(f"{root(client)}/v1/messages", headers={"Authorization": f"Bearer {key}"})
            assert error_of(answer)[:2] == (404, "not_found_error")
            answer = await http.post(f"{root(client)}/v1/nothing", headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == 404 and answer.json()["error"]["code"] == "unknown_url"

    rollout, _ = run(agent, "1")
    assert rollout.error is None, rollout.error


def test_a_request_that_is_too_large(monkeypatch):
    monkeypatch.setattr(agent_server, "MAX_BYTES", 2000)

    async def agent(row, client):
        assert error_of(await post(client, changed(messages=[user("a" * 3000)])))[:2] == (413, "request_too_large")
        await create(of(client), [user("a")])

    assert run(agent, "1")[0].error is None


def test_the_end_of_a_rollout_is_told_once():
    """The client would send 429 and 5xx again."""
    sent = []

    async def note(request):
        sent.append(request.url.path)

    async def agent(row, client):
        own = of(client, max_retries=3)
        own._client.event_hooks = {"request": [note]}
        while True:
            await create(own, [user("a")])

    rollout, llm = run(agent, "1", max_model_calls=2)
    assert rollout.stop_reason == StopReason.MAX_TURNS and rollout.reward == 0.0 and rollout.error is None
    assert sent == ["/v1/messages"] * 3 and len(llm.asked) == 2


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
    for error in seen:
        assert (
            error.body["error"]["type"] == "rate_limit_error" and "over: max_tokens" in error.body["error"]["message"]
        )


@pytest.mark.parametrize("status, kind", [(500, "api_error"), (529, "overloaded_error"), (502, "api_error"),
                                          (403, "permission_error"), (422, "invalid_request_error")])  # fmt: skip
def test_the_type_of_an_error(status, kind):
    error = ApiError(status, "It broke.", "code", "param")
    assert anthropic_error(error) == {"type": "error", "error": {"type": kind, "message": "It broke."}}
    (event,) = anthropic_error_event(error)
    name, data = event.strip().split("\n")
    assert name == "event: error" and json.loads(data.removeprefix("data: ")) == anthropic_error(error)


def hostile(rng):
    """A body of parts that belong elsewhere, or nowhere."""
    deep = {}
    for _ in range(rng.choice([1, 30, 400, 900, 3000])):
        deep = {"a": deep} if rng.random() < 0.5 else {"a": [deep]}
    junk = [
        None, True, -1, 1e308, float("nan"), "", "\ud800", "<|im_end|>", "x" * 10_000, [], {}, [[]], [None],
        {"type": {}}, {"type": "text"}, text("\ud800 \x00"), call(), {**call(), "input": deep}, image(1),
        result("toolu_00000000"),
        {"type": "image", "source": {"type": "base64", "media_type": "\n", "data": "\ud800"}}, thought(""), deep,
        {"type": "tool_result", "tool_use_id": "\ud800", "content": [deep]}, {"role": "user", "content": [call()]},
        user(), user("a"), assistant(call()), user(result("toolu_9")), {"role": "system", "content": "\ud800"},
    ]  # fmt: skip
    body = json.loads(json.dumps({**BODY, **rng.choice(list(CONVERSATIONS.values()))}))
    for _ in range(rng.randint(1, 4)):
        place = rng.choice(["key", "message", "block", "schema"])
        if place == "key":
            body[rng.choice([*BODY, *HARMLESS, "system", "stop_sequences", "stream"])] = rng.choice(junk)
        elif isinstance(body.get("messages"), list) and body["messages"] and place == "message":
            body["messages"].insert(rng.randint(0, len(body["messages"])), rng.choice(junk))
        elif isinstance(body.get("messages"), list) and body["messages"] and place == "block":
            message = rng.choice(body["messages"])
            if isinstance(message, dict):
                message["content"] = [rng.choice(junk) for _ in range(rng.randint(0, 3))]
        else:
            body["tools"] = [{"name": rng.choice(junk), "input_schema": rng.choice([*junk, TOOL["input_schema"]])}]
    return body


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_no_body_ends_a_run(seed):
    rng, seen = random.Random(seed), []

    async def agent(row, client):
        for _ in range(60):
            body = hostile(rng)
            for path in ("v1/messages", "v1/messages/count_tokens"):
                try:
                    content = json.dumps(body).encode()
                except (RecursionError, ValueError):  # ValueError: a message stands in itself
                    content = b'{"a":' * 4000 + b"1" + b"}" * 4000
                answer = await post(client, content, path)
                seen.append(answer.status_code)
                if answer.status_code != 200:
                    assert error_of(answer)[0] in (400, 404), answer.text
        return 1.0

    rollout, _ = run(agent, f"{THINKS}{CALL}", max_model_calls=999, max_completion_length=99_999, timeout=100.0)
    assert rollout.error is None and rollout.reward == 1.0, rollout.error
    assert len(seen) == 120 and 2 < seen.count(200) < 115


# -- records, credit and retries --


def test_a_reward_names_its_answer():
    """By the client, by the header, and by the header of another answer."""

    async def agent(row, client):
        own, messages = of(client), [user("a")]
        first = await create(own, messages)
        messages += [first.to_param(), user("b")]
        second = await create(own, messages, extra_headers={"X-Turn-Reward": "0.5"})  # of the first
        headers = {"X-Turn-Reward": "0.25", "X-Turn-Answer": second.id}
        await create(own, [user("c")], extra_headers=headers)
        client.reward(1.0)  # of the last one
        client.reward(0.125, answer=first)
        for bad, message in (
            ({"X-Turn-Reward": "x"}, "finite number"),
            ({"X-Turn-Answer": "msg_0"}, "without X-Turn"),
            ({"X-Turn-Reward": "1", "X-Turn-Answer": "msg_9"}, "no answer has the id 'msg_9'"),
        ):
            with pytest.raises(anthropic.BadRequestError, match=message):
                await create(own, [user("d")], extra_headers=bad)
        with pytest.raises(anthropic.BadRequestError, match="a request that counts tokens goes on from no turn"):
            await own.messages.count_tokens(model="policy", messages=messages, extra_headers={"X-Turn-Reward": "1"})

    rollout, _ = run(agent, "1", "2", "3")
    assert rollout.error is None, rollout.error
    assert [turn.reward for turn in rollout.turns] == [0.625, 0.25, 1.0]
    assert [record.numbers for record in rollout.records] == [[0, 1], [2]]


def test_equal_requests_are_samples_and_retries_join():
    async def agent(row, client):
        own = of(client)
        votes = await asyncio.gather(*(create(own, [user("Vote.")]) for _ in range(3)))
        assert sorted(vote.content[0].text for vote in votes) == ["A", "B", "C"]
        first = asyncio.ensure_future(post(client, BODY))
        await asyncio.sleep(0.02)
        answers = await asyncio.gather(first, post(client, BODY, **RETRY))
        assert answers[0].json() == answers[1].json() and answers[0].json()["content"][0]["text"] == "D"
        keyed = [(await post(client, BODY, **{"Idempotency-Key": "k"})).json()["id"] for _ in range(2)]
        assert keyed == ["msg_4", "msg_4"]

    rollout, llm = run(agent, "A", "B", "C", "D", "E", seconds=0.05)
    assert rollout.error is None and len(llm.asked) == 5, rollout.error
    assert [record.numbers for record in rollout.records] == [[k] for k in range(5)]
    assert all(turn.trained for turn in rollout.turns)


def test_what_the_frozen_model_says_is_read_and_not_trained():
    async def agent(row, client):
        own = of(client)
        side = await create(own, [user("other")], model="policy-frozen")
        await create(own, [user(side.content[0].text)])

    rollout, _ = run(agent, "1", "2")
    assert [turn.trained for turn in rollout.turns] == [False, True]


def test_a_sub_agent_is_a_record_and_its_turn_is_told_of():
    async def agent(row, client):
        own = of(client)
        said = await create(own, [user("Main.")], tools=[TOOL])
        side = await create(own, [user("Side.")])
        await create(own, [user("Main."), said.to_param(), results(said, side.content[0].text)], tools=[TOOL])

    rollout, _ = run(agent, CALL, "Seventeen.", "Done.")
    assert [record.numbers for record in rollout.records] == [[0, 2], [1]]
    assert [turn.went_on for turn in rollout.turns] == [True, True, False]


def test_equal_answers_are_told_apart_by_the_ids_of_their_calls():
    async def agent(row, client):
        own = of(client)
        one, two = [await create(own, [user("a")], tools=[TOOL]) for _ in range(2)]
        assert one.content[0].id != two.content[0].id
        for said in (two, one):
            await create(own, [user("a"), said.to_param(), results(said)], tools=[TOOL])

    rollout, _ = run(agent, CALL, CALL, "1", "2")
    assert [record.numbers for record in rollout.records] == [[0, 3], [1, 2]]


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
    assert rollout.error is None, rollout.error
    read = [TOKENIZER.decode(prompt).partition(f"a<|im_end|>\n{ASKS}")[2] for prompt, _ in llm.asked[3:]]
    for asked, k in zip(read, (1, 2, 0, 1, 0, 2, 0), strict=True):
        assert asked.startswith(f"{turns[k]}<|im_end|>"), (asked, turns[k])


def test_a_result_that_is_an_error_counts_as_one():
    """Turns say so to rewards, and the metrics count it. What the model reads is the content, as from vLLM."""

    async def agent(row, client):
        own = of(client)
        messages = [user("a")]
        for fails in (True, False, "yes"):
            said = await create(own, messages, tools=[TOOL])
            blocks = [block.to_dict() for block in said.content]
            messages += [assistant(*blocks), user(result(said.content[-1].id, is_error=fails))]
            if fails == "yes":
                answer = await post(client, {**BODY, "messages": messages, "tools": [TOOL]})
                assert answer.status_code == 400 and "is_error" in error_of(answer)[2], answer.text
        messages[-1]["content"][0]["is_error"] = None
        await create(own, messages, tools=[TOOL])

    rollout, llm = run(agent, CALL, CALL, CALL, "1", max_completion_length=2000)
    assert rollout.error is None, rollout.error
    assert [turn.error for turn in rollout.turns] == ["tool", None, None, None]
    assert [[each.text for each in turn.results] for turn in rollout.turns[:3]] == [["2"]] * 3
    texts = [TOKENIZER.decode(turn.observation_ids) for turn in rollout.turns[:3]]
    assert len(set(texts)) == 1 and "error" not in texts[0]
    columns = conversation_columns([rollout], Accelerator(cpu=True))
    assert conversation_metrics(columns)[0]["tools/failure_frequency"] == pytest.approx(1 / 3)
    rollout.turns[2].results = []  # a last turn's call, which nothing runs any more, is no call that worked
    columns = conversation_columns([rollout], Accelerator(cpu=True))
    found = conversation_metrics(columns)[0]
    assert (found["tools/failure_frequency"], found["tools/call_frequency"]) == (pytest.approx(1 / 2), 3)


# -- programs --


def test_the_environment_of_a_command(monkeypatch):
    """No key of the user's own reaches a program, which would send it along."""
    users = ("ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_API_KEY", "ANTHROPIC_CUSTOM_HEADERS", "CLAUDE_CODE_USE_BEDROCK")
    for name in (*users, "ANTHROPIC_MODEL"):
        monkeypatch.setenv(name, "mine")
    found = environment_of("http://127.0.0.1:1/v1", "key")
    assert (found["ANTHROPIC_BASE_URL"], found["ANTHROPIC_API_KEY"]) == ("http://127.0.0.1:1", "key")
    assert {name for name in found if found[name] == "mine"} == {"ANTHROPIC_MODEL"}  # which is no credential
    without = environment_of("http://127.0.0.1:1/v1", None)
    assert without["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:1"
    assert not {"ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"} & set(without)


COMMAND = """
import json, sys
import anthropic  # reads ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY

row = json.loads(sys.stdin.readline())
answer = anthropic.Anthropic().messages.create(
    model="policy", max_tokens=20, messages=[{"role": "user", "content": row["question"]}]
)
print(json.dumps({"reward": 0.5, "said": answer.content[0].text}))
"""


def test_a_command_needs_no_address(tmp_path):
    (tmp_path / "agent.py").write_text(COMMAND)
    rollout, _ = run(f"{sys.executable} {tmp_path / 'agent.py'}", "It is 2.", timeout=60.0)
    assert rollout.reward == 0.5 and rollout.environment.result["said"] == "It is 2.", rollout.error


AGENT = """
import anthropic

TOOL = {"name": "calculator", "description": "Compute.", "input_schema": {
    "type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}}


async def solve(row, client):
    own = anthropic.AsyncAnthropic(base_url=client.base_url, api_key=client.api_key)
    messages = [{"role": "user", "content": row["question"]}]
    for _ in range(2):
        said = await own.messages.create(model="policy", max_tokens=24, messages=messages, tools=[TOOL])
        client.reward(0.1 * len(said.content), answer=said)
        behind = [{"type": "tool_result", "tool_use_id": block.id, "content": "2"}
                  for block in said.content if block.type == "tool_use"]
        messages += [said.to_param(), {"role": "user", "content": behind or "Go on."}]
    return float(len(str(said.content)) % 3)
"""


def test_a_training_step_by_a_recipe(hermes_model, tmp_path):
    (tmp_path / "solver.py").write_text(AGENT)
    recipe = {
        **RECIPE, "model_name_or_path": hermes_model, "agent": f"{tmp_path}/solver.py:solve", "dataset_size": 4,
        "output_dir": str(tmp_path / "run"), "num_generations": 4, "per_device_train_batch_size": 4, "max_steps": 2,
        "dtype": "float32", "report_to": "none", "gradient_checkpointing": False, "save_strategy": "no",
        "logging_steps": 1, "max_completion_length": 256,
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    trainer = mt.build_trainer(*mt.parse_arguments(["--config", str(tmp_path / "recipe.yaml")]))
    trainer.train()
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert len(logs) == 2 and all(log["records/mean"] == 1.0 and log["turns/mean"] == 2.0 for log in logs)
    assert all(log["stop/agent_done"] == 1.0 and log["tokens/ids_differ"] == 0 for log in logs)
    assert any(log["grad_norm"] > 0 for log in logs)
    assert all(turn.reward >= 0.1 for rollout in trainer.batch.rollouts for turn in rollout.turns)


# -- what a policy could write to escape its loss --


ESCAPES = {  # an argument, and what the agent gets of the turn
    "half a character": ('"\\ud83d"', "tool_use"),
    "brackets": ("[" * 300 + "]" * 300, "text"),
}


@pytest.mark.parametrize("name", ESCAPES)
def test_no_argument_ends_the_client_that_sends_it_again(name):
    """The client of the package, which would raise where it writes the history."""
    written, kind = ESCAPES[name]

    async def agent(row, client):
        claude, messages = of(client), [user("1 + 1?")]
        said = await create(claude, messages, tools=[TOOL], max_tokens=900)
        assert said.content[-1].type == kind
        messages += [said.to_param(), results(said) if kind == "tool_use" else user("Go on.")]
        await create(claude, messages, tools=[TOOL], max_tokens=900)
        return 1.0

    written = f'<tool_call>\n{{"name": "add", "arguments": {{"a": {written}, "b": 1}}}}\n</tool_call>'
    rollout, _ = run(agent, written, "2", max_completion_length=99_999)
    assert rollout.error is None and len(rollout.turns) == 2 and len(rollout.records) == 1
