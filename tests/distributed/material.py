"""What the distributed tests train on: a task with uneven token counts, and schedules that jump."""

from __future__ import annotations

import numpy as np
from transformers import AutoModelForCausalLM

from adaptive.order import Order
from adaptive.tasks import Loaded, build_model
from adaptive.tasks.causal_lm import PRESETS, CausalLM

ROWS = 367  # prime
GPT2 = {
    "gpt2-tiny": {
        "model_type": "gpt2",
        "vocab_size": 259,
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
}


class Uneven(CausalLM):
    """367 rows of 5 to 40 tokens, of which 0 to 37 are supervised; one in 13 has none at all."""

    def load(self, config):
        draw = np.random.default_rng(0)
        rows = []
        for number in range(ROWS):
            tokens = draw.integers(3, 259, int(draw.integers(5, 41)))
            labels = tokens.copy()
            labels[: len(tokens) if number % 13 == 5 else int(draw.integers(0, len(tokens) - 3))] = -100
            rows.append({"input_ids": tokens, "labels": labels})
        return Loaded(train=rows, eval=rows[:31])

    def model(self, config):
        """In fp64 GPT-2, which stays there throughout (Llama's norm computes in fp32 whatever its parameters
        are).

        In fp32 Llama: GPT-2's key biases have a gradient of zero, whose rounding AdamW blows up to whole
        steps.
        """
        return build_model(AutoModelForCausalLM, config, GPT2 if config.model.dtype == "float64" else PRESETS)


def wild(step, current_size):
    """2.3 to 21.7 samples, smaller than the number of processes at times, never the same twice in a row."""
    return 2.3 + (step * 7.77) % 19.4


class InOrder(Uneven):
    """The same rows, as a stream or, without --streaming, laid so that the order of the data is theirs."""

    def load(self, config):
        loaded = super().load(config)
        if not config.data.streaming:
            indices = Order(config.run.seed, "train", ROWS).indices(np.arange(ROWS))
            loaded.train = [loaded.train[place] for place in np.argsort(indices)]
        return loaded
