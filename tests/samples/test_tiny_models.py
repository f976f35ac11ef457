"""The bundled calculator model of the format hermes calls its tool, and learns."""

from statistics import mean

import pytest
from project import trained

RECIPE = "hf_recipes/tiny/calculator-hermes.yaml"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_hermes_model_learns(tmp_path):
    """The whole recipe: minutes on two cores."""
    steps = trained(RECIPE, tmp_path)
    exact = [row["rewards/exact_match_reward_func/mean"] for row in steps]
    assert len(exact) == 75 and mean(exact[:3]) < 0.6 and mean(exact[-10:]) > 0.8
    failures = [row["tools/failure_frequency"] for row in steps]
    assert mean(failures[:3]) > 0.1 and mean(failures[-10:]) < 0.05
