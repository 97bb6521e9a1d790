"""Cleaning a thousand captions: what it keeps, what it removes, that twice is once, and that legacy is diffusers'."""

import re

import pytest
from diffusers import PixArtAlphaPipeline

from opensora.models.text_encoder.cleaning import LEGACY, cleaner
from opensora.utils.errors import UserError
from tests.models.text_encoder.captions import CLIPS, LANGUAGES, captions

CORPUS = captions()
basic, legacy = cleaner("basic"), cleaner("legacy")


def test_the_corpus_is_large_and_wide():
    assert len(CORPUS) >= 1000
    assert sum(any(ord(c) > 0x2E80 for c in caption) for caption in CORPUS) > 100


@pytest.mark.parametrize("name", ["none", "basic", "legacy"])
def test_twice_is_once(name):
    clean = cleaner(name)
    cleaned = [clean(caption) for caption in CORPUS]
    assert [(a, clean(a)) for a in cleaned if clean(a) != a] == []


def test_none_is_to_the_letter():
    assert [cleaner("none")(caption) for caption in CORPUS] == CORPUS


@pytest.mark.parametrize("language", LANGUAGES)
def test_basic_keeps_every_letter_of_every_language(language):
    phrase = LANGUAGES[language]
    letters = [c for c in phrase if c.isalpha()]
    for caption in (phrase, f"  {phrase}\n", f"{phrase} &amp; {phrase}"):
        assert [c for c in basic(caption) if c.isalpha()] == letters * caption.count(phrase)


def test_basic_mends_and_removes_nothing():
    assert basic("Ã©lÃ¨ve &amp;amp; <b>x</b>\n\n y\x00\x07") == "élève & <b>x</b> y"
    assert basic("A Sign That Says “NA” at https://a.com/b.mp4") == 'A Sign That Says "NA" at https://a.com/b.mp4'
    for caption in CORPUS:
        assert not re.search(r"[\x00-\x1f]|\s\s|^\s|\s$", basic(caption)), caption


def test_legacy_is_diffusers_applied_until_nothing_changes():
    """PixArt's and Open-Sora's cleaner, which they applied twice; diffusers has it too."""
    theirs = PixArtAlphaPipeline._clean_caption

    class Owner:
        bad_punct_regex = PixArtAlphaPipeline.bad_punct_regex

    twice_differs, clips = 0, CLIPS.read_text()
    for caption in CORPUS:
        once = theirs(Owner, caption)
        expected, settled = theirs(Owner, once), theirs(Owner, once)
        while (again := theirs(Owner, settled)) != settled:
            settled = again
        assert legacy(caption) == settled, caption
        twice_differs += expected != settled
        assert expected == settled or caption not in clips
    assert twice_differs < 0.05 * len(CORPUS)


def test_what_legacy_does():
    assert legacy("A White Dog") == "a white dog"
    assert legacy("黎明时分") == ""
    assert legacy("Большой кролик") == "большой кролик"
    assert legacy("see https://a.com/x and IMG_1.jpg, #123, jc6640, 1024x768, free shipping") == "see and"
    assert len(LEGACY) == len({rule.what for rule in LEGACY})
    for rule in LEGACY:
        re.compile(rule.pattern)


def test_unknown_names_are_told():
    with pytest.raises(UserError, match=r"clean='Basic' is not one of none, basic, legacy"):
        cleaner("Basic")
