"""Blackjack as a text, for hf_recipes/tiny/blackjack.yaml."""

from mt_grpo import GymText


class BlackjackText(GymText):
    unfinished_reward = -1.0  # a hand that is not played costs as much as a lost one
