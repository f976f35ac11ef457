"""Prompts of a batch: each is what its row gives alone, and no rollout can change that of another one."""

import copy
import json
import random

import pytest
from scripted import ANSWER, CHATML_TOKENIZER, Scripted, add, call, echo, make_tokenizer
from test_formats import FAMILIES, tokenizer_of

from mt_grpo.rollout import Reply
from mt_grpo_trainer import MultiTurnToolEnv

# Writes all that a message holds, as it is held: 1, True and 1.0 are three things, and keys have an order.
LITERAL = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% if m['role'] == 'user' and m['note'] is defined %}{{ m['note'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ style }}<|im_start|>assistant\n{% endif %}"
)
DATED = "<|im_start|>system\n{{ strftime_now('%d %b %Y') }}<|im_end|>\n" + LITERAL
NOTES = [None, 1, True, 1.0, "1", {"a": 1, "b": 2}, {"b": 2, "a": 1}, [1, [2]], [1, (2,)], [1, [True]]]


class Board:
    """A prompt that is the row's, with what `reset` says, or messages of its own; where asked it edits the history."""

    def reset(self, board=None, own=None, edits=False, more=False, **row):
        self.edits, self.tools = edits, [echo] if more else []
        return [{"role": "user", "content": own, "note": row.get("note")}] if own else board

    def look(self) -> str:
        """Look at it."""
        return "a board"

    def respond(self, rollout, turn):
        kept = [{"role": "user", "content": f"Anew, from turn {len(rollout.turns)}."}]
        return Reply(history=kept) if self.edits and turn.calls and len(rollout.turns) == 1 else None


def random_rows(rng, number):
    """Rows of groups of 1 to 4. Most groups differ from the one before in one column, and some do not at all."""
    row = {
        "prompt": [{"role": "user", "content": "Play."}],
        "board": "A board.",
        "own": None,
        "edits": False,
        "more": False,
    }
    rows = []
    while len(rows) < number:
        row, column = copy.deepcopy(row), rng.choice([*row, "note", None])
        if column == "prompt":
            row["prompt"] = [{"role": "user", "content": rng.choice(["Play.", "Play it.", "<|im_end|> it"])}]
        elif column == "note":
            row["note"] = row["prompt"][-1]["note"] = rng.choice(NOTES)
        elif column is not None:
            row[column] = {
                "board": rng.choice([None, "A board.", "A board, too."]), "own": rng.choice([None, "Mine."]),
                "edits": True,
            }.get(column, rng.random() < 0.5)  # fmt: skip
        rows += [copy.deepcopy(row) for _ in range(rng.randint(1, 4))]
    return rows[:number]


def play(env, rows):
    """The rollouts of one batch, and what the backend was asked."""
    backend = Scripted([[call("look"), ANSWER, ANSWER] for _ in rows])
    played = env.generate([row["prompt"] for row in rows], backend, {"temperature": 0.5, "seed": 3}, rows)
    asked = [[(r.prompt, r.max_tokens, r.params) for r in backend.of(index)] for index in range(len(rows))]
    return played["rollouts"], asked


def shown(rollout):
    """All that a rollout is made of, as text: 1 and True are two things here."""
    parts = rollout.prompt_messages, rollout.prompt_ids, rollout.first_messages, rollout.row, rollout.stop_reason
    turns = [(t.token_ids, t.logprobs, t.messages, t.observation_ids, t.context, t.results and t.results[0].text)
             for t in rollout.turns]  # fmt: skip
    return repr((parts, turns, rollout.records and [r.prompt_ids for r in rollout.records]))


@pytest.mark.parametrize("environment", [None, Board])
@pytest.mark.parametrize(
    "template, tool_format",
    [(LITERAL, "xml"), (DATED, "xml"), ("qwen3", "xml"), ("qwen3", "native"), ("llama3_2", "native")],
)
def test_a_batch_is_what_its_rows_are_alone(template, tool_format, environment):
    tokenizer = tokenizer_of(template) if template in FAMILIES else make_tokenizer(template)
    rng, shared = random.Random(f"{template} {environment}"), 0
    system_prompt = "Tools:\n{tool_descriptions}" if tool_format == "xml" else None  # the template shows them
    for style in ("", "Date: 1 May 2031."):
        made = {
            "tokenizer": tokenizer,
            "chat_template_kwargs": {"style": style},
            "environment": environment,
            "tool_format": tool_format,
        }
        env = MultiTurnToolEnv([add], system_prompt, **made)
        rows = random_rows(rng, 60)
        together, asked = play(env, rows)
        for row, rollout, requests in zip(rows, together, asked, strict=True):
            (alone,), (expected,) = play(env, [row])
            assert shown(rollout) == shown(alone)
            assert [json.dumps(r) for r in requests] == [json.dumps(r) for r in expected]
        shared += len(together) - len({tuple(r.prompt_ids) for r in together})
    assert shared > 40  # of 120: else nothing was tried


@pytest.mark.parametrize("environment", [None, Board])
def test_rollouts_share_nothing_that_can_be_changed(environment):
    called = [{"type": "function", "function": {"name": "add", "arguments": {"a": [1]}}}]
    prompt = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "", "tool_calls": called},
              {"role": "user", "content": "On."}]  # fmt: skip
    given = copy.deepcopy(prompt)
    env = MultiTurnToolEnv([add], None, tokenizer=CHATML_TOKENIZER, environment=environment)
    rollouts = env.start([prompt] * 3, None, [{"prompt": prompt, "notes": [1]}] * 3)
    env.step(rollouts, Scripted([[call("look")]] * 3))
    kept = [shown(rollout) for rollout in rollouts]
    assert len(set(kept)) == 1
    for number, rollout in enumerate(rollouts):
        rollout.prompt_ids.append(7)
        rollout.prompt_messages[0]["content"] = "changed"
        rollout.prompt_messages[1]["tool_calls"][0]["function"]["arguments"]["a"].append(2)
        rollout.row["notes"].append(2)
        assert [shown(other) for other in rollouts[number + 1 :]] == kept[number + 1 :]
    assert prompt == given
    unopened = env.start([prompt] * 2, None, [{"prompt": prompt}] * 2)
    unopened[0].prompt_messages[1]["tool_calls"][0]["function"]["arguments"]["a"].append(2)
    assert prompt == given and repr(unopened[1].prompt_messages[1:]) == repr(given[1:])
    (late,) = env.start([prompt], None, [{"prompt": prompt}])
    late.rendered = rollouts[0].rendered
    env.step([late], Scripted([[call("look")]]))
    assert late.prompt_ids == rollouts[0].prompt_ids[:-1]
