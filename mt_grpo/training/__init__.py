"""From rollouts to the loss: rewards, records and tensors.

tensors         rows of unequal length as tensors; statistics without NaN
records         rollouts as rows of the loss
batch           the rollouts that one step samples, scores, trains and logs
shared_prompts  one row per prompt, and the attention that reads it
passes          which rows go together in a forward pass, and what a pass counts
pass_metrics    TRL's metrics of a loss that is a sum over passes
layouts         how a run's rows are laid out, why, and the proof of it
further_credit  estimators of credit other than MT-GRPO
policy_scores   logprobs under the policy, for reward functions
refill          replaces groups without signal by groups of further prompts
reward_numbers  validation of their values
rewards         the reward functions of a run
token_checks    checks that training reads the tokens of inference
"""
