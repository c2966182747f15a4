"""The catalogues are complete, true to the code, and read as gettext's own tools read them."""

from __future__ import annotations

import ast
import re
from string import Formatter

import pytest

from oom_magic.language import CATALOGUES, Plural, ngettext, render, set_language
from tests.project.translations import (
    PACKAGE,
    catalogue,
    has_words,
    messages,
    strings,
    template,
    untranslated,
    updated,
    written,
)

PATHS = pytest.mark.parametrize("path", CATALOGUES.values(), ids=CATALOGUES)


def fields(sentence):
    return sorted({name for _, name, _, _ in Formatter().parse(sentence) if name})


@PATHS
def test_a_catalogue_is_that_of_the_code(path):
    assert written(updated(path)) == path.read_bytes(), "run python tests/project/translations.py"


@PATHS
def test_every_sentence_is_translated(path):
    assert untranslated(updated(path)) == []


@PATHS
def test_a_translation_has_the_fields_and_numbers_of_its_sentence(path):
    for message in catalogue(path):
        if not message.id:
            continue
        many = message.id if isinstance(message.id, str) else message.id[1]
        for text in strings(message.string):
            assert fields(text) == fields(many), many
            assert len(re.findall(r"\d+", text)) == len(re.findall(r"\d+", many)), many


@PATHS
def test_what_is_read_at_run_time_is_what_babel_reads(path):
    (lang,) = (lang for lang, other in CATALOGUES.items() if other == path)
    for message in catalogue(path):
        if message.id:
            one, many = (message.id, message.id) if isinstance(message.id, str) else message.id
            values = values_for(many)
            shown = render(one if one == many else Plural(one, many), lang, values)
            assert shown == strings(message.string)[0].format_map(values)


class Anything:
    """Fits every field of a sentence."""

    def __format__(self, spec):
        return "anything"

    __repr__ = __str__ = lambda self: "anything"


def values_for(sentence):
    """Values for a sentence's fields; there are two of what is counted."""
    return {name: Anything() for _, name, _, _ in Formatter().parse(sentence) if name} | {"count": 2}


def test_the_english_is_ascii_but_for_signs():
    for message in template():
        texts = strings(message.id)
        assert not re.search("[\u4e00-\u9fff]", "".join(texts))


@pytest.mark.parametrize(
    "source", ['_(f"{size} is free")', '_("free: " + size)', "ngettext(text, text, 1)", 'A: Sentences = {"a": b}']
)
def test_a_sentence_that_no_tool_can_collect_is_an_error(source):
    with pytest.raises(ValueError, match="line 1"):
        list(messages(source))


def test_what_is_collected():
    source = (
        'T: Sentences = {"k": "one" " two", "p": Plural("a", "b"), **OTHER}; _("x {y}", y=1); ngettext("p", "q", 2)'
    )
    assert sorted(map(str, messages(source))) == sorted(["one two", "('a', 'b')", "x {y}", "('p', 'q')"])
    assert not has_words("{value}?") and has_words("GPU {index}")


@pytest.fixture
def english():
    set_language("en")
    yield
    set_language(None)


def test_one_and_several(english):
    sentence = ("{count} optimizer step", "{count} optimizer steps")
    assert [ngettext(*sentence, count) for count in (0, 1, 2)] == [
        "0 optimizer steps",
        "1 optimizer step",
        "2 optimizer steps",
    ]
    assert render(Plural(*sentence), "en", {"count": 1}) == "1 optimizer step"


def test_what_has_no_translation_is_said_in_english():
    assert (
        render("no sentence of ours: {size_bytes}", "zh", {"size_bytes": 2**30}) == "no sentence of ours: 1024.00 MiB"
    )


# What shows its first argument to people, and errors that reach them.
SHOWN = {"Sentence", "Fact", "Part", "Parts", "Details", "Description", "Table", "Finding", "Assumption", "print"}
SHOWN |= {
    "assume",
    "_assume",
    "note",
    "UsageError",
    "ValueError",
    "TypeError",
    "RuntimeError",
    "ImportError",
    "KeyError",
}
SHOWN |= {"NotImplementedError", "OSError", "TimeoutError", "UnreachableError"}
# Where errors are not said to people: PyTorch's own words, Python's, or caught by who asked.
NOT_OURS = {
    "explain/live/frames.py": "a question whose answer is that it is not known",
    "__main__.py": "a command's name",
    "predict/kernels/matrix_products.py": "PyTorch's message",
    "predict/operators/type_checks.py": "PyTorch's messages",
    "predict/fake_cuda/fake_gpu.py": "PyTorch's messages",
    "predict/fake_cuda/fake_memory.py": "PyTorch's messages",
    "predict/fake_cuda/device_view.py": "PyTorch's message",
    "predict/isolation/files/file_tree.py": "Python's message",
    "predict/isolation/files/saving.py": "PyTorch's message",
    "predict/operators/calls.py": "for developers",
    "views/blocks.py": "for developers",
}


def said(call):
    """The literal texts that a call shows."""
    name = getattr(call.func, "id", None) or getattr(call.func, "attr", "")
    if name not in SHOWN or not call.args:
        return
    pending = [call.args[0]]
    while pending:
        node = pending.pop()
        match node:
            case ast.Constant(value=str()):
                yield node.value
            case ast.JoinedStr():
                yield " ".join(part.value for part in node.values if isinstance(part, ast.Constant))
            case ast.Tuple() | ast.List():
                pending += node.elts
            case ast.IfExp():
                pending += [node.body, node.orelse]
            case ast.BinOp():
                pending += [node.left, node.right]


def test_what_people_read_can_be_translated():
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        name = str(file.relative_to(PACKAGE))
        for node in ast.walk(ast.parse(file.read_text("utf-8"))) if name not in NOT_OURS else ():
            texts = said(node) if isinstance(node, ast.Call) else ()
            found += [
                f"{name}:{node.lineno}: {text}"
                for text in texts
                if re.search(r"[A-Za-z]{3}.*[ ].*[a-z]{2}|^[a-z]{3,}$", text)
            ]
    assert found == [], "put it into _() or ngettext()"


def in_markup(source):
    """The words between the tags of HTML that code writes."""
    inside = set()
    for node in ast.walk(ast.parse(source)):  # a text before its parts
        parts = node.values if isinstance(node, ast.JoinedStr) else [node] if node not in inside else []
        inside.update(parts)
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts)
        if "</" in text:
            yield from re.findall(r"[A-Za-z]{3,} [a-z]{2,}[^<{]*", re.sub(r"<[^<>]*>", "<>", text))


def test_words_in_markup_can_be_translated():
    assert list(in_markup("f'<b>What fits</b> <i class=\"a b\">{name}</i>'")) == ["What fits"]
    files = [file for folder in ("notebook", "views") for file in sorted((PACKAGE / folder).rglob("*.py"))]
    assert {file.name: found for file in files if (found := list(in_markup(file.read_text("utf-8"))))} == {}
    scripts = [file.read_text("utf-8") for file in PACKAGE.rglob("*.html")]
    assert not re.findall(r'(?:textContent|ariaLabel|title): "[^"]+"', "".join(scripts))


def test_no_name_hides_what_translates():
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        for function in ast.walk(ast.parse(file.read_text("utf-8"))):
            if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            names = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == "_"]
            if len({type(name.ctx) for name in names}) > 1:
                found.append(f"{file.relative_to(PACKAGE)}:{function.lineno}: {function.name}")
    assert found == []
