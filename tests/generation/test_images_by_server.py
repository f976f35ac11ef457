"""A vLLM server that reads images: what it is asked, what it answers, and its weights, those for images among them."""

import base64
import copy
import io
import random
from unittest.mock import Mock

import evaluate
import pytest
import torch
import vision_model
from peft import LoraConfig
from PIL import Image
from transformers import AutoModelForImageTextToText
from vision_run import make_served_run, write_recipe
from warm_vllm import WarmVLLMServer

from mt_grpo.base.errors import ServerError
from mt_grpo.base.event_loop import gather_all, run_async
from mt_grpo.generation.samples import (
    GENERATE,
    BadAnswer,
    ask_for_prompt,
    ask_for_sample,
    generate_body,
    read_generated,
)
from mt_grpo.images.forward import forbid
from mt_grpo.images.messages import mark_of
from mt_grpo.images.pictures import is_picture, pictures_in, with_placeholders
from mt_grpo.images.reader import inputs_of_rows
from mt_grpo.recipe import checks
from mt_grpo.rollout import hash_of_ids
from mt_grpo.run.trainer import probe_ids
from mt_grpo_trainer import VLLMServerClient

pytest.importorskip("vllm")
FLAGS = (
    "--max-model-len", "1024", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
    "--enable-scale-out", "--limit-mm-per-prompt", '{"video": 0}',
)  # fmt: skip


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    with WarmVLLMServer(folder, *FLAGS, log=tmp_path_factory.mktemp("log") / "vllm.log") as server:
        yield server


@pytest.fixture
def client(server, folder):
    """A client; afterwards the server holds the folder's weights again."""
    client = VLLMServerClient("127.0.0.1", server.port, vision_model.reading(folder))
    yield client
    client.update_weights(iter(model_of(folder).state_dict().items()), "own")
    client.close()


def model_of(folder, tokenizer=None):
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    forbid(tokenizer and tokenizer.pictures, model)
    return model


def logprobs_of(model, ids):
    """Of `ids[1:]`, by a forward pass of this row alone."""
    row, shown = inputs_of_rows(torch.tensor([ids]))
    shown.pop("num_images", None)
    with torch.no_grad():
        logits = model(input_ids=row, **shown).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, row[0, 1:, None])[:, 0]


def prompt_of(tokenizer, *parts):
    """Ids of texts and images, with what the chat template writes around them."""
    shown = [part if isinstance(part, str) else tokenizer.pictures.read(part, "") for part in parts]
    text = "".join(part if isinstance(part, str) else mark_of(part) for part in shown)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_request_has_a_placeholder_and_the_pixels_of_each_image(folder):
    tokenizer = vision_model.reading(folder)
    images = [vision_model.picture(k, size) for k, size in enumerate(((56, 56), (84, 28), (56, 56)))]
    first, second, third = (tokenizer.pictures.read(image, "") for image in images)
    pad = tokenizer.pictures.placeholder
    prompt = [9, *4 * [first.id], *4 * [first.id], 8, *3 * [second.id], *4 * [third.id]]
    payload = {"model": "m", "prompt": prompt, "max_tokens": 7, "temperature": 0.5, "stop": ["x"], "cache_salt": "s",
               "return_token_ids": True, "logprobs": 0}  # fmt: skip
    path, body, *_ = ask_for_sample(payload, None, [5, 6])
    assert path == GENERATE and body.pop("content_parts") == [
        {"type": "image_url", "url": picture.data_uri} for picture in (first, first, second, third)
    ]
    sampling = {"max_tokens": 7, "temperature": 0.5, "stop": ["x"], "logprobs": 0, "output_kind": 2,
                "logit_bias": {5: -100.0, 6: -100.0}}  # fmt: skip
    assert body == {"model": "m", "cache_salt": "s", "return_token_ids": True, "sampling_params": sampling,
                    "token_ids": [9, pad, pad, 8, pad, pad]}  # fmt: skip
    sent = Image.open(io.BytesIO(base64.b64decode(second.data_uri.partition(",")[2])))
    assert sent.size == (84, 28) and sent.tobytes() == images[1].tobytes()
    path, body, *_ = ask_for_sample({**payload, "prompt": [9, 8], "logit_bias": {"7": 1.5, "5": 2.0}}, None, [5, 6])
    assert path == "/v1/completions" and body["logit_bias"] == {7: 1.5, 5: -100.0, 6: -100.0}
    assert ask_for_sample({**payload, "prompt": [9, 8]}, None)[1] == {**payload, "prompt": [9, 8]}  # a model of text
    with pytest.raises(ValueError, match="not support 'response_format' for a prompt with images"):
        generate_body({**payload, "response_format": {}})


def test_an_image_is_sent_in_the_size_in_which_the_model_sees_it(folder):
    """So no server resizes it again, in whatever way its processor would."""
    tokenizer = vision_model.reading(folder)
    for size in ((1, 1), (3, 40), (200, 90), (61, 59), (300, 2)):
        picture = tokenizer.pictures.read(vision_model.picture(1, size), "")
        assert picture.image.size == tuple(28 * side for side in reversed(picture.grid))
        again = tokenizer.pictures.processor(images=[picture.image], return_tensors="pt")
        assert tuple(again["image_grid_thw"][0, 1:].tolist()) == tuple(2 * side for side in picture.grid)
        assert torch.equal(again["pixel_values"], picture.features["pixel_values"])


def answer_to(prompt, ids=(20, 21), **changes):
    places, start = [], 0
    for picture in pictures_in(prompt):
        start = prompt.index(picture.id, start)
        places.append({"offset": start, "length": picture.num_tokens})
        start += picture.num_tokens
    content = [{"token_id": token, "logprob": -0.5} for token in ids]
    choice = {"token_ids": list(ids), "logprobs": {"content": content}, "finish_reason": "stop"}
    answer = {"choices": [choice], "prompt_token_ids": with_placeholders(prompt), "mm_placeholders": {"image": places}}
    return {**answer, **changes}


def test_an_answer_that_read_something_else_is_none(folder):
    tokenizer = vision_model.reading(folder)
    prompt = prompt_of(tokenizer, "a", vision_model.picture(0), "b", vision_model.picture(1, (84, 28)))
    found = read_generated(answer_to(prompt), prompt, 5)
    assert (found.token_ids, found.logprobs, found.finish_reason) == ([20, 21], [-0.5, -0.5], "stop")
    assert found.saw == hash_of_ids(prompt) != hash_of_ids(with_placeholders(prompt))
    good = answer_to(prompt)
    ((choice,), places) = good["choices"], good["mm_placeholders"]["image"]
    moved, shorter = copy.deepcopy(places), copy.deepcopy(places)
    moved[1]["offset"] += 1
    shorter[1]["length"] = 1
    for changes, message in (
        ({"mm_placeholders": {"image": moved}}, r"'offset': 10, 'length': 3}\], expected .*tokenizer"),
        ({"mm_placeholders": {"image": shorter}}, r"'offset': 9, 'length': 1}\], expected .*mm-processor-kw"),
        ({"mm_placeholders": None}, "does not say what the server read"),
        ({"prompt_token_ids": [*with_placeholders(prompt)[:-1], 9]}, "ids that are not the prompt's"),
        ({"choices": [{**choice, "token_ids": [20, 22]}]}, "logprobs belong to the ids .20, 21."),
        ({"choices": [{**choice, "finish_reason": "abort"}]}, "abort"),
        ({"choices": []}, "no token ids"),
    ):
        with pytest.raises(BadAnswer, match=message):
            read_generated({**good, **changes}, prompt, 5)
    path, body, read, _ = ask_for_prompt({"prompt": prompt, "max_tokens": 1}, None)
    assert path == GENERATE and body["sampling_params"] == {"max_tokens": 1, "prompt_logprobs": 0, "output_kind": 2}
    logprobs = [None, *({str(token): {"logprob": -k / 8}} for k, token in enumerate(with_placeholders(prompt)[1:]))]
    assert read({**good, "prompt_logprobs": logprobs}) == [-k / 8 for k in range(len(prompt) - 1)]
    with pytest.raises(BadAnswer, match="not the prompt's"):
        read({**good, "prompt_token_ids": [1], "prompt_logprobs": logprobs})


def test_what_it_samples_behind_images_and_what_it_says_of_a_prompt(client, folder):
    """Over random prompts, with images and without, ending at a text: logprobs as by a forward pass of each row."""
    tokenizer, rng = client.tokenizer, random.Random(0)
    model = model_of(folder, tokenizer)
    unforbidden = model_of(folder)
    words = ["Which digit", "?", " picture", "é\n", "<tool>"]
    prompts = [
        prompt_of(tokenizer, "Q", *(vision_model.picture(rng.randrange(5), rng.choice([(56, 56), (84, 60), (20, 90)]))
                                    if rng.random() < 0.5 else rng.choice(words) for _ in range(rng.randint(1, 5))))
        for _ in range(12)
    ]  # fmt: skip
    assert 3 < sum(bool(pictures_in(prompt)) for prompt in prompts) < 12

    async def ask():
        return await gather_all([client.generate(prompt, 30, {"temperature": 1.0}) for prompt in prompts])

    for prompt, found in zip(prompts, run_async(ask())):
        theirs, ours = torch.tensor(found.logprobs), logprobs_of(model, prompt + found.token_ids)
        assert (theirs - ours[-len(found.token_ids) :]).abs().max() < 2e-5
        assert found.saw in (None, hash_of_ids(prompt))
        assert not set(found.token_ids) & set(tokenizer.pictures.unsampled)
        scores = torch.tensor(client.score(prompt))
        assert (scores - logprobs_of(unforbidden, prompt)).abs().max() < 2e-5
    prompt = next(prompt for prompt in prompts if pictures_in(prompt))
    sampled, logprobs = client.sample_behind(prompt, 9)
    assert len(sampled) == 9
    assert (torch.tensor(logprobs) - logprobs_of(model, prompt + sampled)[-9:]).abs().max() < 2e-5


def test_it_stops_at_a_text_behind_an_image_too(client):
    tokenizer = client.tokenizer
    prompt = prompt_of(tokenizer, vision_model.picture(2), "Which digit?")
    (ending,) = tokenizer("Z", add_special_tokens=False)["input_ids"]
    found = run_async(client.generate(prompt, 200, {"logit_bias": {str(ending): 6.0}, "stop": ["Z"]}))
    assert found.finish_reason == "stop" and found.token_ids.count(ending) == 1 and found.token_ids[-1] == ending


@pytest.mark.contract_server("images in rows", "images in results")
@pytest.mark.parametrize("keys", [{}, {"max_staleness": 1, "old_logps": "sampled", "num_iterations": 2, "beta": 0.1}])
def test_a_run_trains_what_the_server_sampled(client, server, folder, tmp_path, keys):
    """Images of rows and of a tool, several turns, and a push before each step."""
    trainer = make_served_run(folder, tmp_path, server.port, **keys)
    tower = {n: p.clone() for n, p in trainer.model.named_parameters() if "visual" in n}
    kept = []
    score = trainer._score
    trainer._score = lambda batch, *args: (kept.append(batch.rollouts), score(batch, *args))[1]
    trainer.train()
    logs = [log for log in trainer.state.log_history if "sync/logprob_difference" in log]
    assert logs and all(log["sync/logprob_difference"] < 1e-5 for log in logs)
    if not keys:
        differences = [log["sampling/sampling_logp_difference/max"] for log in trainer.state.log_history[:-1]]
        assert len(differences) == 3 and max(differences) < 1e-4
    assert max((p - tower[n]).abs().max().item() for n, p in trainer.model.named_parameters() if n in tower) > 5e-3
    for rollout in (rollout for rollouts in kept for rollout in rollouts):
        (record,) = rollout.records
        shown = [picture for turn in rollout.turns for result in turn.results for picture in result.pictures]
        assert len(pictures_in(record.completion_ids)) == len(shown)
        sampled = [token for turn in rollout.turns for token in turn.token_ids]
        assert not any(map(is_picture, sampled)) and not set(sampled) & set(trainer.client.servers[0].unsampled)
    assert {len(rollout.turns) for rollouts in kept for rollout in rollouts} == {3}


def test_a_push_that_leaves_out_what_reads_images_is_noticed(client, server, folder, tmp_path):
    """Each tensor of the vision tower alone, at a server that takes all others."""
    trainer = make_served_run(folder, tmp_path, server.port)
    weights, sent = trainer.vllm_generation, trainer.vllm_generation.named_weights
    old = {weights._server_name(n): p.detach().clone() for n, p in trainer.model.named_parameters() if "visual" in n}
    passed = []
    for left_out in (None, *old):
        stale = {name: tensor for name, tensor in old.items() if name == left_out}
        weights.named_weights = lambda stale=stale: ((name, stale.get(name, tensor)) for name, tensor in sent())
        try:
            trainer.weight_sync._check_that_pushes_arrive(f"{trainer.client.instance}-0")
            passed.append(left_out)
        except ServerError as error:
            assert "A changed weight did not arrive at" in str(error)
    assert passed == [None] and len(old) > 10


def test_ids_that_prove_a_push_begin_with_an_image(client):
    tokenizer = client.tokenizer
    picture = tokenizer.pictures.read(vision_model.picture(0), "")
    ids = [*range(20, 200), *4 * [picture.id], *range(20, 200)]
    shown = tokenizer.drawn_ids()
    assert probe_ids(ids, tokenizer) == shown + [*range(20, 200), *range(20, 96)]
    assert len(pictures_in(shown)) == 1 and pictures_in(shown)[0].image.size == (56, 56)
    assert len(set(pictures_in(tokenizer.drawn_ids(8))[0].image.getdata())) > 32
    plain = copy.copy(tokenizer)
    plain.pictures = None
    assert probe_ids([1, 2], plain) == [1, 2]


@pytest.mark.parametrize("freeze", [None, False])
def test_a_lora_leaves_out_what_reads_images_unless_it_is_asked_for(client, server, folder, tmp_path, freeze):
    """And the server samples as the policy does, by the adapter or by merged weights."""
    names = ["q_proj", "v_proj", "gate_proj", "qkv"]  # the last two are also those of layers that read images
    lora = LoraConfig(r=4, target_modules=names, init_lora_weights=False)
    settings = dict(peft_config=lora, freeze_vision_tower=freeze, learning_rate=1e-3)
    trainer = make_served_run(folder, tmp_path, server.port, **settings)
    of_images = [name for name, p in trainer.model.named_parameters() if p.requires_grad and "visual" in name]
    assert bool(of_images) is (freeze is False)
    trainer.train()
    differences = [log["sampling/sampling_logp_difference/max"] for log in trainer.state.log_history[:-1]]
    assert len(differences) == 3 and max(differences) < 1e-4


def test_an_evaluation_by_a_server_finds_what_one_in_process_does(client, folder, tmp_path):
    recipe = write_recipe(tmp_path, folder)
    found = [evaluate.evaluate(model, recipe, 4, "train", greedy=True, show=4) for model in (str(folder), client)]
    assert found[0]["conversations"] == found[1]["conversations"] and found[1]["backend"] == "vllm server"
    assert "<image " in found[1]["conversations"][0]["messages"][0]["content"]


def test_a_server_that_takes_no_images_is_refused(client, server, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "check_it_reads_images", Mock(side_effect=ServerError("It takes none.")))
    with pytest.raises(ServerError, match="It takes none"):
        make_served_run(folder, tmp_path, server.port)
