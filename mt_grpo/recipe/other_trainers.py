"""Keys of ms-swift, verl and TRL that have another name here, or that nothing here needs.

A recipe that came from one of them meets an unknown key first. The nearest known name would be a wrong hint, so it
is looked up here. The names are those of ms-swift 4.6 (`swift/arguments`, `swift/rlhf_trainers`, `swift/trainers`),
verl 0.10 (`verl/trainer/config/_generated_ppo_trainer.yaml`), TRL 0.14 to 1.9 and transformers 4.57. `docs/moving.md`
lists those that have another name.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any


def alike(words: str, *keys: str) -> dict[str, str]:
    """The same words for several keys, which stand in texts, between spaces."""
    return dict.fromkeys(" ".join(keys).split(), words)


REWARD_MODEL = (
    "reward models are not loaded by name. Write a function in the file of `reward_fn`: it runs the model, or asks it "
    "over HTTP as rewards/judge_reward.py does"
)
DISTILLATION = "there is no teacher model. Remove it"
OTHER_METHOD = "it belongs to another method. Training is always by GRPO, and credit_assignment says which. Remove it"
CRITIC = "there is no critic: advantages are compared within a group. Remove it"
REFERENCE = "the reference is the model as the run begins, where `beta` is above 0. Remove it"
OF_THE_SERVER = "it is an option of the server. Pass it to `vllm serve`, or remove it"
LAUNCHED = "the launcher says so: `accelerate launch`, or scripts/train.sh. Remove it"
SHARDED = "shards are of accelerate: `accelerate launch --config_file hf_recipes/accelerate/zero3.yaml`. Remove it"
BY_TRANSFORMERS = "transformers has it no more. Remove it"
SIDE_BY_SIDE = "batches are padded, and nothing is packed. Remove it"
FROM_THE_DATA = "data are JSON lines, or of the Hub, and are read whole. Remove it, and see docs/recipes.md"
IMAGES = "images are read as the model's own processor reads them. Remove it; `freeze_vision_tower` is ours"
QUANTISED = "quantised weights cannot be pushed to a server: train a LoRA on bf16 weights. Remove it"
OF_A_LORA = "LoRA, with `use_peft: true`, is the only adapter, and has peft's defaults. Remove it"
ALL_WEIGHTS = "all weights are trained, or a LoRA. Remove it"
MEMORY = "it only moves memory. Remove it; `vllm_enable_sleep_mode` frees a colocated engine's"
SWANLAB = "SwanLab reads its own environment variables. Write `report_to: swanlab`, and set them under `env`"
EVALUATED = "scripts/evaluate.py evaluates a model on the test rows. Remove it"
OF_THE_MODEL = "it is read from the model's own files. Remove it"
TEMPLATE = "the tokenizer's own chat template is used. Remove it; `chat_template_kwargs` are its arguments"
NEVER_CUT = "a prompt that does not fit is an error, and never cut. Remove it; `max_completion_length` bounds the rest"
REFILLED = "write `refill_groups`: batches of further prompts that a step may sample in place of groups without signal"
SCALED = "the reward has its default. Register a subclass in `external_plugins` for another value"
PATTERN = "one pattern cannot fit tool turns and answer turns alike. Remove it"
SHARE = "write `warmup_steps`: a number below 1 is a share of all steps"
HELD_OUT = "write `dataset_name`: a folder with train.jsonl and test.jsonl"
FULL_OR_LORA = "write `use_peft: true` for a LoRA, or nothing for all weights"
TEMPLATE_THINKS = "write `chat_template_kwargs: {enable_thinking: false}`, with the template's own names"

# Their key -> ours, where the text is one word; else what to do.
SWIFT_KEYS = {
    "model": "model_name_or_path", "model_id_or_path": "model_name_or_path", "torch_dtype": "dtype",
    "attn_impl": "attn_implementation", "dataset": "dataset_name", "cached_dataset": "dataset_name",
    "system": "system_prompt", "agent_template": "tool_format", "lora_rank": "lora_r",
    "target_modules": "lora_target_modules", "target_regex": "lora_target_modules",
    "target_parameters": "lora_target_parameters", "modules_to_save": "lora_modules_to_save",
    "max_new_tokens": "max_completion_length", "response_length": "max_completion_length",
    "vllm_max_model_len": "vllm_max_model_length", "vllm_server_group_port": "vllm_group_port",
    "async_generate": "overlap_rollouts", "tau_pos": "sapo_temperature_pos", "tau_neg": "sapo_temperature_neg",
    "sleep_level": "vllm_enable_sleep_mode", "overlong_filter": "mask_truncated_completions",
    "advantage_estimator": "credit_assignment", "off_policy_sequence_mask_delta": "off_policy_mask_threshold",
    "rollout_importance_sampling_mode": "vllm_importance_sampling_mode",
    "rollout_importance_sampling_threshold": "vllm_importance_sampling_clip_max",
    "wandb_log_unique_prompts": "log_unique_prompts", "dataset_shuffle": "shuffle_dataset",
    "train_dataloader_shuffle": "shuffle_dataset", "max_epochs": "num_train_epochs", "optimizer": "optim",
    "structured_outputs_regex": PATTERN,
    "custom_register_path": "a model and data are named by `model_name_or_path` and `dataset_name`. Remove it",
    "rlhf_type": "training is always by GRPO, and `credit_assignment` says which. Remove it",
    "device_map": "write `use_cpu: true` on a CPU. A launcher gives each process its GPU",
    "warmup_ratio": SHARE,
    "logging_dir": "set the environment variable TENSORBOARD_LOGGING_DIR, under `env`",
    "adapters": "merge the adapter into the weights, and name that folder by `model_name_or_path`",
    "resume_only_model": "name the checkpoint by `model_name_or_path`: the run begins from its weights alone",
    "log_entropy": "the mean entropy is always logged. Remove it",
    "log_rollout_offpolicy_metrics": "differences of logprobs are always logged. Remove it",
    "kl_in_reward": "the KL term is in the loss, with the weight `beta`. Remove it",
    "columns": "rename the columns in the data: `question` and `answer`, or `prompt`",
    "use_hf": "names are always of the Hub of Hugging Face. Remove it",
    "streaming": "prompts are checked before training starts. Remove it; `dataset_size` takes the first rows",
    "vllm_engine_kwargs": OF_THE_SERVER,
    "callbacks": "pass `callbacks` to the trainer, in Python",
    **alike(FULL_OR_LORA, "tuner_type train_type sft_type"),
    **alike("peft is the only one. Remove it", "tuner_backend use_swift_lora"),
    **alike(HELD_OUT, "val_dataset cached_val_dataset split_dataset_ratio eval_dataset"),
    **alike(TEMPLATE_THINKS, "enable_thinking preserve_thinking add_non_thinking_prefix response_prefix"),
    **alike(NEVER_CUT, "max_length max_model_len truncation_strategy"),
    **alike(REWARD_MODEL, "reward_model reward_model_plugin reward_adapters reward_model_type reward_model_revision",
            "reward_template"),
    **alike(DISTILLATION, "teacher_model teacher_adapters teacher_model_type teacher_model_revision teacher_deepspeed",
            "teacher_model_server offload_teacher_model teacher_kl_coef teacher_tag_key gkd_logits_topk lmbda seq_kd",
            "sft_alpha advantage_reweight rlsd_lambda rlsd_reweight_clip_range rlsd_lambda_warmup_steps",
            "rlsd_lambda_decay_steps rlsd_negative_only sdar_loss_coef sdar_gate_beta"),
    **alike(CRITIC, "num_ppo_epochs whiten_rewards kl_coef cliprange vf_coef cliprange_value gamma lam",
            "num_mini_batches local_rollout_forward_batch_size num_sample_generations missing_eos_penalty"),
    **alike(REFERENCE, "ref_model ref_adapters ref_model_type ref_model_revision"),
    **alike(OTHER_METHOD, "label_smoothing rpo_alpha ld_alpha discopop_tau loss_weights cpo_alpha simpo_gamma",
            "desirable_weight undesirable_weight center_rewards_coefficient chord_sft_dataset",
            "chord_sft_per_device_train_batch_size chord_enable_phi_function chord_mu_warmup_steps",
            "chord_mu_decay_steps chord_mu_peak chord_mu_valley real_tau fipo_decay_rate fipo_clip_range",
            "fipo_clip_high_only fipo_safety_threshold enable_dft_loss enable_channel_loss is_binary_loss_scale",
            "mrl_dims"),
    **alike(SWANLAB, "swanlab_token swanlab_project swanlab_workspace swanlab_exp_name swanlab_notification_method",
            "swanlab_webhook_url swanlab_secret swanlab_sender_email swanlab_receiver_email swanlab_smtp_server",
            "swanlab_smtp_port swanlab_email_language swanlab_mode"),
    **alike(SHARDED, "zero_hpz_partition_size deepspeed_autotp_size sequence_parallel_size"),
    **alike(ALL_WEIGHTS, "freeze_parameters freeze_parameters_regex freeze_parameters_ratio trainable_parameters",
            "trainable_parameters_regex freeze_llm llamapro_num_new_blocks llamapro_num_groups lisa_activated_layers",
            "lisa_step_interval"),
    **alike(OF_A_LORA, "lora_bias lora_dtype lorap_lr_ratio lora_ga_batch_size lora_ga_iters lora_ga_max_length",
            "lora_ga_direction lora_ga_scale lora_ga_stable_gamma init_weights fourier_n_frequency fourier_scaling",
            "boft_block_size boft_block_num boft_n_butterfly_factor boft_dropout vera_rank vera_projection_prng_key",
            "vera_dropout vera_d_initial adapter_act adapter_length adalora_target_r adalora_init_r adalora_tinit",
            "adalora_tfinal adalora_deltaT adalora_beta1 adalora_beta2 adalora_orth_reg_weight reft_layer_key",
            "reft_layers reft_rank reft_intervention_type reft_args"),
    "freeze_vit": "freeze_vision_tower",
    **alike(IMAGES, "freeze_aligner vit_gradient_checkpointing aligner_lr vit_lr max_pixels norm_bbox",
            "vllm_limit_mm_per_prompt vllm_mm_processor_cache_gb"),
    **alike(SIDE_BY_SIDE, "packing packing_length packing_num_proc packing_strategy padding_free padding_side",
            "group_by_length lazy_tokenize"),
    **alike(FROM_THE_DATA, "dataset_num_proc load_from_cache_file val_dataset_shuffle interleave_prob",
            "stopping_strategy shuffle_buffer_size download_mode strict disable_auto_column_mapping load_data_args",
            "custom_dataset_info"),
    **alike(OF_THE_MODEL, "model_type task_type num_labels problem_type new_special_tokens rope_scaling experts_impl",
            "local_repo_path init_strategy max_memory enable_npu_model_patch model_kwargs"),
    **alike(TEMPLATE, "template template_backend use_chat_template disable_ignore_empty_think"),
    **alike(QUANTISED, "quant_method quant_bits hqq_axis bnb_4bit_compute_dtype bnb_4bit_use_double_quant"),
    **alike(OF_THE_SERVER, "vllm_pipeline_parallel_size vllm_enable_expert_parallel vllm_max_num_seqs",
            "vllm_disable_custom_all_reduce vllm_enforce_eager vllm_max_lora_rank vllm_enable_prefix_caching",
            "vllm_quantization vllm_reasoning_parser vllm_disable_cascade_attn vllm_speculative_config",
            "vllm_data_parallel_size"),
    **alike("conversations never wait for each other. Remove it", "vllm_use_async_engine use_async_engine"),
    **alike("the launcher starts the server for a LoRA. Remove it", "vllm_enable_lora enable_flattened_weight_sync"),
    **alike(MEMORY, "move_model_batches offload_optimizer offload_model use_logits_to_keep"),
    **alike(SCALED, "cosine_min_len_value_wrong cosine_max_len_value_wrong cosine_min_len_value_correct",
            "cosine_max_len_value_correct cosine_max_len repetition_n_grams repetition_max_penalty soft_max_length",
            "soft_cache_length"),
    **alike(REFILLED, "dynamic_sample max_resample_times"),
    **alike("turns are sampled by `temperature`, `top_p`, `top_k` and `generation_kwargs`. Remove it",
            "num_beams stream logprobs top_logprobs"),
    **alike(EVALUATED, "eval_metric eval_use_evalscope eval_dataset_args eval_limit eval_generation_config",
            "extra_eval_args early_stop_interval"),
    **alike("write `optim: galore_adamw` with `optim_args` and `optim_target_modules`",
            "use_galore galore_target_modules galore_rank galore_update_proj_gap galore_scale galore_proj_type",
            "galore_optim_per_parameter galore_with_embedding galore_quantization galore_proj_quant galore_proj_bits",
            "galore_proj_group_size galore_cos_threshold galore_gamma_proj galore_queue_size"),
    **alike("`output_dir` is written as it is named. Remove it", "add_version create_checkpoint_symlink"),
    **alike("the recipe alone says how a run is. Remove it", "load_args ignore_args_error check_model acc_strategy"),
    **alike("weights are saved as safetensors. Remove it", "safe_serialization max_shard_size use_flash_ckpt"),
    **alike(LAUNCHED, "use_ray ray_exp_name device_groups"),
    **alike("a model has no name of its own. Remove it", "model_name model_author"),
}  # fmt: skip

# The names of TRL before 1.0 and of transformers 4, and of the scripts of TRL.
OLDER_KEYS = {
    "max_prompt_length": NEVER_CUT, "torch_dtype": "dtype", "vllm_dtype": OF_THE_SERVER, "warmup_ratio": SHARE,
    "vllm_max_model_len": "vllm_max_model_length", "vllm_guided_decoding_regex": PATTERN,
    "vllm_device": "write `vllm_mode`: a server has its own GPUs, and a colocated engine shares the trainer's",
    "vllm_enable_prefix_caching": OF_THE_SERVER, "use_liger_loss": "use_liger_kernel",
    "wandb_log_unique_prompts": "log_unique_prompts", "evaluation_strategy": "eval_strategy", "no_cuda": "use_cpu",
    "gradient_checkpointing_use_reentrant": "write `gradient_checkpointing_kwargs: {use_reentrant: false}`",
    "per_gpu_train_batch_size": "per_device_train_batch_size", "push_to_hub_model_id": "hub_model_id",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size", "push_to_hub_token": "hub_token",
    "push_to_hub_organization": "hub_model_id",
    "request_timeout": "vllm_request_timeout",
    "adafactor": "write `optim: adafactor`",
    "logging_dir": "set the environment variable TENSORBOARD_LOGGING_DIR, under `env`",
    "overwrite_output_dir": "an `output_dir` may hold an earlier run: `resume_from_checkpoint` goes on. Remove it",
    "save_safetensors": "weights are always saved as safetensors. Remove it",
    "reward_model_name_or_path": REWARD_MODEL,
    "datasets": "write one `dataset_name`: the rows of all of them, as JSON lines",
    "streaming": "prompts are checked before training starts. Remove it; `dataset_size` takes the first rows",
    "test_split_size": HELD_OUT, "train_dataset": "dataset_name", "eval_dataset": HELD_OUT,
    "tools": "tools_script", "environment_factory": "environment",
    "rollout_func": "a conversation is a class: write `environment: path.py:Class` (docs/environments.md)",
    "model": "model_name_or_path", "processing_class": OF_THE_MODEL,
    "reward_processing_classes": REWARD_MODEL,
    "peft_config": "write `use_peft: true`, `lora_r` and the like", "quantization_config": QUANTISED,
    **alike(BY_TRANSFORMERS, "use_mps_device jit_mode_eval fp16_opt_level half_precision_backend tpu_num_cores",
            "tpu_metrics_debug past_index use_legacy_prediction_loop include_inputs_for_metrics fp16_backend _n_gpu",
            "mp_parameters torchdynamo ray_scope include_tokens_per_second"),
    **alike("write `fsdp_config`", "fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap"),
    "group_by_length": SIDE_BY_SIDE,
}  # fmt: skip

STEP = "write `per_device_train_batch_size` and `gradient_accumulation_steps`, in rollouts: verl counts prompts"
IN_ROLLOUTS = "write `generation_batch_size`, in rollouts: verl's number of prompts times `num_generations`"
NOT_OF_A_STEP = "a device's batch is `per_device_train_batch_size`, with logprobs and gradients alike. Remove it"
EVAL_SAMPLING = "evaluation samples as training does, `num_generations_eval` rollouts per prompt. Remove it"
ENGINE = "it is the engine's. Pass it to `vllm serve`, or remove it"
KEYS_THEMSELVES = "Hydra puts a recipe together from several files. Write the keys themselves"
RAY = "nothing runs under Ray. Remove it"

# By the whole path of a key, or the beginning of it. What is longest counts.
VERL_KEYS = {
    "defaults": KEYS_THEMSELVES, "hydra": KEYS_THEMSELVES,
    "data": "it has no name here. Remove it",
    "data.train_files": "dataset_name", "data.train_max_samples": "dataset_size",
    "data.val_files": HELD_OUT, "data.val_max_samples": "eval_dataset_size",
    "data.tokenizer": OF_THE_MODEL, "data.max_prompt_length": NEVER_CUT, "data.truncation": NEVER_CUT,
    "data.filter_overlong_prompts": NEVER_CUT, "data.filter_overlong_prompts_workers": NEVER_CUT,
    "data.prompt_key": "rename the column in the data to `prompt`",
    "data.reward_fn_key": "a reward gets every column by its name. Remove it",
    "data.max_response_length": "max_completion_length", "data.train_batch_size": IN_ROLLOUTS,
    "data.gen_batch_size": IN_ROLLOUTS, "data.val_batch_size": "per_device_eval_batch_size",
    "data.tool_config_path": "tool_config_path", "data.function_tool_path": "function_tool_path",
    "data.shuffle": "shuffle_dataset", "data.seed": "seed",
    "data.dataloader_num_workers": "dataloader_num_workers", "data.trust_remote_code": "trust_remote_code",
    "data.apply_chat_template_kwargs": "chat_template_kwargs",
    "data.return_raw_chat": "rewards and environments always get the messages. Remove it",
    **alike(IMAGES, "data.image_patch_size data.image_key data.video_key data.audio_key",
            "data.return_multi_modal_inputs data.mm_processor_kwargs"),
    "actor_rollout_ref.actor.freeze_vision_tower": "freeze_vision_tower",
    "actor_rollout_ref": "it has no name here. Remove it",
    "actor_rollout_ref.hybrid_engine": "write `vllm_mode: colocate`, or `server`",
    "actor_rollout_ref.nccl_timeout": "ddp_timeout",
    "actor_rollout_ref.model": "it has no name here. Remove it",
    "actor_rollout_ref.model.path": "model_name_or_path",
    "actor_rollout_ref.model.trust_remote_code": "trust_remote_code",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "gradient_checkpointing",
    "actor_rollout_ref.model.lora_rank": "lora_r", "actor_rollout_ref.model.lora_alpha": "lora_alpha",
    "actor_rollout_ref.model.target_modules": "lora_target_modules",
    "actor_rollout_ref.model.lora": OF_A_LORA,
    "actor_rollout_ref.model.lora.rank": "lora_r", "actor_rollout_ref.model.lora.alpha": "lora_alpha",
    "actor_rollout_ref.model.lora.dropout": "lora_dropout",
    "actor_rollout_ref.model.lora.target_modules": "lora_target_modules",
    "actor_rollout_ref.model.lora.adapter_path": SWIFT_KEYS["adapters"],
    "actor_rollout_ref.model.lora_adapter_path": SWIFT_KEYS["adapters"],
    "actor_rollout_ref.model.use_liger": "use_liger_kernel",
    "actor_rollout_ref.model.override_config": "model_init_kwargs",
    "actor_rollout_ref.model.use_remove_padding": SIDE_BY_SIDE,
    "actor_rollout_ref.model.custom_chat_template": TEMPLATE,
    "actor_rollout_ref.model.tokenizer_path": OF_THE_MODEL, "actor_rollout_ref.model.hf_config_path": OF_THE_MODEL,
    "actor_rollout_ref.actor": "it has no name here. Remove it",
    "actor_rollout_ref.actor.rollout_n": "num_generations", "actor_rollout_ref.actor.strategy": SHARDED,
    "actor_rollout_ref.actor.fsdp_config": SHARDED, "actor_rollout_ref.actor.megatron": SHARDED,
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": SHARDED,
    "actor_rollout_ref.actor.ppo_mini_batch_size": STEP,
    "actor_rollout_ref.actor.ppo_micro_batch_size": "per_device_train_batch_size",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "per_device_train_batch_size",
    **alike(NOT_OF_A_STEP, "actor_rollout_ref.actor.use_dynamic_bsz actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
            "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz",
            "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"),
    "actor_rollout_ref.actor.clip_ratio": "epsilon", "actor_rollout_ref.actor.clip_ratio_low": "epsilon",
    "actor_rollout_ref.actor.clip_ratio_high": "epsilon_high", "actor_rollout_ref.actor.clip_ratio_c": "delta",
    "actor_rollout_ref.actor.tau_pos": "sapo_temperature_pos",
    "actor_rollout_ref.actor.tau_neg": "sapo_temperature_neg",
    "actor_rollout_ref.actor.policy_loss": "write `loss_type`, or `importance_sampling_level: sequence` for GSPO",
    "actor_rollout_ref.actor.loss_agg_mode":
        "write `loss_type`: dapo for token-mean, grpo for seq-mean-token-mean, dr_grpo for seq-mean-token-sum-norm",
    "actor_rollout_ref.actor.entropy_coeff": "entropy_coef",
    "actor_rollout_ref.actor.use_kl_loss": "write `beta`: above 0, the KL term is in the loss",
    "actor_rollout_ref.actor.kl_loss_coef": "beta",
    "actor_rollout_ref.actor.kl_loss_type": "the KL term is the estimator that verl calls low_var_kl. Remove it",
    "actor_rollout_ref.actor.ppo_epochs": "num_iterations", "actor_rollout_ref.actor.grad_clip": "max_grad_norm",
    "actor_rollout_ref.actor.data_loader_seed": "seed",
    "actor_rollout_ref.actor.checkpoint": "a checkpoint always has all that a run needs to go on. Remove it",
    "actor_rollout_ref.actor.optim": "it has no name here. Remove it",
    "actor_rollout_ref.actor.optim.optimizer": "optim", "actor_rollout_ref.actor.optim.lr": "learning_rate",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "warmup_steps",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": SHARE,
    "actor_rollout_ref.actor.optim.total_training_steps": "max_steps",
    "actor_rollout_ref.actor.optim.weight_decay": "weight_decay",
    "actor_rollout_ref.actor.optim.betas": "write `adam_beta1` and `adam_beta2`",
    "actor_rollout_ref.actor.optim.clip_grad": "max_grad_norm",
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "lr_scheduler_type",
    "actor_rollout_ref.actor.optim.warmup_style": "lr_scheduler_type",
    "actor_rollout_ref.actor.optim.min_lr_ratio": "write `lr_scheduler_kwargs: {min_lr_rate: ...}`",
    "actor_rollout_ref.actor.optim.num_cycles": "write `lr_scheduler_kwargs: {num_cycles: ...}`",
    "actor_rollout_ref.actor.optim.override_optimizer_config": "optim_args",
    "actor_rollout_ref.ref": REFERENCE,
    "actor_rollout_ref.rollout": ENGINE,
    "actor_rollout_ref.rollout.name": "write `use_vllm: true`, and `rollout_engine`: vllm or sglang",
    "actor_rollout_ref.rollout.mode": "write `vllm_mode: colocate`, or `server`",
    "actor_rollout_ref.rollout.n": "num_generations",
    "actor_rollout_ref.rollout.temperature": "temperature", "actor_rollout_ref.rollout.top_k": "top_k",
    "actor_rollout_ref.rollout.top_p": "top_p", "actor_rollout_ref.rollout.seed": "seed",
    "actor_rollout_ref.rollout.do_sample": "turns are always sampled. Remove it",
    "actor_rollout_ref.rollout.prompt_length": NEVER_CUT,
    "actor_rollout_ref.rollout.response_length": "max_completion_length",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "actor_rollout_ref.rollout.free_cache_engine": "vllm_enable_sleep_mode",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": OF_THE_SERVER,
    "actor_rollout_ref.rollout.max_model_len": "vllm_max_model_length",
    "actor_rollout_ref.rollout.nnodes": LAUNCHED, "actor_rollout_ref.rollout.n_gpus_per_node": LAUNCHED,
    "actor_rollout_ref.rollout.calculate_log_probs": "vllm_importance_sampling_correction",
    "actor_rollout_ref.rollout.over_sample_rate": "write `late_groups: admit`: no slow rollout is lost",
    "actor_rollout_ref.rollout.val_kwargs": EVAL_SAMPLING,
    "actor_rollout_ref.rollout.val_kwargs.n": "num_generations_eval",
    "actor_rollout_ref.rollout.multi_turn": "a conversation always may have several turns. Remove it",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": "max_env_steps",
    "actor_rollout_ref.rollout.multi_turn.max_user_turns": "max_env_steps",
    "actor_rollout_ref.rollout.multi_turn.max_parallel_calls": "max_parallel_calls",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path": "tool_config_path",
    "actor_rollout_ref.rollout.multi_turn.tools_config_file": "tools_config_file",
    "actor_rollout_ref.rollout.multi_turn.function_tool_path": "function_tool_path",
    "actor_rollout_ref.rollout.multi_turn.interaction_config_path": "interaction_config_path",
    "actor_rollout_ref.rollout.multi_turn.interaction_config_file": "interaction_config_file",
    "actor_rollout_ref.rollout.multi_turn.max_tool_response_length": "max_tool_response_length",
    "actor_rollout_ref.rollout.multi_turn.tool_response_truncate_side": "tool_response_truncate_side",
    "actor_rollout_ref.rollout.multi_turn.use_inference_chat_template": "use_inference_chat_template",
    "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode": "tokenization_sanity_check_mode",
    "actor_rollout_ref.rollout.multi_turn.format": "tool_format",
    "actor_rollout_ref.rollout.multi_turn.num_repeat_rollouts": "num_generations",
    "actor_rollout_ref.rollout.agent": "a conversation is a class: write `environment: path.py:Class`",
    "actor_rollout_ref.rollout.trace": "rollouts are logged in `output_dir`, `log_rollouts` per batch. Remove it",
    "critic": CRITIC, "trainer.critic_warmup": CRITIC, "trainer.max_critic_ckpt_to_keep": CRITIC,
    "reward": "rewards are functions of the file `reward_fn`. Remove it",
    "custom_reward_function.path": "reward_fn", "reward.custom_reward_function.path": "reward_fn",
    "custom_reward_function": "list the function in OUTCOME_REWARD_FUNCS of the file `reward_fn`",
    "reward.custom_reward_function": "list the function in OUTCOME_REWARD_FUNCS of the file `reward_fn`",
    "reward_manager": "rewards are functions of the file `reward_fn`. Remove it",
    "reward_model": REWARD_MODEL, "reward.reward_model": REWARD_MODEL,
    "reward_model.reward_manager": "rewards are functions of the file `reward_fn`. Remove it",
    "sandbox_fusion": "programs run by the tools of `tools_script`, such as tools/python_sandbox.py",
    "reward.sandbox_fusion": "programs run by the tools of `tools_script`, such as tools/python_sandbox.py",
    "algorithm": OTHER_METHOD,
    "algorithm.adv_estimator": "credit_assignment",
    "algorithm.norm_adv_by_std_in_grpo": "write `scale_rewards: group` for true, `none` for false",
    "algorithm.gamma": "write `turn_discount`: it is per turn, and verl's per token",
    "algorithm.use_kl_in_reward": SWIFT_KEYS["kl_in_reward"], "algorithm.kl_ctrl": SWIFT_KEYS["kl_in_reward"],
    "algorithm.kl_penalty": SWIFT_KEYS["kl_in_reward"], "algorithm.filter_groups": REFILLED,
    "algorithm.rollout_correction": "write `vllm_importance_sampling_mode` and the keys beside it",
    "algorithm.rollout_correction.rollout_is": "vllm_importance_sampling_mode",
    "algorithm.rollout_correction.rollout_is_threshold": "vllm_importance_sampling_clip_max",
    "algorithm.rollout_correction.rollout_rs": "write `vllm_importance_sampling_mode`: its _mask modes reject",
    "algorithm.rollout_correction.rollout_rs_threshold": "vllm_importance_sampling_clip_max",
    "algorithm.rollout_correction.bypass_mode": "write `old_logps: sampled` for true",
    "distillation": DISTILLATION,
    "transfer_queue": RAY, "ray_kwargs": RAY, "ray_init": RAY, "skip": RAY,
    "global_profiler": "nothing here profiles. Remove it",
    "actor_rollout_ref.actor.profiler": "nothing here profiles. Remove it",
    "trainer": "it has no name here. Remove it",
    "trainer.total_epochs": "num_train_epochs", "trainer.total_training_steps": "max_steps",
    "trainer.project_name": "set the logger's own variable, such as WANDB_PROJECT, under `env`",
    "trainer.experiment_name": "run_name", "trainer.logger": "report_to",
    "trainer.log_val_generations": "log_completions", "trainer.rollout_data_dir": "log_rollouts",
    "trainer.validation_data_dir": "log_rollouts", "trainer.nnodes": LAUNCHED, "trainer.n_gpus_per_node": LAUNCHED,
    "trainer.save_freq": "save_steps", "trainer.test_freq": "eval_steps", "trainer.default_local_dir": "output_dir",
    "trainer.resume_mode": "write `resume_from_checkpoint: last` for auto",
    "trainer.resume_from_path": "resume_from_checkpoint", "trainer.val_before_train": "eval_on_start",
    "trainer.val_only": EVALUATED, "trainer.max_actor_ckpt_to_keep": "save_total_limit",
    "trainer.device": "use_cpu", "trainer.v1": "write `max_staleness`, where rollouts may be of earlier weights",
    "trainer.ray_wait_register_center_timeout": RAY,
}  # fmt: skip


def of_verl(key: str) -> str | None:
    """What stands for a key of verl by its path, or by the last part of it, as `ppo_mini_batch_size`.

    >>> of_verl("actor_rollout_ref.rollout.n"), of_verl("critic.optim.lr")[:18], of_verl("ppo_mini_batch_size") == STEP
    ('num_generations', 'there is no critic', True)
    """
    parts = key.split(".")
    if len(parts) == 1 and key not in VERL_KEYS and "_" in key:  # `path` or `name` alone may be anybody's
        return next((words for path, words in VERL_KEYS.items() if path.endswith(f".{key}")), None)
    beginnings = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((VERL_KEYS[beginning] for beginning in beginnings if beginning in VERL_KEYS), None)


def look_up(key: str) -> tuple[str, str] | None:
    """(trainer, what to write in place of a key of it); None for a key of none.

    >>> look_up("model"), look_up("trainer.total_epochs")
    (('ms-swift', 'write `model_name_or_path`'), ('verl', 'write `num_train_epochs`'))
    """
    for trainer, words in (("ms-swift", SWIFT_KEYS.get(key)), ("TRL", OLDER_KEYS.get(key)), ("verl", of_verl(key))):
        if words is not None:
            return trainer, words if " " in words else f"write `{words}`"
    return None


def paths_of(key: str, value: Any) -> list[str]:
    """A key, or the paths of the values in a mapping of verl's, as its command line writes them.

    >>> paths_of("data", {"seed": 1, "custom_cls": {"path": "x"}}), paths_of("columns", {"a": "b"})
    (['data.seed', 'data.custom_cls.path'], ['columns'])
    """
    if not isinstance(value, dict) or not value or key in SWIFT_KEYS or key in OLDER_KEYS:
        return [key]
    return [path for name, inner in value.items() for path in paths_of(f"{key}.{name}", inner)]


def keys_elsewhere(given: dict[str, Any], known: Container[str], where: str) -> str | None:
    """The message for keys of another trainer, a line for each; None where no unknown key is of one.

    Args:
        given: Keys of a recipe or of the command line, and their values.
        known: The keys of this trainer.
        where: Where they stand, in words.
    """
    paths = [path for key, value in given.items() if key not in known for path in paths_of(str(key), value)]
    found = {path: look for path in paths if (look := look_up(path))}
    if not found:
        return None
    lines = [f"  {path} ({trainer}): {words}." for path, (trainer, words) in found.items()]
    are = "is a key" if len(found) == 1 else f"are {len(found)} keys"
    return "\n".join([f"There {are} of another trainer {where} (docs/moving.md):", *lines])
