"""Names of settings in other trainers: the error for `batch_size` suggests `train.rows`.

A name without a section, such as `batch_size`, matches in every section and at the top level. A name with a section,
such as `teacher.model`, matches in that section only.
"""

from __future__ import annotations

_OURS: dict[str, str] = {
    "teacher.path": "teacher_model teacher_path teacher_model_path teacher_model_name_or_path teacher.model "
    "teacher.name",
    "student.path": "model model_path model_name model_id model_name_or_path base_model student_model student_path "
    "student_model_path student.name",
    "data.corpus": "dataset dataset_name dataset_path dataset_mixer train_file train_files train_data data_path "
    "data_files data.path data.file data.train data.text",
    "data.columns": "dataset_text_field text_field text_column text_key content_key messages_field field_messages "
    "prompt_column completion_column input_key output_key",
    "data.tokenizer": "tokenizer tokenizer_name tokenizer_path tokenizer_name_or_path",
    "data.seq_len": "max_length max_seq_length max_seq_len seq_length sequence_length sequence_len block_size "
    "context_length cutoff_len model_max_length",
    "data.heldout_fraction": "validation_split val_split val_size test_size eval_split_ratio "
    "validation_split_percentage",
    "loss.alpha, the weight of the cross entropy": "kd_alpha alpha_ce ce_weight distill_alpha kd_ratio",
    "loss.temperature": "kd_temperature distill_temperature distillation_temperature temp",
    "loss.divergence": "kd_loss kd_objective loss_type loss_fn criterion",
    "loss.beta": "lmbda skew_alpha",
    "train.steps": "max_steps max_iters num_steps num_train_steps total_steps iterations train_steps",
    "train.steps, a number of optimizer steps": "epochs num_epochs num_train_epochs max_epochs",
    "train.rows": "batch_size train_batch_size per_device_train_batch_size per_device_batch_size micro_batch_size "
    "micro_batch_size_per_gpu train_micro_batch_size_per_gpu",
    "train.accumulation": "gradient_accumulation_steps gradient_accumulation grad_accum accumulate_grad_batches "
    "accumulation_steps",
    "train.lr": "learning_rate max_lr peak_lr",
    "train.warmup_steps": "num_warmup_steps warmup warmup_iters lr_warmup_steps",
    "train.warmup_steps, in steps": "warmup_ratio warmup_fraction",
    "train.schedule": "lr_scheduler lr_scheduler_type scheduler lr_schedule lr_decay_style",
    "train.final_lr_ratio": "min_lr_ratio min_lr min_lr_rate",
    "train.weight_decay": "wd",
    "train.beta1": "adam_beta1",
    "train.beta2": "adam_beta2",
    "train.eps": "adam_epsilon epsilon",
    "train.clip_norm": "max_grad_norm gradient_clipping gradient_clip_val grad_clip clip_grad_norm clip_grad",
    "train.seed": "random_seed data_seed",
    "eval.every": "eval_steps eval_every eval_interval evaluation_steps val_check_interval",
    "eval.rows": "eval_batch_size per_device_eval_batch_size max_eval_samples",
    "checkpoint.every": "save_steps save_every save_interval checkpoint_interval",
    "checkpoint.keep_last": "save_total_limit keep_last_n_checkpoints",
    "student.checkpointing": "gradient_checkpointing activation_checkpointing recompute",
    "student.precision": "bf16 fp16 dtype torch_dtype mixed_precision",
    "compute.gpus": "num_gpus n_gpus devices nproc_per_node world_size",
    "run.out": "output_dir out_dir save_dir",
    "run.name": "run_name experiment_name",
}
OTHER_NAMES = {name: ours for ours, names in _OURS.items() for name in names.split()}
"""Suggested setting for each unknown name in a spec, with a remark where the meaning differs."""
