"""An environment in which one turn decides the outcome, and the other turns are decoys with rewards of their own.

The rows are chains of operations (`dataset_name: chain`) with the number `decisive` of the deciding call, from 0. That
call is computed as it is written, and the outcome is 1 if it was the chain's operation. Every other call returns the
chain's next value, whatever it says: it cannot harm the outcome, and earns `DECOY` if it was the chain's operation.
"""

import re
import sys
from collections.abc import Hashable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from mt_grpo import ToolResult
from tools.step_calculator import calculator as compute

DECOY = 0.3


class Bifurcation:
    def reset(self, question: str, decisive: int, **row) -> None:
        self.value, *self.operations = re.findall(r"\d+|[-+*] \d+", question)
        self.decisive, self.number, self.right = decisive, 0, False

    def calculator(self, expression: str) -> ToolResult:
        """Compute one operation on two integers.

        Args:
            expression: Two integers with + - or * between them, for example 17 * 3

        Returns:
            The value of the expression.
        """
        asked = compute(expression)
        if self.number == len(self.operations):
            return ToolResult(asked)
        planned = compute(f"{self.value} {self.operations[self.number]}")
        decides = self.number == self.decisive
        self.right |= decides and asked == planned
        self.value, self.number = asked if decides else planned, self.number + 1
        return ToolResult(self.value, reward=None if decides else DECOY * (asked == planned))

    def get_reward(self) -> float:
        return float(self.right)

    def state_key(self) -> Hashable:
        return self.number, self.value


ENVIRONMENT = Bifurcation
