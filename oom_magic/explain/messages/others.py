"""Every other message that is, hides or resembles an out-of-memory failure, one table row each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from oom_magic.explain.messages.pytorch import SIZE


@dataclass(frozen=True)
class MessageKind:
    """One kind of message: the pattern that shows it (over the squeezed text) and what it is.

    ``is_oom`` is None where such a message is only sometimes about memory. A ``is_faint`` kind counts
    only in a text that holds nothing clearer (a log line beside the exception it belongs to). One of ``parts``, if
    there are any, is in each of its messages.
    """

    format: str
    backend: str | None
    is_oom: bool | None
    pattern: re.Pattern[str]
    is_faint: bool = False
    parts: tuple[str, ...] = ()


# More than a log of several megabytes contains; it bounds the time for a phrase that is repeated endlessly.
MOST_OF_A_KIND = 5_000
# XLA's allocator, too: an attempt of autotuning, after which it takes a slower way.
_GOES_ON = r"(?:withfreed_by_count=\d{1,9})?\.thecallerindicatesthatthisisnotafailure"
_LIBRARY = r"(?:cublas|cusolver|cusparse|curand)_status_"
_WORKER = r"dataloaderworker(?:\(pid(?:\(s\))?[^)]{0,60}\))?"
_DTYPE = r"(?P<dtype>(?:b?float|q?u?int|complex|bool|double|half|object|string|variant|resource)\d{0,3})"
_ON_CPU = r"on[^\[]{0,80}device:cpu"

_SIZE_OF_XLA = r"\d{1,20}(?:\.\d{0,6})?(?:[kmgt](?:i?b)?|b)"  # "11.35G" counts in binary units

_GGML = r"allocating"
_GGML_FAILED = r"ondevice\d{0,3}:cudamallocfailed:outofmemory"

_ROWS: tuple[tuple[str, str | None, bool | None, str], ...] = (
    # The driver and the CUDA libraries, outside PyTorch's allocator.
    ("cuda_thc_pre0.4.1", "cuda", True, r"cudaruntimeerr(?:or)?\(2\):outofmemory(?:at.{0,120})?"),
    ("cuda_error_oom", "cuda", True, r"cudaerror:outofmemory"),
    ("cuda_error_oom", "cuda", True, r"cudaerror2(?!\d).{0,60}?outofmemory"),
    ("cuda_error_oom", "cuda", True, r"cudasuccess\(2vs\.0\)outofmemory|cudamallocretryfailed:outofmemory"),
    ("cuda_error_oom", "cuda", True, r"gpuassert:outofmemory|cudaerrorat[^\s]{0,120}?-outofmemory"),
    ("cuda_error_oom", "cuda", True, r"runtimeapierror:outofmemory|cudadriver\(\).{0,80}?returned\(2\):outofmemory"),
    ("cuda_error_oom", "cuda", True, r"cudalaunch.{0,60}?outofmemory"),
    ("cuda_error_oom", "cuda", True, r"outofmemoryin[^\s]{1,160}?atline\d{1,6}\(error-code2\)"),
    ("cuda_error_oom", "cuda", True,
        r"cudacustomallocatoroutofmemory(?:\[requestedspace:(?P<requested_bytes>\d{1,22})b\])?"),
    ("cuda_error_oom", "cuda", True, r"mallocmcoutofmemory"),
    ("cuda_error_oom", "hip", True, r"hiperror:outofmemory"),
    ("cuda_driver_error", "cuda", True, r"cudadrivererror:outofmemory"),
    ("cuda_driver_error", "hip", True, r"hipdrivererror:outofmemory"),
    ("xpu_driver", "xpu", True, r"(?:ur_result|pi|ze_result)_error_out_of_device_memory"),
    ("xpu_host", "cpu", True, r"(?:ur_result|pi|ze_result)_error_out_of_host_memory"),
    ("xpu_driver", "xpu", True, r"(?:ur_result|pi|ze_result)_error_out_of_resources"),
    ("cublas", "cuda", True, _LIBRARY + r"(?:alloc_failed|allocation_failed|not_initialized)"),
    ("cublas", "cuda", True, r"cufft_alloc_failed|createcu(?:blas|rand|dnn)handlefailed"),
    ("cublas", "cuda", True, r"cublasruntimeerror:resourceallocationfailed"),
    ("cublas", "hip", True, r"roc(?:blas|solver|fft|sparse)(?:error:|_status_)memory(?:allocationfailure|_error)"),
    ("cublas", "cuda", None, _LIBRARY + r"(?:execution_failed|internal_error|mapping_error)"),
    ("cuda_library_misuse", "cuda", False, _LIBRARY + r"(?:invalid_value|not_supported|arch_mismatch)"),
    ("cudnn", "cuda", True, r"cudnn_status_(?:not_initialized|alloc_failed)"),
    ("cudnn", "cuda", True, r"unabletofind(?:avalidcudnnalgorithm|anenginetoexecutethiscomputation)"),
    ("cudnn", "cuda", None, r"cudnn_status_(?:execution_failed|internal_error|mapping_error)"),
    ("cuda_library_misuse", "cuda", False, r"cudnn_status_(?:bad_param|not_supported|arch_mismatch)"),
    ("catboost", "cuda", True, r"ncudalib::toutofmemoryerror"),
    ("catboost", "cuda", True, r"outofmemory\.requested[\d.]{1,20};free[\d.]{1,20}"),
    ("third_party_cuda_oom", "cuda", True, r"cudafailure2:outofmemory"),
    ("nccl", "cuda", True, r"cudafailure2?outofmemory"),
    ("nccl", "cuda", False, r"cudafailure(?!2?:?outofmemory)\d{0,4}[a-z]"),
    ("third_party_cuda_oom", "cuda", True, r"cudafailedwitherror2outofmemory"),
    ("third_party_cuda_oom", "cuda", True, r"cudamallocerror2onallocsize(?P<requested_bytes>\d{1,22})"),
    ("third_party_cuda_oom", "cuda", True, r"outofgpuandsharedhostmemory"),  # Blender
    ("ctranslate2", "cuda", True, r"cudafailedwitherroroutofmemory"),
    ("third_party_cuda_oom", "cuda", True, r"cudamallocfailed:outofmemory"),
    ("third_party_cuda_oom", "cuda", True, r"failedtocudamalloc(?P<requested_bytes>\d{1,22})bytes"),
    # llama.cpp and Ollama: the device's buffers, and the host's.
    ("llama_cpp", "hip", True, rf"{_GGML}(?P<requested>{SIZE}){_GGML_FAILED}(?=.{{0,90}}rocm\d)"),
    ("llama_cpp", "cuda", True, rf"{_GGML}(?P<requested>{SIZE}){_GGML_FAILED}"),
    ("llama_cpp", "hip", True, r"failedtoallocaterocm\d{1,2}bufferofsize(?P<requested_bytes>\d{1,22})"),
    ("llama_cpp", "cuda", True, r"failedtoallocate(?:cuda|vulkan|metal"
        r"|sycl)\d{0,2}bufferofsize(?P<requested_bytes>\d{1,22})"),
    ("llama_cpp", "cuda", True, r"unabletoallocate(?:cuda|vulkan|rocm|metal|sycl)\d{0,2}buffer"),
    ("llama_cpp", "cuda", True, r"ggml_vulkan:devicememoryallocationofsize(?P<requested_bytes>\d{1,22})failed"),
    ("llama_cpp_host", "cpu", True,
        r"cpu_buffer_type_alloc_buffer:failedtoallocatebufferofsize(?P<requested_bytes>\d{1,22})"),
    ("llama_cpp_host", "cpu", True,
        r"(?:failed|unable)toallocatecpu\d{0,2}buffer(?:ofsize(?P<requested_bytes>\d{1,22}))?"),
    (
        "ollama_host", "cpu", True,
        rf"modelrequiresmoresystemmemory(?:\((?P<requested>{SIZE})\)thanisavailable\((?P<free>{SIZE})\))?",
    ),
    ("pinned_memory", "cpu", True, rf"failedtoallocate(?P<requested>{SIZE})ofpinnedmemory"),
    ("pinned_memory", "cpu", True, r"couldnotallocatepinnedhostmemoryofsize:?(?P<requested_bytes>\d{1,22})"),
    ("pinned_memory", "cpu", True, r"failedtoalloc(?P<requested_bytes>\d{1,22})bytesonhost"),
    ("pinned_memory", "cpu", True, r"pin_memory\(\)failswith"),
    ("pinned_memory", "cpu", True, r"(?:cuda|hip|cumem)(?:hostalloc|hostmalloc|mallochost|hostregister|allochost)"
        r"\w{0,10}(?:failed|error|returned|:outofmemory)"),
    # Other compute runtimes: ONNX Runtime, TensorRT, CuPy, RAPIDS, Thrust, Numba.
    (
        "onnxruntime", "cuda", True,
        r"bfcarena::allocaterawinternal(?!.{0,700}_nchwc).{0,220}?"
        r"(?:requestedbytesof|bufferofsize)(?P<requested_bytes>\d{1,22})",
    ),
    (  # nodes of such names are the CPU's
        "host_allocation", "cpu", True,
        r"_nchwc'?statusmessage.{0,160}?bfcarena::allocaterawinternal.{0,120}?bufferofsize(?P<requested_bytes>\d{1,22})",
    ),
    ("onnxruntime", "cuda", True, r"availablememoryof\d{1,15}issmallerthanrequestedbytes"),
    # GitHub cuts long titles off
    ("onnxruntime", "cuda", True, r"bfcarena::allocaterawinternal.{0,220}?failedtoalloc(?!atememoryforrequested)"),
    ("tensorrt", "cuda", True, r"outofmemory\(requestedsizewas(?P<requested_bytes>\d{1,22})bytes"),
    ("tensorrt", "cuda", True, r"requestedamountofgpumemory\((?P<requested_bytes>\d{1,22})bytes\)couldnotbeallocated"),
    ("tensorrt", "cuda", True, r"cudaerrorin[a-z0-9_:]{1,80}:2\(outofmemory\)|outofmemoryerrorinnvinfer1"),
    ("tensorrt", "cuda", True, r"errorcode2:outofmemory(?!\(requestedsizewas)|errorcode1:cudaruntime\(outofmemory\)"),
    ("tensorrt_tactic", "cuda", None, r"skippingtactic\d{1,4}duetoinsuff?icientmemory"
        r"|devicememoryisinsufficienttousetactic"),
    (
        "cupy", "cuda", True,
        r"outofmemoryallocating(?P<requested_bytes>[\d,]{1,24})bytes"
        r"(?:\(allocatedsofar:(?P<allocated_bytes>[\d,]{1,24})bytes)?",
    ),
    (
        "cupy", "cuda", True,
        r"outofmemorytoallocate(?P<requested_bytes>\d{1,22})bytes\(total(?P<attempted_bytes>\d{1,22})bytes",
    ),
    ("rmm", "cuda", True, r"rmm::(?:bad_alloc|out_of_memory)|std::bad_alloc:(?:out_of_memory:)?cudaerror(?=[^m])"),
    ("rmm", "cuda", True, rf"rmmallocationof(?P<requested>{SIZE})failed"),
    ("rmm", "cuda", True, r"std::bad_alloc:(?:out_of_memory:)?rmmfailure|maximumpoolsizeexceeded"),
    ("rmm", "cuda", True, r"rmm_error_out_of_memory(?:\(4\)attemptedtoallocate:(?P<requested_bytes>\d{1,22})bytes)?"),
    ("thrust", "cuda", True, r"thrust::.{0,60}?bad_alloc|(?:std::bad_alloc"
    r"|badallocation):(?:cudaerrormemoryallocation|outofmemory)"
    r"(?::outofmemory-?freememory:(?P<free_bytes>\d{1,22})-?requestedmemory:(?P<requested_bytes>\d{1,22}))?"),
    ("thrust", "hip", True, r"(?:std::bad_alloc|badallocation):hiperroroutofmemory"),
    ("thrust", "cuda", True, r"device_helpers\.cuh\(\d{1,6}\):outofmemory"),
    ("thrust", "cuda", True, r"(?:parallel_for|reduce|sort|scan|copy)failed:(?:[a-z]{1,40}:)?outofmemory"),
    ("numba", "cuda", True, r"calltocumem\w{1,20}resultsincuda_error_out_of_memory"),
    ("bitsandbytes", "cuda", True, r"erroroutofmemoryatline\d{1,6}infile"),
    ("bitsandbytes", "cuda", False, r"errorinvaliddeviceordinalatline\d{1,6}infile"),
    ("nvml_assert", "cuda", True, r"nvml_success==.{0,120}?internalassertfailed"),
    # Vulkan, OpenCL and Direct3D, on any vendor's device.
    ("graphics_api", None, True, r"mem_object_allocation_failure|cl_out_of_resources|wgpuerror:outofmemory"),
    ("opencl_buffer_limit", None, True, r"clcreatebuffer\w{0,12}:?\(?-61(?!\d)|cl_invalid_buffer_size"),
    ("graphics_api", None, True, r"devicememoryallocationofsize(?P<requested_bytes>\d{1,22})failed"),
    ("graphics_api", None, True, r"8007000e(?![\da-f])|vk(?:allocatememory|create\w{1,20})failed'?:?-[12](?!\d)"),
    ("directml", "directml", True, r"couldnotallocatetensorwith(?P<requested_bytes>\d{1,22})bytes"),
    # Host memory.
    ("heap_damaged", None, False, r"(?:malloc|free|realloc|munmap_chunk|calloc)\(\):(?:memorycorruption|invalid"
        r"|unaligned|corrupt|unsorted|mismatch|double)|doublefreeorcorruption|corrupted(?:sizevs|double-linked)|heapcorruption"),
    ("host_allocation", "cpu", True, rf"cannotallocatevectorofsize(?P<requested>{SIZE})"),
    ("host_allocation", "cpu", True, r"javascriptheapoutofmemory|fatalerror:runtime:outofmemory"),
    ("host_allocation", "cpu", True, r"vectormemory(?:exhausted|limitof)|cholmoderror'outofmemory'"
        r"|'[rcm]e?alloc'couldnot(?:re-)?allocatememory\((?P<requested_bytes>\d{1,22})bytes"),
    ("host_allocation", "cpu", True, r"winerror(?:8|1450)\]|mmapfailed:enomem"),
    ("cpu_allocator", "cpu", True, r"openvino.{0,120}?failedtoallocate(?P<requested_bytes>\d{1,22})bytesofmemory"),
    ("cpu_allocator", "cpu", True, r"youtriedtoallocate(?P<requested_bytes>\d{1,22})bytes"),
    ("cpu_allocator", "cpu", True, rf"notenoughmemory:youtriedtoallocate(?P<requested>{SIZE})"),
    ("cpu_allocator", "cpu", True, r"posix_memalign\([^)]{0,60}\)==0\.12vs0"),
    ("cpu_negative_size", "cpu", False, r"alloc_cpu\(\)seemstohavebeencalledwithnegativenumber"),
    ("numpy", "cpu", True, r"(?:cannot|couldnot|unableto)allocate"
        r"\d{1,6}(?:\.\d{1,4})?[kmgt]i?b?(?:of)?memoryfor(?:the|an)array"),
    (
        "numpy", "cpu", True,
        r"unabletoallocate(?:(?P<requested>\d{1,6}\.?\d{0,4}(?:bytes|[kmgtpe]ib))foran)?arraywithshape"
        rf"\((?P<shape>[\d,]{{0,80}})\)(?:anddatatype{_DTYPE})?",
    ),
    ("bad_alloc", "cpu", True, r"std::bad_alloc(?:what\(\):std::bad_alloc)?(?!:(?:cuda|hip|out|rmm))"),
    ("bad_alloc", "cpu", True, r"arrowmemoryerror:(?:malloc|realloc)ofsize(?P<requested_bytes>\d{1,22})failed"),
    ("opencv", "cpu", True, r"\(-4:insufficientmemory\)failedtoallocate(?:(?P<requested_bytes>\d{1,22})bytes)?"),
    ("java_heap", "cpu", True, r"java\.lang\.outofmemoryerror"),
    ("fork_enomem", "cpu", True, r"errno12\]cannotallocatememory|cannotallocatememory\(12\)"),
    ("windows_paging_file", "cpu", True, r"winerror1455(?:\]?thepagingfileistoosmall)?"
        r"|pagingfileistoosmall|oserror1455(?!\d)"),
    ("static_tls", "cpu", False, r"cannotallocatememoryinstatictlsblock"),
    ("dataloader", "cpu", True, _WORKER + r"iskilledbysignal:buserror"),
    ("dataloader", "cpu", True, r"accesstoanundefinedportionofamemoryobject"
        r"|\(buserror\)isdetectedbytheoperatingsystem"),
    ("dataloader_killed", "cpu", True, _WORKER + r"iskilledbysignal:killed"),
    ("dataloader_other_signal", "cpu", None, _WORKER + r"iskilledbysignal:(?:terminated|aborted)"),
    ("dataloader_exited", "cpu", None, _WORKER + r"exitedunexpectedly"),
    ("dataloader_segfault", "cpu", False, _WORKER + r"iskilledbysignal:segm"),
    ("shared_memory_full", "cpu", True, r"unabletowritetofile<?/torch_|/dev/shm.{0,80}nospaceleftondevice"),
    ("shared_memory_full", "cpu", True, r"nospaceleftondevice.{0,80}/dev/shm"),
    ("slurm_oom_kill", "cpu", True, r"detected\d{1,6}oom[-_]?killevent"),
    ("slurm_oom_kill", "cpu", True, r"slurm.{0,60}exceeded(?:job|step)memorylimit|cgroupout-of-memoryhandler"),
    ("slurm_oom_kill", "cpu", True, r"(?:job|step)[\d.]{1,20}exceededmemorylimit\(\d"),
    ("slurm_oom_kill", "cpu", True, r"srun:error:.{0,60}?task[\d,\-]{1,20}:outofmemory"),
    ("scheduler_oom_kill", "cpu", True, r"pbs:jobkilled:[vp]{0,2}mem|term_memlimit"),
    ("kernel_oom_killer", "cpu", True, r"outofmemory:kill(?:ed)?process|killedbytheoomkiller|invokedoom-?killer"
        r"|memorycgroupoutofmemory"),
    ("kernel_oom_killer", "cpu", True, r"systemd-oomd(?:\[\d{1,10}\])?:?killed|memorypressurefor.{0,120}being\d"),
    ("pod_oom_kill", "cpu", True, r"reason:oomkilled|oomkilled.{0,40}exitcode:137"),
    ("pod_evicted", "cpu", True, r"nodewaslowonresource:memory"),
    ("scheduler_oom_kill", "cpu", True, r"killedbyyarnforexceeding"),
    ("dask_worker", "cpu", True, r"workerexceeded\d{1,3}%memorybudget"),
    ("ray_oom_kill", "cpu", True, r"duetothenoderunninglowonmemory|killedduetomemorypressure\(oom\)"),
    ("ray_oom_kill", "cpu", True, r"rayoutofmemoryerror|\d%ofthememoryonnode"),
    ("notebook_host", "cpu", True, r"crashedafterusing(?:all)?availableram"),
    ("kernel_oom_killer", "cpu", True, r"lowswap:killing"),  # macOS
    ("notebook_host", "cpu", True, r"notebooktriedtoallocatemorememorythanisavailable"),
    # Other frameworks and what they wrap.
    ("vllm", "cuda", True, r"noavailablememoryforthecacheblocks"),
    ("vllm", "cuda", True, r"available(?:kv)?cachememory:-\d{1,4}(?:\.\d{1,3})?"),
    ("vllm_context", "cuda", True, r"largerthantheavailablekvcachememory"),
    ("vllm_context", "cuda", True, r"largerthanthemaximumnumberoftokensthatcanbestoredinkvcache"),
    ("sd_webui", "cuda", True, r"notenoughmemory,uselowerresolution"),
    ("vllm", "cuda", True, r"exceedsavailable[a-z]{0,20}cacheblocks"),
    ("sglang_retracts", "cuda", True, r"decodeoutofmemoryhappened"),
    ("sglang", "cuda", True, r"notenoughmemory\.pleasetrytoincrease--mem-fraction-static"),
    ("sglang", "cuda", True, r"leavenogpumemoryforthekvcacheunder--mem-fraction-static"),
    ("tgi", "cuda", True, r"notenoughmemorytohandle\d{1,9}(?:total|prefill)tokens"),
    (
        "paddle", "cuda", True,
        rf"outofmemoryerrorongpu\d{{0,3}}\.cannotallocate(?P<requested>{SIZE})(?:gpu)?memory(?:ongpu\d{{1,3}})?,"
        rf"(?:(?P<allocated>{SIZE})memoryhasbeenallocatedand)?availablememoryisonly(?P<free>{SIZE})",
    ),
    ("paddle", "cuda", True, rf"outofmemoryerrorongpu\d{{0,3}}\.cannotallocate(?P<requested>{SIZE})memory"),
    ("paddle", "cuda", True, rf"cannotmalloc(?P<requested>{SIZE})gpumemory"),
    ("host_allocation", "cpu", True, r"failtoallocmemoryof(?P<requested_bytes>\d{1,22})size,?errorcodeis12"),
    ("paddle", "cuda", True, r"enforceallocating<=availablefailed"),
    ("vllm_startup", "cuda", True, r"freememoryondevice.{0,80}islessthandesiredgpumemoryutilization"),
    ("hf_offload", "cuda", True, r"somemodulesaredispatchedonthecpuorthedisk"),
    ("hf_auto_batch", "cuda", True, r"noexecutablebatchsizefound"),
    (
        "jax", "jax", True,
        r"resource_?exhausted:?(?:xla:tpucompilepermanenterror\.?)?(?:ranoutofmemory|"
        r"outofmemory[a-z]{0,30}allocat[a-z]{1,3}(?P<requested_bytes>\d{1,22})bytes)",
    ),
    ("jax", "jax", True, r"cumemallocasyncfailedtoallocate(?P<requested_bytes>\d{1,22})bytes:resource_exhausted"),
    ("jax", "jax", True, rf"resource_?exhausted:failedtoallocaterequestfor(?P<requested>{SIZE})"),
    (  # the compiler for TPUs, whichever framework calls it
        "jax", "jax", True,
        rf"unlikelytohaveenoughmemory\.requires{_SIZE_OF_XLA},has{_SIZE_OF_XLA}available",  # of the whole program
    ),
    (
        "jax", "jax", True,
        rf"attemptingto(?:allocate|reserve)(?P<requested>{_SIZE_OF_XLA})(?:atthebottomofmemory)?\.thatwasnotpossible\."
        rf"thereare(?P<free>{_SIZE_OF_XLA})free",
    ),
    (
        "tensorflow", "tensorflow", True,
        r"failedtoallocate[\d.]{1,12}[kmgt]?i?b?\((?P<requested_bytes>\d{1,22})bytes\)"
        r"fromdevice:cuda_error_out_of_memory",
    ),
    (
        "tensorflow", "hip", True,
        r"failedtoallocate[\d.]{1,12}[kmgt]?i?b?\((?P<requested_bytes>\d{1,22})bytes\)fromdevice:hip_?error",
    ),
    ("tensorflow_goes_on", "tensorflow", False, rf"ranoutofmemorytryingtoallocate{SIZE}{_GOES_ON}"),
    ("tensorflow", "tensorflow", True, rf"ranoutofmemorytryingtoallocate(?P<requested>{SIZE})(?!{_GOES_ON})"),
    ("tensorflow", "tensorflow", True, r"resourceexhaustederror:(?:failedtoallocate|oom(?!when))"),
    ("tensorflow", "tensorflow", True, r"dsttensorisnotinitialized"),
    ("tensorflow", "tensorflow", True, r"limit:\d{6,20}inuse:\d{6,20}maxinuse:"),
    (
        "tensorflow_host", "cpu", True,
        rf"oomwhenallocatingtensor(?:with|of)shape\[(?P<shape>[\d,]{{0,80}})\]andtype{_DTYPE}{_ON_CPU}",
    ),
    (
        "tensorflow", "tensorflow", True,
        rf"oomwhenallocatingtensor(?:with|of)shape\[(?P<shape>[\d,]{{0,80}})\](?!andtype\w{{1,16}}?{_ON_CPU})(?:andtype{_DTYPE})?",
    ),
    ("mps_invalid_buffer", "mps", True, rf"invalidbuffersize:(?P<requested>{SIZE})"),
    ("mps_invalid_buffer", "mps", True, r"(?:totalbytesofndarray|productofdimensionsizes|ndarraydimensionlength)"
        r"(?:23[12]|int_max)"),
    ("mps_command_buffer", "mps", True, r"kiogpucommandbuffercallbackerroroutofmemory"
        r"|commandbuffer[a-z]{0,20}failed.{0,60}?insufficientmemory"),
    (
        "mps_invalid_buffer", "mps", True,
        r"attemptingtoallocate(?P<requested_bytes>\d{1,22})byteswhichisgreaterthanthemaximum",
    ),
    ("npu_runtime", "npu", True, r"memory_allocation_failure|el0004|aclrtmalloc\w{0,20}(?:fail|err)|rtmallocfail"),
    # Look-alikes: limits, bugs and refusals that more device memory does not fix.
    ("ggml_pool", "cpu", False, r"notenoughspaceinthecontext'?smemorypool"),
    ("triton", "cuda", False, r"outofresources?:(?:sharedmemory|tensormemory|registers)"),
    ("inductor_triton", "cuda", False, r"novalidtritonconfigs.{0,60}?outofresource:triton_"),
    ("inductor_triton", "cuda", False, r"outofresource:triton_"),
    ("device_side_assert", "cuda", False, r"device-sideasserttriggered"),
    ("device_side_assert", "cuda", False, r"block:\[[\d,]{5,30}\],thread:\[[\d,]{5,30}\]assertion"),
    ("illegal_memory_access", "cuda", False, r"illegalmemoryaccess"),
    ("illegal_memory_access", "hip", False, r"memoryaccessfaultbygpu"),
    ("size_overflow", None, False, r"storagesizecalculationoverflowed|tryingtocreatetensorwithnegativedimension"),
    ("cuda_invalid_config", "cuda", False, r"invalidconfigurationargument"),
    ("misaligned_address", "cuda", False, r"misalignedaddress"),
    (
        "cuda_other_error", "cuda", False,
        r"(?:cuda|hip)error:(?:invalid(?:deviceordinal|argument|devicefunction)|unknownerror"
        r"|unspecifiedlaunchfailure|anillegalinstruction|uncorrectableecc|allcuda-capabledevicesarebusy"
        r"|initializationerror)",
    ),
    # outside of the driver's own words: the runtime's number (3 initialization, 30 unknown, 35 driver too old)
    ("cuda_other_error", "cuda", False, r"cudaruntimeerror\((?:3|30|35)\):|cudaunknownerror-thismaybedueto"),
    ("cuda_other_error", "cuda", False,
        r"cuda(?:malloc\w{0,12}|memgetinfo)fail(?:ed|s)[:,](?:unknownerror|initializationerror|driver|invalid|nocuda)"),
    ("context_full", None, False, r"couldnotfindakvslot|promptistoobigcomparedtokvsize"),
    ("device_lost", None, False, r"device_?lost(?:error)?(?![a-z])|ur_result_error_device_lost"),
    ("no_kernel_image", "cuda", False, r"nokernelimageisavailable"),
    ("physx_overflow", "cuda", False, r"pxg\w{1,40}::\w{1,60}bufferoverflowdetected"),
    ("int32_limit", "cuda", False, r"tensorswithmorethanint_max|canuse32bitindexmath"),
    ("int32_limit", "cuda", False, r"quantile\(\)inputtensoris"),
    ("mps_2e32_elements", "mps", False, r"needstobelessthan2\^?32elements"),
    ("allocator_assert", "cuda", False, r"internalassertfailedat.{0,200}?cachingallocator"),
)  # fmt: skip

_FAINT_ROWS: tuple[tuple[str, str | None, bool | None, str], ...] = (
    (  # a warning, too, where something else failed
        "no_gpu",
        "cuda",
        False,
        r"torchnotcompiledwithcudaenabled|foundnonvidiadriver|nocuda(?:gpusareavailable|-capabledeviceisdetected)"
        r"|nvidiadriveronyoursystemistooold",
    ),
    ("windows_paging_file", "cpu", True, r"error:?1455(?!\d)"),
    ("cuda_thc_pre0.4.1", "cuda", True, r"error=2:outofmemory"),
    ("cuda_error_oom", "cuda", True, r"cudaerrormemoryallocation|cudaexecutionfailedwitherror2(?!\d)"),
    ("cuda_driver_call", "cuda", True, r"size(?P<requested_bytes>\d{1,22})bytes\(cudamallocerroroutofmemory"),
    ("cuda_driver_call", "cuda", True, r"cuda_error_out_of_memory"),
    (
        "cuda_driver_call",
        "cuda",
        True,
        r"cu(?:da)?(?:malloc|memalloc).{0,240}?outofmemory|outofmemoryincu(?:memalloc|stream|ctx|module|event)",
    ),
    ("jax", "jax", True, r"resource_exhausted"),
    # XLA's count of a program that its rematerialization could not make small enough
    ("jax", "jax", True, r"byrematerialization;onlyreducedto"),
    ("jax_launch", "jax", True, r"failedtolaunchcudakernel:.{0,160}?cuda_error_out_of_memory"),
    ("jax", "jax", True, r"ranoutofmemoryinmemoryspacehbm|exceededhbmcapacity"),
    ("tensorflow", "tensorflow", True, r"oomwhenallocatingtensor|resourceexhausted(?:error)?:"),
    ("llama_cpp", "cuda", True, r"failedtoallocatebufferforkvcache|failedtoallocatecompute(?:pp)?buffers"),
    ("class_only", "cuda", True, r"outofmemoryerror(?=traceback\(most)"),
    ("cuda_error_oom", "hip", True, r"hiperroroutofmemory|rocmerror:outofmemory"),
    ("jetson_nvmap", "cuda", True, r"nvmapmemalloc[a-z]{0,20}:\d{0,12}error12"),
    ("cuda_va_exhausted", "cuda", None, r"\[expandablesegmentva\]|virtual-address-space\(vsz\)exhaustion"),
    (
        "cuda_malloc_async",
        "cuda",
        True,
        r"allocationondevice(?:(?<=error:allocationondevice)|(?<=!allocationondevice))(?!\d{0,3}would)",
    ),
    ("cuda_preempted", "cuda", True, r"preemptivelyrejectingallocation"),
    ("nccl", "cuda", None, r"unhandledcudaerror"),
    ("fork_enomem", "cpu", True, r"cannotallocatememory(?!instatic)"),
    ("cpu_allocator", "cpu", True, r"enforcefailat(?:cpuallocator|alloc_cpu)"),
    ("cpu_allocator", "cpu", True, r"defaultcpuallocator:(?:can.{0,3}tallocate|notenough)memory"),
    ("dataloader", "cpu", True, r"unexpectedbuserrorencounteredin(?:dataloader)?worker"),
    ("dataloader", "cpu", True, r"insufficientsharedmemory|共享内存不[足够]"),
    # the end of PyTorch's message, whose beginning was cut off
    ("short", "cuda", True, r"trysetting(?:max_split_size_mb|pytorch_[a-z_]{0,16}conf)[^.]{0,40}toavoidfragmentation"),
    ("kernel_oom_killer", "cpu", True, r"oom-?killed|oom-kill(?:er)?:constraint"),
    ("ray_oom_kill", "cpu", True, r"exceedsthememoryusagethreshold"),
    ("disk_full", None, False, r"nospaceleftondevice|storagefull|pytorchstreamwriterfailed"),
    ("disk_full", None, False, r"inline_container\.cc.{0,20}unexpectedpos"),
    (
        "sigkill",
        "cpu",
        True,
        r"code:?=?\(?(?:-9|137)(?!\d)|exitstatus:?=?(?:-9|137)(?!\d)|signal9\(sigkill\)"
        r"|signals\.sigkill|killedwithsignal-?9|signal:killed|exited\(137\)"
        r"|\u9000\u51fa(?:\u4ee3\u7801|\u7801|\u72b6\u6001)[\u4e3a\u662f:]?(?:-9|137)(?!\d)",
    ),
    ("sigbus", "cpu", True, r"(?:exit|return)code:?=?-7(?!\d)|signal7\(sigbus\)|sigbus\(@"),
    ("notebook_host", "cpu", True, r"tcmalloc:largealloc(?P<requested_bytes>\d{1,22})bytes"),
    ("notebook_host", "cpu", None, r"kernelrestarter:restartingkernel"),
    ("kernel_died", None, None, r"kernel(?:for[^\s]{1,80}?)?(?:appearstohave|has)?died|thekernelcrashed"),
    ("inductor_triton", "cuda", False, r"novalidtritonconfigs"),
)

_TOKEN = re.compile(
    r"(?P<literal>[a-z0-9_:;,/=<>-]|\\\W)|(?P<repeat>[?*]|\{[^}]*\})|(?P<set>\[\^?\]?(?:\\.|[^\]])*\])|(?P<other>\\?.)"
)
_SHORTEST_PART = 4


def parts_of(pattern: str) -> tuple[str, ...]:
    """For each alternative of a pattern the longest text that all its matches contain, outside of groups; empty if one
    has none that is long enough. Such texts are found in a hundredth of the pattern's time."""
    runs: list[list[str]] = [[""]]
    depth = 0
    for token in _TOKEN.finditer(pattern):
        kind, text = token.lastgroup, token.group()
        depth += (kind == "other") * ((text == "(") - (text == ")"))
        if depth:
            runs[-1].append("")
        elif text == "|":
            runs.append([""])
        elif kind == "literal":
            runs[-1][-1] += text[-1]
        else:
            if kind == "repeat":  # what came before it may be missing
                runs[-1][-1] = runs[-1][-1][:-1]
            runs[-1].append("")
    parts = tuple(max(alternative, key=len) for alternative in runs)
    return parts if all(len(part) >= _SHORTEST_PART for part in parts) else ()


def _kind(row: tuple[str, str | None, bool | None, str], *, is_faint: bool) -> MessageKind:
    key, backend, is_oom, pattern = row
    return MessageKind(key, backend, is_oom, re.compile(pattern), is_faint, parts_of(pattern))


KINDS = (*(_kind(row, is_faint=False) for row in _ROWS), *(_kind(row, is_faint=True) for row in _FAINT_ROWS))

# Names and phrases whose first or last word would be part of another if the text were squeezed.
_WORD_ROWS: tuple[tuple[str, str | None, bool, str], ...] = (
    ("graphics_api", None, False, r"\b(?:vk_?)?error_?out_?of_?device_?memory\b|\be_outofmemory\b"),
    ("host_allocation", "cpu", False, r"\bmemory allocation of (?P<requested_bytes>\d{1,22}) bytes failed"),
    ("host_allocation", "cpu", True, r"\b(?:system\.)?out_?of_?memory_?exception\b"),
    ("bad_alloc", "cpu", True, r"\bbad allocation\b(?! ?:)"),
    ("class_only", "cuda", True, r"\bcuda_out_of_memory\b"),
    ("tensorflow", "tensorflow", True, r"\bResourceExhaustedError\b"),
)

# "Killed" after what a shell puts before it: "script: line 34: 1657575", "1657575", "[1]  + 1657575".
_KILLED = (
    r"^(?=.)(?:[^\n]{0,200}: line \d{1,6}: +\d{0,9} ?)?(?:\d{1,9} +)?"
    r"(?:\[\d{1,4}\][ \t+-]{0,8}\d{0,9}[ \t]{1,8})?"
    r"Killed(?:[ \t]*$|[ \t]{2,}\S|[ \t]+\S{0,60}python)"
    r"|^(?:zsh: |\d{1,9} {1,8}|\[\d{1,4}\][ \t+-]{1,8}\d{1,9}[ \t]{1,8})killed {1,8}\S"
    # right behind a progress bar, or quoted in prose
    r"|(?:it|s)[/a-z]{0,8}\](?:\[\d{1,4}\][ \t+-]{1,8}\d{1,9}[ \t]{1,8})?[Kk]illed(?![\w ])"
    r"|(?:it|s)[/a-z]{0,8}\]\[\d{1,4}\][ \t+-]{1,8}\d{1,9}[ \t]{1,8}[Kk]illed\b"
    r"|\u5df2\u6740\u6b7b"  # a shell's message in Chinese
    r"|[\"'`\u201c][Kk]illed[\"'`\u201d]|(?:\u663e\u793a|\u51fa\u73b0|\u63d0\u793a|\u76f4\u63a5"
    r"|\u62a5\u9519?)[ :\uff1a]?[Kk]illed\b"
)
LINE_KINDS = (
    *(
        MessageKind(key, backend, True, re.compile(pattern, re.I | re.A), is_faint)
        for key, backend, is_faint, pattern in _WORD_ROWS
    ),
    # cudaMallocAsync's message ends here where a NUL byte cut it (2.3 and later, device 0).
    MessageKind("cuda_malloc_async", "cuda", True, re.compile(r"\bAllocation on device[ \t]*$", re.M), True),
    MessageKind("sigkill", "cpu", True, re.compile(_KILLED, re.M), True, ("illed", "\u5df2\u6740\u6b7b")),
    MessageKind(
        "memory_error",
        "cpu",
        True,
        re.compile(
            r"(?<![\w.])MemoryError\b(?!\()(?!: bad allocation: cuda)(?!: ?cu(?:da)?(?:[Mm]em|[Mm]alloc))"
            r"(?![^\n]{0,60}\b(?:on|of|for) (?:the )?(?:GPU|device)\b)"
        ),
        True,
    ),
    MessageKind(
        "class_only",
        "cuda",
        True,
        re.compile(
            r"torch(?<!\wtorch)(?<!except torch)(?<!except \(torch)(?<!raise torch)\.(?:cuda\.)?OutOfMemoryError\b"
            r"(?!\s{0,2}:\s{0,3}\S)"
        ),
        True,
    ),
)


def other_messages(squeezed: str) -> Iterator[tuple[MessageKind, re.Match[str]]]:
    """The matches of every kind in a squeezed text, up to MOST_OF_A_KIND of each."""
    for kind in KINDS:
        if kind.parts and not any(part in squeezed for part in kind.parts):
            continue
        for match in islice(kind.pattern.finditer(squeezed), MOST_OF_A_KIND):
            yield kind, match


def line_messages(cleaned: str) -> Iterator[tuple[MessageKind, re.Match[str]]]:
    """The first message of each kind recognised by whole words or by its place on a line; offsets are in the cleaned
    text."""
    for kind in LINE_KINDS:
        if kind.parts and not any(part in cleaned for part in kind.parts):
            continue
        match = kind.pattern.search(cleaned)
        if match is not None:
            yield kind, match
