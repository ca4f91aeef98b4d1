"""Which answers are the same, by hfpar's own rules."""

import random
import time

import pytest

from hfpar.audit.answers import answers_equal
from hfpar.audit.answers.latex import MAX_LENGTH
from hfpar.audit.answers.parse import parse

EQUAL = [
    ("5000000", "5 million"),
    ("24", "2 dozen eggs"),
    ("5", r"\text{the area} = 5"),
    ("5", "total cost = 5"),
    (r"1 \pm \frac12", "0.5, 1.5"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{array}{c} 1 \\ 2 \end{array}"),
    (r"\text{B}", r"\text{(B) 12 cm}"),
    ("(1,2]", "(1,2]"),
    (r"\frac12", "0.5"),
    (r"50\%", "0.5"),
    ("50", r"50\%"),
    ("0.5", r"50\%"),
    (r"50\%", "50"),
    ("x^2+1", "1+x^2"),
    ("10^{10^{10}}", "10^{10^{10}}"),
    ("2^{-99}", "1/2^{99}"),
    (r"\pm 2021", "-2021, 2021"),
    (r"\pm 2021", r"\pm 2021"),
    (r"(3,\frac{\pi}{2})", r"(3, \pi/2)"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\dfrac{\pi}2)"),
    (r"\text{Marta}", "Marta"),
    (r"\text{Marta}", "marta."),
    ("even", r"\text{even}"),
    (r"\text{(B)}", "B"),
    (r"\text{(B)}", "(B)"),
    (r"\text{(B)}", r"\textbf{(B) } 12"),
    ("B", r"\mathrm{B}"),
    ("7,654,320", "7654320"),
    (r"7,\!654,\!320", "7,654,320"),
    ("1,234", "1234"),
    ("100,200", "100, 200"),
    ("x=5", "5"),
    ("5", "x = 5"),
    ("5", "2+3=5"),
    ("y=2x+3", "2x+3"),
    ("y=2x+3", "y = 3+2x"),
    ("y=2x+3", "2x-y+3=0"),
    ("y=2x+3", "y-2x=3"),
    ("4x-9y+2z+3=0", "8x-18y+4z+6=0"),
    (r"x \in [-3,8]", "[-3,8]"),
    (r"x \in [-3,8]", r"-3 \le x \le 8"),
    (r"(2,\infty)", "x>2"),
    (r"[2,\infty)", r"x \ge 2"),
    (r"(-\infty,2)", "x<2"),
    (r"(-\infty, 2) \cup (3, \infty)", r"(3,\infty) \cup (-\infty,2)"),
    ("1374_8", "1374_{8}"),
    ("1011_2", r"1011_{\text{two}}"),
    ("1011_2", "1011_{2}"),
    ("1011_2", r"\text{1011}_2"),
    ("1374_8", r"1374 \text{ base } 8"),
    ("1374_8", "1374 (base 8)"),
    (r"1\frac{4}{5}", r"\frac{9}{5}"),
    (r"1\frac45", "1.8"),
    ("1 4/5", "9/5"),
    (r"211 \frac{1}{2}", "211.5"),
    (r"-1\frac{1}{2}", "-1.5"),
    (r"2\frac{x}{3}", r"\frac{2x}{3}"),
    (r"\{1,2,3\}", "3,2,1"),
    ("1,-2", r"x=1 \text{ or } x=-2"),
    ("1,-2", "x = 1, -2"),
    ("1,-2", r"1 \text{ and } -2"),
    ("3 or 7", "7, 3"),
    ("x=1,y=2", "y=2, x=1"),
    (r"\{2\pm\sqrt{7},-4\}", r"-4, 2+\sqrt7, 2-\sqrt7"),
    (r"1 \pm \sqrt{23}", r"1-\sqrt{23}, 1+\sqrt{23}"),
    (r"5 \pm 2\sqrt2", r"5 \pm \sqrt8"),
    (r"\begin{pmatrix} -3 \\ 12 \\ 8 \end{pmatrix}", r"\begin{bmatrix}-3\\12\\8\end{bmatrix}"),
    (r"\begin{pmatrix} 1/5 \\ -21/5 \end{pmatrix}", r"\begin{pmatrix} 0.2 \\ -4.2 \end{pmatrix}"),
    (r"30^\circ", "30"),
    (r"30^\circ", "30°"),
    (r"30^\circ", "30 degrees"),
    ("30", r"30^{\circ}"),
    (r"\$48", "48"),
    (r"\$48", "48 dollars"),
    (r"\$12.40", "12.4"),
    (r"\$12.40", "$12.40$"),
    (r"14\mbox{ cm}^2", "14"),
    (r"14\mbox{ cm}^2", "14 cm^2"),
    (r"14\mbox{ cm}^2", r"14 \text{ square centimeters}"),
    (r"7.5 \text{ cents}", "7.5"),
    (r"\frac{250}7\text{ degrees}", r"\frac{250}{7}^\circ"),
    ("12", "12 apples"),
    ("12", "12 apples per day"),
    ("12", r"12\text{ km/h}"),
    ("12", r"12\ \mathrm{m}/\mathrm{s}"),
    ("2k+2", "2(k+1)"),
    ("(a+3)(b+4)", "ab+4a+3b+12"),
    ("(a+3)(b+4)", "(b+4)(a+3)"),
    ("3+2i", "2i+3"),
    ("7 - 4i", "7-4i"),
    (r"\frac{1}{i}", "-i"),
    (r"13\sqrt2", r"\sqrt{338}"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
    (r"\frac{1}{1+\sqrt2}", r"\sqrt2-1"),
    (r"\sqrt[3]{-8}", "-2"),
    (r"\sqrt[3]{16}", r"2\sqrt[3]{2}"),
    (r"2^{1/3}\cdot 2^{2/3}", "2"),
    (r"\sqrt{51}", r"\sqrt 51"),
    (r"\sqrt{51}", "sqrt(51)"),
    (r"\sqrt{51}", "√51"),
    (r"\frac{1}{0}", r"\frac{1}{0}"),
    (r"0.\overline{3}", "1/3"),
    (r"0.1\overline{6}", "1/6"),
    (".4375", "0.4375"),
    (r"3.25 \times 10^{-5}", ".0000325"),
    ("3.25e-05", ".0000325"),
    ("2e-5", "2e - 5"),
    (r"-\frac{3}{7}", r"\frac{-3}{7}"),
    (r"-\frac{3}{7}", "-3/7"),
    (r"\frac{-3}{-8}", "3/8"),
    ("5", "+5"),
    ("5", "5."),
    ("5", "5.0"),
    ("5", "$5$"),
    ("5", r"\(5\)"),
    ("5", "**5**"),
    ("18", "18.00"),
    (r"\frac 34", r"\frac34"),
    (r"\frac9{19}", r"\frac{9}{19}"),
    (r"\frac{9}{19}", "9/19"),
    (r"\cot x", r"\cot(x)"),
    ("2^{n+1}", r"2\cdot 2^n"),
    (r"8\cdot 10^{n-2}", r"\frac{8\cdot 10^n}{100}"),
    ("90!+7", "7+90!"),
    (r"\binom{5}{2}", "10"),
    ("5!", "120"),
    (r"\lfloor 3.7 \rfloor", "3"),
    ("f(x) = 2x", "2x"),
    ("f^{-1}(x) = 2x", "2x"),
    (r"\angle ABC = 30^\circ", "30"),
    ("AB = 5", "5"),
    (r"\text{Area} = 5", "5"),
    ("3:2", "3 : 2"),
    (r"\emptyset", r"\{\}"),
    (r"\text{no solution}", "No solution"),
    (r"\infty", r"+\infty"),
    (r"\frac{7+3a}{20}", r"\frac{3a+7}{20}"),
    (r"\frac{x^2-1}{x-1}", "x+1"),
    ("r - s", "-(s-r)"),
    (r"8 \pi", r"8\pi"),
    (r"8\pi", "8π"),
    (r"252 \pi", "252 * pi"),
    ("(2^6)*(3^4)*(5^2)", "129600"),
    ("5^{2/3}", r"\sqrt[3]{25}"),
    (r"\frac{1}{2}\cdot\frac{1}{3}", "1/6"),
    ("１２", "12"),
    ("١٢", "12"),
    ("½", "0.5"),
    ("2½", "2.5"),
    ("x²", "x^2"),
    ("−5", "-5"),
    ("((((((((1))))))))", "1"),
    ("A, C, E, H", "H, E, C, A"),
    ("TALE", "tale"),
    ("x^3+2x-9", "x^3 + 2x - 9"),
    (r"10 \text{ and } 20", "10, 20"),
    ("Monday and Tuesday", "Tuesday and Monday"),
    ("1,000,000", "10^6"),
    ("1{,}000", "1000"),
    (r"1\,000", "1000"),
    ("47,300", "47300"),
    ("(4,29,-3)", "[4,29,-3]"),
    (r"(-\sqrt{3}, \sqrt{3})", r"(-\sqrt3,\sqrt3)"),
    ("y = -2x", "-2x"),
    ("0", "-0"),
    ("0", "0.0"),
    ("2", "2/1"),
    ("3", r"\sqrt{9}"),
    (r"2\sqrt{5}", r"\sqrt{20}"),
    ("e^{2}", "e^2"),
    ("i", r"\sqrt{-1}"),
    (r"\frac{\pi}{6}", r"\frac{1}{6}\pi"),
    (r"\frac{30000}{\pi}", r"30000\pi^{-1}"),
    ("12", r"\text{12}"),
    ("1", "1=1"),
]
DIFFERENT = [
    ("5", "5 million"),
    ("5", "xy=5"),
    ("5", "less than 5"),
    ("5", "5 or more"),
    ("5", r"\text{not } 5"),
    (r"\pm \frac12", r"\frac12"),
    (r"\frac12", r"\frac21"),
    ("AB", "BA"),
    (r"2AB", "2"),
    (r"\sqrt{2}", "1.414"),
    (r"\text{Marta and Ilse}", "Marta"),
    (r"\prod_{i=1}^n a_i", r"\prod_{i=1}^n b_i"),
    ("x<5", "x>5"),
    ("x<5", "5"),
    ("2:30", "1:15"),
    ("1,2", "12"),
    ("12", "1,2"),
    ("(1,2)", "(1,2]"),
    ("[1,2]", "(1,2)"),
    ("x^2+1", "x^2-1"),
    ("10^{10^{10}}", "10^{10^{11}}"),
    ("1/2^99", "1/2^98"),
    ("2^{-99}", "2^{-98}"),
    (r"\pm 2021", "2021"),
    ("2021", r"\pm 2021"),
    (r"\text{Marta}", "Marla"),
    (r"\text{even}", r"\text{odd}"),
    ("east", "seat"),
    (r"\text{(B)}", r"\textbf{(C) } 12"),
    (r"\text{(B)}", "C"),
    ("100,200", "200,100"),
    ("x=5", "y=5"),
    ("x=5", "x=6"),
    ("5", "2+3=6"),
    ("4x-9y+2z+3=0", "4x-9y+2z-3=0"),
    ("[-3,8]", r"-3 \leq x < 8"),
    (r"(2,\infty)", r"x \ge 2"),
    (r"(-\infty, 2) \cup (3, \infty)", r"(3,\infty) \cup (-\infty,2]"),
    ("1374_8", "1374_9"),
    ("1374_8", "1374"),
    ("1011_2", "1101_2"),
    ("1 2", "12"),
    ("12", "1 2"),
    (r"\{1,2\}", r"\{1,2,2\}"),
    ("1,1,2", "1,2"),
    ("x=1,y=2", "x=2,y=1"),
    (r"1 \pm \sqrt{23}", r"1+\sqrt{23}"),
    (r"\begin{pmatrix} -3 \\ 12 \\ 8 \end{pmatrix}", r"\begin{pmatrix}-3&12&8\end{pmatrix}"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 4 & 3 \end{pmatrix}"),
    (r"14\mbox{ cm}^2", "225"),
    ("5", "5x"),
    ("5", "5 m"),
    ("42", ""),
    ("42", r"\text{}"),
    ("", r"\text{}"),
    ("3R^2", "3r^2"),
    ("3+2i", "3-2i"),
    (r"\sqrt{x^2}", "x"),
    (r"\pi/6", r"30^\circ"),
    (r"\frac{1}{0}", r"\frac{2}{0}"),
    ("0.333", "1/3"),
    (r"\pi", "3.14159"),
    ("-5", "5"),
    ("5", "-5"),
    (r"\cot x", r"\tan x"),
    (r"\sqrt{3+2\sqrt2}", r"1+\sqrt3"),
    (r"\ln 8", r"3\ln 3"),
    (r"\sin^2 x + \cos^2 x", "2"),
    ("2^{n+1}", "2^n"),
    ("|-5", "|5"),
    ("3:2", "2:3"),
    (r"\infty", r"-\infty"),
    (r"-\infty", "infinity"),
    ("r - s", "s-r"),
    ("5^2", "52"),
    ("5²", "52"),
    ("1e400", "1e401"),
    ("(x+1)^{100}", "(1+x)^{100}"),
    ("9^{9^{9^9}}", "1"),
    ("TALE", "LATE"),
    ("(1,234)", "1234"),
    ("(4,29,-3)", "(4,29,3)"),
    (r"2\sqrt{5}", r"2\sqrt{6}"),
    ("e^{-100}", "e^{-99}"),
    (r"\text{spiral}", "an spiral"),
    ("12", "12, 13"),
    ("12", r"\frac{12}"),
    ("12", "{12"),
    ("12", "12}"),
    ("12", r"\boxed{12}"),
]
SYMBOLIC = [
    (r"\cot x", r"1/\tan x"),
    (r"\cot x", r"\frac{\cos x}{\sin x}"),
    (r"\sqrt{3+2\sqrt2}", r"1+\sqrt2"),
    (r"\ln 8", r"3\ln 2"),
    (r"\log_2 8", "3"),
    (r"\sin(\pi/6)", r"\frac12"),
    (r"\sin^2 x + \cos^2 x", "1"),
]


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_equal_answers(gold, answer):
    assert answers_equal(gold, answer, "math", symbolic=False)


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_different_answers(gold, answer):
    assert not answers_equal(gold, answer, "math", symbolic=False)
    assert not answers_equal(answer, gold, "math", symbolic=False)


@pytest.mark.parametrize(("gold", "answer"), SYMBOLIC)
def test_what_only_the_symbolic_step_decides_counts_as_different_without_it(gold, answer):
    assert not answers_equal(gold, answer, "math", symbolic=False)


@pytest.mark.parametrize("text", ["", "$$", r"\text{}", " . ", "**"])
def test_nothing_equals_nothing(text):
    assert not answers_equal(text, text, "math", symbolic=False)


def test_texts_that_arent_understood_are_equal_only_as_texts():
    gold = r"\oint_C F \cdot dr"
    assert parse(gold).value is None
    assert answers_equal(gold, r"$\oint_C F\cdot dr$.", "math", symbolic=False)
    assert not answers_equal(gold, r"\oint_D F \cdot dr", "math", symbolic=False)


def test_long_texts_are_compared_whole():
    assert answers_equal("x" * 10**6, "x" * 10**6, "math", symbolic=False)
    assert not answers_equal("x" * 10**6, "x" * 10**6 + "y", "math", symbolic=False)


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        ("1080", "1,080", True),
        ("18", "18.00", True),
        ("18", "$18.", True),
        ("50", "50%", True),
        ("0.5", "1/2", True),
        ("2.5", "2 1/2", True),
        ("5", "-5", False),
        ("-5", "-5.0", True),
        ("5", "3/0", False),
        ("5", "", False),
        ("", "", False),
        ("5", "five", False),
        ("1" * 300, "1" * 300, False),
    ],
)
def test_plain_numbers(gold, answer, equal):
    assert answers_equal(gold, answer, "gsm8k") is equal


@pytest.mark.parametrize(
    ("kind", "gold", "answer", "equal"),
    [
        ("choice", "B", "(b)", True),
        ("choice", "B", "C", False),
        ("choice", "", "", False),
        ("exact", "a “quoted”  word", 'a "quoted" word.', True),
        ("exact", "Word", "word", False),
        ("exact", " ", "", False),
        ("none", "5", "5", False),
    ],
)
def test_other_kinds(kind, gold, answer, equal):
    assert answers_equal(gold, answer, kind) is equal


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^{9^9}}",
        "(x+1)" * 79,
        "(a+b+c+d)^{20}(a+b+c+d)^{20}",
        "(x+y+z)^{24}/(x+y+z)^{23}" * 10,
        "400!" * 100,
        "999!!!!!!",
        "2^{9999}" * 50,
        r"\frac{1}{x+1}+" * 28 + "1",
        r"\sqrt{1+" * 42 + "x" + "}" * 42,
        "((((" * 100,
        "{" * 190 + "1" + "}" * 190,
        r"\sqrt" * 70 + "2",
        r"\frac" * 70,
        "x^" * 199 + "x",
        r"\sin" * 99 + "x",
        "|" * 399,
        r"1\pm" * 90 + "1",
        r"(1\pm 2," * 40 + "1" + ")" * 40,
        ",".join("123456789" for _ in range(40)),
        ", ".join(r"\sqrt{1+\sqrt2}" for _ in range(22)),
        "99991^{1/7}" * 30,
        "9" * 399,
        r"\begin{pmatrix}" + "1&" * 150 + r"1\end{pmatrix}",
        r"\begin{pmatrix}" * 25,
        r"\text{" * 60,
        r"\binom{1000}{500}" * 20,
    ],
)
def test_hostile_answers_take_no_time(text):
    assert len(text) <= MAX_LENGTH
    start = time.process_time()
    assert not answers_equal(text, text + "+1", "math", symbolic=False)
    assert not answers_equal("1", text, "math", symbolic=False)
    assert time.process_time() - start < 3


def test_no_input_is_an_error():
    pieces = [
        *"12xyin+-*/^{}()[],|!_%&$ =<",
        *(r"\frac", r"\frac{1}{", r"\sqrt", r"\{", r"\}", r"\pm", r"\le", r"\cup", r"\text{", r"\text{cm}"),
        *(
            r"\sin",
            r"\log_",
            r"\binom",
            r"\begin{pmatrix}",
            r"\end{pmatrix}",
            r"\\\\",
            r"\%",
            r"^\circ",
            "²",
            "½",
        ),
        *("(x+y)^{24}", "10^{10^", r"\overline{", r"\lfloor", "400!", r"\infty", "million", "and"),
    ]
    rng = random.Random(0)
    texts = ["".join(rng.choices(pieces, k=rng.choice((3, 6, 12, 30)))) for _ in range(1500)]
    for one, other in zip(texts, texts[1:], strict=False):
        answers_equal(one, other, "math", symbolic=False)
