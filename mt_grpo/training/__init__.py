"""From rollouts to the loss: rewards, records and tensors.

batch           the rollouts that one step samples, scores, trains and logs, and their records
policy_scores   logprobs under the policy, for reward functions
rewards         the reward functions of a run, and their values as tensors
further_credit  estimators of credit other than MT-GRPO, checks of advantages, groups without signal
shared_prompts  one row per prompt, and the attention that reads it
passes          which rows go together in a forward pass, and what a pass counts
pass_metrics    the importance ratio, and metrics of a loss that is a sum over passes
layouts         how a run's rows are laid out, why, and the proof of it
token_checks    checks that training reads the tokens of inference
"""
