"""Build the encyclopedia and the bundled model that searches it: a Qwen3 of 0.4M parameters that does it badly.

    python scripts/build/search.py --data      # the corpus and the questions, in a second
    python scripts/build/search.py             # the model, in a minute on one core

The encyclopedia has 4,096 entities. A name is two of 64 words, and each word is a token. A passage has one fact:
"capital of Bala Fizu" is its title, "Kamo Deri" its text. A question takes one search or two.

Nothing can be learned by heart: in the warm start each conversation draws its own facts. The model first imitates
conversations without mistakes, then some with known ones. It then knows the right behaviour (greedy) and samples it
only some of the time (temperature 1): that gap is what reinforcement learning closes.
"""

import random
import re
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # imports begin in scripts/ and in the clone's root
    sys.path[:1] = map(str, Path(__file__).resolve().parents[1:3])

from transformers import PreTrainedTokenizerFast

from build import common
from build.common import CHAT_TEMPLATE, Example, build_model, draw, encode, opening
from mt_grpo.conversation.formats.base import ChatFormat
from mt_grpo.conversation.formats.choose import TOOL_FORMATS
from mt_grpo.conversation.tools.signature import named_tools
from mt_grpo.rollout import Message
from tools.wiki_search import wiki_search

RECIPE = "hf_recipes/tiny/encyclopedia.yaml"
SYSTEM = "Use wiki_search, then answer."
MAX_CALLS = 3  # turns with calls in one conversation, as in the recipe
MAX_RESULT_TOKENS = 48  # longer errors are cut
TOOLS = named_tools([wiki_search])  # read, not called: the warm start has no corpus

# All words have four letters, so that no name is a part of another one.
WORDS = [a + b for a in "Ba De Fi Go Ka Le Mi Nu".split() for b in "la mo na ri so tu va zu".split()]
ENTITIES = [f"{first} {second}" for first in WORDS for second in WORDS]
# BM25 does not see the order of words. INVARIANT: "Bala Fizu", in alphabetical order, and "Fizu Bala" have no relation
# in common: the first four are of the one, the others of the other.
RELATIONS = (("capital", "founder", "harbour", "river"), ("neighbour", "patron", "rival", "ruler"))
ALL_RELATIONS = RELATIONS[0] + RELATIONS[1]
FACTS_EACH = 2  # of an entity
TEST_EVERY = 5  # a question about every fifth entity is held out
NUM_ROWS = {"train": 2048, "test": 512}

# Shares of what a turn does. FORK: change what the sampled policy gets wrong.
CALL_SHARES = {
    "good": 66, "wrong name": 4, "wrong relation": 6, "broken JSON": 8, "wrong tool": 6, "no call": 7, "no tag": 3,
}  # fmt: skip
ANSWER_SHARES = {"good": 69, "wrong word": 7, "wrong line": 8, "further call": 7, "no tag": 9}
RIGHT = {"good": 1}

Facts = dict[tuple[str, str], str]  # (relation, entity) -> entity

# -- The encyclopedia --


def other_entity(entity: str, rng: random.Random) -> str:
    """An entity of two different words, none of them in this one's name.

    BM25 reads the text of a passage as well as its title: a word that is in it twice, or in both, outweighs the name.
    """
    return " ".join(rng.sample([word for word in WORDS if word not in entity.split()], 2))


def make_facts(seed: int = 0) -> Facts:
    """The facts of the encyclopedia, two of each entity."""
    rng = random.Random(seed)
    return {
        (relation, entity): other_entity(entity, rng)
        for entity in ENTITIES
        for first, second in [entity.split()]
        for relation in rng.sample(RELATIONS[first > second], FACTS_EACH)
    }


def title_of(relation: str, entity: str) -> str:
    """The title of a fact's passage, which is the best query for it too."""
    return f"{relation} of {entity}"


def make_question(path: tuple[str, ...], entity: str) -> str:
    """The question behind relations that are followed from left to right."""
    return f"What is the {' of the '.join(reversed(path))} of {entity}?"


def read_question(question: str) -> tuple[list[str], str]:
    """The relations in the order of the searches, and the entity that the first search is about."""
    words = question.removeprefix("What is the ").removesuffix("?").replace(" of the ", " of ")
    *relations, entity = words.split(" of ")
    return relations[::-1], entity


def make_rows(facts: Facts, seed: int = 0) -> dict[str, list[dict[str, Any]]]:
    """The questions of both splits, about half of two hops. A held-out question begins at a held-out entity."""
    rng = random.Random(seed)
    has: dict[str, list[str]] = defaultdict(list)
    for relation, entity in facts:
        has[entity].append(relation)
    questions: dict[str, list[tuple[str, str]]] = {"train": [], "test": []}
    for i, entity in enumerate(ENTITIES):
        first, second = rng.sample(has[entity], 2)
        bridge = facts[second, entity]
        then = rng.choice(has[bridge])
        questions["train" if i % TEST_EVERY else "test"] += [
            (make_question((first,), entity), facts[first, entity]),
            (make_question((second, then), entity), facts[then, bridge]),
        ]
    drawn = {split: rng.sample(questions[split], size) for split, size in NUM_ROWS.items()}
    return {split: [{"question": q, "answer": [a]} for q, a in pairs] for split, pairs in drawn.items()}


def write_data(folder: Path) -> None:
    """The corpus, a passage per fact, and the questions as JSON lines."""
    facts = make_facts()
    corpus = [{"id": str(i), "title": title_of(*key), "text": value} for i, (key, value) in enumerate(facts.items())]
    for name, rows in {"corpus": corpus, **make_rows(facts)}.items():
        common.write_lines(folder / f"{name}.jsonl", rows)


# -- Conversations with known mistakes --


def change_word(entity: str, rng: random.Random) -> str:
    """The name with one word replaced by another one."""
    words = entity.split()
    place = rng.randrange(2)
    words[place] = rng.choice([word for word in WORDS if word != words[place]])
    return " ".join(words)


def call_turn(kind: str, relation: str, entity: str, is_first: bool, rng: random.Random) -> str:
    """What the assistant says where a search is left to do: that for a relation of an entity."""
    if kind == "no call":  # a guess, or what the first search found
        return f"<answer>{rng.choice(ENTITIES) if is_first else entity}</answer>"
    if kind == "no tag":
        return title_of(relation, entity)
    if kind == "wrong relation":
        relation = rng.choice([r for r in ALL_RELATIONS if r != relation])
    if kind == "wrong name":
        entity = change_word(entity, rng)
    name = rng.choice(("search", "wiki")) if kind == "wrong tool" else "wiki_search"
    text = common.call(name, query=title_of(relation, entity))
    return common.broken(text, rng) if kind == "broken JSON" else text


def answer_turn(kind: str, title: str, found: str, rng: random.Random) -> str:
    """What the assistant says once nothing is left to search for: `found` stands below `title` in the last result."""
    if kind == "no tag":
        return found
    if kind == "further call":
        return common.call("wiki_search", query=title_of(rng.choice(ALL_RELATIONS), found))
    if kind == "wrong line":
        found = title.partition(" of ")[2]
    return f"<answer>{change_word(found, rng) if kind == 'wrong word' else found}</answer>"


def look_up(query: str, facts: Facts, rng: random.Random) -> str:
    """The text of a search in facts that are drawn when they are asked for, as the tool words it.

    A search for something that is no fact yet makes it one, or finds a passage in which one word of the name differs.
    """
    relation, _, entity = query.partition(" of ")
    if (relation, entity) not in facts and rng.random() < 0.5:
        entity = change_word(entity, rng)
    value = facts.setdefault((relation, entity), other_entity(entity, rng))
    return f"[1] {title_of(relation, entity)}\n{value}"


def make_conversation(
    tool_format: ChatFormat, call_shares: dict[str, int], answer_shares: dict[str, int], rng: random.Random
) -> list[Message]:
    """One conversation about facts of its own.

    A failed call is followed by another attempt. After a wrong search the conversation goes on from what was found.
    """
    relations, entity = rng.choices(ALL_RELATIONS, k=rng.choice((1, 2))), rng.choice(ENTITIES)
    messages, facts = opening(make_question(tuple(relations), entity), SYSTEM), {}
    hop, title, found = 0, "", entity
    for calls in range(MAX_CALLS + 1):
        if hop < len(relations):
            facts[relations[hop], found] = other_entity(found, rng)
            text = call_turn(draw(call_shares, rng), relations[hop], found, hop == 0, rng)
        else:
            text = answer_turn(draw(answer_shares, rng), title, found, rng)
        turn = common.observe(text, tool_format, TOOLS, lambda call: look_up(call.arguments["query"], facts, rng))
        if turn.calls and calls == MAX_CALLS:  # a call that the recipe would not run is not imitated
            break
        messages.append({"role": "assistant", "content": text})
        if not turn.calls:
            break
        messages += common.result_messages(turn, tool_format, MAX_RESULT_TOKENS)
        if not turn.results[0].error:
            hop, (title, found) = hop + 1, turn.results[0].text.split("\n")
    return messages


# -- Model --


def build_tokenizer(conversations: list[list[Message]]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of at most 448 tokens whose merges cross words, and the 64 words of the names as added tokens."""
    texts = [text for piece in common.pieces(conversations) for text in re.split("|".join(WORDS), piece)]
    return common.train_tokenizer(texts, 448, CHAT_TEMPLATE, split=None, added=WORDS)


def main() -> None:
    args = common.read_arguments(
        __doc__,
        common.TINY / "search-model",
        steps=200,
        threads=1,  # so small matrices gain nothing from 2
        data={"action": "store_true", "help": "write hf_recipes/tiny/encyclopedia, and end"},
        mixed_steps={"type": int, "default": 150, "help": "with mistakes"},
    )
    if args.data:
        return write_data(common.TINY / "encyclopedia")
    rng = args.rng
    first = TOOL_FORMATS["xml"](build_tokenizer([opening(make_question(("river",), "Bala Fizu"), SYSTEM)]))
    drawn = [make_conversation(first, CALL_SHARES, ANSWER_SHARES, rng) for _ in range(2000)]
    tokenizer = build_tokenizer(drawn)
    tool_format, model = TOOL_FORMATS["xml"](tokenizer), build_model(tokenizer, num_layers=3, num_heads=3)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")

    def example(*shares: dict[str, int]) -> Example:
        return encode(make_conversation(tool_format, *shares, rng), tool_format, TOOLS)

    right, mixed = (partial(example, *shares) for shares in ((RIGHT, RIGHT), (CALL_SHARES, ANSWER_SHARES)))
    common.warm_start_twice(model, tokenizer, right, mixed, args, RECIPE)


if __name__ == "__main__":
    main()
