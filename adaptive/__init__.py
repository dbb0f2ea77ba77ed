"""Batch size as a scheduled variable: from signals to an exact gradient."""
