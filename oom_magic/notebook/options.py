"""Options of the magics, split from the statement that follows them; errors name what is allowed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser, parse_argstring

Value = TypeVar("Value")

_TOKEN = re.compile(r"\s*(\"[^\"]*\"|'[^']*'|\S+)")


def unquoted(text: str) -> str:
    """An option's value without the quotes that IPython leaves around it."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def parse_options(magic: Any, line: str) -> tuple[Any, str]:
    """The options of a magic's line, and the statement after them. A UsageError says what is allowed."""
    parser: MagicArgumentParser = magic.parser
    options, statement = _split(parser, line)
    try:
        return parse_argstring(magic, options), statement
    except UsageError as error:
        usage = parser.format_usage().replace("::\n\n", "").strip()
        raise UsageError(f"{error}\n{usage}") from None


def checked(option: str, parse: Callable[[str], Value], text: str) -> Value:
    """``parse(text)``; a ValueError, which names the value and the fix, becomes a UsageError."""
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None


def _split(parser: MagicArgumentParser, line: str) -> tuple[str, str]:
    """The options with their values, and the rest of the line as it is written."""
    options, end = [], 0
    while (token := _TOKEN.match(line, end)) is not None and token[1].startswith("-"):
        end = token.end()
        options.append(token[1])
        action = parser._option_string_actions.get(token[1])
        value = _TOKEN.match(line, end) if action is not None and action.nargs != 0 else None
        if value is not None:
            end = value.end()
            is_negative = value[1].startswith("-") and token[1].startswith("--")
            options.append(f"{options.pop()}={value[1]}" if is_negative else value[1])
    return " ".join(options), line[end:].strip()
