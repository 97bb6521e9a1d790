"""The aspect tables: published sizes, one way to write a ratio, both ways to read "9:16"."""

import pytest

from opensora.datasets.buckets.aspect import NAMES, get_resolution, image_size, ratio_of, rounded
from opensora.utils.errors import UserError

PUBLISHED = {  # height, width at 0.56, 0.75, 1.00, 1.78
    "144p": ((144, 256), (166, 221), (192, 192), (256, 144)),
    "240p": ((240, 426), (276, 368), (320, 320), (426, 240)),
    "360p": ((360, 640), (416, 554), (480, 480), (640, 360)),
    "480p": ((480, 854), (554, 738), (640, 640), (854, 480)),
    "720p": ((720, 1280), (832, 1110), (960, 960), (1280, 720)),
    "1080p": ((1080, 1920), (1248, 1664), (1440, 1440), (1920, 1080)),
    "4k": ((2160, 3840), (2494, 3326), (2880, 2880), (3840, 2160)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_of_open_sora(name):
    resolution = get_resolution(name)
    assert tuple(resolution.sizes[key] for key in ("0.56", "0.75", "1.00", "1.78")) == PUBLISHED[name]
    assert len(resolution.sizes) == 17


def test_sizes_of_pixart():
    from diffusers.pipelines.pixart_alpha import pipeline_pixart_alpha as alpha
    from diffusers.pipelines.pixart_alpha import pipeline_pixart_sigma as sigma

    theirs = {
        "256": alpha.ASPECT_RATIO_256_BIN,
        "512": alpha.ASPECT_RATIO_512_BIN,
        "1024": alpha.ASPECT_RATIO_1024_BIN,
        "2048": sigma.ASPECT_RATIO_2048_BIN,
    }
    for name, table in theirs.items():
        ours = get_resolution(name).sizes
        assert len(ours) == 40
        assert {f"{float(key):.2f}": tuple(map(int, size)) for key, size in table.items()}.items() <= ours.items()


@pytest.mark.parametrize("name", [*NAMES, "96px", "240x424", "832x480,480x832,624x624"])
def test_tables_are_sound(name):
    resolution = get_resolution(name)
    keys = list(resolution.sizes)
    assert [f"{float(key):.2f}" for key in keys] == keys == sorted(keys, key=float)
    for key, (height, width) in resolution.sizes.items():
        assert height / width == pytest.approx(float(key), rel=0.03)
        assert height * width == pytest.approx(resolution.area, rel=0.16)  # as PixArt chose them
        if name != "2880":  # whose sizes are cut to multiples of 64, away from their ratio
            assert resolution.closest(height, width) == key


def test_both_readings_of_a_ratio():
    assert image_size("480p", "9:16") == (480, 854)
    assert image_size("480p", "9:16", order="width:height") == (854, 480)
    assert image_size("480p", "0.56", order="width:height") == (480, 854)  # a number is always height / width
    assert image_size("480p", "9:16", multiple=16) == (480, 848)
    assert ratio_of("16:9", order="width:height") == ratio_of("9:16", order="height:width") == 0.5625


def test_every_ratio_works_in_every_table():
    assert image_size("512", "1:1") == (512, 512)
    assert image_size("512", "9:16") == (384, 672)
    assert image_size("256", "1:2") == (176, 352)


def test_mistakes():
    with pytest.raises(UserError, match="two of its sizes have the same shape"):
        get_resolution("480x832,240x416")
    with pytest.raises(UserError, match=r"resolution '480' is unknown. Did you mean '480p'\?"):
        get_resolution("480")
    with pytest.raises(
        UserError, match=r"has no shape near '21:6', read as height:width.*Did you mean it as width:height"
    ):
        image_size("480p", "21:6")
    for text in ("9:0", "wide", "9/16", "-1"):
        with pytest.raises(UserError, match="write HEIGHT:WIDTH"):
            ratio_of(text, order="height:width")


def test_rounding():
    assert rounded((240, 426), 8) == (240, 424)
    assert rounded((240, 426), 16) == (240, 432)
    assert rounded((3, 3), 16) == (16, 16)
