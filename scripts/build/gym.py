"""Build the bundled model that plays games of gymnasium: a Qwen3 of 0.4M parameters that acts at random.

    PYTHONPATH=. python scripts/build/gym.py --output_dir hf_recipes/tiny/gym-model

It is trained on episodes of FrozenLake and Blackjack in which every action is drawn uniformly, on what is shown as on
what is done. Behind each stands its return, which a conversation never shows. So the model knows how an action is
written and what comes of it, and no action is likelier than another. Two to eight minutes.
"""

import argparse
import random
import sys
from pathlib import Path

if __name__ == "__main__":  # imports begin in scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import gymnasium
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from build.tiny import HERMES_TEMPLATE, build_model, encode, next_turns, warm_start
from mt_grpo.adapters.gym.environment import GymEnvironment, gym_environment
from mt_grpo.conversation.formats.xml import make_format
from mt_grpo.recipe.plugins import load_class
from mt_grpo.rollout import Message, Turn

TEXTS = Path(__file__).parents[2] / "tools/gym"
MOST_TURNS = 20


def games() -> dict[str, type[GymEnvironment]]:
    """The environments of hf_recipes/tiny/frozen_lake.yaml and blackjack.yaml."""
    text = load_class(f"{TEXTS}/frozen_lake.py:FrozenLakeText", "gym_text")
    return {
        "FrozenLake-v1": gym_environment(
            lambda: gymnasium.make("FrozenLake-v1", is_slippery=False, render_mode="ansi"), "FrozenLake-v1", text,
            ("left", "down", "right", "up"),
        ),
        "Blackjack-v1": gym_environment(
            lambda: gymnasium.make("Blackjack-v1", sab=True), "Blackjack-v1", actions=("stick", "hit")
        ),
    }  # fmt: skip


def play(cls: type[GymEnvironment], rng: random.Random, tells_return: bool = False) -> list[Message]:
    """One episode as messages, with actions drawn uniformly. `tells_return`: a last message says what it paid."""
    game = cls()
    messages = [{"role": "user", "content": game.reset(seed=rng.randrange(2**31))}]
    for _ in range(MOST_TURNS):
        text = f"<action>{rng.choice(game.actions)}</action>"
        messages.append({"role": "assistant", "content": text})
        reply = game.respond(None, Turn([], None, text, "stop"))
        if reply.stop:
            messages += [{"role": "user", "content": f"Return {sum(game.rewards):g}."}] if tells_return else []
            break
        messages += reply.messages
    game.close()
    return messages if reply.stop else messages[:-1]


def build_tokenizer(conversations: list[list[Message]]) -> PreTrainedTokenizerFast:
    """Byte-level BPE. A tag, a word, a number and any other character are one token each."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"</?action>| ?[A-Za-z]?[a-z]+| ?[0-9]+|."), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    texts = [piece for c in conversations for m in c for piece in (f"{m['role']}\n", m["content"])]
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=special[0], eos_token=special[2], model_max_length=1024
    )
    fast.chat_template = HERMES_TEMPLATE
    return fast


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, default=Path("hf_recipes/tiny/gym-model"))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(2)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    classes = list(games().values())
    # An episode of FrozenLake has some five times the turns of one of Blackjack.
    conversations = [play(rng.choices(classes, [1, 5])[0], rng, tells_return=True) for _ in range(4000)]
    tokenizer = build_tokenizer(conversations)
    model = build_model(tokenizer, num_layers=3, num_heads=3)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    print(tokenizer.tokenize("".join(message["content"] for message in conversations[0][:4])))
    tool_format = make_format("hermes", tokenizer)

    def example() -> tuple[list[int], list[int]]:
        ids, _ = encode(rng.choice(conversations), tool_format, {})
        return ids, ids

    warm_start(model, tokenizer.pad_token_id, example, args.steps)
    model = model.to(torch.bfloat16)  # half the size
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    model = model.float().eval()
    for name, cls in games().items():
        counts = dict.fromkeys([*cls.actions, "none"], 0)
        for conversation in [play(cls, rng) for _ in range(400)]:
            begun = conversation[: rng.randrange(0, len(conversation), 2) + 1]
            (text,) = next_turns(model, tool_format, [begun], True, {})
            action = text.removeprefix("<action>").removesuffix("</action>")
            counts[action if action in counts else "none"] += 1
        print(name, counts)


if __name__ == "__main__":
    main()
