"""Answers that a hostile user graded: right ones refused, wrong ones accepted, and their neighbours."""

from gambit.answers import worker
from gambit.answers.extract import AnswerKind, extractor_for
from gambit.answers.forms import are_equal, canonical, read
from support.tables import table

EQUAL = [
    # decimals are meant as they are written
    ("0.1+0.2", "0.3"), ("0.1+0.2", "3/10"), (r"0.1\cdot3", "0.3"), ("0.1*0.1", "0.01"), ("0.5+0.25", "0.75"),
    ("0.5^2", "1/4"), ("2^{0.5}", r"\sqrt{2}"), ("1.1^{10}", "2.5937424601"), ("1.4142136", r"\sqrt{2}"),
    (r"6.02\times10^{23}", "6.02e23"), (r"6.02\times10^{23}", "602000000000000000000000"),
    (r"6.02 \cdot 10^{23}", "6.02 * 10^23"), (r"1.5\times10^3", "1500"), (r"1.6\times10^{-19}", "1.6e-19"),
    # binomials
    (r"\binom52", "10"), (r"\binom52", r"\binom{5}{2}"), (r"\binom 5 2", "10"), (r"\binom{5}2", "10"),
    (r"\binom5{2}", "10"), (r"\tbinom52", "10"), (r"5\choose 2", "10"), (r"{5\choose 2}", "10"),
    (r"{n \choose k}", r"\binom{n}{k}"), (r"\binom n k", r"\binom{n}{k}"),
    # roots, logarithms, i
    (r"\sqrt[3]{-8}", "-2"), (r"\sqrt[3]{8}", "2"), (r"\sqrt[5]{-32}", "-2"), (r"\sqrt[3]{-27}+1", "-2"),
    ("(-8)^{2/3}", "4"), (r"\sqrt[3]{x}", "x^{1/3}"), ("log_2 8", "3"), ("log_2(8)", "3"), ("log_{10} 100", "2"),
    ("i", r"\sqrt{-1}"), (r"e^{i\pi}", "-1"), (r"\frac{1}{i}", "-i"), ("i^2", "-1"), ("(2+i)(2-i)", "5"),
    ("2i+3j", "3j+2i"), (r"\sum_{i=1}^{3} i", "6"), ("(-1)^{1/2}", "i"),
    # names on the right, equations
    ("3=x", "3"), ("3=x", "x=3"), (r"\frac12=y", "0.5"), ("2+3=5", "5"), ("1/3=0.333", "0.333"), ("5=5", "5"),
    # other alphabets
    ("√2", r"\sqrt2"), ("√12", r"2\sqrt3"), ("√{2}", r"\sqrt{2}"), ("√(2)", r"\sqrt{2}"), ("3√2", r"3\sqrt{2}"),
    ("∛8", "2"), ("√x", r"\sqrt{x}"), ("２", "2"), ("（１，２）", "(1, 2)"), ("ｘ＝５", "x=5"), ("１／２", "0.5"),
    # sets, choices, dates, primes
    (r"\{\}", r"\emptyset"), (r"\{ \}", r"\varnothing"), (r"\text{Option C}", "C"), ("option b", "(B)"),
    ("Choice (D)", "D"), ("Option K", "(K)"), ("01/02/2020", "1/2/2020"), ("2020-01-02", "2020-01-02"),
    ("5'", "5"), ("12'", "12 ft"), ("6''", "6 inches"), ("30'", "30 minutes"),
]  # fmt: skip

DIFFERENT = [
    ("0.1+0.2", "0.4"), ("0.1+0.2", "0.30001"), ("1.41", r"\sqrt{2}"), (r"6.02\times10^{23}", "6.03e23"),
    (r"6.02\times10^{23}", "6.02e24"), (r"\binom52", "11"), (r"\binom52", "52"), (r"\binom 5 2", r"\binom{5}{1}"),
    (r"{5\choose 2}", r"\frac{5}{2}"), (r"\sqrt[3]{-8}", "2"), (r"\sqrt[4]{-16}", "-2"), ("log_2 8", "8"),
    ("log_2 8", "log_3 8"), ("i", "-i"), ("i", "1"), ("2i", "i"), (r"e^{i\pi}", "1"), ("i", "j"), ("3=x", "4"),
    ("3=x", "y=3"), ("1=2", "2"), ("0=1", "1"), ("1=2", "1"), ("1=2=3", "3"), ("√2", "2"), ("√12", r"\sqrt{1}2"),
    ("∛8", r"\sqrt{8}"), ("２", "3"), (r"\{\}", "0"), (r"\{\}", r"\{0\}"), ("Option C", "D"), ("option", "O"),
    ("(B) 7", "B"), ("10_2", "2"), ("5^\\circ", "5'"), ("5'", "5''"), ("12'", "12 inches"), ("5'", "5 m"),
    ("1/0", "2/0"), (r"\frac{1}{0}", "5"), ("0/0", "1"), ("1/0", r"\infty"), ("01/02/2020", "1/4040"),
    ("01/02/2020", "2/1/2020"), ("2020-01-02", "2017"), ("2020-01-02", "01/02/2020"), ("10/12/2020", "1/2424"),
]  # fmt: skip


@table(("first", "second", "is_equal"), [*((*pair, True) for pair in EQUAL), *((*pair, False) for pair in DIFFERENT)])
def test_what_a_hostile_user_found(first, second, is_equal):
    for pair in ((first, second), (second, first)):
        one, other = map(canonical, pair)
        assert (one == other or are_equal(read(one), read(other), worker.compare)) is is_equal
    for answer in (first, second):
        assert canonical(canonical(answer)) == canonical(answer), "the normal spelling is its own"


def test_a_choice_with_its_text_is_read_as_a_choice_where_choices_are_wanted():
    read_choice = extractor_for(AnswerKind.CHOICE)
    assert read_choice("so the answer is (B) 7") == "B"
