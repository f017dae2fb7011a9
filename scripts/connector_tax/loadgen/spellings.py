"""Report a wrong command line in one line: the error, and the option probably meant."""

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import NoReturn

# Option of another client (vllm bench serve, guidellm, AIPerf, perf_analyzer) -> the option here.
PEERS = {
    "--api-base": "--url",
    "--api-key": "--api-key-env NAME",
    "--arrival-pattern": "--arrivals",
    "--arrival-smoothness": "--arrivals gamma --gamma-shape",
    "--backend": "--chat, or a path in --url",
    "--base-url": "--url",
    "--benchmark-duration": "--duration",
    "--benchmark-grace-period": "--drain",
    "--burstiness": "--arrivals gamma --gamma-shape",
    "--concurrency-ramp-duration": "--rampup",
    "--concurrency-range": "--concurrency",
    "--custom-dataset-type": "--trace or --prompts",
    "--data": "--prompts or --trace",
    "--dataset": "--prompt-tokens, --prompt-words, --prompts or --trace",
    "--dataset-name": "--prompt-tokens, --prompt-words, --prompts or --trace",
    "--dataset-path": "--prompts or --trace",
    "--endpoint": "a path in --url",
    "--endpoint-type": "--chat",
    "--extra-body": "--body",
    "--extra-inputs": "--body",
    "--fixed-schedule": "--trace",
    "--host": "--url",
    "--input-file": "--trace or --prompts",
    "--input-len": "--prompt-tokens",
    "--isl": "--prompt-tokens",
    "--max-completion-tokens": "--max-tokens",
    "--max-concurrency": "--concurrency",
    "--max-new-tokens": "--max-tokens",
    "--max-requests": "--requests",
    "--max-seconds": "--duration",
    "--measurement-interval": "--duration",
    "--metric-percentiles": "--percentiles",
    "--num-prompts": "--requests",
    "--num-requests": "--requests",
    "--num-warmups": "--warmup, in seconds",
    "--osl": "--max-tokens",
    "--output-len": "--max-tokens",
    "--output-path": "--summary, --csv or --html",
    "--output-tokens-mean": "--max-tokens",
    "--percentile-metrics": "--percentiles",
    "--parallel": "--concurrency",
    "--port": "--url",
    "--profile": "--rate, --concurrency or --sweep",
    "--qps": "--rate",
    "--random-input-len": "--prompt-tokens",
    "--random-output-len": "--max-tokens",
    "--random-seed": "--seed",
    "--rate-type": "--rate, --concurrency or --sweep",
    "--request-count": "--requests",
    "--request-rate": "--rate",
    "--request-rate-range": "--sweep",
    "--request-timeout-seconds": "--timeout",
    "--request-type": "--chat",
    "--result-filename": "--summary",
    "--rps": "--rate",
    "--save-result": "--summary",
    "--served-model-name": "--model",
    "--streaming": "nothing: answers are streamed unless --no-stream is given",
    "--synthetic-input-tokens-mean": "--prompt-tokens",
    "--target": "--url",
    "--tokenizer": "nothing: this load generator never tokenizes",
    "--users": "--concurrency",
    "--warmup-request-count": "--warmup, in seconds",
    "--workers-max": "--workers",
}


class Parser(argparse.ArgumentParser):
    """An argument parser whose two-line errors name the equivalent of another client's option."""

    def parse_args(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        namespace: argparse.Namespace | None = None,
    ) -> argparse.Namespace:
        """Parse the arguments.

        An unknown option is reported before a missing required one, with a suggestion.
        """
        words = sys.argv[1:] if args is None else args
        for word in words:
            if word == "--":
                break
            name = word.partition("=")[0]
            if word.startswith("--") and name not in self._option_string_actions:
                self.error(f"unknown option {name}{self._meant(name)}")
        return super().parse_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        """Print the error and a hint, and exit with status 2."""
        self.exit(2, f"error: {message}\nhint: {self.prog} --help lists every option\n")

    def _meant(self, name: str) -> str:
        name = name.lower().replace("_", "-")
        if name in PEERS:
            return f"; did you mean {PEERS[name]}?"
        own = [option for option in self._option_string_actions if option.startswith("--")]
        begun = [option for option in own if option.startswith(name)]
        close = begun[:3] or difflib.get_close_matches(name, own, n=1, cutoff=0.75)
        return f"; did you mean {' or '.join(close)}?" if close else ""
