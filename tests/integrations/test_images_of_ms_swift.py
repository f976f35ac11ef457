"""Images of ms-swift's schedulers: tags, the list of a request, and the ids that the policy reads, by hand."""

import asyncio
import base64
import contextlib
import copy
import gc
import io
import json
import re

import pytest
import vision_model
from PIL import Image
from test_images_of_agents import Scripted, as_bytes
from transformers import AutoTokenizer

import mt_grpo_trainer as mt
from mt_grpo.base.event_loop import run_async
from mt_grpo.base.pictures import KNOWN, pictures_in
from mt_grpo.base.rows import Rows
from mt_grpo.conversation.pictures import PictureReader, with_pictures
from mt_grpo.integrations.ms_swift import paths as swift_paths
from mt_grpo.integrations.ms_swift.conversation import ScheduledConversation, SchedulerConversation
from mt_grpo.integrations.ms_swift.loop import SchedulerFailure
from mt_grpo.integrations.ms_swift.loss import loss_scale_map, read_loss_scale
from mt_grpo.integrations.ms_swift.pictures import tagged
from mt_grpo.integrations.ms_swift.protocol import RolloutInferRequest, RolloutOutput
from mt_grpo.integrations.ms_swift.recipe import as_reward, columns_of, prompt_id
from mt_grpo.integrations.ms_swift.rewards import orms
from mt_grpo.integrations.ms_swift.schedulers import MultiTurnScheduler
from mt_grpo.recipe.checks import check_images, longest_prompt

PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
ASKS = "<|im_start|>assistant\n"
swift_paths.install()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return vision_model.save(tmp_path_factory.mktemp("vision"), template=vision_model.HERMES_TEMPLATE)


@pytest.fixture
def tokenizer(folder):
    return vision_model.reading(folder)


def conversations(cls, tokenizer, loss_scale="default", **settings):
    own = {"scheduler_class": cls, "scheduler_kwargs": {"max_turns": settings.pop("max_turns", 3)},
           "loss": read_loss_scale(loss_scale, loss_scale_map), "length_scope": "per_round", "max_model_calls": 8,
           "passes_dataset": True}  # fmt: skip
    mixed = type("SchedulerConversation", (SchedulerConversation, mt.MultiTurnToolEnv), own)
    return mixed([], None, environment=ScheduledConversation, tokenizer=tokenizer, tool_format="hermes",
                 max_completion_length=400, environment_timeout=20.0, **settings)  # fmt: skip


def run(cls, tokenizer, *turns, row=None, **settings):
    """(the rollout, the policy) of one conversation with a scripted policy. Raises what failed."""
    env, llm = conversations(cls, tokenizer, **settings), Scripted(tokenizer, *turns)
    llm.env = env
    (rollout,) = env.start([row.get("prompt") or []], rows=[row])
    run_async(env.converse(rollout, llm, {"temperature": 1.0}))
    env.close([rollout])
    if rollout.error is not None:
        raise rollout.error
    for record in rollout.records:
        read = list(record.prompt_ids)
        for turn in record.turns:
            assert (read, turn.token_ids) in llm.asked
            read = read + turn.token_ids + turn.observation_ids
    return rollout, llm


def opened(text):
    """An image of a request, as plug-ins open it."""
    return Image.open(io.BytesIO(base64.b64decode(text)))


def user(content):
    return {"role": "user", "content": content}


def expected_ids(folder, text, pictures):
    """The ids of a text, by the tokenizer as it is saved, with as many ids of each picture as it has tokens."""
    plain = AutoTokenizer.from_pretrained(folder)
    found, following = [], iter(pictures)
    for token in plain(text, add_special_tokens=False)["input_ids"]:
        pad = token == plain.convert_tokens_to_ids("<|image_pad|>")
        found += [(p := next(following)).id] * p.num_tokens if pad else [token]
    assert next(following, None) is None
    return found


def stepping(step):
    """A scheduler whose `step` is `step(infer_request)`, and what `rollout_infos` it returns."""

    def wrapped(self, infer_request, response_choice, current_turn):
        infos = step(infer_request)
        return {"infer_request": infer_request, **({"rollout_infos": infos} if infos else {})}

    return type("Steps", (MultiTurnScheduler,), {"step": wrapped})


def zooms(request):
    """As schedulers that zoom do: a crop behind the images, a tag for it, and all of them for training."""
    request.images.append(opened(request.images[0]).crop((0, 0, 28, 28)))
    request.messages.append(user("Here: <image>!"))
    return {"images": request.images}


IMAGE, OTHER = vision_model.picture(1), vision_model.picture(2, (84, 56))
ROW = {"prompt": [user("Which <image>?")], "images": [{"bytes": as_bytes(IMAGE), "path": None}]}


# -- ids --


def test_an_image_that_a_scheduler_adds_goes_on_in_the_record(folder, tokenizer):
    """A tag in what the policy says, and in the assistant's message, is text."""
    rollout, llm = run(stepping(zooms), tokenizer, "four <image>", "six", row=ROW, max_turns=2)
    one, crop = (tokenizer.pictures.read(image, "") for image in (IMAGE, IMAGE.crop((0, 0, 28, 28))))
    assert (one.num_tokens, crop.num_tokens) == (4, 1)
    begin = f"<|im_start|>user\nWhich {PLACE}?<|im_end|>\n{ASKS}"
    then = f"four <image><|im_end|>\n<|im_start|>user\nHere: {PLACE}!<|im_end|>\n{ASKS}"
    assert [asked for asked, _ in llm.asked] == [
        expected_ids(folder, begin, [one]),
        expected_ids(folder, begin + then, [one, crop]),
    ]
    assert len(rollout.records) == 1 and pictures_in(rollout.completion_ids) == [crop]
    assert rollout.loss_mask.count(1) == sum(len(ids) for _, ids in llm.asked)


@pytest.mark.contract("media in rollout_infos")
def test_what_a_scheduler_sees_and_rewards_get(tokenizer):
    """Texts with tags, and base64: of bytes as they are, of the rest a PNG."""
    seen = []

    def step(request):
        seen.append((copy.deepcopy(request.messages), list(request.images), dict(request.data_dict)))
        return zooms(request)

    row = {**ROW, "image": IMAGE, "images": [as_bytes(OTHER, "BMP")], "prompt": [user("<image>a<image>b")], "goal": 3}
    rollout, _ = run(stepping(step), tokenizer, "four", row=row, max_turns=2)
    ((messages, images, data_dict),) = seen
    assert messages == [user("<image>a<image>b"), {"role": "assistant", "content": "four"}] and data_dict == {
        "goal": 3
    }
    assert images[1] == base64.b64encode(as_bytes(OTHER, "BMP")).decode() and opened(images[0]).size == (56, 56)
    columns = columns_of([rollout.environment])
    assert [message["content"] for message in columns["messages"][0]] == [
        "<image>a<image>b", "four", "Here: <image>!", "four",
    ]  # fmt: skip
    (last,) = columns["images"]
    assert last[:2] == images and opened(last[2]).size == (28, 28)
    assert columns["rollout_infos"][0]["images"] == last and json.dumps(columns["trajectory_inputs"], default=str)


def test_rewards_get_the_images_of_the_rollout_in_place_of_the_rows(monkeypatch, tokenizer):
    found = []

    def reward(completions, images, **kwargs):
        found.extend(images)
        return [0.0 for _ in completions]

    monkeypatch.setitem(orms, "looks", reward)
    environments = [run(stepping(step), tokenizer, "four", row=ROW, max_turns=2)[0].environment
                    for step in (zooms, lambda request: request.messages.append(user("Go on.")))]  # fmt: skip
    rewarded = as_reward("looks", None, None)(environments=environments, completions=[], images=["a", "b"])
    assert rewarded == [0.0, 0.0] and [len(images) for images in found] == [2, 1]
    assert found[1] is environments[1].row["images"]


CHANGES = {  # of the request before its second turn -> the sizes of the second record's images
    "replaced": (lambda r: r.images.__setitem__(0, OTHER), "Which <image>?", [6]),
    "removed": (lambda r: (r.images.clear(), r.messages[0].update(content="Which ?")), "Which ?", []),
    "put before": (lambda r: (r.images.insert(0, OTHER), r.messages[0].update(content="<image>, <image>")),
                   "<image>, <image>", [6, 4]),
    "none and text": (lambda r: (setattr(r, "images", None), r.messages[0].update(content="Go")), "Go", []),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_another_image_is_another_context(name, folder, tokenizer):
    change, text, sizes = CHANGES[name]

    def step(request):
        change(request)
        request.messages.append(user("And now?"))

    rollout, llm = run(stepping(step), tokenizer, "four", row=ROW, max_turns=2)
    assert [[p.num_tokens for p in pictures_in(record.prompt_ids)] for record in rollout.records] == [[4], sizes]
    whole = f"<|im_start|>user\n{text.replace('<image>', PLACE)}<|im_end|>\n{ASKS}four<|im_end|>\n"
    whole += f"<|im_start|>user\nAnd now?<|im_end|>\n{ASKS}"
    assert llm.asked[1][0] == expected_ids(folder, whole, pictures_in(rollout.records[1].prompt_ids))


def test_parts_in_messages_bring_their_images(folder, tokenizer):
    """Of a row, with and without a column `prompt`, and of a scheduler."""
    parts = [{"type": "image", "image": IMAGE}, {"type": "text", "text": " and "}, {"type": "image"}]
    for column in ("prompt", "messages"):
        rollout, llm = run(
            stepping(zooms), tokenizer, "four", row={column: [user(parts)], "image": OTHER}, max_turns=1
        )
        text = f"<|im_start|>user\n{PLACE} and {PLACE}<|im_end|>\n{ASKS}"
        shown = [tokenizer.pictures.read(image, "") for image in (IMAGE, OTHER)]
        assert llm.asked[0][0] == expected_ids(folder, text, shown), column

    def step(request):
        request.messages.append(user([{"type": "text", "text": "See "}, {"type": "image_url", "image_url": uri}]))

    uri = {"url": f"data:image/png;base64,{base64.b64encode(as_bytes(OTHER)).decode()}"}
    rollout, _ = run(stepping(step), tokenizer, "four", row={"prompt": [user("Which?")]}, max_turns=2)
    assert [p.num_tokens for p in pictures_in(rollout.completion_ids)] == [6] and len(rollout.records) == 1


def test_the_places_of_a_rows_images():
    system, first, last = {"role": "system", "content": "s"}, user("a<image>b"), user("c<image>")
    said = {"role": "assistant", "content": "<image>"}
    for prompt, images, texts, found in (
        ([first, last], "xy", ["a<image>b", "c<image>"], "xy"),
        ([system, user("q"), last], "xyz", ["s", "<image><image>q", "c<image>"], "xyz"),
        ([first, said, last], "xy", ["a<image>b", "<image>", "c<image>"], "xy"),
        ([user([{"type": "text", "text": "<image>,"}, {"type": "image", "image": "o"}]), last], "xyz",
         ["<image><image>,<image>", "c<image>"], "xyoz"),
    ):  # fmt: skip
        messages, shown = tagged(prompt, {"images": list(images)}, "row 0")
        assert [message["content"] for message in messages] == texts and shown == list(found)
    for prompt, images in (([first, last], "x"), ([system], "x"), ([first], "")):
        with pytest.raises(ValueError, match=rf"row 0: the columns .* have {len(images)} images, .*Expected as many"):
            tagged(prompt, {"images": list(images)}, "row 0")


def test_a_run_of_ones_own_and_a_session_that_is_cut_off(tokenizer):
    """What was said so far has tags, whatever the model read."""

    class Own(MultiTurnScheduler):
        async def run(self, infer_request, request_config, **kwargs):
            while True:
                response = await self.infer_engine.infer_async(infer_request, request_config)
                infer_request.messages.append({"role": "assistant", "content": response.choices[0].message.content})
                zooms(infer_request)

    rollout, _ = run(Own, tokenizer, "four", row=ROW)
    assert len(rollout.turns) == 8 and len(rollout.records) == 1 and len(pictures_in(rollout.completion_ids)) == 7
    (output,) = rollout.environment.outputs
    assert [message["content"] for message in output["messages"][:3]] == ["Which <image>?", "four", "Here: <image>!"]


def test_a_rows_text_beside_an_image_keeps_its_tags(folder, tokenizer):
    """It is the operator's, who may show tags of formats. What a scheduler says is broken."""

    def step(request):
        request.messages.append(user("End </result>."))

    row = {**ROW, "prompt": [user("End <image> by </result>.")]}
    _, llm = run(stepping(step), tokenizer, "four", row=row, max_turns=2)
    text = f"<|im_start|>user\nEnd {PLACE} by </result>.<|im_end|>\n{ASKS}four<|im_end|>\n"
    text += f"<|im_start|>user\nEnd < /result>.<|im_end|>\n{ASKS}"
    assert llm.asked[1][0] == expected_ids(folder, text, [tokenizer.pictures.read(IMAGE, "")])


def test_a_placeholder_that_a_scheduler_writes_is_no_picture(tokenizer):
    def step(request):
        request.messages[-1]["content"] += " <|image_pad|>"
        request.messages.append(user("<|video_pad|>"))

    row = {"prompt": [{"role": "system", "content": "<|image_pad|>"}, *ROW["prompt"]], "images": ROW["images"]}
    rollout, llm = run(stepping(step), tokenizer, "four", row=row, max_turns=2)
    assert not any(set(asked) & set(tokenizer.pictures.unsampled) for asked, _ in llm.asked)
    assert len(rollout.turns) == 2


def test_no_picture_outlives_its_rollouts(tokenizer):
    row = {**ROW, "images": [{"bytes": as_bytes(vision_model.picture(977)), "path": None}]}  # of no other test
    rollout, llm = run(stepping(zooms), tokenizer, "four", row=row, max_turns=2)
    numbers = [int(picture.id) for picture in pictures_in(rollout.prompt_ids + rollout.completion_ids)]
    gc.collect()
    assert set(numbers) <= set(KNOWN)
    env = llm.env
    del rollout, llm
    gc.collect()
    assert not set(numbers) & set(KNOWN) and env.engine.sessions == {}


def test_images_are_read_in_a_thread(tokenizer, monkeypatch):
    """No other conversation waits for them, but where a rollout begins."""
    on_loop, read = [], PictureReader.read

    def noted(self, value, where, paths=False):
        on_loop.append((where, asyncio._get_running_loop() is not None))
        return read(self, value, where, paths)

    monkeypatch.setattr(PictureReader, "read", noted)
    run(stepping(zooms), tokenizer, "four", row=ROW, max_turns=2)
    assert [each for each in on_loop if each[0].startswith("The request")] == [
        ("The request's image 0", False), ("The request's image 1", False),
    ]  # fmt: skip


# -- what fails --

BAD = {
    "more images": (lambda r: r.images.append(OTHER), "has 2 images, and its messages have 1 tags <image>. "),
    "no list": (lambda r: setattr(r, "images", 5), "The request's images is 5, expected a list"),
    "a path": (lambda r: r.images.__setitem__(0, "/etc/passwd"), "image 0: .*got '/etc/passwd', expected a PIL image"),
    "an address": (lambda r: r.images.__setitem__(0, "http://127.0.0.1:1/a"), "URLs are not fetched"),
    "broken": (lambda r: r.images.__setitem__(0, as_bytes(IMAGE)[:50]), "image 0: the image cannot be read"),
    "both": (lambda r: r.messages.append(user([{"type": "image", "image": OTHER}])), "has images, and parts of its"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_images_that_do_not_fit_end_their_rollout(name, tokenizer):
    change, message = BAD[name]
    with pytest.raises(SchedulerFailure, match=message):
        run(stepping(change), tokenizer, "four", row={**ROW, "images": list(ROW["images"])}, max_turns=2)


@pytest.mark.contract("media in rollout_infos")
@pytest.mark.parametrize("kind", ["audios", "videos"])
def test_audios_and_videos_of_a_request_end_its_rollout(kind, tokenizer):
    with pytest.raises(SchedulerFailure, match=f"The request has {kind}"):
        run(stepping(lambda request: setattr(request, kind, ["a.mp4"])), tokenizer, "four", row=ROW, max_turns=2)


def test_rows_are_checked_at_the_start(folder, tokenizer, tmp_path):
    (tmp_path / "p.png").write_bytes(as_bytes(IMAGE))
    env = conversations(stepping(zooms), tokenizer)
    good = [ROW, {"messages": ROW["prompt"], "image": str(tmp_path / "p.png")}, {"prompt": [user("No image.")]}]
    check_images(Rows(good), "data", env)
    shown = {"prompt": [user("Which <image>?")], "image": vision_model.picture(3, (112, 112))}
    lengths = [longest_prompt(env, Rows([row])) for row in ({"prompt": [user("Which ?")]}, shown)]
    assert lengths[1] == lengths[0] + 16 + 2  # the picture's, and around it
    for row, message in (
        ({"prompt": [user("<image><image>")], "image": IMAGE}, "row 1: .* have 1 images, and the prompt has 2 tags"),
        ({"messages": [user("<image>")], "images": [b"x"]}, "row 1, image 0: the image cannot be read"),
        ({"messages": "text", "images": [b"x"]}, "row 1: messages is 'text', expected"),
        ({"images": [IMAGE]}, "row 1: .*the row has no prompt to put it into"),
    ):
        with pytest.raises(ValueError, match=message):
            check_images(Rows([ROW, row]), "data", env)
    env.tokenizer = with_pictures(AutoTokenizer.from_pretrained(folder), "it is a test")
    with pytest.raises(ValueError, match="row 0: the column 'images' .* would not see it"):
        check_images(Rows(good), "data", env)


@pytest.mark.parametrize(
    "row", [{"prompt": [user("Which?")]}, {"messages": [user([{"type": "image", "image": IMAGE}])]}]
)
def test_a_model_that_reads_text_alone(row, folder):
    """A tag is text there. An image is refused, wherever it comes from."""
    plain = with_pictures(AutoTokenizer.from_pretrained(folder), "it is a test")
    with pytest.raises(SchedulerFailure, match="The request has images"):
        run(stepping(zooms_into_another), plain, "four", row=row, max_turns=2)
    rollout, _ = run(stepping(lambda r: None), plain, "four", row={"prompt": [user("A tag <image>?")]}, max_turns=1)
    assert "A tag <image>?" in plain.decode(rollout.prompt_ids)


def zooms_into_another(request):
    request.images.append(OTHER)
    request.messages.append(user("<image>"))


def test_protocol_of_images():
    request = RolloutInferRequest([user("<image>")], images="abc")
    assert request.images == ["abc"]
    image = vision_model.picture(3)
    infos = RolloutOutput(response=0, rollout_infos={"images": (image, as_bytes(image), "/no/path")}).rollout_infos
    assert opened(infos["images"][0]).tobytes() == image.tobytes() and infos["images"][2] == "/no/path"
    assert infos["images"][1] == base64.b64encode(as_bytes(image)).decode()
    assert RolloutOutput(response=0, rollout_infos={"images": image}).rollout_infos["images"] == infos["images"][:1]


def test_prompts_with_other_images_have_other_ids():
    def id_of(image):
        conversation = ScheduledConversation()
        conversation.reset(prompt=[user("Which?")], image=image)
        return prompt_id(conversation)

    assert id_of(IMAGE) == id_of(IMAGE.copy()) != id_of(OTHER) and isinstance(id_of(None), str)


# -- training --


class Zoom(MultiTurnScheduler):
    """As DeepEyes' scheduler: the box of a call is cut out of the first image, and shown in a message of the user."""

    def check_finished(self, infer_request, response_choice, current_turn):
        ended = super().check_finished(infer_request, response_choice, current_turn)
        return ended or not re.search("<tool_call>(.*?)</tool_call>", infer_request.messages[-1]["content"], re.DOTALL)

    def step(self, infer_request, response_choice, current_turn):
        call = re.findall("<tool_call>(.*?)</tool_call>", response_choice.message.content, re.DOTALL)[-1]
        try:
            box = json.loads(call)["arguments"]["bbox_2d"]
            infer_request.images.append(opened(infer_request.images[0]).crop(box))
            said = "<tool_response><image>\nAnswer.</tool_response>"
        except Exception as error:
            said = f"Error: {error}"
        infer_request.messages.append(user(said))
        return {"infer_request": infer_request, "rollout_infos": {"images": infer_request.images}}


class Zooms(Scripted):
    """Zooms into another box in each rollout of a group, once wrongly, and answers."""

    async def generate(self, prompt_ids, max_tokens, sampling_params=None, index=0):
        box = "x" if index % 4 == 3 else json.dumps([0, 0, 28 * (1 + index % 4), 28])
        call = f'<tool_call>{{"name": "zoom", "arguments": {{"bbox_2d": {box}}}}}</tool_call>'
        answered = any(word in self.tokenizer.decode(prompt_ids) for word in ("Answer.", "Error"))
        self.turns = [f"<answer>{index}</answer>" if answered else call]
        return await super().generate(prompt_ids, max_tokens, sampling_params, index)


@pytest.mark.parametrize("shares", [True, False])
def test_two_steps_of_a_scheduler_that_zooms(shares, folder, tmp_path, monkeypatch):
    """With a judge that counts messages of users with a tag, as DeepEyes' reward does."""
    counted = []

    def judge(completions, messages, images, **kwargs):
        shown = [sum("<image>" in m["content"] for m in each if m["role"] == "user") for each in messages]
        counted.extend(zip(shown, map(len, images)))
        return [float(len(text) % 3) + number for text, number in zip(completions, shown)]

    monkeypatch.setitem(orms, "counts", judge)
    env = conversations(Zoom, None, max_turns=3)
    args = mt.MTGRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        per_device_train_batch_size=8, num_generations=4, max_completion_length=400, max_steps=2, logging_steps=1,
        learning_rate=1e-3, save_strategy="no", disable_tqdm=True, seed=3, share_prompts=shares, log_rollouts=8,
    )  # fmt: skip
    images = [[as_bytes(vision_model.picture(20 + k, (84, 84)))] for k in range(4)]
    rows = Rows([{"prompt": [user("<image>Which digit?")], "images": each} for each in images])
    reward = as_reward("counts", None, None)
    trainer = mt.MTGRPOEnvTrainer(str(folder), env, [], [reward], args=args, train_dataset=rows)
    trainer.llm = Zooms(trainer.processing_class, "")
    with contextlib.closing(env):
        trainer.train()
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert len(logs) == 2 and all(log["records/mean"] == 1.0 and log["turns/mean"] == 2.0 for log in logs)
    assert all(log["grad_norm"] > 0 and log["tokens/ids_differ"] == 0 for log in logs)
    assert sorted(counted) == sorted([(2, 2)] * 12 + [(1, 1)] * 4)
    sizes = [[p.num_tokens for p in pictures_in(r.completion_ids)] for r in trainer.batch.rollouts]
    assert sorted(sizes) == [[], [], [1], [1], [2], [2], [3], [3]]
    text = (tmp_path / "rollouts.rank0.jsonl").read_text()
    assert "ufdd0" not in text and len(list((tmp_path / "images").iterdir())) > 4


def test_a_policy_that_writes_a_tag_cannot_end_its_rollout(tokenizer):
    """A scheduler that quotes it has one tag too many: the quoted one is text, and the turn is trained."""

    def quotes(request):
        request.messages.append(user(f"You said {request.messages[-1]['content']}. Look again."))

    rollout, llm = run(stepping(quotes), tokenizer, "four <image>", "six", row=ROW, max_turns=2)
    (one,) = pictures_in(rollout.prompt_ids)
    assert rollout.error is None and len(rollout.turns) == 2
    assert "You said four < image>. Look again." in tokenizer.decode(llm.asked[1][0])
    assert [each for asked, _ in llm.asked for each in pictures_in(asked)] == [one, one]
