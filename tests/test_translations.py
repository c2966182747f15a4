"""The catalogues are complete, true to the code, and read as gettext's own tools read them."""

from __future__ import annotations

import re
from string import Formatter

import pytest
from translations import catalogue, has_words, messages, strings, template, untranslated, updated, written

from oom_magic.language import CATALOGUES, Plural, keep_language, ngettext, render

PATHS = pytest.mark.parametrize("path", CATALOGUES.values(), ids=CATALOGUES)


def fields(sentence):
    return sorted({name for _, name, _, _ in Formatter().parse(sentence) if name})


@PATHS
def test_a_catalogue_is_that_of_the_code(path):
    assert written(updated(path)) == path.read_bytes(), "run python tests/translations.py"


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
            assert _said(one, many, lang) == strings(message.string)[0]


def _said(one, many, lang):
    from oom_magic.language import _translations

    return _translations(lang).gettext(one) if one == many else _translations(lang).ngettext(one, many, 2)


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
    keep_language("en")
    yield
    keep_language(None)


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
