"""What the loss sees: rollouts become rewards, records and tensors.

tensors         rows of unequal length as tensors; statistics without NaN
records         rollouts as rows of the loss, in passes
batch           what one step rolls out, scores, trains and logs
reward_errors   where a reward function raised, and for which rollout
reward_calls    what reward functions get, and running them within their time limits
reward_numbers  what they gave, as checked numbers
rewards         the reward functions of a run
unused_rewards  which numbers of rewards move an advantage
token_checks    whether training reads the tokens of inference
"""
