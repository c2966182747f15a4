"""The sentences in the code and their catalogues: ``python tests/project/translations.py`` brings the ``.po`` files up to date.

Whoever adds or changes a sentence runs it and translates what it lists; ``test_translations.py`` fails until then.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from string import Formatter

from babel.messages.catalog import Catalog
from babel.messages.pofile import read_po, write_po

from tests.support.folders import ROOT

PACKAGE = ROOT / "oom_magic"
Message = str | tuple[str, str]
HEADER = r"""# What oom_magic says. Fields in braces stay as they are.
msgid ""
msgstr ""
"Language: {language}\n"
"Content-Type: text/plain; charset=utf-8\n"
"Plural-Forms: {plurals}\n"

"""


def messages(source: str) -> Iterator[Message]:
    """What the code marks for translation: the first argument of ``_``, both of ``ngettext``, the tables of sentences."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "_":
                yield text_of(node.args[0])
            elif node.func.id == "ngettext":
                yield text_of(node.args[0]), text_of(node.args[1])
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "Sentences":
            yield from in_table(node.value)


def in_table(table: ast.expr | None) -> Iterator[Message]:
    """The sentences of a table; tables within it are annotated where they are made."""
    if not isinstance(table, ast.Dict):
        return
    for key, value in zip(table.keys, table.values, strict=True):
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "Plural":
            yield text_of(value.args[0]), text_of(value.args[1])
        elif key is not None:
            yield text_of(value)


def text_of(node: ast.expr) -> str:
    """The string that an argument is; anything else cannot be translated."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError(f"line {node.lineno}: a sentence is one string, its values are fields: {ast.unparse(node)}")


def template() -> Catalog:
    """Every sentence of the package that has words, with the files that say it."""
    catalog = Catalog()
    for file in sorted(PACKAGE.rglob("*.py")):
        for message in messages(file.read_text("utf-8")):
            if has_words(message):
                catalog.add(message, locations=[(str(file.relative_to(PACKAGE.parent)), 0)])
    return catalog


def has_words(message: Message) -> bool:
    """Whether there is anything to translate beside fields and signs."""
    one = message if isinstance(message, str) else message[0]
    return any(text.strip(" ?.:;,()") for text, *_ in Formatter().parse(one))


def catalogue(path: Path) -> Catalog:
    """A ``.po`` file as it is."""
    with path.open("rb") as file:
        return read_po(file, locale=path.parts[-3])


def updated(path: Path) -> Catalog:
    """The catalogue with the sentences of the code, without those that the code has no more."""
    found = catalogue(path)
    found.update(template(), no_fuzzy_matching=True)
    found.obsolete.clear()
    return found


def written(catalog: Catalog) -> bytes:
    """The text of its file: by the files that say the sentences, without lines and dates, which change by themselves."""
    text = BytesIO()
    write_po(text, catalog, width=110, omit_header=True, sort_by_file=True, include_lineno=False)
    return HEADER.format(language=catalog.locale_identifier, plurals=catalog.plural_forms).encode() + text.getvalue()


def untranslated(catalog: Catalog) -> list[Message]:
    """The sentences that have no translation yet."""
    return [message.id for message in catalog if message.id and not any(strings(message.string))]


def strings(text: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """A translation as all its plural forms."""
    return (text,) if isinstance(text, str) else tuple(text or ())


if __name__ == "__main__":
    for path in sorted(PACKAGE.glob("locale/*/LC_MESSAGES/*.po")):  # of this checkout, whichever one is installed
        catalog = updated(path)
        path.write_bytes(written(catalog))
        missing = untranslated(catalog)
        print(f"{path.relative_to(PACKAGE.parent)}: {len(catalog)} sentences, {len(missing)} to translate")
        for message in missing:
            print(f"  {message}")
