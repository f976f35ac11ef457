"""What the loss sees: rollouts become rewards, records and tensors. Which prompts are in flight belongs to it.

tensors         rows of unequal length as tensors; statistics without NaN
reward_calls    a reward in the main thread, within a time limit
reward_errors   where a reward function raised, and for which rollout
rewards         running reward functions, and checking what they return
records         rollouts as rows of the loss, in passes
token_checks    whether training reads the tokens of inference
in_flight       which groups a step takes, and prompts seen early
"""
