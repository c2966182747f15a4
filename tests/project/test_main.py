"""``python -m oom_magic``: the text of the report, and exit codes that CI can use."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from oom_magic.__main__ import NOT_KNOWN, main
from oom_magic.explain.text_files import read_text

TRAIN = """
import sys, torch
width = int(sys.argv[1])
model = torch.nn.Linear(width, width, device="cuda")
optimizer = torch.optim.Adam(model.parameters())
for _ in range(10):
    model(torch.randn(8, width, device="cuda")).sum().backward()
    optimizer.step()
if __name__ == "__main__":
    sys.exit()
"""
MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 11.76 GiB of"
    " which 1.00 GiB is free. Of the allocated memory 10.00 GiB is allocated by PyTorch, and 100.00 MiB is reserved by"
    " PyTorch but unallocated."
)


@pytest.fixture
def script(tmp_path: Path) -> str:
    file = tmp_path / "train.py"
    file.write_text(TRAIN)
    return str(file)


def test_a_program_that_fits(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--gpu", "RTX 3060", "--json", str(tmp_path / "report.json"), script, "--", "1024"]) == 0
    shown = capsys.readouterr().out
    assert "Safe" in shown and "train.py" in shown
    assert json.loads((tmp_path / "report.json").read_text())["peak_allocated_bytes"] > 16 * 2**20


def test_a_program_that_does_not_fit(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", script, "--memory", "2GiB", "--", "16384"]) == 1
    assert "out of memory" in capsys.readouterr().out.lower()


def test_what_is_not_known(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", script, "--", "many"]) == 2  # the program fails
    error = capsys.readouterr().err
    assert "invalid literal" in error and "oom_magic" not in error
    assert main(["run", "--gpu", "RTX 3600", script, "--", "8"]) == 2
    assert "RTX 3060" in capsys.readouterr().err
    assert main(["run", str(tmp_path / "none.py")]) == 2
    assert "none.py" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["run", script, "--width", "8"])
    assert "--width 8; the program's own arguments follow --" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["run", script, "--device", "0"])  # of measured cells: a command has none
    assert main(["run", script, "--num-processes", "2", "--rank", "2"]) == 2
    shown = capsys.readouterr().err
    assert "--device 0" in shown and "give 0 to 1" in shown and "Traceback" not in shown
    assert main(["run", script, "--top", "0", "--", "8"]) == 2
    capsys.readouterr()
    assert main(["run", script, "--json", str(tmp_path / "none" / "report.json"), "--", "8"]) == 2
    told = capsys.readouterr()
    assert "No such file" in told.err and not told.out  # said before the run, not after it


IN_MAIN = """
from __future__ import annotations
import dataclasses, pickle, typing, torch
@dataclasses.dataclass
class Settings:
    width: int = 64
assert typing.get_type_hints(Settings) == {"width": int}
settings = pickle.loads(pickle.dumps(Settings()))
from __main__ import Settings as same
assert same is Settings
torch.ones(settings.width, device="cuda")
"""


@pytest.mark.parametrize(
    "program",
    [IN_MAIN.encode(), b"\xef\xbb\xbf" + IN_MAIN.encode(), "# coding: latin-1\ns = 'é'\nassert len(s) == 1\n".encode("latin-1")],
    ids=["main", "mark", "latin"],
)  # fmt: skip
def test_a_program_is_read_and_found_as_python_does(program: bytes, tmp_path: Path) -> None:
    file = tmp_path / "训练 1.py"
    file.write_bytes(program if b"torch" in program else program + b"import torch\ntorch.ones(4, device='cuda')\n")
    before = sys.modules["__main__"]
    assert main(["run", str(file), "--gpu", "RTX 3060"]) == 0
    assert sys.modules["__main__"] is before


def test_a_module_of_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its relative imports work as under ``python -m``, and its package's code runs only in the dry run."""
    package = tmp_path / "trainer"
    package.mkdir()
    (package / "__init__.py").write_text("import torch\non_card = torch.ones(1, device='cuda')\n")
    (package / "sizes.py").write_text("width = 64\n")
    program = "import sys, torch\nfrom .sizes import width\nassert sys.argv[1:] == ['--n', '7']\ntorch.ones(width, device='cuda')\n"
    (package / "train.py").write_text(program)
    (package / "__main__.py").write_text("from . import train\n")
    monkeypatch.chdir(tmp_path)
    for module in ("trainer.train", "trainer"):
        assert main(["run", "-m", module, "--gpu", "RTX 3060", "--", "--n", "7"]) == 0
    assert main(["run", "-m", "trainer.none"]) == 2
    assert "no module named trainer.none" in capsys.readouterr().err


def test_a_program_that_leaves_the_gpu_alone_is_not_called_safe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "host.py"
    file.write_text("import torch\nprint(torch.ones(3).sum())\n")
    assert main(["run", str(file)]) == 2
    shown = capsys.readouterr().out
    assert "Nothing was put on the GPU" in shown and "Safe" not in shown


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("def f(:", "SyntaxError"),
        ("a\0b", "null"),
        ("raise KeyboardInterrupt", "broken.py:1"),
        ("import sys; sys.exit('no data')", "run: the program ended with exit code 'no data'"),
    ],
)
def test_what_does_not_run_is_never_said_not_to_fit(
    program: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1 says that it does not fit."""
    file = tmp_path / "broken.py"
    file.write_text(program)
    assert main(["run", str(file)]) == 2
    error = capsys.readouterr().err
    assert said in error and "oom_magic/" not in error


def test_a_log_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.log").write_text(
        f"    from transformers import AutoModelForCausalLM\n    loss.backward()\n{MESSAGE}"
    )
    assert main(["explain", "--lang", "en", str(tmp_path / "train.log")]) == 0
    shown = capsys.readouterr().out
    assert "2.00 GiB" in shown
    assert "python -m oom_magic explain FILE --model" in " ".join(shown.split()) and "%oom_explain" not in shown
    (tmp_path / "fine.log").write_text("all is well")
    assert main(["explain", str(tmp_path / "fine.log")]) == 2
    assert main(["explain", str(tmp_path / "no.log")]) == 2


def test_a_saved_notebook_is_read_up_to_the_cell_that_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def cell(source: str, *outputs: dict[str, object]) -> dict[str, object]:
        return {"cell_type": "code", "source": source.splitlines(keepends=True), "outputs": list(outputs)}

    error = {
        "output_type": "error",
        "traceback": ["\x1b[31mOutOfMemoryError\x1b[39m", f"----> 2 loss.backward()\n{MESSAGE}"],
    }
    shown = {"output_type": "display_data", "data": {"text/plain": "a bus error, killed by SIGBUS"}}
    cells = [
        {"cell_type": "markdown", "source": ["Out of memory?"]},
        cell("import torch\nbatch_size = 32", {"output_type": "stream", "text": ["ready\n"]}, shown),
        cell("loss = model(batch)\nloss.backward()", error),
        cell("batch_size = 4"),
    ]
    notebook = tmp_path / "train.ipynb"
    notebook.write_text(json.dumps({"cells": cells}))
    text = read_text(notebook)
    assert text.startswith("import torch\nbatch_size = 32\nready\n") and text.endswith(MESSAGE)
    assert main(["explain", "--lang", "en", str(notebook)]) == 0
    assert "2.00 GiB did not fit" in capsys.readouterr().out
    notebook.write_text('{"cells": [')
    assert main(["explain", str(notebook)]) == 2
    assert main(["run", str(notebook)]) == 2
    assert "is a notebook" in capsys.readouterr().err


def test_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In whatever encoding the log is; closed, as under some schedulers, in one line."""
    piped = f"训练失败\n{MESSAGE}".encode("gbk")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped)))
    assert main(["explain", "-"]) == 0
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["explain", "-"]) == 2
    assert "standard input is closed" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(MESSAGE)
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "oom_magic", "explain", "--lang", "en", str(tmp_path / "train.log")]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_help_and_mistakes_are_in_the_chosen_language(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OOM_MAGIC_LANG", "zh")
    for given, known in (
        (["run", "-h"], ("用法：", "位置参数", "选项", "显示这份帮助")),
        (["run"], ("缺少必需的参数",)),
    ):
        with pytest.raises(SystemExit):
            main(given)
        shown = "".join(capsys.readouterr())
        assert all(word in shown for word in known)
        assert not any(word in shown for word in ("usage", "options:", "arguments", "error"))


@pytest.mark.parametrize("command", [["explain"], ["run", "--gpu", "RTX 3060"]])
def test_a_file_that_is_not_there_is_named(command, capsys) -> None:
    assert main([*command, "no_such_file.py"]) == NOT_KNOWN
    told = capsys.readouterr().err
    assert f"python -m oom_magic {command[0]}: 'no_such_file.py' cannot be read: No such file or directory." in told
