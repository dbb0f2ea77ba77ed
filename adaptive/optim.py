"""Names and parameter groups -> optimizer.

To add one: a line in OPTIMIZERS. Learning rates are set by hand before every step (scaling.py), never by a
scheduler object: one that accelerate prepares would advance once per process.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from adaptive.config import BadSetting, Optim
from adaptive.scaling import SecondMoment
from adaptive.schedules.literal import parse_call


def build_optimizer(model: torch.nn.Module, optim: Optim) -> torch.optim.Optimizer:
    """--optim over two groups: matrices decay, biases and norms do not."""
    if optim.optim not in OPTIMIZERS:
        raise BadSetting(f"--optim is {optim.optim!r}; write one of {', '.join(OPTIMIZERS)}")
    _, arguments, settings = parse_call(f"{optim.optim}({optim.optim_args})", "--optim_args")
    try:
        return OPTIMIZERS[optim.optim](parameter_groups(model, optim.weight_decay), optim, **settings)
    except (TypeError, ValueError) as error:
        raise BadSetting(f"--optim_args {optim.optim_args!r} does not fit {optim.optim}: {error}") from None


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict]:
    """[{"params", "weight_decay"}]: tensors of two or more dimensions first, then the others."""
    groups: list[dict] = [{"params": [], "weight_decay": weight_decay}, {"params": [], "weight_decay": 0.0}]
    for parameter in model.parameters():
        if parameter.requires_grad:
            shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 keeps the real shape aside
            groups[len(shape) < 2]["params"].append(parameter)
    return [group for group in groups if group["params"]]


def set_step(groups: list[dict], optim: Optim, rate: float, moment: SecondMoment | None) -> None:
    """By hand, before the step; a group's lr_factor (layer-wise decay) multiplies the rate.

    With --beta_scaling half_life, Adam's settings as equation (6) of scaling.py has them.
    """
    moment = moment or SecondMoment(optim.adam_beta2, 1.0)
    for group in groups:
        group["lr"] = rate * group.get("lr_factor", 1.0) * moment.factor
        if optim.beta_scaling == "none" and "own_weight_decay" not in group:
            continue
        decay = group.setdefault("own_weight_decay", group["weight_decay"])
        group["betas"] = (optim.adam_beta1, moment.beta2)
        group["eps"] = optim.adam_epsilon * moment.factor
        group["weight_decay"] = decay / moment.factor


def _adamw(groups: list[dict], optim: Optim, **settings) -> torch.optim.Optimizer:
    betas = (optim.adam_beta1, optim.adam_beta2)
    return torch.optim.AdamW(groups, lr=optim.learning_rate, betas=betas, eps=optim.adam_epsilon, **settings)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw_torch": _adamw,
    "adamw_torch_fused": lambda groups, optim, **settings: _adamw(groups, optim, fused=True, **settings),
    "sgd": lambda groups, optim, **settings: torch.optim.SGD(groups, lr=optim.learning_rate, **settings),
    "adagrad": lambda groups, optim, **settings: torch.optim.Adagrad(
        groups, lr=optim.learning_rate, **settings
    ),
    "rmsprop": lambda groups, optim, **settings: torch.optim.RMSprop(
        groups, lr=optim.learning_rate, **settings
    ),
}
