"""Images of ms-swift's schedulers: tags, the list of a request, and the ids that the policy reads, by hand."""

import base64
import copy
import io
import json

import pytest
import vision_model
from PIL import Image
from scripted_schedulers import answer, conversations as made, run as run_rollout, step_by, user
from transformers import AutoTokenizer
from vision_model import as_bytes, expected_ids

from mt_grpo.base.rows import Rows
from mt_grpo.images.pictures import pictures_in, with_pictures
from mt_grpo.integrations.ms_swift.conversation import ScheduledConversation
from mt_grpo.integrations.ms_swift.loop import SchedulerFailure
from mt_grpo.integrations.ms_swift.messages import tagged
from mt_grpo.integrations.ms_swift.recipe import as_reward, columns_of, prompt_id
from mt_grpo.integrations.ms_swift.rewards import orms
from mt_grpo.integrations.ms_swift.schedulers import MultiTurnScheduler
from mt_grpo.recipe.checks import check_images, longest_prompt

PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
ASKS = "<|im_start|>assistant\n"
VISION_TEMPLATE = vision_model.HERMES_TEMPLATE
FOUR = f"{ASKS}four<|im_end|>\n<|im_start|>user\n"


def run(step, tokenizer, *turns, row=None, **settings):
    """(the rollout, the policy) of one conversation, by a step of the request that returns `rollout_infos`."""

    def whole_step(self, request, choice, turn):
        return request, step(request) or {}

    cls = step if isinstance(step, type) else step_by(whole_step, base=MultiTurnScheduler)
    return run_rollout(cls, *turns, row=row or ROW, tokenizer=tokenizer, **{"max_turns": 2, **settings})


def opened(text):
    """An image of a request, as plug-ins open it."""
    return Image.open(io.BytesIO(base64.b64decode(text)))


def zooms(request):
    """As schedulers that zoom do: a crop behind the images, a tag for it, and all of them for training."""
    request.images.append(opened(request.images[0]).crop((0, 0, 28, 28)))
    request.messages.append(user("Here: <image>!"))
    return {"images": request.images}


IMAGE, OTHER = vision_model.picture(1), vision_model.picture(2, (84, 56))
ROW = {"prompt": [user("Which <image>?")], "images": [{"bytes": as_bytes(IMAGE), "path": None}]}
BEGIN = f"<|im_start|>user\nWhich {PLACE}?<|im_end|>\n"


def test_an_image_that_a_scheduler_adds_goes_on_in_the_record(folder, tokenizer):
    """A tag in what the policy says, and in the assistant's message, is text."""
    rollout, llm = run(zooms, tokenizer, "four <image>", "six")
    one, crop = (tokenizer.pictures.read(image, "") for image in (IMAGE, IMAGE.crop((0, 0, 28, 28))))
    assert (one.num_tokens, crop.num_tokens) == (4, 1)
    then = f"{ASKS}four <image><|im_end|>\n<|im_start|>user\nHere: {PLACE}!<|im_end|>\n{ASKS}"
    assert llm.asked[0][0] == expected_ids(folder, BEGIN + ASKS, [one])
    assert llm.asked[1][0] == expected_ids(folder, BEGIN + then, [one, crop])
    assert len(rollout.records) == 1 and pictures_in(rollout.completion_ids) == [crop]
    assert rollout.loss_mask.count(1) == sum(len(ids) for _, ids in llm.asked)
    rollout, _ = run(lambda r: zooms(r) and r.messages[-1].update(role="tool"), tokenizer, "four", "six")
    assert [result.pictures for result in rollout.turns[0].results] == [(crop,)]


@pytest.mark.contract("media in rollout_infos")
def test_what_a_scheduler_sees_and_rewards_get(tokenizer, monkeypatch):
    """Texts with tags, and base64. Rewards get the images of the rollout, or else the row's."""
    seen, rewarded = [], []

    def step(request):
        seen.append((copy.deepcopy(request.messages), list(request.images), dict(request.data_dict)))
        return zooms(request)

    row = {**ROW, "image": IMAGE, "images": [as_bytes(OTHER, "BMP")], "prompt": [user("<image>a<image>b")], "goal": 3}
    rollout, _ = run(step, tokenizer, "four", row=row)
    ((messages, images, data_dict),) = seen
    assert messages == [user("<image>a<image>b"), answer("four")] and data_dict == {"goal": 3}
    assert images[1] == base64.b64encode(as_bytes(OTHER, "BMP")).decode() and opened(images[0]).size == (56, 56)
    columns = columns_of([rollout.environment])
    texts = [message["content"] for message in columns["messages"][0]]
    assert texts == ["<image>a<image>b", "four", "Here: <image>!", "four"]
    (last,) = columns["images"]
    assert last[:2] == images and opened(last[2]).size == (28, 28)
    assert columns["rollout_infos"][0]["images"] == last and json.dumps(columns["trajectory_inputs"], default=str)

    monkeypatch.setitem(orms, "looks", lambda completions, images, **kwargs: rewarded.extend(images))
    other, _ = run(lambda request: request.messages.append(user("Go on.")), tokenizer, "four")
    environments = [rollout.environment, other.environment]
    as_reward("looks", None, None)(environments=environments, completions=[], images=["a", "b"])
    assert rewarded == [last, other.environment.row["images"]]


CHANGES = {  # of the request before its second turn -> its text, and the sizes of the second record's images
    "replaced": (lambda r: r.images.__setitem__(0, OTHER), "Which <image>?", [6]),
    "removed": (lambda r: (r.images.clear(), r.messages[0].update(content="Which ?")), "Which ?", []),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_image_is_another_context(name, folder, tokenizer):
    change, text, sizes = CHANGES[name]

    def step(request):
        change(request)
        request.messages.append(user("And now?"))

    rollout, llm = run(step, tokenizer, "four")
    assert [[p.num_tokens for p in pictures_in(record.prompt_ids)] for record in rollout.records] == [[4], sizes]
    whole = f"<|im_start|>user\n{text.replace('<image>', PLACE)}<|im_end|>\n{FOUR}And now?<|im_end|>\n{ASKS}"
    assert llm.asked[1][0] == expected_ids(folder, whole, pictures_in(rollout.records[1].prompt_ids))


@pytest.mark.parametrize("column", ["prompt", "messages"])
def test_parts_in_a_rows_messages_bring_their_images(column, folder, tokenizer):
    parts = [{"type": "image", "image": IMAGE}, {"type": "text", "text": " and "}, {"type": "image"}]
    _, llm = run(zooms, tokenizer, "four", row={column: [user(parts)], "image": OTHER}, max_turns=1)
    text = f"<|im_start|>user\n{PLACE} and {PLACE}<|im_end|>\n{ASKS}"
    shown = [tokenizer.pictures.read(image, "") for image in (IMAGE, OTHER)]
    assert llm.asked[0][0] == expected_ids(folder, text, shown)


def test_the_places_of_a_rows_images_and_the_id_of_its_prompt():
    system, first, last = {"role": "system", "content": "s"}, user("a<image>b"), user("c<image>")
    parts = user([{"type": "text", "text": "<image>,"}, {"type": "image", "image": "o"}])
    for prompt, images, texts, found in (
        ([first, last], "xy", ["a<image>b", "c<image>"], "xy"),
        ([system, user("q"), last], "xyz", ["s", "<image><image>q", "c<image>"], "xyz"),
        ([first, answer("<image>"), last], "xy", ["a<image>b", "<image>", "c<image>"], "xy"),
        ([parts, last], "xyz", ["<image><image>,<image>", "c<image>"], "xyoz"),
    ):
        messages, shown = tagged(prompt, {"images": list(images)}, "row 0")
        assert [message["content"] for message in messages] == texts and shown == list(found)
    for prompt, images in (([first, last], "x"), ([system], "x"), ([first], "")):
        with pytest.raises(ValueError, match=rf"row 0: the columns .* have {len(images)} images, .*Expected as many"):
            tagged(prompt, {"images": list(images)}, "row 0")
    conversations = [ScheduledConversation() for _ in range(3)]
    for conversation, image in zip(conversations, (IMAGE, IMAGE.copy(), OTHER)):
        conversation.reset(prompt=[user("Which?")], image=image)
    first, same, other = map(prompt_id, conversations)
    assert first == same != other


def test_what_a_scheduler_writes_is_no_picture(tokenizer):
    """A scheduler that quotes it has one tag too many: the quoted one is text, and the turn is trained."""

    def step(request):
        request.messages[-1]["content"] += " <|image_pad|>"
        request.messages.append(user("<|video_pad|>"))

    row = {"prompt": [{"role": "system", "content": "<|image_pad|>"}, *ROW["prompt"]], "images": ROW["images"]}
    rollout, llm = run(step, tokenizer, "four", row=row)
    assert not any(set(asked) & set(tokenizer.pictures.unsampled) for asked, _ in llm.asked)
    assert len(rollout.turns) == 2

    def quotes(request):
        request.messages.append(user(f"You said {request.messages[-1]['content']}. Look again."))

    rollout, llm = run(quotes, tokenizer, "four <image>", "six")
    (one,) = pictures_in(rollout.prompt_ids)
    assert len(rollout.turns) == 2
    assert "You said four < image>. Look again." in tokenizer.decode(llm.asked[1][0])
    assert [each for asked, _ in llm.asked for each in pictures_in(asked)] == [one, one]


BAD = {
    "more images": (lambda r: r.images.append(OTHER), "has 2 images, and its messages have 1 tags <image>. "),
    "a path": (lambda r: r.images.__setitem__(0, "/etc/passwd"), "image 0 is '/etc/passwd', expected base64"),
    "audios": (lambda r: setattr(r, "audios", ["a.mp3"]), "The request has audios"),
    "videos": (lambda r: setattr(r, "videos", ["a.mp4"]), "The request has videos"),
}


@pytest.mark.contract("media in rollout_infos")
@pytest.mark.parametrize("name", BAD)
def test_media_that_do_not_fit_end_their_rollout(name, tokenizer):
    change, message = BAD[name]
    with pytest.raises(SchedulerFailure, match=message):
        run(change, tokenizer, "four", row={**ROW, "images": list(ROW["images"])})


def test_rows_are_checked_at_the_start(folder, tokenizer, tmp_path):
    (tmp_path / "p.png").write_bytes(as_bytes(IMAGE))
    env = made(MultiTurnScheduler, tokenizer=tokenizer)
    good = [ROW, {"messages": ROW["prompt"], "image": str(tmp_path / "p.png")}, {"prompt": [user("No image.")]}]
    check_images(Rows(good), "data", env)
    shown = {"prompt": [user("Which <image>?")], "image": vision_model.picture(3, (112, 112))}
    lengths = [longest_prompt(env, Rows([row])) for row in ({"prompt": [user("Which ?")]}, shown)]
    assert lengths[1] == lengths[0] + 16 + 2  # the picture's, and around it
    for row, message in (
        ({"prompt": [user("<image><image>")], "image": IMAGE}, "row 1: .* have 1 images, and the prompt has 2 tags"),
        ({"messages": [user("<image>")], "images": [b"x"]}, "row 1, image 0: the image cannot be read"),
        ({"images": [IMAGE]}, "row 1: .* have 1 images, and the prompt has 0 tags"),
    ):
        with pytest.raises(ValueError, match=message):
            check_images(Rows([ROW, row]), "data", env)
    env.tokenizer = with_pictures(AutoTokenizer.from_pretrained(folder), "it is a test")
    with pytest.raises(ValueError, match="row 0: the column 'images' .* would not see it"):
        check_images(Rows(good), "data", env)


def test_a_model_that_reads_text_alone(folder, tokenizer):
    """A tag is text there, and an image is refused. A row's text beside an image keeps its tags: it is the operator's,
    who may show tags of formats. What a scheduler says is broken."""
    plain = with_pictures(AutoTokenizer.from_pretrained(folder), "it is a test")
    with pytest.raises(SchedulerFailure, match="The request has images"):
        run(lambda request: request.images.append(OTHER), plain, "four", row={"prompt": [user("Which?")]})
    rollout, _ = run(MultiTurnScheduler, plain, "four", row={"prompt": [user("A tag <image>?")]}, max_turns=1)
    assert "A tag <image>?" in plain.decode(rollout.prompt_ids)
    row = {**ROW, "prompt": [user("End <image> by </result>.")]}
    _, llm = run(lambda request: request.messages.append(user("End </result>.")), tokenizer, "four", row=row)
    text = f"<|im_start|>user\nEnd {PLACE} by </result>.<|im_end|>\n{FOUR}End < /result>.<|im_end|>\n{ASKS}"
    assert llm.asked[1][0] == expected_ids(folder, text, [tokenizer.pictures.read(IMAGE, "")])
