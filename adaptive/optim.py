"""Names and parameter groups -> optimizer.

To add one: a line in OPTIMIZERS. Learning rates are set by hand before every step (scaling.py), never by a
scheduler object: one that accelerate prepares would advance once per process.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

from adaptive.config import BadSetting, Optim
from adaptive.scaling import SecondMoment
from adaptive.schedules.literal import parse_call


def build_optimizer(model: torch.nn.Module, optim: Optim, zero_stage: int = 0) -> torch.optim.Optimizer:
    """--optim over groups: matrices decay, biases and norms do not; with --layer_lr_decay by layer."""
    name = optim.optim
    if name not in OPTIMIZERS:
        raise BadSetting(f"--optim is {name!r}; write one of {', '.join(OPTIMIZERS)}")
    if name in WHOLE_TENSORS and zero_stage:
        raise BadSetting(
            f"--optim {name} looks at whole tensors, which ZeRO-{zero_stage} cuts into flat pieces; write "
            "adamw_torch, or start with accelerate_configs/ddp.yaml"
        )
    _, arguments, settings = parse_call(f"{name}({optim.optim_args})", "--optim_args")
    own = [setting for setting in settings if setting in OWN_FLAGS]
    if arguments or own:
        instead = OWN_FLAGS[own[0]] if own else "NAME=VALUE, such as momentum=0.9"
        raise BadSetting(f"--optim_args {optim.optim_args!r} has {(own or arguments)[0]}; write {instead}")
    if optim.learning_rate is None:
        raise BadSetting("the task has no learning rate of its own; write --learning_rate")
    groups = parameter_groups(model, optim.weight_decay, optim.layer_lr_decay)
    if not groups:
        raise BadSetting("no weight of the model requires a gradient; unfreeze some in the task's model()")
    try:
        return OPTIMIZERS[name](groups, optim, **settings)
    except (TypeError, ValueError) as error:
        if isinstance(error, BadSetting):
            raise
        raise BadSetting(f"--optim_args {optim.optim_args!r} does not fit {name}: {error}") from None


def parameter_groups(model: torch.nn.Module, weight_decay: float, layer_decay: float = 1.0) -> list[dict]:
    """[{"params", "weight_decay"}]: tensors of two or more dimensions first, then the others.

    With a `layer_decay` below 1 a pair for each layer, with "lr_factor": layer_decay ** (layers above it).
    """
    depths = depths_below_the_top(model) if layer_decay != 1 else {}
    groups: dict[tuple[int, bool], dict] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 keeps the real shape aside
            key = (depths.get(name, 0), len(shape) < 2)
            if key not in groups:
                groups[key] = {"params": [], "weight_decay": 0.0 if key[1] else weight_decay}
                if depths:
                    groups[key]["lr_factor"] = layer_decay ** key[0]
            groups[key]["params"].append(parameter)
    return [groups[key] for key in sorted(groups)]


def depths_below_the_top(model: torch.nn.Module) -> dict[str, int]:
    """Parameter name -> layers above it: 0 for a head, 1 for the last layer, L + 1 for the embeddings.

    Layers are the entries of the outermost ModuleList around a parameter, so that this holds for any
    architecture of transformers; an encoder and a decoder are counted each from its own top.
    """
    outermost = {name: len(stack) for name, stack in layer_stacks(model).items()}
    if not outermost:
        raise BadSetting("--layer_lr_decay needs a model with a list of layers; write 1.0")
    get_input = getattr(model, "get_input_embeddings", lambda: None)
    get_output = getattr(model, "get_output_embeddings", lambda: None)
    read = {id(p) for p in get_input().parameters()} if get_input() is not None else set()
    written = {id(p) for p in get_output().parameters()} if get_output() is not None else set()
    depths = {}
    for name, parameter in model.named_parameters():
        stack = next((s for s in outermost if name.startswith(f"{s}.")), None)
        if stack is not None:
            depths[name] = outermost[stack] - int(name[len(stack) + 1 :].split(".")[0])
        elif id(parameter) in read or (_embeds(model, name) and id(parameter) not in written):
            depths[name] = max(outermost.values()) + 1
        else:
            depths[name] = 0
    return depths


def layer_stacks(model: torch.nn.Module) -> dict[str, torch.nn.ModuleList]:
    """Name -> list of layers, without the lists inside layers."""
    lists = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.ModuleList)}
    return {name: m for name, m in lists.items() if not any(name.startswith(f"{o}.") for o in lists)}


def _embeds(model: torch.nn.Module, name: str) -> bool:
    return isinstance(model.get_submodule(name.rpartition(".")[0]), torch.nn.Embedding) or "embed" in name


def _torch(name: str, **fixed) -> Callable[..., torch.optim.Optimizer]:
    """An optimizer of torch's without betas of its own."""

    def build(groups: list[dict], optim: Optim, **settings) -> torch.optim.Optimizer:
        return getattr(torch.optim, name)(groups, lr=optim.learning_rate, **fixed | settings)

    return build


def set_step(groups: list[dict], optim: Optim, rate: float, moment: SecondMoment | None) -> None:
    """By hand, before the step; a group's lr_factor (layer-wise decay) multiplies the rate.

    With --beta_scaling half_life, Adam's settings as equation (7) of scaling.py has them.
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
    return torch.optim.AdamW(groups, lr=optim.learning_rate, **_adam_settings(optim) | settings)


def _adam_settings(optim: Optim) -> dict:
    return {"betas": (optim.adam_beta1, optim.adam_beta2), "eps": optim.adam_epsilon}


def _from(
    module: str, name: str, package: str, adam: bool = False, **fixed
) -> Callable[..., torch.optim.Optimizer]:
    """An optimizer of another library, imported when it is asked for; `adam`: takes --adam_*."""

    def build(groups: list[dict], optim: Optim, **settings) -> torch.optim.Optimizer:
        try:
            kind = getattr(importlib.import_module(module), name)
        except ImportError as error:
            raise BadSetting(
                f"--optim {optim.optim} needs a package; pip install {package} ({error})"
            ) from None
        told = _adam_settings(optim) if adam else {}
        return kind(groups, lr=optim.learning_rate, **told | fixed | settings)

    return build


# Names of transformers.TrainingArguments where it has one for the same thing.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw_torch": _adamw,
    "adamw_torch_fused": lambda groups, optim, **settings: _adamw(groups, optim, fused=True, **settings),
    "sgd": _torch("SGD"),
    "adagrad": _torch("Adagrad"),
    "rmsprop": _torch("RMSprop"),
    "adafactor": _from("transformers.optimization", "Adafactor", "transformers", relative_step=False,
                       scale_parameter=False),
    "adamw_8bit": _from("bitsandbytes.optim", "AdamW8bit", "bitsandbytes", adam=True),
    "paged_adamw_8bit": _from("bitsandbytes.optim", "PagedAdamW8bit", "bitsandbytes", adam=True),
    "lion_8bit": _from("bitsandbytes.optim", "Lion8bit", "bitsandbytes"),
    "lion": _from("pytorch_optimizer", "Lion", "pytorch_optimizer"),
    "lamb": _from("pytorch_optimizer", "Lamb", "pytorch_optimizer", adam=True, max_grad_norm=0.0),
    "lars": _from("pytorch_optimizer", "LARS", "pytorch_optimizer"),
}  # fmt: skip
OPTIMIZERS["adamw_bnb_8bit"] = OPTIMIZERS["adamw_8bit"]
OPTIMIZERS["lion_32bit"] = OPTIMIZERS["lion"]
# What --optim_args cannot say: set by flags, by group or at every step.
OWN_FLAGS = {"lr": "--learning_rate", "weight_decay": "--weight_decay"}
# Their update of one number depends on its whole row, column or tensor.
WHOLE_TENSORS = {"adafactor", "lamb", "lars"}
