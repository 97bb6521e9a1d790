"""What is done to one caption: pure functions of a text."""

import html
import re
import warnings

import ftfy
from bs4 import BeautifulSoup, MarkupResemblesLocatorWarning

from opensora.inference import prompts

PASSES = 16  # cleaning is repeated until nothing changes; "&amp;amp;lt;" needs one for each layer

URL = re.compile(r"(?:https?://|\bwww\.)[^\s<>\"'()\[\]{}]+", re.IGNORECASE)
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>|<!--")
_EMAIL = re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b")
_HANDLE = re.compile(r"(?<!\S)[@#][\w-]*[^\W\d][\w-]*")
_FILE_NAME = re.compile(r"(?<!\S)\S+\.(?:png|jpe?g|gif|bmp|webp|tiff?|mp4|mov|mkv|avi|webm|pdf|html?|zip|rar)\b", re.I)
_EMPTY_BRACKETS = re.compile(r"\(\s*\)|\[\s*\]|\{\s*\}")
_REPEATED = re.compile(r"([!?,;:])(?:\s*\1)+")
_BEFORE_POINT = re.compile(r"\s+([.,;:!?])(?=\s|$)")
_QUOTES = str.maketrans({"“": '"', "”": '"', "„": '"', "«": '"', "»": '"', "’": "'", "‘": "'", "`": "'", "´": "'"})

# How captioning models open a caption, at its very start.
_SUBJECT = r"(?:video|clip|footage|image|picture|photo(?:graph)?|scene|frame|shot)"
_VERB = (
    r"(?:shows?|showcases?|depicts?|captures?|features?|displays?|presents?|portrays?|illustrates?|contains?|"
    r"begins with|starts with|opens with|is of|consists of)"
)
_OPENINGS = [
    re.compile(
        rf"^(?:in\s+)?(?:the|this|that|an?)\s+(?:\w+\s+)?{_SUBJECT}\s+(?:{_VERB}|seems to show|appears to show)\s+(?:that\s+)?",
        re.I,
    ),
    re.compile(
        rf"^in\s+(?:the|this)\s+(?:\w+\s+)?{_SUBJECT}\s*,\s*(?:we\s+(?:can\s+)?see\s+|there\s+(?:is|are)\s+)?", re.I
    ),
    re.compile(r"^(?:sure|certainly|of course)(?=[\s,!:.])[^:.!\n]{0,80}[:.!]\s*", re.I),
    re.compile(r"^(?:caption|description|answer)\s*:\s*", re.I),
    re.compile(r"^here\s+(?:is|'s)\s+[^:\n]{0,80}:\s*", re.I),
]
_SENTENCE_END = re.compile(r"[.!?。！？…][\"')\]”’]*(?=\s|$)|[。！？]")

LONGEST_WORD = 40  # letters in front of a full stop that are looked at
_LAST_WORD = re.compile(r"[\w'’-]+(?:\.[\w'’-]+)*$")
# Abbreviations: titles, which are other words in small letters; those before another word; before a number; and those that may
# also end a sentence.
_TITLE = re.compile(r"Capt|Col|Fr|Gen|Gov|Hon|Lt|Maj|Msgr|Pres|Rep|Rev|Sen|Sgt|Supt")
_LEADING = re.compile(r"m[rsx]|mrs|messrs|mme|mlle|dr|prof|mt|vs|cf|approx|e\.g|i\.e", re.I)
_NUMBERED = re.compile(r"nos?|figs?|vol|ch|sec|pp|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec", re.I)
_SHORT = re.compile(r"st|ft|jr|sr|etc|al|inc|ltd|co|corp|bros|dept|est|ave|blvd|rd|hwy|lbs?|oz|min|hrs?", re.I)


def clean(text: str) -> str:
    """A caption from the web as plain text; cleaning it again changes nothing.

    Broken encodings are mended (ftfy), HTML is turned into its text, addresses of pages and people, file names and
    #tags go, quotation marks become straight, and white space becomes single spaces. Case, accents, emoji and every
    alphabet stay.
    """
    for _ in range(PASSES):
        cleaned = _clean_once(text)
        if cleaned == text:
            break
        text = cleaned
    return text


def _clean_once(text: str) -> str:
    text = html.unescape(ftfy.fix_text(text))
    if _TAG.search(text):
        text = _without_tags(text)
    for pattern in (URL, _EMAIL, _HANDLE, _FILE_NAME, _EMPTY_BRACKETS):
        text = pattern.sub(" ", text)
    text = text.translate(_QUOTES).replace("\\n", " ")
    text = _REPEATED.sub(r"\1", text)
    text = _BEFORE_POINT.sub(r"\1", " ".join(text.split()))
    return text.strip(" ,;:-_|*")


def _without_tags(text: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MarkupResemblesLocatorWarning)
        return BeautifulSoup(text, features="html.parser").get_text(" ")


def refine(text: str) -> str:
    """A language model's caption without its opening phrases ("The video shows") and without a last sentence that was cut off.

    A caption that is one unfinished sentence stays. Refining it again changes nothing.
    """
    text = " ".join(text.split())
    while (shorter := _without_opening(text)) != text:
        text = shorter
    return _capitalised(_whole_sentences(text))


def _without_opening(text: str) -> str:
    for pattern in _OPENINGS:
        rest = pattern.sub("", text, count=1)
        if rest != text and rest:
            return rest
    return text


def _whole_sentences(text: str) -> str:
    ends = [match.end() for match in _SENTENCE_END.finditer(text) if not _shortens(text, match)]
    return text[: ends[-1]] if ends else text


def _shortens(text: str, point: re.Match[str]) -> bool:
    """Whether a full stop belongs to an abbreviation ("St. Louis", "U.S. flag"); what may end a sentence ends that of the text."""
    if not point.group().startswith("."):
        return False
    word = _LAST_WORD.search(text, max(0, point.start() - LONGEST_WORD), point.start())
    name, rest = word.group() if word else "", text[point.end() :]
    if _TITLE.fullmatch(name) or _LEADING.fullmatch(name):
        return True
    if _NUMBERED.fullmatch(name):
        return bool(re.match(r"\s+\d", rest))
    is_letter = len(name.rpartition(".")[2]) == 1 and name[-1].isalpha()  # also of initials
    return bool(rest.strip()) and (is_letter or bool(_SHORT.fullmatch(name)))


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def with_scores(text: str, aes: float | None, flow: float | None, cmotion: str) -> str:
    """The caption with its scores, as `opensora.inference.prompts` writes them into prompts: each a sentence.

    Open-Sora 1.2 trained with commas between them and sampled with full stops; here a model is asked in the words it learnt.

    Args:
        aes: aesthetic score; None = unknown.
        flow: amount of motion; None = unknown.
        cmotion: camera motion; "" and "unclassified" = unknown.
    """
    scores = {"aes": aes, "flow": flow, "camera_motion": camera_words(cmotion) or None}
    return prompts.with_scores(text.rstrip(), scores) if any(v is not None for v in scores.values()) else text


def camera_words(cmotion: str) -> str:
    """`pan_left` and `Pan Left` -> `pan left`; an empty text where the motion is not known."""
    words = re.sub(r"[\s_]+", " ", cmotion).strip().lower()
    return "" if words == "unclassified" else words


def append(text: str, words: str) -> str:
    """Two texts with a space between them; either may be empty."""
    return f"{text.rstrip()} {words.lstrip()}".strip() if text.strip() else words.strip()
