"""Which program ran out of memory, and in which stage: inference servers, image pipelines, quantizers, runtimes.

Each allocates in its own way and has its own settings; none is about a training batch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain

from oom_magic.explain.evidence.causes import Cause
from oom_magic.explain.evidence.clues.author_words import CODE_LINE, TOLD
from oom_magic.explain.evidence.clues.differences import WHERE_IT_RUNS


@dataclass(frozen=True)
class Stage:
    """A stage of a program: the frames or lines that show it, the cause it makes likely and the weight (0 to 1).

    ``remedies`` are what helps in it, instead of the program's; ``encloses``: what it calls is a part of it.
    """

    key: str
    pattern: re.Pattern[str]
    cause: Cause
    weight: float
    remedies: tuple[str, ...] = ()
    encloses: bool = False


@dataclass(frozen=True)
class Program:
    """A program with an allocator or settings of its own; ``trains``: it is also what people train with.

    ``budget`` is the share of the device that it reserves by default, unless ``budget_setting`` in the text says
    otherwise; ``remedies`` are its own settings, the most effective first (keys of the catalogue).
    """

    key: str
    name: str
    pattern: re.Pattern[str]
    stages: tuple[Stage, ...] = ()
    budget: float | None = None
    budget_setting: re.Pattern[str] | None = None
    remedies: tuple[str, ...] = ()
    default_cause: tuple[Cause, float] | None = None
    trains: bool = False

    @property
    def is_torch(self) -> bool:
        """Whether PyTorch computes in it."""
        return self.key not in _WITHOUT_TORCH

    @property
    def said(self) -> dict[str, int | str]:
        """The value of the field ``program`` in sentences: the name, or the catalogue's words for a kind of program."""
        return {"program_key": _KINDS[self.key]} if self.key in _KINDS else {"program": self.name}


@dataclass(frozen=True)
class ProgramUse:
    """A program seen in a text, the stage that failed (None: not shown) and its share of the device (None: unknown).

    ``is_told``: the stage is the one that the text names last, and no line at the failure shows it.
    """

    program: Program
    stage: Stage | None = None
    budget: float | None = None
    is_told: bool = False


def _stage(
    key: str, pattern: str, cause: Cause, weight: float, remedies: tuple[str, ...] = (), *, encloses: bool = False
) -> Stage:
    return Stage(key, re.compile(pattern, re.A), cause, weight, remedies, encloses)


# Programs that are shown as kinds, in the catalogue's words.
_KINDS = {"server": "program_server", "pictures": "program_pictures", "diffusion": "program_pictures",
          "boosting": "program_boosting"}  # fmt: skip
_WITHOUT_TORCH = frozenset({
    "llama_cpp", "ollama", "onnxruntime", "tensorrt", "jax", "tensorflow", "rapids", "cupy", "numba", "thrust",
    "paddle", "caffe", "mxnet", "darknet", "matlab", "ctranslate2", "boosting",
})  # fmt: skip
_LOADS = (
    r"\bload_model\b|load_weights|create_weights|process_weights|Loading (?:model )?weights|Loading safetensors"
    r"|initialize_model"
)
_BEING_QUANTIZED = r"\bQuantizing model\.|\bexport_quantization_bit\b"  # whatever else the program can do
# What a server loads comes before its cache, what it answers beside it; the cache takes all that weights leave of the
# share, so neither smaller weights nor a shorter context make room there.
_OF_LOADING = ("quantized_model", "tensor_parallel")


def _llama_stages(cache: tuple[str, ...], compute: tuple[str, ...], loading: tuple[str, ...]) -> tuple[Stage, ...]:
    """The stages of llama.cpp, with what helps in each."""
    serving = (loading[0], cache[0])
    return (
        _stage("kv_cache", r"buffer for kv cache|kv_cache_init\(\) failed|llama_kv_cache_init: failed",
               Cause.ACTIVATIONS, 0.75, cache),
        _stage("compute", r"compute (?:pp )?buffers|graph_reserve: failed|gallocr_reserve", Cause.ACTIVATIONS, 0.7,
               compute),
        _stage("loading", r"load_tensors|unable to allocate \w+ buffer|alloc_tensor_range|llama_model_load",
               Cause.WEIGHTS_TOO_BIG, 0.7, loading),
        # what a first computation takes beside all that was set up
        _stage("serving", r"Starting llama main loop|server is listening|all slots are idle"
               r"|\| 200 \|[^\n]*POST +\"/(?:api/(?:chat|generate)|v1|completion)", Cause.ACTIVATIONS, 0.4, serving),
        _stage("running", r"runner started in|\| model loaded|look_ahead_size|in function llama_decode",
               Cause.WEIGHTS_TOO_BIG, 0.55, loading),
    )  # fmt: skip


_DIFFUSION_STAGES = (
    _stage("vae", r"vae\.decode|(?i:\bvae\b[^\n]{0,16}decod)|autoencoder_kl|decode_latents|decode_first_stage"
           r"|(?<!models[/\\])vae[/\\]|tiled vae",
           Cause.ACTIVATIONS, 0.75, ("diffusers_vae", "smaller_image")),
    _stage("loading", r"from_pretrained\([^\n]*\n[^\n]{0,200}\.to\(.cuda|\.to\(.cuda.\)|load_flow_model|move_model_to"
           r"|Loading checkpoint|Loading pipeline|hacked_get_attr|load_sft", Cause.WEIGHTS_TOO_BIG, 0.5),
)  # fmt: skip

PROGRAMS: tuple[Program, ...] = (
    Program(
        "vllm", "vLLM",
        re.compile(r"\bvllm\b(?![-_](?:omni|mlx))|EngineCore|LLMEngine|llm_engine\.py|VllmWorker|gpu[_-]memory[_-]utilization"
                   r"|BentoVLLM|cumem_allocator|RayWorkerWrapper|ray_distributed_executor"
                   r"|(?:ERROR|INFO|WARNING) \d\d-\d\d \d\d:\d\d:\d\d \[?\w+\.py:\d+\]", re.I | re.A),
        (
            _stage("kv_cache", r"_allocate_kv_cache|initialize_kv_cache|initialize_cache|cache_engine"
                r"|in initialize_from_config"
                   r"|cumem_allocator", Cause.MEMORY_FRACTION_LIMIT, 0.6, ("server_share", "close_processes_any")),
            _stage("graphs", r"capture_model|cuda_?graph_runner|[Cc]apturing (?:the model for )?(?:CUDA|cuda) ?graph"
                r"|(?i:(?:cuda[- ]?)?graph[- ]capture|capturing of cuda graphs)"
                r"|graph_capture",
                   Cause.MEMORY_FRACTION_LIMIT, 0.55, ("server_share", "vllm_eager", "vllm_max_num_seqs"),
                   encloses=True),
            _stage("adapters", r"lora[/\\]layers[/\\]|create_lora_weights", Cause.WEIGHTS_TOO_BIG, 0.7,
                   ("vllm_loras", "server_share"), encloses=True),
            _stage("sampler", r"_dummy_sampler_run|warming up sampler", Cause.MEMORY_FRACTION_LIMIT, 0.75,
                   ("vllm_max_num_seqs", "server_share"), encloses=True),
            _stage("profiling", r"profile_run|[Pp]rofile run|determine_num_available_blocks|determine_available_memory"
                   # all weights are there: the trial run is next
                   r"|checkpoint shards: {1,4}100%|[Mm]odel (?:weights|loading) took",
                   Cause.ACTIVATIONS, 0.6,
                   ("vllm_max_num_seqs", "vllm_pictures", "shorter_context", *_OF_LOADING), encloses=True),
            _stage("logits", r"_get_logits|compute_logits|logits_processor|prompt_logprobs|sampler\.py",
                Cause.LOGITS_OR_LOSS, 0.65, ("vllm_max_num_seqs", "server_share")),
            _stage("loading", _LOADS, Cause.WEIGHTS_TOO_BIG, 0.7, _OF_LOADING),
            _stage("serving", r"execute_model|_model_forward|generate_step|_dummy_run", Cause.MEMORY_FRACTION_LIMIT,
                   0.45, ("server_share", "vllm_max_num_seqs")),
        ),
        budget=0.9, budget_setting=re.compile(r"gpu[_-]memory[_-]utilization['\"]?[ =:]{1,3}(0?\.\d+|1\.0)"),
        remedies=("vllm_pixels", "server_share", "vllm_max_num_seqs", "shorter_context", "vllm_eager", *_OF_LOADING),
        default_cause=(Cause.MEMORY_FRACTION_LIMIT, 0.4),
    ),
    Program(
        "sglang", "SGLang",
        re.compile(r"\bsglang\b(?! generate)|mem[_-]fraction[_-]static|Received sigquit from a child process",
                   re.I | re.A),
        (
            _stage("logits", r"(?:return|prompt|top)_logprob", Cause.LOGITS_OR_LOSS, 0.65),
            _stage("graphs", r"cuda_graph_runner|Capture cuda graph", Cause.MEMORY_FRACTION_LIMIT, 0.6,
                   ("sglang_no_compile", "server_share", "sglang_prefill"), encloses=True),
            _stage("kv_cache", r"init_memory_pool|memory_pool\.py|token_to_kv_pool", Cause.MEMORY_FRACTION_LIMIT, 0.6,
                   ("server_share", "close_processes_any")),
            _stage("loading", _LOADS, Cause.WEIGHTS_TOO_BIG, 0.7, _OF_LOADING),
            _stage("serving", r"forward_extend|forward_batch_generation|forward_decode|forward_\w+_batch|Prefill batch",
                   Cause.MEMORY_FRACTION_LIMIT, 0.5, ("server_share", "sglang_prefill")),
        ),
        budget_setting=re.compile(r"mem[_-]fraction[_-]static['\"]?[ =:]{1,3}(0?\.\d+)"),
        remedies=("sglang_no_compile", "server_share", "sglang_prefill", *_OF_LOADING),
        default_cause=(Cause.MEMORY_FRACTION_LIMIT, 0.45),
    ),
    Program(
        "tgi", "Text Generation Inference",
        re.compile(r"text[-_]generation[-_](?:inference|launcher|server)|max[-_]batch[-_](?:prefill|total)[-_]tokens"),
        (_stage("loading", _LOADS, Cause.WEIGHTS_TOO_BIG, 0.6, ("quantized_model", "tgi_shards")),
         _stage("warmup", r"(?<!after )(?<!after the )[Ww]armup|\d prefill tokens|(?<!max batch )total tokens",
                Cause.ACTIVATIONS, 0.6)),
        remedies=("tgi_tokens", "quantized_model", "tgi_shards"),
        default_cause=(Cause.ACTIVATIONS, 0.3),
    ),
    Program(
        "exllama", "ExLlama", re.compile(r"exllama|tabby_?api|\bexl[23]\b", re.I | re.A),
        (_stage("kv_cache", r"create_state_tensors|ExLlamaV\dCache|exllamav\d[/\\\\]cache", Cause.ACTIVATIONS, 0.7),),
        remedies=("exllama_context", "smaller_model"), default_cause=(Cause.ACTIVATIONS, 0.45),
    ),
    Program(
        "lmdeploy", "LMDeploy", re.compile(r"(?<!bin/)\blmdeploy\b(?![/.]lite)|\bturbomind\b", re.I | re.A),
        (_stage("loading", _LOADS, Cause.WEIGHTS_TOO_BIG, 0.6, _OF_LOADING),),
        remedies=("lmdeploy_cache", *_OF_LOADING), default_cause=(Cause.ACTIVATIONS, 0.45),
    ),
    Program(
        "comfyui", "ComfyUI",
        re.compile(r"comfy[/\\_]|(?i:ComfyUI)(?![/\\](?:\.?venv|models)[/\\])|\b[KM]Sampler|SamplerCustomAdvanced"
            r"|Got an OOM, unloading|VAEDecode"),
        (
            _stage("vae", r"vae[/\\.]?decode|VAE ?Decod|Video_?Decode|decode_first_stage|first_stage_model"
                r"|autoencoder|decode_tiled|ldm[/\\]\w+[/\\]vae|VAE encoding",
                Cause.ACTIVATIONS, 0.75, ("comfy_tiled", "smaller_image")),
            _stage("loading", r"Initializing block swap|assign model weights"
                r"|Node Type:\W{1,6}\w*Load(?:er|Model)\w*|load_torch_file"
                r"|model_patcher|patch_weight|load_models_gpu|load_model_gpu|model_load"
                r"|partially_load",
                   Cause.WEIGHTS_TOO_BIG, 0.7, ("more_swapped", "comfy_fp8", "comfy_lowvram")),
            _stage("sampling", r"ldm[/\\]|common_ksampler|sample_\w+|apply_model|[KM]Sampler|SamplerCustom|Sampling \d+"
                r"|attention\.py|Img2Vid\b", Cause.ACTIVATIONS, 0.5, ("smaller_image", "comfy_lowvram", "comfy_fp8")),
        ),
        remedies=("smaller_image", "comfy_attention", "comfy_tiled", "comfy_cache_none", "comfy_fp8", "comfy_lowvram"),
        default_cause=(Cause.ACTIVATIONS, 0.3),
    ),
    Program(
        "webui", "Stable Diffusion web UI",
        re.compile(r"StableMatrix|Sys VRAM:|\bwe[bp]ui-user|--opt-(?:sdp|split|sub)|--no-half\b"
                   r"|(?:diffusion|sd)[-_ ]?web-?ui(?![-\w.]{0,24}[/\\]models[/\\])"
                   r"|modules_forge|Patching LoRAs|\[Memory Management\]"
                   r"|(?:auto|vlad|sd)[-_]?1111|\ba1111\b|automatic1111|hires[. ]?fix|txt2img_function", re.I | re.A),
        (
            _stage("vae", r"vae\.decode|(?i:\bvae\b[^\n]{0,16}decod)|autoencoder_kl|decode_latents|decode_first_stage"
           r"|(?<!models[/\\])vae[/\\]|tiled vae",
                Cause.ACTIVATIONS, 0.75, ("webui_tiled", "smaller_image", "webui_medvram")),
            _stage("loading", r"Patching LoRAs|ERROR lora|load_model_weights|hacked_get_attr|load_sft|Loading Model:",
                Cause.WEIGHTS_TOO_BIG, 0.6),
        ),
        remedies=("smaller_image", "webui_tiled", "webui_attention", "webui_medvram", "quantized_model"),
        default_cause=(Cause.ACTIVATIONS, 0.3),
    ),
    Program(
        "diffusers", "diffusers",
        re.compile(r"\bdiffusers\b|Pipeline\.from_pretrained|enable_\w+_cpu_offload|\bpipe\(", re.I | re.A),
        _DIFFUSION_STAGES,
        remedies=("smaller_image", "diffusers_vae", "attention_slices", "diffusers_offload", "quantized_model"),
        default_cause=(Cause.ACTIVATIONS, 0.3),
    ),
    Program(
        "diffusion", "a program that generates images or videos",
        re.compile(r"FramePack|fooocus|stable[- _]?diffusion|\bflux[-_.\d]|(?<![-_\w])(?<!open )webui"
                   r"|--?(?:low|med|no)vram"
                   r"|tiled (?:vae|diffusion)|txt2img|img2img|esrgan|invokeai|\bsdxl\b", re.I | re.A),
        _DIFFUSION_STAGES,
        remedies=("smaller_image", "diffusers_vae", "pictures_offload", "quantized_model"),
        default_cause=(Cause.ACTIVATIONS, 0.3),
    ),
    Program(
        "llama_cpp", "llama.cpp",
        re.compile(
            r"llama_(?:model(?!s?\.py)|kv|new|init|context|cpp)|llama\.cpp|ggml[_-]|LlamaCpp|n_gpu_layers"
            r"|\bLM ?Studio\b|koboldcpp|llama-(?:server|cli)", re.I
        ),
        _llama_stages(
            ("llama_context", "llama_cache_type", "llama_layers"), ("llama_layers", "llama_batch", "llama_context"),
            ("llama_layers", "smaller_model"),
        ),
        remedies=("llama_context", "llama_cache_type", "llama_batch", "llama_layers", "smaller_model"),
        default_cause=(Cause.WEIGHTS_TOO_BIG, 0.3),
    ),
    Program(
        "ollama", "Ollama", re.compile(
            r"\bollama\b|model requires more system memory|\bnum_(?:gpu|batch|ctx)\b", re.I | re.A
        ),
        (*_llama_stages(("ollama_context", "ollama_parallel"), ("ollama_layers", "ollama_context", "ollama_parallel"),
                        ("ollama_layers", "smaller_model")),
         _stage("kv_cache", r"memory\.required\.kv=", Cause.ACTIVATIONS, 0.45),
         _stage("context", r"failed to create context", Cause.ACTIVATIONS, 0.75,
                ("ollama_layers", "ollama_context", "ollama_parallel"))),
        remedies=("ollama_context", "ollama_parallel", "ollama_layers", "smaller_model"),
        default_cause=(Cause.ACTIVATIONS, 0.25),
    ),
    Program(
        "quantizing", "AWQ/GPTQ quantizing",
        re.compile(r"\bawq[/\\.]|(?:AutoAWQ|auto_awq|auto_gptq|AutoGPTQ|gptqmodel)(?![\s\S]{0,4000}from_quantized\()"
                   r"|llm-?compressor|\.quantize\(|quantizer\.quantize"
                   rf"|lmdeploy[/.]lite|{_BEING_QUANTIZED}|quantiz(?:ing|ation) (?:step|process)"
                   r"|\bquant(?:ize)? (?:the )?model\b|[Dd]uring (?:the )?(?:calibrat|quantiz)|NUM_CALIBRATION"
                   # as titles have it
                   r"|(?:OOM|[Mm]emory(?:Error)?)\b[^\n]{0,24}\b(?:when|while|in|on) (?:\w+ )?quantiz(?:e|ing|ation)\b"
                   r"|\b[Qq]uantiz(?:e|ing)\b[^\n]{0,40}(?:OOM\b|[Oo]ut of [Mm]emory)"),
        (_stage("calibrating", r"_get_input_feat|quantizer\.py|calib|common_device|\.quantize\(",
                Cause.ACTIVATIONS, 0.55),),
        remedies=("fewer_calibration_samples", "layerwise_quantizing"),
        default_cause=(Cause.ACTIVATIONS, 0.3),
    ),
    Program(
        "server", "an inference server",
        re.compile(r"\bserve --model|\bserve \S+/\S+|launch_server|api_server|kv[-_](?:reserve|cache)[-_]\w+"
                   r"|bentoml serve|\bopenllm\b"
                   r"|\bxinference\b|\bfastchat\.serve", re.I | re.A),
        (_stage("loading", _LOADS, Cause.WEIGHTS_TOO_BIG, 0.6, _OF_LOADING),),
        remedies=("server_share", "shorter_context", *_OF_LOADING),
        default_cause=(Cause.MEMORY_FRACTION_LIMIT, 0.4),
    ),
    Program(
        "pictures", "a program that generates images or videos",
        re.compile(TOLD["makes_pictures"].pattern, re.I | re.A),
        (_DIFFUSION_STAGES[0],
         _stage("loading", r"(?i)(?:trying|try|tried|unable|fails?) to load\b|(?:oom|memory)\w* (?:on|when|while"
                           r"|during) load", Cause.WEIGHTS_TOO_BIG, 0.55),),
        remedies=("smaller_image", "diffusers_vae", "quantized_model", "pictures_offload"),
        default_cause=(Cause.ACTIVATIONS, 0.35),
    ),
    Program(
        "ctranslate2", "CTranslate2", re.compile(r"faster[-_ ]?whisper|ctranslate2", re.I | re.A),
        (), remedies=("ctranslate2_less",),
    ),
    Program(
        "onnxruntime", "ONNX Runtime", re.compile(r"onnxruntime|ONNXRuntime|BFCArena"),
        (), remedies=("smaller_input", "ort_arena"), default_cause=(Cause.ACTIVATIONS, 0.4),
    ),
    Program(
        "tensorrt", "TensorRT", re.compile(r"\[TRT\]|tensorrt|IBuilderConfig|trtexec|virtualMemoryBuffer", re.I | re.A),
        (_stage("building", r"(?i)build_?(?:serialized|engine|cuda|er)|\bbuilder\b|trtexec|tactic|torch2trt|onnx2trt",
                Cause.ACTIVATIONS, 0.4, ("trt_workspace", "trt_shapes")),),
        remedies=("trt_shapes", "trt_workspace"), default_cause=(Cause.ACTIVATIONS, 0.3),
    ),
    Program(
        "jax", "JAX",
        re.compile(
            r"\b[Jj]ax(?:lib)?\b|XlaRuntimeError|XLA_PYTHON|RESOURCE_EXHAUSTED|xla/python|external/xla/"
            r"|XLA Label|BufferAssignment|Failed to launch CUDA kernel: fusion"
        ),
        (), trains=True, remedies=("jax_init", "smaller_batch_plain", "smaller_input", "jax_preallocate"),
    ),
    Program(
        "tensorflow", "TensorFlow",
        re.compile(
            r"(?<!org_)(?<!org_tensorflow/)tensorflow|\btf ?[12]\.\d|ResourceExhaustedError: OOM"
            r"|allocator GPU_\d|keras", re.I | re.A
        ),
        (), trains=True,
        remedies=("smaller_batch_plain", "smaller_input", "tf_growth", "tf_own_process", "tf_call", "smaller_model"),
    ),
    Program(
        "rapids", "RAPIDS", re.compile(r"\bcudf\b|\brmm\b|rapids|cuml|dask[-_]cuda", re.I | re.A),
        (), remedies=("rapids_pool", "rapids_chunks", "rapids_managed"),
        default_cause=(Cause.ACTIVATIONS, 0.3),
    ),
    Program(
        "cupy", "CuPy", re.compile(r"\bcupy\b|\bcp\.\w+\(|chainer"),
        (), remedies=("cupy_limit", "smaller_arrays", "cupy_free"),
    ),
    Program("numba", "Numba", re.compile(r"\bnumba\b"), (), remedies=("smaller_arrays",)),
    Program("thrust", "Thrust", re.compile(r"\bthrust::|parallel_for failed"), (),
            remedies=("smaller_arrays",)),
    Program("boosting", "gradient boosting", re.compile(r"\bcatboost|\bxgb\w*|\blightgbm|\blgb\.", re.I | re.A), (),
            remedies=("fewer_bins",), default_cause=(Cause.ACTIVATIONS, 0.3)),
    Program("paddle", "PaddlePaddle", re.compile(r"paddle", re.I | re.A), (),
            trains=True, remedies=("smaller_batch_plain", "smaller_input", "paddle_fraction")),
    Program("caffe", "Caffe", re.compile(r"\bcaffe2?\b", re.I | re.A), (), trains=True,
            remedies=("smaller_batch_plain", "smaller_input")),
    Program("mxnet", "MXNet", re.compile(r"\bmxnet\b|\bgluon\b", re.I | re.A), (), trains=True,
            remedies=("smaller_batch_plain", "smaller_input")),
    Program("darknet", "Darknet", re.compile(r"\bdarknet\b", re.I | re.A), (), trains=True,
            remedies=("smaller_batch_plain", "smaller_input")),
    Program("matlab", "MATLAB", re.compile(r"\b[Mm]atlab\b|\bMATLAB\b|\bgpuArray\b", re.A), (), trains=True,
            remedies=("smaller_batch_plain", "smaller_input")),
)  # fmt: skip

_TRAINS = re.compile(
    r"\.backward\(|run_backward|training_step|_inner_training_loop|trainer\.train\(|optimizer\.step"
    r"|[/\\]optim[/\\]|\bTrainer\b"
    r"|MegatronTrain|\bdreambooth\b|\btrain (?:a|any|my) (?:\w+ ){0,2}(?:models?|loras?|networks?)\b"
    r"|\brunning training\b|number of trainable parameters"
    r"|\bactor_rollout|\bverl\b|ray::WorkerDict"
    r"|\btrain(?:ing)?\.py|async_train|policy[_ ]?loss|[Ss]FTTrainer|GRPO|\bDPO\b|finetun|in train\b"
    r"|\A\W{0,4}(?:\w+\W{1,2}){0,3}[Ff]ine[- ]tun(?:e|es|ing)\b|\b[Tt]rain\w* (?:\w+ ){0,3}[Ll]o[Rr][Aa]s?\b"
    r"|\b[Ll]o[Rr][Aa] train"
    r"|\btrain_batch_size\b|\bnetwork_train_unet|\btrain the (?:sdxl|model|network)\b"
    r"|训练(?:的时候|时|过程|中|容易|报错|会)"
)
# General compute runtimes, used for training, too; a training loop is no evidence against them.
_GENERAL = (
    "jax",
    "tensorflow",
    "rapids",
    "cupy",
    "numba",
    "thrust",
    "paddle",
    "onnxruntime",
    "tensorrt",
    "quantizing",
    "llama_cpp",
    "ollama",
    "caffe",
    "mxnet",
    "darknet",
    "matlab",
    "boosting",
)
PROGRAMS_BY_KEY = {program.key: program for program in PROGRAMS}
# Programs whose messages are passed on by another one; TensorFlow's allocator is XLA's, which JAX runs, too.
_RUN_BY = {"llama_cpp": ("ollama",), "thrust": ("boosting", "rapids"), "tensorflow": ("jax",)}
_OLLAMA_RUNS = re.compile(
    r"\bollama(?: (?:docker|image|container|v\d)|\[\d|[/\\] ?\w|_| run\b| serve\b| \d)"
    r"|\[GIN\] \d|level=\w+ source=\w+\.go:\d",
    re.I | re.A,
)
# What starts a server, whatever the model's name says of a training.
_SERVES = re.compile(
    r"\bvllm\.entrypoints|\bvllm serve\b|sglang\.launch_server|text-generation-launcher|\bllama-server\b"
)
_WENT_WELL = re.compile(
    r"\bsuccessful\w* (?:warm-?up|load\w*)"
    r"|\b(?:warm-?up|loading) (?:is|was|went) (?:successful|ok|fine|done|well)\w*",
    re.I,
)
_IN_FUNCTION = re.compile(r"\d,? in \w")
_SHOWS_TORCH = re.compile(r"torch|\.cuda\(|transformers|lightning|accelerate|deepspeed|diffusers", re.I)
# A text that compares such servers is about the one that it names first.
_SERVERS = ("vllm", "sglang", "tgi")
_BY_FORMAT = {
    "vllm": "vllm", "vllm_context": "vllm", "vllm_startup": "vllm", "sglang": "sglang", "sglang_retracts": "sglang",
    "tgi": "tgi",
    "llama_cpp": "llama_cpp", "llama_cpp_host": "llama_cpp", "ollama_host": "ollama", "onnxruntime": "onnxruntime",
    "tensorrt": "tensorrt",
    "tensorrt_tactic": "tensorrt", "jax": "jax", "jax_launch": "jax", "tensorflow": "tensorflow",
    "rmm": "rapids", "cupy": "cupy",
    "catboost": "boosting", "sd_webui": "webui", "numba": "numba", "thrust": "thrust", "paddle": "paddle",
    "ctranslate2": "ctranslate2",
}  # fmt: skip


def find_program(text: str, trace: str, message_format: str | None = None) -> ProgramUse | None:
    """The program that failed, from the kind of its message, then from the frames, then from the whole text.

    With a training loop in the frames no server failed, even if one is named.
    """
    by_format = _BY_FORMAT.get(message_format or "")
    runners = (one for one in _RUN_BY.get(by_format or "", ()) if PROGRAMS_BY_KEY[one].pattern.search(text))
    around = next(runners, None)
    is_of_tensorflow = by_format == "jax" and PROGRAMS_BY_KEY["tensorflow"].pattern.search(text)
    if is_of_tensorflow and not PROGRAMS_BY_KEY["jax"].pattern.search(text):
        by_format = "tensorflow"  # XLA compiles its programs, too
    if around is not None and not (around == "jax" and PROGRAMS_BY_KEY["tensorflow"].pattern.search(text)):
        by_format = around
    may_train = _TRAINS.search(trace) or (_TRAINS.search(text) and not _SERVES.search(text))
    trains = bool(may_train) and not re.search(_BEING_QUANTIZED, text)
    may_be = [one for one in PROGRAMS if one.key == by_format or (by_format is None and _may_run(one, trains))]
    in_frames = (one for one in may_be if one.key == by_format or one.pattern.search(trace))
    in_text = (one for one in may_be if not (trains and (one.is_torch or _SHOWS_TORCH.search(text))))
    own = WHERE_IT_RUNS.sub(" ", text)
    named = (one for one in in_text if one.pattern.search(own) and _is_first_server(one, text))
    program = next(chain(in_frames, named), None)
    if program is not None and program.key == "vllm" and PROGRAMS_BY_KEY["sglang"].pattern.search(trace):
        program = PROGRAMS_BY_KEY["sglang"]  # which computes with layers of vLLM
    if program is not None and program.key == "llama_cpp" and _OLLAMA_RUNS.search(text):
        program = PROGRAMS_BY_KEY["ollama"]
    if program is None:
        return None
    shown = _stage_at_failure(program, trace)
    stage = shown or _last_stage(program, text)
    return ProgramUse(program, stage, _budget_of(program, text), is_told=shown is None and stage is not None)


def _may_run(program: Program, trains: bool) -> bool:
    """Whether it can be the program of a run that trains, or does not."""
    return not trains or program.key in _GENERAL


def _is_first_server(program: Program, text: str) -> bool:
    """Whether no other inference server is named before this one."""
    if program.key not in _SERVERS:
        return True
    named = [
        (match.start(), one.key) for one in PROGRAMS if one.key in _SERVERS and (match := one.pattern.search(text))
    ]
    return min(named)[1] == program.key


def _stage_at_failure(program: Program, trace: str) -> Stage | None:
    """The stage by the lines at the failure: one that encloses all that it calls, else the innermost."""
    lines = _WENT_WELL.sub("", trace).split("\n")[-120:]
    frames = [line for line in lines if _IN_FUNCTION.search(line)]
    outer = (one for one in program.stages if one.encloses and any(one.pattern.search(line) for line in frames))
    enclosing = next(outer, None)
    if enclosing is not None:
        return enclosing
    for line in reversed(lines):
        found = next((stage for stage in program.stages if stage.pattern.search(line)), None)
        if found is not None:
            return found
    return None


def _last_stage(program: Program, text: str) -> Stage | None:
    """The stage that a text names last, which is nearest to the failure."""
    text = _WENT_WELL.sub("", text)
    log = CODE_LINE.sub(lambda match: " " * len(match.group()), text)  # code that loads goes on, as a rule
    read = ((stage, log if stage.key == "loading" else text) for stage in program.stages)
    named = [(matches[-1].start(), stage) for stage, text in read if (matches := [*stage.pattern.finditer(text)])]
    return max(named, key=lambda one: one[0], default=(0, None))[1]


def _budget_of(program: Program, text: str) -> float | None:
    if program.budget_setting is not None:
        match = program.budget_setting.search(text)
        if match:
            return float(match.group(1))
    return program.budget
