"""Pictures that an environment gives: in its prompt, its replies and its histories, and what reaches the loss."""

import functools
import random

import pytest
import torch
import vision_model
from scripted import Scripted
from test_environments import verify_records
from transformers import AutoTokenizer
from vision_model import as_uri
from vision_run import make_trainer, user

from mt_grpo.conversation.environments import EnvironmentFailure, joined, read_reply
from mt_grpo.images.messages import mark_of
from mt_grpo.images.pictures import PLACE, SaidPictures, is_picture, pictures_in, readable, runs_of
from mt_grpo.rollout import Reply, StopReason
from mt_grpo_trainer import MultiTurnToolEnv

ANSWER, MOVE = "<answer>4</answer>", "Left"
ASKED = [{"role": "user", "content": "Count."}]


@pytest.fixture
def plain(folder):
    """The tokenizer of the same model, which reads text alone."""
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def ids_of(plain):
    return functools.partial(vision_model.ids_of, plain)


def turn(role, *parts):
    return [f"<|im_start|>{role}\n", *parts, "<|im_end|>\n"]


ASKS = "<|im_start|>assistant\n"


def game(reset=None, replies=(), **methods):
    """A class whose `reset` and replies are given. A reply may be a function of the rollout."""

    class Game:
        def reset(self, **row):
            self.replies = list(replies)
            return reset(row) if callable(reset) else reset

        def respond(self, rollout, turn):
            reply = self.replies.pop(0) if self.replies else None
            return reply(rollout) if callable(reply) else reply

    for name, method in methods.items():
        setattr(Game, name, method)
    return Game


def play(tokenizer, cls, turns, row=None, prompt=ASKED, **settings):
    """One conversation: (its rollout, the backend)."""
    settings = {"max_steps": 8, "max_completion_length": 400, **settings}
    env = MultiTurnToolEnv([], None, tokenizer=tokenizer, environment=cls, **settings)
    backend = Scripted([[tokenizer(each, add_special_tokens=False)["input_ids"] for each in turns]])
    (rollout,) = env.generate([prompt], backend, rows=[row or {}])["rollouts"]
    if rollout.error is None:
        verify_records([rollout], backend)
    return rollout, backend


def image(seed, size=(56, 56)):
    return vision_model.picture(seed, size)


def part(seed, size=(56, 56)):
    return {"type": "image", "image": image(seed, size)}


def text(words):
    return {"type": "text", "text": words}


PLACE_PART = {"type": "image"}


@pytest.mark.parametrize(
    "said, row, expected",
    [
        (image(1), {}, ["Count.", 1]),
        ([text(" A:"), part(1), text("?")], {}, ["Count. A:", 1, "?"]),
        ([" A:", image(1)], {}, ["Count. A:", 1]),
        ([{"type": "image_url", "image_url": {"url": as_uri(image(2))}}], {}, ["Count.", 2]),
        ("?", {"image": image(3)}, [3, "Count.?"]),
        (None, {"images": [image(3), image(4)]}, [3, 4, "Count."]),
        ([text(" A:"), PLACE_PART, part(1)], {"image": image(3)}, ["Count. A:", 3, 1]),
        ([text(" A:"), part(1)], {"image": image(3)}, [3, "Count. A:", 1]),
        ([{"role": "user", "content": "Look."}], {"image": image(3)}, [3, "Look."]),
        ([{"role": "user", "content": image(1)}], {}, [1]),
        (
            [{"role": "user", "content": [PLACE_PART, text(" or "), PLACE_PART, part(1)]}],
            {"images": [image(3), image(4)]},
            [3, " or ", 4, 1],
        ),
    ],
    ids=range(11),
)
def test_what_reset_shows(said, row, expected, tokenizer, ids_of):
    """Images of the row stand at the places that `reset` leaves for them, or before the first text of a user."""
    shown = [tokenizer.pictures.read(image(each), "") if isinstance(each, int) else each for each in expected]
    rollout, _ = play(tokenizer, game(said), [ANSWER], row)
    assert rollout.error is None and rollout.prompt_ids == ids_of(*turn("user", *shown), ASKS)
    assert pictures_in(rollout.prompt_ids) == [each for each in shown if not isinstance(each, str)]


@pytest.mark.parametrize(
    "prompt, said, message",
    [
        (ASKED, [PLACE_PART, PLACE_PART], "columns have 1 images, and the prompt has 2 places"),
        ([user("A: ", PLACE_PART)], [PLACE_PART], "have 1 images, and the prompt has 2 places"),
        (ASKED, [{"role": "system", "content": "Look."}], "1 images, and no message of a user to put them into"),
    ],
)
def test_images_of_a_row_are_never_left_out_silently(prompt, said, message, tokenizer):
    rollout, _ = play(tokenizer, game(said), [], {"image": image(3)}, prompt=prompt)
    assert rollout.stop_reason == StopReason.ENVIRONMENT_ERROR and rollout.turns == []
    assert message in str(rollout.error) and str(rollout.error).startswith("Game.reset: ")


def test_rollouts_of_a_group_share_no_list_of_pictures(tokenizer):
    """What one environment shows is nothing of another one's conversation."""
    seeds = iter(range(10, 12))
    env = MultiTurnToolEnv([], None, tokenizer=tokenizer, environment=game(lambda row: image(next(seeds))))
    row = {"image": image(3)}
    script = [tokenizer(ANSWER, add_special_tokens=False)["input_ids"]]
    found = env.generate([ASKED, ASKED], Scripted([script, script]), rows=[row, row])["rollouts"]
    own = [{picture.name for picture in rollout.pictures} for rollout in found]
    assert [len(names) for names in own] == [2, 2] and len(own[0] & own[1]) == 1


def test_messages_behind_a_turn(tokenizer, ids_of):
    """Their ids are put behind it: the text's, and an id for each token of a picture. Nothing is rendered again."""
    one, two = vision_model.read(tokenizer, (1, (56, 56)), (2, (28, 84)))
    replies = [
        Reply(messages=[user("Now: ", part(1), "."), {"role": "user", "content": image(2, (28, 84))}]),
        {"messages": [{"role": "user", "content": [text("Last.")]}]},
    ]
    rollout, backend = play(tokenizer, game(replies=replies), [MOVE, MOVE + "<|im_end|>", ANSWER])
    first = ids_of("<|im_end|>\n", *turn("user", "Now: ", one, "."), *turn("user", two), ASKS)
    assert rollout.turns[0].observation_ids == first and (one.num_tokens, two.num_tokens) == (4, 3)
    assert rollout.turns[1].observation_ids == ids_of("\n", *turn("user", "Last."), ASKS)
    assert rollout.completion_ids == (
        ids_of(MOVE) + first + ids_of(MOVE + "<|im_end|>") + rollout.turns[1].observation_ids + ids_of(ANSWER)
    )
    assert backend.of(0)[1].prompt == rollout.prompt_ids + ids_of(MOVE) + first
    assert not any(flag for flag, token in zip(rollout.loss_mask, rollout.completion_ids) if is_picture(token))
    assert rollout.turns[0].observation == f"Now: {mark_of(one)}.\n{mark_of(two)}"
    assert rollout.new_tokens == len(rollout.completion_ids)


def test_an_edited_history_is_a_record_with_its_own_pictures(tokenizer, ids_of):
    """A picture of `rollout.history` stays where its message does; another one in its place is another context."""
    one, two, three = vision_model.read(tokenizer, 1, 2, 3)

    def dropped(rollout):
        assert [readable(m["content"]) for m in rollout.history] == [
            f"Count.<image {one.name}>", MOVE, f"<image {two.name}>", MOVE
        ]  # fmt: skip
        return Reply(history=[rollout.history[0], *rollout.history[2:3]])

    def replaced(rollout):
        return {"history": [{"role": "user", "content": ["Count.", image(3)]}]}

    replies = [Reply(messages=[{"role": "user", "content": image(2)}]), dropped, replaced]
    rollout, _ = play(tokenizer, game(image(1), replies), [MOVE, MOVE, MOVE, ANSWER])
    records = [record.prompt_ids for record in rollout.records]
    assert records == [
        ids_of(*turn("user", "Count.", one), ASKS),
        ids_of(*turn("user", "Count.", one), *turn("user", two), ASKS),
        ids_of(*turn("user", "Count.", three), ASKS),
    ]
    assert [pictures_in(r.prompt_ids + r.completion_ids) for r in rollout.records] == [[one, two], [one, two], [three]]


def test_a_picture_that_comes_back_is_still_known(tokenizer, ids_of):
    """Of a result that was cut: no id held it, and its text returns from the environment's own notes."""
    one = tokenizer.pictures.read(image(1, (112, 112)), "").name

    def look(self) -> list:
        """Look."""
        return ["It is ", image(1, (112, 112))]

    def back(rollout):
        assert "<image" not in readable(rollout.turns[0].results[0].text)
        return Reply(messages=[{"role": "user", "content": f"See {mark_of(rollout.pictures[-1])}"}])

    cls = game(None, [None, back], look=look)
    call = '<tool>{"name": "look", "args": {}}</tool>'
    rollout, _ = play(tokenizer, cls, [call, MOVE, ANSWER], max_tool_response_tokens=14)
    assert rollout.turns[0].observation_ids and not pictures_in(rollout.turns[0].observation_ids)
    assert rollout.turns[0].results[0].text.endswith("... [cut]")
    assert [picture.name for picture in pictures_in(rollout.turns[1].observation_ids)] == [one]


def test_any_tokenizer_reads_them_in_the_environments_thread(tokenizer):
    """As in a notebook, where conversations have none of their own. None waits for it in the loop."""
    env = MultiTurnToolEnv([], None, environment=game(image(1), [Reply(messages=[user("a", part(2))])]))
    script = [tokenizer(each, add_special_tokens=False)["input_ids"] for each in (MOVE, ANSWER)]
    (rollout,) = env.generate([ASKED], Scripted([script], tokenizer=tokenizer), rows=[{}])["rollouts"]
    assert rollout.error is None and len(pictures_in(rollout.prompt_ids + rollout.completion_ids)) == 2
    replies = [
        Reply(messages=[user("Now: ", part(11)), {"role": "user", "content": image(12)}]),
        {"history": [user(part(13), "image")]},
    ]
    with vision_model.read_off_the_loop(tokenizer, at_least=4):
        rollout, _ = play(tokenizer, game([image(10), "."], replies), [MOVE, MOVE, ANSWER])
    assert rollout.stop_reason == StopReason.ANSWERED and len(rollout.pictures) == 4


def test_a_continuation_is_text_and_a_reply_has_no_place(tokenizer, ids_of):
    with pytest.raises(EnvironmentFailure, match="continuation is .*, expected str or None"):
        read_reply(Reply(continuation=[image(1)]), "E", SaidPictures(tokenizer, []))
    replies = [lambda rollout: Reply(continuation=f" and {rollout.history[0]['content']}")]
    rollout, _ = play(tokenizer, game(image(1), replies), [MOVE, ANSWER])
    assert rollout.turns[0].continuation == " and Count." and not pictures_in(rollout.completion_ids)
    for content in (user("a", PLACE_PART), user(part(1), {"type": "video"})):
        with pytest.raises(EnvironmentFailure, match="messages has the content {'type'"):
            read_reply(Reply(messages=[content]), "E", SaidPictures(tokenizer, []))
    with pytest.raises(EnvironmentFailure, match="reset has an image"):
        joined(ASKED, image(1))


@pytest.mark.parametrize("way", ["reset", "messages", "history", "tool"])
def test_what_looks_like_a_mark_is_none(way, tokenizer):
    """A mark of a picture that the conversation has not, parts of one, and a placeholder, wherever they come from."""
    other = tokenizer.pictures.read(image(40), "")
    known = tokenizer.pictures.read(image(1), "")
    mark = mark_of(other)
    said = f"{mark}a{mark[:9]}b{mark[9:]}c\ufdd1d{PLACE}<|image_pad|><|vision_start|>e\ufdd0"
    message = [{"role": "user", "content": [text(said), part(1), text(said)]}]

    def look(self) -> str:
        """Look."""
        return said

    replies = {"messages": [Reply(messages=message)], "history": [Reply(history=message)]}.get(way, [None])
    cls = game(message if way == "reset" else None, replies, look=look)
    call = '<tool>{"name": "look", "args": {}}</tool>' if way == "tool" else MOVE
    rollout, _ = play(tokenizer, cls, [ANSWER] if way == "reset" else [call, ANSWER], {"image": None})
    found = [token for record in rollout.records for token in record.prompt_ids + record.completion_ids]
    assert rollout.error is None and not set(found) & set(tokenizer.pictures.unsampled)
    assert pictures_in(found) == ([] if way == "tool" else [known])
    words = readable(tokenizer.decode(found))
    assert "\ufdd0" not in words and "\ufdd1" not in words


@pytest.mark.parametrize("way", ["reset", "messages", "history"])
def test_an_image_that_is_not_read_ends_its_rollout_alone(way, tokenizer, plain):
    """A path, a broken one, and any image if the model reads text alone."""

    class Shows:
        def reset(self, value, **row):
            self.said = value and [{"role": "user", "content": [text("See "), {"type": "image", "image": value}]}]
            return self.said if way == "reset" else None

        def respond(self, rollout, turn):
            return {way: self.said} if self.said and way != "reset" else None

    where = "reset" if way == "reset" else f"Shows.respond: {way}"
    for reader, value, message in (
        (tokenizer, "/etc/hostname", ": the image cannot be read: .*got '/etc/hostname'"),
        (tokenizer, b"\x89PNG", ": the image cannot be read: .*cannot identify"),
        (plain, image(1), " has an image"),
    ):
        env = MultiTurnToolEnv([], None, tokenizer=reader, environment=Shows)
        script = [reader(ANSWER, add_special_tokens=False)["input_ids"]]
        rows = [{"value": value}, {"value": None}]
        broken, well = env.generate([ASKED, ASKED], Scripted([script, script]), rows=rows)["rollouts"]
        assert broken.stop_reason == StopReason.ENVIRONMENT_ERROR and well.stop_reason == StopReason.ANSWERED
        with pytest.raises(EnvironmentFailure, match=f"^{where}{message}"):
            raise broken.error


def test_an_image_counts_as_read(tokenizer, ids_of):
    """One token less, and the image with its message is not shown: the conversation ends, as with a text."""
    reply = {"messages": [user(part(1, (112, 112)))]}
    one = tokenizer.pictures.read(image(1, (112, 112)), "")
    needed = len(ids_of(MOVE, "<|im_end|>\n", *turn("user", one), ASKS)) + MultiTurnToolEnv.MIN_ANSWER_TOKENS
    fits, _ = play(tokenizer, game(replies=[reply]), [MOVE, ANSWER], max_completion_length=needed)
    assert fits.stop_reason == StopReason.ANSWERED and pictures_in(fits.completion_ids) == [one]
    without, _ = play(tokenizer, game(replies=[reply]), [MOVE], max_completion_length=needed - 1)
    assert without.stop_reason == StopReason.MAX_TOKENS and without.completion_ids == ids_of(MOVE)


@pytest.mark.parametrize("seed", range(12))
def test_random_conversations(seed, tokenizer, ids_of):
    """Records are what was read and sampled, and each picture stands whole, in the order in which it was said."""
    rng = random.Random(seed)
    sizes = [(56, 56), (28, 84), (28, 28), (112, 56)]

    def content():
        words = ["a", " digit\n", "é", "<|image_pad|>", "\ufdd0", ""]
        return [
            text(rng.choice(words)) if rng.random() < 0.5 else part(rng.randrange(5), rng.choice(sizes))
            for _ in range(rng.randint(1, 5))
        ]

    def message():
        return {"role": "user", "content": content()}

    def edited(rollout):
        kept = [each for each in rollout.history[1:-1] if rng.random() < 0.6]
        return Reply(history=[rollout.history[0], *kept, message()])

    replies = [edited if rng.random() < 0.4 else Reply(messages=[message()]) for _ in range(5)]
    row = {"image": image(9)} if rng.random() < 0.5 else {}
    rollout, backend = play(tokenizer, game(content(), replies), [MOVE] * 5 + [ANSWER], row, max_completion_length=900)
    assert rollout.stop_reason == StopReason.ANSWERED and len(rollout.turns) == 6
    for record in rollout.records:
        ids = record.prompt_ids + record.completion_ids
        assert all(len(run) == pictures_in(run)[0].num_tokens for run in runs_of(ids) if is_picture(run[0]))
        pieces, named = [], {picture.name: picture for picture in rollout.pictures}
        for k, piece in enumerate(readable(tokenizer.decode(ids)).split("<image ")):
            name, _, rest = piece.partition(">") if k else ("", "", piece)
            pieces += [*([named[name]] if k else []), *([rest] if rest else [])]
        assert ids == ids_of(*pieces)
        assert not set(ids) & set(tokenizer.pictures.unsampled)
    sampled = [ids_of(MOVE)] * 5 + [ids_of(ANSWER)]
    assert [turn.token_ids for turn in rollout.turns] == sampled


class Zoo:
    """Shows an image at the beginning, and another one behind the first turn, or in place of all that was said."""

    def reset(self, number, **row):
        self.number = number
        return [text(" First: "), part(number)]

    def zoom(self, corner: int) -> list:
        """Zoom.

        Args:
            corner: 0 to 3.
        """
        return ["Corner: ", image(60 + corner + self.number), " ok"]

    def respond(self, rollout, turn):
        also = user("<result> Also: ", part(70 + self.number, (28, 56)))
        if len(rollout.turns) == 1:
            return Reply(history=[also]) if self.number == 2 else Reply(messages=[also])
        return None


@pytest.mark.parametrize("shares", [True, False])
def test_two_steps_with_an_environments_images(folder, tmp_path, shares):
    """The tower gets gradients; the ids of each record are in the loss as they were read."""
    rows = [{"prompt": ASKED, "number": k, "image": image(90 + k) if k % 2 else None} for k in range(4)]
    env = MultiTurnToolEnv([], None, environment=Zoo)
    trainer = make_trainer(folder, tmp_path, rows, env=env, share_prompts=shares, log_rollouts=8)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if "visual" in name}
    trainer.train()
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert len(logs) == 2 and all(log[f"tokens/{name}_differ"] == 0 for log in logs for name in ("ids", "text"))
    assert trainer.layout.kind == ("shared" if shares else "trl"), trainer.layout.reason
    assert all(torch.isfinite(torch.tensor(log["loss"])) and log["grad_norm"] > 0 for log in logs)
    assert any(not torch.equal(before[n], p) for n, p in trainer.model.named_parameters() if n in before)
    names = set()
    for rollout in trainer.batch.rollouts:
        number = rollout.row["number"]
        ids = [record.prompt_ids + record.completion_ids for record in rollout.records]
        assert [len(pictures_in(each)) for each in ids] == ([1, 1] if number == 2 else [3 + number % 2])
        assert rollout.stop_reason == StopReason.ANSWERED
        names |= {picture.name for each in ids for picture in pictures_in(each)}
    log = (tmp_path / "rollouts.rank0.jsonl").read_text()
    assert "ufdd0" not in log and "\ufdd0" not in log and all(f"<image {name}>" in log for name in names)
    assert names <= {path.stem for path in (tmp_path / "images").iterdir()}
