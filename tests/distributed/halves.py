"""several_runs.py with fp16 on a CPU, where torch computes in it, if slowly.

DeepSpeed is told that it may; its loss scaler and torch's start at 2^18, so that the first steps overflow.
"""

import functools

import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.runtime.precision_config import DeepSpeedFP16Config

CPU_Accelerator.is_fp16_supported = lambda self: True
DeepSpeedFP16Config.model_fields["initial_scale_power"].default = 18
DeepSpeedFP16Config.model_rebuild(force=True)
torch.amp.GradScaler = functools.partial(torch.amp.GradScaler, init_scale=2.0**18)

import several_runs  # noqa: E402, F401
