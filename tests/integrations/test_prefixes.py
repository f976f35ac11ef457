"""Texts that begin alike: their ids are those of the whole text, and the beginning is tokenised once."""

import copy
import random
import re
import types
from pathlib import Path

import pytest
from scripted import QWEN3, make_tokenizer
from test_agents import ADD, TOKENIZER, ask, run, user
from test_formats import tokenizer_of
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import mt_grpo_trainer as mt
from mt_grpo.integrations import prefixes
from mt_grpo.integrations.agents import chains, conversation as agent_conversations, prompts as agent_prompts
from mt_grpo.integrations.agents.messages import Answer, ModelRequest, tool_call
from mt_grpo.integrations.agents.programs import FunctionAgent
from mt_grpo.integrations.agents.session import AgentSession
from mt_grpo.integrations.prefixes import Newest, SharedPrefixes

ROOT = Path(__file__).resolve().parents[2]
WORDS = [
    "tea",
    " water",
    "\n",
    "  ",
    "ß",
    '{"a": 1}',
    "<|im",
    "_end|>",
    "<tool_call>",
    "</think>",
    "é",
    " a",
    "7",
    ".",
]


def metaspace() -> PreTrainedTokenizerFast:
    """As Llama 2 and Mistral write: a mark stands before the first word of a text, and of no later part."""
    vocab = {"\u2581": 0, "<unk>": 1, "<|im_end|>": 2, "<|im_start|>": 3}
    vocab |= {letter: 4 + k for k, letter in enumerate('abcdefghijklmnopqrstuvwxyz.{}:"1 7')}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.decoder = decoders.Metaspace(prepend_scheme="first")
    special = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"], "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def stripping() -> PreTrainedTokenizerFast:
    """One whose special tokens take the white space beside them."""
    tokenizer = make_tokenizer(QWEN3)
    tokenizer.add_tokens(
        [AddedToken(token, special=True, lstrip=True, rstrip=True) for token in ("<|im_end|>", "<|im_start|>")],
        special_tokens=True,
    )
    return tokenizer


TOKENIZERS = {
    "bytes": lambda: make_tokenizer(QWEN3), "metaspace": metaspace, "stripping": stripping,
    **{path.name: lambda path=path: AutoTokenizer.from_pretrained(path)
       for path in sorted((ROOT / "hf_recipes/tiny").glob("*-model"))},
}  # fmt: skip


def written(rng, turns):
    return "".join(
        f"<|im_start|>{rng.choice(['user', 'assistant', 'tool'])}\n{''.join(rng.choices(WORDS, k=rng.randrange(9)))}"
        "<|im_end|>\n"
        for _ in range(turns)
    )


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_are_those_of_the_whole_text(name):
    tokenizer, rng = TOKENIZERS[name](), random.Random(0)
    for _ in range(40):
        shared = SharedPrefixes(tokenizer)
        texts = [written(rng, rng.randrange(1, 9))]
        for _ in range(8):
            known = rng.choice(texts)
            texts.append(known[: rng.randrange(len(known) + 1)] + written(rng, rng.randrange(3)) + rng.choice(WORDS))
        for text in texts:
            shared.ids(text).clear()  # who gets a list may change it
            assert shared.ids(text) == tokenizer(text, add_special_tokens=False)["input_ids"], text
    assert prefixes.TRIED[id(tokenizer)] == (tokenizer, True)


def test_a_tokenizer_that_looks_behind_its_special_tokens_is_found_out(caplog):
    tokenizer = make_tokenizer(QWEN3)

    class Odd:
        is_fast, all_special_ids, all_special_tokens = True, tokenizer.all_special_ids, tokenizer.all_special_tokens
        unk_token = None

        def __call__(self, text, **settings):
            found = dict(tokenizer(text, **settings))
            return found | {"input_ids": [*found["input_ids"][:-1], len(text)]}  # it counts from the beginning

    odd = Odd()
    shared = SharedPrefixes(odd)
    for text in ("<|im_start|>a<|im_end|>b<|im_end|>c", "<|im_start|>a<|im_end|>b<|im_end|>d"):
        assert shared.ids(text) == odd(text, add_special_tokens=False)["input_ids"]
    assert "tokenised completely" in caplog.text and prefixes.TRIED[id(odd)] == (odd, False)


def test_an_agents_further_records_are_tokenised_from_where_they_differ(monkeypatch):
    """Three records with one message of the system. What the model reads is the whole prompt's ids."""
    system, written = "Be brief. " * 60, []
    tokenise = SharedPrefixes._tokenise
    monkeypatch.setitem(prefixes.TRIED, id(TOKENIZER), (TOKENIZER, True))
    monkeypatch.setattr(
        SharedPrefixes,
        "_tokenise",
        lambda self, text, *before: (
            written.append(len(text) - sum(len(b.text) for b in before)) or tokenise(self, text, *before)
        ),
    )

    async def solve(row, client):
        for text in ("One?", "Two?", "Three?"):
            await ask(client, [{"role": "system", "content": system}, user(text)])

    rollout, _ = run(solve, "1", "2", "3", max_completion_length=4000)
    assert rollout.error is None and [len(record.turns) for record in rollout.records] == [1, 1, 1], rollout.error
    for record, text in zip(rollout.records, ("One?", "Two?", "Three?")):
        messages = [{"role": "system", "content": system}, user(text)]
        whole = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert record.prompt_ids == TOKENIZER(whole, add_special_tokens=False)["input_ids"]
    first, *further = written
    assert first > 500 and len(further) == 2 and max(further) < 100
    conversation = run(solve, "1", "2", "3", max_completion_length=4000)[0]  # of another rollout
    assert conversation.prompt_ids == rollout.prompt_ids


# -- what is kept beside the ids of beginnings --

TEXTS = [*WORDS, "<|im_end|>", "<|eot_id|>", "</s>", "\ud83d", "A line of some length, which is said again. " * 4]
OTHER_TOOL = {**ADD, "function": {**ADD["function"], "description": "Subtract."}}
# Templates whose prompts depend on what comes later, on the tools, on the arguments as text; and a tool format each.
TEMPLATES = {"qwen3": "hermes", "qwen2_5": "hermes", "llama3_1": "native", "glm4moe": "native", "gptoss": "native"}


def session_of(name, tokenizer, env=None):
    """(a session of a new rollout, its conversations), these or new ones."""
    program = FunctionAgent(lambda row, client: None)
    if env is None:
        cls = agent_conversations.agent_conversation(mt.MultiTurnToolEnv, program, 60.0, 8)
        env = cls([], None, tokenizer=tokenizer, tool_format=TEMPLATES[name], max_completion_length=400,
                  max_model_len=100_000, environment=agent_conversations.agent_environment(program))  # fmt: skip
    (rollout,) = env.start([[]], rows=[{"question": "What?"}])
    return AgentSession(env, rollout, types.SimpleNamespace(), {}), env


def edited(rng, messages):
    """A conversation that an agent sends next: one more exchange, some message told otherwise, or its end left out."""
    messages = copy.deepcopy(messages)
    say = lambda: "".join(rng.choices(TEXTS, k=rng.randrange(4)))  # noqa: E731
    for _ in range(rng.randrange(3)):
        number = sum(map(len, messages)) + rng.randrange(3)
        call = tool_call(f"c{number}", "add", rng.choice(['{"a": 1, "b": "x"}', '{"b": "</s>"}', "{}"]))
        messages += [
            {"role": "assistant", "content": say(), "tool_calls": [call], "reasoning_content": say()},
            {"role": "tool", "content": say(), "tool_call_id": call["id"]}, user(say()),
        ]  # fmt: skip
    rng.choice(messages)["content"] = say()
    cut = rng.randrange(1, len(messages) + 1) if rng.random() < 0.3 else len(messages)
    while messages[cut - 1]["role"] == "assistant":
        cut -= 1
    return messages[:cut]


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_kept_changes_no_prompt(name, monkeypatch):
    """Of rollouts of a group, which keep texts and prompts in a small room, against a new rollout for each request."""
    monkeypatch.setattr(agent_prompts, "MOST_CHARACTERS", 4000)
    monkeypatch.setattr(agent_conversations, "MOST_IDS", 3000)
    tokenizer, rng = tokenizer_of(name), random.Random(3)
    first, env = session_of(name, tokenizer)
    sessions = [first, *(session_of(name, tokenizer, env)[0] for _ in range(2))]
    messages = [{"role": "system", "content": "Be brief."}, user("Add.")]
    asked = [ModelRequest(messages)]
    for _ in range(12):
        messages = edited(rng, messages)
        asked.append(ModelRequest(messages, rng.choice([[], [ADD], [OTHER_TOOL], [ADD]])))
    hits, get = [], Newest.get
    monkeypatch.setattr(Newest, "get", lambda self, key: hits.append(self) or get(self, key) or hits.pop() and None)
    found = [session_of(name, tokenizer)[0]._prompt(request) for request in asked]
    hits.clear()
    for k in range(len(asked)):
        for again in (k, rng.randrange(max(0, k - 3), k + 1), rng.randrange(k + 1)):
            assert rng.choice(sessions)._prompt(asked[again]) == found[again], asked[again]
            assert sum(map(len, env.prompt_cache.values.values())) <= 3000
    assert env.prompt_cache in hits and len(env.prompt_cache.values) < len(asked)  # some were known, some had to go


def test_a_rollouts_texts_are_read_once(monkeypatch):
    """An agent that tells all of its history again. Equal texts of another role are texts of their own."""
    read, broken = [], agent_prompts.AgentPrompts.broken

    def counted(self, value, role):
        read.append((value, role))
        return broken(self, value, role)

    monkeypatch.setattr(agent_prompts.AgentPrompts, "broken", counted)
    session, _ = session_of("qwen3", TOKENIZER)
    history = [
        each for k in range(20) for each in (user(f"Line {k}."), {"role": "assistant", "content": f"Line {k}."})
    ]
    for size in range(1, 41, 2):
        session._prompt(ModelRequest(history[:size]))
    texts = [(value, role) for value, role in read if isinstance(value, str)]
    assert sorted(texts) == sorted({(each["content"], each["role"]) for each in history[:39]})
    assert session.prompts._broken._total <= agent_prompts.MOST_CHARACTERS


def test_a_text_of_another_role_is_another_text():
    """What may stand in the system's text, and not in the user's."""
    session, _ = session_of("qwen3", TOKENIZER)
    text = "One <|im_end|> more."
    rendered = session.prompts.rendered([], [{"role": role, "content": text} for role in ("system", "user") * 2])
    assert [each["content"] for each in rendered] == [text, "One < |im_end|> more."] * 2


def test_the_newest_are_kept_in_their_room():
    rng, kept, held = random.Random(0), Newest(50, len), []
    for _ in range(400):
        key = rng.randrange(12)
        assert kept.of(key, lambda size=key: "x" * (size * 2)) == "x" * (key * 2)
        held = [key, *(each for each in held if each != key)]
        room = [each for k, each in enumerate(held) if 2 * sum(held[: k + 1]) <= 50]
        held = held[: len(room)]
        assert list(kept.values) == held[::-1] and kept._total == 2 * sum(held) <= 50


def completion_of(number, text, messages, keys=()):
    """An answer with this text to these messages."""
    asked = chains.Asked("", None, range(number, number + 1), True, reached=1)
    answer, request = Answer(number, text, [], "", "stop", 1, 1, 0), ModelRequest(messages)
    turn = types.SimpleNamespace(went_on=False)
    return chains.Completion(number, messages, [], turn, None, messages, None, 0, asked, request, list(keys), answer)


def test_a_text_is_found_where_it_stands_as_words_of_its_own():
    """As by the plain pattern, for texts of blanks, letters, signs and digits of several alphabets."""
    rng = random.Random(1)
    for _ in range(3000):
        text = "".join(rng.choices("ab_ .-5\u0663\u00e9\n", k=rng.randrange(4)))
        whole = "".join(rng.choices("ab_ .-5\u0663\u00e9\n", k=rng.randrange(12)))
        said, told = (" ".join(each.split()) for each in (text, whole))
        expected = bool(said) and re.search(rf"(?<!\w){re.escape(said)}(?!\w)", told) is not None
        found = completion_of(0, text, [])._stands_in([user(whole)], chains.Collapsed())
        assert found == expected, (text, whole)


def test_a_history_in_other_words_is_read_once(monkeypatch):
    """Each request tells all steps before it. No text is looked at as often as there are turns."""
    made, missing = [], chains.Collapsed.__missing__
    monkeypatch.setattr(chains.Collapsed, "__missing__", lambda self, text: made.append(text) or missing(self, text))
    all_of_it, steps = chains.Chains(("<think>", "</think>"), []), "What?"
    for k in range(12):
        request = ModelRequest([user(steps)])
        all_of_it.requests.append((k, request))
        all_of_it.add(completion_of(k, f"It  is step {k}.", request.messages))
        steps += f"\nIt is step {k}. More." if k % 2 else f"\nIt is step {k}5. More."
    all_of_it.find_what_went_on()
    assert [each.turn.went_on for each in all_of_it.completions] == [k % 2 == 1 and k < 11 for k in range(12)]
    assert len(made) == len(set(made)) <= 12
