"""Faults in code pasted beside a message: tensors that a loop keeps alive, by its syntax tree."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from oom_magic.explain.syntax import expression

_MAX_BLOCKS = 40
_MAX_BLOCK_LINES = 300
_MAX_REPAIRS = 12
_MAX_LINE = 300
_CODE = re.compile(
    r"^\s*(?:(?:for|while|with|def|class|if|elif|else|try|except|finally|return|import|from|async)\b.*"
    r"|@\w[\w.]*.*|#.*|[\w.\[\]'\", ()*]{1,120}\s?(?:[-+*/]?=)\s?\S.*|[\w.]{1,80}\(.*|\s*[)\]}]+,?\s*|\s*\w+=.*,\s*"
    r"|del .*"
    r"|pass|break|continue|\.\.\.|[\"'][^\"']{1,60}[\"']\s?:.*)\s*$"
)
_FENCE = re.compile(r"^\s*(?:`{3,}|~{3,})")
# Numbers and detached tensors; collecting them takes almost no memory.
_CUTS = re.compile(r"\.(?:item|detach|cpu|numpy|tolist|data)\b|\b(?:float|int|len|str|round|argmax|loss_value)\(")
_TENSOR_NAME = re.compile(
    r"(?:^|_)(?:loss\w*|likelihood|logits?|outputs?|preds?|predictions?|probs?|scores?|feats?|features?|hiddens?"
    r"|embeds?"
    r"|embeddings?|log_probs?|logp)(?:$|_|\d)|loss|tensor",
    re.I,
)
_FUNCTION_NAME = re.compile(r"(?:^|_)(?:fn|fun|func|function|criterion|module|layer)s?$", re.I)
_STATE_NAME = re.compile(r"^(?:\w*_)?(?:h|c|hx|cx|hidden\w*|state\w*|mem\w*|carry)$", re.I)
_MODEL_NAME = re.compile(
    r"(?:^|\.)(?:\w*model\w*|net|\w*net|encoder|decoder|generator|discriminator|pipe|backbone)$", re.I
)
_NEW_TENSOR = re.compile(r"\btorch\.(?:empty|zeros|ones|full|rand|randn)\(.*(?:cuda|device|\.to\()")
_LOSS_CALL = re.compile(r"(?:criterion|loss|cross_entropy|neg_log_likelihood)\w*$", re.I)
_EVALUATES = re.compile(r"(?:^|_)(?:eval\w*|valid\w*|test\w*|infer\w*|predict\w*)(?:$|_)", re.I)
_NO_GRADIENTS = ("no_grad", "inference_mode", "set_grad_enabled")
_INLINE_SUM = re.compile(r"\b([A-Za-z_]\w{0,40}) ?\+= ?([A-Za-z_][\w.\[\]]{0,60})(?!\w*\()")
_INLINE_CALL = re.compile(
    r"\b\w{1,40}\.(append|update)\((\w{0,30}(?:loss|output|logits)\w{0,20})(?:\)|, ?[\w.]{1,40}\()"
)
_INLINE_RETAINED = re.compile(
    r"\.?\b(?:backward|grad)\([^()\n]{0,120}(?:\([^()\n]{0,60}\))?[^()\n]{0,60}retain_graph ?= ?True"
)


@dataclass(frozen=True)
class CodeFault:
    """One fault: its kind (a key of the catalogue, ``code_<kind>``) and the line that shows it."""

    kind: str
    code: str


@dataclass
class _Scope:
    """What is known while a block of code is walked."""

    in_loop: bool = False
    without_gradients: bool = False
    evaluates: bool = False
    loop_assigns: frozenset[str] = frozenset()
    tensors: set[str] = field(default_factory=set)
    buffers: set[str] = field(default_factory=set)


def faults_in(text: str) -> tuple[CodeFault, ...]:
    """The faults that pasted code shows, each kind once, in the order of the text. Never raises."""
    found: dict[str, CodeFault] = {}
    has_loop = False
    for block in dict.fromkeys(map(tuple, _blocks(text))):  # ranks print the same
        tree = _parsed(block)
        if tree is not None:
            has_loop |= any(isinstance(node, ast.For | ast.While) for node in ast.walk(tree))
            for fault in _Walk(tree).faults():
                found.setdefault(fault.kind, fault)
    for fault in () if has_loop else _inline(text):
        found.setdefault(fault.kind, fault)
    return tuple(found.values())


def without_graph(line: str) -> str:
    """A line that keeps a tensor over steps, rewritten to keep a number (a loss) or a detached tensor on the host.

    Empty for other lines.
    """
    tree, _ = _tree_or_error([line])
    node = tree.body[0] if tree is not None and tree.body else None
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.value.args:
        node.value.args[0] = _cut(node.value.args[0])
    elif isinstance(node, ast.AugAssign):
        node.value = _cut(node.value)
    else:
        return ""
    return ast.unparse(node)


def _cut(value: ast.expr) -> ast.expr:
    text = ast.unparse(value)
    end = ".item()" if "loss" in text.lower() else ".detach().cpu()"
    whole = text if isinstance(value, ast.Name | ast.Attribute | ast.Subscript | ast.Call) else f"({text})"
    return expression(whole + end)


def _blocks(text: str) -> Iterator[list[str]]:
    """Runs of lines that look like code; prose between them ends a run."""
    block: list[str] = []
    count = 0
    for line in text.split("\n"):
        is_code = len(line) <= _MAX_LINE and bool(_CODE.match(line)) and not _FENCE.match(line)
        if is_code and len(block) < _MAX_BLOCK_LINES:
            block.append(line.expandtabs(4))
            continue
        if not line.strip() and block:
            continue
        if block:
            yield block
            count += 1
            block = []
            if count >= _MAX_BLOCKS:
                return
    if block:
        yield block


def _parsed(block: Sequence[str]) -> ast.Module | None:
    """The tree of a block; lines that are not Python are dropped one by one."""
    margin = min((len(line) - len(line.lstrip()) for line in block if line.strip()), default=0)
    lines = [line[margin:] for line in block]
    for _ in range(_MAX_REPAIRS):
        tree, error = _tree_or_error(lines)
        if error is None:
            return tree
        at = min(max((error.lineno or 1) - 1, 0), len(lines) - 1)
        if isinstance(error, IndentationError) and "expected an indented block" in str(error):
            before = lines[: at + 1][-2] if at else lines[at]
            lines.insert(at, " " * (len(before) - len(before.lstrip()) + 4) + "pass")
        elif isinstance(error, IndentationError):
            lines[at] = lines[at].lstrip() if "unindent" not in str(error) else ""
        else:
            indent = len(lines[at]) - len(lines[at].lstrip())
            opens_block = lines[at].rstrip().endswith(":")
            lines[at] = " " * indent + ("if True:" if opens_block else "pass")
    return None


def _tree_or_error(lines: list[str]) -> tuple[ast.Module | None, SyntaxError | None]:
    """The tree of these lines, or a repairable error; neither if the error cannot be repaired."""
    try:
        return ast.parse("\n".join(lines)), None
    except SyntaxError as error:
        return None, error
    except (ValueError, RecursionError, MemoryError):
        return None, None


class _Walk:
    """One pass over a tree."""

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        names = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
        self._trains = any(name.endswith(".backward") for name in names)
        self._is_shut_off = any(name.rpartition(".")[2] in _NO_GRADIENTS for name in names) or any(
            one in ast.unparse(decorator)
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
            for decorator in node.decorator_list
            for one in _NO_GRADIENTS
        )
        self._evals = any(name.endswith(".eval") for name in names)

    def faults(self) -> Iterator[CodeFault]:
        """Every fault of the tree."""
        try:
            yield from self._block(self._tree.body, _Scope())
        except RecursionError:
            return

    def _block(self, body: Iterable[ast.stmt], scope: _Scope) -> Iterator[CodeFault]:
        for node in body:
            yield from self._statement(node, scope)

    def _statement(self, node: ast.stmt, scope: _Scope) -> Iterator[CodeFault]:
        if isinstance(node, ast.For | ast.While | ast.AsyncFor):
            assigned = scope.loop_assigns | _assigned(node.body)
            inner = _Scope(True, scope.without_gradients, scope.evaluates, assigned, scope.tensors, scope.buffers)
            yield from self._unguarded(node, scope)
            yield from self._block([*node.body, *node.orelse], inner)
        elif isinstance(node, ast.With | ast.AsyncWith):
            is_off = any(one in ast.unparse(item.context_expr) for item in node.items for one in _NO_GRADIENTS)
            off = scope.without_gradients or is_off
            yield from self._block(
                node.body, _Scope(scope.in_loop, off, scope.evaluates, scope.loop_assigns, scope.tensors, scope.buffers)
            )
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            evaluates = bool(_EVALUATES.search(node.name))
            yield from self._block(node.body, _Scope(False, self._is_shut_off, evaluates, frozenset(), set()))
        elif isinstance(node, ast.ClassDef):
            yield from _collected_outputs(node)
            yield from self._block(node.body, _Scope())
        elif isinstance(node, ast.If):
            yield from self._block([*node.body, *node.orelse], scope)
        elif isinstance(node, ast.Try):
            yield from self._block([*node.body, *node.orelse, *node.finalbody], scope)
        else:
            yield from self._simple(node, scope)

    def _simple(self, node: ast.stmt, scope: _Scope) -> Iterator[CodeFault]:
        if isinstance(node, ast.Assign):
            yield from self._assignment(node, scope)
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            yield from self._sum(ast.unparse(node.target), node.value, node, scope)
        for call in (one for one in ast.walk(node) if isinstance(one, ast.Call)):
            yield from self._call(call, node, scope)

    def _assignment(self, node: ast.Assign, scope: _Scope) -> Iterator[CodeFault]:
        targets = [name for target in node.targets for name in _names(target)]
        value = node.value
        yield from self._stored(node, scope)
        if isinstance(value, ast.Call):
            called = ast.unparse(value.func)
            if _MODEL_NAME.search(called) or _LOSS_CALL.search(called):
                scope.tensors.update(targets)
            yield from self._carried(targets, value, node, scope)
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add) and len(targets) == 1:
            sides = [value.left, value.right]
            rest = [side for side in sides if ast.unparse(side) != targets[0]]
            if len(rest) == 1:
                yield from self._sum(targets[0], rest[0], node, scope)

    def _stored(self, node: ast.Assign, scope: _Scope) -> Iterator[CodeFault]:
        """A result written into a device tensor in each iteration, which keeps the graph of each."""
        if isinstance(node.value, ast.Call) and _NEW_TENSOR.search(ast.unparse(node.value)):
            scope.buffers.update(name for target in node.targets for name in _names(target))
        is_stored = any(
            isinstance(target, ast.Subscript) and ast.unparse(target.value) in scope.buffers for target in node.targets
        )
        is_result = isinstance(node.value, ast.Call) and not _CUTS.search(ast.unparse(node.value))
        if is_stored and is_result and scope.in_loop and not (scope.without_gradients or self._is_shut_off):
            yield CodeFault("stores_tensors", _line(node))

    def _carried(self, targets: list[str], call: ast.Call, node: ast.stmt, scope: _Scope) -> Iterator[CodeFault]:
        """A state that passes through a module in each iteration and keeps the graphs of all earlier ones."""
        if len(targets) < 2 or not scope.in_loop or scope.without_gradients:
            return
        given = {name for argument in call.args for name in _names(argument)}
        states = [name for name in targets if name in given and _STATE_NAME.match(name)]
        cut = (rf"\b{re.escape(name)}\b[^\n]{{0,60}}(?:detach|\.data\b)" for name in states)
        if states and not any(re.search(pattern, self._text) for pattern in cut):
            yield CodeFault("carries_state", _line(node))

    @cached_property
    def _text(self) -> str:
        return ast.unparse(self._tree)

    def _sum(self, target: str, value: ast.expr, node: ast.stmt, scope: _Scope) -> Iterator[CodeFault]:
        """A running sum of tensors that is not reset in each iteration."""
        if not scope.in_loop or target in scope.loop_assigns or scope.without_gradients or not _is_tensor(value, scope):
            return
        if target.rpartition(".")[2] == "loss" and self._trains:
            return  # a loss made of parts, whose start is not shown
        yield CodeFault("sums_tensors", _line(node))

    def _call(self, call: ast.Call, node: ast.stmt, scope: _Scope) -> Iterator[CodeFault]:
        if not isinstance(call.func, ast.Attribute):
            return
        name, argument = call.func.attr, call.args[0] if call.args else None
        if name in ("append", "extend", "add") and argument is not None and scope.in_loop:
            if _is_tensor(argument, scope):
                is_off = scope.without_gradients or self._is_shut_off
                yield CodeFault("collects_tensors" if is_off else "appends_tensors", _line(node))
        elif name == "update" and argument is not None and len(call.args) > 1 and _is_tensor(argument, scope):
            yield CodeFault("averages_tensors", _line(node))
        elif name in ("backward", "grad") and any(
            one.arg == "retain_graph" and ast.unparse(one.value) == "True" for one in call.keywords
        ):
            yield CodeFault("retains_graph", _line(node))

    def _unguarded(self, loop: ast.For | ast.While | ast.AsyncFor, scope: _Scope) -> Iterator[CodeFault]:
        """An inference loop with gradients enabled."""
        calls = [node for node in ast.walk(loop) if isinstance(node, ast.Call)]
        names = [ast.unparse(call.func) for call in calls]
        infers = next(
            (
                c
                for c, name in zip(calls, names, strict=True)
                if _MODEL_NAME.search(name) or name.endswith(".inference")
            ),
            None,
        )
        is_evaluation = self._evals or scope.evaluates or any(name.endswith((".inference", ".infer")) for name in names)
        if infers is None or self._trains or self._is_shut_off or scope.without_gradients or not is_evaluation:
            return
        yield CodeFault("infers_with_gradients", _shortened(ast.unparse(infers)))


def _collected_outputs(node: ast.ClassDef) -> Iterator[CodeFault]:
    """A hook that receives the outputs of all steps of an epoch, which are kept until then (Lightning before 2.0)."""
    methods = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
    for name, method in methods.items():
        step = name.removesuffix("_epoch_end") + "_step"
        if name.endswith("_epoch_end") and len(method.args.args) > 1 and step in methods:
            yield CodeFault("collects_outputs", f"def {name}({ast.unparse(method.args)})")


def _assigned(body: Iterable[ast.stmt]) -> frozenset[str]:
    """The names that statements rebind, other than by adding to them."""
    names: set[str] = set()
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Assign):
                own = {name for target in node.targets for name in _names(target)}
                names |= own - {name for name in _names(node.value) if isinstance(node.value, ast.BinOp)}
    return frozenset(names)


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Tuple | ast.List):
        return [name for one in node.elts for name in _names(one)]
    if isinstance(node, ast.BinOp):
        return [*_names(node.left), *_names(node.right)]
    return [ast.unparse(node)] if isinstance(node, ast.Name | ast.Attribute) else []


def _is_tensor(value: ast.expr, scope: _Scope) -> bool:
    """Whether an expression is a tensor with a graph, by its construction or its name."""
    text = ast.unparse(value)
    if _CUTS.search(text) or isinstance(value, ast.Constant):
        return False
    if isinstance(value, ast.Call) and _MODEL_NAME.search(ast.unparse(value.func)):
        return True
    names = [node.id for node in ast.walk(value) if isinstance(node, ast.Name)]
    attributes = [node.attr for node in ast.walk(value) if isinstance(node, ast.Attribute)]
    named = (name for name in [*names, *attributes] if not _FUNCTION_NAME.search(name))
    return any(name in scope.tensors or _TENSOR_NAME.search(name) for name in named)


def _line(node: ast.stmt) -> str:
    return _shortened(ast.unparse(node).split("\n")[0])


def _shortened(code: str) -> str:
    return code if len(code) <= 90 else f"{code[:87]}..."


def _inline(text: str) -> Iterator[CodeFault]:
    """Faults in single lines and prose, where there is no syntax tree."""
    for line in text.split("\n")[:4000]:
        if len(line) > _MAX_LINE:
            continue
        call = _INLINE_CALL.search(line) if "append" in line or "update" in line else None
        if call is not None and not _FUNCTION_NAME.search(call.group(2)):
            yield CodeFault("appends_tensors" if call.group(1) == "append" else "averages_tensors", call.group())
        with_graph = _INLINE_RETAINED.search(line) if "retain_graph" in line else None
        if with_graph is not None:
            yield CodeFault("retains_graph", _shortened(f"{with_graph.group()})"))
        for match in _INLINE_SUM.finditer(line) if "+=" in line else ():
            target, value = match.groups()
            rest = line[match.start() : match.end() + 20]
            is_tensor = bool(_TENSOR_NAME.search(value.rpartition(".")[2])) or value.startswith("xxx")
            is_sum = target.lower() != "loss" or value.startswith("xxx")
            if is_tensor and is_sum and not _CUTS.search(rest):
                yield CodeFault("sums_tensors", match.group())
