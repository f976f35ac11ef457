"""Where a turn ends, and the message that follows it."""

import pytest
import scripted
from scripted import ADD, ANSWER, CHATML_TOKENIZER, CLOSES_AND_MORE, QWEN3_TOKENIZER, converse, ids, make_env, result

from mt_grpo.rollout import Generation, StopReason, ToolResult


@pytest.mark.parametrize(
    "sampled, length",
    [
        (ids("no tag at all"), 13),
        ([], 0),
        (ids("<tool>{}</tool>"), 15),
        (ids("<tool>{}</tool> and on it runs"), 15),
        (ids("<answer>1</answer>\n\n"), 18),
        (ids("<tool>{}</too"), 13),
        (ids("<tool>é</tool>é"), 15),
        (ids("</tool></tool>"), 7),
        (ids("<tool></answer></tool>"), 15),
        (ids("<answer></tool></answer>"), 15),
        (ids("<answer>1</answer><tool>{}</tool>"), 18),
        ([*ids("<tool>{}</too"), CLOSES_AND_MORE, 65, 66], 14),
        ([*ids("<answer>1"), scripted.CLOSES_BOTH, 65, 66], 10),
        ([195, *ids("</tool>"), 169], 8),  # half a letter before it
    ],
)
def test_end_of_turn(sampled, length):
    cut = make_env().format_of(CHATML_TOKENIZER).cut(sampled, ids("<|im_start|>assistant\n"))
    assert cut == (length, any(tag in CHATML_TOKENIZER.decode(sampled) for tag in ("</tool>", "</answer>")))


def test_a_sample_that_runs_on_ends_where_its_tag_does():
    """Also where a backend has no stop texts. A token that holds more than the tag stays whole."""
    rollout, _ = converse(f"{ADD}<|im_end|>\n<|im_start|>user\n<result>\n6\n</result>", f"{ANSWER} or 6")
    assert rollout.completion_ids == ids(ADD + result("5") + ANSWER)
    assert [turn.finish_reason for turn in rollout.turns] == ["stop", "stop"]
    rollout, _ = converse(ADD + "x" * 100, "x" * 100, max_turn_tokens=80)
    assert [turn.finish_reason for turn in rollout.turns] == ["stop", "length"]
    assert rollout.completion_ids == ids(ADD + result("5") + "x" * 80)
    sampled = [*ids(ADD[:-2]), CLOSES_AND_MORE]
    rollout, backend = converse([*sampled, 65], ANSWER)
    assert rollout.completion_ids == sampled + ids(result("5")) + ids(ANSWER)
    assert rollout.turns[0].text == ADD + "\n"
    assert rollout.turns[0].logprobs == backend.requests[0].logprobs[:-1]


def test_a_turn_whose_budget_ends_with_its_thinking_was_cut_off():
    """Its last request may have stopped at a text; the turn did not, and says nothing behind its thinking."""
    texts = ["<think>a</tool>", "b</think>"]

    class Stops:
        async def generate(self, prompt_ids, max_tokens, sampling_params=None, index=0):
            return Generation(ids(texts[0]), [-1.0] * len(ids(texts.pop(0))), "stop")

    env = make_env(max_turn_tokens=len(ids("".join(texts))))
    (rollout,) = env.generate([[{"role": "user", "content": "?"}]], Stops())["rollouts"]
    assert rollout.turns[0].finish_reason == "length" and rollout.stop_reason == StopReason.MAX_TOKENS


def test_the_end_of_turn_is_added_only_if_the_model_did_not_sample_it():
    unclosed = '<tool>{"name": '
    rollout, _ = converse(f"{unclosed}<|im_end|>", ANSWER)
    assert rollout.turns[0].observation_ids[:6] == ids("\n<|im_start|>user")
    assert rollout.turns[0].text == unclosed
    rollout, _ = converse(unclosed, ANSWER)
    assert rollout.turns[0].observation_ids[:7] == ids("<|im_end|>\n<|im_start|>user")
    # Another end-of-text token does not end the template's turn.
    rollout, _ = converse(f"{unclosed}<|endoftext|>", ANSWER)
    assert rollout.completion_ids[:23] == ids(f"{unclosed}<|endoftext|><|im_end|>\n<|im_start|>user")
    assert rollout.turns[0].text == unclosed


@pytest.mark.parametrize("tokenizer", [CHATML_TOKENIZER, QWEN3_TOKENIZER])
@pytest.mark.parametrize("text", ["", " ", "\n", "{{ x }} {% y %}", "<think>a</think>b", "</tool>", "user", "é\n"])
def test_message_ids_of_awkward_results(text, tokenizer):
    """Nothing of a result is rendered away or taken for the template's own language."""
    written = make_env().format_of(tokenizer)
    assert written.suffix_ids([], written.results([], [ToolResult(text)]), []) == ids(result(text))
