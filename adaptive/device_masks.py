"""Variables that hide GPUs -> what is wrong with them; they are read, never set.

ROCm applies two, one after the other: HIP's numbers, or CUDA's, count within what ROCR's left.
To add one: a name in NAMES.
"""

from __future__ import annotations

from collections.abc import Mapping

NAMES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def problem(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """(what is wrong, what to do) where a variable hides every device, or two of them together do."""
    given = {name: environment[name] for name in NAMES if name in environment}
    told = ", ".join(f"{name}={value!r}" for name, value in given.items())
    empty = [name for name, value in given.items() if not value.strip()]
    if empty:
        return f"{told}: every device is hidden", f"unset {empty[0]} to use them"
    first, second, cuda = NAMES
    for within in (second, cuda):
        if first not in given or within not in given:
            continue
        left = len(given[first].split(","))
        beyond = [number for number in given[within].split(",") if number.isdigit() and int(number) >= left]
        if beyond:
            asked = (
                f"ROCR leaves {left} device(s), counted from 0; {within.split('_')[0]} asks for {beyond[0]}"
            )
            return f"{told}: {asked}", f"unset {first} and keep {within}"
    if second in given and cuda in given and given[second] != given[cuda]:
        return f"{told}: they contradict each other", f"keep {second} and unset the other"
    return None
