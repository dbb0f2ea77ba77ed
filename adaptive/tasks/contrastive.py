"""Pairs -> two encoders whose embeddings find each other (Radford et al. 2021): by default of a function's
source and of its docstring; a folder of images and their texts likewise.

Two sources are the two sides, each with a real-valued size: a sample of the first asks for the loss of its
first text (or image), a sample of the second for that of its second text; with one source a sample asks for
both. Whatever its side, a sample that has both texts is a pair of the step, and sample i has the loss

    l_i = own_i + s c_i,    c_i = -1/2 log softmax_j(a_i b_j)[i] - 1/2 log softmax_j(b_i a_j)[i]           (1)

with s --contrastive_scale (0.1), and j over all pairs of the step, whoever computes them; a and b are the
embeddings without their means over these pairs, at one length. Its weight w_i is
that of scaling.py, as for every sample; own_i is a mean over tokens, so --normalize_by changes nothing. Pairs
with the same second text are no negatives of each other. How many negatives there are follows n, not G: of
this rounding is a part, and the loss of a step with one pair has no contrastive part. (The passes of a step
are then no independent samples: noise_scale, which can be had with one source, means little here.)

c_i couples the samples of a step and is yet exact for every cut (GradCache; Gao et al. 2021). All passes run
once without a graph; their embeddings e (a and b) are gathered over the processes, and every process computes
J = sum_i w_i s c_i of the whole step and its gradient in the same way. Then the passes run as in any task,
with the loss

    own_i + s c_i + (e_i - e_i*) (dJ/de_i) / w_i,    e_i* the same embeddings without a gradient           (2)

whose value is (1), and whose gradients, weighed by w_i, add up to that of sum_i w_i l_i. Every process runs
the same passes twice and gathers between them, so there is one order of collectives for DDP and ZeRO. The
price is a second forward of every pass, and P x P similarities for P pairs on every process. Both forwards
see the same draws, so dropout is as exact as it is elsewhere.
To add a modality: two_encoders.py.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from adaptive.config import BadSetting, Config
from adaptive.corpus import fingerprint, load_pairs
from adaptive.tasks import Loaded, Task, build_model, build_tokenizer
from adaptive.tasks.causal_lm import PRESETS
from adaptive.tasks.masked_lm import draws, numbered
from adaptive.tasks.two_encoders import HIDDEN, IMAGE_PRESETS, TwoEncoders, image_size

POOL = 10_000  # validation rows among which a pair is looked for: the next ones are another pool
AT_ONCE = 1000  # rows of their similarities held at once
FOUND_AT = (1, 5)


class Contrastive(Task):
    """Rows have first_ids or first_pixels, second_ids, side (0, 1) and pair: -1 where one of both is missing,
    else a number that pairs of the same second text share.
    """

    pooled = ("embeddings", "pair")
    n_sources = 0
    seed = 0

    def load(self, config: Config) -> Loaded:
        data, side = config.data, self.n_sources
        if side > 1:
            raise BadSetting(
                "contrastive has one source of pairs, or two: --dataset_name first=... second=..."
            )
        corpus = load_pairs(data, config.run.seed, config.model.trust_remote_code, images=True)
        self.n_sources, self.seed, self.scale = side + 1, config.run.seed, data.contrastive_scale
        self.images = "image" in corpus.train.column_names
        settings: dict[str, Any] = {
            "side": side,
            "tokenizers": [build_tokenizer(one, PRESETS) for one in self.sides(config)],
            "lengths": [data.sequence_length, data.max_target_length or data.sequence_length],
        }
        if self.images:
            settings["size"], self.n_patches = image_size(image_config(config))
        rows = [None if part is None else encode(part, settings) for part in (corpus.train, corpus.eval)]
        rows = map(numbered, rows) if self.images else rows
        return Loaded(*rows, settings["tokenizers"][1], fingerprint(corpus.train))

    def sides(self, config: Config) -> list[Config]:
        """The settings of each encoder."""
        first, second = config.model.model_name_or_path, config.model.second_model_name_or_path
        names = (None if self.images else first, second or (None if self.images else first))
        return [replace(config, model=replace(config.model, model_name_or_path=name)) for name in names]

    def model(self, config: Config) -> torch.nn.Module:
        from transformers import AutoModelForCausalLM, AutoModelForMaskedImageModeling

        first, second = self.sides(config)
        if self.images:
            built = build_model(AutoModelForMaskedImageModeling, config, IMAGE_PRESETS)
        else:
            built = build_model(AutoModelForCausalLM, first, PRESETS)
        return TwoEncoders(built, build_model(AutoModelForCausalLM, second, PRESETS))

    def collate(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        masks = [
            {
                name.replace("ids", "mask"): np.ones_like(ids)
                for name, ids in row.items()
                if name.endswith("_ids")
            }
            for row in rows
        ]
        batch = super().collate([row | mask for row, mask in zip(rows, masks, strict=True)])
        if "first_pixels" in batch:
            size = round((batch["first_pixels"].shape[1] / 3) ** 0.5)
            batch["first_pixels"] = batch["first_pixels"].view(-1, 3, size, size) / 127.5 - 1
            positions = batch.pop("position").tolist()
            hidden = np.stack([draws(self.seed, p, self.n_patches)[0] < HIDDEN for p in positions])
            batch["first_hidden"] = torch.from_numpy(hidden)
        return batch

    def token_counts(self, batch: dict[str, torch.Tensor]) -> tuple[int, int]:
        masks = [batch[name] for name in ("first_mask", "second_mask") if name in batch]
        inputs, positions = (sum(int(m) for m in found) for found in
                             ([m.sum() for m in masks], [m.numel() for m in masks]))  # fmt: skip
        return inputs, positions - inputs

    def own_loss(self, losses: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """(rows, 2) -> (rows,): that of the sample's side; both, where there is one source of pairs."""
        first, second = losses.unbind(dim=1)
        if self.n_sources == 1:
            return first + torch.where(batch["pair"] >= 0, second, 0.0)
        return torch.where(batch["side"] == 0, first, second)

    def before_passes(self, engine: Any, batches: list[dict], own: Any) -> list[dict]:
        """s c_i and (dJ/de_i) / w_i of equation (2), for every row; 0 for those that are no pair."""
        n, rows = len(own.rows), [len(batch["pair"]) for batch in batches]
        cuda = [engine.device] if engine.device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(cuda):  # the passes proper draw the same once more
            held = []
            with engine.passes():
                for batch in batches:
                    with engine.pass_(last=False):
                        held.append(engine.model(engine.to_device(batch))[1])
        if len(held) < len(batches):  # it ran out of memory, as the gather tells all
            engine.gather(torch.empty(0))
        embeddings = torch.cat(held)
        embeddings = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
        weights = torch.tensor(own.weights, dtype=torch.float64)
        pairs = torch.cat([batch["pair"] for batch in batches])[:n]
        present = torch.nonzero((pairs >= 0) & (weights > 0)).flatten()
        device = embeddings.device
        sent = (embeddings[present.to(device)], pairs[present].to(device), weights[present].to(device))
        every = engine.gather(*sent)
        losses, gradient = step_gradient(*map(torch.cat, every), self.scale)
        start = sum(len(part) for part in every[1][: engine.rank])
        mine = slice(start, start + len(present))
        value, cached = embeddings.new_zeros(len(embeddings)), torch.zeros_like(embeddings)
        value[present.to(device)], cached[present.to(device)] = losses[mine], gradient[mine]
        parts = zip(batches, value.split(rows), cached.split(rows), strict=True)
        return [batch | {"contrastive": v, "gradient": g} for batch, v, g in parts]

    def loss_sum(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        losses, embeddings = model(batch)
        own = self.own_loss(losses, batch)
        surrogate = (embeddings * batch["gradient"]).sum(dim=(1, 2))
        return own + batch["contrastive"] + (surrogate - surrogate.detach())

    def measure(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        losses, embeddings = model(batch)
        if "first_hidden" in batch:  # looked for by what the whole image shows
            embeddings = model(batch | {"first_hidden": torch.zeros_like(batch["first_hidden"])})[1]
        return {
            "loss": self.own_loss(losses, batch),
            "embeddings": embeddings.to(torch.promote_types(embeddings.dtype, torch.float32)),
            "pair": batch["pair"],
        }

    def measure_pool(self, values: dict[str, torch.Tensor]) -> dict[str, tuple[float, int]]:
        """The contrastive part of the loss, c itself, and the share of pairs whose partner is among the k
        nearest, in the mean of both directions; among pools of up to POOL rows, in the data's order.

        A partner is behind all that are as near as it is: embeddings that are all alike find nothing.
        """
        sums, n = dict.fromkeys(("contrastive", *(f"recall_at_{k}" for k in FOUND_AT)), 0.0), 0
        for rows, pairs in zip(values["embeddings"].split(POOL), values["pair"].split(POOL), strict=True):
            rows, pairs = centred(rows[pairs >= 0]), pairs[pairs >= 0]
            n += len(pairs)
            for a, b in (rows.unbind(dim=1), rows.unbind(dim=1)[::-1]):
                for at in range(0, len(pairs), AT_ONCE):
                    own = torch.arange(at, min(at + AT_ONCE, len(pairs)), device=pairs.device)
                    near = similarities(a[own], b, pairs[own], pairs, own)
                    partner = near.gather(1, own[:, None])
                    behind = (near >= partner).sum(dim=1) - 1
                    sums["contrastive"] += float(F.cross_entropy(near, own, reduction="sum")) / 2
                    for k in FOUND_AT:
                        sums[f"recall_at_{k}"] += float((behind < k).sum()) / 2
        return {name: (total, n) for name, total in sums.items()} | {
            "loss": (self.scale * sums["contrastive"], 0)
        }


def similarities(
    a: torch.Tensor, b: torch.Tensor, pairs: torch.Tensor, others: torch.Tensor, own: torch.Tensor
) -> torch.Tensor:
    """(rows, P) of a (rows, d), which are numbers `own` of all, and b (P, d); -inf to others of the same
    pair.
    """
    same = pairs[:, None] == others[None, :]
    same[torch.arange(len(own), device=own.device), own] = False
    return (a @ b.T).masked_fill(same, -torch.inf)


def centred(embeddings: torch.Tensor) -> torch.Tensor:
    """(P, 2, d) -> each side without its mean over the pairs, at the length it had.

    Means over a text's tokens are nearly alike in all texts: by their cosines alone nothing would be learned.
    """
    apart = embeddings - embeddings.mean(dim=0)
    return F.normalize(apart, dim=2, eps=1e-6) * embeddings.norm(dim=2, keepdim=True)


def pair_losses(embeddings: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """(P, 2, d), (P,) -> c (P,) of equation (1)."""
    own, embeddings = torch.arange(len(pairs), device=pairs.device), centred(embeddings)
    near = similarities(embeddings[:, 0], embeddings[:, 1], pairs, pairs, own)
    return (F.cross_entropy(near, own, reduction="none") + F.cross_entropy(near.T, own, reduction="none")) / 2


def step_gradient(
    embeddings: torch.Tensor, pairs: torch.Tensor, weights: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """s c (P,), and (dJ/de_i) / w_i (P, 2, d) for J = sum_i w_i s c_i over the P pairs of a step."""
    if not len(pairs):
        return embeddings.new_zeros(0), embeddings
    weights = weights.to(embeddings)
    with torch.enable_grad():
        leaf = embeddings.detach().requires_grad_()
        losses = scale * pair_losses(leaf, pairs)
        (gradient,) = torch.autograd.grad((weights * losses).sum(), leaf)
    return losses.detach(), gradient / weights[:, None, None]


def image_config(config: Config) -> Any:
    """The image encoder's own configuration, before it is built."""
    from transformers import AutoConfig

    name = config.model.model_name_or_path or next(iter(IMAGE_PRESETS))
    if name in IMAGE_PRESETS:
        return AutoConfig.for_model(**IMAGE_PRESETS[name])
    return AutoConfig.from_pretrained(name, trust_remote_code=config.model.trust_remote_code)


def encode(dataset: Any, settings: dict[str, Any]) -> Any:
    """Columns text or image, target -> rows; what is longer is cut, rows without their own side are left out.
    Cached on disk.
    """
    dataset = dataset.map(_encoded, batched=True, fn_kwargs=settings, remove_columns=dataset.column_names)
    return dataset.with_format("numpy")


def _encoded(
    rows: dict[str, list], side: int, tokenizers: list, lengths: list[int], size: int | None = None
) -> dict[str, list]:
    ids = [
        [tokens or [0] for tokens in tokenizer(texts, truncation=True, max_length=length)["input_ids"]]
        for tokenizer, texts, length in zip(
            tokenizers, (rows.get("text", rows["target"]), rows["target"]), lengths, strict=True
        )
    ]
    there = [[bool(text) for text in rows.get("text", rows["target"])], [bool(t) for t in rows["target"]]]
    told = {"first_ids": ids[0], "second_ids": ids[1]}
    if size is not None:
        there[0] = [image is not None for image in rows["image"]]
        told = {"first_pixels": [_pixels(image, size) for image in rows["image"]], "second_ids": ids[1]}
    digests = [hashlib.blake2b(text.encode(), digest_size=7).digest() for text in rows["target"]]
    told["side"] = [side] * len(digests)
    told["pair"] = [
        int.from_bytes(digest, "little") if first and second else -1
        for digest, first, second in zip(digests, *there, strict=True)
    ]
    kept = [at for at, found in enumerate(there[side]) if found]
    return {name: [column[at] for at in kept] for name, column in told.items()}


def _pixels(image: Any, size: int) -> np.ndarray:
    """An image, or none, of any shape -> (3 x size x size,) uint8."""
    if image is None:
        return np.zeros(3 * size * size, dtype=np.uint8)
    resized = image.convert("RGB").resize((size, size))
    return np.asarray(resized).transpose(2, 0, 1).reshape(-1)
