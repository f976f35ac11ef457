"""What a fault is, and the tests that faults of several wings name."""

from dataclasses import dataclass

BATCH = "tests/method/test_batch.py::test_a_batch_is_what_was_written_by_hand"
RANKS = "tests/method/test_distributed.py::test_two_ranks_give_what_was_written_by_hand"
TRUNCATED = "tests/method/test_batch.py::test_a_rollout_is_truncated_where_its_stop_reason_says_so"
BAD_ENVIRONMENT = "tests/recipe/test_recipes.py::test_bad_environment"


@dataclass(frozen=True)
class Mutation:
    """One fault.

    Args:
        name: What is wrong then, as a short phrase.
        file: The file that is changed, relative to the project's root.
        old: Text that stands exactly once in the file.
        new: What takes its place.
        test: The pytest node ids that must notice it, separated by blanks: at least one of them fails.
    """

    name: str
    file: str
    old: str
    new: str
    test: str
