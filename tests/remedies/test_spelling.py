"""Code to paste in the user's spelling: the same code, with their comments, line breaks and literals."""

import ast
from pathlib import Path

import pytest

from oom_magic.explain.remedies.spelling import Spelling

CELL = '''\
%%gpumem
# a run of last week's
lr = 3e-4   # tuned
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=1_000)
!nvidia-smi
def train(loader):
    """Two
    lines"""
    for step, batch in enumerate(loader):  # each batch
        # to the card
        batch = batch.to("cuda")

        loss = model(
            batch,  # inputs
            labels=batch,
        ).loss
        optimizer.zero_grad()  # first
        loss.backward()
        optimizer.zero_grad()  # again
    if lr: print("done"); lr = 0
'''
PROGRAMS = sorted(Path(__file__).parents[1].glob("programs/**/*.py"))


def test_what_stays_as_it_was_keeps_comments_lines_and_literals():
    code = """\
# in train:
%oom_free
optimizer = torch.optim.AdamW(model.parameters(), lr=0.0003, weight_decay=1000, foreach=False)
for step, batch in enumerate(loader):
    batch = batch.to('cuda')
    loss = model(batch, labels=batch).loss
    optimizer.zero_grad()
    (loss / 4).backward()
    optimizer.zero_grad()"""
    assert (
        Spelling([CELL]).of(code)
        == """\
# in train:
%oom_free
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=1_000, foreach=False)
for step, batch in enumerate(loader):  # each batch
    # to the card
    batch = batch.to("cuda")
    loss = model(
        batch,  # inputs
        labels=batch,
    ).loss
    optimizer.zero_grad()  # first
    (loss / 4).backward()
    optimizer.zero_grad()  # again"""
    )


def test_only_cells_about_a_statement_say_how_its_numbers_are_written():
    others = [
        "a = 0.0003; b = 0.0003; c = 0.0003",
        "model = Net()\nb = 2\n",
        "torch.optim.Adam(model, lr=0.0003)  # no",
    ]
    code = "optimizer = torch.optim.AdamW(model.parameters(), lr=0.0003, foreach=False)"
    assert Spelling(["x = 1", others[0], CELL, *others[1:]]).of(code) == code.replace("0.0003", "3e-4")
    assert Spelling(["x = 1", *others]).of("b = 2\na=0.00030") == "b = 2\na=0.0003"


@pytest.mark.parametrize("code", ["export X=1", "python train.py --batch 4", "a = 1\x00", "", "# only words", "pass"])
def test_what_is_no_code_of_the_users_stays_as_it_is(code):
    assert Spelling([CELL, "for broken in", "a = '\x00'"]).of(code) == code


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_the_code_means_the_same(path):
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    inner = [one for one in ast.walk(tree) if isinstance(one, ast.stmt) and hasattr(one, "body")]
    spelling = Spelling([text])
    for code in map(ast.unparse, (tree, *inner)):
        assert ast.dump(ast.parse(spelling.of(code))) == ast.dump(ast.parse(code))
