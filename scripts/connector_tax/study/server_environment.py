"""Which of the caller's environment variables reach a server.

A variable that happens to be set in the shell of whoever starts a study can change what is measured
(a thread count, a log level, a transport). So launch.sh drops all that the study does not set
itself, whoever runs it, and the launch's records say which there were.
"""

import fnmatch
import re
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
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL", re.I)
_SECRET_IN_URL = re.compile(r"://[^/\s]*@")
HIDDEN = "(secret)"


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


def caller_environment(
    caller: Mapping[str, str], of_the_study: Collection[str]
) -> dict[str, dict[str, str]]:
    """What of the caller's environment can change a server: `cleared` and `kept`, name to value.

    Args:
        caller: the environment launch.sh is started with.
        of_the_study: the names that launch.sh sets itself, so that the caller's value is lost.
    """
    matching = {name: value for name, value in sorted(caller.items()) if can_change(name)}
    kept = {name for name in matching if name in KEPT and name not in of_the_study}
    return {
        "cleared": shown({n: v for n, v in matching.items() if n not in kept}),
        "kept": shown({n: v for n, v in matching.items() if n in kept}),
    }


def can_change(name: str) -> bool:
    """Whether a variable of this name can change a server."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in CLEARED)


def shown(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables with the values of secrets hidden; an empty one is none."""
    return {
        name: HIDDEN if value and (_SECRET.search(name) or _SECRET_IN_URL.search(value)) else value
        for name, value in environment.items()
    }
