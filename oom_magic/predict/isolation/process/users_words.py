"""The words in the user's code: a name that is among them may be one that the user put into a library."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator

from oom_magic.predict.isolation.reach import users_modules
from oom_magic.user_code import is_users_file

_WORD = re.compile(r"\w+")
_known: dict[str, tuple[list[str], set[str]]] = {}  # of files, with their lines


def words_of(text: str) -> set[str]:
    """The words in a text."""
    return set(_WORD.findall(text))


def users_words() -> set[str]:
    """The words in the user's modules and cells."""
    return set().union(*map(_of_file, {*_files(), *filter(is_users_file, list(linecache.cache))}))


def _files() -> Iterator[str]:
    return (str(one.__file__) for one in users_modules() if getattr(one, "__file__", None))


def _of_file(file: str) -> set[str]:
    lines = linecache.getlines(file)  # the same list until the file is read again
    if file not in _known or _known[file][0] is not lines:
        _known[file] = lines, words_of("".join(lines))
    return _known[file][1]
