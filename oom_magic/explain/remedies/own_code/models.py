"""The models of the user's own code, by the names that they have there: for code to paste."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from types import CodeType, FrameType
from typing import Any

from oom_magic.explain.remedies.own_code.checkpointing import checkpointing
from oom_magic.explain.remedies.own_code.loops import is_module
from oom_magic.explain.syntax import names_in
from oom_magic.user_code import is_users_file

_LOADS = ("from_pretrained", "from_config")
_WRAPPERS = ("DistributedDataParallel", "DataParallel")
_SWITCH = ("switch", "switched")
_NO_MODELS = ("Tokenizer", "Config", "Processor", "FeatureExtractor")


def own_names(tree: ast.Module, names: Mapping[str, Any]) -> Mapping[str, str]:
    """Values for ``remedy_code``'s templates, found in a cell: ``loader`` loads ``source`` as ``model``.

    Of ``names``, those that the cell sees, the one model that is no part of another tells ``inner``, what a wrapper for
    several GPUs has inside, and the ``layers`` that it repeats; all of them tell how their parts are ``recomputed``.
    """
    used = names_in(tree)
    found = {name: one for each in used for name, one in held_by(each, names.get(each), is_module)}
    called = {id(found[name]): name for name in sorted(found, key=lambda one: "." not in one)}  # by a name of its own
    models = {name: found[name] for name in found if name in called.values()}
    models = {name: one for name, one in models.items() if any(True for _ in one.parameters())}
    parts = {id(part) for one in models.values() for part in one.modules() if part is not one}
    models = {name: one for name, one in models.items() if id(one) not in parts}
    return {**_of_models(models), **_of_the_load(tree)}


def held_by(name: str, value: Any, is_wanted: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """What is wanted, with its path: a variable's value itself, or what an object of the user's own class has as
    attributes."""
    if is_wanted(value):
        yield name, value
        return
    home = sys.modules.get(type(value).__module__)
    is_own = home is not None and not inspect.ismodule(value) and not inspect.isroutine(value)
    if is_own and is_users_file(getattr(home, "__file__", None) or "<stdin>"):
        own = list(getattr(value, "__dict__", {}).items())
        yield from ((f"{name}.{part}", one) for part, one in own if is_wanted(one))


class MadeInside:
    """The models that a function of the user's, or a script, makes and that are gone with it."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, Mapping[str, str]]] = {}

    def note(self, model: Any) -> None:
        """Keep how ``model``, which is about to run for the first time, is called where it is made: in the outermost of
        the user's frames that has it as a variable."""
        frame: FrameType | None = sys._getframe(1)
        found: tuple[str, str] | None = None
        while frame is not None:
            code = frame.f_code
            if is_users_file(code.co_filename):
                sees = [one for one in list(frame.f_locals.items()) if one[0] != "self"]  # which no method makes
                name = next((name for name, value in sees if value is model), None)
                found = found if name is None else (_function_that_makes(name, code), name)
            frame = frame.f_back
        if found is not None:
            self._found.setdefault(found[0], {})[found[1]] = _of_models({found[1]: model})

    @property
    def names(self) -> Mapping[str, str]:
        """The same values as of ``own_names``; ``made`` are the names of models that ``function`` makes."""
        if len(self._found) != 1:
            return {}
        ((function, models),) = self._found.items()
        made = {"function": function, "made": ", ".join(models)}
        if len(models) == 1:
            return {**made, **next(iter(models.values()))}
        parts = [one["recomputed"] for one in models.values() if "recomputed" in one]
        return made | ({"recomputed": "\n".join(parts)} if parts else {})


def _function_that_makes(name: str, code: CodeType) -> str:
    """The function that has a variable of its own by that name: the one around a closure over it; "" for a script."""
    if name in code.co_freevars and sys.version_info >= (3, 11):
        return code.co_qualname.split(".<locals>")[-2].rpartition(".")[2]
    return "" if code.co_name == "<module>" else code.co_name


def _of_models(models: Mapping[str, Any]) -> dict[str, str]:
    """What is told of all models, and of the one, if it is one; the switch of the one in training mode: no other, such
    as a frozen reference beside it, keeps a graph."""
    trained = {name: one for name, one in models.items() if one.training}
    if len(models) > 1 and len(trained) == 1:
        ((name, model),) = trained.items()
        of_trained = _of_the_model(name, model)
        return {**_recomputed(models), **{key: of_trained[key] for key in _SWITCH if key in of_trained}}
    return {**_recomputed(models), **(_of_the_model(*next(iter(models.items()))) if len(models) == 1 else {})}


def _recomputed(models: Mapping[str, Any]) -> dict[str, str]:
    """The statements with which the parts of all models are recomputed; nothing where they have none."""
    if not models:
        return {}
    from oom_magic.predict.what_if.recomputed_parts import recomputed_parts  # loads torch

    blocks, sequences = [], []
    for name, model in models.items():
        inner, bare = _unwrapped(name, model)
        parts = recomputed_parts(bare)
        blocks += [f"*{part_at(inner, path)}" for path in parts.lists] + list(_blocks_at(inner, parts.blocks))
        sequences += [(part_at(inner, path), bounds) for path, bounds in parts.bounds]
    return {"recomputed": checkpointing(blocks, sequences)} if blocks or sequences else {}


def _blocks_at(name: str, paths: Iterable[str]) -> Iterator[str]:
    """Blocks of a model as expressions; several that follow one another in a list as a slice of it."""
    places = [path.rpartition(".") for path in paths]
    for owner, group in groupby(enumerate(places), lambda one: _run(*one)):
        last = [place[2] for _, place in group]
        is_slice = len(last) > 1
        yield (
            f"*{part_at(name, owner[0])}[{last[0]}:{int(last[-1]) + 1}]"
            if is_slice
            else part_at(name, f"{owner[0]}.{last[0]}")
        )


def _run(number: int, place: tuple[str, str, str]) -> tuple[str, str | int]:
    """What is the same of parts with consecutive numbers in one list."""
    owner, _, last = place
    return owner, int(last) - number if last.isdecimal() else last


def _unwrapped(name: str, model: Any) -> tuple[str, Any]:
    """What a wrapper for several GPUs has inside, and how it is called; any other model itself."""
    return (f"{name}.module", model.module) if type(model).__name__ in _WRAPPERS else (name, model)


def _of_the_model(name: str, model: Any) -> dict[str, str]:
    found = {"model": name, "called": _called(name, model)}
    inner, model = _unwrapped(name, model)
    found["inner"] = inner
    if type(model).__module__.startswith("transformers."):
        found["loader"] = type(model).__name__
    from oom_magic.predict.setups.model_source import name_of_switch
    from oom_magic.predict.what_if.model_changes import (  # loads torch
        chunk_tokens,
        path_of_blocks,
        path_of_head,
        path_of_switch,
    )

    head = path_of_head(model)
    if head is not None:
        found["language_model"] = part_at(inner, head)
        found["tokens"] = str(chunk_tokens(model.get_submodule(head)))

    switched = path_of_switch(model)
    if switched is not None:
        found["switch"] = name_of_switch(type(model.get_submodule(switched)))
        has_switch = hasattr(model, f"{found['switch']}_enable")  # PEFT passes it on
        found["switched"] = inner if has_switch else part_at(inner, switched)
    path = path_of_blocks(model)
    if path is None:
        return found
    found["layers"] = part_at(inner, path)
    if inner != name:  # for code that needs the model without its wrapper
        found["bare_layers"] = part_at(name, path)
    return found


def _called(name: str, model: Any) -> str:
    """What a hook is registered on, as the beginning of a statement: the model, or each part that has a forward, where
    it is a mere container of them, whose own hooks are never called."""
    first, *others = outermost = list(_with_forward(name, model))
    if outermost == [name]:
        return name
    row = f"[{', '.join(outermost)}]" if others or first[0] != "*" else first[1:]
    return f"for part in {row}:\n    part"


def _with_forward(name: str, module: Any) -> Iterator[str]:
    """The outermost parts of a module that can be called, as expressions; several alike as a row."""
    if _has_forward(module):
        yield name
    elif all(map(_has_forward, module.children())):
        yield f"*{name}.children()"
    else:
        for path, part in module.named_children():
            yield from _with_forward(part_at(name, path), part)


def _has_forward(module: Any) -> bool:
    name: str = type(module).forward.__name__
    return name != "_forward_unimplemented"  # torch/nn/modules/module.py


def part_at(name: str, path: str) -> str:
    """The part of a module at a path, as an expression: "net" and "stages.1" become "net.stages[1]"."""
    return name + "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in path.split(".") if part)


def _of_the_load(tree: ast.Module) -> dict[str, str]:
    for target, call in _loads(tree):
        found = {"loader": ast.unparse(call.func.value)}  # type: ignore[attr-defined]
        if target:
            found["model"] = target
        if call.func.attr == "from_pretrained" and call.args:  # type: ignore[attr-defined]
            found["source"] = ast.unparse(call.args[0]).replace("'", '"')
            options = [ast.unparse(one) for one in call.keywords if one.arg not in ("device_map", "max_memory")]
            if options:
                found["options"] = "".join(f", {one}" for one in options)
        return found
    return {}


def _loads(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """The calls that load a model, each with the name that the statement assigns."""
    for statement in ast.walk(tree):
        if not isinstance(statement, (ast.Assign, ast.Expr)):
            continue
        named = isinstance(statement, ast.Assign) and len(statement.targets) == 1
        target = ast.unparse(statement.targets[0]) if named else ""  # type: ignore[union-attr]
        for node in ast.walk(statement.value):
            is_load = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _LOADS
            if is_load and not ast.unparse(node.func.value).endswith(_NO_MODELS):  # type: ignore[attr-defined]
                yield target, node  # type: ignore[misc]
