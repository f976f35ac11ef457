"""Any split of one batch over ranks, accumulation, steps and records has the same gradient and the same metrics."""

import pytest
import random_batches as batches
from records_batch import distance
from test_distributed import run as run_worker

CLOSE = 1e-5  # of a gradient's largest entry, in float32
SEED = 9  # of a batch in which 12 of 16 rollouts have a score
ONE = batches.SPLITS[1]
OF_SEQUENCES = ("low_min", "high_max")  # an extreme of records


def assert_alike(found, expected, of_records=False):
    (gradient, log), (whole, logged) = found, expected
    assert distance(whole, gradient) < CLOSE
    assert log.keys() == logged.keys() and len(log) > 2
    for name, value in logged.items():
        if not (of_records and name.endswith(OF_SEQUENCES)):
            assert log[name] == pytest.approx(value, abs=1e-5, rel=1e-4), name


@pytest.fixture(scope="module")
def whole(random_model, tmp_path_factory):
    """The batch in one pass of one rank, by loss and seed."""
    out, found = tmp_path_factory.mktemp("whole"), {}

    def get(loss_type, seed=0):
        if (loss_type, seed) not in found:
            found[loss_type, seed] = batches.train_split(
                random_model, out / f"{loss_type} {seed}", "shared", ONE["whole"], loss_type, seed
            )
        return found[loss_type, seed]

    return get


@pytest.mark.parametrize("loss_type", batches.LOSSES)
def test_rollouts_without_a_score_might_as_well_not_be_there(random_model, tmp_path, loss_type):
    """12 of 16 have a score. The others are in no sum, no divisor and no term, the KL included."""
    found, alone = (
        batches.train_split(random_model, tmp_path / name, "shared", split, loss_type, seed=SEED, **settings)
        for name, split, settings in (("16", (16, 1, 1), {}), ("12", (12, 1, 1), {"only_scored": 16}))
    )
    assert_alike(found, alone)


def test_means_over_tokens_do_not_depend_on_the_loss(whole):
    """`grpo` weighs each token by its rollout's length, and its metrics do not."""
    weighted, plain = whole("grpo")[1], whole("dapo")[1]
    names = ("entropy", "kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")
    assert [weighted[name] for name in names] == pytest.approx([plain[name] for name in names], rel=1e-4)
    assert min(plain[name] for name in names) > 0.01


OF_MICRO_BATCH = "bnpo"  # TRL divides it by the tokens of a rank's micro-batch


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("loss_type", sorted(set(batches.LOSSES) - {OF_MICRO_BATCH}))
def test_steps_and_accumulation_change_nothing(random_model, tmp_path, whole, loss_type, seed):
    for name, layout in (("accumulated", "shared"), ("two steps", "shared"), ("accumulated", "trl")):
        found = batches.train_split(random_model, tmp_path / f"{name} {layout}", layout, ONE[name], loss_type, seed)
        assert_alike(found, whole(loss_type, seed))


@pytest.mark.parametrize("loss_type", [name for name, (_, of_tokens) in batches.LOSSES.items() if of_tokens])
def test_records_change_nothing(random_model, tmp_path, whole, loss_type):
    split = ONE["whole" if loss_type == OF_MICRO_BATCH else "accumulated"]
    found = batches.train_split(random_model, tmp_path, "shared", split, loss_type, cut=True)
    assert_alike(found, whole(loss_type), of_records=True)


@pytest.fixture(scope="module")
def of_ranks(random_model, tmp_path_factory):
    return run_worker(2, random_model, tmp_path_factory.mktemp("ranks"), "splits")


@pytest.mark.parametrize("split", batches.SPLITS[2])
@pytest.mark.parametrize("loss_type", sorted(set(batches.LOSSES) - {OF_MICRO_BATCH}))
def test_ranks_change_nothing(whole, of_ranks, loss_type, split):
    for rank in of_ranks:
        assert_alike(rank[f"{loss_type} {split}"], whole(loss_type))
