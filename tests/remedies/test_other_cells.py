"""What a notebook's other cells say of one that failed: a backward in a later one, arguments made in an earlier one."""

import ast

import pytest
import torch
from torch import nn

from oom_magic.explain.remedies.own_code.other_cells import (
    arguments_of_earlier_cells,
    handler_of_out_of_memory,
    later_backward,
)

SEPARATE = "loss.backward()\noptimizer.step()"
WHOLE = "loss = net(x).sum()\nloss.backward()"


def names_of(*cells, has_optimizer=True, is_training=True):
    net = nn.Linear(4, 4).train(is_training)
    names = {"In": ["", *cells], "net": net, "x": torch.randn(2, 4)}
    return {**names, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)} if has_optimizer else names


@pytest.mark.parametrize(
    ("cell", "names", "expected"),
    [
        ("loss = net(x).sum()", names_of(), "loss"),
        ("out = net(x)\nloss = out.sum()", names_of(has_optimizer=False), "loss"),
        ("out = net(x)", names_of(), "out"),
        ("out = net(x)", names_of(has_optimizer=False), None),
        ("out = net(x)", names_of(is_training=False), None),
        ("loss = net(x).sum()", names_of(is_training=False, has_optimizer=False), None),
        ("loss = net(x).sum()", names_of(SEPARATE, is_training=False, has_optimizer=False), "loss"),
        ("loss = net(x).sum()", names_of("get_ipython().run_cell_magic('time', '', 'loss.backward()\\n')"), "loss"),
        ("loss = net(x).sum()", names_of(WHOLE), None),
        ("out = net(x)", names_of("def train():\n    net(x).sum().backward()\ntrain()"), None),
        ("val_loss = net(x).sum()\nvalid = True", names_of(), None),
        ("loss = net(x).sum()\nloss.backward()", names_of(), None),
        ("with torch.no_grad():\n    loss = net(x).sum()", names_of(), None),
    ],
)
def test_a_backward_of_a_later_cell(cell, names, expected):
    found = later_backward(ast.parse(cell), names)
    assert (None if found is None else found.name) == expected


MAKES = "args = TrainingArguments('out', num_train_epochs=1)\ntrainer = Trainer(model=net, args=args)"

INLINE = "trainer = Trainer(net, args=Seq2SeqTrainingArguments('out', fp16=False), train_dataset=data)"


@pytest.mark.parametrize(
    ("cells", "cell", "expected"),
    [
        ([INLINE, MAKES], "trainer.train()", "trainer = Trainer(model=net, args=args)"),
        ([MAKES], "trainer.train()", "trainer = Trainer(model=net, args=args)"),
        (MAKES.splitlines(), "trainer.evaluate()", "trainer = Trainer(model=net, args=args)"),
        ([MAKES], "other.train()", ""),
        ([], "trainer.train()", ""),
    ],
)
def test_arguments_of_an_earlier_cell_come_with_the_trainer_that_has_them(cells, cell, expected):
    code = arguments_of_earlier_cells(ast.parse(cell), names_of(*cells), "TrainingArguments(..., bf16=True)")
    assert code.rpartition("\n")[2] == expected
    assert ("bf16=True" in code and "'out'" in code) is bool(expected)


def test_arguments_written_into_a_trainer_of_an_earlier_cell_are_changed_there():
    code = "# half\nTrainingArguments(..., bf16=True)\n\nprint('after')"
    made = arguments_of_earlier_cells(ast.parse("trainer.train()"), names_of(MAKES, INLINE), code)
    whole = INLINE.replace("fp16=False", "fp16=False, bf16=True") + "\nprint('after')"
    assert made.startswith("# half\ntrainer") and ast.dump(ast.parse(made)) == ast.dump(ast.parse(whole))
    assert not arguments_of_earlier_cells(ast.parse("other.train()"), names_of(INLINE), code)


def tries_a_batch(batch):
    try:
        return bytes(batch)
    except RuntimeError as error:
        print("out of memory", error)
        return None


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("try:\n    fit()\nexcept torch.cuda.OutOfMemoryError:\n    size //= 2", "except torch.cuda.OutOfMemoryError"),
        ("while not tries_a_batch(size):\n    size //= 2", "except RuntimeError"),
        ("try:\n    fit()\nexcept torch.OutOfMemoryError as e:\n    log(e)\n    raise", ""),
        ("try:\n    fit()\nexcept ValueError:\n    size = 1", ""),
        ("@find_executable_batch_size(starting_batch_size=8)\ndef fit(batch_size): ...", "find_executable_batch_size"),
        ("args = TrainingArguments(auto_find_batch_size=False)", ""),
        ("args = TrainingArguments(auto_find_batch_size=True)", "auto_find_batch_size"),
    ],
)
def test_code_whose_course_depends_on_running_out_of_memory_is_seen(cell, expected):
    assert handler_of_out_of_memory(ast.parse(cell), {"tries_a_batch": tries_a_batch}) == expected
