"""The trainer against TRL's own: equal gradients, and what TRL users expect to work (in-process backend, CPU)."""

import inspect
import os
import shutil
import signal
import subprocess
from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import trl
import warm_python
from datasets import Dataset
from golden_batch import echo
from peft import LoraConfig
from project import ROOT, SMALL
from scripted import ScriptedTexts
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3Config,
    Qwen2_5_VLConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer
from trl.distributed import DistributedBackend
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer.utils import RepeatSampler

from mt_grpo.base.errors import RunError, RunStopped
from mt_grpo.base.files import output_lock
from mt_grpo.generation.weights import PolicyWeights
from mt_grpo.recipe.checks import check_tied_lora, share_limits
from mt_grpo.recipe.parse import OF_TRL
from mt_grpo.rollout import Rollout, StopReason, Turn
from mt_grpo.run.in_flight import GroupInFlight
from mt_grpo.training.rewards import state_numbers
from mt_grpo_trainer import MTGRPOConfig, MTGRPOEnvTrainer, MultiTurnToolEnv, turn_advantages

PROMPTS = [[{"role": "user", "content": text}] for text in ("one", "two?", "three...", "4", "five and more", "six")]


def length_reward(completion_ids, **kwargs):
    """Something that varies with what was sampled, in 0 to 1."""
    return [(sum(ids) % 17) / 17 for ids in completion_ids]


def turn_reward(rollout_turns, **kwargs):
    return [[len(turn.token_ids) % 5 / 5 for turn in turns] for turns in rollout_turns]


def settings(tmp_path, **changes):
    values = dict(
        output_dir=str(tmp_path), per_device_train_batch_size=8, num_generations=4, max_completion_length=24,
        max_steps=2, learning_rate=1e-3, seed=7, lr_scheduler_type="constant",
    )  # fmt: skip
    return {**SMALL, **values, **changes}


def make_trainer(model, tmp_path, cls=MTGRPOEnvTrainer, eval_dataset=None, peft_config=None, prompts=None, **changes):
    return cls(
        model=model,
        env=MultiTurnToolEnv([echo], system_prompt=None),
        turn_reward_funcs=[turn_reward],
        outcome_reward_funcs=[length_reward],
        args=MTGRPOConfig(**settings(tmp_path, **changes)),
        train_dataset=Dataset.from_dict({"prompt": prompts or PROMPTS}),
        eval_dataset=eval_dataset,
        peft_config=peft_config,
    )


class Gradients(TrainerCallback):
    """The gradients that the first optimizer step uses."""

    def __init__(self):
        self.values = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if not self.values:
            self.values = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def fixed_ids(prompts):
    """Prompt and completion ids that both trainers are given: lengths and contents differ within a group."""
    prompt_ids = [[65 + len(p[0]["content"]), 66, 67] for p in prompts]
    completion_ids = [[(7 * i + 3 * j + len(p[0]["content"])) % 200 for j in range(3 + (i * 5) % 11)]
                      for i, p in enumerate(prompts)]  # fmt: skip
    return prompt_ids, completion_ids


class FixedTRL(GRPOTrainer):
    def _generate(self, prompts):
        prompt_ids, completion_ids = fixed_ids(prompts)
        completions = [[{"role": "assistant", "content": ""}] for _ in prompts]
        return prompt_ids, completion_ids, None, completions, None, {}, None, []


class FixedMTGRPO(MTGRPOEnvTrainer):
    advantage_error = 0.0

    def _roll_out(self, rows):
        prompts = [row["prompt"] for row in rows]
        prompt_ids, completion_ids = fixed_ids(prompts)
        return [
            Rollout(p, ids, i, [Turn(c, None, "", "stop")], StopReason.NO_TOOL_CALL)
            for i, (p, ids, c) in enumerate(zip(prompts, prompt_ids, completion_ids))
        ]

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        output["advantages"][0] += self.advantage_error
        return output


def gradients_of(cls, model, tmp_path, error=0.0, share_prompts=True, **changes):
    callback = Gradients()
    config = dict(max_steps=1, max_grad_norm=1e9, **changes)
    dataset = Dataset.from_dict({"prompt": PROMPTS})
    if issubclass(cls, MTGRPOEnvTrainer):
        config |= dict(credit_assignment="outcome", share_prompts=share_prompts)
        config = MTGRPOConfig(**settings(tmp_path, **config))
        trainer = cls(model, MultiTurnToolEnv([echo], system_prompt=None), outcome_reward_funcs=[length_reward],
                      args=config, train_dataset=dataset, callbacks=[callback])  # fmt: skip
        trainer.advantage_error = error
    else:
        trainer = cls(model, [length_reward], args=GRPOConfig(**settings(tmp_path, **config)), train_dataset=dataset,
                      callbacks=[callback])  # fmt: skip
    trainer.train()
    return trainer.state.log_history[0]["loss"], callback.values


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo"])
def test_one_turn_without_tools_is_trl(random_model, tmp_path, loss_type, accumulation):
    """Same ids, outcome rewards only: TRL's loss and every parameter's gradient, in TRL's rows and in shared ones."""
    changes = dict(loss_type=loss_type, gradient_accumulation_steps=accumulation, per_device_train_batch_size=8)
    expected_loss, expected = gradients_of(FixedTRL, random_model, tmp_path, **changes)
    assert max(g.abs().max() for g in expected.values()) > 1e-4  # there is something to compare
    for shared, close in ((False, 1e-6), (True, 1e-5)):
        changes["share_prompts"] = shared
        loss, actual = gradients_of(FixedMTGRPO, random_model, tmp_path, **changes)
        assert loss == pytest.approx(expected_loss, rel=close, abs=1e-6 if shared else 1e-9)
        assert expected.keys() == actual.keys() and len(expected) > 10
        for name in expected:
            assert (actual[name] - expected[name]).norm() <= close * expected[name].norm(), (name, shared)
    _, wrong = gradients_of(FixedMTGRPO, random_model, tmp_path, error=0.01, **changes)
    assert any((wrong[n] - expected[n]).norm() > close * expected[n].norm() for n in expected)


class TwoTurns(FixedMTGRPO):
    """Conversations of two turns with an observation between them; the advantages of one turn can be left alone."""

    only_turn, observation_advantage = None, 0.0

    def _roll_out(self, prompts):
        rollouts = super()._roll_out(prompts)
        for rollout in rollouts:
            ids = rollout.turns[0].token_ids
            half = (len(ids) + 1) // 2
            call = Turn(
                ids[:half], None, "", "stop", messages=[{"role": "user", "content": "6"}], observation_ids=[1, 2, 3]
            )
            rollout.turns = [call, Turn(ids[half:], None, "", "stop")]
        return rollouts

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        for i, rollout in enumerate(self.batch.rollouts):
            for j, turn in enumerate(rollout.turn_ids):
                if turn == -1:
                    output["advantages"][i, j] = self.observation_advantage
                elif self.only_turn not in (None, turn):
                    output["advantages"][i, j] = 0.0
        return output


def call_reward(rollout_turns, **kwargs):
    return [[sum(turns[0].token_ids) % 7 / 7, None] for turns in rollout_turns]


@pytest.mark.parametrize("loss_type", [name for name in OF_TRL["one_of"]["loss_type"] if name != "vespo"])
def test_every_loss_takes_an_advantage_per_turn(random_model, tmp_path, loss_type):
    """On-policy a loss is linear in the advantages: the gradient of all turns is the sum of each turn's own, none of
    them nothing, and what stands on the environment's tokens has no part in it."""

    cap = {"epsilon_high": 5.0} if loss_type == "cispo" else {}

    def gradient(only_turn=None, observation_advantage=0.0):
        callback = Gradients()
        args = MTGRPOConfig(**settings(tmp_path, loss_type=loss_type, max_steps=1, max_grad_norm=1e9, **cap))
        trainer = TwoTurns(
            random_model, MultiTurnToolEnv([echo], system_prompt=None), [call_reward], [length_reward], args=args,
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}), callbacks=[callback],
        )  # fmt: skip
        trainer.only_turn, trainer.observation_advantage = only_turn, observation_advantage
        trainer.train()
        return torch.cat([values.flatten() for values in callback.values.values()])

    whole, first, second = gradient(), gradient(only_turn=0), gradient(only_turn=1)
    assert min(first.norm(), second.norm()) > 0.1 * whole.norm() > 1e-4
    assert (first + second - whole).norm() < 1e-5 * whole.norm()
    assert (gradient(observation_advantage=100.0) - whole).norm() < 1e-6 * whole.norm()


@pytest.mark.contract("resuming")
def test_resume_continues_as_if_uninterrupted(random_model, tmp_path):
    """From checkpoints in the first, at the end of the first, in the second and in the third epoch of two steps.

    The same losses, rewards and weights as in the run that was not stopped.
    """
    whole = make_trainer(
        random_model, tmp_path / "whole", max_steps=7, prompts=PROMPTS[:4], save_strategy="steps", save_steps=1
    )
    whole.train()
    for step in (1, 2, 3, 5):
        saved = tmp_path / f"parts/checkpoint-{step}"
        shutil.copytree(tmp_path / f"whole/checkpoint-{step}", saved)
        part = make_trainer(random_model, saved.parent, max_steps=step + 2, prompts=PROMPTS[:4])
        pushed_before = part._weight_counter.version
        part.train(resume_from_checkpoint=step == 2 or str(saved))
        assert part._weight_counter.version == pushed_before + 1 + 2 + 1  # the load, two steps, the end of training
        for key in ("loss", "reward", "turns/mean", "completions/mean_length", "num_tokens"):
            uninterrupted = [row[key] for row in whole.state.log_history if key in row][: step + 2]
            resumed = [row[key] for row in part.state.log_history if key in row]
            assert len(resumed) == step + 2
            assert resumed == pytest.approx(uninterrupted, abs=1e-5), (key, step)
        expected = AutoModelForCausalLM.from_pretrained(tmp_path / f"whole/checkpoint-{step + 2}", dtype=torch.float32)
        for (name, a), (_, b) in zip(expected.named_parameters(), part.model.named_parameters(), strict=True):
            assert torch.allclose(a, b, atol=1e-6), (name, step)


def test_a_trainer_that_trains_again_begins_with_a_batch_of_its_own(random_model, tmp_path):
    """Resumed inside a batch: that batch is rolled out again, and not the last one of the first training trained."""
    trainer = make_trainer(
        random_model, tmp_path, max_steps=3, per_device_train_batch_size=4, steps_per_generation=2,
        gradient_accumulation_steps=1,
    )  # fmt: skip

    class SavesInsideABatch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = state.global_step == 1

    trainer.add_callback(SavesInsideABatch())
    rolled_out, generate = [], trainer._generate_and_score_completions

    def noted(inputs):
        rolled_out.append((trainer.state.global_step, [row["prompt"][0]["content"] for row in inputs]))
        return generate(inputs)

    trainer._generate_and_score_completions = noted
    trainer.train()
    whole = list(rolled_out)
    assert [step for step, _ in whole] == [0, 2] and whole[0][1] != whole[1][1]
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert [step for step, _ in rolled_out[2:]] == [1, 2]
    assert [prompts for _, prompts in rolled_out[2:]] == [prompts for _, prompts in whole]


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_a_reference_that_is_another_model_is_told(random_model, tmp_path, caplog, noise):
    """As a reference of which some ranks got no weights: nothing else shows it."""
    trainer = make_trainer(random_model, tmp_path, beta=0.1, max_steps=1)
    with torch.no_grad():
        for parameter in trainer.ref_model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    trainer.train()
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("kl: ")]
    assert len(told) == (noise > 0) and all("nats per token away from the reference" in text for text in told)
    assert noise or trainer.state.log_history[0]["kl"] < 1e-6


def test_metrics_behind_an_evaluation_are_those_of_training(random_model, tmp_path):
    """Step 3 is evaluated, and is the last: what steps 1 to 3 trained is logged behind that."""
    rows = Dataset.from_dict({"prompt": PROMPTS[:1]})
    changes = {"max_steps": 3, "logging_strategy": "epoch", "eval_strategy": "steps", "eval_steps": 3}
    trainer = make_trainer(random_model, tmp_path, eval_dataset=rows, **changes)
    trainer.train()
    assert any("eval_reward" in row for row in trainer.state.log_history)
    assert any("reward" in row and "turns/mean" in row for row in trainer.state.log_history)


def test_a_limit_that_is_given_once_holds_for_both(tmp_path):
    """For the configuration and the environment; two values are an error, and so is a format after its prompt."""
    names = "max_env_steps", "max_completion_length", "tool_timeout", "max_turn_tokens", "max_tool_response_tokens"
    for of_args, of_env, expected in (
        ({"max_turn_tokens": 7, "max_completion_length": 4096},
         {"max_steps": 3, "max_completion_length": 700, "tool_timeout": 9.0}, (3, 700, 9.0, 7, None)),
        ({"max_env_steps": 5}, {}, (5, 24, 30.0, None, None)),
        ({"max_completion_length": 100, "max_tool_response_tokens": 51}, {}, (2, 100, 30.0, None, 51)),
    ):  # fmt: skip
        args = MTGRPOConfig(**settings(tmp_path, **of_args))
        share_limits(args, env := MultiTurnToolEnv([echo], **of_env))
        assert tuple(getattr(args, name) for name in names) == tuple(getattr(env, name) for name in names) == expected
    assert env.result_limit == 50  # half of it at most
    for key, value, of_env in (("max_env_steps", 5, {"max_steps": 3}), ("tool_format", "hermes", {})):
        with pytest.raises(ValueError, match=f"^{key}: {value} in the configuration"):
            share_limits(MTGRPOConfig(**settings(tmp_path, **{key: value})), MultiTurnToolEnv([echo], **of_env))


@pytest.mark.parametrize("is_package", [False, True])
def test_a_folder_called_tools_in_a_users_project_is_found(tmp_path, is_package):
    """A file that a recipe names imports from its project, whose folder has the name of one of this repository."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/helpers.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "tools/mine.py").write_text(
        "from tools.helpers import double\nimport helpers\n\n\ndef twice(x: int) -> int:\n"
        '    """Double a number."""\n    return double(x)\n\n\nTOOL_FUNCTIONS = [twice]\n'
    )
    if is_package:
        (tmp_path / "tools/__init__.py").touch()
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from mt_grpo import load_tools\n"
    code += "print(load_tools('tools/mine.py')[0](4))"
    ended = subprocess.run([warm_python.executable(), "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert ended.stdout == "8\n", ended.stderr


def test_each_epoch_has_an_order_of_its_own_the_first_is_trls(random_model, tmp_path):
    """Every prompt once in an epoch, four times in a row; and which epochs came before does not matter."""
    trainer = make_trainer(random_model, tmp_path)
    sampler, trls = trainer._get_train_sampler(), GRPOTrainer._get_train_sampler(trainer)
    orders = []
    for epoch in (0, 1, 2, 1):
        trainer.in_flight.epoch = epoch
        orders.append(list(sampler))
        assert sorted(orders[-1]) == sorted(list(range(len(PROMPTS))) * 4) and len(sampler) == len(orders[-1])
    assert orders[0] == list(trls) and orders[1] == orders[3] != orders[2] != orders[0] != orders[1]


@pytest.mark.parametrize("values, message", [([1.0], "expected a list of 8"), ([float("nan")] * 8, "finite")])
def test_wrong_reward_values_are_refused(random_model, tmp_path, values, message):
    trainer = make_trainer(random_model, tmp_path)
    trainer.reward_funcs[1] = lambda **kwargs: values
    with pytest.raises(RunError, match=f"Rewards failed at step 0: rank 0: .*{message}"):
        trainer.train()


def test_state_numbers_follow_the_keys_or_the_tokens_so_far():
    def turn(ids, key=None):
        return Turn(ids, None, "", "stop", observation_ids=[9], state_key=key)

    plain = [state_numbers(Rollout([], [1], turns=[turn(a), turn(b), turn([5])])) for a, b in (
        ([1], [2]), ([1], [3]), ([4], [2]))]  # fmt: skip
    assert plain[0][0] == plain[1][0] == plain[2][0]  # nothing was said yet
    assert plain[0][1] == plain[1][1] != plain[2][1]
    assert len({numbers[2] for numbers in plain}) == 3
    read = []  # the same turns behind which other results were read
    for result in (7, 8):
        first = Turn([1], None, "", "stop", observation_ids=[result])
        read.append(state_numbers(Rollout([], [1], turns=[first, turn([2])])))
    assert read[0][0] == read[1][0] and read[0][1] != read[1][1]
    keyed = state_numbers(Rollout([], [1], turns=[turn([1], "a"), turn([2], "b"), turn([3], "a")]))
    assert keyed[0] == keyed[2] != keyed[1] and min(keyed) >= 0
    assert keyed[0] == 5747026578550324724  # the same in every process, on every rank
    for key in (object(), ("a", {1, 2}), ({"a": 1},), [turn([1])]):
        with pytest.raises(ValueError, match="expected a string, a number or a tuple"):
            state_numbers(Rollout([], [1], turns=[turn([1], key)]))


def test_the_environment_names_the_state_in_which_each_turn_begins():
    """It is asked before every turn with the turns so far, and its answer is kept with the turn."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "hf_recipes/tiny/calculator-model")
    env = MultiTurnToolEnv([echo], system_prompt=None, tokenizer=tokenizer, state_key=lambda turns: ("at", len(turns)))
    said = ['<tool>{"name": "echo", "args": {"text": "a"}}</tool>'] * 2 + ["<answer>a</answer>"]
    (rollout,) = env.generate(["go"], ScriptedTexts(*said, tokenizer=tokenizer))["rollouts"]
    assert [turn.state_key for turn in rollout.turns] == [("at", 0), ("at", 1), ("at", 2)]


CREDITS = [  # how turns are credited: estimator, scaling, coefficient, discount, and what else an estimator reads
    ("turn_return", "none", 0.7, 1.0, {}),
    ("turn_return", "none", 0.7, 0.5, {}),
    ("gigpo", "mean", 1.0, 1.0, {"outcome_in_return": True, "state_baseline": "leave_one_out"}),
]


@pytest.mark.contract("recipe keys", "outcome_in_return", "state_baseline", "scale_rewards")
@pytest.mark.parametrize("name, scale, coef, discount, more", CREDITS)
def test_the_trainer_credits_by_the_settings_it_was_given(random_model, tmp_path, name, scale, coef, discount, more):
    """The advantages of a step are those of the pure function with the recipe's settings, each of which matters."""
    credit = dict(turn_discount=discount, turn_advantage_coef=coef, scale_rewards=scale, **more)
    trainer = make_trainer(random_model, tmp_path, cls=TwoTurns, credit_assignment=name, **credit)
    trainer.model.train()
    output = trainer._generate_and_score_completions([trainer.train_dataset[i // 4] for i in range(8)])
    table, rollouts = trainer.batch.rewards, trainer.batch.rollouts
    assert table.num_tokens[:, :2].tolist() == [[len(turn.token_ids) for turn in r.turns] for r in rollouts]
    expected = turn_advantages(table, name, 4, coef, scale, discount, **more)
    for i, rollout in enumerate(rollouts):
        turns = torch.tensor(rollout.turn_ids)
        for k in (0, 1):
            assert torch.allclose(output["advantages"][i, : len(turns)][turns == k], expected[i, k], atol=1e-6)
    others = [turn_advantages(table, name, 4, coef, scale, 1.5 - discount, **more)]
    others += [turn_advantages(table, name, 4, coef, scale, **{k: more[k] for k in more if k != key}) for key in more]
    others += [turn_advantages(table, name, 4, coef, "group", discount, **more)]
    assert all((expected - other).abs().max() > 0.01 for other in others)


def test_gigpo_uses_the_keys_of_the_environment_and_turn_rewards_alone_train(random_model, tmp_path):
    """With one state for all turns the table holds one number. Without outcome functions the outcome is 0 for all."""
    trainer = MTGRPOEnvTrainer(
        random_model, MultiTurnToolEnv([echo], system_prompt=None, state_key=lambda turns: "everywhere"),
        [turn_reward], args=MTGRPOConfig(**settings(tmp_path, credit_assignment="gigpo", max_steps=1)),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
    )  # fmt: skip
    trainer.train()
    table = trainer.batch.rewards
    assert len(table.state[table.sampled].unique()) == 1 and (table.state[table.sampled] >= 0).all()
    assert (table.state[~table.sampled] == -1).all() and not table.outcome.any()
    assert trainer.state.log_history[0]["credit/mean_abs_advantage"] > 0.01


def weights_of(trainer):
    return PolicyWeights(trainer.model, trainer.accelerator, trainer.processing_class, mode="none")


def with_b_not_zero(trainer):
    """A trainer whose adapter adds something; and its weights as they are."""
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return trainer, {n: p.detach().clone() for n, p in trainer.model.named_parameters()}


def assert_untouched(trainer, before):
    assert all(torch.equal(p, before[n]) for n, p in trainer.model.named_parameters())
    assert not any(getattr(module, "merged", False) for module in trainer.model.modules())


def test_weights_of_a_whole_model_are_its_own_parameters(random_model, tmp_path):
    """No copies of them. A tied one comes under both names. FSDP 1, whose shards are no parameters, is refused."""
    trainer = make_trainer(random_model, tmp_path)
    weights = weights_of(trainer)
    sent, own = dict(weights.named_weights()), {id(p) for p in trainer.model.parameters()}
    assert {id(tensor) for tensor in sent.values()} == own
    assert sent["lm_head.weight"] is sent["model.embed_tokens.weight"]
    assert {name: tensor.nbytes for name, tensor in sent.items()} == weights.expected
    weights._dist.fsdp_version = 1  # it is what accelerate takes where `fsdp_version` is missing
    with pytest.raises(ValueError, match="Set fsdp_version: 2"):
        weights._init_vllm()


@pytest.mark.contract("LoRA merged")
def test_weights_of_a_lora_are_exact_and_the_model_untouched(random_model, tmp_path):
    """Merged layer by layer: what is sent is W + BA, and the base weights are bit for bit what they were."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    trainer, before = with_b_not_zero(make_trainer(random_model, tmp_path, peft_config=lora))
    weights = weights_of(trainer)
    sent = {name: tensor.clone() for name, tensor in weights.named_weights()}
    base = trainer.model.get_base_model()
    layer = base.model.layers[0].self_attn.q_proj
    merged = layer.base_layer.weight + layer.get_delta_weight("default")
    assert torch.allclose(sent["model.layers.0.self_attn.q_proj.weight"], merged, atol=1e-7)
    assert {n: t.nbytes for n, t in sent.items()} == weights.expected and "lm_head.weight" in sent  # tied, so twice
    assert torch.equal(sent["lm_head.weight"], sent["model.embed_tokens.weight"])
    iterator = weights.named_weights()
    for _ in range(3):
        next(iterator)
    iterator.close()  # a push that fails half-way
    assert_untouched(trainer, before)


def test_weights_of_a_lora_on_parameters_are_what_the_policy_computes_with(random_model, tmp_path):
    """PEFT puts a layer into a layer where one module has two adapted parameters, as experts have.

    With what is sent a model without adapter has the policy's logits.
    """
    sizes = dict(moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, head_dim=16, num_key_value_heads=2)
    config = Qwen3MoeConfig(
        vocab_size=400, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, **sizes
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).float().save_pretrained(tmp_path / "experts")
    AutoTokenizer.from_pretrained(random_model).save_pretrained(tmp_path / "experts")
    both = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=both)
    trainer, before = with_b_not_zero(make_trainer(str(tmp_path / "experts"), tmp_path, peft_config=lora))
    weights = weights_of(trainer)
    sent = {name: tensor.clone() for name, tensor in weights.named_weights()}
    assert {n: t.nbytes for n, t in sent.items()} == weights.expected
    own = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "experts").eval()
    ids = torch.arange(40)[None]
    untrained = own(ids).logits
    assert own.load_state_dict(sent, strict=True)
    policy = trainer.model.eval()(ids).logits
    assert torch.allclose(own(ids).logits, policy, atol=1e-5) and (policy - untrained).abs().max() > 0.01
    assert_untouched(trainer, before)


CONTRACT = {  # private TRL methods that this project overrides or calls -> (class, parameters, what must be in them)
    "_generate": (GRPOTrainer, ["self", "prompts"], [
        "return prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields, images, tool_images",
        "num_input_tokens_seen", '"completions/clipped_ratio"']),
    "_generate_and_score_completions": (GRPOTrainer, ["self", "inputs"], [
        "self._generate(prompts)", "self._calculate_rewards(inputs, prompts, completions, completion_ids_list)",
        '"advantages": advantages', 'output["tool_mask"] = tool_mask', "importance_sampling_ratio",
        "num_generations = self.num_generations if mode == \"train\" else self.num_generations_eval"]),
    "_calculate_rewards": (GRPOTrainer, ["self", "inputs", "prompts", "completions", "completion_ids_list"], [
        "gather(rewards_per_func)", "log_extra", "log_metric"]),
    "_generate_single_turn": (GRPOTrainer, ["self", "prompt_ids", "images", "multimodal_fields", "num_generations",
                              "has_tool_images"], [
        "self.generation_config", "self.generation_kwargs", "self._last_loaded_step",
        "return completion_ids, logprobs"]),
    "_compute_loss": (GRPOTrainer, ["self", "model", "inputs"], [
        "if advantages.dim() == 1", 'completion_mask * inputs["tool_mask"]']),
    "_prepare_inputs": (GRPOTrainer, ["self", "generation_batch"], [
        "self._generate_and_score_completions", "self._buffered_inputs[self._step % "]),
    # Rows that share prompts read no further keyword: a run that is given one ends.
    "_get_per_token_logps_and_entropies": (GRPOTrainer, [
        "self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy",
        "compute_aux_loss", "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes",
        "num_tiles", "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"],
        ["return logps, entropies, aux_loss"]),
    "__init__": (RepeatSampler, [
        "self", "data_source", "mini_repeat_count", "batch_size", "repeat_count", "shuffle", "seed"],
        ["self.shuffle = shuffle", "self.seed = seed", "self.generator = torch.Generator()"]),
    "_save_checkpoint": (GRPOTrainer, ["self", "model", "trial"], ["super()._save_checkpoint(model, trial)"]),
    "_save_rng_state": (GRPOTrainer, ["self", "output_dir"], []),
    "_get_train_sampler": (GRPOTrainer, ["self", "dataset"], ["return RepeatSampler(", "seed=self.args.seed"]),
    "_log_completion_extra": (GRPOTrainer, ["self", "column", "values"], []),
    "_log_metric": (GRPOTrainer, ["self", "name", "value"], []),
    "gather_params": (DistributedBackend, ["self", "params"], ["deepspeed.zero.GatheredParameters(params)"]),
    "_fix_param_name_to_vllm": (VLLMGeneration, ["self", "name", "extra_prefixes"], []),
    "_init_vllm": (VLLMGeneration, ["self"], []),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRACT)
def test_contract_with_trl(name):
    """A new TRL may rename or reshape what is overridden here; then this says so before a run is silently wrong."""
    owner, parameters, fragments = CONTRACT[name]
    where = f"TRL {trl.__version__}: {owner.__name__}.{name}"
    method = getattr(owner, name, None)
    assert method is not None, f"{where} is gone"
    assert list(inspect.signature(method).parameters) == parameters, f"{where} has other parameters"
    source = inspect.getsource(inspect.unwrap(method))
    for fragment in fragments:
        assert fragment in source, f"{where} no longer has {fragment!r}"


def test_a_keyword_that_shared_rows_do_not_read_ends_a_run(random_model, tmp_path):
    """As a later TRL may give one: ids that a cut sampler kept, say. Its loss would be computed without them."""
    ids = torch.tensor([[3, 4, 5]])
    arguments = ids, torch.ones_like(ids), 2
    trainer = make_trainer(random_model, tmp_path)
    assert trainer.layout.kind == "shared"
    with pytest.raises(TypeError, match="kept_ids.*share_prompts"):
        trainer._get_per_token_logps_and_entropies(trainer.model, *arguments, num_images=None, kept_ids=ids)


def test_two_runs_do_not_write_into_one_directory(tmp_path):
    """The second is told who is there; what ended holds nothing."""
    for _ in range(2):
        with output_lock(str(tmp_path)):
            with pytest.raises(ValueError, match=f"in use by another run .process {os.getpid()}"):
                with output_lock(str(tmp_path)):
                    pass


@pytest.mark.parametrize("taken", [False, True])
def test_a_stop_before_prefetched_rollouts_are_taken_cancels_them(random_model, tmp_path, taken):
    """A signal came during the optimizer step: what was started ahead of the next one does not stay open."""
    cancelled = []
    batch = SimpleNamespace(rollouts=[], cancel=lambda: cancelled.append(True))

    class Stopped(MTGRPOEnvTrainer):
        def _roll_out(self, prompts):
            self.in_flight.groups, self._stop_signal = deque([GroupInFlight(0, {}, (8,), [batch])]), signal.SIGTERM
            if taken:  # and started to wait for
                self.in_flight.current = self.in_flight.groups.popleft().batches
            return super()._roll_out(prompts)

    trainer = make_trainer(random_model, tmp_path, cls=Stopped)
    with pytest.raises(RunStopped):
        trainer.train()
    assert cancelled == [True] and not trainer.in_flight.groups and not trainer.in_flight.current


@pytest.mark.parametrize(
    "lora, touched",
    [
        ({"target_modules": "all-linear"}, None),
        ({"target_modules": ["q_proj"], "modules_to_save": ["norm"]}, None),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "head"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, "embedding"),
        ({"target_modules": r".*embed_tokens"}, "embedding"),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [5, 6]}, "embedding"),
    ],
)
def test_a_lora_of_a_tied_embedding_or_head_is_rejected_unless_both_are_alike(lora, touched, random_model, tmp_path):
    """What is pushed then gives the logprobs that the trainer computes."""
    config = LoraConfig(lora_dropout=0.0, **lora)
    if touched is not None:
        with pytest.raises(ValueError, match=f"^The LoRA trains the model's {touched}"):
            make_trainer(random_model, tmp_path, peft_config=config)
        if "modules_to_save" not in lora:
            return  # TRL rejects an adapter of the head, which is what peft ties to one of the embedding
        config.ensure_weight_tying = True
    trainer = make_trainer(random_model, tmp_path, peft_config=config)
    generator = torch.Generator().manual_seed(0)
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    pushed = AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.float32)
    before = pushed(ids := torch.tensor([[5, 6, 7, 8]])).logits
    weights = weights_of(trainer)
    pushed.load_state_dict(dict(weights.named_weights()))
    assert (trainer.model.eval()(ids).logits - pushed(ids).logits).abs().max() < 1e-5
    assert (before - pushed(ids).logits).abs().max() > 1e-3


@pytest.mark.parametrize(
    "config, tied",
    [(Qwen2_5_VLConfig(tie_word_embeddings=True), True), (Gemma3Config(tie_word_embeddings=False), False)],
)
def test_whether_a_model_that_reads_images_is_tied_its_whole_configuration_says(config, tied):
    head, embedding = torch.nn.Linear(2, 2), torch.nn.Embedding(2, 2).requires_grad_(False)
    model = SimpleNamespace(config=config, peft_config={"default": LoraConfig()})
    model.get_input_embeddings, model.get_output_embeddings = lambda: embedding, lambda: head
    with pytest.raises(ValueError, match="^The LoRA trains the model's head") if tied else nullcontext():
        check_tied_lora(model)


def test_tokens_that_a_push_would_leave_out_are_rejected(random_model, tmp_path):
    config = LoraConfig(lora_dropout=0.0, target_modules=["q_proj"], trainable_token_indices=[5, 6])
    config.ensure_weight_tying = True
    trainer = make_trainer(random_model, tmp_path, peft_config=config)
    with pytest.raises(ValueError, match="trainable_token_indices are not pushed"):
        weights_of(trainer)


OF_THE_MODEL = {  # values of a model's generation_config.json, each of which changes what is sampled
    "min_p": 0.2, "typical_p": 0.3, "no_repeat_ngram_size": 1, "min_new_tokens": 40, "top_k": 2, "top_p": 0.5,
    "temperature": 0.3, "repetition_penalty": 2.0, "num_beams": 3, "suppress_tokens": list(range(128)),
    "epsilon_cutoff": 0.02, "begin_suppress_tokens": list(range(128)), "max_length": 4, "guidance_scale": 2.0,
}  # fmt: skip


def test_samples_do_not_depend_on_the_models_own_generation_config(random_model, tmp_path):
    """With and without a LoRA. The values stay in the configuration, which is saved with the model."""
    for lora in (None, LoraConfig(target_modules=["q_proj"], lora_dropout=0.0)):
        trainer = make_trainer(random_model, tmp_path / str(bool(lora)), peft_config=lora)
        config = trainer.accelerator.unwrap_model(trainer.model).generation_config

        def sampled():
            torch.manual_seed(0)
            asked = [trainer.llm.generate([5, 6, 7 + index], 48, None, index) for index in range(4)]  # noqa: B023
            return [generation.token_ids for generation in trainer.llm.serve(asked)]  # noqa: B023

        expected = sampled()
        for key, value in OF_THE_MODEL.items():
            before, changes = dict(vars(config)), {key: value, "do_sample": True}
            vars(config).update(changes)
            assert sampled() == expected, key
            assert {name: getattr(config, name) for name in changes} == changes
            vars(config).update(before)


def test_gigpo_says_what_it_amounts_to_without_state_keys(random_model, tmp_path, caplog):
    make_trainer(random_model, tmp_path, credit_assignment="gigpo")
    assert "without state keys" in caplog.text and "turn_return" in caplog.text


def test_a_prompt_that_leaves_no_room_in_the_context_is_refused(random_model, tmp_path):
    prompt = [{"role": "user", "content": "x" * 9000}]
    with pytest.raises(ValueError, match="the longest prompt has 9.* tokens, and the model reads 8192"):
        make_trainer(random_model, tmp_path, prompts=[prompt] * 6)
