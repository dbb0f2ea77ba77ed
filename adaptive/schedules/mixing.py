"""Functions of the data's mixture: sizes that follow tasks, new data or difficulty (the adaptive batch-size
trainer's published examples).

Several sources share a step; a single number is split over them by --source_sizes (by rows without), and
{source: size} gives each its own. What these see is the same on any number of processes.
To add one: a function that names task_ratios, new_data_ratio, difficulty, source_loss or source_coverage
(adaptive/signals.py), and a line in SCHEDULES.
"""

from __future__ import annotations


def task_aware(step, current_size, task_ratios, task=None, increment=2, largest=64, decrement=1, smallest=8):
    """Grow while `task` (by default the first source) has the largest share of the samples, else shrink."""
    task = next(iter(task_ratios)) if task is None else task
    if task not in task_ratios:
        raise ValueError(f"task={task!r} is no source; write one of {', '.join(task_ratios)}")
    if max(task_ratios, key=task_ratios.get) == task:
        return min(current_size + increment, largest)
    return max(current_size - decrement, smallest)


def incremental(step, current_size, new_data_ratio, threshold=0.3, increment=1, largest=32, smallest=8):
    """Grow, in favour of the old data, while less than `threshold` of the samples is new, else shrink."""
    if new_data_ratio < threshold:
        return min(current_size + increment, largest)
    return max(current_size - increment, smallest)


def curriculum(
    step, current_size, difficulty, threshold=0.8, decrement=2, smallest=4, increment=1, largest=32
):
    """Shrink while samples are harder than `threshold`, else grow."""
    if difficulty > threshold:
        return max(current_size - decrement, smallest)
    return min(current_size + increment, largest)
