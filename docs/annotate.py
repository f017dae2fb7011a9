"""Number the parts of the scorecard of `vllm-cpu` for docs/report.md.

After a replot: `python docs/annotate.py results/replot/vllm-cpu/figures/scorecard.png`.
"""

import sys
from pathlib import Path

from PIL import Image, ImageDraw
from PIL.ImageFont import load_default

TARGET = Path(__file__).with_name("figures") / "scorecard-numbered.png"
# Where each mark stands, as shares of the picture's width and height: beside what it is about.
MARKS = (
    (0.356, 0.155),  # verdict
    (0.356, 0.369),  # at most
    (0.985, 0.708),  # a triangle without a word
    (0.806, 0.6),  # idle CPU
    (0.8985, 0.816),  # memory
    (0.358, 0.968),  # engine
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
