"""Reading messages: every version, every way of pasting, and texts nobody wrote on purpose."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oom_magic.explain.evidence.judging import judge, main_failure
from oom_magic.explain.messages.others import MOST_OF_A_KIND, parts_of
from oom_magic.explain.messages.reading import read
from tests.support.folders import DATA, SHARED
from tests.support.oom_templates import MUTATIONS, VERSIONS, Numbers, render, shuffled_numbers

DATA_FILE = DATA / "oom_messages.jsonl"
SHARED_FILE = SHARED / "oom_messages" / "dev.jsonl"
SIZES = {
    "requested_bytes": "requested_bytes", "total": "total_bytes", "free": "free_bytes",
    "allocated": "allocated_bytes", "reserved": "reserved_bytes",
    "reserved_unallocated": "reserved_unallocated_bytes", "process_in_use": "process_bytes",
    "limit": "limit_bytes", "private_pools": "private_pool_bytes", "mps_other": "mps_other_bytes",
}  # fmt: skip


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


PASTES = json.loads((DATA_FILE.parent / "pastes.json").read_text())


def fullest(failures):
    return max(failures, key=lambda failure: failure.num_sizes)


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_survives_every_paste(version, mutation):
    for numbers in (
        Numbers(),
        Numbers(limit=5 * 2**30, pool=22 * 2**20, others=()),
        *map(shuffled_numbers, range(4)),
    ):
        message, truth = render(version, numbers)
        failures = read(MUTATIONS[mutation](message))
        assert len(failures) == 1, (message, failures)
        said = {name: getattr(failures[0], name) for name in truth}
        assert said == truth, MUTATIONS[mutation](message)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_cut_message_says_less_but_nothing_wrong(version):
    message, truth = render(version, Numbers(limit=5 * 2**30, pool=22 * 2**20))
    for length in range(len(message)):
        for failure in read(message[:length]):
            for name, true in truth.items():
                said = getattr(failure, name)
                if name.endswith("_bytes"):
                    assert said in (None, true), (message[:length], name)
                elif name == "other_processes":
                    assert said == true[: len(said)]


def test_interleaved_ranks_are_read_apart():
    messages = [render("T6", shuffled_numbers(seed)) for seed in (1, 2, 3)]
    lines = [
        [f"[rank{rank}]: {message[i : i + 60]}" for i in range(0, len(message), 60)]
        for rank, (message, _) in enumerate(messages)
    ]
    draw = random.Random(0)
    mixed = []
    while any(lines):
        mixed.append(draw.choice([part for part in lines if part]).pop(0))
    failures = read("\n".join(mixed))
    assert len(failures) == 3
    for _, truth in messages:
        assert truth in [{name: getattr(failure, name) for name in truth} for failure in failures]


def test_several_messages_in_one_text():
    texts = [render(version, shuffled_numbers(7)) for version in ("T1", "T3", "T8", "mps", "async")]
    failures = read("\n\nthen\n\n".join(message for message, _ in texts))
    assert [failure.requested_bytes for failure in failures] == [truth["requested_bytes"] for _, truth in texts]


def test_own_process_under_its_host_pid():
    numbers = Numbers(process=None, others=((562167, 7 * 2**30),))
    failure = read(render("T6", numbers)[0])[0]
    assert failure.self_listed_as_pid == 562167
    assert failure.listed_other_bytes == 0
    two = Numbers(process=None, others=((1, 7 * 2**30), (2, 7 * 2**30)))
    assert read(render("T6", two)[0])[0].self_listed_as_pid is None


def test_not_available_is_not_a_size():
    message, _ = render("T6", Numbers(process=2**64, others=((9, 2**64),)))
    failure = read(message)[0]
    assert failure.process_bytes is None
    assert failure.other_processes == ((9, None),)


def test_reserved_and_cached_mean_different_things():
    old = read(render("T1", Numbers())[0])[0]
    new = read(render("T2", Numbers())[0])[0]
    assert abs(old.stuck_bytes - new.stuck_bytes) < 2**24


@pytest.mark.parametrize(
    ("text", "template", "is_oom"),
    [
        (
            "RuntimeError: Could not allocate tensor with 100663296 bytes. There is not enough GPU video memory available!",
            "directml",
            True,
        ),
        (
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 40.00 MiB. GPU \n",
            "cuda_v2.3_nul_cut",
            True,
        ),
        ("CUDA out of memory. Tried to allocate more than 1EB memory.", "cuda_absurd_size", True),
        (
            "CUDA out of memory. Allocation was preemptively rejected because it would exceed"
            " per_process_memory_fraction limit. Requested size: 2.00 GiB",
            "cuda_preempted",
            True,
        ),
        (
            "RuntimeError: CUDA error: out of memorySearch for `cudaErrorMemoryAllocation'",
            "cuda_error_oom",
            True,
        ),
        ("RuntimeError: HIP error: out of memory", "cuda_error_oom", True),
        ("torch.OutOfMemoryError: Allocation on device \n", "cuda_malloc_async", True),
        ("Last error:\nCuda failure 2 'out of memory'", "nccl", True),
        ("Last error:\nCuda failure 1 'invalid argument'", "nccl", False),
        ("ERROR: could not load: cannot allocate memory in static TLS block", "static_tls", False),
        ("quantile() input tensor is too large", "int32_limit", False),
        ("CUDA error: invalid device ordinal", "cuda_other_error", False),
        ("[1]    4711 Killed                  python train.py", "sigkill", True),
        ("exitcode  : -9 (pid: 17)", "sigkill", True),
        ("ChildFailedError: exitcode  : -6 (pid: 17)", None, None),
        ("OSError: [WinError 1455] The paging file is too small", "windows_paging_file", True),
        ("Memory cgroup out of memory: Killed process 4711 (python)", "kernel_oom_killer", True),
        (
            "Out of memory allocating 1,024 bytes (allocated so far: 2,048 bytes)",
            "cupy",
            True,
        ),
        ("DataLoader worker (pid(s) 1234, 5678) exited unexpectedly", "dataloader_exited", None),
        ("$ Torch: not enough memory: you tried to allocate 12GB. Buy new RAM!", "cpu_allocator", True),
        ("the weather is fine", None, None),
        ("", None, None),
    ],
)
def test_other_messages(text, template, is_oom):
    failures = read(text)
    assert [failure.format for failure in failures] == ([template] if template else [])
    assert all(failure.is_oom is is_oom for failure in failures)


@pytest.mark.parametrize("row", rows(DATA_FILE), ids=lambda row: row["id"])
def test_real_messages(row):
    failure = fullest(read(row["text"]))
    assert {name: getattr(failure, name) for name in row["fields"]} == row["fields"]


@pytest.mark.parametrize("row", PASTES, ids=lambda row: row["name"])
def test_pastes_from_everywhere(row):
    failures = read(row["text"])
    assert len(failures) == row["num_failures"]
    main, expected = main_failure(failures), dict(row["expected"])
    assert judge(failures, row["text"]).cause == expected.pop("cause", judge(failures, row["text"]).cause)
    assert {name: getattr(main, name) for name in expected} == expected


def test_a_process_that_holds_less_than_its_pytorch_is_not_believed():
    text = render("T6", Numbers(process=0, others=()))[0]
    assert read(text)[0].process_bytes == 0 and read(text)[0].own_process_bytes is None


def check_failures(text: str) -> None:
    """They are in order of appearance, and no size is below 0."""
    failures = read(text)
    assert [one.start for one in failures] == sorted(one.start for one in failures)
    sizes = [size for one in failures for name, size in one.to_dict().items() if name.endswith("_bytes")]
    assert all(size is None or size >= 0 for size in sizes)


@settings(max_examples=300)
@given(st.text())
def test_any_text_is_read(text):
    check_failures(text)


@settings(max_examples=300)
@given(st.data())
def test_damaged_messages_are_read(data):
    version = data.draw(st.sampled_from(VERSIONS))
    text = render(version, shuffled_numbers(data.draw(st.integers(0, 1000))))[0]
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, len(text)))
        text = text[:place] + data.draw(st.text(max_size=4)) + text[place + data.draw(st.integers(0, 5)) :]
    check_failures(text)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "piece",
    [
        "1234567890", " ", "\n", "a\n", "Tried to allocate ", "Tried to allocate 2.00 GiB ",
        "CUDA out of memory. ", "GPU 0 has a total capacity of ", "[rank0]: a\n[rank1]: b\n",
        "Error", "a.b.", "enforce fail at ", "1 1 ",
        "NVML_SUCCESS == ", "RuntimeError: CUDA error: out of memory\n", "\\n", "[", "\x1b[0m",
        "DataLoader worker (pid ", "&gt;", "May  1 10:00:00 gpu07 x: ", "BFCArena::AllocateRawInternal ", "1: ",
        "[Stage-0] ", "1 killed ", "inline_container.cc", "allocating 1 MiB on device 0:",
    ],
)  # fmt: skip
def test_a_megabyte_of_anything_is_read(piece):
    """How long it takes is measured by tests/benchmarks/bench_messages.py."""
    failures = read(piece * (2**20 // len(piece)))
    assert all(failure.start >= 0 for failure in failures)


@pytest.mark.skipif(not SHARED_FILE.exists(), reason="the shared corpus of real messages is not here")
def test_goals_on_the_shared_corpus():
    num_right = num_wrong = num_oom_right = num_oom = 0
    for row in rows(SHARED_FILE):
        failures = read(row["text"])
        verdicts = {failure.is_oom for failure in failures}
        if row["is_oom"] is not None:
            num_oom += 1
            num_oom_right += (True in verdicts) if row["is_oom"] else (verdicts == {False})
        if not failures:
            continue
        failure = fullest(failures)
        for theirs, ours in SIZES.items():
            true = row["truth_bytes"].get(theirs)
            true = None if true == 2**64 else true
            said = getattr(failure, ours)
            if theirs == "mps_other" or (true is None and said is None):
                continue
            num_right, num_wrong = num_right + (said == true), num_wrong + (said != true)
    assert num_right / (num_right + num_wrong) >= 0.99
    assert num_oom_right / num_oom >= 0.98


def test_a_phrase_without_end_leaves_other_messages_to_be_read():
    failures = read("CUDA error: out of memory\n" * (MOST_OF_A_KIND + 10) + "CUBLAS_STATUS_ALLOC_FAILED")
    formats = [failure.format for failure in failures]
    assert formats.count("cuda_error_oom") == MOST_OF_A_KIND and formats[-1] == "cublas"


def test_letters_that_are_longer_in_lower_case_shift_nothing():
    text = "CUDA out of memory. Tried to allocate 20.00 MiB"
    (found,) = read("\u0130\u0130\u0130\n" + text)
    assert found.requested_bytes == 20 * 2**20
    assert found.start == 4
    assert found.text.startswith("CUDA out of memory")


@pytest.mark.parametrize(
    "text",
    [
        "My GPU memeory gets exhausted after the second epoch.",
        "Unable to reserve enough VRAM for the model on this card.",
        "训练到一半显存就不够用了。",
        "学習中にGPUメモリが足りなくなりました。",
        "Во время обучения не хватает памяти видеокарты.",
        "La mémoire du GPU est insuffisante pendant l'entraînement.",
        "Der Grafikspeicher läuft über, sobald ich die Auflösung erhöhe",
        "그래픽 메모리가 모자라서 학습이 안됩니다",
        "显卡只有8G，一跑就崩，提示显存分配失败",
        "CuDeviceAllocator: request for 2147483648 bytes on GPU 1 could not be satisfied",
        "VK_ERROR_OUT_OF_DEVICE_MEMORY when I upscale on my GTX 1060",
        "Fatal Python error: Cannot recover from MemoryErrors",
        "terminate called after throwing an instance of 'std::bad_array_new_length'",
        "The application could not obtain the memory it asked for",
        "gpu ram gets filled and the run stops with an error",
        "Child process terminated with signal 9",
        "bash: line 1: 4312 Killed                  python train.py",
        "训练中途退出（killed），没有错误提示",
        "vkAllocateMemory failed with -2 on my Radeon",
        "the driver returned E_OUTOFMEMORY while creating a texture",
        "ended by the scheduler: mem usage above the 64gb requested",
        "colab's RAM bar went red and the session restarted",
        "the process needs more memory than the machine has",
        "I get the resource exhaust error on a gtx970",
        "[MPSNDArray initWithDevice:descriptor:] Error: total bytes of NDArray > 2**32'",
    ],
)
def test_memory_running_out_is_recognised_in_any_wording(text):
    failure = main_failure(read(text))
    assert failure is not None and failure.is_oom


@pytest.mark.parametrize(
    "text",
    [
        "How do I free memory after training?",
        "The shared memory of this block is 48 KB.",
        "训练速度很慢，怎么办？",
        "Memory replay fails to import from the package",
        "MemoryFormat is not supported by this op: channels_last error",
        "The memory module of the agent raises an exception: no such key",
        "Failed to allocate an IP address for the container",
        "Feature request: add an option to limit memory",
        "I stopped the training and killed the terminal, can I resume from the checkpoint?",
        "Training is killing my time; it takes 3 days per epoch",
        "the download failed, I have 64 GB RAM and more memory than needed",
        "The sequence is over the limit of 512 tokens",
    ],
)
def test_speaking_of_memory_is_not_running_out(text):
    failure = main_failure(read(text))
    assert failure is None or not failure.is_oom


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ("Training ends with OOM.\nMy gpu memory is 24 GB.", "cuda"),
        ("It goes out of memory on 1m documents (no GPU available).", "cpu"),
        ("The memory (not GPU memory) of my machine runs out of memory.", "cpu"),
        ("I encounter OOM on an RTX2070.", "cuda"),
        ("It goes out of memory.", None),
    ],
)
def test_whose_memory_ran_out_may_stand_elsewhere_in_the_text(text, backend):
    failure = main_failure(read(text))
    assert failure is not None and failure.backend == backend


@pytest.mark.parametrize(
    ("pattern", "parts"),
    [
        (r"cudaruntimeerr(?:or)?\(2\):outofmemory(?:at.{0,120})?", ("(2):outofmemory",)),
        (r"firstfound|seconds?found", ("firstfound", "second")),
        (r"lastletter?s{0,3}gone", ("lastlette",)),
        (r"[^\]a(]wordswithin(?:others|else)", ("wordswithin",)),
        (r"(?:all|within)agroup|\d{3}b", ()),
    ],
)
def test_what_a_message_must_contain(pattern, parts):
    assert parts_of(pattern) == parts
