"""Evaluation of remedies: which rehearsals are made, in which order, and what is said of those left out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from oom_magic.explain.advice import advise, before_evaluation
from oom_magic.explain.evidence.causes import Cause, Evidence
from oom_magic.explain.explainer import explain
from oom_magic.explain.live.growth import Growth
from oom_magic.explain.remedies import rehearsal
from oom_magic.explain.remedies.evaluation import RemedyEvaluator
from oom_magic.explain.remedies.rehearsal import NotEvaluatedError
from oom_magic.explain.remedies.remedy import Remedy, Situation, ranked
from oom_magic.explain.remedies.room import InTheWay
from oom_magic.explain.remedies.sizes.fitting import largest_fitting
from oom_magic.explain.remedies.specs import remedy_specs
from oom_magic.explain.sentences.catalogue import SENTENCES
from oom_magic.memory.allocator.replay import minimum_device_bytes
from oom_magic.memory.report import Assumption
from oom_magic.memory.timeline import Mark, MarkKind
from oom_magic.predict.session import DrySession
from oom_magic.predict.setups.gpus import find_gpu
from oom_magic.predict.what_if import compile_changes
from oom_magic.predict.what_if.loop_changes import AccumulatedGradients
from oom_magic.units import GIB
from oom_magic.views.remedies import best_remedy
from tests.support.samples import predicted, training_timeline

GPU = find_gpu("RTX 3060")
MIB = 2**20


class Run:
    """A training run; a smaller batch, checkpointing and mixed precision halve what a step takes."""

    accumulation = 1
    is_evaluation = is_step = runs_frozen = keeps_no_graph = is_of_job = steps_differ = False
    may_evaluate = compares_samples = False
    calls_followed = samples_compared = 0
    has_failed, kept_by_turns = False, (0, 0)
    names: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, batch=16, works=True):
        self.sizes = {"batch": batch, "seq": 512}
        self.works = works
        self.variations = []

    def begin(self, changes, enough_bytes, is_brief):
        return self._report(16)

    def without_unneeded(self):
        return None

    def label(self, what):
        return what

    def own_code(self, key, values):
        return None

    def check(self, variation):
        kinds = {type(change).__name__ for change in variation.changes}
        if not self.works or kinds - {"ActivationCheckpointing", "MixedPrecision"}:
            raise NotEvaluatedError(Evidence("reason_so_already"), applies=False)

    def run(self, variation):
        self.variations.append(variation)
        share = variation.sizes.get("batch", self.sizes["batch"]) / self.sizes["batch"]
        share *= variation.sizes.get("seq", 512) / 512
        share *= 0.5 if variation.dropped else 1
        halving = [one for one in variation.changes if not isinstance(one, AccumulatedGradients)]
        return self._report(int(16 * share) // 2 ** len(halving))

    def _report(self, scale):
        return predicted_of(training_timeline(num_steps=2, scale=max(1, scale)))


def predicted_of(timeline):
    from oom_magic.memory.report import MemoryReport

    return MemoryReport.from_timeline(timeline, predicted().device)


def need(scale):
    return minimum_device_bytes(training_timeline(num_steps=2, scale=scale))


def evaluated(run, usable, **known):
    evaluator = RemedyEvaluator(run, Situation(usable, GPU, **known))
    return [*evaluator.remedies(), *evaluator.bought()]


def test_the_largest_microbatch_that_makes_up_the_batch():
    run = Run()
    remedies = {one.key: one for one in evaluated(run, need(6))}
    smaller = remedies["smaller_batch"]
    assert (smaller.values["after"], smaller.values["accumulation"], smaller.fits) == (4, 4, True)
    assert smaller.needed_bytes == need(4)
    assert smaller.saving_bytes == need(16) - need(4)
    assert sum("batch" in one.sizes for one in run.variations) <= 3
    assert "combination" not in remedies


def test_a_change_that_fits_but_for_the_pieces_is_advised_with_expandable_segments(monkeypatch):
    class Pieces(Run):
        """Checkpointing saves a little, and nothing else applies."""

        def __init__(self):
            super().__init__()
            self.sizes = {}

        def check(self, variation):
            super().check(variation)
            if {type(change).__name__ for change in variation.changes} != {"ActivationCheckpointing"}:
                raise NotEvaluatedError(Evidence("reason_so_already"), applies=False)

        def run(self, _variation):
            return self._report(14)

    peak = Pieces().run(None).peak_allocated_bytes
    grown = minimum_device_bytes(
        training_timeline(num_steps=2, scale=14), replace(predicted().settings, expandable_segments=True)
    )
    usable = (grown + need(14)) // 2
    assert peak <= grown <= usable < need(14)
    remedies = evaluated(Pieces(), usable)
    (both,) = [one for one in remedies if one.key == "combination"]
    assert both.fits and both.values["keys"] == ("checkpointing", "expandable_segments")
    assert both.needed_bytes == grown and 'os.environ["PYTORCH_CUDA_ALLOC_CONF"]' in both.code
    assert ranked(remedies)[0] is both


@pytest.mark.parametrize(("usable", "reason"), [(need(32), "reason_compiling_is_slow"), (need(3), None)])
def test_what_compiles_is_rehearsed_only_where_nothing_else_is_safe(usable, reason, monkeypatch):
    monkeypatch.setattr(compile_changes, "find_spec", lambda name: object())  # Triton may not be here
    monkeypatch.setattr(compile_changes, "TORCH", compile_changes.FIRST_FOLLOWED)

    class Compiling(Run):
        def begin(self, changes, enough_bytes, is_brief):
            return self._report(64)

        def check(self, variation):
            if {type(change).__name__ for change in variation.changes} - {"Compiled"}:
                raise NotEvaluatedError(Evidence("reason_so_already"), applies=False)

        def run(self, variation):
            return self._report(4 if variation.sizes.get("batch", 16) < 16 else 5)

    (compiled,) = [one for one in evaluated(Compiling(), usable) if one.key == "compile"]
    assert (compiled.note.key if compiled.note else None) == reason


def test_what_compiled_code_keeps_is_tried_before_what_changes_the_training():
    class OfCompiled(Run):
        def check(self, variation):
            if {type(change).__name__ for change in variation.changes} - {"ActivationBudget"}:
                raise NotEvaluatedError(Evidence("reason_so_already"), applies=False)

    keys = [one.key for one in evaluated(OfCompiled(batch=1), need(6))]
    assert keys.index("activation_budget") < keys.index("shorter_sequences")


def test_where_no_graph_is_kept_nothing_is_advised_that_keeps_less_for_a_backward(monkeypatch):
    monkeypatch.setattr(compile_changes, "find_spec", lambda name: None)  # of Triton: it would be told, without a price

    class Generating(Run):
        is_evaluation = keeps_no_graph = True

    told = [{one.key for one in evaluated(run, need(6))} for run in (Run(), Generating())]
    assert [{"compile", "compile_blocks", "checkpointing"} & keys for keys in told] == [
        {"compile", "compile_blocks", "checkpointing"},
        set(),
    ]


def test_where_compiled_code_is_not_followed_nothing_about_compiling_is_advised(monkeypatch):
    monkeypatch.setattr(compile_changes, "find_spec", lambda name: None)

    bound = (Assumption("treated as eager code", None, True),)

    class AsEager(Run):
        def begin(self, changes, enough_bytes, is_brief):
            return replace(super().begin(changes, enough_bytes, is_brief), assumptions=bound)

        def run(self, variation):
            return replace(super().run(variation), assumptions=bound)

    keys = {one.key for one in evaluated(AsEager(), need(6))}
    assert {"smaller_batch"} < keys and not any(key.startswith("compile") for key in keys)


def test_where_the_mended_line_leaves_the_card_safe_nothing_else_is_rehearsed():
    class Leaking(Run):
        def check(self, variation):
            if variation.mended is None:
                super().check(variation)

        def run(self, variation):
            return self._report(2) if variation.mended else super().run(variation)

    growth = Growth("losses", "losses.append(loss)", "cell:3", 9, need(8), True, fixed="losses.append(loss.item())")
    remedies = [one.key for one in evaluated(Leaking(), need(32) // 4, growth=growth)]
    assert remedies[0] == "detach" and set(remedies) <= {"detach", "larger_card", "fsdp"}


def test_where_code_goes_on_with_tensors_the_mended_line_keeps_tensors():
    """total += loss.item() was shown although the loop's caller reads total.item(); nothing else was tried."""

    class ReadLater(Run):
        def check(self, variation):
            if variation.mended is None:
                super().check(variation)

        def run(self, variation):
            if variation.mended is None:
                return super().run(variation)
            if ".item()" in variation.mended.fixed:
                raise NotEvaluatedError(Evidence("reason_failed", {"error": "AttributeError"}))
            return self._report(2)

    growth = Growth("total", "total += loss", "cell:3", 9, need(8), True, fixed="total += loss.item()")
    first, *_ = evaluated(ReadLater(), need(32) // 4, growth=growth)
    assert (first.key, first.values["line"], first.fits) == ("detach", "total += loss.detach()", True)


def test_where_the_first_steps_fit_an_evaluation_after_them_is_followed():
    class Left(Run):
        may_evaluate = True

        def begin(self, changes, enough_bytes, is_brief):
            timeline = training_timeline(num_steps=2, scale=2)
            return predicted_of(replace(timeline, marks=(*timeline.marks, Mark(len(timeline.order), MarkKind.LEFT))))

        def begin_on(self, changes):
            return self._report(16)

    remedies = evaluated(Left(), need(6))
    assert next(one for one in remedies if one.key == "smaller_batch").saving_bytes == need(16) - need(4)


def test_steps_are_followed_further_where_neither_like_steps_nor_an_evaluation_take_enough():
    class Late(Run):
        may_evaluate = True

        def begin(self, changes, enough_bytes, is_brief):
            return self.begin_on(changes) if is_brief else self._report(16)

        def begin_on(self, changes):
            timeline = training_timeline(num_steps=2, scale=2)
            return predicted_of(replace(timeline, marks=(*timeline.marks, Mark(len(timeline.order), MarkKind.LEFT))))

    assert RemedyEvaluator(Late(), Situation(need(6), GPU)).needed_bytes == need(16)


def test_where_each_batch_keeps_its_graph_smaller_ones_are_evaluated_without():
    class Graphs(Run):
        is_evaluation = True

        def check(self, variation):
            if {type(change).__name__ for change in variation.changes} - {"NoGradients"}:
                raise NotEvaluatedError(Evidence("reason_so_already"), applies=False)

        def run(self, variation):
            self.variations.append(variation)
            return self._report(variation.sizes.get("batch", 16) // 2 if variation.changes else 16)

    run = Graphs()
    both, *_ = [one for one in evaluated(run, need(5)) if one.fits]
    assert (both.key, both.values["keys"]) == ("combination", ("no_grad", "smaller_evaluation"))
    assert (both.values["after"], both.needed_bytes) == (8, need(4))
    assert all(one.changes for one in run.variations if "batch" in one.sizes)


@pytest.mark.slow
def test_a_larger_card_is_no_remedy_for_a_loop_that_leaks_and_was_left():
    class Left(Run):
        def begin(self, changes, enough_bytes, is_brief):
            timeline = training_timeline(num_steps=2, scale=16)
            left = Mark(len(timeline.order), MarkKind.LEFT)
            return predicted_of(replace(timeline, marks=(*timeline.marks, left)))

    growth = Growth("losses", "losses.append(loss)", "cell:3", 9, need(8), True)
    assert "larger_card" in {one.key for one in evaluated(Left(), need(2))}
    assert not {"larger_card", "fsdp"} & {one.key for one in evaluated(Left(), need(2), growth=growth)}


def test_a_part_that_fits_says_nothing_of_the_whole():
    class Part(Run):
        def begin(self, changes, enough_bytes, is_brief):
            part = Assumption("left", is_lower_bound=True)
            return replace(super().begin(changes, enough_bytes, is_brief), assumptions=(part,))

    assert "smaller_batch" in {one.key for one in evaluated(Part(batch=16), need(32))}


def test_a_change_whose_rehearsal_is_left_in_a_loop_has_no_price_beside_a_run_that_was_followed():
    """With one row at a time a loop became too long, and its first iterations fitted: the line behind it never would."""

    class LeftWhereSmall(Run):
        def run(self, variation):
            report = super().run(variation)
            is_left = variation.sizes.get("batch", 16) < 16
            part = (Assumption("left", is_lower_bound=True),) if is_left else ()
            return replace(report, assumptions=(*report.assumptions, *part))

    remedies = evaluated(LeftWhereSmall(), need(3))
    smaller = [one for one in remedies if one.key.startswith("smaller_batch")]
    assert [(one.needed_bytes, one.saving_bytes, one.note and one.note.key) for one in smaller] == [
        (None, None, "reason_left_in_loop")
    ]
    assert ranked(remedies)[0].needed_bytes is not None


def test_combinations_are_found_where_nothing_alone_fits():
    both = [one for one in evaluated(Run(batch=2), need(5)) if one.key == "combination"]
    assert [one.values["keys"] for one in both] == [("mixed_precision", "smaller_batch")]
    assert both[0].fits and both[0].needed_bytes == need(4) and both[0].values["accumulation"] == 2
    assert both[0].code.count("accumulation") > 1 and "autocast" in both[0].code


def test_where_a_change_nearly_fills_the_card_a_combination_that_is_safe_comes_before_it():
    remedies = ranked(evaluated(Run(batch=2), need(8)))
    assert (remedies[0].key, remedies[0].verdict) == ("combination", "safe")
    assert {"danger"} == {one.verdict for one in remedies if one.fits and one.key == "checkpointing"}


@pytest.mark.parametrize(("scale", "after", "cost"), [(8, 192, 55), (4, 96, 65), (1, 32, 85)])
def test_the_more_of_a_sequence_is_cut_off_the_more_it_costs(scale, after, cost):
    class Long(Run):
        def check(self, variation):
            if variation.changes:
                raise NotEvaluatedError(Evidence("reason_so_already"), applies=False)

    (shorter,) = [one for one in evaluated(Long(batch=1), need(scale)) if one.key == "shorter_sequences"]
    assert (shorter.values["after"], shorter.cost) == (after, cost)


def test_code_beside_fsdp2_is_for_a_model_without_a_wrapper():
    class Wrapped(Run):
        names = {"model": "net", "inner": "net.module", "switched": "net.module"}  # noqa: RUF012

        def check(self, variation):
            if {type(change).__name__ for change in variation.changes} - {"ActivationCheckpointing", "FullySharded"}:
                raise NotEvaluatedError(Evidence("reason_so_already"), applies=False)

    both = next(one for one in evaluated(Wrapped(batch=1), need(5)) if one.key == "combination")
    assert both.values["keys"] == ("fully_sharded", "checkpointing")
    assert "net.gradient_checkpointing_enable(" in both.code and "fully_shard(net)" in both.code


def test_what_is_in_the_way_goes_first_where_that_alone_is_not_enough():
    class Crowded(Run):
        def without_unneeded(self):
            return InTheWay(("old",), need(16) - need(8)), self._report(8)

    both = [one for one in evaluated(Crowded(batch=1), need(4)) if one.key == "combination"]
    assert [one.values["keys"] for one in both] == [("drop_copy", "mixed_precision")]
    assert both[0].fits and both[0].needed_bytes == need(4) and both[0].code.startswith("del old")


def test_where_it_is_enough_to_release_what_is_in_the_way_other_changes_are_priced_after_it():
    class Crowded(Run):
        def without_unneeded(self):
            return InTheWay(("old",), need(16) - need(8)), self._report(8)

    first, *others = evaluated(run := Crowded(batch=1), need(8))
    assert (first.key, first.needed_bytes) == ("drop_copy", need(8))
    mixed = next(one for one in others if one.key == "mixed_precision")
    assert mixed.needed_bytes == need(4) and mixed.saving_bytes == need(16) - need(4)
    assert mixed.note is not None and mixed.note.key == "reason_after_release"
    assert mixed.code.startswith("del old\n%oom_free\n") and all(one.dropped for one in run.variations)


def test_code_for_accelerate_is_the_users_own_but_for_settings_of_the_accelerator():
    class Own(Run):
        def own_code(self, key, values):
            return "" if key == "mixed_precision" else f"own('{key}')"

    remedies = {one.key: one.code for one in evaluated(Own(), need(6), style="accelerate")}
    assert remedies["smaller_batch"] == "own('smaller_batch')"
    assert remedies["mixed_precision"] == 'accelerator = Accelerator(mixed_precision="bf16")'


def test_what_costs_least_is_rehearsed_first_unless_the_cause_says_otherwise():
    run = Run()
    list(RemedyEvaluator(run, Situation(need(2), GPU), first=["checkpointing"]).remedies())
    order = [type(one.changes[0]).__name__ for one in run.variations if one.changes]
    assert order.index("ActivationCheckpointing") < order.index("MixedPrecision")


def test_an_evaluation_is_first_tried_with_smaller_batches():
    run = Run()
    run.is_evaluation = True
    list(RemedyEvaluator(run, Situation(need(6), GPU), first=["mixed_precision"]).remedies())
    assert run.variations[0].sizes == {"batch": 4} and not run.variations[0].changes


def test_a_run_that_failed_needs_more_than_there_is_though_its_rehearsal_just_fits():
    run = Run()
    usable = need(16)  # with which it ends, if the cache is divided as in the rehearsal
    assert RemedyEvaluator(run, Situation(usable, GPU)).fits
    run.has_failed = True
    evaluator = RemedyEvaluator(run, Situation(usable, GPU))
    assert not evaluator.fits and evaluator.needed_bytes > usable
    assert any(one.key == "smaller_batch" and one.fits for one in evaluator.remedies())
    assert RemedyEvaluator(run, Situation(3 * usable, GPU)).fits  # something else held memory then
    assert RemedyEvaluator(run, Situation(usable, GPU, held_bytes=usable // 2)).fits  # that is released


def test_when_the_time_is_over_the_rest_is_named(monkeypatch):
    monkeypatch.setattr(rehearsal, "PATIENCE_SECONDS", -1)
    run = Run()
    remedies = evaluated(run, need(2))
    unevaluated = [one for one in remedies if one.note and one.note.key == "reason_time"]
    assert not run.variations
    assert {"smaller_batch_any", "checkpointing", "mixed_precision"} <= {one.key for one in unevaluated}


def test_a_run_that_fits_needs_no_change():
    evaluator = RemedyEvaluator(Run(), Situation(need(20), GPU))
    assert evaluator.fits
    assert {one.key for one in evaluator.remedies()} <= {"free_held", "close_processes"}


@pytest.mark.parametrize(("usable", "held", "is_named"), [(20, 2048, False), (20, 20 * GIB, True), (2, GIB, False)])
def test_what_is_held_is_released_where_the_run_fits_without_it_only(usable, held, is_named):
    situation = replace(Situation(need(usable), GPU), held_bytes=held)
    assert ("free_held" in {one.key for one in RemedyEvaluator(Run(), situation).remedies()}) is is_named


def test_what_does_not_apply_or_saves_nothing_is_left_out():
    keys = {one.key for one in evaluated(Run(works=False), need(2))}
    assert not keys & {"sdpa", "lora", "checkpointing", "smaller_batch"}


def test_ranking():
    some = [one for one in ranked(evaluated(Run(), need(6))) if not one.is_bought]
    fits = [one.fits for one in some]
    assert fits == sorted(fits, key=lambda fit: (fit is not True, fit is None))
    verdicts = [one.verdict for one in some if one.fits]
    assert verdicts == sorted(verdicts, key=["safe", "tight", "danger"].index)


@pytest.mark.parametrize("usable", [need(1), need(6), need(10)])
def test_while_prices_come_in_the_headline_only_changes_for_the_better(usable):
    found, order = [], ["safe", "tight", "danger", None]
    heads = []
    for remedy in evaluated(Run(), usable):
        found.append(remedy)
        best = ranked(found)[0]
        unfit = -(best.saving_bytes or 0)
        heads.append(
            (not best.fits, best.is_bought, *((order.index(best.verdict), best.cost) if best.fits else (unfit,)))
        )
    assert heads == sorted(heads, reverse=True)


def test_a_safe_remedy_comes_before_a_cheaper_one_that_fills_the_card():
    cheap, dear = Remedy("sdpa", 1, "same", fits=True), Remedy("lora", 70, "same", fits=True)
    full, safe = replace(cheap, verdict="danger"), replace(dear, verdict="safe")
    card = Remedy("larger_card", 0, "same", fits=True, verdict="safe", is_bought=True)
    assert [one.key for one in ranked([card, full, safe])] == ["lora", "sdpa", "larger_card"]
    assert ranked([replace(full, fits=False, verdict=None), card])[0].key == "larger_card"


def test_an_older_model_is_released_before_the_run_is_changed_however_full_the_card_then_is():
    released = Remedy("drop_copy", 1, "same", fits=True, verdict="danger")
    smaller = Remedy("smaller_batch", 30, "same", fits=True, verdict="safe")
    assert ranked([smaller, released])[0] is released
    assert ranked([smaller, replace(released, fits=False, verdict=None)])[0] is smaller


def test_other_hardware_comes_after_whatever_else_fits():
    keys = [one.key for one in ranked(evaluated(Run(batch=2), need(5)))]
    assert keys.index("combination") < keys.index("larger_card")


@pytest.mark.parametrize("limit", [0.5, 3, 5.5, 6, 11.9, 15.9])
def test_the_largest_fitting_size_in_few_tries(limit):
    tried = []

    def need_of(size):
        tried.append(size)
        return int(100 + 60 * size + size**1.2)

    sizes = list(range(1, 16))
    usable = int(100 + 60 * limit + limit**1.2)
    found = largest_fitting(need_of, sizes, (16, need_of(16)), 100, usable)
    assert found == max((size for size in sizes if need_of(size) <= usable), default=None)


def test_few_tries():
    tried = []
    largest_fitting(lambda size: tried.append(size) or 10 * size, [1, 2, 4, 8], (16, 160), 0, 85)
    assert tried == [8]


def test_a_size_without_effect_is_seen_in_two_tries():
    tried = []
    sizes = [2**power for power in range(22)]
    assert largest_fitting(lambda size: tried.append(size) or 16_000, sizes, (2**22, 16_000), 4, 11_000) is None
    assert tried == [2**21, 1]


def test_a_timeline_from_its_middle_on():
    timeline = training_timeline(num_steps=2)
    middle = timeline.marks[0].position
    later = timeline.since(middle)
    assert later.num_steps() == 2 and later.num_events < timeline.num_events
    live = timeline.live_at(middle - 1)
    assert later.requested_bytes[: len(live)].tolist() == timeline.requested_bytes[live].tolist()
    assert levels(later)[len(live) :] == levels(timeline)[middle:]
    assert timeline.since(0).order.tolist() == timeline.order.tolist()


def levels(timeline):
    """Bytes alive after each event."""
    sizes = timeline.requested_bytes
    return np.cumsum([sizes[event] if event >= 0 else -sizes[~event] for event in timeline.order]).tolist()


def test_while_rehearsals_go_on_nobody_reads_that_no_change_fits():
    diagnosis = before_evaluation(explain("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 16.00 GiB."))
    usable = need(3)
    known, *priced = advise(diagnosis, Run(batch=1), GPU, memory=usable + GPU.context_bytes)
    assert known.as_is.needed_bytes == need(16) and "the run as it is" in str(known)
    assert {one.key for one in known.remedies if one.needed_bytes} <= {"larger_card", "fsdp"}
    headlines = [best_remedy(one.remedies, one.as_is, "en") for one in (known, *priced)]
    assert headlines[0] == "" and any(one.startswith("nothing that was rehearsed so far") for one in headlines)
    assert priced[-1].remedies[0].fits and not any("no single change" in one for one in headlines)


@pytest.mark.parametrize(
    ("trains", "words"), [(True, "The activations of a step"), (False, "The working memory of one pass")]
)
def test_a_run_whose_rehearsal_trained_is_told_as_a_step_though_its_batch_is_not_to_be_made_smaller(trains, words):
    class OfWholeGraph(Run):
        is_step, is_evaluation = trains, not trains

    frames = 'Traceback (most recent call last):\n  File "gcn.py", line 9, in forward\n    x = self.lin(x[edges])\n'
    message = "CUDA out of memory. Tried to allocate 16.00 MiB. GPU 0 has a total capacity of 11.76 GiB of which "
    diagnosis = explain(f"{frames}torch.OutOfMemoryError: {message}6.37 MiB is free.")
    *_, last = advise(replace(diagnosis, cause=Cause.ACTIVATIONS), OfWholeGraph(batch=1), GPU, memory=need(1))
    assert words in str(last).replace("\n", " ")


def test_changes_that_save_nothing_are_not_named_after_all(monkeypatch):
    message = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 11.76 GiB of which "
    trains = 'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    loss.backward()\n'
    diagnosis = explain(f"{trains}torch.OutOfMemoryError: {message}1.37 GiB is free.")
    monkeypatch.setattr(RemedyEvaluator, "remedies", lambda _: iter(()))
    monkeypatch.setattr(RemedyEvaluator, "bought", lambda _: iter(()))
    assert "smaller_batch_any" in {one.key for one in diagnosis.remedies}
    *_, last = advise(diagnosis, Run(), GPU, memory=need(1))
    assert [(one.key, one.note.key) for one in last.remedies] == [("smaller_input", "reason_nothing_saves")]


@pytest.mark.parametrize("number", [0, 9])
def test_what_grows_is_not_said_to_fit_where_a_part_of_its_calls_was_followed(monkeypatch, number) -> None:
    class Evaluating(Run):
        calls_followed = number

    monkeypatch.setattr(RemedyEvaluator, "remedies", lambda _: iter(()))
    monkeypatch.setattr(RemedyEvaluator, "bought", lambda _: iter(()))
    growth = Growth("kept", "kept.append(x)", "cell:3", 9, need(8), False, fixed="kept.append(x.cpu())")
    diagnosis = explain("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 16.00 GiB.")
    *_, last = advise(replace(diagnosis, growth=growth), Evaluating(), GPU, memory=need(64))
    assert ("rehearsal_fits" in {one.key for one in last.evidence}) is (number == 0)


def test_what_is_run_once_stands_apart_from_the_line_that_goes_into_the_loop(monkeypatch) -> None:
    code = "seen.append(x.cpu())\n# instead of seen.append(x)"
    fixed = Remedy("keep_on_host", 1, "same", {"fixed": "seen.append(x.cpu())"}, needed_bytes=GIB, code=code)
    monkeypatch.setattr(RemedyEvaluator, "remedies", lambda _: iter((fixed,)))
    monkeypatch.setattr(RemedyEvaluator, "bought", lambda _: iter(()))
    diagnosis = explain("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 16.00 GiB.")
    *_, last = advise(diagnosis, Run(), GPU, memory=need(1), emptied="seen.clear()")
    assert [one.code for one in last.remedies] == [f"seen.clear()\n%oom_free\n\n{code}"]


@pytest.mark.parametrize(
    ("code", "left", "shown"),
    [
        ("sizes = 4", ("net", "out"), "%oom_free --names net out\nsizes = 4"),
        ("opt = SGD(net)", ("net", "out"), "%oom_free --names net out\n\n# in the cell that failed:\nopt = SGD(net)"),
        ("net = make()\nopt = SGD(net)", ("net",), "%oom_free --names net\nnet = make()\nopt = SGD(net)"),
        ("# run this:\nopt = SGD(net)", ("out",), "%oom_free --names out\n\n# run this:\nopt = SGD(net)"),
        ("del old\n%oom_free", ("out",), "del old\n%oom_free --names out"),
        ("del old\n%oom_free\nopt = SGD(net)", ("net",),
         "del old\n%oom_free --names net\n\n# in the cell that failed:\nopt = SGD(net)"),
        ("%run train.py --batch 4", ("net",), "%oom_free --names net\n%run train.py --batch 4"),
    ],
)  # fmt: skip
def test_what_the_failed_cell_made_is_released_and_what_reads_it_belongs_into_the_cell(monkeypatch, code, left, shown):
    """Where the cell is run again it makes them anew, beside the older ones if these are still bound."""
    remedy = Remedy("sgd", 1, "same", {}, needed_bytes=GIB, code=code)
    monkeypatch.setattr(RemedyEvaluator, "remedies", lambda _: iter((remedy,)))
    monkeypatch.setattr(RemedyEvaluator, "bought", lambda _: iter(()))
    diagnosis = explain("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 16.00 GiB.")
    *_, last = advise(diagnosis, Run(), GPU, memory=need(1), names_left=lambda: left)
    assert [one.code for one in last.remedies] == [shown]


def test_the_line_that_keeps_what_came_from_the_host_is_worth_a_rehearsal() -> None:
    """A replay buffer of an environment's states: a batch of one was advised."""

    def keeps_states() -> None:
        kept = []
        for _ in range(3):
            kept.append(torch.zeros(1024, 1024).cuda())  # noqa: PERF401

    report = DrySession("RTX 3060", has_bar=False).run(keeps_states)
    growth = Growth("kept", "kept.append(x)", "cell:1", 3, 12 * MIB, False, fixed="kept.append(x.cpu())")
    specs = remedy_specs(Situation(GPU.total_bytes, GPU, growth=growth))
    assert next(one for one in specs if one.key == growth.remedy).helps(report)


def test_every_effect_on_speed_has_its_words() -> None:
    for spec in remedy_specs(Situation(GPU.total_bytes, GPU)):
        assert f"pace_{spec.speed}" in SENTENCES and f"speed_{spec.speed}" in SENTENCES
