"""What the loss sees: rollouts become rewards, records and tensors. Which prompts are in flight belongs to it.

tensors         rows of unequal length as tensors; statistics without NaN
records         rollouts as rows of the loss, in passes
batch           what one step rolls out, scores, trains and logs
reward_calls    a reward in the main thread, within a time limit
reward_errors   where a reward function raised, and for which rollout
reward_runs     what reward functions get, and running them
reward_numbers  what they gave, as checked numbers
rewards         the reward functions of a run
reward_use      which numbers of rewards move an advantage
token_checks    whether training reads the tokens of inference
in_flight       which groups a step takes, and prompts seen early
"""
