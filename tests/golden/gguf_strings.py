"""Strings that show how a tokenizer splits a text. Knows no tokenizers."""

from __future__ import annotations

import random

# tokenizer.ggml.token_type
TYPES = {"normal": 1, "unknown": 2, "control": 3, "user-defined": 4, "unused": 5, "byte": 6}
# The last tokens of the vocabularies, and their types.
SPECIAL = {
    "<|begin|>": "control",
    "<|im_end|>": "control",
    "<|im_start|>": "control",
    "<|im_start|>x": "user-defined",
    "<think>": "user-defined",
    "two  words": "user-defined",
    "\n\n\n": "user-defined",
    "¡é…": "user-defined",
    "ñandú": "user-defined",
    "<｜a▁b｜>": "control",
    "[PAD7]": "unused",
    "<|unknown|>": "unknown",
    "jumps": "normal",  # which no merge makes
}

WRITTEN = """\
The quick brown fox jumps over the lazy dog.
don't DON'T Don'T we'll WE'LL I'VE i've you're YOU'RE he'd HE'D I'm I'M it's IT'S 's 'S 'll x'lls 'Re'
''s '' 't'd 'tis rock'n'roll o'clock l'été dell'Arte Türkiye'nin 'ſ 'ſt İ'S
'S'T'RE'VE'M'LL'D 's't're've'm'll'd
def f(x, *args, **kw): return x[0] if x != None else {"a": 1_000, 'b': 0xFF}
for (int i = 0; i < n; ++i) { sum += a[i] * b[i]; } // naïve
SELECT * FROM t WHERE a>=10 AND b<>'x'; --comment
<div class="a-b">&nbsp;&amp;</div><!-- x --> $x+=~y^z|w`q` \\n \\t %s %d #!/bin/sh @user
https://example.org/a/b?c=d&e=f#g mailto:a.b+c@example.org C:\\Users\\x ~/.config
1 12 123 1234 12345 123456 1234567 3.14159 1,000,000 1e-05 0x1F 1/2 50% 2nd 1st v1.2.3 10:30 +49(0)30
½ and ²x ⅓ x² x₂ Ⅷ ⅷ ① ⑳ ㊿ 〇 一二三 ١٢٣ ٤٥٦٧٨ १२३४ ๑๒๓ 𝟘𝟙𝟚 １２３ ੧੨੩ 1½ ½1 a½b 9⁹⁹ 12²34 ٣.١٤
é e\u0301 e\u0301a\u0302 Å A\u030a \u0301 x\u0301\u0302\u0303 1\u0301 .\u0301 \u0301a a\u0301b
क्षत्रिय हिन्दी ไทยภาษา ภาษาไทย தமிழ் नमस्ते
𠮷野家 日本語の文章です。これはテスト！ 中文，标点。「引号」『書名』 한국어 문장입니다. ㅋㅋㅋ
ｶﾀｶﾅ ＡＢＣａｂｃ ゟ゠ヿ 〆 々 ー
مرحبا بالعالم، كيف حالك؟ السَّلامُ עברית שָׁלוֹם فارسی\u200cنویسی ۔ ܫܠܡܐ
Größe Maß STRASSE straße ẞ ŒUVRE œuvre ǅ ǆ Ǆ ﬁ ﬃ ŉ Ωμέγα ΩΜΕΓΑ Слово СЛОВО ёж Ёж Ǆungla ℌℍ K K Å ª º ʰ ˆ
camelCase CamelCase HTTPServer XMLHttpRequest iPhone McDonald's éÉ ÉcoleÉcole aÉb AéB ABCdefGHI ΑβΓδ ПрИвЕт
👩‍🚀 👨‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇫🇷 ☎️ ✈ ❤️ 1️⃣ #️⃣ © ® ™ ¢ £ € ¥ § ¶ † ‡ • … – — ‘ ’ “ ” « » ‹ › ¿ ¡ ° ± × ÷ ¬ ¦
~ ~~ ~a a~ ~~~ ` `` ``` ^ ^^ | || $ $$ + ++ < << > >> = == a~b ~1 1~ ~\u0301 .~. ~.~ ~a~b~ -~-
! " # $ % & ' ( ) * + , - . / : ; < = > ? @ [ \\ ] ^ _ ` { | } ~ !! ?? ... ,,, --- ___ ((( ))) [[ ]] {{ }}
.a !a #a $a ~a +a 'a "a (a .A -A_ _a_ __a__ a_b a-b a.b a,b a;b a/b a\\b .1 -1 +1 $1 #1 (1)
 leading space
  two leading spaces
trailing space\x20
a b  c   d    e     f      g
a\tb\t\tc \td\t e \t f
a\\x00b
""".splitlines()
ESCAPED = [
    "aÉb AÉb aÉB éÉ É É aÉ b éAb xéAb ÉéAB",
    "a\u2003b \u2003b\u2003\u2003bc \u2003b1",
    "x\u3000…\u3000… then the other theory in thin ice",
    "'ſt x'ſt 'ſ t",
    "a\u3000\u3000,b \u3000\u3000\u3000.",
    "。\u3000。\u3000 。\u3000, 。\u3000\u3000。\u3000 a。\u3000b",
    "jumps jumps\njumps,jumps",
    "`a` ``b`` `c`: `d`, [`e`](f) '`g`'",
    "x.\n y,\n\nz);\n}\n\n'\n\".\n#\n-\r\n=\n/\n//\n\n",
    "x,/\n;/ ./\n\n/",
    "",
    " ",
    "  ",
    "   ",
    " " * 17,
    " " * 100 + "x",
    "\t",
    "\t\t",
    "\n",
    "\n\n",
    "\n\n\n",
    "\n" * 10,
    "\r",
    "\r\n",
    "\r\n\r\n",
    " \n",
    "\n ",
    " \n ",
    "  \n  \n  x",
    "x \n\n y",
    "x\n\ny",
    "x\r\ny\r\n",
    "x\n  y\n    z\n",
    "x  \n",
    "x\t\n\ty",
    "\x0b\x0c x\x0by\x0cz",
    "\x00",
    "a\x00b \x00 \x00\x00",
    "\x01\x02\x1f\x7f\x80\x9f",
    "\x85x\x85\x85y \x85",
    "\xa0x\xa0\xa0y \xa0z\xa0 ",
    "\u1680x\u2003y\u2009\u200az\u2028a\u2029b\u202fc\u205fd\u3000e\u3000\u3000f \u3000 g",
    "。\u3000。 \u3000a\u30001",
    "\u200bx\u200by \u200b \u2060 \ufeff",
    "\ufeffBOM",
    "\ufffd\ufffe\uffff\U0010ffff\ue000",
    "\u0378\u0379 x\u0378y 1\u03781",
    "a" * 300,
    "ab" * 200,
    "1" * 100,
    "é" * 100,
    "日本" * 60,
    "👍" * 40,
    "." * 100,
    "'" * 20,
    "-=" * 40,
    "A" * 50 + "b" * 50,
    "aB" * 40,
    "<|begin|>",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_start|>x<|im_start|> x",
    "a<|im_end|> b <|im_end|>c<|im_end|><|im_end|>",
    "<think>\nwell\n</think>\n\n",
    "two  words two words  two  words",
    "x\n\n\n\ny\n\n\n\n\n\n\nz",
    "¡é…¡é … ñandú ñandúñ",
    "<｜a▁b｜> <｜a b｜> ▁ a▁b ▁▁",
    "[PAD7] <|unknown|> <|unk|>",
    "<|im_start",
    "<|im_end|>|>",
    "<unk><s></s><0x0A>",
    " <|im_end|> ",
]
# Composed at random; the ones whose order matters most several times.
FRAGMENTS = (
    " ,  ,   , , ,\n,\n\n,\r\n,\t,'s,'S,'ll,'T,',\",a,A,ab,Ab,AB,aB,the,The, the, in,ing,1,12,123,1234,½,²,٣,一,é,É,"
    "e\u0301,\u0301,日,本,か,カ,한,ß,Ω,я,Я,ǅ,ʰ,ª,.,..,!,?,-,_,(,),[,{,},/,\\,~,$,+,=,<,>,|,^,`,#,@,&,*,:,;,%,…,—,。,、,！,"
    "\u3000,\xa0,\x85,\u200d,👍,🏽,☎,\ufe0f,€,\x00,\u0378,ไ,ท,क,ि,ا,\u064e,<think>,<|im_end|>"
).split(",") + [","]


def strings() -> list[str]:
    """Returns the strings, in the order of the stored ids."""
    drawn = random.Random(36)
    words = [word for line in WRITTEN for word in line.split(" ")][::9]
    composed = ["".join(drawn.choices(FRAGMENTS, k=drawn.randint(2, 14))) for _ in range(420)]
    return list(dict.fromkeys([*WRITTEN, *ESCAPED, *words, *composed]))
