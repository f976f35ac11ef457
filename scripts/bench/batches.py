"""Batches whose rows have more in common than a prompt: edited histories, trees of rollouts, pictures.

`batch_of` makes the conversations of a shape of scripts/bench/gpu.py; `build_picture_trainer` a trainer on ones with
pictures, of a model with random weights that reads them.
"""

import copy
import json
import random
import shutil
from pathlib import Path
from typing import Any

from bench.common import ROOT
from bench.step import Conversation, Shape, make_conversations, outcome_reward
from bench.sync import SIZES

PICTURE_MODEL = ROOT / "hf_recipes/tiny/zoom-model"
BRANCHES = 3  # of a tree, all from the state behind the trunk's first turn
TREE = {"credit_assignment": "tree", "num_branches": BRANCHES, "scale_rewards": "none"}
SIDE, RESULT_SIDE = 448, 224  # pixels of a row's picture and of a tool's


def batch_of(shape: Shape) -> list[Conversation]:
    """The conversations of a shape, with what its `kind` asks for: `records`, `trees`, or nothing."""
    conversations = make_conversations(shape)
    return {"records": edited, "trees": as_trees}.get(shape.get("kind"), list)(conversations)


def edited(conversations: list[Conversation]) -> list[Conversation]:
    """Before each further turn the result that came last is cut in half: the turn begins a record of its own.

    >>> turns = [{"token_ids": [5, 6], "observation_ids": [7, 8]}, {"token_ids": [9], "observation_ids": []}]
    >>> edited([{"prompt_ids": [1], "turns": turns}])[0]["turns"][1]["context"]
    [1, 5, 6, 7]
    """
    for conversation in conversations:
        read = list(conversation["prompt_ids"])
        for turn, following in zip(conversation["turns"], conversation["turns"][1:]):
            seen = turn["observation_ids"]
            read += turn["token_ids"] + seen[: len(seen) // 2]
            following["context"] = list(read)
    return conversations


def as_trees(conversations: list[Conversation]) -> list[Conversation]:
    """Each trunk's first turn is what its branches begin with, which they do not train.

    >>> turns = [[{"token_ids": [k]}, {"token_ids": [9]}] for k in range(5)]
    >>> found = as_trees([{"turns": each} for each in turns])
    >>> [[turn["token_ids"][0] for turn in each["turns"]] for each in found], [each["num_copied"] for each in found]
    ([[0, 9], [0, 9], [0, 9], [0, 9], [4, 9]], [0, 1, 1, 1, 0])
    """
    for number, conversation in enumerate(conversations):
        place = number % (1 + BRANCHES)
        conversation["num_copied"] = int(place > 0)
        if place:
            trunk = conversations[number - place]["turns"][0]
            conversation["turns"][0] = {**trunk, "trained": False}
    return conversations


# ---------------------------------------------------------------------------------------------------------------------
# Pictures
# ---------------------------------------------------------------------------------------------------------------------


def draw(rng: random.Random, side: int) -> Any:
    """A picture of 16 x 16 squares of random grey."""
    from PIL import Image

    image = Image.new("L", (16, 16))
    image.putdata([rng.randrange(256) for _ in range(256)])
    return image.resize((side, side), Image.Resampling.NEAREST)


def zoom(corner: int) -> list:
    """Enlarge a corner of the picture.

    Args:
        corner: 0 to 3.
    """
    return ["Corner: ", draw(random.Random(corner), RESULT_SIDE)]


def build_picture_model(folder: Path, tiny: bool) -> Any:
    """A Qwen2.5-VL with random weights in float32: the bundled one, or one whose text part is as large as Qwen3-0.6B.

    `folder` gets its tokenizer, and an image processor that keeps pictures as large as they are.
    """
    import torch
    from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    for path in PICTURE_MODEL.glob("*.j*"):
        shutil.copy(path, folder)
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    processor["size"]["longest_edge"] = SIDE**2
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    config = AutoConfig.from_pretrained(PICTURE_MODEL)
    config.text_config.max_position_embeddings = 4096
    if not tiny:
        large = {**SIZES["0.6B"], "initializer_range": 0.02}
        del large["head_dim"]  # here hidden_size / num_attention_heads
        config.text_config.layer_types = ["full_attention"] * large["num_hidden_layers"]
        vision = {
            "depth": 12,
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_heads": 12,
            "out_hidden_size": 1024,
            "fullatt_block_indexes": [2, 5, 8, 11],
            "initializer_range": 0.02,
        }
        for part, sizes in ((config.text_config, large), (config.vision_config, vision)):
            for key, value in sizes.items():
                setattr(part, key, value)
        config.text_config.rope_parameters["mrope_section"] = [8, 12, 12]
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=torch.float32)
    model.config._name_or_path = model.name_or_path = str(folder)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 2, 0
    return model


class Speaker:
    """A backend that calls `zoom`, and answers behind its result; what else it says differs between rollouts."""

    def __init__(self, tokenizer: Any, num_tokens: int):
        self.tokenizer, self.num_tokens = tokenizer, num_tokens

    async def generate(self, prompt_ids: list[int], max_tokens: int, sampling_params: Any = None, index: int = 0):
        from mt_grpo.rollout import Generation

        called = "<result>" in self.tokenizer.decode([id for id in prompt_ids if id < len(self.tokenizer)])
        rng = random.Random(2 * index + called)
        call = json.dumps({"name": "zoom", "args": {"corner": index % 4}})
        ending = f"<answer>{rng.randint(2, 9999)}</answer>" if called else f"<tool>{call}</tool>"
        ending_ids = self.tokenizer(ending, add_special_tokens=False)["input_ids"]
        thoughts = " ".join(f"{rng.randint(2, 99)} + {rng.randint(2, 99)}" for _ in range(self.num_tokens))
        room = round(self.num_tokens * rng.uniform(0.6, 1.4)) - len(ending_ids)
        ids = self.tokenizer(thoughts, add_special_tokens=False)["input_ids"][: max(0, room)] + ending_ids
        return Generation(ids, [round(rng.uniform(-3, 0), 6) for _ in ids], "stop")


def build_picture_trainer(shape: Shape, folder: str, meter: Any, **changes: Any) -> Any:
    """A trainer whose rows have a picture each, and whose tool returns one; its conversations are held once."""
    from transformers.trainer_callback import PrinterCallback

    import mt_grpo_trainer as mt
    from mt_grpo.base.rows import Rows

    rng, groups = random.Random(0), shape["rollouts"] // shape["G"]
    asked = [{"role": "user", "content": "Which digit is top left? " * (shape["prompt"] // 12)}]
    rows = [{"prompt": asked, "image": draw(rng, shape.get("side", SIDE)), "answer": str(k)} for k in range(groups)]
    settings = {
        "output_dir": folder, "num_generations": shape["G"], "per_device_train_batch_size": shape["rows"],
        "gradient_accumulation_steps": shape["rollouts"] // shape["rows"], "max_steps": 1000, "learning_rate": 1e-6,
        "lr_scheduler_type": "constant", "loss_type": "dapo", "beta": 0.0, "max_completion_length": 2048,
        "max_tool_response_tokens": 512, "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "seed": 42,
        "shuffle_dataset": False, **changes,
    }  # fmt: skip
    trainer = mt.MTGRPOEnvTrainer(
        build_picture_model(Path(folder) / "pictures", shape["model"] == "tiny"),
        mt.MultiTurnToolEnv([zoom], None),
        [],
        [outcome_reward],
        args=mt.MTGRPOConfig(**settings),
        train_dataset=Rows(rows * 200),
        callbacks=[meter],
    )
    trainer.llm = Speaker(trainer.processing_class, shape["tokens"] // 2)
    held, converse = [], trainer._roll_out

    def roll_out(given: list) -> list:
        held.extend([] if held else converse(given))
        return copy.deepcopy(held)

    trainer._roll_out = roll_out
    trainer.use_vllm, trainer.vllm_importance_sampling_mode = True, "token_truncate"
    trainer.remove_callback(PrinterCallback)
    return trainer
