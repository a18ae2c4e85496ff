"""The first wrong step of hand-written solutions: `@` stands before the value that is to be found, if any."""

from benchmarks.long_chains.first_error import first_wrong_step, normalised
from benchmarks.long_chains.problems import generate

from support.tables import table

VALUES = {
    "Ann": ("12", 12),
    "Bob": ("Ann + 5", 17),
    "Cara": ("2 * Bob", 34),
    "Dan": ("Cara - 9", 25),
    "Eve": ("Bob + Dan", 42),
    "Finn": ("Eve - Ann", 30),
}
CHAIN = {
    "question": "Ann has 12 marbles. Bob has 5 more marbles than Ann. Cara has twice as many marbles as Bob. "
    "Dan has 9 fewer "
    "marbles than Cara. Eve has as many marbles as Bob and Dan have together. Eve has more marbles than Ann, "
    "and Finn has "
    "exactly as many as that difference. How many marbles does Finn have?",
    "answer": "30",
    "num_steps": 6,
    "steps": [{"name": name, "expression": e, "value": v} for name, (e, v) in VALUES.items()],
    "idle": [{"name": "Gus", "expression": "Cara / 2", "value": 17}],
}
QUEUE = {
    "question": "",
    "answer": "Cara",
    "num_steps": 2,
    "layout": "queue",
    "start": dict(zip(("first", "second", "third", "fourth"), ("Ann", "Bob", "Cara", "Dan"), strict=True)),
    "steps": [
        {
            "name": "Dan",
            "expression": "Dan goes to the front.",
            "value": {"1": "Dan", "2": "Ann", "3": "Bob", "4": "Cara"},
        },
        {"name": "Ann", "expression": "Ann and Cara swap.", "value": {"1": "Dan", "2": "Cara", "3": "Bob", "4": "Ann"}},
    ],
}
SLOTS = {
    "question": "",
    "answer": "attic",
    "num_steps": 2,
    "layout": "slots",
    "start": {"kitchen": "key", "attic": "lamp", "cellar": "cup"},
    "steps": [
        {"name": "key", "expression": "", "value": {"kitchen": "lamp", "attic": "key", "cellar": "cup"}},
        {"name": "cup", "expression": "", "value": {"kitchen": "cup", "attic": "key", "cellar": "lamp"}},
    ],
}
CHAINS = [
    "Ann has 12 marbles.\nBob has 12 + 5 = 17 marbles.\nCara has 2 * 17 = 34 marbles.\nDan has 34 - 9 = 25 marbles.\n"
    "Eve has 17 + 25 = 42 marbles.\nFinn has 42 - 12 = 30 marbles.\n\\boxed{30}",
    "Ann has 12 marbles.\nBob has 12 + 5 = 17 marbles.\nCara has 2 * 17 = @36 marbles.\nDan has 36 - 9 = 27.\n"
    "\\boxed{32}",
    "1. **Ann**: 12\n2. **Bob**: 12 + 5 = 17\n3. **Cara**: 2 × 17 = 34\n4. **Dan**: 34 - 9 = @24\n5. **Eve**: 41",
    "1. Ann has 12 marbles.\n2. Bob has 5 more marbles than Ann, so Bob has \\(12 + 5 = 17\\) marbles.\n"
    "3. Cara has twice as many marbles as Bob, so Cara has \\(2 \\times 17 = @32\\) marbles.",
    "Bob has 5 more marbles than Ann:\n\\[ 12 + 5 = 17 \\]\nCara has twice as many marbles as Bob:\n"
    "\\[ 17 \\times 2 = 34 \\]\n"
    "Dan has 9 fewer marbles than Cara:\n\\[ 34 - 9 = 25 \\]",
    "Bob has 5 more marbles than Ann:\n\\[ 12 + 5 = 17 \\]\nCara has twice as many marbles as Bob:\n"
    "\\[ 17 \\times 2 = 34 \\]\n"
    "Dan has 9 fewer marbles than Cara:\n\\[ 34 - 9 = @26 \\]\nEve has as many as Bob and Dan:\n\\[ 17 + 26 = 43 \\]",
    "\\[ \\text{Bob} = \\text{Ann} + 5 = 12 + 5 = 17 \\]\n"
    "\\[ \\text{Cara} = 2 \\times \\text{Bob} = 2 \\times 17 = 34 \\]",
    "\\[ \\text{Bob} = \\text{Ann} + 5 = 12 + 5 = @16 \\]\n"
    "\\[ \\text{Cara} = 2 \\times \\text{Bob} = 2 \\times 16 = 32 \\]",
    "Let's denote the number of marbles that Ann has as \\( A \\), and let B be the number of marbles Bob has.\n"
    "B = 12 + 5 = 17. Then Cara has 2B = 2 * 17 = @35 marbles.",
    "Let C be the number of marbles Cara has.\n\\( C = 2 \\times 17 = 34 \\)\nLet D be the number of marbles Dan has.\n"
    "\\( D = C - 9 = 34 - 9 = @15 \\)",
    "Let C be the number of marbles Cara has.\n\\( C = 2 \\times 17 = 34 \\)\nLet D be the number of marbles Dan has.\n"
    "\\( D = C - 9 = 34 - 9 = 25 \\)",
    "We are told: " + CHAIN["question"] + "\nBob: 17\nCara: 34\nDan: 25\nEve: 42\nFinn: 30",
    "We are told: " + CHAIN["question"] + "\nBob: 17\nCara: 34\nDan: 25\nEve: @43\nFinn: 31",
    "Compared with Ann, Bob has 5 more marbles, which is 12 + 5 = 17.\nCompared with Bob, Cara has twice as many: 34.",
    "Compared with Ann, Bob has 5 more marbles, which is 12 + 5 = @18.\nCompared with Bob, Cara has twice as many: 36.",
    "If Bob and Dan put their marbles together, they have exactly as many as Eve has: 17 + 25 = @41.",
    "If Bob and Dan put their marbles together, they have exactly as many as Eve has: 17 + 25 = 42.",
    "Cara has 2 * 17 = 36 marbles. Wait, that is wrong: Cara has 2 * 17 = 34 marbles.\nDan has 34 - 9 = 25 marbles.",
    "Eve has 17 + 25 = 52.\nLet me check: Eve has 17 + 25 = 42. Finn has 42 - 12 = @31.",
    "Since Bob has 17 marbles and Dan has 25 marbles, Eve has 17 + 25 = 42 marbles.",
    "Since Bob has 17 marbles and Dan has 25 marbles, Eve has 17 + 25 = @32 marbles.",
    "Since Bob has 17 marbles and Dan has @34 marbles, Eve has 17 + 34 = 51 marbles.",
    "Ann = 12, Bob = 12 + 5 = 17, Cara = 2 * 17 = 34, Dan = 34 - 9 = 25, Eve = 17 + 25 = 42, Finn = 42 - 12 = 30",
    "Ann = 12, Bob = 12 + 5 = 17, Cara = 2 * 17 = 34, Dan = 34 - 9 = 25, Eve = 17 + 25 = @40, Finn = 40 - 12 = 28",
    "Dan has 9 fewer marbles than Cara. Cara has 34 marbles, so Dan has 34 - 9 = 25 marbles.",
    "ann = 12\nbob = ann + 5  # 17\ncara = 2 * bob  # 34\nprint(cara)",
    "The number of marbles of Dan is 34 - 9 = 25. So Eve = @25 + 34",
    "The difference between Eve and Ann is 42 - 12 = 30. So Finn has 30 marbles.\n\nThe answer is \\boxed{30}.",
    "Together, Bob and Dan have 17 + 25 = 42 marbles, so Eve has 42 marbles.",
    "Together, Bob and Dan have 42 marbles. Therefore Eve has @24 marbles.",
    "Bob has 17. Gus has half as many marbles as Cara: 34 / 2 = 17. Dan has \\frac{50}{2} = 25.",
    "Gus has half as many marbles as Cara: \\(\\frac{34}{2} = @18\\).",
    "### Step 1: Find Bob's marbles\nBob has 5 more than Ann.\n$$12 + 5 = 17$$\n"
    "### Step 2: Find Cara's marbles\n$$2 \\cdot 17 = @37$$",
    "- Bob's marbles = Ann's marbles + 5 = 12 + 5 = 17\n- Cara's marbles = 2 * Bob's marbles = 2 * 17 = 34\n"
    "- Dan's marbles = Cara's marbles - 9 = 34 - 9 = @23",
    "Finn has exactly as many as the difference between Eve (42) and Ann (12), so Finn has 42 - 12 = 30.",
    "To find how many marbles Finn has, we need Eve's 42 marbles less Ann's 12 marbles, that is 42 - 12 = @32.",
    "Finn has 42 - 12 = 30 marbles.\nThe final answer is \\boxed{@42}.",
]
MOVES = [
    (
        QUEUE,
        "Start: Ann, Bob, Cara, Dan\nDan goes to the front: Dan, Ann, Bob, Cara\nSwap: Dan, Cara, Bob, Ann\n"
        "\\boxed{Cara}",
    ),
    (
        QUEUE,
        "Start: Ann, Bob, Cara, Dan\nDan goes to the front: Dan, Ann, Bob, Cara\nSwap: @Dan, Cara, Ann, Bob\n"
        "\\boxed{Cara}",
    ),
    (QUEUE, "Ann and Cara swap, after Dan goes first.\n1. @Ann\n2. Dan\n3. Bob\n4. Cara"),
    (QUEUE, "1. Dan\n2. Ann\n3. Bob\n4. Cara\n\nThen [Dan, Cara, Bob, Ann]."),
    (QUEUE, "Dan -> Bob -> Ann -> Cara. No, that is wrong. Dan -> Ann -> Bob -> Cara, as he goes first."),
    (QUEUE, "\\text{Dan}, \\text{Ann}, \\text{Bob}, \\text{Cara} \\rightarrow nothing else is known."),
    (
        SLOTS,
        "The key is in the kitchen, the lamp is in the attic and the cup is in the cellar.\n"
        "Now key: attic, lamp: kitchen, cup: cellar.",
    ),
    (
        SLOTS,
        "- Key in the kitchen\n- Lamp in the attic\n- Cup in the cellar\nAfter the first:\n"
        "- @Key in the cellar\n- Lamp in the attic\n- Cup in the kitchen",
    ),
    (SLOTS, "Kitchen: lamp\nAttic: key\nCellar: cup\n\nThen kitchen: cup, attic: key, cellar: lamp.\n\\boxed{attic}"),
]


@table(("problem", "marked"), [*((CHAIN, text) for text in CHAINS), *MOVES])
def test_the_first_wrong_value_is_found(problem, marked):
    text, place = marked.replace("@", ""), marked.find("@")
    found = first_wrong_step(problem, text)
    assert found.offset == (None if place < 0 else place), (found, text[found.offset or 0 :][:20])


def test_what_is_unclear_is_not_certain():
    assert not first_wrong_step(CHAIN, "I think it is \\boxed{31}.").certain
    assert not first_wrong_step(CHAIN, "Bob has 16 marbles, I guess. \\boxed{30}").certain
    assert not first_wrong_step(CHAIN, "Let me think about this.").certain
    assert first_wrong_step(CHAIN, "Bob has 17 marbles.").certain
    assert first_wrong_step(CHAIN, "It is \\boxed{30}").offset is None


def test_a_finding_says_what_was_expected():
    found = first_wrong_step(CHAIN, CHAINS[1].replace("@", ""))
    assert (found.name, found.stated, found.expected, found.num_right, found.certain) == ("Cara", "36", "34", 2, True)


def test_offsets_stay_where_they_are():
    for text in CHAINS:
        assert len(normalised(text)) == len(text)
        assert [i for i, c in enumerate(normalised(text)) if c == "\n"] == [i for i, c in enumerate(text) if c == "\n"]


@table("spec", ["chains:12,idle=3", "moves:8"])
@table("split", ["train", "dev", "judge", "test"])
def test_solutions_that_repeat_the_problem_are_right(spec, split):
    """Nothing in a problem's own sentences is taken for a claim that is wrong."""
    for row in generate(spec, split, 40, seed=9):
        if spec.startswith("moves"):
            text = "\n".join(f"{step['expression']} {', '.join(step['value'].values())}" for step in row["steps"])
            text = text if row["layout"] == "queue" else row["question"]
        else:
            by_name = {step["name"]: step["value"] for step in row["steps"] + row["idle"]}
            lines = [
                f"{n} = {e} = {eval(e, {}, by_name):g}" for n, e in ((s["name"], s["expression"]) for s in row["steps"])
            ]
            text = "\n".join(lines)
        text = f"{row['question']}\n\n{text}\n\\boxed{{{row['answer']}}}"
        found = first_wrong_step(row, text)
        assert found.offset is None and found.certain, (found, text[found.offset or 0 :][:200])
