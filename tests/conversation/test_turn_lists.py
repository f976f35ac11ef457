"""The lists of a rollout's turns, checked once it is over."""

from types import SimpleNamespace

from mt_grpo.conversation.environments import first_unknown, num_ids


class Vocabulary(SimpleNamespace):
    __hash__ = object.__hash__

    def __len__(self):
        return len(self.vocab)

    def get_vocab(self):
        return self.vocab


def test_ids_may_have_gaps():
    """By hand: three tokens, the greatest id is 7. A length of 3 would call 7 unknown. What is added later counts."""
    tokenizer = Vocabulary(vocab={"a": 0, "b": 1, "<end>": 7})
    assert num_ids(tokenizer) == 8 and first_unknown([0, 7, 1], 8) is None and first_unknown([0, 8], 8) == 8
    tokenizer.vocab["<tool>"] = 11
    assert num_ids(tokenizer) == 12
