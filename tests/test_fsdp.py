"""What FSDP2 cannot do is said in one line, before anything is built; what it does: test_same_answer.py."""

from __future__ import annotations

import pytest
from launching import run_python

from adaptive.config import BadSetting, parse
from adaptive.engine import Engine

ASKED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "WORLD_SIZE": "2"}
QUIET = ["--report_to", "none"]
REFUSED = [  # arguments, environment, what to write instead
    (["--fp16"], {}, "write --bf16"),
    (["--compile"], {}, "leave it out"),
    (["--find_unused_parameters"], {}, "zero3.yaml"),
    (["--optim", "adamw_8bit"], {}, "write one of adamw_torch, adamw_torch_fused, sgd, rmsprop"),
    (["--optim", "adafactor"], {}, "zero3.yaml"),
    ([], {"FSDP_VERSION": "1"}, "write fsdp_version: 2"),
    ([], {"FSDP_OFFLOAD_PARAMS": "true"}, "zero3_offload.yaml"),
    ([], {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "write --gradient_checkpointing"),
]


@pytest.mark.parametrize(("arguments", "environment", "instead"), REFUSED)
def test_what_it_cannot_do_is_refused_first(monkeypatch, arguments, environment, instead):
    """No process group is there to wait for. Mutation: `refuse` after super().__init__ (waits for rank 1)."""
    for name, value in (ASKED | environment).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadSetting, match="^[^\n]+$") as error:
        Engine.start(parse([*QUIET, *arguments]))
    assert instead in str(error.value)


def test_one_line_and_status_2():
    """As a worker of the launcher. Mutation: an error of another type."""
    done = run_python("train.py", *QUIET, "--fp16", timeout=60, **ASKED, RANK="0")
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if "Warning" not in line] == [
        "error: --fp16 has no loss scaler under FSDP2; write --bf16"
    ]
