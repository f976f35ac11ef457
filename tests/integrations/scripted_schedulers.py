"""A scripted policy whose ids can be written by hand, for agents too, and schedulers of ms-swift run against it."""

from project import ROOT
from scripted import ScriptedTexts
from transformers import AutoTokenizer

import mt_grpo_trainer as mt
from mt_grpo.base.event_loop import run_async
from mt_grpo.integrations.ms_swift import paths
from mt_grpo.integrations.ms_swift.conversation import ScheduledConversation, SchedulerConversation
from mt_grpo.integrations.ms_swift.loss import loss_scale_map, read_loss_scale
from mt_grpo.integrations.ms_swift.protocol import RolloutInferRequest
from mt_grpo.integrations.ms_swift.schedulers import MultiTurnScheduler

PLUGINS = ROOT / "../shared/data/plugins/ms_swift"
TOKENIZER = AutoTokenizer.from_pretrained(ROOT / "hf_recipes/tiny/calculator-hermes-model")
END = [TOKENIZER.eos_token_id]
PROMPT = "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"
NEXT = "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
paths.install()


def scripted(*turns, **settings):
    return ScriptedTexts(*turns, **{"tokenizer": TOKENIZER, **settings})


def ids(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def user(text):
    return {"role": "user", "content": text}


def answer(text):
    return {"role": "assistant", "content": text}


def truncated(text):
    """A turn without an end of turn."""
    return (text, "goes on")


def text_of(response):
    return response.choices[0].message.content


def conversations(
    cls, loss_scale="default", scope="per_round", max_model_calls=8, passes=True, max_turns=None, **keys
):
    """The class of conversations of a scheduler, made."""
    own = {
        "scheduler_class": cls,
        "scheduler_kwargs": {} if max_turns is None else {"max_turns": max_turns},
        "loss": read_loss_scale(loss_scale, loss_scale_map),
        "length_scope": scope,
        "max_model_calls": max_model_calls,
        "passes_dataset": passes,
    }
    mixed = type("SchedulerConversation", (SchedulerConversation, mt.MultiTurnToolEnv), own)
    defaults = {"tokenizer": TOKENIZER, "max_completion_length": 400, "environment_timeout": 120.0}
    return mixed([], None, environment=ScheduledConversation, tool_format="hermes", **{**defaults, **keys})


def converse(env, llm, row=None):
    """The rollout of one conversation, whatever became of it."""
    row = row if row and "messages" in row else {"prompt": [user("What?")], **(row or {})}
    (rollout,) = env.start([row.get("prompt") or []], rows=[row])
    run_async(env.converse(rollout, llm, {"temperature": 1.0}))
    env.close([rollout])
    return rollout


def run(cls, *turns, row=None, llm=None, tokenizer=TOKENIZER, **settings):
    """(the rollout, the policy) of one conversation. Raises what failed, and if a record is not what was read."""
    llm = llm or ScriptedTexts(*turns, tokenizer=tokenizer)
    rollout = converse(conversations(cls, tokenizer=tokenizer, **settings), llm, row)
    if rollout.error is not None:
        raise rollout.error
    llm.verify(rollout)
    return rollout, llm


# Schedulers by one function.


class ToMaxTurns(MultiTurnScheduler):
    """Goes on until `max_turns`, also after a truncated response."""

    def check_finished(self, infer_request, response_choice, current_turn):
        return current_turn >= self.max_turns


def step_by(function, base=ToMaxTurns, **attributes):
    """A scheduler whose `step` is this function of (itself, request, choice, turn)."""
    return type("Steps", (base,), {"step": function, **attributes})


def own_run(function, **attributes):
    """A scheduler whose `run` gets itself, a shorthand for requests, the first request and the config."""

    async def run(self, infer_request, request_config, **kwargs):
        async def ask(*messages, **fields):
            request = RolloutInferRequest(messages=list(messages), **fields)
            return await self.infer_engine.infer_async(request, request_config)

        return await function(self, ask, infer_request, request_config)

    return type("Own", (MultiTurnScheduler,), {"run": run, **attributes})
