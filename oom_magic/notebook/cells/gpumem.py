"""Runs ``%%gpumem`` cells: measured on a GPU, else dry-run on a pretend one; the report is shown before any error."""

from __future__ import annotations

import ast
import errno
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from IPython.display import display

from oom_magic.inputs import parse_bytes
from oom_magic.language import _
from oom_magic.notebook.cells.names import DryNamespace
from oom_magic.notebook.cells.running import CompiledCell, code_of_magics_changed, ended_by_scripts, shortened, trimmed
from oom_magic.notebook.options import checked, not_written
from oom_magic.predict.setups.gpus import DEFAULT_GPU, checked_num_gpus, counted, find_gpu
from oom_magic.predict.setups.hardware import Hardware
from oom_magic.views.blocks import Block, Description, Facts

if TYPE_CHECKING:
    from oom_magic.explain.live.growth import Growth
    from oom_magic.memory.report import MemoryReport
    from oom_magic.predict.cpu_runs import StayedOnCPU
    from oom_magic.predict.instrumentation.decided.decided_names import DecidedNames
    from oom_magic.predict.instrumentation.stop_rule import StopAfter
    from oom_magic.predict.session import DrySession


@dataclass(frozen=True, slots=True)
class CardOptions:
    """The pretend GPU that options describe: name, memory if not the catalogue's, number of cards or processes."""

    gpu: str | None = None
    memory_bytes: int | None = None
    num_gpus: int | None = None
    num_processes: int | None = None
    rank: int = 0

    @classmethod
    def parse(
        cls,
        gpu: str | None,
        memory: str | None,
        num_gpus: int | None = None,
        num_processes: int | None = None,
        rank: int | None = None,
    ) -> CardOptions:
        """Checked values of ``--gpu``, ``--memory``, ``--num-gpus``, ``--num-processes``, ``--rank``.

        Raises UsageError with the fix.
        """
        if num_processes is None and rank is not None:
            raise UsageError(_("--rank chooses which process to follow; give --num-processes too."))
        number, name = checked("--num-gpus", lambda _text: counted(gpu, num_gpus), "") if gpu else (num_gpus, None)
        if number is not None:
            checked("--num-gpus", lambda _text: checked_num_gpus(number), "")
        name = checked("--gpu", find_gpu, name).name if name else None
        if num_processes is not None:
            checked("--num-processes", lambda _text: Hardware.of(name, None, number or 1, num_processes, rank or 0), "")
        return cls(name, checked("--memory", parse_bytes, memory) if memory else None, number, num_processes, rank or 0)

    def over(self, chosen: CardOptions) -> CardOptions:
        """These options, completed by those ``chosen`` for the notebook."""
        card = self if self.gpu is not None or self.memory_bytes is not None else chosen
        number = self.num_gpus if self.num_gpus is not None or card is self else chosen.num_gpus
        job = self if self.num_processes is not None or card is self else chosen
        return replace(card, num_gpus=number, num_processes=job.num_processes, rank=job.rank)

    def __str__(self) -> str:
        """The cards in words, such as ``2 x T4 with 12.00 GiB``."""
        number = f"{self.num_gpus} x " if (self.num_gpus or 1) > 1 else ""
        name = f"{number}{self.gpu or DEFAULT_GPU}"
        if self.memory_bytes:
            name = _("{name} with {memory_bytes}", name=name, memory_bytes=self.memory_bytes)
        if self.num_processes:
            name = _("{name}, process {rank} of {number}", name=name, rank=self.rank, number=self.num_processes)
        return name

    def __bool__(self) -> bool:
        """Whether any option was given."""
        return any(option is not None for option in (self.gpu, self.memory_bytes, self.num_gpus, self.num_processes))


class _UsersNames(Mapping[str, Any]):
    """The user's variables, read when looked up, without IPython's own that refer to the shell."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._names: dict[str, Any] = shell.user_ns

    def __getitem__(self, name: str) -> Any:
        return self._names[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in list(self._names) if name not in ("exit", "quit", "get_ipython"))

    def __len__(self) -> int:
        return len(list(iter(self)))


class CellRunner:
    """Runs ``%%gpumem`` cells, and keeps between them the chosen card, what is on it, and the names of dry cells."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self.card = CardOptions()
        self.names = DryNamespace()
        self.last_report: MemoryReport | None = None
        self.was_dry = False  # the last cell
        self.grown: tuple[Growth, ...] = ()  # in the loops of the last dry cell, if it failed
        self.session: DrySession | None = None
        self.sources = [cell for cell in shell.user_ns.get("In", ()) if isinstance(cell, str)]  # of all cells, in order
        self._session_card = CardOptions()

    def measure(self, cell: CompiledCell, device: int | None) -> Any:
        """Run the cell on the GPU and measure it; returns its value."""
        __tracebackhide__ = True
        from oom_magic.measure.measurement import measure

        self.was_dry = False
        with ExitStack() as afterwards, measure(device, namespace=_UsersNames(self.shell)) as measurement:
            afterwards.callback(lambda: setattr(self, "last_report", measurement.report))
            return cell.run(self.shell.user_ns)

    def dry_run(
        self, cell: CompiledCell, card: CardOptions, stop_after_steps: StopAfter, follows_compile: bool = True
    ) -> Any:
        """Run the cell on the pretend GPU; returns its value. Raises the cell's exception or the simulated one."""
        __tracebackhide__ = True
        self.was_dry = True
        from oom_magic.predict.compiled.calls import run_or_as_written
        from oom_magic.predict.instrumentation.loop_code import with_loops

        session = self._session_for(card.over(self.card), stop_after_steps, follows_compile)
        values: list[Any] = []
        users = self.shell.user_ns
        with self.names.entered(self.shell) as names, ended_by_scripts(self.shell):
            session.free_failed_run(names)
            decided = self.decided(users, names)
            again = _names_again(names, users, cell.rebound | (cell.dropped if not self._compiles(cell) else set()))
            written, cell = cell, cell.changed(with_loops)

            def run(session: DrySession) -> DrySession:
                with self._freeing_dropped(written, names, session) as watched:
                    code = watched.changed(with_loops)
                    session.run(lambda: values.append(self._run_cell(session, code, names, users)), [users], [decided])
                return session

            def run_eagerly() -> DrySession:
                again()
                self.session = session.copy(is_lasting=True, is_limited=True, has_bar=True, follows_compile=False)
                return run(self.session)

            try:
                session = run_or_as_written(session, lambda: run(session), run_eagerly)
            except BaseException as error:
                raise trimmed(error)  # noqa: B904 - the same exception, not one that follows from it
            finally:
                decided.leave()
                self.last_report = session.report
            stayed = self._stayed_on_cpu(session, cell, users, names)
            self.last_report = session.report
        self._print_decided_names(decided, stayed)
        self._note_names(session, cell)
        if session.exception is not None:
            simulated, session.exception = session.exception, None  # it would keep the cell's frames
            raise shortened(trimmed(simulated), self.shell)
        return values[0] if values else None

    def _note_names(self, session: DrySession, cell: CompiledCell) -> None:
        """For later cells: the names that a cell would have assigned, and those that it deleted."""
        if session.report is not None and session.report.timeline.was_left:
            self.names.note_unassigned(cell.assigned)
        if session.exception is None:
            self.names.keep_deleted()

    def _run_cell(self, session: DrySession, cell: CompiledCell, names: dict[str, Any], users: dict[str, Any]) -> Any:
        """The cell's value. What its loops have made grow when it fails is noted: the run ends with the user's objects
        as they were."""
        __tracebackhide__ = True
        self.grown = ()
        try:
            return _run_in(session, cell, names, users)
        except Exception as error:
            from oom_magic.explain.live.growth import growths

            with suppress(Exception):  # the user's objects may raise anything when they are read
                self.grown = growths(error, names, session.storage_of)
            raise

    def _compiles(self, cell: CompiledCell) -> bool:
        """Whether a cell of the notebook may compile: then this one may run a second time, as eager code."""
        return any("compile" in source for source in (*self.sources, ast.unparse(cell.tree)))

    @contextmanager
    def _freeing_dropped(
        self, cell: CompiledCell, names: dict[str, Any], session: DrySession
    ) -> Iterator[CompiledCell]:
        """The cell, changed so that values of earlier dry cells are freed when it assigns or deletes their names."""
        from oom_magic.predict.instrumentation.rebound_names import Leaves, ReboundNames

        may_drop = bool(cell.dropped & self.names.own)
        if not may_drop and not (cell.calls_magics and self.names.own):
            yield cell
            return
        rebound = ReboundNames(names, session.fake_gpu, Leaves(), self.names.own)
        with rebound, code_of_magics_changed(self.shell, rebound.watched):
            yield cell.watched(rebound.watched) if may_drop else cell

    def decided(self, users: dict[str, Any], names: dict[str, Any], presumed: Collection[str] = ()) -> DecidedNames:
        """Variables of other cells whose values say the CPU because there is no GPU; dry cells see ``names``."""
        from oom_magic.predict.instrumentation.decided.decided_names import DecidedNames

        return DecidedNames.of(users, self.sources, names, presumed)

    def _stayed_on_cpu(
        self, session: DrySession, cell: CompiledCell, users: dict[str, Any], names: dict[str, Any]
    ) -> StayedOnCPU | None:
        from oom_magic.predict.cpu_runs import stayed_on_cpu

        def again(decided: DecidedNames) -> DrySession:
            other, own = session.copy(), dict(names)
            try:
                other.run(lambda: cell.run(names), [users], [decided])
            finally:
                names.clear()
                names.update(own)
            return other

        followed = {one.name for decided in session.decided for one in decided.decisions}
        return stayed_on_cpu(session, cell.codes, followed, lambda chosen: self.decided(users, names, chosen), again)

    def _print_decided_names(self, decided: DecidedNames, stayed: StayedOnCPU | None) -> None:
        """Print which variables were given values for a GPU, or kept the run on the CPU."""
        from oom_magic.explain.sentences.catalogue import translate
        from oom_magic.language import choose_language
        from oom_magic.predict.instrumentation.decided.decided_names import shown

        language = choose_language()
        if decided.decisions:
            was = ", ".join(f"{one.name} = {shown(one.before)}" for one in decided.decisions)
            now = ", ".join(f"{one.name} = {shown(one.now)}" for one in decided.decisions)
            print(translate("decided_names", language, was=was, now=now))
        if stayed is not None:
            was = ", ".join(f"{name} = {value}" for name, value in zip(stayed.names, stayed.values, strict=True))
            key = "stayed_on_cpu" if stayed.peak_allocated_bytes is None else "stayed_on_cpu_peak"
            print(translate(key, language, was=was, peak_bytes=stayed.peak_allocated_bytes))

    def after_cell(self, result: ExecutionResult) -> None:
        """Keep the cell's source: IPython's history leaves out some."""
        self.sources.append(self.shell.transform_cell(str(getattr(result.info, "raw_cell", "") or "")))

    def _session_for(self, card: CardOptions, stop_after_steps: StopAfter, follows_compile: bool) -> DrySession:
        """The pretend GPU of the last dry cell, or a new one if another card is asked for."""
        from oom_magic.predict.instrumentation.stop_rule import StopRule
        from oom_magic.predict.session import DrySession

        if self.session is None or card != self._session_card:
            self.session = DrySession(
                card.gpu,
                card.memory_bytes,
                num_gpus=card.num_gpus or 1,
                num_processes=card.num_processes,
                rank=card.rank,
            )
            self._session_card = card
            self.names = DryNamespace()
        self.session.training.stop_rule = StopRule(after_steps=stop_after_steps)
        self.session.follows_compile = follows_compile
        return self.session


def _run_in(session: DrySession, cell: CompiledCell, names: dict[str, Any], users: dict[str, Any]) -> Any:
    """The cell's value; functions of real cells that it calls are named if they do not see what dry cells assign."""
    __tracebackhide__ = True
    from oom_magic.notebook.cells.unseen_names import names_read, unseen_names

    session.names_read = names_read(cell.codes, names)
    try:
        return cell.run(names)
    finally:
        for function, variables in unseen_names(cell.codes, names, users).items():
            session.assume(
                _(
                    "`{function}` is of a cell that ran for real: it uses the notebook's own {names}, not what dry runs"
                    " assigned; define it in a %%gpumem cell, too",
                    function=function,
                    names=", ".join(f"`{name}`" for name in variables),
                )
            )


def _names_again(names: dict[str, Any], users: Mapping[str, Any], rebound: Collection[str]) -> Callable[[], None]:
    """What gives a cell, for a second run, the names that it has now, but those that it binds before it reads them.

    Values of the user's own are read in ``users`` again: held here, none would be free when the run drops it.
    """
    left = [name for name in names if name not in rebound]
    own = {name: names[name] for name in left if names[name] is not users.get(name)}

    def again() -> None:
        names.clear()
        names.update({name: own[name] if name in own else users[name] for name in left})

    return again


def parse_steps(text: str) -> StopAfter:
    """How many optimizer steps a dry run follows; None for ``"all"``. Raises ValueError for what is neither."""
    if text in ("all", "alike"):
        return None if text == "all" else "alike"
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(_("{text!r} is not a number of optimizer steps; give 1 or more, or all.", text=text))
    return int(text)


def show(report: MemoryReport, top: int, with_picture: bool) -> None:
    """Display a report, with the timeline under its numbers if wanted."""
    from oom_magic.views.report import describe_report  # loads NumPy

    display(describe_with_picture(report, top) if with_picture else describe_report(report, top))


def describe_with_picture(report: MemoryReport, top: int = 5) -> Description:
    """A report's description with its timeline after the peaks."""
    from oom_magic.notebook.figures import timeline_picture
    from oom_magic.views.report import describe_report

    description = describe_report(report, top)
    if not report.timeline.num_events:
        return description
    blocks: list[Block] = list(description.blocks)
    after = next(position for position, block in enumerate(blocks) if isinstance(block, Facts))
    blocks.insert(after + 1, timeline_picture(report))
    return replace(description, blocks=tuple(blocks))


def save(report: MemoryReport, path: str) -> None:
    """Write the report as JSON."""
    try:
        report.to_json(path)
    except OSError as error:
        raise not_written(path, error.errno or errno.EIO) from None
