"""No network, one thread, and no accelerate state left over from the test before."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest  # noqa: E402


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """train.main may run in any test of this process, with other settings each time."""
    yield
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
