"""Rows that share a prompt: every token has the logprob, entropy and gradient that it has in a row of its own."""

import random
from types import SimpleNamespace

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from trl.trainer.utils import add_fused_lm_head

from mt_grpo.rollout import Context, Record, Rollout, Turn
from mt_grpo.training import shared_prompts
from mt_grpo.training.layouts import why_not_in_model
from mt_grpo.training.passes import TrainedRow, fill
from mt_grpo.training.shared_prompts import Example, SharedRow, forward_inputs, take_shared_rows

SIZES = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)

SHARES = {
    "llama": transformers.LlamaConfig(**SIZES),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=8),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=None),
    "phi3": transformers.Phi3Config(**SIZES, sliding_window=None),
    "olmo2": transformers.Olmo2Config(**SIZES),
    "glm": transformers.GlmConfig(**SIZES, head_dim=8),
    "starcoder2": transformers.Starcoder2Config(**SIZES, residual_dropout=0.0, embedding_dropout=0.0),
    "gpt2": transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=128, resid_pdrop=0.0,
                                    embd_pdrop=0.0, attn_pdrop=0.0),
    "gpt_neox": transformers.GPTNeoXConfig(**SIZES),
    "a mixture of experts": transformers.Qwen3MoeConfig(**SIZES, **MOE, head_dim=8),
}  # fmt: skip

REASONS = {
    "a sliding window": (transformers.MistralConfig(**SIZES, sliding_window=16), "sliding"),
    "windows in some layers": (transformers.Gemma2Config(**SIZES, head_dim=8), "sliding_attention"),
    "sinks": (transformers.GptOssConfig(**SIZES, num_local_experts=2, head_dim=8, layer_types=["full_attention"] * 2),
              "'eager'"),
    "linear attention": (transformers.Qwen3NextConfig(**SIZES, **MOE, head_dim=8), "linear_attention"),
    "convolutions": (transformers.Lfm2Config(**SIZES, full_attn_idxs=[0]), "conv"),
    "mamba": (transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2), "linear_attention"),
    "dropout": (transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4), "dropout of 0.1"),
    "dropout of the attention": (transformers.LlamaConfig(**SIZES, attention_dropout=0.2), "dropout of 0.2"),
}  # fmt: skip


def random_examples(seed: int) -> dict[int, Example]:
    """Of three prompts, one of them a single token; completions without a wanted token, and empty ones."""
    rng = random.Random(seed)

    def ids(count):
        return [rng.randrange(3, 97) for _ in range(count)]

    prompts = [ids(11), ids(1), ids(24)]
    examples = {}
    for number in rng.sample(range(20), 9):
        prompt, length = rng.choice(prompts), rng.choice((0, 1, 3, 8, 19))
        scored = [int(rng.random() < 0.7) for _ in range(length)] if rng.random() < 0.8 else [0] * length
        examples[number] = Example(list(prompt), ids(length), scored)
    return examples


def alone(model, example: Example) -> torch.Tensor:
    """Logprobs and entropies of a completion, (2, n), from a row that has nothing else."""
    ids = torch.tensor([example.prompt_ids + example.completion_ids])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(example.prompt_ids) - 1 : -1].float()
    logps = logits.log_softmax(-1)
    entropies = -(logps.exp() * logps).sum(-1)
    return torch.stack([logps.gather(1, ids[0, len(example.prompt_ids) :, None])[:, 0], entropies])


def make(config, seed=0):
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    for parameter in model.parameters():  # as much attention to each token as a trained model has
        torch.nn.init.normal_(parameter, std=0.3) if parameter.ndim > 1 else None
    return model


def gradients(model) -> torch.Tensor:
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return found


def check_model(model, seed: int) -> None:
    examples = random_examples(seed)
    width = max(len(example.completion_ids) for example in examples.values())
    weights = torch.randn(2, 20, width, generator=torch.Generator().manual_seed(seed))
    expected, total = torch.zeros(2, 20, width), 0.0
    for number, example in examples.items():
        if example.completion_ids:
            found = alone(model, example) * torch.tensor(example.trained)
            expected[:, number, : found.shape[1]] = found.detach()
            total = total + (found[0] * weights[0, number, : found.shape[1]]).sum()
    total.backward()
    its_gradients = gradients(model)
    row = SharedRow(examples, (20, width))
    output = model(**forward_inputs(row))
    found = torch.stack([row.spread(output.log_probs), row.spread(output.entropy)])
    (found[0] * weights[0]).sum().backward()
    assert (found.detach() - expected).abs().max() < 2e-5
    ours = gradients(model)
    assert (ours - its_gradients).abs().max() < 1e-5 * its_gradients.abs().max()


@pytest.mark.parametrize("name", SHARES)
def test_a_token_is_what_it_is_in_a_row_of_its_own(name):
    model = make(SHARES[name])
    assert why_not_in_model(model) is None
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    take_shared_rows(model)
    assert why_not_in_model(model) is None
    for seed in range(3):
        check_model(model, seed)


@pytest.mark.parametrize("how", ["checkpointing", "adapters"])
def test_a_token_is_what_it_is_in_a_row_of_its_own_with(how):
    """Checkpointing computes the attention again in the backward pass, when another row may be laid out."""
    model = make(SHARES["qwen3"])
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    if how == "adapters":
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.0, r=4))
        assert why_not_in_model(model) is None
        for name, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, std=0.3) if "lora_B" in name else None
    take_shared_rows(model)
    if how == "checkpointing":
        model.train()
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
        assert model.is_gradient_checkpointing
        rows = [SharedRow(random_examples(seed), (20, 19)) for seed in range(2)]
        outputs = [row.spread(model(**forward_inputs(row)).log_probs).sum() for row in rows]
        sum(outputs).backward()  # the first row's layers are computed again when the second one is the present one
        together = gradients(model)
        model.gradient_checkpointing_disable()
        for row in rows:
            row.spread(model(**forward_inputs(row)).log_probs).sum().backward()
        assert (together - gradients(model)).abs().max() < 1e-5 * together.abs().max()
    check_model(model, 1)


def test_ordinary_rows_are_read_as_by_sdpa():
    """With padding on both sides, and while tokens are sampled with a cache."""
    model = make(SHARES["llama"]).eval()
    ids = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[1, 9:] = 0
    before = model(input_ids=ids, attention_mask=mask).logits
    sampled = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    for _ in range(2):  # two trainers of one model
        take_shared_rows(model)
    assert len(model.base_model._forward_hooks) == 1
    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, before)
    assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False), sampled)
    assert shared_prompts.NAME not in model.config.to_json_string()


@pytest.mark.parametrize("name", REASONS)
def test_a_model_that_cannot_share_says_why(name):
    config, expected = REASONS[name]
    found = why_not_in_model(make(config))
    assert found is not None and expected in found


def test_a_layer_that_mixes_tokens_is_found_while_its_weights_are_zero():
    model = make(SHARES["qwen3"])
    model.base_model.layers[0].mlp.mixing = torch.nn.Conv1d(4, 4, 3)
    assert "mixes tokens otherwise than by attention (model.layers.0.mlp.mixing" in why_not_in_model(model)


def test_what_records_begin_with_stands_once():
    """A system prompt of two groups, and a history that was edited behind its first turn.

    Tokens 0 to 19 are of both groups. Records 0 and 1 go on with 20 to 39; 20 is the last of record 0's prompt, and
    record 1 has all of it as its prompt. What is alike in fewer than 16 tokens would stand twice.
    """
    system = list(range(20))
    examples = {
        0: Example([*system, 20], [*range(21, 40), 50, 51], [1] * 21),
        1: Example([*system, *range(20, 40), 60], [61, 62], [1, 1]),
        2: Example([*system, 70], [71, 72, 73], [1, 1, 1]),
        3: Example([*system, 70], [71, 72, 74], [1, 1, 1]),
    }
    row = SharedRow(examples, (4, 21))
    assert list(zip(row.sizes, row.reads)) == [
        (20, (0,)),  # of all
        (1, (0, 1)), (19, (0, 1, 2)),  # 20, and 21 to 39
        (1, (0, 1, 2, 3)), (1, (0, 1, 2, 4)), (1, (0, 1, 2, 4, 5)),  # 50; 60, and 61
        (1, (0, 6)), (2, (0, 6, 7)),  # 70; 71 and 72, of both
    ]  # fmt: skip
    assert row.input_ids[0].tolist() == [*system, 20, *range(21, 40), 50, 60, 61, 70, 71, 72]
    assert row.position_ids[0].tolist() == [*range(40), 40, 40, 41, 20, 21, 22]
    model = make(SHARES["qwen3"])
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    take_shared_rows(model)
    logps = row.spread(model(**forward_inputs(row)).log_probs)
    for number, example in examples.items():
        expected = alone(model, example)[0]
        assert (logps[number, : len(expected)] - expected).abs().max() < 1e-5


def test_a_tree_gives_back_what_was_put_in():
    """Random sequences over two letters, which have much in common: each one is read along its path, at its places."""
    rng = random.Random(0)
    for _ in range(200):
        examples = {}
        for number in range(rng.randint(1, 8)):
            prompt = [rng.choice((3, 4)) for _ in range(rng.choice((1, 2, 17, 30)))]
            if examples and rng.random() < 0.7:
                other = rng.choice(list(examples.values()))
                whole = other.prompt_ids + other.completion_ids
                prompt = whole[: rng.randint(1, len(whole))]
            length = rng.choice((1, 5, 20))
            examples[number] = Example(prompt, [rng.choice((3, 4)) for _ in range(length)], [1] * length)
        row = SharedRow(examples, (8, 20))
        ids, starts = row.input_ids[0].tolist(), [sum(row.sizes[:k]) for k in range(len(row.sizes))]
        at = 0
        for example in examples.values():
            whole, length = example.prompt_ids + example.completion_ids, len(example.prompt_ids)
            for k, label in enumerate(example.completion_ids):
                place, before = row.scored[at].item(), whole[: length + k]
                number = max(n for n, start in enumerate(starts) if start <= place)
                read = [starts[c] + i for c in row.reads[number][:-1] for i in range(row.sizes[c])]
                read += range(starts[number], place + 1)
                assert [ids[i] for i in read] == before and row.labels[0, at] == label
                assert row.position_ids[0, place] == len(before) - 1
                at += 1
        assert at == len(row.scored)
    row = SharedRow({1: Example([4, 5], [6], [0])}, (2, 2))
    assert (row.input_ids.tolist(), row.position_ids.tolist(), row.labels.tolist()) == ([[5]], [[0]], [[-100]])
    assert row.spread(torch.tensor([[9.0]])).tolist() == [[0, 0], [0, 0]]


def random_traces(seed: int) -> list[Rollout]:
    """Eight rollouts of an agent. All share their first turns, and half of them share some more.

    Each history is compacted twice, anywhere: to the prompt, a summary, and the last result.
    """
    rng = random.Random(seed)

    def ids(least, most):
        return [rng.randrange(3, 97) for _ in range(rng.randint(least, most))]

    def turns(least, most):
        return [(ids(1, 6), ids(3, 40)) for _ in range(rng.randint(least, most))]

    prompt, of_all, of_half, rollouts = ids(30, 50), turns(1, 3), turns(0, 2), []
    for index in range(8):
        rollouts.append(rollout := Rollout([], prompt, index))
        parts = of_all + of_half * (index % 2) + turns(2, 4)
        compacted = rng.sample(range(1, len(parts)), 2)
        for k, (sampled, result) in enumerate(parts):
            read = prompt + ids(10, 20) + rollout.turns[-1].observation_ids if k in compacted else None
            own = {"context": read and Context([], read), "trained": rng.random() < 0.9}
            rollout.turns.append(Turn(sampled, None, "", "stop", observation_ids=result, **own))
    return rollouts


def trained_rows(records: list[Record]) -> list[TrainedRow]:
    return [TrainedRow(r.prompt_ids, r.completion_ids, r.loss_mask, {}, n) for n, r in enumerate(records)]


@pytest.mark.parametrize("seed", range(3))
def test_agents_have_the_gradient_of_a_row_per_turn(seed, monkeypatch):
    """In one pass, and in passes of few tokens. Long segments are computed in several blocks."""
    monkeypatch.setattr(shared_prompts, "BLOCK", 16)
    model = make(SHARES["qwen3"], seed)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    take_shared_rows(model)
    records = [record for rollout in random_traces(seed) for record in rollout.records]
    rows = trained_rows(records)
    shape = len(rows), max(len(row.completion_ids) for row in rows)
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    for number, record in enumerate(records):
        start = 0
        for turn in record.turns:
            read, end = record.prompt_ids + record.completion_ids[:start], start + len(turn.token_ids)
            if turn.trained:
                (alone(model, Example(read, turn.token_ids, []))[0] * weights[number, start:end]).sum().backward()
            start = end + len(turn.observation_ids)
    dense = gradients(model)
    for max_tokens_per_pass, least in ((10_000, 1), (300, 3)):
        passes = fill(rows, max_tokens_per_pass, shares=True)
        assert len(passes) >= least
        for each in passes:
            row = SharedRow({one.number: one for one in each}, shape)
            assert len(row) <= max_tokens_per_pass or len(each) == 1
            (row.spread(model(**forward_inputs(row)).log_probs) * weights).sum().backward()
        assert (gradients(model) - dense).abs().max() < 1e-5 * dense.abs().max()


def test_a_kernel_for_sequences_reads_what_sdpa_reads(monkeypatch):
    """A stand-in computes each sequence by itself, its causal mask aligned at the end, as flash attention does.

    SDPA computes longer segments in blocks, with views of one mask.
    """
    calls = []
    monkeypatch.setattr(shared_prompts, "BLOCK", 5)

    def kernel(query, key, value, queries_end, keys_end, max_queries, max_keys, *, scale, window_size, enable_gqa):
        calls.append((max_queries, max_keys, window_size))
        assert queries_end.dtype == keys_end.dtype == torch.int32
        outputs = []
        for k in range(len(queries_end) - 1):
            own, (start, stop) = query[queries_end[k] : queries_end[k + 1]], keys_end[k : k + 2]
            mask = torch.ones(len(own), stop - start, dtype=torch.bool).tril(stop - start - len(own))
            inputs = [x.transpose(0, 1)[None] for x in (own, key[start:stop], value[start:stop])]
            attend = torch.nn.functional.scaled_dot_product_attention
            outputs.append(attend(*inputs, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)[0])
        return torch.cat([each.transpose(0, 1) for each in outputs])

    generator = torch.Generator().manual_seed(0)
    row = SharedRow(random_examples(3), (20, 19))
    query, key, value = (torch.randn(1, heads, len(row), 8, generator=generator) for heads in (4, 2, 2))
    expected, _ = shared_prompts.attention(SimpleNamespace(), query, key, value, None, 0.3, shared_row=row)
    assert [mask.shape[0] for mask in row._masks.values()] == [5 + 7] and max(row.sizes) > 15
    found = shared_prompts.by_kernel(kernel, query, key, value, row, 0.3)
    assert found.shape == expected.shape and (found - expected).abs().max() < 1e-6
    assert calls == [(max(row.sizes), max(row.num_keys), (-1, 0))]
    assert shared_prompts.kernel_of(query, key) is None  # on a CPU
