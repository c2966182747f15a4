"""Sizes in prose: of pictures, sequences, graphs and batches, of the model and of its card."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from oom_magic.units import GIB, MIB

# An input of at least this size counts as large: a card of a few years ago processes it only in parts.
_LARGE_PICTURE = 1_000_000
_LONGEST_SHAPE = 10  # a panorama's width by its height
_LARGE_SEQUENCE = 8_192
_LATENT_AREA = 64
_LONGEST_STORY = 20_000
_LARGE_COUNTS = {"nodes": 50_000, "edges": 1_000_000, "points": 50_000, "gaussians": 1_000_000, "objects": 500}

_SIDES = re.compile(
    r"(?<![\w.\[/,-])(\d{3,5})\s?[x\u00d7X*]\s?(\d{3,5})(?:\s?[x\u00d7X*]\s?(\d{1,5}))?(?![\w%]|\.\d)"
    r"|\((\d{3,5}),\s?(\d{3,5})(?:,\s?[1-4])?\)|\[(\d{3,5})\s?[x\u00d7]\s?(\d{3,5})\]"
)
_TAKEN = re.compile(r"\bempty_strided_\w{3,4}\([^\n]*")  # by compiled code
_NOT_A_PICTURE = re.compile(r"(?:shape|size mismatch|weight|linear|matrix|torch\.size|tensor)\W{0,10}$", re.I | re.A)
_OF_A_SETTING = re.compile(r"\bset\w+\(\s?$", re.I)  # setPinnedMemory(1024*1024)
_OF_NUMBERS = re.compile(
    r"[)\]]?,? (?:(?:single|double|half|dense|sparse|square|random|float\d*|fp\d\d)[- ]?(?:precision )?){0,2}"
    r"(?:tensors?|matri(?:x|ces)|arrays?)\b", re.I,
)  # fmt: skip
_OF_A_PICTURE = re.compile(r"image|picture|photo|frame|video|resolution|size|shape|crop|tile|scan|slide|pixel", re.I)
_PICTURE_SIDE = re.compile(
    r"(?:images?|pictures?|resolution)(?:(?!\bon\b|\b(?:amd|rx|[rg]tx|radeon|nvidia|gpu|card)\b)[^.\n\d])"
    r"{0,24}>?[ \t]?(?<!-)(?!(?:199|20[012])\d(?!\d))(\d{4,5})(?![\d.])"
    r"[ \t]?(?:px|pixels|p\b)?",
    re.I,
)
_SQUARE = re.compile(
    r"(?<![\w.])(\d{3,4})(?:px|p)? (?:images?|pictures?)\b"
    r"|(?:images?|pictures?|resolution)[^.\n\d]{0,24}(?<!-)(?!(?:199|20[012])\d(?!\d))(\d{3,4})(?![\w.])",
    re.I | re.A,
)
_PICTURE_NAME = re.compile(
    r"(?:resolution|images?|videos?|pictures?|frames?)[^.\n]{0,30}\b[248]k\b|\b(?:1080|1440|2160)p\b"
    r"|\b4k (?:images?|videos?)",
    re.I | re.A,
)
_SEQUENCE = re.compile(
    r"(?:cutoff_len|max_(?:\w{1,20}_)?(?:len|length|tokens)|max[-_]model[-_]len|(?:sequence|context|prompt|token"
    r"|block)[ _-]?"
    r"(?:length|size|window|len)|num_ctx|n_ctx|ctx[-_]size|seq_?len|\s-c)\b\W{0,4}(?:of|is|to|up to|around)?\W{0,3}"
    r"(\d[\d,_]{0,14})\s?(k\b)?"
    r"|(\d{1,4})\s?(k)(?=[- ]?(?:context|tokens?|ctx|sequences?|length|seq)\b|的?(?:序列|上下文|长度))"
    r"|(?:lengths?|sequences?|samples?|inputs?|prompts?|documents?)\b[^.\n]{0,80}?(?P<tokens>\d[\d,]{3,7})\s?tokens\b"
    r"|(?:lengths?|sequences?) (?:reach\w*|of|is|to)\s(\d{1,4})\s?(k)\b",
    re.I | re.A,
)
_OF_WORDS = re.compile(r"vocab\w*\W(?:\w+ )?$", re.I)  # a vocabulary of 32k tokens is no sequence
_RECORDING = re.compile(
    r"(?:(?P<hours>\d{1,2}(?:\.\d)?)[- ]?(?:hours?|hrs?)|(?P<minutes>\d{1,3})[- ]?min(?:ute)?s?)(?: (?:of|long))?[- ]"
    r"(?:\w+ )?(?:audio|videos?|recordings?|speech|wav|mp3|files?)\b",
    re.I | re.A,
)
_LONG_HOURS = 1 / 6
_CLIP = re.compile(
    r"\b\d{3,4}\s?[x\u00d7]\s?\d{3,4}\b[^.\n]{0,24}\b(?:videos?|clips?)\b[^.\n]{0,12}"
    r"\b(?P<seconds>\d{1,3}) ?s(?:ec\w*)?\b"
    r"|\b\d{3,4}\s?[x\u00d7]\s?\d{3,4}\b[^.\n]{0,24}\b(?P<frames>\d{2,4}) ?frames?\b",
    re.I | re.A,
)
_LONG_CLIP = 3 * 24  # frames; each second has some 24
_COUNT = re.compile(
    r"(\d[\d,.]{0,14})\s?(k|m|million|thousand|w|万)?\+?\s(?:\w+\s)?(nodes?|edges?|points?|gaussians?|splats?|vertices"
    r"|triangles|faces|boxes|objects|instances)\b|edge_index=\[2, (\d{1,12})\]|gaussians: \d{1,12}/(\d{1,12})",
    re.I | re.A,
)
_COUNT_AFTER = re.compile(
    r"\b(point|node|edge|gaussian)s?\b(?:(?! and | or )[^.\n\d]){0,24}(\d[\d,]{4,14})", re.I | re.A
)
_KIND_OF = {"splat": "gaussians", "vertice": "points", "triangle": "points", "face": "points", "boxe": "objects",
            "instance": "objects"}  # fmt: skip
_FACTORS = {"k": 1_000, "thousand": 1_000, "m": 1_000_000, "million": 1_000_000, "w": 10_000, "万": 10_000}
_PARAMETERS = re.compile(
    r"(?<![\w.])(?:[A-Za-z][\w.]{0,24}[-_: ]|[A-Za-z]{3,12})?(\d{1,3}(?:\.\d{1,2})?)[Bb](?![\w]*yte)(?! ?bytes)"
    r"(?! (?:of )?(?:v-?)?(?:ram|RAM|memory)\b)"
    r"(?=[-_\s.,:;?!)\]/'\"`，。、？！]|$)"
)
# Billions of parameters of models whose names do not say it, by their cards; of pipelines the largest part.
_NAMED = tuple(
    (re.compile(pattern, re.I | re.A), billions)
    for pattern, billions in (
        (r"\bflux[-_. ]?2[-_. ]?dev\b", 32.0),
        (
            r"\bflux[-_.]?1?[-_. ]?(?:dev|schnell|kontext|fill|krea|lora)|\bflux (?:dev|schnell|kontext|dreambooth)\b"
            r"|(?:dreambooth|lora)_flux|FluxPipeline",
            12.0,
        ),
        (r"\bsd[-_ ]?3\.5[-_ ]?large|stable[- ]diffusion[- ]3\.5[- ]large", 8.1),
        (r"\bqwen[-_ ]?image\b", 20.0),
        (r"\bhunyuan(?:[-_ ]?video)?\b(?![-_ ]?(?:video)?[-_ ]?(?:1\.5|3d|dit|image|a\d))", 13.0),
        (r"\bwan[-_ ]?2\.[12]\b", 14.0),
        (r"\bphi[-_]?4\b(?![-_]mini)", 14.0),
        (r"\bphi[-_ ]?3(?:\.5)?[-_ ]?mini\b", 3.8),
        (r"\bcogvlm2?\b", 17.0),
        (r"\bchatglm[23]?\b(?![-_ ]?\d{1,3}b)", 6.2),
        (r"\bgpt-?2[-_ ]?xl\b", 1.56),
        (r"\bt5[-_]?(?:v1_1[-_])?xxl\b", 11.3),
        (r"\bt5[-_]?(?:v1_1[-_])?xl\b", 2.85),
        (r"\bwhisper[-_ ]?large(?![-_ ]?(?:v3[-_ ]?)?turbo)(?:[-_ ]?v[23])?\b", 1.55),
        (r"\bmusicgen[-_ ]?large\b", 3.3),
        (r"\bsd[-_ ]?xl\b|stable[-_ ]diffusion[-_ ]xl", 2.6),
        (r"\bstable[-_ ]diffusion[-_ ]v?[12][-.]\d\b|\bsd[-_ ]?v?(?:1\.[45]|2\.[01])\b", 0.87),
    )
)
_BITS_PER_WEIGHT = re.compile(r"(\d(?:\.\d{1,2})?) ?bpw\b|\bexl[23][-_](\d\.\d{1,2})(?!\d)", re.I)
_BITS_OF_CACHE = re.compile(r"cache[-_]type(?:[-_][kv])?\W{1,3}\w{1,8}", re.I)
_MIXTURE = re.compile(r"(?<![\w.])(\d{1,2})x(\d{1,3})[Bb]\b")
_BITS = (
    (re.compile(r"q2_k|iq2|2[- ]?bit", re.I | re.A), 2.6),
    (re.compile(r"q3_k|q3f|iq3|3[- ]?bit", re.I | re.A), 3.5),
    (re.compile(r"4[- ]?bit|int4|nf4|fp4|awq|gptq|q4[_f]|qlora|w4a16|load_in_4bit", re.I | re.A), 4.5),
    (re.compile(r"q5_|q6_", re.I | re.A), 5.7),
    (re.compile(r"8[- ]?bit|int8|fp8|q8_0|w8a8|load_in_8bit|eetq", re.I | re.A), 8.5),
    (re.compile(r"fp32|float32|--dtype[= ]float(?!\d)", re.I | re.A), 32.0),
    (re.compile(r"\bollama\b|\bnum_(?:gpu|batch)\b", re.I | re.A), 4.5),  # as its library has them
)  # fmt: skip
_BITS_OF_HALF = 16.0
ADAM_BYTES = 16  # a trained parameter's, with its gradient and two moments, in 32 bits
_HALF = re.compile(r"\b(?:b?fp?16|bfloat16|float16|torch_dtype|half(?:\(\)|[- ]precision)?)\b", re.I | re.A)


@dataclass(frozen=True)
class Magnitude:
    """A large input that the text names: what it is (``picture``, ``sequence``, ``nodes``...), as it is written."""

    kind: str
    words: str


_RAN_SO = re.compile(  # sizes at which nothing failed
    r"\bcould (?:\w+ )?(?:run|generate|train|render|do)\b(?:(?!\boom\b|out of memory|\bfail|\bcrash)[^.\n])*$"
    r"|\bwithout (?:running into |any |a )?(?:problem|issue|error|oom)",
    re.I,
)


def _is_no_large_picture(text: str, match: re.Match[str]) -> bool:
    """Whether two numbers are no picture, or one at which nothing failed."""
    before = text[max(0, match.start() - 24) : match.start()]
    sides = [int(side) for side in match.groups() if side][:2]
    is_another = _NOT_A_PICTURE.search(before) or _OF_A_SETTING.search(before)
    is_another = is_another or _OF_NUMBERS.match(text, match.end())
    are_bytes = [*match.groups()].count("1024") > 1 and "*" in match.group()  # 128*1024*1024
    are_rows = are_bytes or max(sides) > _LONGEST_SHAPE * min(sides)
    return bool(is_another or are_rows or _RAN_SO.search(_sentence_of(text, match)))


def _sentence_of(text: str, match: re.Match[str]) -> str:
    start = max(text.rfind(". ", 0, match.start()), text.rfind("\n", 0, match.start())) + 1
    ends = [end for end in (text.find(". ", match.end()), text.find("\n", match.end())) if end >= 0]
    return text[start : min(ends, default=len(text))]


def large_inputs(text: str) -> tuple[Magnitude, ...]:
    """Every large input whose size the text gives; each kind once."""
    found: dict[str, Magnitude] = {}
    text = _TAKEN.sub("", text)
    for match in _SIDES.finditer(text):
        if _is_no_large_picture(text, match):
            continue
        if match.group().startswith(("(", "[")) and not _OF_A_PICTURE.search(
            text, max(0, match.start() - 60), match.start()
        ):
            continue  # any two numbers
        sides = [int(side) for side in match.groups() if side]
        if sides[0] * sides[1] * (sides[2] if len(sides) > 2 else 1) >= _LARGE_PICTURE:
            found.setdefault("picture", Magnitude("picture", match.group().strip()))
    side = _PICTURE_SIDE.search(text)
    if side and "picture" not in found and int(side.group(1)) ** 2 >= 2 * _LARGE_PICTURE:
        found["picture"] = Magnitude("picture", side.group().strip())
    named = _PICTURE_NAME.search(text)
    if named:
        found.setdefault("picture", Magnitude("picture", named.group().strip()))
    for words in _long_sequences(text):
        found.setdefault("sequence", Magnitude("sequence", words))
    recording = _RECORDING.search(text)
    if recording is not None and float(recording["hours"] or 0) + float(recording["minutes"] or 0) / 60 >= _LONG_HOURS:
        found["recording"] = Magnitude("recording", recording.group().strip())
    clip = _CLIP.search(text)
    if clip is not None and (int(clip["frames"] or 0) or 24 * int(clip["seconds"])) >= _LONG_CLIP:
        found["video"] = Magnitude("video", clip.group().strip())
    for match in _COUNT_AFTER.finditer(text):
        kind = f"{match.group(1).lower()}s"
        if _number(match.group(2)) >= _LARGE_COUNTS[kind]:
            found.setdefault(kind, Magnitude(kind, match.group().strip()))
    for match in _COUNT.finditer(text):
        kind, count = _counted(match)
        if count >= _LARGE_COUNTS.get(kind, 10**12):
            found.setdefault(kind, Magnitude(kind, match.group().strip()))
    return tuple(found.values())


def _long_sequences(text: str) -> Iterator[str]:
    """The words for sequences that are long; the number of a vocabulary's words is not one's length."""
    for match in _SEQUENCE.finditer(text):
        digits = match.group(1) or match.group(3) or match["tokens"] or match.group(6)
        thousand = match.group(2) or match.group(4) or match.group(7)
        is_long = _number(digits) * (1_000 if thousand else 1) >= _LARGE_SEQUENCE
        if is_long and not _OF_WORDS.search(text[: match.start()][-24:]):
            yield match.group().strip()


def picture_positions(text: str) -> dict[str, int]:
    """The positions between which attention is computed in each picture that the text gives sides of.

    Diffusion models work on latents, an eighth as high and wide.
    """
    text = text[:_LONGEST_STORY]
    pairs = {match.group().strip(): [int(side) for side in match.groups() if side] for match in _SIDES.finditer(text)}
    found = {words: sides[0] * sides[1] // _LATENT_AREA for words, sides in pairs.items() if len(sides) == 2}
    squares = (int(match.group(1) or match.group(2)) for match in _SQUARE.finditer(text))
    return found | {f"{side} x {side}": side * side // _LATENT_AREA for side in squares}


def _counted(match: re.Match[str]) -> tuple[str, float]:
    """The counted things and their number."""
    digits, factor, noun, edges, gaussians = match.groups()
    if edges or gaussians:
        return ("edges", float(edges)) if edges else ("gaussians", float(gaussians))
    singular = noun.lower().removesuffix("s")
    return _KIND_OF.get(singular, f"{singular}s"), _number(digits) * _FACTORS.get((factor or "").lower(), 1)


def _number(digits: str) -> float:
    """A number such as 12,300 or 2.7; 0 for other text."""
    plain = digits.replace(",", "").replace("_", "").rstrip(".")
    return float(plain) if plain.count(".") <= 1 and plain.strip(".") else 0.0


_ARTICLE = re.compile(r"^(?:the|an?|this|of|with|for|on|in) ", re.I)


@dataclass(frozen=True)
class Weights:
    """The largest model that a text names: bytes of its weights, its billions of parameters, the words that name it,
    and the bits of each weight that were counted; ``is_in_half``: the text itself says that they are 16."""

    num_bytes: int
    billions: float
    words: str
    bits: float
    is_in_half: bool = False

    @property
    def state_bytes(self) -> int:
        """What all parameters take that are trained with Adam: weights, gradients and two moments in 32 bits."""
        return round(self.billions * 1e9) * ADAM_BYTES

    @property
    def said(self) -> dict[str, int | str]:
        """What was read and how it counts, for a sentence of evidence."""
        count: dict[str, int | str] = {"model": self.words, "billions": f"{self.billions:g}", "bits": f"{self.bits:g}"}
        return {**count, "weights_bytes": self.num_bytes}


_LOADED = re.compile(r"(?:--model(?:_name_or_path|[-_]path|[-_]id)?[ =]|from_pretrained\()[ '\"]{0,3}[^\s'\"]{0,100}$")


_RUNS = re.compile(
    r"[\w.-]* (?:\w+ )?(?:works?|runs?) (?:\w+ )?(?:without|fine|ok|okay|well|normally|perfectly|smoothly)\b", re.I
)


def weights_in(text: str, *, is_quantizing: bool = False) -> Weights | None:
    """The largest model that the text names by its parameters ("7B", "8x7B") or a known name; None: it names none.

    One that a command or code loads goes before others, which may be of a guide or another run.
    In the precision named with it; in half precision if none is, or where it is only being quantized to that.
    """
    sizes = [(float(match.group(1)), match) for match in _PARAMETERS.finditer(text)]
    sizes += [(0.83 * int(match.group(1)) * int(match.group(2)), match) for match in _MIXTURE.finditer(text)]
    sizes = [one for one in sizes if 0.5 <= one[0] <= 700]
    sizes = [one for one in sizes if _LOADED.search(text, max(0, one[1].start() - 120), one[1].start())] or sizes
    sizes = sizes or [(size, match) for pattern, size in _NAMED if (match := pattern.search(text))]
    sizes = [one for one in sizes if not _RUNS.match(text, one[1].end())]
    if not sizes:
        return None
    billions, match = max(sizes, key=lambda one: one[0])
    text = _BITS_OF_CACHE.sub("", text)
    told = _BITS_PER_WEIGHT.search(text)
    known = next((bits for pattern, bits in _BITS if pattern.search(text)), _BITS_OF_HALF)
    bits = _BITS_OF_HALF if is_quantizing else known if told is None else float(told.group(1) or told.group(2))
    words = _ARTICLE.sub("", match.group()).strip(" -_:")
    return Weights(round(billions * 1e9 * bits / 8), billions, words, bits, _HALF.search(text) is not None)


_TRAINED = re.compile(r"\btrainable param(?:eter)?s?\W{1,4}(\d[\d,]{0,16})(?![\d.]*[ ]?[MBKmbk%])", re.I)


def num_trained(text: str) -> int | None:
    """The count of trained parameters that a log prints; None where it prints none."""
    match = _TRAINED.search(text)
    return None if match is None else int(match.group(1).replace(",", ""))


_ARRAY = re.compile(
    r"(?P<library>\w{1,20}\.)?(?:\w{1,20}\.)?(?:zeros|ones|empty|full|randn?|random(?:_sample)?|normal|uniform"
    r"|(?:pinned|device|managed|mapped)_array)\(\s?[\[(]?\s?(?P<sizes>\d[\d_]{0,12}(?:\s?[,*]\s?\d[\d_]{0,12}){1,6})"
    r"(?P<rest>[^\n]{0,80})"
)
_ITEM_BYTES = (
    (re.compile(r"(?:float|int|complex)64|double|\blong\b", re.A), 8),
    (re.compile(r"float16|half", re.A), 2),
    (re.compile(r"int8|bool", re.A), 1),
    (re.compile(r"(?:float|int)32|\bfloat\)", re.A), 4),
)


def array_bytes(text: str) -> int | None:
    """Bytes of the largest array that pasted code creates with sizes written out; None where it creates none."""
    sizes = (
        math.prod(int(size) for size in re.findall(r"[\d_]+", match["sizes"])) * _item_bytes(match)
        for match in _ARRAY.finditer(text)
    )
    return max(sizes, default=None)


def _item_bytes(match: re.Match[str]) -> int:
    """An element's bytes: as its dtype says, else the library's default."""
    default = 4 if (match["library"] or "torch.") in ("torch.", "tf.", "jnp.", "paddle.") else 8
    return next((size for pattern, size in _ITEM_BYTES if pattern.search(match["rest"])), default)


_CARD = re.compile(
    r"\b(?:RTX|GTX|GPUs?|Tesla|Quadro|[AHLBV]-?\d{2,3}G?|T4|P100|\d{4}(?: ?ti| ?super)?|VRAM|cards?|显卡|显存|\d ?[xX*]"
    r" ?\w{2,6})\b[^\n\d]{0,16}(?:\d{4}[^\n\d]{0,12})?\b(\d{1,3})(?:\.\d{1,2})? ?(?:Gi?B?)\b"
    r"(?! ?(?:ram|of ram|memory ram|models?|files?)\b)"
    r"|(?<![\w.])(\d{1,3})(?:\.\d{1,2})? ?(?:Gi?B?) ?(?:of )?(?:VRAM|GPU|v?NPU|video|graphics|card|显存|显卡|vram)"
    r"|(?<![\w.])(\d{1,3}) ?Gi?B? ?(?:RTX|GTX|Tesla|[AHV]\d{2,3}\b|T4|P100|[2-5]0\d0)"
    r"|\bon (?:an? )?(\d{1,3}) ?Gi?B\b(?! ?(?:of )?(?:ram|memory|models?|files?|data|videos?))",
    re.I | re.A,
)  # vendors' GB of a GPU are GiB
_FREE_IN_LOG = re.compile(r"\busing device [^\n]{0,120} - (\d{3,6}) MiB free")  # llama.cpp's
# Memory that is used or needed, which is not the card's capacity.
_IN_USE = re.compile(
    r"(?:allocat|us(?:e[sd]?|ing)\b|tak(?:e|es|ing)\b|consum|occup|need|requir|usage)\w*[^.\n]"
    r"{0,20}$",
    re.I,
)
_KNOWN_CARDS = {
    "1050": 4, "1650": 4, "1060": 6, "1660": 6, "2060": 6, "1070": 8, "1080": 8, "2070": 8, "2080": 8, "3050": 8,
    "3070": 8, "4060": 8, "1080ti": 11, "2080ti": 11, "3080": 10, "3060": 12, "4070": 12, "titanx": 12, "4080": 16,
    "t4": 16, "p100": 16, "v100": 32, "3090": 24, "4090": 24, "a10": 24, "l4": 24, "5090": 32, "a40": 48, "a6000": 48,
    "l40": 48, "l40s": 48, "a100": 80, "a800": 80, "h100": 80, "h800": 80, "h200": 141, "b200": 180,
}  # fmt: skip
_NAME_OF_A_CARD = (
    r"(?:(?:rtx|gtx|geforce|nvidia|tesla|quadro) ?)?(?P<name{}>(?:[1-5]0[5-9]0|16[56]0) ?(?:ti)?|titan ?x"
    r"|t4|p100|v100|a10|a40|a100|a800|a6000|l4|l40s?|[hb][12]00|h800)(?![\w.])"
)
_CARD_NAME = re.compile(r"(?<![\w.])" + _NAME_OF_A_CARD.format(""), re.I | re.A)
_CHOICE_OF_CARDS = re.compile(  # what a program needs, not what there is
    rf"{_NAME_OF_A_CARD.format(1)}(?:\s?[,/]\s?(?:\d ?x ?)?{_NAME_OF_A_CARD.format(2)}){{2,8}}", re.I | re.A
)


def card_bytes(text: str) -> int | None:
    """Memory of the GPU that the text names, by its size or its name (the larger variant of each); None: not named."""
    logged = _FREE_IN_LOG.search(text)
    if logged is not None:
        return int(logged.group(1)) * MIB
    match = next((match for match in _CARD.finditer(text) if not _is_in_use(match)), None)
    if match:
        size = int(match.group(1) or match.group(2) or match.group(3) or match.group(4))
        return size * GIB if size >= 2 else None
    name = _CARD_NAME.search(_CHOICE_OF_CARDS.sub("", text))
    size_of = _KNOWN_CARDS.get(name.group(1).lower().replace(" ", "")) if name else None
    return None if size_of is None else size_of * GIB


_SEVERAL = re.compile(
    r"(?<![\w.])(\d{1,2}) ?[x\u00d7*] ?(?:gpus?\b|nvidia|geforce|rtx|tesla|quadro|[avhlb]\d{2,4}\b|[2-5]0\d0)"
    r"|\b(\d|two|three|four|eight) (?:[\w-]{1,12} ){0,2}(?:gpus|cards|[2-5]0\d0s?|[avhl]\d{2,4}s?)\b",
    re.I | re.A,
)
_IN_LETTERS = {"two": 2, "three": 3, "four": 4, "eight": 8}


def num_cards(text: str) -> int:
    """How many GPUs the text says there are; 1 where it says nothing of several."""
    match = _SEVERAL.search(text)
    word = "1" if match is None else (match.group(1) or match.group(2)).lower()
    return max(1, _IN_LETTERS.get(word) or int(word))


def _is_in_use(match: re.Match[str]) -> bool:
    """Whether the size is what something takes; "I use two GPUs with 32 GB" is about the cards."""
    start = match.start() if match.group(1) is not None else max(0, match.start() - 30)
    end = match.start(1) if match.group(1) is not None else match.start()
    return _IN_USE.search(match.string, start, end) is not None


_RAM = re.compile(
    r"\bRAM\b[ :=]{1,3}(\d{1,4}) ?G(?:i?B)?\b|(?<![\d.])(\d{1,4}) ?Gi?B? (?:of )?(?:(?:system|host|main|cpu|ddr"
    r"\d?) )?(?:ram\b|ddr)",
    re.I | re.A,
)


def ram_bytes(text: str) -> int | None:
    """The computer's own memory where the text names it; None: not named."""
    match = _RAM.search(text)
    return None if match is None else int(match.group(1) or match.group(2)) * GIB
