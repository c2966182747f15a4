"""What the run's objects would do when they go (``__del__``, ``finally`` of a generator), if that is after its end.

Its names, the frames of an error that ended it and cycles keep objects beyond the end, when files and the user's names
are real again. CPython calls ``__del__`` once for each object, and notes that (PEP 442): here it is called at the end
of the run, as a function that does nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import types
from typing import Any

from oom_magic.predict.isolation.live_objects import find_kinds, find_objects
from oom_magic.user_code import is_users_file

_call_finalizer: Any = ctypes.pythonapi.PyObject_CallFinalizer  # notes that it was called
_call_finalizer.argtypes, _call_finalizer.restype = [ctypes.py_object], None


class Finalizers:
    """Knows the objects that are alive when it is made, which stay as they are."""

    def __init__(self) -> None:
        objects, users = _with_finalizers()
        self._before = {id(one) for one in objects if type(one) in users or _is_users_generator(one)}

    def end(self, closes_generators: bool) -> None:
        """No code of the others runs any more when they go; generators end now, or may go on in a later run."""
        objects, users = _with_finalizers()
        made = [one for one in objects if id(one) not in self._before]
        for one in made if closes_generators else ():
            if _is_users_generator(one) and one.gi_frame is not None and not one.gi_running:
                with contextlib.suppress(BaseException):  # as where it is collected, it is told, not raised
                    one.close()
        owners = dict.fromkeys(users.values())
        try:
            for owner in owners:
                owners[owner] = vars(owner)["__del__"]
                type.__setattr__(owner, "__del__", _do_nothing)
            for one in made:
                if type(one) in users:
                    _call_finalizer(one)
        finally:
            for owner, usual in owners.items():
                if usual is not None:
                    type.__setattr__(owner, "__del__", usual)


def _do_nothing(_one: Any) -> None:
    pass


def _with_finalizers() -> tuple[list[Any], dict[type, Any]]:
    """The objects that are alive and may be of such kinds, and the user's classes, each with that whose it is."""
    found = {kind: _owner_of(kind) for kind in find_kinds()}
    users = {kind: owner for kind, owner in found.items() if owner is not None}
    return find_objects({*users, types.GeneratorType}), users


def _owner_of(kind: type) -> type | None:
    """The class of the user's whose ``__del__`` objects of this type have."""
    owner = next((one for one in kind.__mro__ if "__del__" in vars(one)), None)
    code = None if owner is None else getattr(vars(owner)["__del__"], "__code__", None)
    return owner if code is not None and is_users_file(code.co_filename) else None


def _is_users_generator(one: Any) -> bool:
    return type(one) is types.GeneratorType and is_users_file(one.gi_code.co_filename)
