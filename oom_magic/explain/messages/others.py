"""Every other message that is, hides or resembles an out-of-memory failure, one table row each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from oom_magic.explain.messages.pytorch import SIZE


@dataclass(frozen=True)
class Kind:
    """One kind of message: the pattern that shows it (over the squeezed text) and what it is.

    ``is_oom`` is None where such a message is only sometimes about memory. A ``is_faint`` kind counts
    only in a text that holds nothing clearer (a log line beside the exception it belongs to).
    """

    format: str
    backend: str | None
    is_oom: bool | None
    pattern: re.Pattern[str]
    is_faint: bool = False


# More than a log of several megabytes holds; a phrase repeated without end shall not take seconds.
MOST_OF_A_KIND = 5_000
_LIBRARY = r"(?:cublas|cusolver|cusparse|curand)_status_"
_WORKER = r"dataloaderworker(?:\(pid(?:\(s\))?[^)]{0,60}\))?"
_DTYPE = r"(?P<dtype>[a-z_]{1,12}\d{0,3})"

_ROWS: tuple[tuple[str, str | None, bool | None, str], ...] = (
    # The driver and the CUDA libraries, outside PyTorch's allocator.
    ("cuda_thc_pre0.4.1", "cuda", True, r"cudaruntimeerr(?:or)?\(2\):outofmemory(?:at.{0,120})?"),
    ("cuda_error_oom", "cuda", True, r"cudaerror:outofmemory"),
    ("cuda_error_oom", "hip", True, r"hiperror:outofmemory"),
    ("cuda_driver_error", "cuda", True, r"cudadrivererror:outofmemory|cuda_error_out_of_memory"),
    ("cuda_driver_error", "hip", True, r"hipdrivererror:outofmemory"),
    ("cuda_driver_error", "xpu", True, r"(?:ur_result|pi|ze_result)_error_out_of_(?:device|host)_memory"),
    ("cuda_driver_error", "xpu", True, r"(?:ur_result|pi|ze_result)_error_out_of_resources"),
    ("cublas", "cuda", True, _LIBRARY + r"(?:alloc_failed|allocation_failed|not_initialized)"),
    ("cublas", "cuda", True, r"cufft_alloc_failed"),
    ("cublas", "cuda", None, _LIBRARY + r"(?:execution_failed|internal_error|mapping_error)"),
    ("cuda_library_misuse", "cuda", False, _LIBRARY + r"(?:invalid_value|not_supported|arch_mismatch)"),
    ("cudnn", "cuda", True, r"cudnn_status_(?:not_initialized|alloc_failed)"),
    ("cudnn", "cuda", True, r"unabletofind(?:avalidcudnnalgorithm|anenginetoexecutethiscomputation)"),
    ("cudnn", "cuda", None, r"cudnn_status_(?:execution_failed|internal_error|mapping_error)"),
    ("cuda_library_misuse", "cuda", False, r"cudnn_status_(?:bad_param|not_supported|arch_mismatch)"),
    ("nccl", "cuda", True, r"cudafailure2?outofmemory"),
    ("nccl", "cuda", False, r"cudafailure(?!2?outofmemory)\d{0,4}[a-z]"),
    ("third_party_cuda_oom", "cuda", True, r"cudafailedwitherror2outofmemory"),
    (
        "third_party_cuda_oom", "cuda", True,
        rf"allocating(?P<requested>{SIZE})ondevice\d{{0,3}}:cudamallocfailed:outofmemory",
    ),
    ("third_party_cuda_oom", "cuda", True, r"cudamallocfailed:outofmemory"),
    (
        "third_party_cuda_oom", "cuda", True,
        r"bfcarena::allocaterawinternal.{0,120}?(?:requestedbytesof|bufferofsize)(?P<requested_bytes>\d{1,22})",
    ),
    ("third_party_cuda_oom", "cuda", True, r"outofmemory\(requestedsizewas(?P<requested_bytes>\d{1,22})bytes"),
    ("third_party_cuda_oom", "cuda", True, r"outofmemoryallocating(?P<requested_bytes>[\d,]{1,24})bytes"),
    ("bitsandbytes", "cuda", True, r"erroroutofmemoryatline\d{1,6}infile"),
    ("bitsandbytes", "cuda", False, r"errorinvaliddeviceordinalatline\d{1,6}infile"),
    ("nvml_assert", "cuda", True, r"nvml_success==.{0,120}?internalassertfailed"),
    # Host memory.
    ("cpu_allocator", "cpu", True, r"youtriedtoallocate(?P<requested_bytes>\d{1,22})bytes"),
    ("cpu_allocator", "cpu", True, rf"notenoughmemory:youtriedtoallocate(?P<requested>{SIZE})"),
    ("cpu_allocator", "cpu", True, r"posix_memalign\([^)]{0,60}\)==0\.12vs0"),
    ("cpu_negative_size", "cpu", False, r"alloc_cpu\(\)seemstohavebeencalledwithnegativenumber"),
    (
        "numpy", "cpu", True,
        r"unabletoallocate(?:(?P<requested>\d{1,6}\.?\d{0,4}(?:bytes|[kmgtp]ib))foran)?arraywithshape"
        rf"\((?P<shape>[\d,]{{0,80}})\)(?:anddatatype{_DTYPE})?",
    ),
    ("bad_alloc", "cpu", True, r"std::bad_alloc(?:what\(\):std::bad_alloc)?"),
    ("fork_enomem", "cpu", True, r"errno12\]cannotallocatememory|cannotallocatememory\(12\)"),
    ("windows_paging_file", "cpu", True, r"winerror1455(?:\]?thepagingfileistoosmall)?|pagingfileistoosmall"),
    ("static_tls", "cpu", False, r"cannotallocatememoryinstatictlsblock"),
    ("dataloader", "cpu", True, _WORKER + r"iskilledbysignal:buserror"),
    ("dataloader_killed", "cpu", True, _WORKER + r"iskilledbysignal:killed"),
    ("dataloader_other_signal", "cpu", None, _WORKER + r"iskilledbysignal:(?:terminated|aborted)"),
    ("dataloader_other_signal", "cpu", None, _WORKER + r"exitedunexpectedly"),
    ("dataloader_segfault", "cpu", False, _WORKER + r"iskilledbysignal:segm"),
    ("shared_memory_full", "cpu", True, r"unabletowritetofile<?/torch_|/dev/shm.{0,80}nospaceleftondevice"),
    ("shared_memory_full", "cpu", True, r"nospaceleftondevice.{0,80}/dev/shm"),
    ("slurm_oom_kill", "cpu", True, r"detected\d{1,6}oom[-_]?killevent"),
    ("slurm_oom_kill", "cpu", True, r"slurm.{0,60}exceeded(?:job|step)memorylimit"),
    ("scheduler_oom_kill", "cpu", True, r"pbs:jobkilled:[vp]{0,2}mem|term_memlimit"),
    ("kernel_oom_killer", "cpu", True, r"outofmemory:kill(?:ed)?process"),
    ("ray_oom_kill", "cpu", True, r"duetothenoderunninglowonmemory|killedduetomemorypressure\(oom\)"),
    ("notebook_host", "cpu", True, r"crashedafterusingallavailableram"),
    ("notebook_host", "cpu", True, r"notebooktriedtoallocatemorememorythanisavailable"),
    # Other frameworks and what they wrap.
    ("vllm", "cuda", True, r"noavailablememoryforthecacheblocks|largerthantheavailablekvcachememory"),
    ("vllm", "cuda", True, r"largerthanthemaximumnumberoftokensthatcanbestoredinkvcache"),
    ("sglang", "cuda", True, r"notenoughmemory\.pleasetrytoincrease--mem-fraction-static"),
    ("paddle", "cuda", True, rf"outofmemoryerrorongpu\d{{0,3}}\.cannotallocate(?P<requested>{SIZE})memory"),
    ("vllm_startup", "cuda", True, r"freememoryondevice.{0,80}islessthandesiredgpumemoryutilization"),
    ("hf_offload", "cuda", True, r"somemodulesaredispatchedonthecpuorthedisk"),
    ("hf_auto_batch", "cuda", True, r"noexecutablebatchsizefound"),
    (
        "jax", "jax", True,
        r"resource_exhausted(?::?outofmemory[a-z]{0,30}allocat[a-z]{1,3}(?P<requested_bytes>\d{1,22})bytes)?",
    ),
    (
        "tensorflow", "tensorflow", True,
        rf"oomwhenallocatingtensorwithshape\[(?P<shape>[\d,]{{0,80}})\](?:andtype{_DTYPE})?",
    ),
    ("mps_invalid_buffer", "mps", True, rf"invalidbuffersize:(?P<requested>{SIZE})"),
    ("mps_command_buffer", "mps", True, r"kiogpucommandbuffercallbackerroroutofmemory"),
    # Look-alikes: limits, bugs and refusals that no amount of device memory cures.
    ("triton", "cuda", False, r"outofresources?:(?:sharedmemory|tensormemory|registers)"),
    ("inductor_triton", "cuda", False, r"novalidtritonconfigs.{0,60}?outofresource:triton_"),
    ("inductor_triton", "cuda", False, r"outofresource:triton_"),
    ("device_side_assert", "cuda", False, r"device-sideasserttriggered"),
    ("illegal_memory_access", "cuda", False, r"illegalmemoryaccess"),
    ("cuda_invalid_config", "cuda", False, r"invalidconfigurationargument"),
    ("misaligned_address", "cuda", False, r"misalignedaddress"),
    (
        "cuda_other_error", "cuda", False,
        r"(?:cuda|hip)error:(?:invalid(?:deviceordinal|argument|devicefunction)|nokernelimage|unknownerror"
        r"|unspecifiedlaunchfailure|anillegalinstruction|uncorrectableecc|allcuda-capabledevicesarebusy"
        r"|initializationerror)",
    ),
    (
        "no_gpu", "cuda", False,
        r"torchnotcompiledwithcudaenabled|foundnonvidiadriver|nocuda(?:gpusareavailable|-capabledeviceisdetected)"
        r"|nvidiadriveronyoursystemistooold",
    ),
    ("int32_limit", "cuda", False, r"tensorswithmorethanint_max|canuse32bitindexmath"),
    ("int32_limit", "cuda", False, r"quantile\(\)inputtensoris"),
    ("mps_2e32_elements", "mps", False, r"needstobelessthan2\^?32elements"),
    ("allocator_assert", "cuda", False, r"internalassertfailedat.{0,200}?cachingallocator"),
)  # fmt: skip

_FAINT_ROWS: tuple[tuple[str, str | None, bool | None, str], ...] = (
    ("cuda_thc_pre0.4.1", "cuda", True, r"error=2:outofmemory"),
    ("cuda_error_oom", "cuda", True, r"cudaerrormemoryallocation"),
    ("cuda_error_oom", "hip", True, r"hiperroroutofmemory"),
    ("jetson_nvmap", "cuda", True, r"nvmapmemalloc[a-z]{0,20}:\d{0,12}error12"),
    ("cuda_va_exhausted", "cuda", None, r"\[expandablesegmentva\]|virtual-address-space\(vsz\)exhaustion"),
    ("cuda_malloc_async", "cuda", True, r"(?:(?<=error:)|(?<=!))allocationondevice(?!\d{0,3}would)"),
    ("cuda_preempted", "cuda", True, r"preemptivelyrejectingallocation"),
    ("nccl", "cuda", None, r"unhandledcudaerror"),
    ("cpu_allocator", "cpu", True, r"defaultcpuallocator:(?:can.{0,3}tallocate|notenough)memory"),
    ("dataloader", "cpu", True, r"unexpectedbuserrorencounteredinworker"),
    ("kernel_oom_killer", "cpu", True, r"oomkilled|oom-kill:constraint"),
    ("ray_oom_kill", "cpu", True, r"exceedsthememoryusagethreshold"),
    ("disk_full", None, False, r"nospaceleftondevice|storagefull|pytorchstreamwriterfailed"),
    ("disk_full", None, False, r"inline_container\.cc.{0,20}unexpectedpos"),
    ("sigkill", "cpu", True, r"exitcode:?=?(?:-9|137)(?!\d)|signal9\(sigkill\)|signals\.sigkill"),
    ("notebook_host", "cpu", True, r"tcmalloc:largealloc(?P<requested_bytes>\d{1,22})bytes"),
    ("notebook_host", "cpu", None, r"kernelrestarter:restartingkernel"),
    ("kernel_died", None, None, r"kernel(?:appearstohave|has)?died|kernelcrashedwhileexecuting"),
    ("inductor_triton", "cuda", False, r"novalidtritonconfigs"),
)

KINDS = (
    *(Kind(key, backend, is_oom, re.compile(pattern)) for key, backend, is_oom, pattern in _ROWS),
    *(Kind(key, backend, is_oom, re.compile(pattern), True) for key, backend, is_oom, pattern in _FAINT_ROWS),
)

# "Killed" after what a shell puts before it: "script: line 34: 1657575", "1657575", "[1]  + 1657575".
_KILLED = (
    r"^(?=.)(?:[^\n]{0,200}: line \d{1,6}: +\d{0,9} ?)?(?:\d{1,9} +)?"
    r"(?:\[\d{1,4}\][ \t+-]{0,8}\d{0,9}[ \t]{1,8})?"
    r"Killed(?:[ \t]*$|[ \t]{2,}\S|[ \t]+\S{0,60}python)"
    r"|^(?:zsh: |\d{1,9} {1,8})killed {1,8}\S"
)
LINE_KINDS = (
    # cudaMallocAsync's message ends here where a NUL byte cut it (2.3 and later, device 0).
    Kind("cuda_malloc_async", "cuda", True, re.compile(r"\bAllocation on device[ \t]*$", re.M), True),
    Kind("sigkill", "cpu", True, re.compile(_KILLED, re.M), True),
    Kind("memory_error", "cpu", True, re.compile(r"(?<![\w.])MemoryError\b(?!\()"), True),
)


def other_messages(squeezed: str) -> Iterator[tuple[Kind, re.Match[str]]]:
    """The matches of every kind in a squeezed text, up to MOST_OF_A_KIND of each."""
    for kind in KINDS:
        for match in islice(kind.pattern.finditer(squeezed), MOST_OF_A_KIND):
            yield kind, match


def line_messages(cleaned: str) -> Iterator[tuple[Kind, re.Match[str]]]:
    """The first message of each kind that only its place on a line gives away; offsets are in the cleaned text."""
    for kind in LINE_KINDS:
        match = kind.pattern.search(cleaned)
        if match is not None:
            yield kind, match
