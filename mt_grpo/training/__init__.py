"""What the loss sees: rollouts become rewards, records and tensors.

tensors         rows of unequal length as tensors; statistics without NaN
records         rollouts as rows of the loss
batch           what one step rolls out, scores, trains and logs
shared_prompts  one row per prompt, and the attention that reads it
passes          which rows go together in a forward pass, and what a pass counts
pass_metrics    TRL's metrics of a loss that is a sum over passes
layouts         how a run's rows are laid out, why, and the proof of it
further_credit  estimators of credit beside MT-GRPO
policy_scores   what a reward function may ask the policy
refill          groups without signal give way to groups of further prompts
reward_errors   where a reward function raised, and for which rollout
reward_calls    what reward functions get, and running them within their time limits
reward_numbers  what they gave, as checked numbers
whole_groups    reward functions that see whole groups, also where one lies on several ranks
rewards         the reward functions of a run
token_checks    whether training reads the tokens of inference
"""
