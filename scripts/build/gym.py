"""Build the bundled model that plays games of gymnasium: a Qwen3 of 0.4M parameters that acts at random.

    python scripts/build/gym.py --output_dir hf_recipes/tiny/gym-model

It is trained on FrozenLake and Blackjack with uniformly random actions, on observations as on actions: it knows how an
action is written and what follows, and no action is likelier than another. Two to eight minutes.
"""

import random
import sys
from pathlib import Path

if __name__ == "__main__":  # imports begin in scripts/ and in the clone's root
    sys.path[:1] = map(str, Path(__file__).resolve().parents[1:3])
    if "--help" in sys.argv:  # also without the packages below
        sys.exit(print(__doc__))

import gymnasium
import torch
from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from build import common
from build.common import HERMES_TEMPLATE, Example, encode
from mt_grpo.conversation.formats.choose import make_format
from mt_grpo.integrations.gym.environment import GymEnvironment, gym_environment
from mt_grpo.recipe.plugins import load_class
from mt_grpo.rollout import Message, Turn

TEXTS = Path(__file__).parents[2] / "tools/gym"
MOST_TURNS = 20


def games() -> dict[str, type[GymEnvironment]]:
    """The environments of hf_recipes/tiny/frozen_lake.yaml and blackjack.yaml."""
    text = load_class(f"{TEXTS}/frozen_lake.py:FrozenLakeText", "gym_text")
    return {
        "FrozenLake-v1": gym_environment(
            lambda: gymnasium.make("FrozenLake-v1", is_slippery=False, render_mode="ansi"),
            "FrozenLake-v1",
            text,
            ("left", "down", "right", "up"),
        ),
        "Blackjack-v1": gym_environment(
            lambda: gymnasium.make("Blackjack-v1", sab=True), "Blackjack-v1", actions=("stick", "hit")
        ),
    }


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
    words = pre_tokenizers.Split(Regex(r"</?action>| ?[A-Za-z]?[a-z]+| ?[0-9]+|."), "isolated")
    return common.train_tokenizer(common.pieces(conversations), 400, HERMES_TEMPLATE, words)


def main() -> None:
    args = common.read_arguments(__doc__, Path("hf_recipes/tiny/gym-model"), steps=600)
    rng = args.rng
    classes = list(games().values())
    # An episode of FrozenLake has some five times the turns of one of Blackjack.
    conversations = [play(rng.choices(classes, [1, 5])[0], rng, tells_return=True) for _ in range(4000)]
    tokenizer = build_tokenizer(conversations)
    model = common.build_model(tokenizer, num_layers=3, num_heads=3)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    print(tokenizer.tokenize("".join(message["content"] for message in conversations[0][:4])))
    tool_format = make_format("hermes", tokenizer)

    def example() -> Example:
        ids, _ = encode(rng.choice(conversations), tool_format, {})
        return ids, ids

    common.warm_start(model, tokenizer.pad_token_id, example, args.steps)
    common.save(model.to(torch.bfloat16), tokenizer, args.output_dir, "hf_recipes/tiny/frozen_lake.yaml")


if __name__ == "__main__":
    main()
