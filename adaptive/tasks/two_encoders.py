"""Texts, or images and texts -> their own losses and embeddings: two networks of transformers side by side.

A text is read by a causal language model: its own loss is the mean over its tokens but the first, its
embedding the mean of the last hidden states. Of an image the share HIDDEN of its patches is hidden and asked
for (SimMIM; Xie et al. 2022), and the embedding comes from what is left (as Li et al. 2023 train CLIP); in
evaluation it comes from the whole image. To add a modality: a class with `losses_and_states`.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from adaptive.config import BadSetting
from adaptive.tasks import token_loss_sum

IMAGE_PRESETS = {
    "vit-tiny": {"model_type": "vit", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
                 "num_attention_heads": 4, "image_size": 32, "patch_size": 4, "encoder_stride": 4,
                 "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}  # fmt: skip
HIDDEN = 0.5  # share of an image's patches
WARMEST = math.log(100) / 2  # of log_scale, as in CLIP: cosines are multiplied by 100 at most


class TwoEncoders(torch.nn.Module):
    """(batch) -> own losses (rows, 2) and embeddings (rows, 2, d), whose products are the similarities.

    The learned scale of the similarities is in the embeddings, half of it in each, so that a gradient with
    respect to the embeddings is all that the contrastive loss has to hand on.
    """

    def __init__(self, first: torch.nn.Module, second: torch.nn.Module):
        super().__init__()
        self.first, self.second = first, second
        kind, widths = first.dtype, [encoder.config.hidden_size for encoder in (first, second)]
        head = partial(torch.nn.Linear, out_features=min(widths), bias=False, dtype=kind)
        self.first_head, self.second_head = head(widths[0]), head(widths[1])
        if first.config.to_dict() == second.config.to_dict():  # alike at first: so are then like texts
            second.load_state_dict(first.state_dict())
            self.second_head.load_state_dict(self.first_head.state_dict())
        self.log_scale = torch.nn.Parameter(torch.full((1,), math.log(1 / 0.07) / 2, dtype=kind))

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        sides = [
            image_side(self.first, batch["first_pixels"], batch["first_hidden"])
            if "first_pixels" in batch
            else text_side(self.first, batch["first_ids"], batch["first_mask"]),
            text_side(self.second, batch["second_ids"], batch["second_mask"]),
        ]
        scale = self.log_scale.clamp(max=WARMEST).exp()
        losses, states = zip(*sides, strict=True)
        embeddings = [self.first_head(states[0]), self.second_head(states[1])]
        return torch.stack(losses, dim=1), F.normalize(torch.stack(embeddings, dim=1), dim=2) * scale

    def save_pretrained(self, folder: Any, state_dict: dict[str, torch.Tensor]) -> None:
        """Each encoder as `from_pretrained` opens it, in first/ and second/; the rest in heads.pt."""
        rest = dict(state_dict)
        for name in ("first", "second"):
            own = {key: rest.pop(key) for key in state_dict if key.startswith(f"{name}.")}
            own = {key.removeprefix(f"{name}."): tensor for key, tensor in own.items()}
            getattr(self, name).save_pretrained(Path(folder, name), state_dict=own)
        torch.save(rest, Path(folder, "heads.pt"))


def text_side(
    model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, length) tokens, padded on the right, and 1 where there is one -> (rows,), (rows, width)."""
    out = model(input_ids=ids, attention_mask=mask, use_cache=False, output_hidden_states=True)
    labels = F.pad(ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100), (0, 1), value=-100)
    losses = token_loss_sum(out.logits, labels) / (labels != -100).sum(dim=1).clamp(min=1)
    states = out.hidden_states[-1]
    weights = mask.to(states)[..., None]
    return losses, (states * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)


def image_side(
    model: torch.nn.Module, pixels: torch.Tensor, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, 3, size, size) in [-1, 1], (rows, patches) bool -> (rows,) |error| of a hidden pixel,
    (rows, width).
    """
    pixels = pixels.to(model.dtype)
    out = model(pixel_values=pixels, bool_masked_pos=hidden, output_hidden_states=True)
    side, patch = math.isqrt(hidden.shape[1]), model.config.patch_size
    apart = (out.reconstruction - pixels).abs().mean(dim=1)  # (rows, size, size)
    patches = F.avg_pool2d(apart, patch).view(len(pixels), side * side)
    losses = (patches * hidden).sum(dim=1) / hidden.sum(dim=1).clamp(min=1)
    return losses, out.hidden_states[-1].mean(dim=1)


def image_size(model_config: Any) -> tuple[int, int]:
    """(pixels of a side, patches); BadSetting for a network that hides no square patches."""
    size, patch = (getattr(model_config, name, None) for name in ("image_size", "patch_size"))
    if not isinstance(size, int) or not isinstance(patch, int):
        raise BadSetting("the image encoder has no square image_size and patch_size; write a ViT's --model")
    return size, (size // patch) ** 2
