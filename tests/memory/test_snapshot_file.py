"""A run written as PyTorch's memory snapshot, read back, is the same run."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

import oom_magic as om
from tests.support.samples import predicted


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    report = predicted()
    report.save_snapshot(tmp_path / "run.pickle")
    read = om.load_snapshot(tmp_path / "run.pickle")
    assert read.peak_allocated_bytes == report.peak_allocated_bytes
    assert read.peak_reserved_bytes == report.peak_reserved_bytes
    assert (read.device.name, read.device_total_bytes) == (report.device.name, report.device_total_bytes)
    assert om.load_snapshot(tmp_path / "run.pickle", memory="16GiB").device_total_bytes == 16 * 2**30
    assert "Read from a snapshot" in str(read) and "0 bytes outside" not in str(read)


def test_the_written_snapshot_adds_up(tmp_path: Path) -> None:
    """As torch.cuda._memory_viz.segsum asserts: blocks fill their segment, segments what is reserved."""
    predicted().save_snapshot(tmp_path / "run.pickle")
    snapshot = pickle.loads((tmp_path / "run.pickle").read_bytes())
    for segment in snapshot["segments"]:
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
    trace = snapshot["device_traces"][0]
    grown = sum(entry["size"] for entry in trace if entry["action"] == "segment_alloc")
    shrunk = sum(entry["size"] for entry in trace if entry["action"] == "segment_free")
    assert grown - shrunk == sum(segment["total_size"] for segment in snapshot["segments"])
    viz = pytest.importorskip("torch.cuda._memory_viz")
    assert "Summary of segments" in viz.segsum(snapshot)
    assert "alloc" in viz.trace(snapshot)


def test_frames_of_cpp_and_of_another_machine_are_nobodys_lines(tmp_path: Path) -> None:
    """As ``torch.cuda.memory._record_memory_history()`` records by default, on a machine that is not this one."""
    file = tmp_path / "run.pickle"
    predicted().save_snapshot(file)
    lines = om.load_snapshot(file, memory="12GiB").lines
    snapshot = pickle.loads(file.read_bytes())
    torch_files = "/opt/conda/lib/python3.12/site-packages/torch/nn/modules/linear.py"
    inside = [
        {"filename": name, "line": 0, "name": "forward"} for name in ("??", "", "RegisterCUDA_0.cpp", torch_files)
    ]
    trace = snapshot["device_traces"][0]
    user = {"filename": "/home/ann/train.py", "line": 7, "name": "step"}
    trace.append({"action": "oom", "size": 3 * 2**30, "device_free": 2**30, "stream": 0, "frames": [user]})
    for entry in trace:
        entry["frames"] = [*inside, *entry.get("frames", ())]
    file.write_bytes(pickle.dumps(snapshot))
    read = om.load_snapshot(file)
    assert [(one.line, one.live_bytes) for one in read.lines] == [(one.line, one.live_bytes) for one in lines]
    failed = read.out_of_memory
    assert failed is not None and failed.requested_bytes == 3 * 2**30
    assert (failed.line.file, failed.line.line) == ("/home/ann/train.py", 7)
    trace.append({"action": "alloc", "size": 512, "addr": 1, "stream": 0, "frames": []})  # it was caught
    file.write_bytes(pickle.dumps(snapshot))
    assert om.load_snapshot(file).out_of_memory is None


def test_files_that_are_none_are_refused_with_the_fix(tmp_path: Path) -> None:
    file = tmp_path / "x.pickle"
    file.write_bytes(b"no pickle")
    with pytest.raises(ValueError, match="is not a snapshot"):
        om.load_snapshot(file)
    file.write_bytes(pickle.dumps({"segments": [], "device_traces": [[]]}))
    with pytest.raises(ValueError, match="_record_memory_history"):
        om.load_snapshot(file)
    file.write_bytes(pickle.dumps(Path("x")))
    with pytest.raises(ValueError, match="contains no pathlib"):
        om.load_snapshot(file)
    predicted().save_snapshot(file)
    file.write_bytes(pickle.dumps({**pickle.loads(file.read_bytes()), "card": {}}))  # as PyTorch writes it
    with pytest.raises(ValueError, match="the memory of its card"):
        om.load_snapshot(file)
    with pytest.raises(ValueError, match="devices with traces: 0"):
        om.load_snapshot(file, memory="8GiB", device=3)


def test_tables(tmp_path: Path) -> None:
    report = predicted()
    assert '"peak_allocated_bytes"' in report.to_json()
    report.to_json(tmp_path / "report.json")
    assert (tmp_path / "report.json").read_text(encoding="utf-8") == report.to_json()
    with pytest.raises(ValueError, match="breakdown"):
        report.to_dataframe("tensors")
    pandas = pytest.importorskip("pandas")
    table = report.to_dataframe("breakdown")
    assert isinstance(table, pandas.DataFrame)
    assert table["num_bytes"].sum() == report.breakdown.total_bytes
