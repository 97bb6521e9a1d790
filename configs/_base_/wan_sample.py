"""What samplings of Wan share, on top of `sample.py` and `wan.py`."""

_base_ = ["sample.py", "wan.py"]

num_frames = 81
fps = 16
image_size = (480, 832)  # 720p: (720, 1280) and --scheduler.shift 5
# the authors' own; "" = the encoding of an empty prompt, as diffusers does by default
negative_prompt = [
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，丑陋的，残缺的，多余的手指，"
    "画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走"
]
dtype = "bf16"
frozen_weights = "bf16"
offload = "model"

batch_size = 1
