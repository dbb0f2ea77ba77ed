"""Programs beside the training loop: each `python -m adaptive.tools.NAME`; README, "Tools"."""
