"""The sentences of an explanation by their keys, in the language that it is shown in."""

from __future__ import annotations

from oom_magic.errors import REFUSALS
from oom_magic.explain.evidence.causes import Evidence
from oom_magic.explain.sentences.catalogue import CATALOGUE
from oom_magic.explain.sentences.evidence import EVIDENCE
from oom_magic.explain.sentences.pages import PAGE_CATALOGUE
from oom_magic.explain.sentences.remedies import REASONS
from oom_magic.language import Language, Sentences, render

SENTENCES: Sentences = {
    **CATALOGUE,
    **EVIDENCE,
    **PAGE_CATALOGUE,
    **REASONS,
    **{f"refusal_{key}": sentence for key, sentence in REFUSALS.items()},
}


def translate(key: str, lang: Language = "en", /, **values: object) -> str:
    """The catalogue's sentence for ``key``; values named ``*_bytes`` are written as sizes."""
    return render(SENTENCES[key], lang, values)


def render_evidence(item: Evidence, lang: Language) -> str:
    """A piece of evidence as a sentence; a value named ``x_key`` is said in the language, as ``x``."""
    keys = {name.removesuffix("_key"): str(key) for name, key in item.values.items() if name.endswith("_key")}
    said = {name: translate(key, lang, **item.values) for name, key in keys.items()}
    return translate(item.key, lang, **{**item.values, **said})
