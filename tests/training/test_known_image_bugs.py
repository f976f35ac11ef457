"""Bugs with images over several turns that users of other trainers have reported, next to values written by hand."""

import pytest
import torch
import vision_model
from scripted import Scripted
from test_environments import verify_records
from trl.trainer.utils import split_pixel_values_by_grid
from vision_run import user

from mt_grpo.generation.samples import generate_body
from mt_grpo.images.pictures import inputs_of_rows, is_picture, mark_of, pictures_in
from mt_grpo.rollout import Reply, StopReason
from mt_grpo.training.shared_prompts import positions_of
from mt_grpo_trainer import MultiTurnToolEnv

ASKED = [{"role": "user", "content": "Count."}]
ASKS = "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return vision_model.save(tmp_path_factory.mktemp("vision"))


@pytest.fixture
def tokenizer(folder):
    return vision_model.reading(folder)


def part(seed, size=(56, 56)):
    return {"type": "image", "image": vision_model.picture(seed, size)}


def ids_of(tokenizer, *parts):
    """The ids of texts and pictures, one behind the other, by hand."""
    start, end = tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>"])
    found = []
    for each in parts:
        if isinstance(each, str):
            found += tokenizer(each, add_special_tokens=False)["input_ids"]
        else:
            found += [start, *each.num_tokens * [each.id], end]
    return found


def padded(rows, left=False):
    """(ids, attention mask) of rows: (M, L) each."""
    width = max(map(len, rows))
    fill = [[0] * (width - len(row)) for row in rows]
    ids = [zeros + row if left else row + zeros for row, zeros in zip(rows, fill)]
    ones = [[1] * len(row) for row in rows]
    mask = [zeros + row if left else row + zeros for row, zeros in zip(ones, fill)]
    return torch.tensor(ids), torch.tensor(mask)


def test_an_image_that_does_not_fit_takes_no_other_with_it(tokenizer):
    """Of two rollouts, one ends before an image of 16 tokens. The other's image of 4 tokens reaches the model."""

    class Shows:
        def reset(self, size, **row):
            self.size = size

        def respond(self, rollout, turn):
            return {"messages": [user(part(1, self.size))]} if len(rollout.turns) == 1 else None

    needed = len(ids_of(tokenizer, "Left<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n", ASKS)) + 2 + 4
    needed += MultiTurnToolEnv.MIN_ANSWER_TOKENS
    env = MultiTurnToolEnv([], None, tokenizer=tokenizer, environment=Shows, max_completion_length=needed)
    script = [ids_of(tokenizer, text) for text in ("Left", "<answer>4</answer>")]
    rows = [{"size": (112, 112)}, {"size": (56, 56)}]
    large, small = env.generate([ASKED] * 2, Scripted([script, script]), rows=rows)["rollouts"]
    assert (large.stop_reason, small.stop_reason) == (StopReason.MAX_TOKENS, StopReason.ANSWERED)
    ids, _ = padded([rollout.prompt_ids + rollout.completion_ids for rollout in (large, small)])
    pixels = tokenizer.pictures.read(vision_model.picture(1), "").features["pixel_values"]
    _, shown = inputs_of_rows(ids)
    assert shown["num_images"] == [0, 1] and shown["image_grid_thw"].tolist() == [[1, 4, 4]]
    assert torch.equal(shown["pixel_values"], pixels)
    cut = [small.prompt_ids + small.completion_ids[:-1], [token for token in ids[1].tolist() if is_picture(token)][:3]]
    with pytest.raises(ValueError, match="An image of 4 tokens has 3 tokens here"):
        inputs_of_rows(padded(cut)[0])


# As Qwen3's: an earlier turn has no thoughts.
DROPS_THOUGHTS = vision_model.TEMPLATE.replace(
    "{%- if message.content is string -%}{{- message.content -}}",
    "{%- if message.role == 'assistant' -%}{{- message.content.split('</think>')[-1] -}}"
    "{%- elif message.content is string -%}{{- message.content -}}",
)


def test_an_image_behind_thoughts_that_the_template_drops(tokenizer):
    """Nothing is rendered again: thoughts stay, and the observation behind them has its image whole."""
    tokenizer.chat_template = DROPS_THOUGHTS
    thought, last = "<think>Which digit? It is left</think>Left", "<think>So.</think><answer>4</answer>"
    rendered = tokenizer.apply_chat_template([*ASKED, {"role": "assistant", "content": thought}], tokenize=False)
    assert "think" not in rendered  # else the case would be none

    class Shows:
        def reset(self, **row):
            self.left = [2, 3]

        def respond(self, rollout, turn):
            return Reply(messages=[user("Now: ", part(self.left.pop(0)), ".")]) if self.left else None

    env = MultiTurnToolEnv([], None, tokenizer=tokenizer, environment=Shows, max_completion_length=400)
    backend = Scripted([[ids_of(tokenizer, text) for text in (thought, thought, last)]])
    (rollout,) = env.generate([ASKED], backend, rows=[{}])["rollouts"]
    verify_records([rollout], backend)
    begin, said = ids_of(tokenizer, f"<|im_start|>user\nCount.<|im_end|>\n{ASKS}"), ids_of(tokenizer, thought)
    one, two = (tokenizer.pictures.read(vision_model.picture(k), "") for k in (2, 3))
    first, second = (
        ids_of(tokenizer, "<|im_end|>\n<|im_start|>user\nNow: ", picture, f".<|im_end|>\n{ASKS}")
        for picture in (one, two)
    )
    assert [request.prompt for request in backend.of(0)] == [
        begin, begin + said + first, begin + said + first + said + second
    ]  # fmt: skip
    (record,) = rollout.records
    assert record.completion_ids == said + first + said + second + ids_of(tokenizer, last)
    assert pictures_in(record.completion_ids) == [one, two]


def test_images_of_an_agent_whose_history_has_no_thoughts(tmp_path):
    """It gets answers without them, and sends the whole history with all images again: that is one record."""
    agents = pytest.importorskip("test_images_of_agents")
    said = "message.role + '\n' + shown(message.content)"
    drops = said.replace(
        "shown(message.content)",
        "(message.content.split('</think>')[-1] if message.role == 'assistant' else shown(message.content))",
    )
    assert said in vision_model.HERMES_TEMPLATE
    template = vision_model.HERMES_TEMPLATE.replace(said, drops)
    tokenizer = vision_model.reading(vision_model.save(tmp_path, template=template))

    def agent(row, client):
        messages = []
        for k in (1, 2, 3):
            messages.append(agents.user(agents.shown(agents.uri(vision_model.picture(k))), "Which?"))
            answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message
            assert "think" not in answer.content
            messages.append(answer)

    answers = ["<think>Long, long.</think>four", "<think>So.</think>five", "six"]
    rollout, _ = agents.run(agent, tokenizer, *answers)
    one, two, three = (tokenizer.pictures.read(vision_model.picture(k), "") for k in (1, 2, 3))
    (record,) = rollout.records
    assert record.prompt_ids == ids_of(tokenizer, "<|im_start|>user\n", one, f"Which?<|im_end|>\n{ASKS}")
    later = [
        part
        for answer, picture in zip(answers, (two, three))
        for part in (f"{answer}<|im_end|>\n<|im_start|>user\n", picture, f"Which?<|im_end|>\n{ASKS}")
    ]
    assert record.completion_ids == ids_of(tokenizer, *later, "six<|im_end|>")


def test_a_request_of_each_turn_has_one_placeholder_for_an_image(tokenizer):
    """Ids of earlier requests come back in later ones: 1, 2 and 3 placeholders, and not 4, 8 and 11."""
    one, two = (
        tokenizer.pictures.read(vision_model.picture(k, size), "") for k, size in ((1, (56, 56)), (2, (84, 28)))
    )
    pad, start, end = tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|vision_start|>", "<|vision_end|>"])
    prompt, expected = [9], [9]
    for turn, picture in enumerate((one, one, two), 1):
        prompt = [*prompt, *ids_of(tokenizer, picture), 20 + turn]
        expected = [*expected, start, pad, end, 20 + turn]
        body = generate_body({"prompt": prompt, "max_tokens": 5})
        assert body["token_ids"] == expected and body["token_ids"].count(pad) == turn
        shown = (one, one, two)[:turn]
        assert [each["url"] for each in body["content_parts"]] == [picture.data_uri for picture in shown]
    assert [one.num_tokens, two.num_tokens] == [4, 3]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_of_padded_rows_with_later_images(family, tokenizer):
    """By hand: an image of 2 x 3 tokens takes 3 positions, and what follows begins behind them, in its own row."""
    wide, square = (
        tokenizer.pictures.read(vision_model.picture(k, size), "") for k, size in ((1, (84, 56)), (2, (56, 56)))
    )
    row = [8, 3, *6 * [wide.id], 4, 9, 3, *4 * [square.id], 4, 9]
    other = [8, 3, *4 * [square.id], 4]
    time = [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 8, 8, 8, 8, 10, 11]
    height = [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8, 8, 9, 9, 10, 11]
    width = [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 9, 8, 9, 10, 11]
    expected = list(zip(time, height, width))
    assert positions_of(row, 0, flat=False) == (expected, 12)
    first, behind = positions_of(row[:10], 0, flat=False)  # as where a prompt ends and a completion begins
    assert first + positions_of(row[10:], behind, flat=False)[0] == expected
    short = [(0, 0, 0), (1, 1, 1), (2, 2, 2), (2, 2, 3), (2, 3, 2), (2, 3, 3), (4, 4, 4)]
    assert positions_of(other, 0, flat=False) == (short, 5)
    model = vision_model.make_model(tokenizer, family)
    for left in (True, False):
        for rows in ((row, other, [8, 9]), (other, row)):
            ids, mask = padded(rows, left)
            ids, shown = inputs_of_rows(ids)
            found, _ = model.model.get_rope_index(
                ids,
                mm_token_type_ids=shown["mm_token_type_ids"],
                image_grid_thw=shown["image_grid_thw"],
                attention_mask=mask,
            )
            for k, each in enumerate(rows):
                own = expected if each is row else short if each is other else [(0, 0, 0), (1, 1, 1)]
                assert found[:, k, mask[k].bool()].T.tolist() == [list(place) for place in own]


def test_rows_in_any_order_and_split_keep_their_pixels(tokenizer):
    """Rows with two images, none, one and three; in passes of their own, and as TRL splits what it gets."""
    sizes = [(56, 56), (84, 56), (28, 28), (112, 28)]
    shown = [tokenizer.pictures.read(vision_model.picture(k, size), "") for k, size in enumerate(sizes)]
    own = [[shown[1], shown[0]], [], [shown[2]], [shown[3], shown[3], shown[1]]]
    texts = ["".join(["a", *(mark_of(picture) + "b" for picture in pictures)]) for pictures in own]
    rows, _ = padded([tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts])
    pixels = [[picture.features["pixel_values"] for picture in pictures] for pictures in own]
    none = torch.empty(0, shown[0].features["pixel_values"].shape[1])
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [1, 3], [2], [2, 2, 1, 0]):
        ids, found = inputs_of_rows(rows[order])
        assert found["num_images"] == [len(own[k]) for k in order]
        split = split_pixel_values_by_grid({"input_ids": ids, **found})
        for k, theirs in zip(order, split["pixel_values"]):
            assert torch.equal(theirs, torch.cat([none, *pixels[k]]))
        grids = [[[1, 2 * picture.grid[0], 2 * picture.grid[1]] for picture in own[k]] for k in order]
        assert [grid.tolist() for grid in split["image_grid_thw"]] == grids
    assert inputs_of_rows(rows[[1]])[1] == {}
