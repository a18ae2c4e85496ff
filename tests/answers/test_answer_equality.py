"""Which answers are equal by their structure, and which expressions are left to algebra."""

from gambit.answers.forms import MAX_SEARCHED, are_equal, read


class Algebra:
    """Remembers what it was asked, and says that pairs are equal if they are told to be."""

    def __init__(self, *equal: tuple[str, str]) -> None:
        self.equal = set(equal)
        self.asked: list[tuple[str, str]] = []

    def __call__(self, first: str, second: str) -> bool:
        self.asked.append((first, second))
        return (first, second) in self.equal


def compare(first: str, second: str, *equal: tuple[str, str]) -> tuple[bool, list[tuple[str, str]]]:
    algebra = Algebra(*equal)
    return are_equal(read(first), read(second), algebra), algebra.asked


VALUES = [
    ("12 cm", "12", True),
    ("12 cm", "12 meters", False),
    ("90^\\circ", "90 degrees Celsius", True),
    ("5^\\circ C", "5^\\circ F", False),
    ("28%", "28", True),
    ("28%", "0.28", True),
    ("0.28", "28%", True),
    ("28%", "28%", True),
    ("28%", "0.28%", False),
    ("28%", "2.8", False),
    ("x = 5", "5", True),
    ("x = 5", "x = 5", True),
    ("x = 5", "x = 6", False),
    ("x = 5", "y = 5", False),
    ("101_2", "5", False),
    ("B", "b", True),
    ("B", "C", False),
    ("0.333333", "1/3", True),
    ("0.333334", "1/3", False),
    ("0.666667", "2/3", True),
    ("1000000.123456", "1000000.123457", False),
    ("0.3", "1/3", False),
]


def test_values() -> None:
    found = [(first, second, *compare(first, second)) for first, second, _ in VALUES]
    assert found == [(*row, []) for row in VALUES], "nothing of this takes algebra"


SEVERAL_THINGS = [
    ("1, 2", "2, 1", True),
    ("1, 2", "(1, 2)", True),
    ("(1, 2)", "1, 2", True),
    ("2, 1", "(1, 2)", False),
    ("(1, 2)", "(2, 1)", False),
    ("(1, 2)", "[1, 2]", False),
    ("(1, 2)", "(1, 2]", False),
    ("[1, 2]", "1, 2", False),
    ("(1, 2)", "(1, 2, 3)", False),
    ("1, 2", "1, 2, 3", False),
    (r"\{1, 2\}", r"\{2, 1\}", True),
    (r"\{1, 2\}", "1, 2", True),
    (r"\{1, 2\}", "(1, 2)", False),
    (r"\{5\}", "5", True),
    (r"\{5\}", "6", False),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", "(1, 2)", True),
    (r"\begin{pmatrix}1&2\end{pmatrix}", "(1, 2)", True),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", "(2, 1)", False),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", True),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}", False),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}", False),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "(1, 2, 3, 4)", False),
    (r"(0, 1)\cup(2, 3)", r"(2, 3)\cup(0, 1)", True),
    (r"x \in (0, 1)", "(0, 1)", True),
    ("x < 1", r"(-\infty, 1)", True),
    (r"x \le 1", r"(-\infty, 1)", False),
]


def test_several_things() -> None:
    found = [(first, second, *compare(first, second)) for first, second, _ in SEVERAL_THINGS]
    assert found == [(*row, []) for row in SEVERAL_THINGS]


def test_expressions_are_left_to_algebra_in_the_order_of_the_answers() -> None:
    pair = (r"\sqrt{8}", r"2\sqrt{2}")
    assert compare(*pair) == (False, [pair]) and compare(*pair, pair) == (True, [pair])
    assert compare(f"x = {pair[0]}", f"{pair[1]} cm", pair) == (True, [pair])
    assert compare(f"({pair[0]}, 1)", f"({pair[1]}, 1)", pair) == (True, [pair])
    assert compare(f"1, {pair[0]}", f"{pair[1]}, 1", pair)[0]


def test_a_percentage_that_is_an_expression_is_divided_by_a_hundred() -> None:
    asked = [("50x", "x/2"), (r"\frac{50x}{100}", "x/2")]
    assert compare(r"50x\%", "x/2") == (False, asked)
    assert compare(r"50x\%", "x/2", asked[1]) == (True, asked)
    assert compare(r"50x\%", r"25x\%") == (False, [("50x", "25x")]), "two percentages are compared as they are"


def test_equations_are_compared_whole() -> None:
    asked = [("y=2x", "2x-y=0")]
    assert compare("y = 2x", "2x - y = 0", asked[0]) == (True, asked)
    assert compare("2x - y = 0", "y = 2x", ("2x-y=0", "y=2x"))[0]
    assert compare("y = 2x", "x = y/2", ("y=2x", "x=y/2")) == (True, [("y=2x", "x=y/2")])
    assert compare("y = 2x", "2x - y", ("2x", "2x-y")) == (True, [("2x", "2x-y")]), "2x - y is no equation"
    assert compare("2x + y = 5", "5") == (False, [])
    assert compare("x + y = 5", "y + x = 5", ("x+y=5", "y+x=5"))[0]


def test_unions_are_compared_part_by_part_or_as_sets_of_numbers() -> None:
    parts, whole = r"[0, 1]\cup[1, 2]", "[0, 2]"
    assert compare(parts, whole, (parts, whole)) == (True, [(parts, whole)])
    assert compare(whole, parts, (whole, parts)) == (True, [(whole, parts)])
    assert compare(parts, "0, 2") == (False, []), "a list is no set of numbers"
    assert compare(parts, r"\{0, 2\}") == (False, [(parts, r"\{0, 2\}")])


def test_a_set_may_be_described_by_an_expression() -> None:
    pair = (r"\{1, 2\}", r"\{x:x^2-3x+2=0\}")
    assert compare("(1, 2)", r"\sqrt{2}", ("(1, 2)", r"\sqrt{2}")) == (True, [("(1, 2)", r"\sqrt{2}")])
    assert compare("(1, 2)", "7") == (False, [])
    assert compare("(1, 2)", "B") == (False, [])
    assert isinstance(compare(*pair)[0], bool)


def test_long_lists_are_compared_by_their_spelling() -> None:
    most = [rf"\sqrt{{{number}}}" for number in range(2, MAX_SEARCHED + 2)]
    assert compare(", ".join(most), ", ".join([*most[1:], r"\sqrt 2"]))[0]
    one_other = [r"\sqrt{99}", *most[1:]]
    assert compare(", ".join(most), ", ".join(one_other), (most[0], one_other[0]))[0]
    longer = [*most, r"\sqrt{98}"]
    assert compare(", ".join(longer), ", ".join(reversed(longer))) == (True, [])
    assert compare(", ".join(longer), ", ".join([*one_other, r"\sqrt{98}"])) == (False, [])
