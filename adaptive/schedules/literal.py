"""Text of a flag -> (name, arguments): a call with literal arguments, parsed and never evaluated."""

from __future__ import annotations

import ast
from typing import Any

from adaptive.config import BadSetting


def parse_call(text: str, flag: str) -> tuple[str, list[Any], dict[str, Any]]:
    """'linear(2, max_size=32)' -> ("linear", [2], {"max_size": 32}); a bare name is a call without arguments.

    Raises BadSetting for anything but names, numbers, strings, and lists or dictionaries of these.
    """
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if isinstance(call, ast.Name):
            return call.id, [], {}
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and _named_once(call.keywords):
            arguments = [ast.literal_eval(a) for a in call.args]
            return call.func.id, arguments, {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        pass
    raise BadSetting(
        f'{flag} is "{text}"; write NAME or NAME(setting=1.5, other="text") with plain numbers and strings'
    )


def _named_once(keywords: list[ast.keyword]) -> bool:
    names = [keyword.arg for keyword in keywords]
    return None not in names and len(set(names)) == len(names)
