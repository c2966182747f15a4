"""The options of the magics and commands: how a line is split and checked, and what each option means."""

from __future__ import annotations

import argparse
import errno
import functools
import os
import re
import sys
import tokenize
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from IPython.core.displayhook import DisplayHook
from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser, argument, construct_parser, parse_argstring

from oom_magic.language import Sentences, _, translated
from oom_magic.one_line_errors import OneLineErrors
from oom_magic.predict.setups.gpus import GPU, is_card, list_gpus

if TYPE_CHECKING:
    from oom_magic.explain.messages.failure import Failure
    from oom_magic.predict.setups.setup import TrainingSetup

Value = TypeVar("Value")

_MOST_WORDS = 5  # of a card's name, such as RTX PRO 6000 Blackwell 96GB
_TOKEN = re.compile(r"\s*(\"[^\"]*\"|'[^']*'|\S+)")


def unquoted(text: str) -> str:
    """An option's value without the quotes that IPython leaves around it."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def parse_options(magic: Any, line: str, *, is_statement: bool = False) -> tuple[Any, str]:
    """The options of a magic's line, and the rest of the line. Raises UsageError with the usage.

    A Python statement (``is_statement``) comes after the options; any other text may come before them, too.
    """
    parser: MagicArgumentParser = magic.parser
    parser.allow_abbrev = False  # --of is no --off
    with OneLineErrors("other"):
        options, rest = _split(parser, with_cards_quoted(line))
        if not is_statement:
            rest, *later = re.split(r"\s+(?=--)", rest, maxsplit=1)
            more, after = _split(parser, " ".join(later))
            options, rest = f"{options} {more}", f"{rest} {after}".strip()
        try:
            return parse_argstring(magic, options), rest
        except UsageError as error:
            usage = parser.format_usage().replace("::\n\n", "").strip()
            raise UsageError(f"{_translated_error(str(error))}\n{usage}") from None


def parse_line(magic: Any, line: str) -> Any:
    """The options of a magic that takes nothing else. Raises UsageError."""
    with OneLineErrors("other"):
        try:
            return parse_argstring(magic, with_cards_quoted(line))
        except UsageError as error:
            raise UsageError(_translated_error(str(error))) from None


# argparse's messages (Lib/argparse.py); Python ships no translations of them.
_ARGPARSE_ERRORS: Sentences = {
    "unrecognized": "unrecognized arguments: {given}",
    "no_value": "argument {name}: expected one argument",
    "no_values": "argument {name}: expected at least one argument",
    "not_of_type": "argument {name}: invalid {kind} value: {given}",
    "not_a_choice": "argument {name}: invalid choice: {given} (choose from {known})",
    "ambiguous": "ambiguous option: {given} could match {known}",
    "required": "the following arguments are required: {names}",
}


def _translated_error(message: str) -> str:
    """argparse's message in the chosen language."""
    for sentence in _ARGPARSE_ERRORS.values():
        pattern = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>.+)", re.escape(str(sentence)))
        if found := re.fullmatch(pattern, message):
            return translated(sentence, **found.groupdict())
    return message


_ARGPARSE_HELP: Sentences = {
    "positional arguments": "positional arguments",
    "options": "options",
    "show this help message and exit": "show this help message and exit",
}


class _TranslatedHelp(argparse.HelpFormatter):
    """A command's help, translated."""

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        super().add_usage(usage, actions, groups, _("usage: ") if prefix is None else prefix)

    def start_section(self, heading: str | None) -> None:
        super().start_section(translated(_ARGPARSE_HELP[heading]) if heading and heading in _ARGPARSE_HELP else heading)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return translated(_ARGPARSE_HELP[action.help]) if action.help and action.help in _ARGPARSE_HELP else action.help


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser whose help and errors are translated."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=_TranslatedHelp, **settings)

    def error(self, message: str) -> NoReturn:
        """Print the usage and the error, and exit with code 2."""
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: {_translated_error(message)}\n")


def with_cards_quoted(line: str) -> str:
    """The line with quotes around a card's name of several words: ``--gpu RTX 3060`` as ``--gpu "RTX 3060"``."""
    option = re.search(r"(?:^|\s)--gpu[ =]+(?=[^\s\"'-])", line)
    if option is None:
        return line
    words = list(re.finditer(r"\S+", line[option.end() :]))[:_MOST_WORDS]
    names = [line[option.end() : option.end() + word.end()] for word in words]
    known = [name for name in names[1:] if is_card(name)]
    if not known and not is_card(names[0]) and len(words) > 1 and re.fullmatch(r"[\w.]+", words[1][0]):
        known = [names[1]]  # mistyped: suggestions are searched for both words
    name = max(known, key=len, default="")
    return f'{line[: option.end()]}"{name}"{line[option.end() + len(name) :]}' if name else line


def checked(option: str, parse: Callable[[str], Value], text: str) -> Value:
    """``parse(text)``, whose ValueError is raised as a UsageError about ``option``."""
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None


def _split(parser: MagicArgumentParser, line: str) -> tuple[str, str]:
    """The options at the start of a line with their values, and the rest of the line unchanged."""
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


# Options that describe a training run: name, field of TrainingSetup, help.
_TEXT_OPTIONS = (
    ("model", "model", _('The model: a preset such as roberta-base, or a folder with "config.json".')),
    ("precision", "precision", _("fp32, bf16, fp16 (weights) or amp-bf16, amp-fp16 (autocast).")),
    ("method", "method", _("full, lora or qlora.")),
    ("optimizer", "optimizer", _("Such as adamw, adamw8bit, adafactor, sgd.")),
    ("attention", "attention", _("sdpa, eager or flash_attention_2.")),
    ("loss", "loss", _("plain or chunked.")),
    ("gpu", "gpu", _('The card, such as "RTX 3080" (default: one with the memory that the message states).')),
    ("memory", "memory", _("Its memory, if it differs from the catalogue: 10GiB.")),
)
_NUMBER_OPTIONS = (
    ("batch", "microbatch_size", _("Sequences per forward pass.")),
    ("seq", "seq_len", _("Tokens per sequence.")),
    ("target-seq", "target_seq_len", _("Tokens per target sequence, for encoder-decoder models.")),
    ("rank", "rank", _("LoRA rank.")),
    ("accumulation", "gradient_accumulation_steps", _("Forward passes per optimizer step.")),
)
_SIZE_TOLERANCE = 0.02  # cards of one size differ by less


_DRY_RUN_OPTIONS = (
    argument("--gpu", type=unquoted, help=_('The pretend GPU, such as "RTX 3060" or "2x T4".')),
    argument(
        "--num-processes",
        type=int,
        metavar="N",
        help=_("Follow one of the N processes that torchrun would start, one card each."),
    ),
    argument("--rank", type=int, metavar="R", help=_("Which of them to follow (default: 0).")),
    argument("--num-gpus", type=int, metavar="N", help=_("How many such cards the code sees (default: 1).")),
    argument("--memory", type=unquoted, help=_("Its memory, such as 12GiB, if it differs from the catalogue.")),
    argument(
        "--steps",
        default="alike",
        metavar="N",
        help=_(
            "When to stop a dry run: after N optimizer steps, or all; by default, after three similar steps of a loop."
        ),
    ),
    argument("--no-compile", action="store_true", help=_("Dry-run compiled code as eager code: an upper bound.")),
    argument("--top", type=int, default=5, help=_("How many lines to list (default: 5).")),
    argument("--json", type=unquoted, metavar="FILE", help=_("Write the report to a file as JSON.")),
)


def dry_run_arguments(magic: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the options of a dry run and of its report."""
    for option in reversed(_DRY_RUN_OPTIONS):
        magic = option(magic)
    return magic


def silenced_by_semicolon(magic: Callable[..., Any], is_cell_code: bool = True) -> Callable[..., Any]:
    """Decorator: the value of a magic whose code ends in a semicolon is not shown; a cell of text is no code.

    IPython's ``output_can_be_silenced`` reads the text as Python's tokens and ends with Python's error where they are
    none: a message that is pasted, from Python 3.12 on every apostrophe in it.
    """

    @functools.wraps(magic)
    def silenced(self: Any, line: str, cell: str | None = None) -> Any:
        __tracebackhide__ = True
        if cell is None:
            value, code = magic(self, line), line
        else:
            value, code = magic(self, line, cell), cell if is_cell_code else ""
        return None if _ends_in_semicolon(code) else value

    return silenced


def _ends_in_semicolon(code: str) -> bool:
    try:
        return bool(DisplayHook.semicolon_at_end_of_expression(code))
    except (tokenize.TokenError, SyntaxError):
        return False


def make_parser(arguments: Callable[..., Any]) -> MagicArgumentParser:
    """A parser, for a command, of the options that this decorator adds to a magic."""
    parser: MagicArgumentParser = construct_parser(arguments(lambda: None))
    return parser


def check_report_options(options: Any) -> None:
    """Before a run that may take minutes: raise UsageError if ``--top`` or ``--json`` cannot be done after it."""
    if options.top < 1:
        raise UsageError(_("--top: {top} lines cannot be listed; use 1 or more.", top=options.top))
    if options.json:
        path = Path(options.json)
        if path.is_dir():
            raise not_written(options.json, errno.EISDIR)
        if not path.parent.is_dir():
            raise not_written(options.json, errno.ENOENT)
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise not_written(options.json, errno.EACCES)


def not_written(path: str, number: int) -> UsageError:
    """The error of a file for ``--json`` that cannot be written; ``number`` is the system's for the reason."""
    return UsageError("--json: " + _("{path!r} cannot be written: {reason}.", path=path, reason=os.strerror(number)))


def explanation_arguments(magic: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the options of an explanation, with those of ``setup_from``."""
    for name, field, text in reversed(_TEXT_OPTIONS):
        magic = argument(f"--{name}", dest=field, type=unquoted, help=text)(magic)
    for name, field, text in reversed(_NUMBER_OPTIONS):
        magic = argument(f"--{name}", dest=field, type=int, help=text)(magic)
    for one in (
        argument("--checkpointing", action="store_true", help=_("With activation checkpointing.")),
        argument("--fast", action="store_true", help=_("Explain only; skip the dry runs of remedies.")),
        argument("--lang", choices=("en", "zh"), help=_("Language from now on (default: that of the locale).")),
    ):
        magic = one(magic)
    return magic


def slider_arguments(magic: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the options of ``%oom_sliders``."""
    for name, text in reversed(_SLIDER_OPTIONS):
        magic = argument(f"--{name}", type=unquoted, help=text)(magic)
    counted = argument("--accumulation", type=int, default=1, help=_("Microbatches per optimizer step (default: 1)."))
    switches = {
        "--checkpointing": _("Start with activation checkpointing."),
        "--no-cache": _("Neither read nor write cached results on disk in this session."),
        "--list-models": _("List the presets that --model knows."),
    }
    for name, text in reversed(switches.items()):
        magic = argument(name, action="store_true", help=text)(magic)
    numbers = {
        "num-gpus": _("How many such cards each process uses (default: 1)."),
        "num-processes": _("How many processes, with one card each (default: 1)."),
        "card": _("For a function that uses several cards: which one to show."),
    }
    for name, text in reversed(numbers.items()):
        magic = argument(f"--{name}", type=int, metavar="N", help=text)(magic)
    magic = argument(
        "--parallelism", type=unquoted, help=_("How the processes of a preset share the model: ddp or fsdp2.")
    )(magic)
    decorated: Callable[..., Any] = counted(magic)
    return decorated


_SLIDER_OPTIONS = (
    ("model", _("A preset such as qwen2.5-7b, or a folder with config.json.")),
    ("method", _("full, lora or qlora (default: full).")),
    ("gpu", _('The card to start with, such as "RTX 3060".')),
    ("memory", _("Its memory, such as 12GiB, if it differs from the catalogue.")),
    ("rank", _("LoRA rank to start with, such as 16, or its range, such as 4:128.")),
    ("batch", _("Microbatch size, or its range.")),
    ("seq", _("Sequence length, or its range.")),
    ("precision", _("bf16, fp16, fp32, amp-bf16 or amp-fp16.")),
    ("optimizer", _("adamw, adamw8bit, sgd, ...")),
    ("attention", _("sdpa, eager or flash_attention_2.")),
)


def setup_from(options: Any, failure: Failure | None) -> TrainingSetup | None:
    """The run that the options describe, on the card of the failure unless they name one; None without a model.

    Raises UsageError for options that contradict each other.
    """
    given = {field: getattr(options, field) for _option, field, _help in (*_TEXT_OPTIONS, *_NUMBER_OPTIONS)}
    given = {field: value for field, value in given.items() if value is not None}
    if "model" not in given:
        if given or options.checkpointing:
            raise UsageError(_("Options that describe a run need --model."))
        return None
    from oom_magic.predict.setups.setup import TrainingSetup

    if failure is not None and failure.total_bytes and not {"gpu", "memory"} & set(given):
        given.update(_card_of(failure.total_bytes))
    given["model"] = _with_positions_for(given["model"], given.get("seq_len", 0))
    try:
        return TrainingSetup(activation_checkpointing=options.checkpointing, **given)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _card_of(total_bytes: int) -> dict[str, Any]:
    """The fields of TrainingSetup for a card with exactly this memory, named after a similar one."""
    card = similar_card(total_bytes)
    return {"memory": total_bytes} | ({} if card is None else {"gpu": card.name})


def similar_card(total_bytes: int) -> GPU | None:
    """The card of the catalogue with the nearest size of memory, if it differs by less than ``_SIZE_TOLERANCE``."""
    card = min(list_gpus(), key=lambda card: abs(card.total_bytes - total_bytes))
    return card if abs(card.total_bytes - total_bytes) <= _SIZE_TOLERANCE * total_bytes else None


def _with_positions_for(model: str, seq_len: int) -> Any:
    """The model, with a configuration of more learned positions if the sequences need them."""
    from oom_magic.predict.setups.model_source import resolve_model
    from oom_magic.predict.setups.models import find_model

    try:
        source = resolve_model(model)
        if source.max_seq_len is None or seq_len <= source.max_seq_len:
            return model
        padding = source.dims["num_positions"] - source.max_seq_len
        names = ("max_position_embeddings", "n_positions")
        preset = find_model(model)
        name = next(name for name in names if name in preset.settings)
        return preset.config(**{name: seq_len + padding})
    except ValueError:
        return model  # TrainingSetup raises the error
