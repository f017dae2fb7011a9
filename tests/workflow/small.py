"""A study smaller than tiny.yaml: two configurations, for tests that run it many times."""

import re


def smaller(text: str) -> str:
    """tiny.yaml cut down: two configurations, one shape, half-second cells."""
    changes = {
        r"configurations: \[plain, noop_connector, mooncake_both\]":
            "configurations: [plain, noop_connector]",
        r"phase_b: \{input_tokens: \[32, 64\]": "phase_b: {input_tokens: [32]",
        r"configurations: \[plain, mooncake_both\]": "configurations: [plain]",
        r"warmup_s: 0.2, floor_s: 0.8": "warmup_s: 0.1, floor_s: 0.6",
        r"min_completed: 16": "min_completed: 10",
    }  # fmt: skip
    for pattern, replacement in changes.items():
        text, count = re.subn(pattern, replacement, text)
        assert count == 1, pattern
    return text
