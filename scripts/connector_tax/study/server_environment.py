"""Which of the caller's environment variables reach a server.

A variable that happens to be set in the shell of whoever starts a study can change what is measured
(a thread count, a log level, a transport). So launch.sh drops all that the study does not set
itself, whoever runs it, and the launch's records name those there were.
"""

import fnmatch
from collections.abc import Collection, Mapping

# Shell patterns, of bash's `case` and of fnmatch alike.
CLEARED = (
    "AGENTIC_*",
    "CUBLAS_*",
    "CUDA_*",
    "CUDNN_*",
    "FLASHINFER_*",
    "GLIBC_TUNABLES",
    "GLOO_*",
    "GOMP_*",
    "HF_*",
    "HUGGINGFACE_*",
    "KMP_*",
    "LD_*",
    "LMCACHE_*",
    "MALLOC_*",
    "MC_*",
    "MKL_*",
    "MOONCAKE_*",
    "NCCL_*",
    "NIXL_*",
    "NUMEXPR_*",
    "OMP_*",
    "OPENBLAS_*",
    "PYTHON*",
    "PYTORCH_*",
    "RAY_*",
    "SAFETENSORS_*",
    "TOKENIZERS_*",
    "TORCH*",
    "TRANSFORMERS_*",
    "TRITON_*",
    "UCX_*",
    "VLLM_*",
)
# Which GPU, and where a model's files lie and who may fetch them: they belong to the machine.
KEPT = ("CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_CACHE", "HF_TOKEN")
# What vLLM, torch, OpenMP and the connectors do depends on these. No other value is recorded: it
# may be a secret, and what the study itself sets stands in launch.sh.
SHOWN = (
    "AGENTIC_STEP_LOG_PATH",
    "CUDA_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE",
    "LD_PRELOAD",
    "LMCACHE_CHUNK_SIZE",
    "LMCACHE_LOCAL_CPU",
    "LMCACHE_MAX_LOCAL_CPU_SIZE",
    "LMCACHE_TRACK_USAGE",
    "MKL_NUM_THREADS",
    "MOONCAKE_CONFIG_PATH",
    "NUMEXPR_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONHASHSEED",
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "TRANSFORMERS_OFFLINE",
    "UCX_NET_DEVICES",
    "UCX_TLS",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_HOST_IP",
    "VLLM_KV_CACHE_LAYOUT",
    "VLLM_LOGGING_LEVEL",
    "VLLM_MOONCAKE_BOOTSTRAP_PORT",
    "VLLM_NIXL_SIDE_CHANNEL_PORT",
    "VLLM_NO_USAGE_STATS",
)


def unset_lines() -> list[str]:
    """The lines of launch.sh that drop the caller's variables."""
    return [
        "for name in $(compgen -e); do",
        "  case $name in",
        f"    {' | '.join(KEPT)}) ;;",
        f'    {" | ".join(CLEARED)}) unset -v "$name" ;;',
        "  esac",
        "done",
    ]


def cleared_names(caller: Mapping[str, str], of_the_study: Collection[str]) -> list[str]:
    """The names of the caller's variables that could change a server and do not reach it.

    Args:
        caller: the environment launch.sh is started with.
        of_the_study: the names that launch.sh sets itself, so that the caller's value is lost.
    """
    passed = set(KEPT) - set(of_the_study)
    return sorted(name for name in caller if can_change(name) and name not in passed)


def can_change(name: str) -> bool:
    """Whether a variable of this name can change a server."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in CLEARED)


def shown(environment: Mapping[str, str | None]) -> dict[str, str | None]:
    """The variables with their values where these may be recorded, else with null."""
    return {
        name: value if not value or name in SHOWN else None for name, value in environment.items()
    }
