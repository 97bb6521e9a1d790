"""Cleaning captions, exactly once: an encoder cleans what it is given, in training and in sampling alike.

    none     the caption, to the letter
    basic    mends what went wrong on the way: broken encodings (ftfy), HTML entities, control characters, runs of white space.
             No word is removed and no letter's case is changed, in any language.
    legacy   what DeepFloyd-IF, PixArt and Open-Sora did to captions scraped from the web, rule by rule below. It
             makes lower case, and removes Chinese ideographs, links, file names, long numbers and shop words. For weights
             that were trained on such captions.

Each is applied until nothing changes, so that cleaning a clean caption does nothing. None fails, whatever the text is. Half of
a surrogate pair, which is no character and which no tokenizer takes, becomes U+FFFD in all three. Time grows with the length of
the text: no pattern tries the same characters from many starts, and a long text that is nested deeply, as "&amp;amp;amp;...", is
cut (`until_stable`). `legacy`, whose rules are many, reads the first 20,000 characters, which fill more tokens than any encoder takes.
"""

import contextlib
import html
import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, get_args
from urllib.parse import unquote_plus

import ftfy
from bs4 import BeautifulSoup
from bs4.builder import ParserRejectedMarkup
from ftfy.fixes import fix_surrogates, unescape_html

from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)

MAX_PASSES = 10
MAX_NESTED = 2000
MAX_LEGACY = 20_000
MAX_PARSED = 4_000_000
Clean = Literal["none", "basic", "legacy"]

LEADING_ZEROS = re.compile(r"&#0+(?=[0-9])")
NO_CHARACTER = re.compile(r"&#[1-9][0-9]{7,};?")  # code points end at 1114111; Python reads no number of 4301 digits
# "<![" and no name of a marked section: Python's parser refused it until 3.12.3, and since then drops all that follows
NO_SECTION = re.compile(r"<!\[(?!(?:temp|cdata|ignore|include|rcdata|if|else|endif)\b)", re.IGNORECASE)


def cleaner(name: str) -> Callable[[str], str]:
    """The cleaning of this name: caption -> caption, idempotent; a UserError where there is none."""
    if name not in get_args(Clean):
        raise UserError(f"clean={name!r} is not one of {', '.join(get_args(Clean))}.")
    passes: dict[str, Callable[[str], str]] = {"none": str, "basic": _basic, "legacy": _legacy}
    return partial(until_stable, passes[name])


def until_stable(one_pass: Callable[[str], str], text: str) -> str:
    """Apply `one_pass` until it changes nothing; of texts that become each other in turn, the result is the least.

    A caption nests "page page 1 2" or "%252541" as deeply as it likes. Passes end, for all that makes a text longer is a space.
    Captions need two or three. Of a text that needs more than `MAX_PASSES` only the first `MAX_NESTED` characters are kept, which
    fill 400 tokens or more, so that its length does not count twice.
    """
    text = fix_surrogates(text)
    is_long = len(text) > MAX_NESTED
    seen = {text: 0}  # text -> the pass it came from
    while (cleaned := one_pass(text)) not in seen:
        if is_long and len(seen) > MAX_PASSES:
            logger.warning("a caption is nested too deeply to clean all of it; it begins with %r.", text[:40])
            return until_stable(one_pass, cleaned[:MAX_NESTED])
        seen[text := cleaned] = len(seen)
    return min(list(seen)[seen[cleaned] :])


def _basic(text: str) -> str:
    text = html.unescape(_short_entities(_fix_text(text)))
    return " ".join(text.split())


def _fix_text(text: str) -> str:
    """`ftfy.fix_text`, but one level of entities: ftfy goes on until there is none, over all of the text for each level."""
    tag = text.find("<")  # from its line on entities stay, as there
    end = len(text) if tag < 0 else text.rfind("\n", 0, tag) + 1
    return ftfy.fix_text(unescape_html(text[:end]) + text[end:], unescape_html=False)


def _short_entities(text: str) -> str:
    """Without entities of a number that is too long to be read."""
    return NO_CHARACTER.sub("\ufffd", LEADING_ZEROS.sub("&#", text))


def _without_tags(text: str) -> str:
    text = _short_entities(text)
    # the parser reads to the end of the text for each tag that is not closed
    if not NO_SECTION.search(text) and text.count("<") * len(text) <= MAX_PARSED:
        with contextlib.suppress(ParserRejectedMarkup):
            return BeautifulSoup(text, features="html.parser").text
    return re.sub("<[^<>]*>|<", "", text)


class Rule(NamedTuple):
    """Every match of `pattern` becomes `by`."""

    what: str
    pattern: str
    by: str = ""


DASHES = "\u002d\u058a\u05be\u1400\u1806\u2010-\u2015\u2e17\u2e1a\u2e3a\u2e3b\u2e40\u301c\u3030\u30a0\ufe31\ufe32\ufe58\ufe63\uff0d"
IDEOGRAPHS = "\u31c0-\u31ef\u31f0-\u31ff\u3200-\u32ff\u3300-\u33ff\u3400-\u4dbf\u4dc0-\u4dff\u4e00-\u9fff"
DOMAIN = r"[a-zA-Z0-9.\-]+\.(?:com|co|ru|net|org|edu|gov|it)[\w/-]*\b/?(?!@)"


def _address(scheme: str) -> str:
    """A web address; group 1 is a row of letters, dots and dashes that is none, in which no start but the first is tried."""
    return rf"\b(?:{scheme}:(?:/{{1,3}}|[a-zA-Z0-9%])|{DOMAIN}|((?:(?!\b{scheme}:)[a-zA-Z0-9.\-])+))"


FILE = "png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4"

BEFORE_HTML = (
    Rule("tag of a data set", r"<person>", "person"),
    Rule("web address", _address("https?"), r"\1"),
    Rule("web address without a scheme", _address("www"), r"\1"),
)
AFTER_HTML = (
    Rule("@name", r"@\w+\b"),
    Rule("Chinese ideographs, strokes, enclosed letters", rf"[{IDEOGRAPHS}]+"),
    Rule("any dash", rf"[{DASHES}]+", "-"),
    Rule("any double quote", "[`´«»“”¨]", '"'),
    Rule("any single quote", "[‘’]", "'"),
    Rule("&quot;", "&quot;?"),
    Rule("&amp", "&amp"),
    Rule("IP address", r"\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}", " "),
    Rule("an article's time at the end", r"\d:\d\d\s+$"),
    Rule("line break written as \\n", r"\\n", " "),
    Rule("#12", r"#\d{1,3}\b"),
    Rule("#12345", r"#\d{5,}\b"),
    Rule("long number", r"\b\d{6,}\b"),
    Rule("file name", rf"(?<!\S)\S+\.(?:{FILE})"),
    Rule("repeated quotes", r"[\"']{2,}", '"'),
    Rule("repeated dots", r"\.{2,}", " "),
    Rule("punctuation that is not speech", r"[#®•©™&@·º½¾¿¡§~)(\]\[}{|\\/*]+", " "),
    Rule("dot that stands alone", r"(?<!\s)\s+\.\s+", " "),
)
AFTER_UNESCAPE = (
    Rule("id like jc6640", r"\b[a-zA-Z]{1,3}\d{3,15}\b"),
    Rule("id like jc6640vc", r"\b[a-zA-Z]+\d+[a-zA-Z]+\b"),
    Rule("id like 6640vc231", r"\b\d+[a-zA-Z]+\d+\b"),
    Rule("free shipping", r"(?:worldwide\s+)?(?:free\s+)?shipping"),
    Rule("free download", r"(?:free\s)?download(?:\sfree)?"),
    Rule("click for ...", r"\bclick\b\s(?:for|on)\s\w+"),
    Rule("name of a file format", rf"\b(?:{FILE})(?:\simages?)?"),
    Rule("page 12", r"\bpage\s+\d+\b"),
    Rule("id like j2d1a2a", r"\b\d*[a-zA-Z]+\d+[a-zA-Z]+\d[a-zA-Z\d]*\b", " "),
    Rule("size like 1024x768", r"\b\d+(?:\.\d*)?[xх×]\d+(?:\.\d*)?\b"),
    Rule("colon that stands alone", r"\b\s+:\s+", ": "),
    Rule("no space after , . /", r"(\D[,./])\b", r"\1 "),
    Rule("white space", r"\s+", " "),
)
ENDS = (
    Rule("quotes around everything", r"^[\"']([\w\W]+)[\"']$", r"\1"),
    # a row at once, for removing ideographs leaves rows of commas; of one character, or rules between two passes would be missed
    Rule("punctuation at the start", r"^(['_,\-:;])(?:\s?\1)*"),
    Rule("punctuation at the end", r"(['_,\-:+])(?<!\1\1)(?<!\1\s\1)(?:\s?\1)*$"),
    Rule("nothing but a dot and a word", r"^\.\S+$"),
)


def _legacy(text: str) -> str:
    if len(text) > MAX_LEGACY:
        logger.warning("only the first %d characters of a caption are read; it begins with %r.", MAX_LEGACY, text[:40])
        text = text[:MAX_LEGACY]
    text = _apply(BEFORE_HTML, unquote_plus(text).strip().lower())
    text = _apply(AFTER_HTML, _without_tags(text))
    if len(re.findall("[-_]", text)) > 3:  # this-is-my-cute-cat, this_is_my_cute_cat
        text = re.sub("[-_]", " ", text)
    text = html.unescape(_short_entities(html.unescape(_short_entities(_fix_text(text)))))
    return _apply((*AFTER_UNESCAPE, *ENDS), text).strip()


def _apply(rules: tuple[Rule, ...], text: str) -> str:
    for rule in rules:
        text = re.sub(rule.pattern, rule.by, text)
    return text
