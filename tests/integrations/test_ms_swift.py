"""ms-swift's schedulers: plug-ins as they are, and their ids by hand. The policy is scripted."""

import asyncio
import copy
import subprocess
import sys
import threading
import types
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import trl
from scripted import ScriptedTexts
from scripted_schedulers import (
    END,
    NEXT,
    PLUGINS,
    PROMPT,
    TOKENIZER,
    answer,
    conversations,
    converse,
    ids,
    own_run,
    run,
    scripted,
    step_by,
    text_of,
    truncated,
    user,
)

import mt_grpo_trainer as mt
from mt_grpo.base.event_loop import run_async
from mt_grpo.integrations.ms_swift import paths as swift_paths, schedulers as ours
from mt_grpo.integrations.ms_swift.loop import SchedulerFailure
from mt_grpo.integrations.ms_swift.loss import LossScale, loss_scale_map
from mt_grpo.integrations.ms_swift.protocol import RequestConfig, RolloutInferRequest, RolloutOutput
from mt_grpo.integrations.ms_swift.recipe import as_reward, columns_of, completions_of
from mt_grpo.integrations.ms_swift.rewards import AsyncORM
from mt_grpo.integrations.ms_swift.schedulers import MathTipsScheduler, MultiTurnScheduler, RolloutScheduler
from mt_grpo.recipe.plugins import import_file
from mt_grpo.rollout import StopReason
from mt_grpo.training.batch import trained_records

FIRST, SECOND = "It is 2.", "It is 3."
MASKS = ["response_token_ids", "response_loss_mask"]
ASKED = ids(NEXT.format("And 1?"))  # what is read between two turns of `Asks`


class Asks(MultiTurnScheduler):
    """A new turn by the user, until `max_turns`."""

    def step(self, infer_request, response_choice, current_turn):
        infer_request.messages.append(user(f"And {current_turn}?"))
        return {"infer_request": infer_request, "rollout_infos": {"asked": current_turn}}


def waits(self, request, choice, turn):
    """The same message goes on behind a text, which is not trained."""
    request.messages[-1]["content"] += " Wait:"
    return {"infer_request": request}


def waits_by_ids(self, request, choice, turn):
    """The same, with ids and a mask."""
    added = self.tokenizer.encode(" Wait:", add_special_tokens=False)
    given = {"response_token_ids": choice.token_ids + added, "response_loss_mask": [1] * len(choice.token_ids)}
    given["response_loss_mask"] += [0] * len(added)
    return {**waits(self, request, choice, turn), **given}


def trained_ids(rollout):
    return [token for token, one in zip(rollout.completion_ids, rollout.loss_mask) if one]


@pytest.mark.contract("scheduler step")
def test_a_new_turn_token_for_token():
    rollout, _ = run(Asks, FIRST, SECOND, max_turns=2)
    first, second = ids(FIRST) + END, ids(SECOND) + END
    assert rollout.prompt_ids == ids(PROMPT)
    assert rollout.completion_ids == first + ASKED + second
    assert rollout.loss_mask == [1] * len(first) + [0] * len(ASKED) + [1] * len(second)
    assert rollout.turn_ids == [0] * len(first) + [-1] * len(ASKED) + [1] * len(second)
    (output,) = rollout.environment.outputs
    assert output["response_token_ids"] == [first, second] and rollout.stop_reason == StopReason.MAX_TURNS
    assert output["rollout_infos"] == {"asked": 1, "num_turns": 2}
    assert output["messages"] == [user("What?"), answer(FIRST), user("And 1?"), answer(SECOND)]
    assert len(trained_records(rollout)) == 1


def says_more(self, request, choice, turn):
    return {**waits(self, request, choice, turn), "response_token_ids": choice.token_ids + ids(" Wait: so")}


def says_less(self, request, choice, turn):
    return {**waits(self, request, choice, turn), "response_token_ids": choice.token_ids}


def a_dummy(self, request, choice, turn):
    waits(self, request, choice, turn)
    request.messages.append({"role": "assistant", "content": None})
    return request


def tags(self, request, choice, turn):
    request.messages[-1]["content"] += "<tool_response>42</tool_response><|im_end|>"
    return request


def strips(self, request, choice, turn):
    request.messages[-1]["content"] = request.messages[-1]["content"].strip()
    return Asks.step(self, request, choice, turn)


def old_request(self, infer_request, result, current_turn):  # 3.6
    infer_request.messages.append(user("And 1?"))
    return infer_request


def old_pair(self, infer_request, result, current_turn):  # 3.7
    return old_request(self, infer_request, result, current_turn), {"asked": 1}


def new_dict(self, infer_request, response_choice, current_turn):  # 3.8
    return {"infer_request": old_request(self, infer_request, response_choice, current_turn)}


def new_dict_with_ids(self, infer_request, response_choice, current_turn):  # 4.6
    choice = response_choice
    given = {"response_token_ids": choice.token_ids, "response_loss_mask": [1] * len(choice.token_ids)}
    logprobs = self._extract_logprobs_from_choice(choice)
    assert logprobs == [-k / 64 for k in range(len(choice.token_ids))]
    return {**new_dict(self, infer_request, choice, current_turn), **given, "rollout_logprobs": logprobs}


def only(*keys):
    def step(self, request, choice, turn):
        given = new_dict_with_ids(self, request, choice, turn)
        return {key: given[key] for key in ("infer_request", *keys)}

    return step


CUT, WAIT, LAST = (1, FIRST), (0, " Wait:"), (1, SECOND + "<|im_end|>")
WHOLE, AND = (1, FIRST + "<|im_end|>"), (0, NEXT.format("And 1?"))
STEPS = {  # a scheduler's step -> (it, what the policy says, each part of the completion and whether it is trained)
    "a text that goes on": (waits, [truncated(FIRST), SECOND], [CUT, WAIT, LAST]),
    "its ids and a mask": (waits_by_ids, [truncated(FIRST), SECOND], [CUT, WAIT, LAST]),
    # Ids are read as a scheduler gives them, also if its text says less. Text that they do not hold is read, too.
    "ids of more": (says_more, [truncated(FIRST), SECOND], [CUT, (0, " Wait: so"), LAST]),
    "ids of less": (says_less, [truncated(FIRST), SECOND], [CUT, WAIT, LAST]),
    "all segments are trained": (waits, [truncated("1"), truncated("2"), "3"], [
        (1, "1"), WAIT, (1, "2"), WAIT, (1, "3<|im_end|>")]),
    "a dummy means that the last message goes on": (a_dummy, [truncated(FIRST), SECOND], [CUT, WAIT, LAST]),
    "tags stay and ends of turn do not": (tags, [truncated(FIRST), SECOND], [
        CUT, (0, "<tool_response>42</tool_response>< |im_end|>"), LAST]),
    "without its white space an answer keeps its end": (strips, [FIRST + "\n", SECOND], [
        (1, FIRST + "\n<|im_end|>"), AND, LAST]),
    **{step.__name__: (step, [FIRST, SECOND], [WHOLE, AND, LAST])
       for step in (old_request, old_pair, new_dict, new_dict_with_ids)},
    # A mask of the scheduler goes before `last_round`; ids without one do not.
    **{f"last_round {keys}": (only(*keys), [FIRST, SECOND], [(trained, FIRST + "<|im_end|>"), AND, LAST], "last_round")
       for keys, trained in (((), 0), (("response_token_ids",), 0), (tuple(MASKS), 1))},
}  # fmt: skip


@pytest.mark.contract("response_token_ids", "step returns dict", "step returns a pair", "response_choice or result")
@pytest.mark.contract("loss_scale")
@pytest.mark.parametrize("name", STEPS)
def test_what_a_step_has_read_and_trained(name):
    """Text that the scheduler put behind is read, and not trained."""
    step, turns, parts, *loss_scale = STEPS[name]
    settings = {"loss_scale": loss_scale[0]} if loss_scale else {}
    rollout, _ = run(step_by(step), *turns, max_turns=len(turns), **settings)
    assert rollout.completion_ids == [token for _, text in parts for token in ids(text)]
    assert rollout.loss_mask == [trained for trained, text in parts for _ in ids(text)]
    assert loss_scale or rollout.logprobs.count(0.0) == rollout.loss_mask.count(0) + len(turns)
    (output,) = rollout.environment.outputs
    if parts == [CUT, WAIT, LAST]:
        assert rollout.messages == output["messages"][1:] == [answer(f"{FIRST} Wait:{SECOND}")]
    if parts == [WHOLE, AND, LAST]:
        assert output["response_token_ids"] == [ids(WHOLE[1]), ids(LAST[1])]


def waits_and_asks(self, request, choice, turn):
    return Asks.step(self, waits(self, request, choice, turn)["infer_request"], choice, turn)


def edits(said):
    def step(self, request, choice, turn):
        request.messages[-1]["content"] = said
        request.messages += [user("And?"), answer("I think")]
        return {"infer_request": request}

    return step


def begins_anew(said):
    def step(self, request, choice, turn):
        request.messages = [user("Said: 2."), answer(said), user("And now?")]
        return {"infer_request": request}

    return step


OF_USER = "<|im_start|>user\n%s<|im_end|>\n<|im_start|>assistant\n"
BEGUN = [  # a step behind an end of turn, and what is read in the record that it begins
    *((step, [PROMPT, FIRST, " Wait:"]) for step in (waits, waits_by_ids)),
    (waits_and_asks, [PROMPT, FIRST, " Wait:", "<|im_end|>" + NEXT.format("And 1?")]),
    *((edits(said), [PROMPT, f"{said}<|im_end|>\n{OF_USER % 'And?'}", "I think"])
      for said in ("It is X.", "Different")),
    *((begins_anew(said), [f"{OF_USER % 'Said: 2.'}{said}<|im_end|>\n{OF_USER % 'And now?'}"])
      for said in ("Right.", FIRST)),  # also if the last response stands in it as it was
]  # fmt: skip


@pytest.mark.parametrize("step, read", BEGUN)
def test_what_goes_on_without_the_end_of_turn_or_is_edited_begins_a_record(step, read):
    """The answer was sampled with its end and is trained whole, also where the next one is begun."""
    rollout, _ = run(step_by(step), FIRST, SECOND, max_turns=2)
    first, second = trained_records(rollout)
    assert first.prompt_ids == ids(PROMPT) and first.completion_ids == ids(FIRST) + END
    assert second.prompt_ids == [token for text in read for token in ids(text)]
    assert second.completion_ids == ids(SECOND) + END and second.loss_mask == [1] * len(ids(SECOND) + END)


@pytest.mark.parametrize("masked", [False, True])
def test_ids_may_begin_with_what_the_scheduler_began(masked):
    """It is read once, and not trained."""

    def step(self, request, choice, turn):
        begun = ids("I think") if turn > 1 else []
        request.messages += [user("And?"), answer("I think")] if turn == 1 else [user("More?")]
        mask = {"response_loss_mask": [0] * len(begun) + [1] * len(choice.token_ids)} if masked else {}
        return {"infer_request": request, "response_token_ids": begun + choice.token_ids, **mask}

    rollout, _ = run(step_by(step), FIRST, SECOND, FIRST, max_turns=3)
    first, second = ids(FIRST) + END, ids(SECOND) + END
    begun = ids(NEXT.format("And?")) + ids("I think")
    assert rollout.completion_ids == first + begun + second + ids(NEXT.format("More?")) + first
    assert trained_ids(rollout) == first + second + first


@pytest.mark.contract("response_loss_mask")
def test_a_mask_chooses_among_what_was_sampled():
    """The ids stay in the record, with their logprobs."""

    def step(self, request, choice, turn):
        given = waits_by_ids(self, request, choice, turn)
        return {**given, "response_loss_mask": [0, *given["response_loss_mask"][1:]]}

    rollout, _ = run(step_by(step), truncated(FIRST), SECOND, max_turns=2)
    first, behind, second = ids(FIRST), ids(" Wait:"), ids(SECOND) + END
    assert rollout.completion_ids == first + behind + second
    assert rollout.loss_mask == [0] + [1] * (len(first) - 1) + [0] * len(behind) + [1] * len(second)
    assert rollout.turn_ids == [-1] + [0] * (len(first) - 1) + [-1] * len(behind) + [1] * len(second)
    assert len(rollout.logprobs) == len(rollout.completion_ids)


@pytest.mark.contract("math_tip_trick", "check_finished", "math_tip_trick_multi_turn")
def test_tips_token_for_token(monkeypatch):
    """`math_tip_trick`: what stands from the answer on is neither read nor trained."""
    solution, said = {"solution": "3"}, ("<answer>2</answer>", "<answer>3</answer>")
    monkeypatch.setattr(swift_paths.rewards, "SECONDS", 0.5)
    monkeypatch.setattr(swift_paths.rewards, "WORKERS", [])
    rollout, _ = run(MathTipsScheduler, "so <answer>2</answer>", "<answer>3</answer>", row=solution, max_turns=3)
    second = ids("<answer>3</answer>") + END
    (record,) = trained_records(rollout)
    size, num_kept = len(record.completion_ids) - len(second), len(trained_ids(rollout)) - len(second)
    assert TOKENIZER.decode(record.completion_ids[:size]) == "so But wait... It seems I made a mistake,"
    assert TOKENIZER.decode(record.completion_ids[:num_kept]).strip() == "so"
    assert record.loss_mask == [1] * num_kept + [0] * (size - num_kept) + [1] * len(second)
    assert record.completion_ids[size:] == second
    assert rollout.environment.outputs[0]["rollout_infos"]["num_turns"] == 2
    right, _ = run(MathTipsScheduler, "<answer>3</answer>", row=solution, max_turns=3)
    assert len(right.turns) == 1 and right.stop_reason == StopReason.ENVIRONMENT_STOP
    rollout, _ = run(MathTipsScheduler, *said, row=solution, max_turns=3)
    (record,) = trained_records(rollout)
    assert record.completion_ids == ids("<answer>3</answer>") + END
    assert TOKENIZER.decode(record.prompt_ids).endswith("assistant\nBut wait... It seems I made a mistake,")

    rollout, _ = run(MathTipsScheduler, "<answer>$9^{9^{9}}$</answer>", said[1], row=solution, max_turns=3)
    assert len(rollout.turns) == 2  # a comparison without end is ended
    rollout, _ = run(changing(lambda request: request.messages[-1].update(content="")), FIRST, SECOND, max_turns=2)
    assert [turn.trained for turn in rollout.turns] == [False, True]
    rollout, _ = run(ours.MathTipsMultiTurnScheduler, "<answer>2</answer>", row={"solution": "3"})
    assert [m["role"] for m in rollout.environment.outputs[0]["messages"]] == ["user", "assistant"] * 2
    assert len(trained_records(rollout)) == 1 and len(rollout.turns) == 2


@pytest.mark.parametrize("said", ["😀😀😀 ab ", "好的好的 so 我 ", "é"])
def test_a_cut_keeps_whole_characters(said):
    def step(self, request, choice, turn):
        request.messages[-1]["content"] = request.messages[-1]["content"].split("<answer>")[0] + "Hm"
        return request

    rollout, _ = run(step_by(step), f"{said}<answer>2", "3", max_turns=2)
    trained = TOKENIZER.decode(trained_ids(rollout)[:-1])
    assert TOKENIZER.decode(rollout.completion_ids[:-1]) == f"{said}Hm3" and len(trained_records(rollout)) == 1
    assert trained.startswith(said.rstrip()) and "answer" not in trained


@pytest.mark.contract("thinking_tips_scheduler")
@pytest.mark.parametrize("loss_scale", ["default", "last_round"])
def test_thinking_of_earlier_turns_is_left_out_one_record_per_turn(loss_scale):
    said = "<think>much</think> <answer>2</answer>"
    rollout, _ = run(ours.ThinkingModelTipsScheduler, said, row={"solution": "3"}, loss_scale=loss_scale)
    first, second = trained_records(rollout)
    assert first.completion_ids == second.completion_ids == ids(said) + END
    assert "much" not in TOKENIZER.decode(second.prompt_ids) and "<answer>2" in TOKENIZER.decode(second.prompt_ids)
    assert [o["rollout_infos"]["num_turns"] for o in rollout.environment.outputs] == [1, 2]


@pytest.mark.parametrize("thinking", ["<think>\n\n</think>\n\n", "</think>\n\n"])  # the prompt may have opened it
def test_a_loss_scale_masks_an_empty_thinking(thinking):
    rollout, _ = run(RolloutScheduler, f"{thinking}It is 2.", loss_scale="last_round+ignore_empty_think")
    assert TOKENIZER.decode(trained_ids(rollout)[:-1]) == FIRST


class Evens(LossScale):
    def get_loss_scale(self, context, *, query=None):
        words = [f"{word} " for word in context.split(" ")]
        words[-1] = words[-1][:-1]
        return words, [float(k % 2) for k in range(len(words))]


class OldEvens(Evens):  # 3.x
    def get_loss_scale(self, context, context_type, is_last_round, *, query=None):
        assert (context_type, is_last_round, query) == ("response", True, "What?")
        return super().get_loss_scale(context, query=query)


@pytest.mark.contract("loss_scale")
@pytest.mark.parametrize("cls", [Evens, OldEvens])
def test_a_loss_scale_of_a_plugin(cls, monkeypatch):
    monkeypatch.setitem(loss_scale_map, "evens", cls)
    rollout, _ = run(RolloutScheduler, "11 22 33 44", loss_scale="evens")
    assert TOKENIZER.decode(trained_ids(rollout)[:-1]).split() == ["22", "44"]


def test_a_loss_scale_leaves_choices_of_ids():
    async def part(self, ask, request, config):
        response = await ask(*request.messages)
        return RolloutOutput(response=response, response_token_ids=[response.choices[0].token_ids[:2]])

    for loss_scale in ("default", "ignore_empty_think"):
        rollout, _ = run(own_run(part), FIRST, loss_scale=loss_scale)
        assert rollout.loss_mask == [1] * 2 + [0] * (len(rollout.completion_ids) - 2)


@pytest.mark.contract("check_finished", "max_turns")
def test_the_order_of_the_methods():
    """`check_finished` is always asked, and `max_turns` ends what it lets go on."""
    order = []

    class Calls(Asks):
        async def on_trajectory_start(self, requests):
            order.append(("start", len(requests)))

        def on_turn_end(self, infer_request, response_choice, current_turn):
            order.append(("end", current_turn, infer_request.messages[-1]["content"]))
            return {"rollout_infos": {"ended": current_turn}}

        def check_finished(self, infer_request, response_choice, current_turn):
            order.append(("check", current_turn))
            return False

    rollout, _ = run(Calls, FIRST, max_turns=2)
    assert order == [("start", 1), ("end", 1, FIRST), ("check", 1), ("end", 2, FIRST), ("check", 2)]
    assert rollout.environment.infos == {"asked": 1, "ended": 2, "num_turns": 2}


def test_constructors_and_tools():
    """Both forms of constructors; other tools begin a record."""

    class Old(Asks):
        def __init__(self, max_turns=None, *args, **kwargs):
            super().__init__(max_turns, *args, **kwargs)
            self.tip = self.tokenizer.encode("x")

    class Bare(Asks):
        def __init__(self, max_turns):
            self.max_turns = max_turns

    for cls in (Old, Bare, Asks):
        assert len(run(cls, FIRST, max_turns=3)[0].turns) == 3
    tool = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}

    changes = changing(lambda request: setattr(request, "tools", [tool]))
    first, second = trained_records(run(changes, FIRST, max_turns=2)[0])
    assert '"add"' not in TOKENIZER.decode(first.prompt_ids) and '"add"' in TOKENIZER.decode(second.prompt_ids)


@pytest.mark.parametrize("gives_ids", [False, True])
def test_a_response_that_a_judge_has_read_keeps_its_ids(gives_ids):
    """It is cut for the next turn alone."""

    async def step(self, request, choice, turn):
        judged = [*copy.deepcopy(request.messages), user("Right?")]
        await self.infer_engine.infer_async(RolloutInferRequest(messages=judged), RequestConfig())
        request.messages[-1]["content"] = "It is Wait:"
        tip = self.tokenizer.encode(" Wait:")
        given = {"response_token_ids": choice.token_ids[:2] + tip, "response_loss_mask": [1] * 2 + [0] * len(tip)}
        return {"infer_request": request, **(given if gives_ids else {})}

    rollout, _ = run(step_by(step), truncated(FIRST), "No.", SECOND, max_turns=2)
    size = len(ids(FIRST))
    assert rollout.turns[0].token_ids == ids(FIRST) and [t.trained for t in rollout.turns] == [True, False, True]
    assert rollout.turns[0].per_token(1, 0) == ([1] * 2 + [0] * (size - 2) if gives_ids else [1] * size)


@pytest.mark.contract("scheduler run")
def test_a_run_of_ones_own():
    """Every request is exact, at the same time too; what no output goes through is not trained."""

    async def function(self, ask, request, config):
        judge = ask(user("Judge!"), uuid="another")
        first, _ = await asyncio.gather(self.infer_engine.infer_async(request, config), judge)
        messages = [*request.messages, answer(text_of(first)), user("And 1?")]
        last = await ask(*messages)
        return RolloutOutput(response=last, messages=[*messages, text_of(last)], rollout_infos={"mine": True})

    rollout, _ = run(own_run(function), FIRST)
    assert [turn.trained for turn in rollout.turns] == [True, False, True]
    (record,) = trained_records(rollout)
    first = ids(FIRST) + END
    assert record.completion_ids == first + ASKED + first and record.turn_ids[-1] == 2
    assert rollout.environment.infos == {"mine": True}
    said = rollout.environment.outputs[0]["messages"]  # a text among messages is the assistant's
    assert said == [user("What?"), answer(FIRST), user("And 1?"), answer(FIRST)]
    rollout, _ = run(RolloutScheduler, FIRST)
    assert rollout.completion_ids == ids(FIRST) + END and rollout.environment.infos == {"num_turns": 1}


@pytest.mark.contract("trajectory_inputs")
def test_outputs_that_are_a_list_are_a_record_each():
    async def splits(self, ask, request, config):
        outputs, messages = [], list(request.messages)
        for turn in range(3):
            response = await ask(*messages)
            messages.append(answer(text_of(response)))
            given = {"response_token_ids": response.choices[0].token_ids, "rollout_infos": {"turn": turn}}
            outputs.append(RolloutOutput(response=response, messages=list(messages), **given))
            messages.append(user("And?"))
        return outputs

    rollout, _ = run(own_run(splits), FIRST)
    records = trained_records(rollout)
    assert [record.completion_ids for record in records] == [ids(FIRST) + END] * 3
    behind = ids(FIRST) + END + ids(NEXT.format("And?"))
    assert [record.prompt_ids for record in records] == [ids(PROMPT) + behind * k for k in range(3)]
    columns = columns_of([rollout.environment])
    (rows,) = columns["trajectory_inputs"].values()
    assert [row["rollout_infos"]["turn"] for row in rows] == [0, 1, 2] and columns["rollout_infos"] == [{"turn": 2}]


def test_two_requests_from_one_response_are_two_records():
    """Each with all that it read; what was sampled first is trained once."""

    async def branches(self, ask, request, config):
        first = await ask(*request.messages)
        outputs = []
        for question in ("And?", "Or?"):
            last = await ask(*request.messages, answer(text_of(first)), user(question))
            outputs.append(RolloutOutput(response=last))
        return outputs[0] if self.max_turns == 1 else outputs

    rollout, _ = run(own_run(branches), FIRST, "3", "4")
    said = [ids(FIRST) + END + ids(NEXT.format(question)) for question in ("And?", "Or?")]
    records = [(r.prompt_ids, r.completion_ids) for r in trained_records(rollout)]
    assert records == [(ids(PROMPT) + said[0], ids("3") + END), (ids(PROMPT) + said[1], ids("4") + END)]
    assert [turn.trained for turn in rollout.turns] == [False, True, True]
    said_last = [output["messages"] for output in rollout.environment.outputs]
    assert said_last[1] == [user("What?"), answer(FIRST), user("Or?"), answer("4")]
    (record,) = trained_records(run(own_run(branches), FIRST, "3", "4", max_turns=1)[0])
    assert record.completion_ids == said[0] + ids("3") + END


async def three_turns(self, ask, request, config):
    """Three turns, with the ids of all, as it may send thinking that the model does not read."""
    messages, all_ids = list(request.messages), []
    for _ in range(3):
        response = await ask(*messages)
        all_ids.append(response.choices[0].token_ids)
        messages += [answer(text_of(response)), user("And?")]
    return RolloutOutput(response=response, messages=messages[:-1], response_token_ids=all_ids)


def test_last_round_leaves_thinking_out_of_a_run_of_ones_own():
    """With `default` the history is read as it was sampled. The ids of turns before an edit are found. Ids that leave
    out an end of turn only mask it: the record stays what the model read."""
    said = "<think>much</think> It is 2."
    rollout, _ = run(own_run(three_turns), said, loss_scale="last_round")
    (record,) = trained_records(rollout)
    assert "much" not in TOKENIZER.decode(record.prompt_ids) and record.completion_ids == ids(said) + END
    assert [turn.trained for turn in rollout.turns] == [False, False, True]
    (record,) = trained_records(run(own_run(three_turns), said)[0])
    behind = ids(NEXT.format("And?"))
    assert record.completion_ids == (ids(said) + END + behind) * 2 + ids(said) + END

    async def leaves_out(self, ask, request, config):
        first = await ask(*request.messages)
        second = await ask(*request.messages, answer(text_of(first)), user("And?"))
        a, b = first.choices[0].token_ids[:-1], second.choices[0].token_ids
        masks = [[1] * len(a), [1] * len(b)]
        return RolloutOutput(response=second, response_token_ids=[a, b], response_loss_mask=masks)

    rollout, _ = run(own_run(leaves_out), FIRST)
    first, behind = ids(FIRST), ids(NEXT.format("And?"))
    assert rollout.completion_ids == first + END + behind + first + END
    assert rollout.loss_mask == [1] * len(first) + [0] * (1 + len(behind)) + [1] * len(first + END)


@pytest.mark.parametrize("first", [FIRST, truncated(FIRST)])
def test_ids_of_a_message_that_goes_on(first):
    async def goes_on(self, ask, request, config):
        begun = await ask(*request.messages)
        last = await ask(*request.messages, answer(text_of(begun) + " Wait:"))
        a, tip, b = begun.choices[0].token_ids, ids(" Wait:"), last.choices[0].token_ids
        mask = [1] * len(a) + [int(self.max_turns == 9)] * len(tip) + [1] * len(b)
        return RolloutOutput(response=last, response_token_ids=[a + tip + b], response_loss_mask=[mask])

    rollout, _ = run(own_run(goes_on), first, "3")
    assert all(turn.trained and turn.mask is None for turn in rollout.turns)
    with pytest.raises(SchedulerFailure, match="which the policy did not sample"):
        run(own_run(goes_on), first, "3", max_turns=9)


def test_a_branch_that_cuts_leaves_the_other_responses_whole():
    """The response before the cut one is trained with it. Text behind one branch is not in another."""

    async def branches(self, ask, request, config):
        before = [*request.messages, answer(text_of(await ask(*request.messages))), user("And?")]
        a, b = await ask(*before), await ask(*before)
        c = await ask(*before, answer(text_of(a).split("<answer>")[0] + "Wait:"))
        outputs = [RolloutOutput(response=each) for each in (c, a, b)]
        return outputs if self.max_turns is None else outputs[0]

    said = [FIRST, "so it is <answer>2</answer>", "so it is <answer>7</answer>", "3"]
    rollout, _ = run(own_run(branches), *said)
    assert [TOKENIZER.decode(r.completion_ids[:-1]) for r in trained_records(rollout)] == said[1:]
    rollout, _ = run(own_run(branches), *said, max_turns=1)
    assert [turn.trained for turn in rollout.turns] == [True, False, False, True]
    before = ids(PROMPT) + ids(FIRST) + END + ids(NEXT.format("And?"))
    assert rollout.records[-1].prompt_ids == before + ids("so it is Wait:")
    assert rollout.environment.outputs[0]["messages"][-1] == answer("so it is Wait:3")

    async def branches(self, ask, request, config):
        a = await ask(*request.messages)
        b = await ask(*request.messages, answer(text_of(a) + " Wait:"))
        c = await ask(*request.messages, answer(text_of(a)), user("And?"))
        return [RolloutOutput(response=each) for each in (b, c)]

    b, c = trained_records(run(own_run(branches), truncated(FIRST), "3", "4")[0])
    assert b.prompt_ids == ids(PROMPT) and b.completion_ids == ids(FIRST) + ids(" Wait:") + ids("3") + END
    assert c.prompt_ids == ids(PROMPT) + ids(FIRST) + ids("<|im_end|>" + NEXT.format("And?"))


def test_a_prefill_is_read_and_not_trained():
    async def prefills(self, ask, request, config):
        await ask(*request.messages)  # which is no beginning of the next message
        first = await ask(*request.messages, answer("It follows:"))
        before = [*request.messages, answer("It follows:" + text_of(first)), user("And?")]
        last = await ask(*before, answer("So:"))
        await ask(*before[:2], answer("Or:"))
        return RolloutOutput(response=last, response_token_ids=[each.choices[0].token_ids for each in (first, last)])

    rollout, llm = run(own_run(prefills), "1", "2", "3", "4")
    assert [turn.trained for turn in rollout.turns] == [False, True, True, False]
    assert rollout.turns[1].messages == [user("And?"), answer("So:")]
    assert llm.asked[3][0] == ids(f"{PROMPT}It follows:2<|im_end|>\n<|im_start|>assistant\n") + ids("Or:")
    record = rollout.records[1]
    assert record.prompt_ids == ids(PROMPT) + ids("It follows:")
    assert record.completion_ids == ids("2") + END + ids(NEXT.format("And?")) + ids("So:") + ids("3") + END
    assert rollout.environment.outputs[0]["messages"][-1] == answer("So:3")


def test_the_base_classs_run_may_be_called_and_its_output_changed():
    """A second run replaces the first; a mask that is changed behind it holds."""

    class Twice(Asks):
        async def run(self, infer_request, request_config, **kwargs):
            copies = [copy.deepcopy(infer_request) for _ in range(2)]
            outputs = [await super(Twice, self).run(each, request_config) for each in copies]
            return outputs if self.all else outputs[-1]

    for is_list in (False, True):  # a list of whole conversations trains all their turns
        rollout, _ = run(type("Twice", (Twice,), {"all": is_list}), FIRST, max_turns=2)
        assert [turn.trained for turn in rollout.turns] == [is_list, is_list, True, True]
        assert len(trained_records(rollout)) == 1 + is_list

    class Changes(Asks):
        async def run(self, infer_request, request_config, **kwargs):
            output = await super().run(infer_request, request_config)
            output.response_loss_mask = [[0] * len(output.response_token_ids[0]), [1] * 6]
            return output

    rollout, _ = run(Changes, FIRST, max_turns=2)
    first = ids(FIRST) + END
    assert rollout.loss_mask == [0] * len(first + ASKED) + [1] * len(first)


def test_a_row_is_a_request_without_its_solution():
    """Its column is `prompt` or `messages`; keys of messages for other kinds of training are left out."""
    seen = []

    async def looks(self, ask, request, config):
        seen.append(request.messages)
        return RolloutOutput(response=await self.infer_engine.infer_async(request, config))

    solved = [user("2+2?"), {**answer("5"), "loss": False}, user("No."), answer("<answer>4</answer>")]
    for column in ("prompt", "messages"):
        rollout, llm = run(own_run(looks), FIRST, row={column: solved})
        assert seen.pop() == [user("2+2?"), answer("5"), user("No.")]
        assert "<answer>4" not in TOKENIZER.decode(llm.asked[0][0]) and len(rollout.turns) == 1
    rollout, _ = run(own_run(looks), FIRST, row={"prompt": "What?"})
    assert rollout.prompt_ids == ids(PROMPT) and seen.pop() == [user("What?")]


@pytest.mark.contract("completion_length_limit_scope")
def test_the_budget_ends_a_conversation():
    """`total` bounds all that is sampled and newly read; `per_round` each response. A full context ends both."""
    first = len(ids(FIRST) + END + ASKED)
    rollout, _ = run(Asks, FIRST, scope="total", max_completion_length=first + 2, max_turns=9)
    assert len(rollout.completion_ids) == first + 2 and rollout.stop_reason == StopReason.MAX_TOKENS
    rollout, _ = run(Asks, FIRST, max_completion_length=6, max_turns=3)
    assert len(rollout.turns) == 3 and rollout.stop_reason == StopReason.MAX_TURNS
    llm = scripted(FIRST, max_model_len=len(ids(PROMPT)) + first)
    rollout, _ = run(Asks, llm=llm, max_turns=9)
    assert len(rollout.turns) == len(llm.asked) == 1 and rollout.stop_reason == StopReason.CONTEXT_LENGTH
    (output,) = rollout.environment.outputs  # no method is called for a response that is none
    assert output["messages"] == [user("What?"), answer(FIRST)] and output["rollout_infos"]["num_turns"] == 1
    goes_on = type("GoesOn", (Asks,), {"on_turn_end": lambda *_: {"done": False}})
    rollout, _ = run(goes_on, truncated(FIRST), max_turns=9)
    assert len(rollout.turns) == 1 and rollout.stop_reason == StopReason.MAX_TOKENS
    rollout, _ = run(Asks, FIRST, max_model_calls=4)
    assert len(rollout.turns) == 4 and rollout.stop_reason == StopReason.MAX_TURNS


def test_rewards_read_the_thinking_that_the_prompt_opens(tmp_path):
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates/qwen3.jinja").read_text()
    off = {"enable_thinking": False}
    rollout, _ = run(Asks, "<answer>2</answer>", max_turns=1, tokenizer=tokenizer, chat_template_kwargs=off)
    assert completions_of([rollout.environment]) == ["<think>\n\n</think>\n\n<answer>2</answer>"]
    assert as_reward("format", SimpleNamespace(), settings(tmp_path))(environments=[rollout.environment]) == [1.0]


@pytest.mark.parametrize("cls", [Asks, RolloutScheduler])
def test_a_prompt_without_room_for_a_response_reaches_rewards(cls, tmp_path):
    rollout, llm = run(cls, llm=scripted(FIRST, max_model_len=len(ids(PROMPT))), max_turns=2)
    assert rollout.stop_reason == StopReason.CONTEXT_LENGTH and not rollout.turns and not llm.asked
    rewarded = as_reward("format", SimpleNamespace(), settings(tmp_path))(environments=[rollout.environment])
    assert rewarded == [0.0] and columns_of([rollout.environment])["is_truncated"] == [True]


def test_a_budget_that_ends_a_run_of_ones_own_trains_what_was_sampled():
    async def loops(self, ask, request, config):
        messages, infos = list(request.messages), {"mine": 1}
        while True:
            response = await ask(*messages)
            messages.append(answer(text_of(response)))
            if response.choices[0].finish_reason == "length" and self.max_turns is None:
                return RolloutOutput(response=response, messages=messages, rollout_infos=infos)
            messages.append(user("And?"))

    room = len(ids(FIRST) + END + ids(NEXT.format("And?")))
    for max_turns, infos in ((None, {"mine": 1}), (1, {"num_turns": 1})):  # the second asks on and on
        cls = own_run(loops)
        rollout, _ = run(cls, FIRST, scope="total", max_completion_length=room, max_turns=max_turns)
        assert rollout.stop_reason == StopReason.MAX_TOKENS and [turn.trained for turn in rollout.turns] == [True]
        assert rollout.environment.outputs[-1]["messages"] == [user("What?"), answer(FIRST)]
        assert rollout.environment.infos == infos
    rollout, _ = run(own_run(three_turns), "1", "2", max_model_calls=2)
    assert [turn.trained for turn in rollout.turns] == [True, True]
    (output,) = rollout.environment.outputs
    assert output["messages"][-1] == answer("2") and output["response_token_ids"] == [ids("1") + END, ids("2") + END]


def gives(**values):
    """A scheduler whose `step` returns these."""
    return step_by(lambda self, request, choice, turn: {"infer_request": request, **values})


def changing(change):
    """A scheduler whose `step` changes the request, and asks."""

    def step(self, request, choice, turn):
        change(request)
        return Asks.step(self, request, choice, turn)

    return step_by(step)


def returning(**fields):
    """A scheduler whose `run` returns an output with these fields, made of the response's ids."""

    async def function(self, ask, request, config):
        response = await ask(*request.messages)
        made = {key: make(response.choices[0].token_ids) for key, make in fields.items()}
        return SimpleNamespace(response=response, **made)

    return own_run(function)


async def blocks(self, request, choice, turn):
    await asyncio.sleep(60)


NOBODYS = SimpleNamespace(choices=[SimpleNamespace(token_ids=ids(FIRST) + END, finish_reason="stop")])


@pytest.mark.parametrize(
    "cls, said",
    [
        (step_by(lambda *_: {}["solution"]), "Steps raised KeyError: 'solution'"),
        (step_by(lambda *_: "text"), "step returned 'text', expected"),
        (gives(response_loss_mask=[1]), "without response_token_ids"),
        (gives(response_token_ids=[len(TOKENIZER)]), f"has {len(TOKENIZER)} after"),
        (gives(response_token_ids=[1], response_loss_mask=[2]), "Expected a 0 or a 1"),
        (gives(response_token_ids=[1, 2], response_loss_mask=[1]), "response_loss_mask has 1 values"),
        (gives(response_token_ids=[1], response_loss_mask=[1]), "is 1 for id 1 at 0, which the policy did"),
        (changing(lambda r: setattr(r, "chat_template_kwargs", {"a": 1})), "the recipe {}"),
        (changing(lambda r: r.messages[-1].update(loss=False)), "set loss or loss_scale on a message"),
        (own_run(lambda *_: asyncio.sleep(0, SimpleNamespace(response=NOBODYS))), "none that infer_async gave"),
        (returning(response_token_ids=lambda ids: [[9, 9]]), "has 9 at 0, expected"),
        (returning(response_token_ids=lambda ids: [ids, ids]), "for which there is no response"),
        (returning(response_token_ids=lambda ids: [ids], response_loss_mask=lambda ids: [[1]]), "has 1 values"),
        (returning(response_token_ids=lambda ids: [ids + [9]], response_loss_mask=lambda ids: [[1] * (len(ids) + 1)]),
         "is 1 for id 9"),
        (step_by(blocks, waits=1.0), "took longer than environment_timeout=1 s between two responses"),
    ],
)  # fmt: skip
def test_a_failure_is_the_environments_and_says_why(cls, said):
    """The rollout is not trained on; the others go on."""
    timeout = getattr(cls, "waits", 60.0)
    rollout = converse(conversations(cls, max_turns=2, environment_timeout=timeout), scripted(FIRST))
    assert rollout.stop_reason == StopReason.ENVIRONMENT_ERROR and rollout.failed
    with pytest.raises(SchedulerFailure, match=said):
        raise rollout.error
    assert not any(turn.trained for record in trained_records(rollout) for turn in record.turns)


def test_a_slow_method_stalls_no_other_conversation():
    everyone = threading.Barrier(16)

    def step(self, request, choice, turn):
        everyone.wait(30)  # until all conversations are here
        request.uuid = "x"  # which is the scheduler's to change
        return Asks.step(self, request, choice, turn)

    env, llm = conversations(step_by(step), max_turns=2), scripted(FIRST)
    rollouts = env.start([[user("What?")]] * 16, rows=[{}] * 16)

    async def all_of_them():
        await asyncio.gather(*(env.converse(rollout, llm) for rollout in rollouts))

    run_async(all_of_them())
    assert [(len(rollout.turns), rollout.error) for rollout in rollouts] == [(2, None)] * 16
    assert len({rollout.environment.request_id for rollout in rollouts}) == 16


def test_what_a_config_asks_for():
    """Stops and a limit. A judge that is to be greedy is sampled as the recipe says. There is one choice."""

    def asking(**config):
        async def function(self, ask, request, given):
            return RolloutOutput(response=await self.infer_engine.infer_async(request, RequestConfig(**config)))

        return own_run(function)

    rollout, llm = run(asking(temperature=0.0, stop="Observation:"), "Action: x Observation: y")
    assert TOKENIZER.decode(rollout.completion_ids) == "Action: x Observation:"
    assert llm.params[0]["temperature"] == 1.0
    rollout, _ = run(asking(max_tokens=3), FIRST)
    assert rollout.completion_ids == ids(FIRST)[:3] and rollout.stop_reason == StopReason.MAX_TOKENS
    with pytest.raises(SchedulerFailure):
        run(asking(n=4), FIRST)
    with pytest.raises(mt.ServerError, match="gone"):
        run(Asks, llm=scripted(mt.ServerError("gone")), max_turns=2)


def test_what_is_in_flight_at_the_end_is_not_sampled_on():
    started = threading.Event()

    async def leaves(self, ask, request, config):
        first = await ask(*request.messages)
        self.later = asyncio.ensure_future(ask(user("Later?")))
        await asyncio.to_thread(started.wait, 30)
        return RolloutOutput(response=first)

    class Waits(ScriptedTexts):
        async def generate(self, prompt_ids, max_tokens, sampling_params=None, index=0):
            if self.asked:
                started.set()
                await asyncio.sleep(60.0)
            return await super().generate(prompt_ids, max_tokens, sampling_params, index)

    rollout, llm = run(own_run(leaves), llm=Waits(FIRST, tokenizer=TOKENIZER))
    assert len(rollout.turns) == len(llm.asked) == 1


def settings(folder):
    return mt.MTGRPOConfig(output_dir=str(folder), tool_format="hermes", report_to=[], use_cpu=True, bf16=False)


HEAD = "from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns\n"
CLASS = HEAD + "class A(MultiTurnScheduler):\n    {}\nmulti_turns['mine'] = A"


@pytest.mark.parametrize(
    "plugin, keys, said",
    [
        (HEAD, {}, "'mine' is not in multi_turns.*math_tip_trick"),
        (CLASS.format("async def run(self): ...\n    def async_infer(self): ..."), {}, "an async_infer of its own"),
        (CLASS.format("def step(self): ..."), {"loss_scale": "last_round+none"}, "'none' is unknown"),
        (CLASS.format("def step(self): ..."), {"environment": "openai_agent"}, "both run the conversation"),
    ],
)
def test_what_cannot_work_is_named(tmp_path, monkeypatch, plugin, keys, said):
    monkeypatch.setitem(swift_paths.REGISTRIES["multi_turns"], "mine", None)
    monkeypatch.delitem(swift_paths.REGISTRIES["multi_turns"], "mine")
    (tmp_path / "plugin.py").write_text(plugin)
    keys = {"external_plugins": [str(tmp_path / "plugin.py")], "multi_turn_scheduler": "mine", **keys}
    with pytest.raises(ValueError, match=said):
        mt.build_env(mt.recipe_classes()[0](**keys), settings(tmp_path), [], TOKENIZER)


class Waits(AsyncORM):
    async def __call__(self, completions, solution, request_id, **kwargs):
        await asyncio.sleep(0)
        assert kwargs["trainer_state"] == "state" and len(set(request_id)) == len(completions)
        return [float(text == right) for text, right in zip(completions, solution)]


def counted(completions, rollout_infos, messages, finish_reason, is_truncated, prompt_id, **kwargs):
    assert finish_reason == ["stop"] * 2 and is_truncated == [False] * 2 and len(set(prompt_id)) == 1
    assert [each[-1]["content"] for each in messages] == completions  # whatever a column of this name says
    return [infos["num_turns"] if "num_turns" in infos else None for infos in rollout_infos]


@pytest.mark.contract("ms-swift rewards")
def test_rewards_as_classes_functions_and_async(tmp_path, monkeypatch):
    """They get texts and columns; a column of the data goes before one of the same name, except of the rollout."""
    for name, reward in (("waits", Waits), ("counted", counted)):
        monkeypatch.setitem(swift_paths.rewards.orms, name, reward)
    runs = [run(RolloutScheduler, text)[0].environment for text in ("2", "3")]
    by_class, function = (as_reward(name, SimpleNamespace(), settings(tmp_path)) for name in ("waits", "counted"))
    columns = {"environments": runs, "trainer_state": "state", "prompts": [], "completions": [[], []]}
    assert asyncio.run(by_class(**columns, solution=["2", "2"])) == [1.0, 0.0]
    columns["messages"] = [[user("What?")]] * 2
    assert function(**columns) == [1.0, 1.0]
    assert function(**columns, rollout_infos=[{"num_turns": 7}, {}]) == [7.0, None]


def test_the_results_of_a_scheduler_are_the_turns_results():
    """As rewards of turns read them: messages of role `tool` that it appends."""
    plugin = import_file("tools/ms_swift/calculator.py", "external_plugins")
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 * 3"}}\n</tool_call>'
    rollout, _ = run(plugin.Calculator, call, "6", row={"question": "2 * 3?"})
    assert [[result.text for result in turn.results] for turn in rollout.turns] == [["6"], []]


@pytest.mark.contract("ms-swift plug-ins")
@pytest.mark.skipif(not PLUGINS.is_dir(), reason="ms-swift's example plug-ins are not there")
def test_the_example_scheduler_as_it_is():
    """The tool's result is read and not trained. With a stop, the text ends there, and one record goes on."""
    plugin = import_file(str(PLUGINS / "plugin.py"), "external_plugins")
    action = "Action: calculator\nAction Input: 6*7\nObservation:"
    sampled, result, last = ids(action), ids("Result: 42"), ids("It is 42.") + END
    rollout, _ = run(plugin.ToolCallScheduler, action, "It is 42.", max_turns=3)
    first, second = trained_records(rollout)
    assert (first.prompt_ids, first.completion_ids) == (ids(PROMPT), sampled + END)
    assert (second.prompt_ids, second.completion_ids) == (ids(PROMPT) + sampled + result, last)
    assert rollout.environment.infos == {"tool_results": "Result: 42", "num_turns": 2}

    class Stops(plugin.ToolCallScheduler):
        async def run(self, infer_request, request_config, **kwargs):
            request_config.stop = ["Observation:"]
            return await super().run(infer_request, request_config, **kwargs)

    rollout, _ = run(Stops, action, "It is 42.", max_turns=3)
    assert rollout.completion_ids == sampled + result + last
    assert rollout.loss_mask == [1] * len(sampled) + [0] * len(result) + [1] * len(last)


@pytest.mark.slow
@pytest.mark.parametrize("version, package", [("3.7.3", "plugin"), ("3.8.0", "plugin"), ("4.6.0", "rollout")])
def test_the_schedulers_of_a_release(version, package, tmp_path):
    """Their file in the wheel as it is, on its own base classes; what it imports of `swift` is ours."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path)]
    subprocess.run([*command, f"ms-swift=={version}"], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    module = types.ModuleType(f"swift.{package}.as_released")
    module.__package__ = f"swift.{package}"
    exec(zipfile.ZipFile(wheel).read(f"swift/{package}/multi_turn.py").decode(), vars(module))
    schedulers, solution = module.multi_turns, {"solution": "3"}
    wrong = "so <answer>2</answer>"
    rollout, _ = run(schedulers["math_tip_trick"], wrong, "<answer>3</answer>", row=solution, max_turns=3)
    (record,) = trained_records(rollout)
    said = TOKENIZER.decode(record.completion_ids[:-1])
    assert said.startswith("so ") and "But wait... It seems I made a mistake,<answer>3</answer>" in said
    assert "mistake" not in TOKENIZER.decode(trained_ids(rollout)) and trained_ids(rollout)[-1:] == END
    if "math_tip_trick_multi_turn" in schedulers:
        rollout, _ = run(schedulers["math_tip_trick_multi_turn"], wrong, row=solution, max_turns=3)
        assert len(rollout.turns) == 2 and len(trained_records(rollout)) == 1
    if "thinking_tips_scheduler" in schedulers:
        thought, keys = "<think>much</think> <answer>2</answer>", {"loss_scale": "last_round", "max_turns": 3}
        rollout, _ = run(schedulers["thinking_tips_scheduler"], thought, row=solution, **keys)
        first, second = trained_records(rollout)
        assert "much" not in TOKENIZER.decode(second.prompt_ids)
        assert first.completion_ids == second.completion_ids == ids(thought) + END


@pytest.mark.contract("protocol objects")
def test_old_and_new_import_paths_are_the_same_classes():
    with pytest.raises(NotImplementedError, match="PtEngine of ms-swift is not supported here"):
        exec(OLD_AND_NEW, {})


OLD_AND_NEW = """
from swift.infer_engine import InferRequest, RequestConfig, TransformersEngine
from swift.infer_engine.protocol import ChatCompletionResponseChoice, RolloutInferRequest, RolloutOutput
from swift.llm import PtEngine, RolloutInferRequest as A, Template, to_device
from swift.llm.infer.protocol import RolloutOutput as B, RolloutResponseChoice
from swift.llm.template.template_inputs import RolloutInferRequest as C
from swift.plugin import ORM, orms, rm_plugins
from swift.plugin.multi_turn import MultiTurnScheduler, multi_turns
from swift.rewards import AsyncORM, ORM as D, orms as E
from swift.rewards.rm_plugin import DefaultRMPlugin
from swift.rollout.gym_env import Env, envs
from swift.rollout.multi_turn import Messages, MultiTurnScheduler as H, RolloutScheduler, multi_turns as I
from swift.utils import get_logger, remove_response
import swift.rollout.multi_turn

assert A is C is RolloutInferRequest and B is RolloutOutput and D is ORM and E is orms
assert H is MultiTurnScheduler and I is multi_turns
PtEngine("model")
"""
