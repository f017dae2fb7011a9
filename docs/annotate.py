"""Draw numbered discs on the scorecard of `vllm-cpu`, for docs/report.md.

After a replot: `python docs/annotate.py results/replot/vllm-cpu/figures/scorecard.png`.
"""

import sys
from pathlib import Path

from PIL import Image, ImageDraw
from PIL.ImageFont import load_default

TARGET = Path(__file__).with_name("figures") / "scorecard-numbered.png"
# The place of each disc beside its subject, as shares of the picture's width and height.
MARKS = (
    (0.327, 0.15),  # verdict
    (0.331, 0.29),  # at most
    (0.904, 0.711),  # a triangle without a word
    (0.747, 0.608),  # idle CPU
    (0.826, 0.812),  # memory
    (0.358, 0.97),  # engine
    (0.982, 0.153),  # KV cache
)
RADIUS = 0.0082
INK = (11, 92, 173)


def main() -> None:
    """Write the picture with a numbered disc at each mark."""
    picture = Image.open(sys.argv[1]).convert("RGB")
    draw = ImageDraw.Draw(picture)
    radius = RADIUS * picture.width
    font = load_default(1.4 * radius)
    for number, (right, down) in enumerate(MARKS, 1):
        place = right * picture.width, down * picture.height
        draw.circle(place, radius, fill=INK)
        draw.text(place, str(number), "white", font, anchor="mm")
    picture.quantize(64).save(TARGET, optimize=True)


if __name__ == "__main__":
    main()
