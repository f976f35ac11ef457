"""A run with images of rows and of a tool: used by test_images.py, and by distributed_worker.py on two ranks."""

import json
import os

import vision_model
from project import ROOT, SMALL

from mt_grpo.base.rows import Rows
from mt_grpo.images import pictures
from mt_grpo.rollout import Generation, ToolCall
from mt_grpo.training import passes
from mt_grpo_trainer import MTGRPOConfig, MTGRPOEnvTrainer, MultiTurnToolEnv


def user(*parts):
    texts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": texts}


def zoom(corner: int) -> list:
    """Zoom.

    Args:
        corner: 0 to 3.
    """
    return "nothing" if corner == 2 else ["Corner: ", vision_model.picture(100 + corner), " ok"]


class Scripted:
    """Zooms into another corner for each rollout of a group, and answers."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    async def generate(self, prompt_ids, max_tokens, sampling_params=None, index=0):
        call = f'<tool>{{"name": "zoom", "args": {{"corner": {index % 4}}}}}</tool>'
        text = f"<answer>{index}</answer>" if "<result>" in self.tokenizer.decode(prompt_ids) else call
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Generation(ids, [-0.5] * len(ids), "stop")


def worth(completions, **kwargs):
    """Of what was said alone, so that it is the same on whichever rank."""
    return [float(sum(map(ord, str(completion))) % 11) for completion in completions]


def settings(out, **changes):
    values = {
        "output_dir": str(out), "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 200,
        "max_steps": 2, "learning_rate": 1e-3, "seed": 3, "lr_scheduler_type": "linear", "warmup_steps": 0,
    }  # fmt: skip
    return MTGRPOConfig(**{**SMALL, **values, **changes})


def make_trainer(folder, out, rows, scripted=True, env=None, **changes):
    env = env or MultiTurnToolEnv([zoom] if scripted else [], None)
    trainer = MTGRPOEnvTrainer(str(folder), env, [], [worth], args=settings(out, **changes), train_dataset=Rows(rows))
    if scripted:
        trainer.llm = Scripted(trainer.processing_class)
    return trainer


def some_rows():
    """With one image, two, and none."""
    asked = [{"role": "user", "content": "Which digit?"}]
    return [
        {"prompt": asked, "image": vision_model.picture(20), "images": None},
        {"prompt": [user("Look: ", {"type": "image"}, " or ", {"type": "image"})], "image": None,
         "images": [vision_model.picture(21, (84, 56)), vision_model.picture(22, (28, 28))]},
        {"prompt": asked, "image": None, "images": None},
        {"prompt": asked, "image": vision_model.picture(23, (112, 56)), "images": []},
    ]  # fmt: skip


def write_recipe(out, model):
    """A recipe whose data are one image, eight times."""
    (out / "rewards.py").write_text("def none(completions, **_):\n    return [0.0] * len(completions)\n\n\n"
                                    "OUTCOME_REWARD_FUNCS = [none]\n")  # fmt: skip
    vision_model.picture(20).save(out / "20.png")
    row = {"prompt": [{"role": "user", "content": "Which digit?"}], "image": str(out / "20.png")}
    (out / "rows.jsonl").write_text((json.dumps(row) + "\n") * 8)
    recipe = {
        "model_name_or_path": str(model), "dataset_name": str(out / "rows.jsonl"), "use_cpu": True,
        "dataset_test_split": "train", "system_prompt": "",
        "tools_script": str(ROOT / "tools/calculator.py"), "reward_fn": str(out / "rewards.py"),
        "max_completion_length": 12, "output_dir": str(out / "none"),
        "bf16": False, "per_device_train_batch_size": 8,
    }  # fmt: skip
    (out / "recipe.yaml").write_text(json.dumps(recipe))
    return str(out / "recipe.yaml")


class Calling(MultiTurnToolEnv):
    """Calls twice, whatever the policy says."""

    async def sample_turn(self, rollout, llm, sampling_params=None):
        turn = await super().sample_turn(rollout, llm, sampling_params)
        if turn is not None and len(rollout.turns) < 3:
            turn.calls, turn.answer = [ToolCall("zoom", {"corner": (rollout.index + len(rollout.turns)) % 4})], None
        return turn


def make_served_run(folder, out, port, **changes):
    """By a server; its conversations have images of rows and of the tool."""
    peft_config, rows = changes.pop("peft_config", None), Rows(changes.pop("rows", None) or some_rows())
    served = dict(use_vllm=True, vllm_mode="server", vllm_server_port=port)
    limits = dict(max_turn_tokens=10, max_steps=3, max_env_steps=3, learning_rate=1e-2)
    args = settings(out, **{**served, **limits, **changes})
    env = Calling([zoom], None, max_steps=3, max_turn_tokens=10)
    trainer = MTGRPOEnvTrainer(str(folder), env, [], [worth], args=args, train_dataset=rows, peft_config=peft_config)
    trainer.weight_sync.CHECK_EVERY = 1
    return trainer


def gradients_of(trainer):
    """Of the first step, before they are clipped."""
    found = {}
    original = trainer.accelerator.clip_grad_norm_

    def kept(parameters, *args, **kwargs):
        if not found:
            found.update({n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None})
        return original(parameters, *args, **kwargs)

    trainer.accelerator.clip_grad_norm_ = kept
    trainer.train()
    return found


def run_on_ranks(out, world):
    """Two steps in which rows change ranks, with what they read."""
    passes.UNEVEN, balance, moved = 0.0, passes.balance, []

    def noted(rows, *args):
        found = balance(rows, *args)
        moved.append(sum(bool(row.pictures) for row in found))
        return found

    passes.balance = noted
    folder = vision_model.save(out / f"model-{os.environ.get('RANK', 0)}")
    settings = dict(max_tokens_per_pass=320, gradient_checkpointing=True)
    trainer = make_trainer(folder, out / "run", some_rows(), per_device_train_batch_size=16 // world, **settings)
    gradients = gradients_of(trainer)
    norms = [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]
    found = {"gradients": gradients, "norms": norms, "moved": sum(moved), "kind": trainer.layout.kind}
    return {**found, "secret": pictures.MARKS.secret}
