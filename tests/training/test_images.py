"""Pictures: what is read of a row or a tool's result, the ids that stand for them, and what reaches the loss."""

import asyncio
import contextlib
import copy
import gc
import json
import pickle
import random
from concurrent.futures import ThreadPoolExecutor

import evaluate
import pytest
import torch
import vision_model
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer
from trl.trainer.utils import add_fused_lm_head
from vision_model import as_bytes, as_uri, expected_ids
from vision_run import gradients_of, make_trainer, some_rows, user, write_recipe

from mt_grpo.base.rows import Rows
from mt_grpo.conversation.formats.control_tokens import cut_to_tokens
from mt_grpo.conversation.tools.running import as_result
from mt_grpo.generation.weights import why_model_merges
from mt_grpo.images import pictures
from mt_grpo.images.forward import features_of, forbid, inputs_of_requests
from mt_grpo.images.messages import mark_of
from mt_grpo.images.pictures import (
    FIRST_ID,
    KNOWN,
    has_too_many,
    is_picture,
    picture_of,
    pictures_in,
    readable,
    runs_of,
    with_pictures,
    with_placeholders,
)
from mt_grpo.images.reader import image_reader, inputs_of_rows, read_row
from mt_grpo.recipe.checks import check_images
from mt_grpo.rollout import Rollout
from mt_grpo.training.batch import FURTHER_RECORDS
from mt_grpo.training.policy_scores import scores_of_model
from mt_grpo.training.shared_prompts import Example, SharedRow, forward_inputs, take_shared_rows
from mt_grpo_trainer import MultiTurnToolEnv


def test_an_id_is_of_the_pixels_and_the_size_and_of_one_picture(tokenizer):
    """Where tools read it at the same time, and where it comes from another rank."""
    read = tokenizer.pictures.read
    one, same, turned = (
        read(vision_model.picture(k, size), "") for k, size in ((0, (56, 84)), (0, (56, 84)), (0, (84, 56)))
    )
    assert one is same and one.id != turned.id and (one.grid, turned.grid) == ((3, 2), (2, 3))
    plain = [read(Image.new("RGB", size), "") for size in ((56, 84), (84, 56))]  # of the same bytes
    assert plain[0].id != plain[1].id and plain[0].image.tobytes() == plain[1].image.tobytes()
    assert FIRST_ID <= one.id < 2**63 and one.num_tokens == 6 and one.id.picture is one
    assert tokenizer.pictures.placeholder == tokenizer.convert_tokens_to_ids("<|image_pad|>") == one.placeholder
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(tokenizer.pictures.read, [vision_model.picture(30)] * 8, [""] * 8))
    assert len({id(each) for each in found}) == 1 and pickle.loads(pickle.dumps(found[0])) is found[0]


def test_a_picture_is_known_as_long_as_ids_hold_it(tokenizer):
    picture = tokenizer.pictures.read(vision_model.picture(77), "")  # which no other test reads, and may still hold
    ids = tokenizer(f"a {mark_of(picture)} b")["input_ids"]
    del picture
    ids = copy.deepcopy(ids)[1:]  # as rollouts are copied
    gc.collect()
    (picture,) = pictures_in(ids)
    plain = [int(token) for token in ids]  # as of a tensor
    assert pictures_in(plain) == [picture]
    sent = pickle.dumps((picture, ids))
    number = int(picture.id)
    del picture, ids
    gc.collect()
    assert number not in KNOWN  # no picture of an earlier batch stays
    received, ids = pickle.loads(sent)
    assert KNOWN[number] is received and torch.equal(
        received.features["pixel_values"], pictures_in(ids)[0].features["pixel_values"]
    )


def test_a_picture_stands_in_a_record_whole_or_not_at_all(tokenizer):
    """Where those with pictures train nothing, what is laid out has none: positions are of one form all the same."""
    one, two = (tokenizer.pictures.read(vision_model.picture(k), "") for k in range(2))
    ids = [5, *4 * [one.id], *8 * [two.id], 6, 7]
    assert [len(run) for run in runs_of(ids)] == [1, 4, 4, 4, 2] and pictures_in(ids) == [one, two, two]
    pad = one.placeholder
    assert with_placeholders(ids) == [5, *12 * [pad], 6, 7]
    with pytest.raises(ValueError, match="An image of 4 tokens has 3 tokens here"):
        runs_of(ids[:4])
    rows, found = inputs_of_rows(torch.tensor([ids, [5, 6, 7, *4 * [one.id], *8 * [0]]]))
    assert rows.tolist() == [with_placeholders(ids), [5, 6, 7, *4 * [pad], *8 * [0]]] and found["num_images"] == [3, 1]
    assert torch.equal(found["pixel_values"], torch.cat([p.features["pixel_values"] for p in (one, two, two, one)]))
    assert found["mm_token_type_ids"].sum(1).tolist() == [12, 4] and inputs_of_rows(torch.ones(2, 3))[1] == {}
    picture = tokenizer.pictures.read(vision_model.picture(1), "")
    examples = {0: Example([1, *4 * [picture.id]], [5], [0]), 1: Example([1, 2], [6, 7], [1, 1])}
    row = SharedRow(examples, (2, 2))
    assert row.position_ids.shape == (3, 1, 3) and row.shown == [] and row.position_ids[0, 0].tolist() == [0, 1, 2]


def test_where_a_picture_comes_from(tokenizer, tmp_path):
    image, read = vision_model.picture(2), tokenizer.pictures.read
    data = as_bytes(image)
    (tmp_path / "p.png").write_bytes(data)
    uri = as_uri(data)
    ways = image, data, uri, {"url": uri}, {"bytes": data, "path": None}, image.convert("RGBA")
    found = [read(way, "") for way in ways] + [read(way, "", paths=True) for way in (str(tmp_path / "p.png"),)]
    assert {each.digest for each in found} == {found[0].digest}
    assert read(image.convert("CMYK"), "").image.mode == read(image.convert("L"), "").image.mode == "RGB"
    assert read(Image.new("RGB", (1, 1)), "").num_tokens == 1
    hidden = Image.new("RGBA", (56, 56))  # black that is not seen: a web page shows it white, and so does vLLM
    assert read(hidden, "").image.getpixel((0, 0)) == (255, 255, 255)
    with pytest.raises(ValueError, match="its mode is I;16, expected samples of 8 bits"):
        read(Image.new("I;16", (56, 56), 30000), "")
    turned = Image.Exif()
    turned[0x0112] = 6  # as a camera says that it was held upright
    photograph = read(as_bytes(vision_model.picture(3, (84, 56)), "PNG", exif=turned), "")
    assert photograph.image.size == (56, 84)


def test_another_reader_reads_another_picture(folder, tmp_path):
    """Of the same pixels, in one process: two models, or one with two settings."""
    one = vision_model.reading(folder).pictures
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    settings["size"] = {"shortest_edge": 28 * 28, "longest_edge": 56 * 56}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    other, image = vision_model.reading(tmp_path).pictures, vision_model.picture(3, (112, 112))
    found = one.read(image, ""), other.read(image, "")
    assert [each.num_tokens for each in found] == [16, 4] and found[0].id != found[1].id
    tokenizer, config = AutoTokenizer.from_pretrained(folder), vision_model.AutoConfig.from_pretrained(folder)
    assert image_reader(str(folder), config, tokenizer, own=other.processor).read(image, "") is found[1]
    settings["size"] = {"shortest_edge": 44 * 44, "longest_edge": 44 * 44}  # no size of it is stable
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="number of pixels are too close"):
        vision_model.reading(tmp_path).pictures.read(vision_model.picture(3, (112, 80)), "")


FRAMES = as_bytes(vision_model.picture(0), "GIF", save_all=True, append_images=[vision_model.picture(1)])


@pytest.mark.parametrize("value, message", [
    ("/etc/passwd", "got '/etc/passwd', expected a PIL image"), ("http://127.0.0.1:1/x.png", "URLs are not fetched"),
    (as_bytes(vision_model.picture(0))[:60], "(truncated|broken|identify)"), (FRAMES, "animated"),
    (Image.new("RGB", (8000, 8)), "aspect ratio"), ({"bytes": None}, "expected a PIL image"),
], ids=range(6))  # fmt: skip
def test_what_is_no_picture(value, message, tokenizer):
    with pytest.raises(ValueError, match=f"row 3: the image cannot be read: .*{message}"):
        tokenizer.pictures.read(value, "row 3")


@pytest.mark.contract("images in rows")
def test_the_places_of_a_rows_images(tokenizer):
    """Parts take them in order, or verl's tags; without one they stand before the first text of a user, as in TRL."""
    images = [vision_model.picture(k) for k in range(3)]
    names = [tokenizer.pictures.read(image, "").name for image in images]
    place, own = {"type": "image"}, {"type": "image", "image": images[2]}
    env = MultiTurnToolEnv([], None, tokenizer=tokenizer)

    def shown(prompt, **row):
        messages, found = read_row(prompt, row, tokenizer, env, "row 0")
        text = "|".join(readable(message["content"]) for message in messages)
        for k, name in enumerate(names):
            text = text.replace(f"<image {name}>", f"<{k}>")
        assert text.count("<") == len(found)
        return text

    assert shown([user("a", place, "b", place)], images=images[:2]) == "a<0>b<1>"
    assert shown([user(own, "a", place)], image=images[1]) == "<2>a<1>"
    plain = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}, {"role": "user", "content": "r"}]
    assert shown(plain, image=images[0], images=images[1:]) == "s|<0><1><2>q|r"
    assert shown(plain, images=[]) == "s|q|r"
    assert shown([user("a<image>b"), user("<image>")], images=images[:2]) == "a<0>b|<1>"
    for prompt, row, message in (
        ([user("a", place, place)], {"image": images[0]}, "row 0: .* have 1 images, and the prompt has 2 places"),
        ([user("<image><image>")], {"image": images[0]}, "row 0: .* have 1 images, and the prompt has 2 places"),
        (plain[:1], {"image": images[0]}, "row 0: got 1 images, and no message of a user to put them into"),
    ):
        with pytest.raises(ValueError, match=message):
            shown(prompt, **row)
    plainly = with_pictures(AutoTokenizer.from_pretrained(tokenizer.name_or_path), "it is a test")
    with pytest.raises(ValueError, match="row 0: the column 'image' is"):
        read_row(plain, {"image": images[0]}, plainly, env, "row 0")


@pytest.mark.contract("images in results")
def test_what_a_tool_returns(tokenizer):
    image = vision_model.picture(4)
    picture = tokenizer.pictures.read(image, "")
    result = as_result(["Corner: ", image, {"type": "text", "text": "."}], tokenizer.pictures)
    assert readable(result.text) == f"Corner: <image {picture.name}>." and result.pictures == (picture,)
    assert readable(as_result(image, tokenizer.pictures).text) == f"<image {picture.name}>"
    for found in (  # data, whatever its keys are called
        ["a", "b"],
        [{"title": "A", "image": "http://127.0.0.1/a.png"}],
        [{"title": "A", "image": "data:image/png;base64,AAAA"}],
        {"type": "image", "url": "http://127.0.0.1/a.png"},
        [{"type": "image", "image": "/etc/passwd"}],
    ):
        assert as_result(found, tokenizer.pictures).text == json.dumps(found)
    with pytest.raises(ValueError, match="the tool's result: the image cannot be read"):
        as_result([image, {"type": "image", "image": "/etc/passwd"}], tokenizer.pictures)
    for shown in (image, [image], {"type": "image", "image": {"bytes": b"PNG"}}):
        with pytest.raises(ValueError, match="returned an image, and this run's model reads text alone"):
            as_result(shown)


def test_ids_are_those_of_the_chat_template_with_a_placeholder_for_each_token(folder, tokenizer):
    """Over random conversations; and the text of ids is the text that they were made from."""
    plain, rng = AutoTokenizer.from_pretrained(folder), random.Random(0)
    shown = vision_model.read(tokenizer, (0, (56, 56)), (1, (84, 28)), (2, (28, 56)))
    words = ["Which", " digit", "?\n", "é", "  ", "<tool>", "0"]
    for _ in range(60):
        messages, parted, used = [], [], []
        for role in ("user", "assistant", "user")[: rng.randint(1, 3)]:
            parts = [rng.choice([*words, *shown]) for _ in range(rng.randint(1, 6))]
            used += [part for part in parts if not isinstance(part, str)]
            content = "".join(part if isinstance(part, str) else mark_of(part) for part in parts)
            messages.append({"role": role, "content": content})
            parts = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in parts]
            parted.append({"role": role, "content": parts})
        kwargs = {"tokenize": True, "return_dict": False, "add_generation_prompt": True}
        text = plain.apply_chat_template(parted, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.apply_chat_template(messages, **kwargs)
        assert ids == expected_ids(folder, text, used) and pictures_in(ids) == used
        assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, **{**kwargs, "tokenize": False})
        offsets = tokenizer(messages[0]["content"], return_offsets_mapping=True)
        assert len(offsets["offset_mapping"]) == len(offsets["input_ids"]) == len(offsets["attention_mask"])


def test_texts_around_pictures(tokenizer):
    picture = tokenizer.pictures.read(vision_model.picture(5), "")
    assert tokenizer.decode(3 * [picture.id] + [60]) == tokenizer.decode([60])
    opened = tokenizer(f"abc {mark_of(picture)}", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(opened[:-2]) == "abc "  # without what opens it, which is a token of the template
    text = f"abc {mark_of(picture)} def {mark_of(picture)}"
    size = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    found = {readable(cut_to_tokens(text, limit, tokenizer) or "") for limit in range(1, size + 1)}
    for cut in found:
        assert cut.count("<image") == cut.count(f"<image {picture.name}>") and "\ufdd0" not in cut
    assert readable(text) in found and any(cut.endswith("... [cut]") and cut.count("<image") == 1 for cut in found)
    env = MultiTurnToolEnv([], None, tokenizer=tokenizer)
    rows = [{"prompt": [{"role": "user", "content": "Read <|image_pad|>, \ufdd0abc and <|video_pad|>."}]}]
    (rollout,) = env.start([row["prompt"] for row in rows], rows=rows)
    assert not set(rollout.prompt_ids) & set(tokenizer.pictures.unsampled)
    picture = tokenizer.pictures.read(vision_model.picture(6), "")
    for text in (f"<|image_pad|> {mark_of(picture)}", "<|image_pad|>"):
        with pytest.raises(ValueError, match=r"'<\|image_pad\|>' without an image"):
            tokenizer(text)


def random_examples(rng, shown, pad):
    """Records of two groups: prompts and completions with and without pictures, which some of them share."""

    def text(most):
        return [rng.randrange(10, 300) for _ in range(rng.randint(1, most))]

    def picture():
        return [3, *(p := rng.choice(shown)).num_tokens * [p.id], 4]

    examples = {}
    for _ in range(2):
        prompt = [1, *text(30)] + (picture() if rng.random() < 0.8 else []) + text(9)
        prompt += (picture() if rng.random() < 0.5 else []) + text(3)
        for _ in range(3):
            completion = text(6) + (picture() if rng.random() < 0.6 else []) + text(6)
            wanted = [int(not is_picture(token) and rng.random() < 0.8) for token in completion]
            examples[len(examples)] = Example(prompt, completion, wanted)
    return examples


def logps_alone(model, example):
    ids = example.prompt_ids + example.completion_ids
    features = features_of(pictures_in(ids))
    kinds = {"mm_token_type_ids": torch.tensor([[int(is_picture(token)) for token in ids]])} if features else {}
    ids = torch.tensor([with_placeholders(ids)])
    shown = {"attention_mask": torch.ones_like(ids), "labels": ids, "fused_lm_head": True, **features, **kinds}
    return model(input_ids=ids, **shown).log_probs[0, len(example.prompt_ids) - 1 :]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_rows_that_share_prompts_read_their_pictures(family, tokenizer):
    """Logprobs and gradients, the tower's too, of random rows, against a forward pass of each record by itself."""
    torch.manual_seed(0)
    model = vision_model.make_model(tokenizer, family).eval()
    add_fused_lm_head(model, 1.0)
    rng = random.Random(1)
    shown = vision_model.read(tokenizer, (0, (56, 56)), (1, (84, 56)), (2, (28, 112)))
    for _ in range(6):
        examples = random_examples(rng, shown, tokenizer.pictures.placeholder)
        wanted = {(n, k) for n, each in examples.items() for k, flag in enumerate(each.trained) if flag}
        gradients = []
        for shares in (False, True):
            model.zero_grad()
            if shares:
                take_shared_rows(model)
                row = SharedRow(examples, (len(examples), max(len(e.completion_ids) for e in examples.values())))
                logps = row.spread(model(**forward_inputs(row)).log_probs)
            else:
                model.config.get_text_config()._attn_implementation = "sdpa"
                logps = {n: logps_alone(model, each) for n, each in examples.items()}
            found = torch.stack([logps[n][k] for n, k in sorted(wanted)])
            (found * torch.arange(1, len(found) + 1)).sum().backward()
            of_weights = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            gradients.append((found.detach(), of_weights))
        (one, alone), (two, together) = gradients
        assert torch.allclose(one, two, atol=2e-5)
        largest = max(g.abs().max() for g in alone.values())
        assert all((together[name] - g).abs().max() < 1e-5 * largest for name, g in alone.items())
        if row.shown:
            assert any("visual" in name for name in together)


@pytest.mark.contract("images in rows", "images in results")
@pytest.mark.parametrize("changes", [
    {}, {"num_iterations": 2, "max_steps": 4},
    {"gradient_accumulation_steps": 8, "per_device_train_batch_size": 1, "beta": 0.1},  # TRL takes row by row
], ids=str)  # fmt: skip
def test_a_step_with_images_of_rows_and_tools_is_trls(folder, tmp_path, changes):
    """The first step's gradients with shared prompts against those of TRL's own rows, which get pixels as TRL does."""
    gradients = []
    for shares in (True, False):
        trainer = make_trainer(folder, tmp_path / str(shares), some_rows(), share_prompts=shares, **changes)
        gradients.append(gradients_of(trainer))
        assert trainer.layout.kind == ("shared" if shares else "trl"), trainer.layout.reason
        logs = [log for log in trainer.state.log_history if "reward" in log]
        assert all(log[f"tokens/{name}_differ"] == 0 for log in logs for name in ("ids", "text"))
        assert {len(pictures_in(r.prompt_ids + r.completion_ids)) for r in trainer.batch.rollouts} <= {0, 1, 2, 3}
    shared, trls = gradients
    largest = max(g.abs().max() for g in trls.values())
    assert any("visual" in name for name in shared) and shared.keys() == trls.keys()
    assert all((shared[name] - g).abs().max() < 1e-5 * largest for name, g in trls.items())


def inputs_of_one(ids):
    ids, shown = inputs_of_requests([ids])
    return torch.tensor(ids), {**shown, "mm_token_type_ids": torch.tensor(shown["mm_token_type_ids"])}


def test_a_trained_model_is_evaluated_with_images_and_rewards_ask_for_logprobs_behind_them(folder, tmp_path):
    """What it needs for them is saved beside it; greedy, so that what is sampled does not depend on the seed."""
    trainer = make_trainer(folder, tmp_path, some_rows(), max_steps=1)
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    recipe = write_recipe(tmp_path, tmp_path / "saved")
    found = evaluate.evaluate(str(tmp_path / "saved"), recipe, 4, "train", greedy=True, show=4)
    name = trainer.processing_class.pictures.read(vision_model.picture(20), "").name
    asked = [{"role": "user", "content": "Which digit?"}]
    (rollout,) = trainer.env.start([asked], rows=[{"image": vision_model.picture(20)}])
    ids, shown = inputs_of_one(rollout.prompt_ids)
    said = trainer.model.generate(ids, **shown, do_sample=False, max_new_tokens=12)[0, ids.shape[1] :]
    expected = trainer.env.format_of(trainer.env.tokenizer).text(said.tolist())
    for each in found["conversations"]:
        assert [m["content"] for m in each["messages"]] == [f"<image {name}>Which digit?", expected]
    rollout = next(r for r in trainer.batch.rollouts if len(pictures_in(r.prompt_ids + r.completion_ids)) > 1)
    context, asked = rollout.prompt_ids + rollout.turns[0].token_ids + rollout.turns[0].observation_ids, [50, 60, 70]
    ids, shown = inputs_of_one(context + asked)
    trainer.model.eval()
    with torch.no_grad():
        logits = trainer.model(input_ids=ids, **shown).logits[0, -4:-1]
    expected = logits.log_softmax(-1)[torch.arange(3), torch.tensor(asked)].tolist()
    scores = scores_of_model(trainer.model, None, contextlib.nullcontext)
    assert scores.logprobs([context], [asked])[0] == pytest.approx(expected, abs=2e-5)
    with pytest.raises(ValueError, match="pair 0 .* no image in the continuation"):
        scores.logprobs([[5]], [context])


def test_a_placeholder_is_never_sampled(folder, tmp_path):
    """Not in process, where its logit is the largest; and logprobs, entropy and KL are of the others alone."""
    trainer = make_trainer(folder, tmp_path, some_rows(), scripted=False, beta=0.1, max_completion_length=12)
    pads = trainer.processing_class.pictures.unsampled
    for model in (trainer.model, trainer.ref_model):
        head = model.get_output_embeddings()
        with torch.no_grad():
            head.weight[pads] = 30 * head.weight[pads]
    trainer.train()
    sampled = {token for r in trainer.batch.rollouts for turn in r.turns for token in turn.token_ids}
    assert len(sampled) > 3 and not sampled & set(pads)
    (log, *_) = [log for log in trainer.state.log_history if "kl" in log]
    assert log["kl"] < 1e-6 and log["entropy"] > 0.1
    assert "lm_head.bias" not in dict(trainer.model.named_parameters())


@pytest.mark.parametrize("options", [None, {"modules_to_save": ["lm_head"]}, {"target_modules": ["lm_head"]}])
def test_a_models_distribution_without_what_is_forbidden(folder, tokenizer, options):
    """By hand: the others' probabilities, scaled to 1. Also if an adapter holds the head."""
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    if options is not None:
        model = get_peft_model(model, LoraConfig(**{"target_modules": ["q_proj"], **options})).eval()
    ids, pads = torch.tensor([[1, 50, 60, 70]]), tokenizer.pictures.unsampled
    before = model(input_ids=ids).logits[0, -1].softmax(-1)
    forbid(tokenizer.pictures, model)
    after = model(input_ids=ids).logits[0, -1].softmax(-1)
    before[pads] = 0.0
    assert torch.allclose(after, before / before.sum(), atol=1e-7) and (after[pads] == 0).all()
    assert not any(name.endswith("bias") and "lm_head" in name for name in model.state_dict())


def test_which_rows_are_refused(folder, tokenizer):
    """With the row and the reason, before a model is loaded."""
    env, plain = MultiTurnToolEnv([], None, tokenizer=tokenizer), [{"role": "user", "content": "q"}]
    asked = {"prompt": plain, "image": vision_model.picture(1)}
    check_images(Rows([asked, {"prompt": plain, "image": None}]), "train", env)
    for row, message in (
        ({"prompt": plain, "video": "a.mp4"}, "train, row 1: the column 'video' is not read: only images are"),
        ({"prompt": [], "image": asked["image"]}, "train, row 1: got 1 images, and no message of a user"),
        ({"prompt": plain, "image": "/not/there.png"}, "train, row 1, image 0: the image cannot be read"),
    ):
        with pytest.raises(ValueError, match=message):
            check_images(Rows([asked, row]), "train", env)
    texts = MultiTurnToolEnv([], None, tokenizer=AutoTokenizer.from_pretrained(folder))
    check_images(Rows([{"prompt": plain, "video": "a.mp4"}]), "train", texts)  # of a tool, or a reward
    with pytest.raises(ValueError, match="train, row 0: the column 'image' .* it is a text-only model"):
        check_images(Rows([asked]), "train", texts)


def test_what_reads_images_is_trained_unless_it_is_frozen(folder, tmp_path):
    moved = {}
    for freeze in (None, True):
        trainer = make_trainer(folder, tmp_path / str(freeze), some_rows(), freeze_vision_tower=freeze)
        before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
        trainer.train()
        moved[freeze] = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert any("visual.blocks" in name for name in moved[None]) and any("visual.merger" in n for n in moved[None])
    assert moved[True] == {name for name in moved[None] if "visual" not in name}


class Greedy:
    """An environment that takes a row's images for itself, and draws on one."""

    def reset(self, images, **row):
        images.pop(0).putpixel((0, 0), (1, 2, 3))
        return [" Look."]  # texts alone, as parts

    def act(self) -> str:
        """Do something."""
        return "done"


def test_what_an_environment_does_with_a_rows_images_changes_no_prompt(tokenizer):
    """Neither its own, nor that of other rollouts, nor the data."""
    row = {"prompt": [{"role": "user", "content": "?"}], "images": [vision_model.picture(0), vision_model.picture(1)]}
    before = [image.tobytes() for image in row["images"]]
    env = MultiTurnToolEnv([], None, tokenizer=tokenizer, environment=Greedy)
    rollouts = env.start(2 * [row["prompt"]], rows=2 * [row])
    for rollout in rollouts:
        asyncio.run(env.open(rollout, None))
        assert [picture.image.tobytes() for picture in pictures_in(rollout.prompt_ids)] == before
        assert readable(rollout.prompt_messages[0]["content"]).endswith(">? Look.")
    assert [image.tobytes() for image in row["images"]] == before


def test_pictures_of_further_records_are_held_with_their_batch(folder, tmp_path, tokenizer):
    trainer = make_trainer(folder, tmp_path, some_rows())
    ids = [tokenizer.pictures.read(vision_model.picture(k), "").id for k in (50, 51)]
    plain = [torch.tensor([[int(token)]]) for token in ids]
    first, second = ({"prompt_ids": each, "completion_ids": torch.tensor([[9]])} for each in plain)
    first[FURTHER_RECORDS] = [[{name: value[0] for name, value in second.items()}]]
    trainer.layout.kind = "trl"
    trainer.model.train()
    trainer.layout.in_passes([first])
    numbers = [int(token) for token in ids]
    del ids
    gc.collect()
    assert [picture_of(number).image.size for number in numbers] == [(56, 56), (56, 56)]


def test_more_images_than_a_server_reads_fill_a_context(tokenizer, monkeypatch):
    """A conversation ends there as where its tokens are spent; a server would refuse the request and end the run."""
    monkeypatch.setattr(pictures, "MOST_PICTURES", 2)
    image = tokenizer.pictures.read(vision_model.picture(0), "")
    two = [1, *8 * [image.id], 2]
    assert not has_too_many(two) and has_too_many([*two, *4 * [image.id]]) and not has_too_many([1] * 99)
    env = MultiTurnToolEnv([], None, tokenizer=tokenizer, max_model_len=500)
    full, not_full = (Rollout([], ids, pictures=[image]) for ids in ([*two, *4 * [image.id]], two))
    assert env._room(full, None).context == 0 and env._room(not_full, None).context == 490


@pytest.mark.parametrize("names, reason", [(["q_proj"], None), (["q_proj", "qkv"], "vision tower")])
def test_an_adapter_of_what_reads_images_is_merged_before_a_push(folder, names, reason):
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    found = why_model_merges(get_peft_model(model, LoraConfig(r=2, target_modules=names)), False)
    assert found is None if reason is None else reason in found
