"""Sample the small shipped model from some captions and draw all videos as one animated image: docs/images/samples.webp of the README.

python -m assets.build.sample_grid docs/images/samples.webp
"""

from pathlib import Path

import pandas as pd
from PIL import Image, ImageDraw, ImageFont

from opensora.inference.pipeline import VideoPipeline
from opensora.utils.errors import exit_on_user_error
from tools.command import Parser

CLIPS = (
    "bird_branch",
    "burrow_dark",
    "sepia_face",
    "city_white",
    "white_dog",
    "box_turned",
    "meadow_run",
    "cup_tilted",
)
COLUMNS, WIDTH, HEIGHT, TEXT, GAP = 4, 240, 144, 20, 4


@exit_on_user_error
def main() -> None:
    """The command line."""
    parser = Parser(__doc__, __spec__)
    parser.add_argument("out", type=Path, metavar="OUT.webp")
    out = parser.parse_args().out
    table = pd.read_csv("assets/clips/clips.csv").set_index("path")["text_2"]
    captions = [table[f"{name}.mp4"].rstrip(".") for name in CLIPS]
    videos = VideoPipeline.from_pretrained("configs/quickstart/inference.py")(
        captions, progress=True
    )  # [8, 3, T, H, W]
    pixels = ((videos + 1) * 127.5).round().byte().permute(0, 2, 3, 4, 1).numpy()
    frames = []
    for t in [*range(pixels.shape[1]), *range(pixels.shape[1] - 2, 0, -1)]:  # there and back
        size = (COLUMNS * (WIDTH + GAP) + GAP, len(CLIPS) // COLUMNS * (HEIGHT + TEXT) + GAP)
        page, font = Image.new("RGB", size, "white"), ImageFont.load_default(12)
        for i, caption in enumerate(captions):
            left, top = GAP + i % COLUMNS * (WIDTH + GAP), GAP + i // COLUMNS * (HEIGHT + TEXT)
            page.paste(Image.fromarray(pixels[i, t]).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), (left, top))
            ImageDraw.Draw(page).text((left, top + HEIGHT + 1), caption, fill="black", font=font)
        frames.append(page)
    frames[0].save(out, save_all=True, append_images=frames[1:], duration=125, loop=0, quality=70)


if __name__ == "__main__":
    main()
