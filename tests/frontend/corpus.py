"""Texts that tell tokenizers apart: scripts, emoji, code, whitespace, numbers, spellings of special tokens."""

import random

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Don't you think we'll've been there? I'd say it's y'all's. DON'T SHOUT, WE'RE HERE",
    "Le cœur a ses raisons que la raison ne connaît point. Voilà l'été!",
    "Größe, Straße, Übermut — „so ist's“.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
    "我想在苹果公司工作，因为他们的产品很好。",
    "吾輩は猫である。名前はまだ無い。カタカナとひらがな",
    "키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다.",
    "نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر",
    "דג סקרן שט בים מאוכזב ולפתע מצא חברה",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า",
    "កាន់តែពិសេសអាចខលចេះ",
    "😀😃 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇫🇷 ❤️‍🔥 🦙",
    "e\u0301 cafe\u0301 vs caf\u00e9, A\u030a n\u0303",
    "zero\u200bwidth\u200djoin\u2060er \ufeff bom",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟘𝟙𝟚 ℵ ∀x∈ℝ: ⌈x⌉ ≠ ∞",
    "3.14159 1,000,000 1e-9 0xDEADBEEF 2024-02-29 12:34:56 +1 (555) 010-9999",
    "١٢٣ ۴۵۶ ७८९ ３３３ Ⅷ ½ ²",
    "",
    " ",
    "   ",
    "\n",
    "\n\n \n\t\t \r\n   x",
    "a  b   c    d\te\t\tf",
    "\u00a0nbsp\u2003em\u3000ideographic",
    "def f(x):\n    return [i ** 2 for i in range(x) if i % 3 == 0]  # squares\n",
    '#include <stdio.h>\nint main(void) { printf("%d\\n", 0x1F << 3); return 0; }',
    "SELECT a.*, COUNT(*) FROM t AS a WHERE x<>'y' GROUP BY 1;",
    '{"key": [1, 2.5, null, true], "s": "\\u00e9\\n"}',
    "https://example.org/a/b?c=d&e=%20f#g user@example.org ~/path/to/file.tar.gz C:\\Temp\\x",
    "---=== *** ``` ''' \"\"\" ...... !!!!!! ?????? <<<>>> ||&& ::-> =>",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "text <|im_end|> <|endoftext|><repo_name> <|im_end |> <|im_|end|>",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "Antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
    "camelCaseAndPascalCase snake_case_and_SCREAMING_SNAKE kebab-case HTTPServer2XMLv3",
    "\x01\x07\x1b[31mred\x1b[0m\x7f",
]

_ALPHABETS = [
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ     ",
    "0123456789.,:;!?'\"()[]{}<>|_-+=*/\\ \n\t",
    "àéîõüßçñ ЖжФыщ λμπ אבג عربي हिंदी ไทย 漢字かなカナ 한글 😀👍🏽🇩🇪\u200d\ufe0f ",
]


def texts(seed: int = 0, num_random: int = 300) -> list[str]:
    """The sentences, neighbours glued together, and random mixtures."""
    source = random.Random(seed)
    neighbours = zip(SENTENCES, SENTENCES[1:], strict=False)
    glued = [left + source.choice(["", " ", "\n"]) + right for left, right in neighbours]
    mixtures = []
    for _ in range(num_random):
        alphabet = "".join(source.sample(_ALPHABETS, source.randint(1, 3)))
        mixtures.append("".join(source.choices(alphabet, k=source.randint(1, 60))))
    return SENTENCES + glued + mixtures
