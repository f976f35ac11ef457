"""ms-swift's schedulers: plug-ins as they are, and their ids by hand. The policy is scripted."""

import asyncio
import copy
import dataclasses
import functools
import json
import subprocess
import sys
import threading
import time
import types
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from scripted import longest_text
from transformers import AutoTokenizer

import mt_grpo_trainer as mt
from mt_grpo.base.event_loop import run_async
from mt_grpo.integrations.ms_swift import paths as swift_paths
from mt_grpo.integrations.ms_swift.conversation import ScheduledConversation, SchedulerConversation
from mt_grpo.integrations.ms_swift.loop import SchedulerFailure
from mt_grpo.integrations.ms_swift.loss import LossScale, loss_scale_map, read_loss_scale
from mt_grpo.integrations.ms_swift.protocol import RequestConfig, RolloutInferRequest, RolloutOutput
from mt_grpo.integrations.ms_swift.recipe import as_reward, columns_of
from mt_grpo.integrations.ms_swift.rewards import AsyncORM
from mt_grpo.integrations.ms_swift.schedulers import (
    MathTipsMultiTurnScheduler,
    MathTipsScheduler,
    MultiTurnScheduler,
    RolloutScheduler,
    ThinkingModelTipsScheduler,
)
from mt_grpo.recipe.plugins import import_file
from mt_grpo.rollout import Generation, StopReason
from mt_grpo.training.records import trained_records

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = ROOT / "../shared/data/plugins/ms_swift"
needs_plugins = pytest.mark.skipif(not PLUGINS.is_dir(), reason="ms-swift's example plug-ins are not there")
TOKENIZER = AutoTokenizer.from_pretrained(ROOT / "hf_recipes/tiny/calculator-hermes-model")
END = [TOKENIZER.eos_token_id]
PROMPT = "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"
NEXT = "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
swift_paths.install()


class Scripted:
    """Writes these texts, each with an end of turn; notes what it read and wrote. A pair is cut off at its end."""

    def __init__(self, *turns, max_model_len=1024):
        self.turns, self.max_model_len, self.asked, self.params = list(turns), max_model_len, [], []

    async def generate(self, prompt_ids, max_tokens, sampling_params=None, index=0):
        turn = self.turns.pop(0) if len(self.turns) > 1 else self.turns[0]
        await asyncio.sleep(0)
        if isinstance(turn, Exception):
            raise turn
        whole = ids(turn) + END if isinstance(turn, str) else ids(turn[0])
        sampled = whole[:max_tokens]
        self.asked.append((list(prompt_ids), sampled))
        self.params.append(sampling_params)
        logprobs = [-k / 64 for k in range(len(sampled))]
        return Generation(sampled, logprobs, "stop" if sampled == whole and isinstance(turn, str) else "length")


def ids(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def user(text):
    return {"role": "user", "content": text}


def conversations(cls, loss_scale="default", scope="per_round", max_model_calls=8, passes=True, **settings):
    """The class of conversations of a scheduler, made."""
    kwargs = {key: settings.pop(key) for key in ("max_turns",) if key in settings}
    own = {"scheduler_class": cls, "scheduler_kwargs": kwargs, "loss": read_loss_scale(loss_scale, loss_scale_map),
           "length_scope": scope,
           "max_model_calls": max_model_calls, "passes_dataset": passes}  # fmt: skip
    mixed = type("SchedulerConversation", (SchedulerConversation, mt.MultiTurnToolEnv), own)
    settings = {"tokenizer": TOKENIZER, "tool_format": "hermes", "max_completion_length": 400,
                "environment_timeout": 20.0, **settings}  # fmt: skip
    return mixed([], None, environment=ScheduledConversation, **settings)


def run(cls, *turns, row=None, llm=None, messages=None, checked=True, **settings):
    """(the rollout, the policy) of one conversation with a scripted policy."""
    env, llm = conversations(cls, **settings), llm or Scripted(*turns)
    prompt = messages or [user("What?")]
    (rollout,) = env.start([prompt], rows=[{"prompt": prompt, **(row or {})}])
    run_async(env.converse(rollout, llm, {"temperature": 1.0}))
    if rollout.error is not None:
        raise rollout.error
    if checked:
        verify(rollout, llm)
    return rollout, llm


def verify(rollout, llm):
    """Each turn was read as its record says, and is a beginning of what was sampled there."""
    for record in rollout.records if rollout.turns else []:
        read = list(record.prompt_ids)
        for turn in record.turns:
            size = len(turn.token_ids)
            assert any(asked == read and sampled[:size] == turn.token_ids for asked, sampled in llm.asked)
            assert turn.logprobs is None or len(turn.logprobs) == size
            read = read + turn.token_ids + turn.observation_ids
    assert sorted(k for r in rollout.records for k in r.numbers) == list(range(len(rollout.turns)))


class Asks(MultiTurnScheduler):
    """A new turn by the user, until `max_turns`."""

    def step(self, infer_request, response_choice, current_turn):
        infer_request.messages.append(user(f"And {current_turn}?"))
        return {"infer_request": infer_request, "rollout_infos": {"asked": current_turn}}


class GoesOn(MultiTurnScheduler):
    """The same message goes on behind a text, which is not trained."""

    def step(self, infer_request, response_choice, current_turn):
        infer_request.messages[-1]["content"] += " Wait:"
        return {"infer_request": infer_request}


class GivesIds(MultiTurnScheduler):
    """The same, with ids and a mask."""

    mask = staticmethod(lambda sampled, added: [1] * sampled + [0] * added)

    def step(self, infer_request, response_choice, current_turn):
        added = self.tokenizer.encode(" Wait:", add_special_tokens=False)
        infer_request.messages[-1]["content"] += " Wait:"
        return {
            "infer_request": infer_request,
            "response_token_ids": response_choice.token_ids + added,
            "response_loss_mask": self.mask(len(response_choice.token_ids), len(added)),
        }


# -- ids by hand --


@pytest.mark.contract("scheduler step")
def test_a_new_turn_token_for_token():
    rollout, _ = run(Asks, "It is 2.", "It is 3.", max_turns=2)
    first, behind, second = ids("It is 2.") + END, ids(NEXT.format("And 1?")), ids("It is 3.") + END
    assert rollout.prompt_ids == ids(PROMPT)
    assert rollout.completion_ids == first + behind + second
    assert rollout.loss_mask == [1] * len(first) + [0] * len(behind) + [1] * len(second)
    assert rollout.turn_ids == [0] * len(first) + [-1] * len(behind) + [1] * len(second)
    (output,) = rollout.environment.outputs
    assert output["response_token_ids"] == [first, second] and rollout.stop_reason == StopReason.MAX_TURNS
    assert output["rollout_infos"] == {"asked": 1, "num_turns": 2}
    said = [user("What?"), "It is 2.", user("And 1?"), "It is 3."]
    assert output["messages"] == [each if isinstance(each, dict) else answer(each) for each in said]
    assert len(trained_records(rollout)) == 1


def answer(text):
    return {"role": "assistant", "content": text}


def cut_off(text):
    """A turn without an end of turn, which `check_finished` does not take for the last one."""
    return (text, "goes on")


class GoesOnAnyway(GoesOn):
    def check_finished(self, infer_request, response_choice, current_turn):
        return current_turn >= self.max_turns


class GivesIdsAnyway(GivesIds, GoesOnAnyway):
    step = GivesIds.step


@pytest.mark.parametrize("cls", [GoesOnAnyway, GivesIdsAnyway])
def test_a_continuation_token_for_token(cls):
    """The text that the scheduler put behind is read, and not trained; with its ids and without."""
    rollout, _ = run(cls, cut_off("It is 2."), "It is 3.", max_turns=2)
    first, behind, second = ids("It is 2."), ids(" Wait:"), ids("It is 3.") + END
    assert rollout.completion_ids == first + behind + second
    assert rollout.loss_mask == [1] * len(first) + [0] * len(behind) + [1] * len(second)
    assert rollout.messages == [answer("It is 2. Wait:It is 3.")]
    (output,) = rollout.environment.outputs
    assert output["messages"][-1] == answer("It is 2. Wait:It is 3.")


@pytest.mark.contract("response_token_ids")
def test_ids_are_read_as_a_scheduler_gives_them():
    """Also where its text says less. What was not sampled is not trained."""

    class SaysMore(GoesOnAnyway):
        def step(self, infer_request, response_choice, current_turn):
            step = super().step(infer_request, response_choice, current_turn)
            return {**step, "response_token_ids": response_choice.token_ids + ids(" Wait: so")}

    rollout, _ = run(SaysMore, cut_off("It is 2."), "It is 3.", max_turns=2)
    first, behind, second = ids("It is 2."), ids(" Wait: so"), ids("It is 3.") + END
    assert rollout.completion_ids == first + behind + second
    assert rollout.loss_mask == [1] * len(first) + [0] * len(behind) + [1] * len(second)


@pytest.mark.parametrize("cls", [GoesOn, GivesIds])
def test_a_message_that_goes_on_behind_an_end_of_turn_is_read_without_it(cls):
    """The end was sampled and is trained. What goes on does not follow it, so that a record begins."""
    rollout, _ = run(cls, "It is 2.", "It is 3.", max_turns=2)
    first, second = trained_records(rollout)
    assert first.prompt_ids == ids(PROMPT) and first.completion_ids == ids("It is 2.") + END
    assert second.prompt_ids == ids(PROMPT) + ids("It is 2.") + ids(" Wait:")
    assert second.completion_ids == ids("It is 3.") + END and second.loss_mask == [1] * len(ids("It is 3.") + END)


@pytest.mark.parametrize("said", ["Right.", "It is 2."])
def test_an_edited_history_begins_a_record(said):
    """Also where the last response stands in it as it was."""

    class Edits(MultiTurnScheduler):
        def step(self, infer_request, response_choice, current_turn):
            infer_request.messages = [user("Said: 2."), answer(said), user("And now?")]
            return {"infer_request": infer_request}

    rollout, _ = run(Edits, "It is 2.", "It is 3.", max_turns=2)
    first, second = trained_records(rollout)
    assert first.completion_ids == ids("It is 2.") + END and second.completion_ids == ids("It is 3.") + END
    assert TOKENIZER.decode(second.prompt_ids) == (
        f"<|im_start|>user\nSaid: 2.<|im_end|>\n<|im_start|>assistant\n{said}<|im_end|>\n"
        "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.contract("response_loss_mask")
def test_a_mask_chooses_among_what_was_sampled():
    """Its logprobs are those of the ids with mask 1, and the ids stay in the record."""

    class Masks(GivesIdsAnyway):
        mask = staticmethod(lambda sampled, added: [0, 1] + [1] * (sampled - 2) + [0] * added)

    rollout, _ = run(Masks, cut_off("It is 2."), "It is 3.", max_turns=2)
    first, behind, second = ids("It is 2."), ids(" Wait:"), ids("It is 3.") + END
    assert rollout.completion_ids == first + behind + second
    assert rollout.loss_mask == [0] + [1] * (len(first) - 1) + [0] * len(behind) + [1] * len(second)
    assert rollout.turn_ids == [-1] + [0] * (len(first) - 1) + [-1] * len(behind) + [1] * len(second)
    assert len(rollout.logprobs) == len(rollout.completion_ids)


@pytest.mark.contract("math_tip_trick", "check_finished")
def test_a_cut_answer_token_for_token():
    """`math_tip_trick`: what stands from the answer on is neither read nor trained."""
    solution = {"solution": "3"}
    rollout, _ = run(MathTipsScheduler, "so <answer>2</answer>", "<answer>3</answer>", row=solution, max_turns=3)
    kept, tip, second = ids("so "), ids(MathTipsScheduler.tips_prompt), ids("<answer>3</answer>") + END
    (record,) = trained_records(rollout)
    size = len(record.completion_ids) - len(second)
    assert TOKENIZER.decode(record.completion_ids[:size]) == "so But wait... It seems I made a mistake,"
    assert record.loss_mask[:size] == [1] * record.loss_mask[:size].count(1) + [0] * record.loss_mask[:size].count(0)
    assert TOKENIZER.decode(record.completion_ids[: record.loss_mask[:size].count(1)]).strip() == "so"
    assert record.completion_ids[size:] == second and 0 < size <= len(kept) + len(tip) + 1
    assert rollout.environment.outputs[0]["rollout_infos"]["num_turns"] == 2
    right, _ = run(MathTipsScheduler, "<answer>3</answer>", row=solution, max_turns=3)
    assert len(right.turns) == 1 and right.stop_reason == StopReason.ENVIRONMENT_STOP


@pytest.mark.contract("math_tip_trick_multi_turn")
def test_a_tip_as_a_new_turn():
    rollout, _ = run(MathTipsMultiTurnScheduler, "<answer>2</answer>", "<answer>2</answer>", row={"solution": "3"})
    assert [m["role"] for m in rollout.environment.outputs[0]["messages"]] == ["user", "assistant"] * 2
    assert len(trained_records(rollout)) == 1 and len(rollout.turns) == 2


@pytest.mark.contract("thinking_tips_scheduler")
@pytest.mark.parametrize("loss_scale", ["default", "last_round"])
def test_thinking_of_earlier_turns_is_left_out_one_record_per_turn(loss_scale):
    said = "<think>much</think> <answer>2</answer>"
    rollout, _ = run(ThinkingModelTipsScheduler, said, said, row={"solution": "3"}, loss_scale=loss_scale)
    first, second = trained_records(rollout)
    assert first.completion_ids == second.completion_ids == ids(said) + END
    assert "much" not in TOKENIZER.decode(second.prompt_ids) and "<answer>2" in TOKENIZER.decode(second.prompt_ids)
    assert [o["rollout_infos"]["num_turns"] for o in rollout.environment.outputs] == [1, 2]


@pytest.mark.contract("loss_scale")
def test_last_round_trains_the_last_message_alone():
    rollout, _ = run(Asks, "It is 2.", "It is 3.", max_turns=2, loss_scale="last_round")
    first, behind, second = ids("It is 2.") + END, ids(NEXT.format("And 1?")), ids("It is 3.") + END
    assert rollout.completion_ids == first + behind + second
    assert rollout.loss_mask == [0] * len(first + behind) + [1] * len(second)


@pytest.mark.parametrize("keys, trained", [({"loss": False}, 0), ({"loss_scale": 0.0}, 0), ({"loss": True}, 1)])
def test_a_message_may_say_whether_it_is_trained(keys, trained):
    class Marks(Asks):
        def step(self, infer_request, response_choice, current_turn):
            infer_request.messages[-1].update(keys)
            return super().step(infer_request, response_choice, current_turn)

    rollout, _ = run(Marks, "It is 2.", max_turns=2, loss_scale="last_round" if trained else "default")
    assert rollout.loss_mask[0] == trained and rollout.loss_mask[-1] == 1


def test_a_loss_scale_masks_parts_of_the_text():
    """An empty thinking."""
    said = "<think>\n\n</think>\n\nIt is 2."
    rollout, _ = run(RolloutScheduler, said, loss_scale="last_round+ignore_empty_think")
    trained = [token for token, one in zip(rollout.completion_ids, rollout.loss_mask) if one]
    assert TOKENIZER.decode(trained[:-1]) == "It is 2."


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
    trained = TOKENIZER.decode([t for t, one in zip(rollout.completion_ids, rollout.loss_mask) if one][:-1])
    assert trained.split() == ["22", "44"]


# -- what schedulers may write --


def old_request(self, infer_request, result, current_turn):  # 3.6
    infer_request.messages.append(user("And 1?"))
    return infer_request


def old_pair(self, infer_request, result, current_turn):  # 3.7
    return old_request(self, infer_request, result, current_turn), {"asked": 1}


def new_dict(self, infer_request, response_choice, current_turn):  # 3.8
    return {"infer_request": old_request(self, infer_request, response_choice, current_turn)}


def new_dict_with_ids(self, infer_request, response_choice, current_turn):  # 4.6
    choice = response_choice
    return {**new_dict(self, infer_request, choice, current_turn), "response_token_ids": choice.token_ids,
            "response_loss_mask": [1] * len(choice.token_ids),
            "rollout_logprobs": [each["logprob"] for each in choice.logprobs["content"]]}  # fmt: skip


@pytest.mark.contract("step returns dict", "step returns a pair", "response_choice or result")
@pytest.mark.parametrize("step", [old_request, old_pair, new_dict, new_dict_with_ids])
def test_every_form_of_step(step):
    rollout, _ = run(type("Old", (MultiTurnScheduler,), {"step": step}), "It is 2.", max_turns=2)
    first, behind = ids("It is 2.") + END, ids(NEXT.format("And 1?"))
    assert rollout.completion_ids == first + behind + first and rollout.logprobs.count(0.0) == len(behind) + 2
    assert rollout.loss_mask == [1] * len(first) + [0] * len(behind) + [1] * len(first)


def test_a_dummy_message_means_that_the_last_one_goes_on():
    class Dummy(GoesOnAnyway):
        def step(self, infer_request, response_choice, current_turn):
            super().step(infer_request, response_choice, current_turn)
            infer_request.messages.append({"role": "assistant", "content": None})
            return infer_request

    rollout, _ = run(Dummy, cut_off("It is 2."), "It is 3.", max_turns=2)
    assert rollout.completion_ids == ids("It is 2.") + ids(" Wait:") + ids("It is 3.") + END
    assert rollout.environment.outputs[0]["messages"][-1] == answer("It is 2. Wait:It is 3.")


class Calls(Asks):
    """Notes the order of its methods."""

    order = []

    async def on_trajectory_start(self, requests):
        self.order.append(("start", len(requests)))

    def on_turn_end(self, infer_request, response_choice, current_turn):
        self.order.append(("end", current_turn, infer_request.messages[-1]["content"]))
        return {"rollout_infos": {"ended": current_turn}}

    def check_finished(self, infer_request, response_choice, current_turn):
        self.order.append(("check", current_turn))
        return False


@pytest.mark.contract("check_finished", "max_turns")
def test_the_order_of_the_methods(monkeypatch):
    """`check_finished` is always asked, and `max_turns` ends what it lets go on."""
    monkeypatch.setattr(Calls, "order", [])
    rollout, _ = run(Calls, "It is 2.", max_turns=2)
    assert Calls.order == [("start", 1), ("end", 1, "It is 2."), ("check", 1), ("end", 2, "It is 2."), ("check", 2)]
    assert rollout.environment.infos == {"asked": 1, "ended": 2, "num_turns": 2}


def test_both_constructors():
    class Old(Asks):
        def __init__(self, max_turns=None, *args, **kwargs):
            super().__init__(max_turns, *args, **kwargs)

    class Bare(Asks):
        def __init__(self, max_turns):
            self.max_turns = max_turns

    for cls in (Old, Bare, Asks):
        assert len(run(cls, "It is 2.", max_turns=3)[0].turns) == 3


@pytest.mark.contract("scheduler run")
def test_a_run_of_ones_own():
    """Every request is exact, at the same time too; what no output goes through is not trained."""

    class Own(MultiTurnScheduler):
        async def run(self, infer_request, request_config, **kwargs):
            judge = RolloutInferRequest(messages=[user("Judge!")], uuid="another")
            first, _ = await asyncio.gather(
                self.infer_engine.infer_async(infer_request, request_config),
                self.infer_engine.infer_async(judge, request_config),
            )
            messages = [*infer_request.messages, answer(first.choices[0].message.content), user("And 1?")]
            last = await self.infer_engine.infer_async(RolloutInferRequest(messages=messages), request_config)
            messages.append(answer(last.choices[0].message.content))
            return RolloutOutput(response=last, messages=messages, rollout_infos={"mine": True})

    rollout, _ = run(Own, "It is 2.")
    assert len(rollout.turns) == 3 and [turn.trained for turn in rollout.turns] == [True, False, True]
    (record,) = trained_records(rollout)
    first, behind = ids("It is 2.") + END, ids(NEXT.format("And 1?"))
    assert record.completion_ids == first + behind + first and record.turn_ids[-1] == 2
    assert rollout.environment.infos == {"mine": True}


@pytest.mark.contract("trajectory_inputs")
def test_outputs_that_are_a_list_are_a_record_each():
    class Splits(MultiTurnScheduler):
        async def run(self, infer_request, request_config, **kwargs):
            outputs = []
            for turn in range(3):
                response = await self.infer_engine.infer_async(infer_request, request_config)
                infer_request.messages.append(answer(response.choices[0].message.content))
                outputs.append(RolloutOutput(
                    response=response, messages=list(infer_request.messages),
                    response_token_ids=response.choices[0].token_ids, rollout_infos={"turn": turn},
                ))  # fmt: skip
                infer_request.messages.append(user("And?"))
            return outputs

    rollout, _ = run(Splits, "It is 2.")
    records = trained_records(rollout)
    assert [record.completion_ids for record in records] == [ids("It is 2.") + END] * 3
    behind = ids("It is 2.") + END + ids(NEXT.format("And?"))
    assert [record.prompt_ids for record in records] == [ids(PROMPT) + behind * k for k in range(3)]
    columns = columns_of([rollout.environment])
    (rows,) = columns["trajectory_inputs"].values()
    assert [row["rollout_infos"]["turn"] for row in rows] == [0, 1, 2] and columns["rollout_infos"] == [{"turn": 2}]


def test_two_requests_from_one_response_are_two_records():
    """Each with all that it read; what was sampled first is trained once."""

    class Branches(MultiTurnScheduler):
        async def run(self, infer_request, request_config, **kwargs):
            first = await self.infer_engine.infer_async(infer_request, request_config)
            outputs = []
            for question in ("And?", "Or?"):
                messages = [*infer_request.messages, answer(first.choices[0].message.content), user(question)]
                last = await self.infer_engine.infer_async(RolloutInferRequest(messages=messages), request_config)
                messages.append(answer(last.choices[0].message.content))
                outputs.append(RolloutOutput(response=last, messages=messages))
            return outputs[0] if self.max_turns == 1 else outputs

    rollout, _ = run(Branches, "It is 2.", "3", "4")
    said = [ids("It is 2.") + END + ids(NEXT.format(question)) for question in ("And?", "Or?")]
    records = [(r.prompt_ids, r.completion_ids) for r in trained_records(rollout)]
    assert records == [(ids(PROMPT) + said[0], ids("3") + END), (ids(PROMPT) + said[1], ids("4") + END)]
    assert [turn.trained for turn in rollout.turns] == [False, True, True]
    rollout, _ = run(Branches, "It is 2.", "3", "4", max_turns=1)
    (record,) = trained_records(rollout)
    assert record.completion_ids == said[0] + ids("3") + END


def test_last_round_leaves_thinking_out_of_a_run_of_ones_own():
    """The scheduler sends it, as that of ms-swift does; its history is read without, and with `default` as sampled."""

    class Sends(MultiTurnScheduler):
        async def run(self, infer_request, request_config, **kwargs):
            for question in ("And?", None):
                response = await self.infer_engine.infer_async(infer_request, request_config)
                infer_request.messages.append(answer(response.choices[0].message.content))
                if question:
                    infer_request.messages.append(user(question))
            return RolloutOutput(response=response, messages=infer_request.messages)

    said = "<think>much</think> It is 2."
    stripped, _ = run(Sends, said, loss_scale="last_round")
    (record,) = trained_records(stripped)
    assert "much" not in TOKENIZER.decode(record.prompt_ids) and record.completion_ids == ids(said) + END
    kept, _ = run(Sends, said)
    (record,) = trained_records(kept)
    assert record.completion_ids == ids(said) + END + ids(NEXT.format("And?")) + ids(said) + END


def test_texts_and_ids_in_place_of_messages():
    """Pitfall 11: texts among the messages of an output. Contents may be ids, as in 4.6."""

    class Odd(MultiTurnScheduler):
        async def run(self, infer_request, request_config, **kwargs):
            first = await self.infer_engine.infer_async(infer_request, request_config)
            sampled = {"role": "assistant", "content": list(first.choices[0].token_ids)}
            messages = [*infer_request.messages, sampled, user("And?")]
            last = await self.infer_engine.infer_async(RolloutInferRequest(messages=messages), request_config)
            return RolloutOutput(response=last, messages=[messages[0], "It is 2.", messages[2], answer("3")])

    rollout, _ = run(Odd, "It is 2.", "3")
    (record,) = trained_records(rollout)
    assert record.completion_ids == ids("It is 2.") + END + ids(NEXT.format("And?")) + ids("3") + END
    assert rollout.environment.outputs[0]["messages"][1] == answer("It is 2.")


def test_a_base_class_of_one_turn():
    rollout, _ = run(RolloutScheduler, "It is 2.")
    assert rollout.completion_ids == ids("It is 2.") + END and rollout.environment.infos == {"num_turns": 1}


# -- pitfalls of ms-swift, and what happens here --


def test_the_last_turn_of_new_turns_with_ids_keeps_its_own():
    """Pitfall 1: the ids of turn N-1 were given to turn N."""
    rollout, _ = run(
        type("Ids", (MultiTurnScheduler,), {"step": new_dict_with_ids}), "It is 2.", "It is 3.", max_turns=2
    )
    assert rollout.environment.outputs[0]["response_token_ids"] == [ids("It is 2.") + END, ids("It is 3.") + END]


def test_ids_without_a_mask_have_one():
    """Pitfalls 2 and 5: an AssertionError. What the scheduler put behind what was sampled is not trained."""

    class NoMask(GivesIdsAnyway):
        def step(self, *args):
            step = super().step(*args)
            del step["response_loss_mask"]
            return step

    rollout, _ = run(NoMask, cut_off("It is 2."), "It is 3.", max_turns=2)
    masked = len(ids(" Wait:"))
    assert rollout.loss_mask == [1] * len(ids("It is 2.")) + [0] * masked + [1] * len(ids("It is 3.") + END)


def test_earlier_segments_of_a_message_are_trained():
    """Pitfalls 3 and 4: without ids, all segments but the last vanished, or the text that was put behind."""
    rollout, _ = run(GoesOnAnyway, cut_off("1"), cut_off("2"), "3", max_turns=3)
    trained = [token for token, one in zip(rollout.completion_ids, rollout.loss_mask) if one]
    assert trained == ids("1") + ids("2") + ids("3") + END
    assert TOKENIZER.decode(rollout.completion_ids[:-1]) == "1 Wait:2 Wait:3"


def test_contents_are_text_at_every_turn():
    """Pitfall 6: from the second turn on, earlier contents were lists of ids."""
    seen = []

    class Looks(Asks):
        def step(self, infer_request, response_choice, current_turn):
            seen.extend(type(message["content"]) for message in infer_request.messages)
            return super().step(infer_request, response_choice, current_turn)

    rollout, _ = run(Looks, "It is 2.", max_turns=3)
    assert set(seen) == {str} and len(rollout.turns) == 3


def test_a_typing_error_is_no_attribute():
    """Pitfall 16: unknown names were None."""
    scheduler = MultiTurnScheduler(infer_engine=SimpleNamespace(tokenizer=TOKENIZER), max_turns=2)
    assert scheduler.tokenizer is TOKENIZER
    with pytest.raises(AttributeError, match="tokeniser"):
        scheduler.tokeniser  # noqa: B018


# -- what fails --


def returns(value):
    """A scheduler whose `step` returns this, with the request where it is a dict."""

    def step(self, infer_request, response_choice, current_turn):
        return {"infer_request": infer_request, **value} if isinstance(value, dict) else value

    return type("Returns", (GoesOnAnyway,), {"step": step})


class Offers(GoesOnAnyway):
    def step(self, infer_request, response_choice, current_turn):
        infer_request.tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}]
        return {"infer_request": infer_request}


class Raises(Asks):
    def step(self, infer_request, response_choice, current_turn):
        raise KeyError("solution")


class Exits(Asks):
    async def on_turn_end(self, infer_request, response_choice, current_turn):
        raise SystemExit(3)


class Media(Asks):
    def step(self, infer_request, response_choice, current_turn):
        infer_request.images.append("a.png")
        return super().step(infer_request, response_choice, current_turn)


def sets(messages):
    class Sets(Asks):
        def step(self, infer_request, response_choice, current_turn):
            infer_request.messages = messages
            return {"infer_request": infer_request}

    return Sets


class Nothing(MultiTurnScheduler):
    async def run(self, infer_request, request_config, **kwargs):
        return "text"


class Invents(MultiTurnScheduler):
    async def run(self, infer_request, request_config, **kwargs):
        response = await self.infer_engine.infer_async(infer_request, request_config)
        return RolloutOutput(response=response, response_token_ids=[9, 9], response_loss_mask=[1, 1])


class Misaligned(MultiTurnScheduler):
    async def run(self, infer_request, request_config, **kwargs):
        response = await self.infer_engine.infer_async(infer_request, request_config)
        ids = response.choices[0].token_ids
        return RolloutOutput(response=response, response_token_ids=[ids, ids, ids])


class Blocks(Asks):
    async def on_turn_end(self, infer_request, response_choice, current_turn):
        await asyncio.sleep(60)


class Hangs(Asks):
    def check_finished(self, infer_request, response_choice, current_turn):
        time.sleep(3)


@pytest.mark.parametrize(
    "cls, said",
    [
        (Raises, "Raises raised KeyError: 'solution'"),
        (Exits, "SystemExit: 3"),
        (Media, "The request has images"),
        (returns("text"), "step returned 'text', expected"),
        (returns({"response_loss_mask": [1]}), "response_loss_mask was returned without response_token_ids"),
        (returns({"response_token_ids": [[1]]}), r"response_token_ids is \[\[1\]\], expected"),
        (returns({"response_token_ids": [1, 2], "response_loss_mask": [1]}), "response_loss_mask has 1 values"),
        (returns({"response_token_ids": [1], "response_loss_mask": [2]}), r"\[2\]. Expected a 0 or a 1"),
        (returns({"response_token_ids": [1], "response_loss_mask": [1]}), "is 1 for id 1 at 0, which the policy did"),
        (returns({"response_token_ids": [1], "response_loss_mask": [0], "rollout_logprobs": [-1.0]}),
         "rollout_logprobs has 1 values, expected"),
        (returns({"response_token_ids": [len(TOKENIZER)]}),
         f"has the id {len(TOKENIZER)} behind"),
        (returns({"response_token_ids": [1], "response_loss_mask": [0], "rollout_logprobs": [float("nan")]}),
         "rollout_logprobs has nan, expected"),
        (Offers, "tools has .*a schema of type 5"),
        (returns({"rollout_infos": "x"}), "step returned rollout_infos='x', expected"),
        (sets(None), "A request's messages is None, expected"),
        (sets([5]), "A message is 5, expected"),
        (sets([{"role": "user", "content": [{"type": "text"}]}]), "and a text as content"),
        (sets([{"role": "user", "content": [-1]}]), "A message's content has the id -1, expected"),
        (Nothing, "Nothing.run returned 'text', expected"),
        (Invents, "response_token_ids has 9 at 0, expected"),
        (Misaligned, "has a list .* for which there is no response"),
        (Blocks, "took longer than environment_timeout=1 s between two responses"),
        (Hangs, "took longer than environment_timeout=1 s between two responses"),
    ],
)  # fmt: skip
def test_a_failure_is_the_environments_and_says_why(cls, said):
    """The rollout is not trained on; the others go on."""
    timeout = 1.0 if cls in (Blocks, Hangs) else 60.0
    env, llm = conversations(cls, max_turns=2, environment_timeout=timeout), Scripted("It is 2.")
    (rollout,) = env.start([[user("What?")]], rows=[{"prompt": [user("What?")]}])
    run_async(env.converse(rollout, llm))
    assert rollout.stop_reason == StopReason.ENVIRONMENT_ERROR and rollout.failed
    with pytest.raises(SchedulerFailure, match=said):
        raise rollout.error
    assert not any(turn.trained for record in trained_records(rollout) for turn in record.turns)


def test_a_slow_method_stalls_no_other_conversation():
    everyone = threading.Barrier(16)

    class Slow(Asks):
        def step(self, infer_request, response_choice, current_turn):
            everyone.wait(30)  # until all conversations are here
            return super().step(infer_request, response_choice, current_turn)

    env, llm = conversations(Slow, max_turns=2), Scripted("It is 2.")
    rollouts = env.start([[user("What?")]] * 16, rows=[{}] * 16)

    async def all_of_them():
        await asyncio.gather(*(env.converse(rollout, llm) for rollout in rollouts))

    run_async(all_of_them())
    assert [(len(rollout.turns), rollout.error) for rollout in rollouts] == [(2, None)] * 16
    assert len({rollout.environment.request_id for rollout in rollouts}) == 16


def test_a_lost_server_is_the_trainers_to_hear_of():
    llm = Scripted(mt.ServerError("gone"))
    with pytest.raises(mt.ServerError, match="gone"):
        run(Asks, llm=llm, max_turns=2)


class SaysFar(MultiTurnScheduler):
    """Behind the first response 20 MB: of the user, behind its text, or in another history."""

    kind = "user"

    def step(self, infer_request, response_choice, current_turn):
        far = "far " * 5_000_000
        if self.kind == "user":
            infer_request.messages.append(user(far))
        elif self.kind == "goes on":
            infer_request.messages[-1]["content"] += far
        elif self.kind == "history":
            infer_request.messages[:] = [user(far), {"role": "assistant", "content": "a"}, user("b")]
        else:
            infer_request.messages[:] = [user("a"), {"role": "assistant", "content": far}]
        return {"infer_request": infer_request}


@pytest.mark.parametrize("kind", ["user", "goes on", "history", "begun"])
def test_a_request_far_beyond_the_context_is_not_tokenised_whole(monkeypatch, kind):
    """It ends the conversation as one that is a little too long. 6144 characters are more than 1024 tokens here."""
    longest = longest_text(monkeypatch, TOKENIZER)
    rollout, llm = run(type("SaysFar", (SaysFar,), {"kind": kind}), "It is 2.", max_turns=3, environment_timeout=120.0)
    assert (rollout.stop_reason, len(rollout.turns), len(llm.asked)) == (StopReason.CONTEXT_LENGTH, 1, 1)
    assert 0 < longest() <= 6200


@pytest.mark.contract("completion_length_limit_scope")
def test_the_budget_ends_a_conversation():
    """`total` bounds all that is sampled and newly read; `per_round` each response. A full context ends both."""
    first = len(ids("It is 2.") + END + ids(NEXT.format("And 1?")))
    rollout, _ = run(Asks, "It is 2.", scope="total", max_completion_length=first + 2, max_turns=9)
    assert len(rollout.completion_ids) == first + 2 and rollout.stop_reason == StopReason.MAX_TOKENS
    rollout, _ = run(Asks, "It is 2.", max_completion_length=6, max_turns=3)
    assert len(rollout.turns) == 3 and rollout.stop_reason == StopReason.MAX_TURNS
    size = len(ids(PROMPT)) + first
    rollout, _ = run(Asks, "It is 2.", llm=Scripted("It is 2.", max_model_len=size), max_turns=9)
    assert len(rollout.turns) == 1 and rollout.stop_reason == StopReason.CONTEXT_LENGTH
    rollout, _ = run(Asks, "It is 2.", max_model_calls=4)
    assert len(rollout.turns) == 4 and rollout.stop_reason == StopReason.MAX_TURNS


# -- what a recipe says --


def arguments(folder, plugin, **keys):
    (folder / "plugin.py").write_text(plugin)
    script = mt.recipe_classes()[0](external_plugins=[str(folder / "plugin.py")], **keys)
    return script, settings(folder)


def settings(folder):
    return mt.MTGRPOConfig(output_dir=str(folder), tool_format="hermes", report_to=[], use_cpu=True, bf16=False)


HEAD = "from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns\n"


@pytest.mark.parametrize(
    "plugin, said",
    [
        ("import nonsense_module", "external_plugins: .* fails to import: ModuleNotFoundError"),
        (HEAD, "'mine' is not in multi_turns.*math_tip_trick"),
        (HEAD + "multi_turns['mine'] = 3", "'mine' is 3, expected"),
        (HEAD + "class A(MultiTurnScheduler):\n    pass\nmulti_turns['mine'] = A", "A has neither step nor run"),
        (HEAD + "class A:\n    def check_finished(self, a, b, c): ...\nmulti_turns['mine'] = A",
         "A has neither run nor step"),
        (HEAD + "class A(MultiTurnScheduler):\n    def step(self, request): ...\nmulti_turns['mine'] = A",
         r"A.step.* cannot take"),
        (HEAD + "class A(MultiTurnScheduler):\n    def run(self, a, b): ...\nmulti_turns['mine'] = A",
         "A.run is not an async function"),
        (HEAD + "class A(MultiTurnScheduler):\n    def __init__(self, **k): raise OSError('no disk')\n"
         "    def step(self, a, b, c): ...\nmulti_turns['mine'] = A", "raised OSError: no disk"),
    ],
)  # fmt: skip
def test_a_plugin_that_cannot_work_is_named(tmp_path, monkeypatch, plugin, said):
    monkeypatch.delitem(swift_paths.REGISTRIES["multi_turns"], "mine", raising=False)
    script, args = arguments(tmp_path, plugin, multi_turn_scheduler="mine")
    with pytest.raises(ValueError, match=said):
        mt.build_env(script, args, [], TOKENIZER)
    monkeypatch.delitem(swift_paths.REGISTRIES["multi_turns"], "mine", raising=False)


@pytest.mark.parametrize(
    "keys, said",
    [
        ({"multi_turn_scheduler": "math_tip_trick", "loss_scale": "last_round+mine"}, "'mine' is unknown"),
        ({"multi_turn_scheduler": "math_tip_trick", "completion_length_limit_scope": "turn"}, "expected one of per_"),
        ({"multi_turn_scheduler": "math_tip_trick", "tools_script": "tools/calculator.py"}, "tools_script has no eff"),
        ({"multi_turn_scheduler": "math_tip_trick", "reward_funcs": ["mine"]}, "'mine' is not in orms"),
        ({"max_turns": 3}, "max_turns has no effect without the key multi_turn_scheduler"),
        ({"multi_turn_scheduler": "math_tip_trick", "agent": "a.py:b"}, "agent has no effect without the line envi"),
        ({"multi_turn_scheduler": "math_tip_trick", "environment": "openai_agent"}, "both run the conversation"),
    ],
)
def test_keys_that_cannot_work_are_named(tmp_path, keys, said):
    script, args = mt.recipe_classes()[0](**keys), settings(tmp_path)
    with pytest.raises(ValueError, match=said):
        mt.build_env(script, args, [], TOKENIZER)


OLD_AND_NEW = """
from swift.infer_engine import InferRequest, RequestConfig
from swift.infer_engine.protocol import ChatCompletionResponseChoice, RolloutInferRequest, RolloutOutput
from swift.llm import RolloutInferRequest as A
from swift.llm.infer.protocol import GymRolloutResponseChoice, RolloutOutput as B, RolloutResponseChoice
from swift.llm.template.template_inputs import RolloutInferRequest as C
from swift.plugin import ORM, orms, rm_plugins
from swift.plugin.context_manager import ContextManager, context_managers
from swift.plugin.env import Env, envs
from swift.plugin.multi_turn import MultiTurnScheduler, multi_turns
from swift.plugin.orm import MathAccuracy
from swift.rewards import AsyncORM, ORM as D, orms as E
from swift.rollout import MultiTurnScheduler as F
from swift.rollout.gym_env import Env as G
from swift.rollout.multi_turn import MultiTurnScheduler as H, RolloutScheduler, multi_turns as I
from swift.utils import get_logger
import swift.rollout.multi_turn

assert A is C is RolloutInferRequest and B is RolloutOutput and D is ORM and E is orms and G is Env
assert F is H is MultiTurnScheduler and I is multi_turns
"""


@pytest.mark.contract("protocol objects")
def test_old_and_new_import_paths_are_the_same_classes():
    exec(OLD_AND_NEW, {})


def test_another_package_of_that_name_is_left_alone(tmp_path, monkeypatch):
    """Python's own finders are asked first; what the other package lacks comes from here."""
    (tmp_path / "swift").mkdir()
    (tmp_path / "swift/__init__.py").write_text("mine = 1")
    (tmp_path / "swift/utils.py").write_text("mine = 2")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "swift"]:
        monkeypatch.delitem(sys.modules, name)
    exec("import swift, swift.utils, swift.rollout.multi_turn\nassert (swift.mine, swift.utils.mine) == (1, 2)", {})
    for name in [name for name in sys.modules if name.partition(".")[0] == "swift"]:
        del sys.modules[name]


# -- plug-ins as they are --


@pytest.fixture()
def plugin():
    """ms-swift's example plug-in, imported as it is."""
    return import_file(str(PLUGINS / "plugin.py"), "external_plugins")


@pytest.mark.contract("ms-swift plug-ins")
@needs_plugins
def test_the_example_scheduler_as_it_is(plugin):
    """The tool's result is read and not trained. With a stop, the text ends there, and one record goes on."""
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


@pytest.mark.contract("ms-swift plug-ins")
@needs_plugins
def test_the_example_rewards_as_they_are(tmp_path):
    script, args = SimpleNamespace(), settings(tmp_path)
    import_file(str(PLUGINS / "plugin.py"), "external_plugins")
    import_file(str(PLUGINS / "gsm8k_plugin.py"), "external_plugins")
    said = ["<answer>(1+2)*3</answer>", "<answer>9</answer>"]
    runs = [run(RolloutScheduler, text)[0].environment for text in said]
    countdown = as_reward("external_countdown", script, args)
    assert countdown(environments=runs, target=[9, 9], nums=[[1, 2, 3]] * 2) == [1.0, 0.0]
    tips = as_reward("thinking_tips", script, args)
    for each in runs:
        each.row["solution"] = "9"
    assert tips(environments=runs, solution=["9", "9"]) == [1.0, 1.0]
    (worked,) = [run(RolloutScheduler, "3 + 4 is 7.\n#### 7")[0].environment]
    gsm8k, written = as_reward("gsm8k_accuracy", script, args), as_reward("gsm8k_format", script, args)
    assert gsm8k(environments=[worked], solution=["so\n#### 7"]) == [1.0] and gsm8k.__name__ == "gsm8k_accuracy"
    assert written(environments=[worked, runs[0]]) == [1.0, 0.0]


class Waits(AsyncORM):
    async def __call__(self, completions, solution, request_id, **kwargs):
        await asyncio.sleep(0)
        assert kwargs["trainer_state"] == "state" and len(set(request_id)) == len(completions)
        return [float(text == right) for text, right in zip(completions, solution)]


def counted(completions, rollout_infos, messages, finish_reason, is_truncated, **kwargs):
    assert finish_reason == ["stop"] * 2 and is_truncated == [False] * 2 and messages[0][-1]["role"] == "assistant"
    return [infos["num_turns"] if "num_turns" in infos else None for infos in rollout_infos]


@pytest.mark.contract("ms-swift rewards")
def test_rewards_as_classes_functions_and_async(tmp_path, monkeypatch):
    """They get texts and columns; a column of the data goes before one of the same name."""
    hidden = functools.partial(Waits())  # it does not look async
    for name, reward in (("waits", Waits), ("counted", counted), ("hidden", hidden)):
        monkeypatch.setitem(swift_paths.rewards.orms, name, reward)
    script, args = SimpleNamespace(), settings(tmp_path)
    runs = [run(RolloutScheduler, text)[0].environment for text in ("2", "3")]
    waits, function = (as_reward(name, script, args) for name in ("waits", "counted"))
    columns = {"environments": runs, "trainer_state": "state", "prompts": [], "completions": [[], []]}
    assert asyncio.run(waits(**columns, solution=["2", "2"])) == [1.0, 0.0]
    assert as_reward("hidden", script, args)(**columns, solution=["2", "2"]) == [1.0, 0.0]
    assert function(**columns) == [1.0, 1.0]
    assert function(**columns, rollout_infos=[{"num_turns": 7}, {}]) == [7.0, None]


@pytest.mark.contract("external_plugins")
def test_a_recipe_trains_by_a_plugin(tmp_path, monkeypatch):
    """Two steps of the bundled recipe: a record for each conversation, and the plug-in's reward."""
    monkeypatch.chdir(ROOT)
    mt.main([
        "--config", "hf_recipes/tiny/scheduler.yaml", "--max_steps", "2", "--per_device_train_batch_size", "16",
        "--output_dir", str(tmp_path), "--disable_tqdm", "true",
    ])  # fmt: skip
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    steps = [row for row in history if "reward" in row]
    assert len(steps) == 2 and all(row["reward"] == row["rewards/calculator_answer/mean"] for row in steps)
    assert all(row["stop/environment_error"] == 0.0 and row["records/mean"] == 1.0 for row in steps)
    assert all(row["turns/mean"] > 1.0 and row["tools/call_frequency"] > 0.0 for row in steps)
    assert any(row["grad_norm"] > 0.0 for row in steps)


# -- the schedulers of ms-swift's own releases --


def from_wheel(version, file, folder):
    """A file of a release, imported from its archive; what it imports of `swift` is ours."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*command, f"ms-swift=={version}"], check=True)
    (wheel,) = Path(folder).glob(f"ms_swift-{version}-*.whl")
    code = zipfile.ZipFile(wheel).read(file).decode()
    package = file.rpartition("/")[0].replace("/", ".")
    module = types.ModuleType(f"{package}.as_released")
    module.__package__ = package
    exec(compile(code, file, "exec"), vars(module))
    return module


@pytest.mark.slow
@pytest.mark.parametrize(
    "version, file",
    [
        ("3.7.3", "swift/plugin/multi_turn.py"),
        ("3.8.0", "swift/plugin/multi_turn.py"),
        ("4.6.0", "swift/rollout/multi_turn.py"),
    ],
)
def test_the_schedulers_of_a_release(version, file, tmp_path):
    """Loaded from the wheel as they are, on the classes of their own file."""
    module = from_wheel(version, file, tmp_path)
    found, solution = module.multi_turns, {"solution": "3"}
    wrong = "so <answer>2</answer>"
    rollout, _ = run(found["math_tip_trick"], wrong, "<answer>3</answer>", row=solution, max_turns=3)
    (record,) = trained_records(rollout)
    said = TOKENIZER.decode(record.completion_ids[:-1])
    assert said.startswith("so ") and "But wait... It seems I made a mistake,<answer>3</answer>" in said
    trained = [token for token, one in zip(record.completion_ids, record.loss_mask) if one]
    assert "mistake" not in TOKENIZER.decode(trained) and trained[-1:] == END
    if "math_tip_trick_multi_turn" in found:
        rollout, _ = run(found["math_tip_trick_multi_turn"], wrong, row=solution, max_turns=3)
        assert len(rollout.turns) == 2 and len(trained_records(rollout)) == 1
    if "thinking_tips_scheduler" in found:
        thought = "<think>much</think> <answer>2</answer>"
        rollout, _ = run(found["thinking_tips_scheduler"], thought, row=solution, loss_scale="last_round", max_turns=3)
        first, second = trained_records(rollout)
        assert "much" not in TOKENIZER.decode(second.prompt_ids)
        assert first.completion_ids == second.completion_ids == ids(thought) + END


# -- what no record may lose --


def own_run(function):
    """A scheduler whose `run` gets itself, a shorthand for requests, and the first request."""

    async def run(self, infer_request, request_config, **kwargs):
        async def ask(*messages, **fields):
            request = RolloutInferRequest(messages=list(messages), **fields)
            return await self.infer_engine.infer_async(request, request_config)

        return await function(self, ask, infer_request, request_config)

    return type("Own", (MultiTurnScheduler,), {"run": run})


def text_of(response):
    return response.choices[0].message.content


def test_ids_that_leave_out_an_end_of_turn_only_mask_it():
    """The record stays what the model read."""

    async def leaves_out(self, ask, request, config):
        first = await ask(*request.messages)
        second = await ask(*request.messages, answer(text_of(first)), user("And?"))
        a, b = first.choices[0].token_ids[:-1], second.choices[0].token_ids
        return RolloutOutput(
            response=second, response_token_ids=[a, b], response_loss_mask=[[1] * len(a), [1] * len(b)]
        )

    rollout, _ = run(own_run(leaves_out), "It is 2.")
    first, behind = ids("It is 2."), ids(NEXT.format("And?"))
    assert rollout.completion_ids == first + END + behind + first + END
    assert rollout.loss_mask == [1] * len(first) + [0] * (1 + len(behind)) + [1] * len(first + END)


def test_an_answer_that_is_taken_back_is_not_trained():
    said = "<answer>2</answer>", "<answer>3</answer>"
    rollout, _ = run(MathTipsScheduler, *said, row={"solution": "3"}, max_turns=3)
    (record,) = trained_records(rollout)
    assert record.completion_ids == ids("<answer>3</answer>") + END
    assert TOKENIZER.decode(record.prompt_ids).endswith("assistant\nBut wait... It seems I made a mistake,")

    class Empties(MultiTurnScheduler):
        def step(self, infer_request, response_choice, current_turn):
            infer_request.messages[-1]["content"] = ""
            infer_request.messages.append(user("Again!"))
            return infer_request

    rollout, _ = run(Empties, "It is 2.", "It is 3.", max_turns=2)
    assert [turn.trained for turn in rollout.turns] == [False, True]


@pytest.mark.parametrize("said", ["😀😀😀 ab ", "好的好的 so 我 ", "é"])
def test_a_cut_keeps_whole_characters(said):
    class Cuts(MultiTurnScheduler):
        def step(self, infer_request, response_choice, current_turn):
            kept = infer_request.messages[-1]["content"].split("<answer>")[0]
            infer_request.messages[-1]["content"] = kept + "Hm"
            return infer_request

    rollout, _ = run(Cuts, f"{said}<answer>2", "3", max_turns=2)
    (record,) = trained_records(rollout)
    trained = [token for token, one in zip(record.completion_ids, record.loss_mask) if one]
    assert TOKENIZER.decode(record.completion_ids[:-1]) == f"{said}Hm3"
    assert TOKENIZER.decode(trained[:-1]).startswith(said.rstrip()) and "answer" not in TOKENIZER.decode(trained)


def test_a_branch_that_cuts_leaves_the_other_responses_whole():
    async def branches(self, ask, request, config):
        a, b = await ask(*request.messages), await ask(*request.messages)
        begun = answer(text_of(a).split("<answer>")[0] + "Wait:")
        c = await ask(*request.messages, begun)
        return [
            RolloutOutput(response=each, messages=[*request.messages, answer(text_of(each))]) for each in (c, a, b)
        ]

    rollout, _ = run(own_run(branches), "so it is <answer>2</answer>", "so it is <answer>7</answer>", "3")
    said = sorted(TOKENIZER.decode(record.completion_ids[:-1]) for record in trained_records(rollout))
    assert said == ["3", "so it is <answer>2</answer>", "so it is <answer>7</answer>"]


def test_text_behind_one_branch_is_not_read_in_another():
    async def branches(self, ask, request, config):
        a = await ask(*request.messages)
        b = await ask(*request.messages, answer(text_of(a) + " Wait:"))
        c = await ask(*request.messages, answer(text_of(a)), user("And?"))
        return [RolloutOutput(response=each) for each in (b, c)]

    rollout, _ = run(own_run(branches), cut_off("It is 2."), "3", "4")
    b, c = trained_records(rollout)  # the message that goes on is one with its beginning
    assert b.prompt_ids == ids(PROMPT) and b.completion_ids == ids("It is 2.") + ids(" Wait:") + ids("3") + END
    assert c.prompt_ids == ids(PROMPT) + ids("It is 2.") + ids("<|im_end|>" + NEXT.format("And?"))


def test_requests_of_a_shared_worker_reach_their_own_conversation():
    """By the request's uuid, whichever conversation's task asks."""

    class Worker(MultiTurnScheduler):
        async def run(self, infer_request, request_config, **kwargs):
            if not hasattr(self, "queue"):
                self.queue = asyncio.Queue()
                self.task = asyncio.ensure_future(self.work())
            first = await self.infer_engine.infer_async(infer_request, request_config)
            infer_request.messages += [answer(text_of(first)), user("And?")]
            done = asyncio.get_running_loop().create_future()
            await self.queue.put((infer_request, request_config, done))
            return RolloutOutput(response=await done, messages=infer_request.messages)

        async def work(self):
            while True:
                request, config, done = await self.queue.get()
                done.set_result(await self.infer_engine.infer_async(request, config))

    env, llm = conversations(Worker), Scripted("It is 2.")
    for rollout in env.start([[user("What?")]] * 3, rows=[{"prompt": [user("What?")]}] * 3):
        run_async(env.converse(rollout, llm))
        assert rollout.error is None and [turn.trained for turn in rollout.turns] == [True, True]


def test_a_response_may_be_copied_and_no_other_is_taken_for_it():
    async def copies(self, ask, request, config):
        response = await ask(*request.messages)
        response.choices[0] = dataclasses.replace(response.choices[0])
        return RolloutOutput(response=response)

    async def invents(self, ask, request, config):
        response = await ask(*request.messages)
        response.choices[0] = dataclasses.replace(response.choices[0], token_ids=[5])
        return RolloutOutput(response=response)

    rollout, _ = run(own_run(copies), "It is 2.")
    assert rollout.turns[0].trained
    with pytest.raises(SchedulerFailure, match="none that infer_async gave"):
        run(own_run(invents), "It is 2.")


FIRST_TURN = len(ids("It is 2.") + END + ids(NEXT.format("And?")))


def test_a_budget_that_ends_a_run_of_ones_own_trains_what_was_sampled():
    async def loops(self, ask, request, config):
        while True:
            response = await ask(*request.messages)
            request.messages.append(answer(text_of(response)))
            if response.choices[0].finish_reason == "length":
                return RolloutOutput(response=response, messages=request.messages)
            request.messages.append(user("And?"))

    async def never_ends(self, ask, request, config):
        while True:
            request.messages += [answer(text_of(await ask(*request.messages))), user("And?")]

    for function in (loops, never_ends):
        rollout, _ = run(own_run(function), "It is 2.", scope="total", max_completion_length=FIRST_TURN)
        assert rollout.stop_reason == StopReason.MAX_TOKENS and [turn.trained for turn in rollout.turns] == [True]
        assert rollout.environment.outputs[-1]["messages"][-1]["role"] == "assistant"


def test_a_budget_ends_drive_with_the_output_so_far():
    """No method is called for a response that is none."""

    class Never(Asks):
        def on_turn_end(self, infer_request, response_choice, current_turn):
            return {"rollout_infos": {"share": 1 / len(response_choice.message.content)}}

        def check_finished(self, infer_request, response_choice, current_turn):
            return False

    rollout, llm = run(Never, "It is 2.", scope="total", max_completion_length=FIRST_TURN + 1)
    (output,) = rollout.environment.outputs
    assert output["messages"] == [user("What?"), answer("It is 2.")] and output["rollout_infos"]["num_turns"] == 1
    assert rollout.stop_reason == StopReason.MAX_TOKENS and len(llm.asked) == 1


def test_requests_at_the_same_time_share_the_budget():
    async def gathers(self, ask, request, config):
        responses = await asyncio.gather(*(ask(*request.messages) for _ in range(4)))
        return [RolloutOutput(response=response) for response in responses if response.choices[0].token_ids]

    size = len(ids("It is 2.") + END)
    rollout, _ = run(own_run(gathers), "It is 2.", scope="total", max_completion_length=size + 2)
    assert [len(turn.token_ids) for turn in rollout.turns] == [size, 2]
    rollout, _ = run(own_run(gathers), "It is 2.", max_model_calls=3)
    assert len(rollout.turns) == 3 and rollout.stop_reason == StopReason.MAX_TURNS


def test_a_response_that_is_cut_for_the_others_reads_as_any_that_is_cut():
    """Its whole call is there, and its open thinking is noted, as where its own limit cuts it."""

    async def gathers(self, ask, request, config):
        responses = await asyncio.gather(*(ask(*request.messages) for _ in range(2)))
        return [RolloutOutput(response=response) for response in responses]

    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    for text, kept in ((f"{call} And so on.", call), ("<think>It is 2, I think.</think> 2", "<think>It is")):
        size, whole = len(ids(kept)), len(ids(text) + END)
        both, _ = run(own_run(gathers), text, scope="total", max_completion_length=whole + size)
        alone, _ = run(Asks, text, scope="total", max_completion_length=size, max_turns=1)
        cut, by_itself = both.turns[1], alone.turns[0]
        assert len(both.turns) == 2 and cut.token_ids == by_itself.token_ids == ids(text)[:size]
        for key in ("text", "calls", "answer", "open_thinking", "finish_reason", "logprobs"):
            assert getattr(cut, key) == getattr(by_itself, key), key
        assert len(cut.calls) == (kept == call) and cut.open_thinking == (kept != call)


def test_a_messages_own_keys_hold_before_an_edit_of_the_history():
    class Edits(MultiTurnScheduler):
        def step(self, infer_request, response_choice, current_turn):
            infer_request.messages[-1]["loss"] = False
            infer_request.messages += [user("So?"), answer("fake"), user("And?")]
            return infer_request

    rollout, _ = run(Edits, "It is 2.", max_turns=2)
    assert [turn.trained for turn in rollout.turns] == [False, True]


def test_ids_without_a_mask_leave_loss_scale_its_say():
    class Ids(Asks):
        def step(self, infer_request, response_choice, current_turn):
            step = super().step(infer_request, response_choice, current_turn)
            return {**step, "response_token_ids": response_choice.token_ids}

    rollout, _ = run(Ids, "It is 2.", max_turns=2, loss_scale="last_round")
    assert [turn.trained for turn in rollout.turns] == [False, True]


def test_a_second_run_of_the_base_class_replaces_the_first():
    class Twice(Asks):
        async def run(self, infer_request, request_config, **kwargs):
            await super().run(copy.deepcopy(infer_request), request_config)
            return await super().run(copy.deepcopy(infer_request), request_config)

    rollout, _ = run(Twice, "It is 2.", max_turns=2)
    assert [turn.trained for turn in rollout.turns] == [False, False, True, True]


def test_text_that_the_ids_do_not_hold_is_read():
    class Forgets(GoesOnAnyway):
        def step(self, infer_request, response_choice, current_turn):
            ids = list(response_choice.token_ids)
            return {"infer_request": super().step(infer_request, response_choice, current_turn)["infer_request"],
                    "response_token_ids": ids}  # fmt: skip

    rollout, _ = run(Forgets, cut_off("It is 2."), "It is 3.", max_turns=2)
    assert rollout.completion_ids == ids("It is 2.") + ids(" Wait:") + ids("It is 3.") + END


def test_a_schedulers_tags_stay_and_its_ends_of_turn_do_not():
    class Adds(GoesOnAnyway):
        def step(self, infer_request, response_choice, current_turn):
            infer_request.messages[-1]["content"] += "<tool_response>42</tool_response><|im_end|>"
            return infer_request

    rollout, _ = run(Adds, cut_off("It is 2."), "It is 3.", max_turns=2)
    added = ids("<tool_response>42</tool_response>< |im_end|>")
    assert rollout.completion_ids == ids("It is 2.") + added + ids("It is 3.") + END


def test_other_tools_begin_a_record():
    tool = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}

    class Gives(Asks):
        def step(self, infer_request, response_choice, current_turn):
            infer_request.tools = [tool]
            return super().step(infer_request, response_choice, current_turn)

    rollout, _ = run(Gives, "It is 2.", max_turns=2)
    first, second = trained_records(rollout)
    assert '"add"' not in TOKENIZER.decode(first.prompt_ids) and '"add"' in TOKENIZER.decode(second.prompt_ids)


def test_a_stop_may_be_a_text():
    async def stops(self, ask, request, config):
        config.stop = "Observation:"
        return RolloutOutput(response=await ask(*request.messages))

    rollout, _ = run(own_run(stops), "Action: x Observation: y")
    assert TOKENIZER.decode(rollout.completion_ids) == "Action: x Observation:"


def test_what_a_scheduler_does_to_its_request_fails_no_other_rollout():
    def broken(change):
        class Breaks(Asks):
            def step(self, infer_request, response_choice, current_turn):
                change(infer_request)
                return super().step(infer_request, response_choice, current_turn)

        return Breaks

    rollout, _ = run(broken(lambda request: setattr(request, "uuid", "x")), "It is 2.", max_turns=2)
    assert len(rollout.turns) == 2
    ids_as_content = broken(lambda request: request.messages[-1].update(content=ids("It is 2.")))
    rollout, _ = run(ids_as_content, "It is 2.", max_turns=2)
    assert len(trained_records(rollout)) == 1
    for change in (
        lambda request: setattr(request, "tools", ["calc"]),
        lambda request: request.messages[-1].update(content=[{"type": "text", "text": None}]),
        lambda request: request.messages.append(3),
        lambda request: setattr(request, "chat_template_kwargs", {"enable_thinking": False}),
    ):
        with pytest.raises(SchedulerFailure):
            run(broken(change), "It is 2.", max_turns=2)

    row = {"chat_template_kwargs": {"enable_thinking": False}}
    with pytest.raises(SchedulerFailure, match="'enable_thinking': False}, the recipe {}"):
        run(Asks, "It is 2.", row=row, max_turns=2)

    class Cancels(Asks):
        async def on_turn_end(self, infer_request, response_choice, current_turn):
            task = asyncio.ensure_future(asyncio.sleep(9))
            task.cancel()
            await task

    with pytest.raises(SchedulerFailure, match="it cancelled itself"):
        run(Cancels, "It is 2.", max_turns=2)


def test_a_scheduler_with_a_run_of_its_own_is_not_shown_the_solution_of_its_row():
    class Runs(Asks):
        async def run(self, infer_request, request_config, **kwargs):
            roles.append([message["role"] for message in infer_request.messages])
            response = await self.infer_engine.infer_async(infer_request, request_config)
            infer_request.messages.append(answer(response.choices[0].message.content))
            return RolloutOutput(response=response, messages=infer_request.messages)

    roles = []
    solved = [user("2+2?"), {"role": "assistant", "content": "<answer>4</answer>"}]
    rollout, llm = run(Runs, "It is 2.", messages=solved, max_turns=1, checked=False)
    assert roles == [["user"]] and "<answer>4" not in TOKENIZER.decode(llm.asked[0][0])


def test_a_constructor_may_use_the_tokenizer_and_rows_may_have_messages():
    class Encodes(Asks):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.tip = self.tokenizer.encode("x")

    env, llm = conversations(Encodes, max_turns=1), Scripted("It is 2.")
    (rollout,) = env.start([[]], rows=[{"messages": [user("What?")]}])
    run_async(env.converse(rollout, llm))
    assert rollout.error is None and rollout.completion_ids == ids("It is 2.") + END


def test_columns_of_the_rollout_go_before_those_of_the_data(tmp_path, monkeypatch):
    monkeypatch.setitem(swift_paths.rewards.orms, "said", lambda completions, messages, **kwargs: [
        float(each[-1]["content"] == "2") for each in messages])  # fmt: skip
    environment = run(RolloutScheduler, "2")[0].environment
    reward = as_reward("said", SimpleNamespace(), settings(tmp_path))
    assert reward(environments=[environment], messages=[[user("What?")]]) == [1.0]
    assert (
        columns_of([environment])["prompt_id"] == columns_of([run(RolloutScheduler, "3")[0].environment])["prompt_id"]
    )


def step_by(function, **attributes):
    """A scheduler whose `step` is this function of (itself, request, choice, turn), until `max_turns`."""
    return type("Steps", (GoesOnAnyway,), {"step": function, **attributes})


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

    rollout, _ = run(step_by(step), cut_off("It is 2."), "No.", "It is 3.", max_turns=2)
    assert rollout.error is None and rollout.turns[-1].trained


def test_what_a_config_asks_for_and_does_not_get_is_said(caplog, monkeypatch):
    """A judge that is to be greedy is sampled as the recipe says; of several choices there would be one."""
    monkeypatch.setattr("mt_grpo.base.errors._told", set())

    def judged_with(**config):
        async def step(self, request, choice, turn):
            asked = RolloutInferRequest(messages=[user("Right?")])
            await self.infer_engine.infer_async(asked, RequestConfig(**config))
            return {"infer_request": request}

        return step_by(step)

    _, llm = run(judged_with(temperature=0.0, seed=3, max_tokens=9), "It is 2.", "No.", "It is 3.", max_turns=2)
    assert [params["temperature"] for params in llm.params] == [1.0] * 3
    told = [record.message.partition(".")[0] for record in caplog.records if "RequestConfig" in record.message]
    assert told == ["A scheduler's RequestConfig has temperature=0", "A scheduler's RequestConfig has seed=3"]
    with pytest.raises(SchedulerFailure, match="config has n=4, expected"):
        run(judged_with(n=4), "It is 2.", "No.", "It is 3.", max_turns=2)


@pytest.mark.parametrize("after", ["the end", "a refusal"])
def test_a_scheduler_that_asks_on_and_on_is_ended(after):
    class Insists(MultiTurnScheduler):
        async def run(self, infer_request, request_config, **kwargs):
            while True:
                try:
                    await self.infer_engine.infer_async(infer_request, request_config)
                    if after == "a refusal":
                        infer_request.images = ["a.png"]
                except Exception:
                    await asyncio.sleep(0.01)

    env, llm = conversations(Insists, max_model_calls=2, environment_timeout=1.0), Scripted("It is 2.")
    (rollout,) = env.start([[user("What?")]], rows=[{"prompt": [user("What?")]}])
    run_async(env.converse(rollout, llm), timeout=30)
    if after == "the end":
        assert rollout.stop_reason == StopReason.MAX_TURNS and [t.trained for t in rollout.turns] == [True, True]
    else:
        assert "took longer" in str(rollout.error)


def changed(**fields):
    """A run whose output, or whose config, has these fields."""

    async def function(self, ask, request, config):
        for key in set(fields) & {"max_tokens", "stop"}:
            setattr(config, key, fields[key])
        output = RolloutOutput(response=await ask(*request.messages))
        for key in set(fields) - {"max_tokens", "stop"}:
            setattr(output, key, fields[key])
        return output

    return own_run(function)


@pytest.mark.parametrize(
    "fields",
    [{"max_tokens": "100"}, {"stop": 5}, {"messages": [None, 3]},
     {"response_token_ids": "text"}],
)  # fmt: skip
def test_what_cannot_be_read_fails_its_own_rollout(fields):
    with pytest.raises(SchedulerFailure):
        run(changed(**fields), "It is 2.")


def test_fields_that_are_none_are_left_out(monkeypatch):
    rollout, _ = run(changed(rollout_infos=None, response_token_ids=None), "It is 2.")
    assert rollout.turns[0].trained
    monkeypatch.setitem(loss_scale_map, "broken", type("Broken", (), {"get_loss_scale": lambda *_, **__: 1 / 0}))
    with pytest.raises(SchedulerFailure, match="get_loss_scale failed: ZeroDivisionError"):
        run(RolloutScheduler, "It is 2.", loss_scale="broken")

    async def ends(self, request, choice, turn):
        raise GeneratorExit

    with pytest.raises(SchedulerFailure, match="GeneratorExit"):
        run(step_by(ends), "It is 2.", max_turns=2)


def test_ids_of_a_message_that_goes_on_behind_an_end_of_turn():
    async def goes_on(self, ask, request, config):
        first = await ask(*request.messages)
        last = await ask(*request.messages, answer(text_of(first) + " Wait:"))
        a, tip, b = first.choices[0].token_ids, ids(" Wait:"), last.choices[0].token_ids
        return RolloutOutput(response=last, response_token_ids=[a + tip + b],
                             response_loss_mask=[[1] * len(a) + [0] * len(tip) + [1] * len(b)])  # fmt: skip

    for turns in (("It is 2.", "3"), (cut_off("It is 2."), "3")):
        rollout, _ = run(own_run(goes_on), *turns)
        assert all(turn.trained and turn.mask is None for turn in rollout.turns)


def test_ids_of_turns_before_an_edit_are_found():
    """The engine leaves earlier thinking out, so that a record begins at each turn."""

    async def loops(self, ask, request, config):
        messages, all_ids = list(request.messages), []
        for _ in range(3):
            response = await ask(*messages)
            all_ids.append(response.choices[0].token_ids)
            messages += [answer(text_of(response)), user("And?")]
        return RolloutOutput(response=response, messages=messages[:-1], response_token_ids=all_ids)

    rollout, _ = run(own_run(loops), "<think>much</think> It is 2.", loss_scale="last_round")
    assert [turn.trained for turn in rollout.turns] == [False, False, True]


def test_an_empty_response_behind_the_end_shifts_nothing():
    async def loops(self, ask, request, config):
        messages, all_ids = list(request.messages), []
        for turn in range(3):
            response = await ask(*messages)
            all_ids.append(response.choices[0].token_ids)
            messages += [answer(text_of(response)) | ({"loss": False} if turn == 0 else {}), user("And?")]
        given = {"response_token_ids": all_ids} if self.max_turns else {}
        return RolloutOutput(response=response, messages=messages[:-1], **given)

    for max_turns in (None, 3):
        kwargs = {"max_turns": max_turns} if max_turns else {}
        rollout, _ = run(own_run(loops), "It is 2.", max_model_calls=2, **kwargs)
        assert [turn.trained for turn in rollout.turns] == [False, True]
        assert rollout.environment.outputs[-1]["messages"][-1] == answer("It is 2.")


@pytest.mark.parametrize("by", ["mask", "message"])
def test_what_is_changed_behind_the_base_class_holds(by):
    class Changes(Asks):
        async def run(self, infer_request, request_config, **kwargs):
            output = await super().run(infer_request, request_config)
            if by == "mask":
                output.response_loss_mask = [[0] * len(output.response_token_ids[0]), [1] * 6]
            else:
                output.messages[1]["loss"] = False
            return output

    rollout, _ = run(Changes, "It is 2.", max_turns=2)
    first, behind = ids("It is 2.") + END, ids(NEXT.format("And 1?"))
    assert rollout.loss_mask == [0] * len(first + behind) + [1] * len(first)


def test_a_list_of_whole_conversations_trains_all_their_turns():
    class Both(Asks):
        async def run(self, infer_request, request_config, **kwargs):
            copies = [copy.deepcopy(infer_request) for _ in range(2)]
            return list(await asyncio.gather(*(super(Both, self).run(each, request_config) for each in copies)))

    rollout, _ = run(Both, "It is 2.", max_turns=2)
    assert [turn.trained for turn in rollout.turns] == [True] * 4 and len(trained_records(rollout)) == 2


def test_a_key_on_a_copied_message_holds():
    def step(self, request, choice, turn):
        request = copy.deepcopy(request)
        request.messages[-1]["loss"] = False
        request.messages.append(user("And?"))
        return request

    rollout, _ = run(step_by(step), "It is 2.", max_turns=2)
    assert [turn.trained for turn in rollout.turns] == [False, True]


class BehindBar(LossScale):
    def get_loss_scale(self, context, *, query=None):
        before, bar, behind = context.partition("|")
        return [before, bar + behind], [1.0, 0.0]


def test_a_loss_scale_keeps_characters_ends_of_turns_and_choices_of_ids(monkeypatch):
    monkeypatch.setitem(loss_scale_map, "bar", BehindBar)
    rollout, _ = run(RolloutScheduler, "a😀|b", loss_scale="bar")
    trained = [token for token, one in zip(rollout.completion_ids, rollout.loss_mask) if one]
    assert TOKENIZER.decode(trained[:-1]) == "a😀" and trained[-1:] == END

    async def part(self, ask, request, config):
        response = await ask(*request.messages)
        return RolloutOutput(response=response, response_token_ids=[response.choices[0].token_ids[:2]])

    for loss_scale in ("default", "ignore_empty_think"):
        rollout, _ = run(own_run(part), "It is 2.", loss_scale=loss_scale)
        assert rollout.loss_mask[:3] == [1, 1, 0]


def test_a_discarded_response_is_no_beginning_of_another_message():
    async def prefills(self, ask, request, config):
        await ask(*request.messages)
        last = await ask(*request.messages, answer("It follows:"))
        return RolloutOutput(response=last, response_token_ids=[last.choices[0].token_ids])

    rollout, _ = run(own_run(prefills), "It is 2.", "3")
    assert [turn.trained for turn in rollout.turns] == [False, True]


def test_what_is_in_flight_at_the_end_is_not_sampled_on():
    async def leaves(self, ask, request, config):
        first = await ask(*request.messages)
        asyncio.ensure_future(ask(user("Later?")))
        await asyncio.sleep(0.05)
        return RolloutOutput(response=first)

    class Waits(Scripted):
        async def generate(self, prompt_ids, max_tokens, sampling_params=None, index=0):
            await asyncio.sleep(60.0 if self.asked else 0.0)
            return await super().generate(prompt_ids, max_tokens, sampling_params, index)

    rollout, llm = run(own_run(leaves), llm=Waits("It is 2."))
    assert len(rollout.turns) == len(llm.asked) == 1
