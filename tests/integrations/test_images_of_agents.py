"""Images that agents send: real clients against the endpoint, and the ids that the policy reads, by hand."""

import gc
import io
import sys

import openai
import pytest
import test_agents
import vision_model
from PIL import Image
from scripted import ScriptedTexts
from vision_model import as_bytes, as_uri as uri, expected_ids

from mt_grpo.images.messages import uri_or_str
from mt_grpo.images.pictures import pictures_in
from mt_grpo.integrations.agents.programs import CommandAgent
from mt_grpo.rollout import StopReason

PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
ASKS = "<|im_start|>assistant\n"
VISION_TEMPLATE = vision_model.HERMES_TEMPLATE


def run(agent, tokenizer, *turns, row=None):
    """(the rollout, the policy) of one agent with a scripted policy."""
    return test_agents.run(agent, llm=ScriptedTexts(*turns, tokenizer=tokenizer), tokenizer=tokenizer, row=row)


def shown(value, **more):
    return {"type": "image_url", "image_url": {"url": value, **more}}


def said(text):
    return {"type": "text", "text": text}


def user(*parts):
    return {"role": "user", "content": [said(part) if isinstance(part, str) else part for part in parts]}


def test_two_turns_with_an_image_in_the_second_request_are_one_record(folder, tokenizer):
    """The first image comes again with each request, once written anew by another encoder: it is the same one."""
    one, two = vision_model.picture(1), vision_model.picture(2, (84, 56))
    again = as_bytes(one, "PNG", compress_level=0)
    assert again != as_bytes(one)

    async def agent(row, client):
        messages = [{"role": "system", "content": "See."}, user("Which ", shown(uri(one), detail="high"), "?", "Say.")]
        answer = await client.chat.completions.create(model="policy", messages=messages)
        messages[1]["content"][1] = shown(uri(again))
        messages += [answer.choices[0].message, user(shown(uri(two)), "And this?")]
        answer = await client.chat.completions.create(model="policy", messages=messages)
        return float(answer.usage.prompt_tokens)

    rollout, llm = run(agent, tokenizer, "four", "six")
    first, second = (tokenizer.pictures.read(image, "") for image in (one, two))
    assert (first.num_tokens, second.num_tokens) == (4, 6)
    begin = f"<|im_start|>system\nSee.<|im_end|>\n<|im_start|>user\nWhich {PLACE}?Say.<|im_end|>\n{ASKS}"
    then = f"four<|im_end|>\n<|im_start|>user\n{PLACE}And this?<|im_end|>\n{ASKS}"
    assert [asked for asked, _ in llm.asked] == [
        expected_ids(folder, begin, [first]),
        expected_ids(folder, begin + then, [first, second]),
    ]
    (record,) = rollout.records
    assert record.prompt_ids.count(first.id) == 4 and pictures_in(record.completion_ids) == [second]
    assert rollout.reward == len(llm.asked[1][0]) and rollout.stop_reason == StopReason.AGENT_DONE
    assert rollout.loss_mask.count(1) == sum(len(ids) for _, ids in llm.asked)


@pytest.mark.parametrize("change", ["another", "moved"])
def test_a_changed_image_begins_another_record(change, tokenizer):
    def agent(row, client):
        messages = [user("Which ", shown(uri(vision_model.picture(1))), "?")]
        answer = client.chat.completions.create(model="policy", messages=messages)
        parts = messages[0]["content"]
        if change == "another":
            parts[1] = shown(uri(vision_model.picture(2)))
        else:
            parts[:] = [parts[1], parts[0], parts[2]]
        messages += [answer.choices[0].message, user("And now?")]
        client.chat.completions.create(model="policy", messages=messages)

    rollout, _ = run(agent, tokenizer, "four")
    names = [[picture.name for picture in pictures_in(record.prompt_ids)] for record in rollout.records]
    pictures = [tokenizer.pictures.read(vision_model.picture(k), "").name for k in (1, 2)]
    assert names == [[pictures[0]], [pictures[1 if change == "another" else 0]]]


def test_an_image_in_the_result_of_a_tool(folder, tokenizer):
    """It stands in the record, and rewards find it beside the result's text."""
    image = vision_model.picture(3)
    call = {"id": "a", "type": "function", "function": {"name": "zoom", "arguments": "{}"}}

    def agent(row, client):
        content = [said("Corner:"), shown(uri(image)), said("and"), said("no more.")]
        messages = [user("?"), {"role": "assistant", "content": "", "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "a", "content": content}]  # fmt: skip
        answer = client.chat.completions.create(model="policy", messages=messages)
        messages += [answer.choices[0].message, {"role": "tool", "tool_call_id": "b", "content": content}]
        client.chat.completions.create(model="policy", messages=messages)

    rollout, llm = run(agent, tokenizer, "four")
    picture = tokenizer.pictures.read(image, "")
    turn = f"<|im_start|>user\n<tool_response>\nCorner:{PLACE}and\nno more.\n</tool_response><|im_end|>\n{ASKS}"
    calls = '<|im_start|>assistant\n\n<tool_call>\n{"name": "zoom", "arguments": {}}\n</tool_call><|im_end|>\n'
    whole = f"<|im_start|>user\n?<|im_end|>\n{calls}{turn}four<|im_end|>\n{turn}"
    assert llm.asked[1][0] == expected_ids(folder, whole, [picture, picture])
    assert [result.pictures for result in rollout.turns[0].results] == [(picture,)] and len(rollout.records) == 1


def test_images_of_the_responses_api(folder, tokenizer):
    one, two = vision_model.picture(4), vision_model.picture(5, (28, 28))

    async def agent(row, client):
        content = [{"type": "input_text", "text": "Which?"}, {"type": "input_image", "image_url": uri(one)}]
        answer = await client.responses.create(model="policy", input=[{"role": "user", "content": content}])
        gc.collect()  # the first image is kept for the one that goes on
        content = [{"type": "input_image", "image_url": uri(two), "detail": "auto"}]
        await client.responses.create(
            model="policy", previous_response_id=answer.id, input=[{"role": "user", "content": content}]
        )

    rollout, llm = run(agent, tokenizer, "four")
    first, second = (tokenizer.pictures.read(image, "") for image in (one, two))
    whole = f"<|im_start|>user\nWhich?{PLACE}<|im_end|>\n{ASKS}four<|im_end|>\n"
    whole += f"<|im_start|>user\n{PLACE}<|im_end|>\n{ASKS}"
    assert llm.asked[1][0] == expected_ids(folder, whole, [first, second]) and len(rollout.records) == 1


def test_what_is_no_picture_and_an_image_that_cannot_be_read(tokenizer):
    """Also where the agent's own texts keep other tokens as they are."""

    def agent(row, client):
        messages = [{"role": "system", "content": "Read <|image_pad|>."}, user("<|video_pad|>?"),
                    {"role": "assistant", "content": "<|image_pad|>"}, user("So?")]  # fmt: skip
        client.chat.completions.create(model="policy", messages=messages)

    rollout, llm = run(agent, tokenizer, "four")
    assert not set(llm.asked[0][0]) & set(tokenizer.pictures.unsampled) and len(rollout.turns) == 1
    assert "Read < |image_pad|>." in tokenizer.decode(rollout.prompt_ids)

    def agent(row, client):
        for part, message in BAD:
            with pytest.raises(openai.BadRequestError, match=rf"messages\[0\].content: .*{message}") as found:
                client.chat.completions.create(model="policy", messages=[user(part)])
            assert found.value.param == "messages[0].content" and found.value.code is not None
        client.chat.completions.create(model="policy", messages=[user("Go on.")])

    rollout, llm = run(agent, tokenizer, "four")
    assert rollout.error is None and len(llm.asked) == 1, rollout.error


BAD = [
    (shown("https://127.0.0.1:1/x.png"), "got the image 'https://127.0.0.1:1/x.png', expected a data"),
    (shown("/etc/passwd"), "no address is fetched, no file is kept, and no path is read"),
    (shown(uri(as_bytes(vision_model.picture(0))[:60])), "the image cannot be read"),
    ({"type": "video_url", "video_url": {"url": "data:,"}}, "type .video_url., and the policy reads text"),
]


def test_a_command_gets_a_rows_images_as_data_uris(tmp_path, tokenizer):
    """What it sends of them is the same picture, also of a photograph that a camera held upright."""
    (tmp_path / "agent.py").write_text(
        "import json, sys\nimport openai\n\nrow = json.loads(sys.stdin.readline())\n"
        "parts = [{'type': 'image_url', 'image_url': {'url': u}} for u in (row['image'], row['images'][0]['bytes'])]\n"
        "openai.OpenAI().chat.completions.create(model='policy', messages=[{'role': 'user', 'content': parts}])\n"
        "print(json.dumps({'reward': 1.0, 'other': row['other']}))\n"
    )
    turned = Image.Exif()
    turned[0x0112] = 6
    photograph = Image.open(io.BytesIO(as_bytes(vision_model.picture(8, (84, 56)), "PNG", exif=turned)))
    written = as_bytes(vision_model.picture(9), "JPEG")
    row = {"prompt": [], "image": photograph, "images": [{"bytes": written, "path": None}], "other": b"no image"}
    rollout, _ = run(CommandAgent(f"{sys.executable} {tmp_path / 'agent.py'}"), tokenizer, "four", row=row)
    expected = [tokenizer.pictures.read(value, "") for value in (photograph, written)]
    assert rollout.reward == 1.0 and pictures_in(rollout.prompt_ids) == expected
    assert expected[0].image.size == (56, 84) and rollout.environment.result["other"] == str(b"no image")
    assert uri_or_str(written).startswith("data:image/jpeg;base64,") and uri_or_str(3) == "3"
