"""Make the clips of this folder: a camera moves slowly over photographs that scikit-image ships.

    pip install scikit-image av
    python assets/unseen_clips/make_clips.py

clips.csv is recipe and index in one: `source` names the photograph, `camera` its first and last window as
"x y width height > x y width height". The script writes the .mp4 files next to it.
"""

import csv
from pathlib import Path

import av
import numpy as np
import skimage
from PIL import Image

HERE = Path(__file__).resolve().parent
HEIGHT, WIDTH = 180, 320
X264 = {"crf": "23", "preset": "slower", "g": "12", "bf": "0", "threads": "1", "x264-params": "cpu-independent=1"}
BT601 = 6  # smpte170m: what a reader assumes for a small clip, tagged or not


def main() -> None:
    """Write every clip of the table."""
    with (HERE / "clips.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        photo = Image.open(Path(skimage.__file__).parent / "data" / row["source"]).convert("RGB")
        first, last = (np.array(window.split(), float) for window in row["camera"].split(">"))
        container_options = {"movflags": "+faststart", "fflags": "+bitexact"}
        with av.open(str(HERE / row["path"]), "w", container_options=container_options) as container:
            stream = container.add_stream("libx264", rate=int(row["fps"]), options=X264)
            stream.height, stream.width, stream.pix_fmt = HEIGHT, WIDTH, "yuv420p"
            context = stream.codec_context
            context.colorspace, context.color_primaries, context.color_trc, context.color_range = BT601, BT601, BT601, 1
            for t in np.linspace(0, 1, int(row["num_frames"])):
                x, y, width, height = (1 - t) * first + t * last
                box = (x, y, x + width, y + height)
                image = photo.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS, box)
                frame = av.VideoFrame.from_image(image).reformat(format="yuv420p", dst_colorspace="ITU601")
                container.mux(stream.encode(frame))
            container.mux(stream.encode())


if __name__ == "__main__":
    main()
