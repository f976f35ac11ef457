"""Any split of one batch over ranks, accumulation, steps and records has the same gradient and the same metrics."""

import pytest
import random_batches as batches
from records_batch import distance
from test_distributed import run as run_worker

CLOSE = 1e-5  # of a gradient's largest entry, in float32
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
