"""A thousand captions and more: real ones, made ones with every oddity of the web, and twelve languages."""

import csv
import itertools
from pathlib import Path

CLIPS = Path(__file__).resolve().parents[3] / "assets" / "clips" / "clips.csv"

LANGUAGES = {
    "zh": "黎明时分，一片宁静的湖面上飘着薄雾，远处有一座小山。",
    "zh-Hant": "一隻白色的狗躺在地板上，旁邊有一個木櫃。",
    "ja": "夜明けの静かな湖、水面に薄い霧が漂うアニメの場面。カメラはゆっくり右へ動く。",
    "ko": "새벽 호수 위로 안개가 천천히 흐르고 카메라는 오른쪽으로 움직인다.",
    "ru": "Большой серый кролик просыпается в тёмной норе, подняв длинные уши.",
    "ar": "كلب أبيض يستلقي على الأرض بجانب خزانة خشبية.",
    "hi": "भोर में एक शांत झील, पानी के ऊपर हल्की धुंध।",
    "th": "ทะเลสาบที่เงียบสงบในยามรุ่งอรุณ มีหมอกบาง ๆ",
    "el": "Μια ήρεμη λίμνη την αυγή, με ομίχλη πάνω από το νερό.",
    "de": "Ein weißer Hund liegt auf dem Fliesenboden neben einem Schränkchen; Straßenlärm.",
    "fr": "Un lapin gris s’éveille dans son terrier, entouré d'herbes dorées… très doux.",
    "vi": "Một con chó trắng nằm trên sàn nhà bên cạnh tủ gỗ.",
}
SUBJECTS = ("a white dog", "two people", "An Astronaut", "the city at night", "a 1960s car")
ODDITIES = (
    "{} https://www.example.com/a?b=c&d=1 in the rain",
    "watch {} on example.com/videos now",
    "<b>{}</b> and <a href='x.html'>more</a> &amp; so on",
    "{} &lt;i&gt;really&lt;/i&gt; &quot;good&quot; &amp;amp; nice",
    "@maker_99 {} #123 #4567890 1234567",
    "{} IMG_2034.jpg clip.mp4 holiday photo.png",
    "{} on 192.168.10.1 at 12:30 ",
    "“{}” — ‘so fine’ – it’s «here»",
    '"""{}""" ... and ... more!!!',
    "***{}*** ###SALE### [tag] {{x}} \\n next",
    "{}-in-the-wild-and-free_as_ever",
    "{} jc6640 jc6640vc 6640vc231 j2d1a2a3",
    "{}, worldwide free shipping, download free, click for details, page 12",
    "{} 1024x768 3.5×2.1 png image",
    "{} : colon ,comma.dot/slash",
    "{}\t\twith\n\n white   space\u00a0and\u200bmore ",
    "Ã©lÃ¨ve with {} and Ã¤ Ã¶ Ã¼, it is â€œbrokenâ€\x9d",
    "{} 🐇🌈👩‍🚀 with emoji ♥",
    "ＦＵＬＬ ｗｉｄｔｈ {} ﬁne",
    "{} with NUL\x00 bell\x07 and esc\x1b[31m",
    "%7B{}%7D+plus%20space",
    "<person> with {}",
    "'{}'",
    "-{}-",
    ".{}",
)


def captions() -> list[str]:
    """All of them, each once."""
    with CLIPS.open(newline="") as file:
        real = [cell for row in csv.DictReader(file) for name, cell in row.items() if name.startswith(("text", "para"))]
    made = [form.format(subject) for form, subject in itertools.product(ODDITIES, SUBJECTS)]
    pairs = itertools.product(LANGUAGES.values(), ODDITIES)
    mixed = [form.format(phrase) for phrase, form in pairs]
    double = [a.format(b.format(s)) for (a, b), s in zip(itertools.permutations(ODDITIES, 2), itertools.cycle(SUBJECTS))
              if "{{" not in b]  # fmt: skip
    return list(dict.fromkeys(["", " ", ".", "NA", *real, *LANGUAGES.values(), *made, *mixed, *double]))
