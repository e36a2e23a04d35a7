"""Every argument of Hugging Face's Trainer on an elastic run: works, refused, or no matter.

A row is the name of the test that shows it, a value that is refused with a part of the message, or
the reason why the argument makes no difference to what is trained.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Works:
    """Shown by this test of test_huggingface.py."""

    test: str


@dataclass(frozen=True)
class Refused:
    """This value is refused, with a message that has this text; other values are right."""

    value: Any
    text: str


@dataclass(frozen=True)
class NoMatter:
    """It has no effect on which samples are trained, how, or what a restart continues from."""

    why: str


HOLDS = Works("test_arguments_hold_after_a_restart")
LOADER = Works("test_the_loader_is_as_the_arguments_say")
LOSSES = Works("test_each_loss_is_the_mean_over_the_whole_batch")
SAVES = Works("test_there_is_always_a_complete_checkpoint")
LATE = Works("test_an_evaluation_waits_for_a_save_that_is_urgent")
STOPS = Works("test_a_training_that_has_stopped_trains_no_further_step")
STARTS = Works("test_a_restart_continues_from_the_newest_checkpoint")
OPTIMIZER = NoMatter("the optimizer and its schedule are whole in each checkpoint")
NUMBERS = NoMatter("the arithmetic of a step, the same on all ranks")
EXCHANGE = NoMatter("how torch exchanges gradients; the weights are in the loss")
LOG = NoMatter("what is printed or logged")
EVALUATION = NoMatter("how an evaluation is made; it has the Trainer's own loader")
HUB = NoMatter("copies of folders, sent elsewhere")
SCRIPT = NoMatter("for scripts; the Trainer does not use it")

TRAINING_ARGUMENTS = {
    "output_dir": Works("test_a_second_training_needs_a_folder_of_its_own"),
    "per_device_train_batch_size": Works("test_a_training_that_goes_on_is_the_same_to_the_bit"),
    "num_train_epochs": Works("test_a_training_that_goes_on_is_the_same_to_the_bit"),
    "max_steps": STOPS,
    "learning_rate": Works("test_a_second_training_needs_a_folder_of_its_own"),
    "lr_scheduler_type": LATE,
    "lr_scheduler_kwargs": LATE,
    "warmup_steps": OPTIMIZER,
    "optim": Refused("adalomo", "inside of backward"),
    "optim_args": OPTIMIZER,
    "weight_decay": OPTIMIZER,
    "adam_beta1": OPTIMIZER,
    "adam_beta2": OPTIMIZER,
    "adam_epsilon": OPTIMIZER,
    "optim_target_modules": OPTIMIZER,
    "gradient_accumulation_steps": NoMatter("replaced: it follows from the global batch"),
    "average_tokens_across_devices": NoMatter("replaced: the weights do it, for every loss"),
    "max_grad_norm": NUMBERS,
    "label_smoothing_factor": LOSSES,
    "bf16": NUMBERS,
    "fp16": NUMBERS,
    "bf16_full_eval": EVALUATION,
    "fp16_full_eval": EVALUATION,
    "tf32": NUMBERS,
    "activation_checkpointing": NUMBERS,
    "activation_checkpointing_kwargs": NUMBERS,
    "gradient_checkpointing": NUMBERS,
    "gradient_checkpointing_kwargs": NUMBERS,
    "torch_compile": NUMBERS,
    "torch_compile_backend": NUMBERS,
    "torch_compile_mode": NUMBERS,
    "use_liger_kernel": NUMBERS,
    "liger_kernel_config": NUMBERS,
    "use_cache": NUMBERS,
    "neftune_noise_alpha": NoMatter("noise, from the random state as dropout's"),
    "torch_empty_cache_steps": NUMBERS,
    "auto_find_batch_size": Refused(True, "per_device_train_batch_size that fits"),
    "logging_strategy": LOG,
    "logging_steps": LOG,
    "logging_first_step": LOG,
    "log_on_each_node": LOG,
    "logging_nan_inf_filter": LOG,
    "include_num_input_tokens_seen": LOG,
    "log_level": LOG,
    "log_level_replica": LOG,
    "disable_tqdm": LOG,
    "report_to": LOG,
    "run_name": LOG,
    "project": LOG,
    "trackio_space_id": LOG,
    "trackio_bucket_id": LOG,
    "trackio_static_space_id": LOG,
    "eval_strategy": LATE,
    "eval_steps": LATE,
    "eval_delay": EVALUATION,
    "per_device_eval_batch_size": EVALUATION,
    "prediction_loss_only": EVALUATION,
    "eval_on_start": NoMatter("a further evaluation at each start"),
    "eval_do_concat_batches": EVALUATION,
    "eval_use_gather_object": EVALUATION,
    "eval_accumulation_steps": EVALUATION,
    "include_for_metrics": EVALUATION,
    "batch_eval_metrics": EVALUATION,
    "save_only_model": Refused(True, "optimizer and schedule"),
    "save_strategy": HOLDS,
    "save_steps": HOLDS,
    "save_on_each_node": Refused(True, "that all nodes share"),
    "save_total_limit": SAVES,
    "enable_jit_checkpoint": Refused(True, "SIGTERM"),
    "push_to_hub": HUB,
    "hub_token": HUB,
    "hub_private_repo": HUB,
    "hub_model_id": HUB,
    "hub_strategy": HUB,
    "hub_always_push": HUB,
    "hub_revision": HUB,
    "load_best_model_at_end": HOLDS,
    "metric_for_best_model": LATE,
    "greater_is_better": LATE,
    "ignore_data_skip": NoMatter("replaced: the position in the data is in the checkpoint"),
    "restore_callback_states_from_checkpoint": HOLDS,
    "full_determinism": NUMBERS,
    "seed": HOLDS,
    "data_seed": HOLDS,
    "use_cpu": NoMatter("which device"),
    "accelerator_config": Refused(
        {"gradient_accumulation_kwargs": {"num_steps": 3}}, "leave num_steps out"
    ),
    "parallelism_config": Refused(object(), "divides the workers"),
    "dataloader_drop_last": Works("test_a_training_that_goes_on_is_the_same_to_the_bit"),
    "dataloader_num_workers": LOADER,
    "dataloader_pin_memory": LOADER,
    "dataloader_persistent_workers": LOADER,
    "dataloader_prefetch_factor": LOADER,
    "dataloader_multiprocessing_context": LOADER,
    "dataloader_in_order": Refused(False, "leave it True"),
    "remove_unused_columns": NoMatter("what a sample consists of"),
    "label_names": EVALUATION,
    "train_sampling_strategy": Refused("group_by_length", "give 'random' or 'sequential'"),
    "length_column_name": NoMatter("for orders that are refused"),
    "ddp_find_unused_parameters": EXCHANGE,
    "ddp_bucket_cap_mb": EXCHANGE,
    "ddp_broadcast_buffers": EXCHANGE,
    "ddp_static_graph": EXCHANGE,
    "ddp_backend": EXCHANGE,
    "ddp_timeout": EXCHANGE,
    "fsdp": Refused(True, "untested with another number of workers"),
    "fsdp_config": NoMatter("for fsdp, which is refused"),
    "deepspeed": Refused({"zero_optimization": {"stage": 1}}, "fit only the number of workers"),
    "debug": LOG,
    "skip_memory_metrics": LOG,
    "do_train": SCRIPT,
    "do_eval": SCRIPT,
    "do_predict": SCRIPT,
    "resume_from_checkpoint": SCRIPT,
    "local_rank": SCRIPT,
}
"""Fields of transformers.TrainingArguments."""

TRAINER = {
    "model": LOSSES,
    "args": HOLDS,
    "data_collator": LOADER,
    "train_dataset": Refused("a stream", "__len__ and __getitem__"),
    "eval_dataset": EVALUATION,
    "processing_class": NoMatter("it is saved beside the model, and chooses the data_collator"),
    "model_init": Works("test_a_model_that_is_made_by_the_trainer_is_restored"),
    "compute_loss_func": LOSSES,
    "compute_metrics": EVALUATION,
    "callbacks": STOPS,
    "optimizers": OPTIMIZER,
    "optimizer_cls_and_kwargs": OPTIMIZER,
    "preprocess_logits_for_metrics": EVALUATION,
}
"""Parameters of transformers.Trainer."""

ELASTIC = {
    "args": HOLDS,
    "global_batch": LOSSES,
    "period": HOLDS,
    "theirs": NoMatter("the arguments of the Trainer, in TRAINER"),
}
"""Parameters of ElasticTraining."""
