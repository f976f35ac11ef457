"""A step in passes of our own layout has the gradient of TRL's step."""

import pytest
import random_batches as batches
import records_batch
from test_distributed import run as run_worker

CLOSE = 1e-5  # of a gradient's largest entry, in float32

OF_SEQUENCES = dict(credit_assignment="outcome")  # what reads the sign of a sequence's advantage
SETTINGS = [
    *[dict(loss_type=name) for name in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo")],
    dict(loss_type="vespo", **OF_SEQUENCES),
    dict(loss_type="dapo", beta=0.1, vllm="token"),
    dict(loss_type="grpo", beta=0.1, vllm="token", num_iterations=2, max_steps=4),
    dict(loss_type="dapo", importance_sampling_level="sequence", vllm="sequence"),
    dict(loss_type="luspo", importance_sampling_level="sequence", vllm="sequence", beta=0.05),
    dict(loss_type="vespo", vllm="sequence", **OF_SEQUENCES),
    dict(loss_type="grpo", vllm="token", off_policy_mask_threshold=0.02, **OF_SEQUENCES),
    dict(loss_type="dapo", vllm="token", delta=1.5),
    dict(loss_type="bnpo", vllm="token", beta=0.1),
    dict(loss_type="grpo", top_entropy_quantile=0.5),
    dict(loss_type="dapo", entropy_coef=0.01),
    dict(loss_type="dapo", gradient_accumulation_steps=1, steps_per_generation=2, vllm="token"),  # two steps per batch
    dict(loss_type="grpo", gradient_accumulation_steps=4, steps_per_generation=2),  # two batches per step
    dict(loss_type="grpo", gradient_accumulation_steps=3, steps_per_generation=2, vllm="token"),
    dict(loss_type="dapo", gradient_checkpointing=True),
    dict(loss_type="grpo", gradient_accumulation_steps=1, vllm="token", beta=0.1, per_device_train_batch_size=8),
    dict(
        loss_type="dapo",
        gradient_accumulation_steps=1,
        importance_sampling_level="sequence",
        vllm="sequence",
        per_device_train_batch_size=8,
    ),
    dict(loss_type="dapo", further=True, beta=0.1),
    dict(loss_type="grpo", further=True, vllm="token"),
    dict(loss_type="sapo", further=True, gradient_accumulation_steps=1, seed=1),
    dict(loss_type="bnpo", further=True),
]


def distance(one, other):
    """The largest difference, as a share of the largest entry, over all steps."""
    assert one.shape == other.shape and one.abs().amax(1).min() > 1e-6
    return ((one - other).abs().amax(1) / one.abs().amax(1)).max().item()


def metrics(log):
    """Those of the loss: TRL makes them in each pass, and of passes with different numbers of tokens."""
    return {key: value for key, value in log.items() if key.startswith(("clip", "cispo", "vespo", "entropy", "kl"))}


@pytest.fixture(scope="module")
def of_trl(random_model, tmp_path_factory):
    """Gradients and logs of TRL's own layout, made once for each setting."""
    found = {}

    def get(settings):
        key = repr(settings)
        if key not in found:
            found[key] = batches.train(random_model, tmp_path_factory.mktemp("trl"), "trl", settings)
        return found[key]

    return get


@pytest.mark.parametrize("layout", ["shared", "padded"])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda each: " ".join(f"{k}={v}" for k, v in each.items()))
def test_a_step_has_trls_gradient(random_model, tmp_path, of_trl, settings, layout):
    expected = of_trl(settings)
    whole = batches.train(random_model, tmp_path / "whole", layout, settings)
    found_in = [whole]
    if not {"top_entropy_quantile", "entropy_coef"} & settings.keys():  # with these a micro-batch is one pass
        found_in.append(batches.train(random_model, tmp_path / "cut", layout, settings, max_tokens_per_pass=80))
    for found in found_in:
        assert distance(expected["gradients"], found["gradients"]) < CLOSE
        for theirs, ours in zip(expected["log"], found["log"], strict=True):
            assert set(theirs) == set(ours)
            if "loss" in theirs:
                assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-6)
                assert metrics(ours) == pytest.approx(metrics(whole["log"][theirs["step"] - 1]), abs=1e-5, nan_ok=True)
                if settings.get("gradient_accumulation_steps") == 1 and "further" not in settings:
                    assert metrics(ours) == pytest.approx(metrics(theirs), abs=1e-5, nan_ok=True)


# -- no pass before the step --


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_the_losss_own_pass_says_what_a_pass_before_it_said(random_model, tmp_path, mode, beta):
    """Gradient and metrics of importance sampling are TRL's, and the policy is read once less."""
    settings = dict(ratios=records_batch.Unknown, mode=mode, cut=1.4, beta=beta, loss_type="dapo")
    settings |= dict(least=0.7) if mode.startswith("token") else {}
    settings |= records_batch.LAYOUTS["accumulated"]
    ours = records_batch.train(random_model, tmp_path / "ours", **settings)
    theirs = records_batch.train(random_model, tmp_path / "theirs", share_prompts=False, **settings)
    reference = int(beta > 0)
    assert (ours["passes"], theirs["passes"]) == (reference, reference + 1)
    assert distance(theirs["gradients"], ours["gradients"]) < CLOSE
    names = [name for name in theirs["log"] if name.startswith("sampling/")]
    assert len(names) == 7 and theirs["log"]["sampling/sampling_logp_difference/max"] > 0.1
    for name in names:
        assert ours["log"][name] == pytest.approx(theirs["log"][name], abs=1e-4), name


@pytest.mark.parametrize(
    "settings",
    [
        dict(mode="token_mask", old_logps="sampled", **records_batch.LAYOUTS["accumulated"]),
        dict(log_rollout_tokens=True, **records_batch.LAYOUTS["accumulated"]),
        dict(num_iterations=2, max_steps=2),
        records_batch.LAYOUTS["two steps"],
        dict(share_prompts=False),
    ],
    ids=" ".join,
)
def test_the_pass_before_the_step_stays_with(random_model, tmp_path, settings):
    assert records_batch.train(random_model, tmp_path, ratios=records_batch.Near, **settings)["passes"] == 1


# -- two ranks --


@pytest.fixture(scope="module")
def by_rank(random_model, tmp_path_factory):
    return run_worker(2, random_model, tmp_path_factory.mktemp("ranks"), "passes")


@pytest.mark.parametrize("layout", ["shared-None", "shared-80", "padded-120"])
@pytest.mark.parametrize("name", batches.ON_RANKS)
def test_two_ranks_have_trls_gradient(by_rank, name, layout):
    """As many passes on both, of as many rows; where one has more tokens, rows go to the other."""
    tokens, rows = [], []
    for rank in by_rank:
        expected, theirs, _, _ = rank[f"{name}-trl-None"]
        gradients, log, *sizes = rank[f"{name}-{layout}"]
        assert distance(expected, gradients) < CLOSE
        assert log["loss"] == pytest.approx(theirs["loss"], abs=1e-6)
        tokens.append(sizes[0])
        rows.append(sizes[1])
    assert rows[0] == rows[1] and len(tokens[0]) == len(tokens[1])
    sums = [sum(each) for each in tokens]
    if batches.ON_RANKS[name].get("uneven") and name != "a group on two ranks":
        assert max(sums) < 1.35 * min(sums)
