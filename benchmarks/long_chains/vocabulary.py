"""Words of the long chains: no two splits share a name, a thing, a container, a place or a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

SPLITS = ("train", "dev", "judge", "test")
Wordings: TypeAlias = "MappingProxyType[str, tuple[str, ...]]"  # by relation


@dataclass(frozen=True, slots=True)
class Words:
    """All that the problems of one split are written with."""

    names: tuple[str, ...]
    towns: tuple[tuple[str, ...], ...]  # endings of one beginning: a problem takes one of each
    things: tuple[str, ...]
    containers: tuple[str, ...]
    objects: tuple[str, ...]
    places: tuple[str, ...]
    wordings: Wordings


def _list(text: str) -> list[str]:
    return text.split()


# Split by position, so that every split has short and long names from everywhere.
_NAMES = _list("""
Aaron Abel Ada Adele Agnes Ahmed Aisha Akira Alan Albert Aldo Alice Alma Amir Amos Anders Andrea Angela Anita Anton
Aria Arjun Arthur Astrid Axel Barbara Basil Beatrice Becky Benito Bernard Bertha Bianca Bjorn Boris Bruno Calvin Camila
Carl Carmen Casper Cecil Celia Chen Chiara Clara Claude Colin Conrad Cora Cyril Dagmar Daisuke Damian Daniel Daphne
Darius David Deborah Delia Dennis Diana Diego Dimitri Dolores Donald Dora Doris Edgar Edith Eduardo Edwin Elena Elias
Elif Eliza Ella Elmer Elsa Emil Emma Enzo Erica Ernest Esther Ethan Eugene Eva Evelyn Fabian Farid Fatima Felix
Fernando Fiona Flora Florian Frances Frank Freda Fritz Gabriel Gareth Gemma George Gerald Gilbert Gina Giulia Gloria
Gordon Greta Gunnar Gustav Hamid Hana Hannah Harold Harriet Hassan Hector Heidi Helen Henry Herbert Hiro Howard Hugo
Ian Ibrahim Ida Igor Ilse Imani Ines Ingrid Irene Iris Irma Isaac Isabel Ivan Ivy Jacob Jamal Janet Jasper Javier
Jelena Jerome Jessica Joanna Joel Johann Jonas Jorge Joseph Judith Julian Juno Kamal Karen Karl Katya Kazuo Keiko Kenji
Kevin Kira Klaus Kofi Kurt Lars Laura Layla Leah Leila Lena Leon Leroy Liam Lidia Linda Linus Lisa Lorenzo Louis Lucia
Ludwig Luis Lydia Mabel Magda Malik Manuel Marco Margaret Maria Marlene Martin Marvin Matilda Maurice Mehmet Melissa
Mercedes Michael Miguel Mila Milton Mina Miriam Mohan Molly Monica Morris Muriel Myra Nadia Naomi Natalia Nathan Neil
Nelson Nicole Nils Nina Noah Noor Nora Norman Odette Olaf Olga Oliver Omar Oscar Otto Pablo Pamela Pascal Patricia Paul
Pavel Pedro Peter Petra Philip Phyllis Pierre Priya Quentin Rachel Rafael Ralph Ramona Raoul Rashid Raymond Rebecca
Regina Renata Ricardo Rita Robert Rodrigo Roger Roland Roman Rosa Ruben Rudolf Rupert Ruth Sabine Salma Samir Samuel
Sandra Sanjay Sara Sasha Selma Sergio Sheila Sigrid Silvia Simon Sofia Sonia Stefan Stella Susan Sven Sylvia Tamara
Tariq Tatiana Theo Theresa Thomas Tilda Timothy Tobias Tomoko Tristan Ulrich Ursula Valerie Vera Veronica Victor
Vincent Viola Vladimir Walter Wanda Wendell Wilma Winston Xavier Yasmin Yolanda Yuki Yusuf Yvonne Zara Zelda Zoe
""")
_TOWNS = _list("""
Ald Amb Arn Ash Ban Bar Bel Birk Bol Bram Bren Bur Cal Cam Carl Chel Clif Col Cor Crom Dal Dan Den Dor Dray Dun Ed El
Erl Fal Fen Fram Gal Gar Gos Gran Grim Hal Har Hat Hex Hol Hor Hun Ing Ips Kel Ken Kil Kirk Lam Lang Lin Lod Lus Mal
Mar Mel Mid Mor Nar Nes Nor Oak Orm Os Pem Pen Pres Quor Rad Ram Red Rip Ros Rud Sal Sed Sel Shel Skip Stam Staf Stok
Swan Tam Tar Thorn Til Tor Ul Up Wal War Wel Whit Win Wol Wrex Yar
""")


def _table(text: str) -> Wordings:
    """Reads `relation: wording | wording | …`, one relation a paragraph."""
    parts = (paragraph.split(":", 1) for paragraph in text.strip().split("\n\n"))
    wordings = {name.strip(): tuple(" ".join(w.split()) for w in rest.split("|")) for name, rest in parts}
    return MappingProxyType(wordings)


_TRAIN = _table("""
given: {a} has {k} {things}. | There are {k} {things} that belong to {a}. | The number of {things} of {a} is {k}.

more: {a} has {k} more {things} than {b}. | {a} has {k} {things} more than {b} has.
| Compared with {b}, {a} has {k} more {things}.

fewer: {a} has {k} fewer {things} than {b}. | {a} has {k} {things} fewer than {b} has.
| Compared with {b}, {a} has {k} fewer {things}.

twice: {a} has twice as many {things} as {b}. | {a} has two times as many {things} as {b} has.
| Compared with {b}, {a} has twice as many {things}.

thrice: {a} has three times as many {things} as {b}. | {a} has three times the number of {things} that {b} has.
| Compared with {b}, {a} has three times as many {things}.

half: {a} has half as many {things} as {b}. | {a} has half the number of {things} that {b} has.
| Compared with {b}, {a} has half as many {things}.

together: {a} has as many {things} as {b} and {c} have together.
| {a} has the same number of {things} as {b} and {c} have together.
| If {b} and {c} put their {things} together, they have exactly as many as {a} has.

difference: {a} has as many {things} as {b} has more than {c}.
| {b} has more {things} than {c}, and {a} has exactly as many as that difference.
| The number of {things} of {a} is how many more {b} has than {c}.

ask: How many {things} does {a} have? | What is the number of {things} of {a}? | Find how many {things} {a} has.

queue: {names} stand in a queue, in this order from the front to the back.
| A queue is formed, from front to back, by {names}. | From front to back, a queue consists of {names}.

front: {a} goes to the front of the queue. | {a} walks to the front of the queue. | {a} is called to the front.

back: {a} goes to the back of the queue. | {a} walks to the back of the queue. | {a} is sent to the back.

trade: {a} and {b} swap places. | {a} swaps places with {b}. | The places of {a} and {b} are swapped.

behind: {a} goes directly behind {b}. | {a} leaves and comes back directly behind {b}.
| {a} is sent directly behind {b}.

before: {a} goes directly in front of {b}. | {a} leaves and comes back directly in front of {b}.
| {a} is sent directly in front of {b}.

who: Who is {place} in the queue at the end? | At the end, who is {place} in the queue?
| Which person is {place} in the queue at the end?

slots: At first, {facts}. | In the beginning, {facts}. | At the start, {facts}.

swap: The {a} and the {b} swap places. | The {a} swaps places with the {b}.
| The places of the {a} and the {b} are swapped.

exchange: The {a} swaps places with whatever is in the {p}. | The {a} and whatever is in the {p} swap places.
| Whatever is in the {p} swaps places with the {a}.

contents: Whatever is in the {p} and whatever is in the {q} swap places.
| The contents of the {p} and the {q} are swapped.
| The things in the {p} and in the {q} swap places.

rotate: The {a} goes to where the {b} is, the {b} to where the {c} is, and the {c} to where the {a} was.
| At once, the {a} takes the place of the {b}, the {b} that of the {c}, and the {c} that of the {a}.
| The {a} moves to the place of the {b}, the {b} moves to that of the {c}, and the {c} to the old place of the {a}.

where: Where is the {a} at the end? | At the end, where is the {a}? | In which place is the {a} at the end?
""")
_DEV = _table("""
given: {a} owns {k} {things}. | {a} owns exactly {k} {things}. | {k} is the number of {things} that {a} owns.

more: {a} owns {k} more {things} than {b} owns. | {a} owns {k} additional {things} on top of as many as {b} owns.
| The number of {things} that {a} owns is {k} more than {b} owns.

fewer: {a} owns {k} fewer {things} than {b} owns. | {a} owns as many {things} as {b} owns, minus {k}.
| The number of {things} that {a} owns is {k} fewer than {b} owns.

twice: {a} owns twice as many {things} as {b} owns. | {a} owns double the number of {things} that {b} owns.
| The number of {things} that {a} owns is twice what {b} owns.

thrice: {a} owns three times as many {things} as {b} owns. | {a} owns triple the number of {things} that {b} owns.
| The number of {things} that {a} owns is three times what {b} owns.

half: {a} owns half as many {things} as {b} owns. | {a} owns half of the number of {things} that {b} owns.
| The number of {things} that {a} owns is half of what {b} owns.

together: {a} owns as many {things} as {b} and {c} own together.
| {a} owns as many {things} as {b} and {c} own combined.
| The number of {things} that {a} owns is the sum of what {b} and {c} own.

difference: {a} owns as many {things} as {b} owns more than {c} owns.
| {a} owns as many {things} as {b} owns in excess of {c}.
| The number of {things} that {a} owns is what {b} owns minus what {c} owns.

ask: How many {things} does {a} own? | What number of {things} does {a} own? | Work out how many {things} {a} owns.

queue: {names} are waiting in line; the first one named is at the front.
| Waiting in line, from first to last, are {names}.
| In a line there are, from first to last, {names}.

front: {a} moves to the front of the line. | {a} becomes the first in the line. | {a} jumps to the front of the line.

back: {a} moves to the end of the line. | {a} becomes the last in the line. | {a} drops to the end of the line.

trade: {a} and {b} change places with each other. | {a} changes places with {b}. | {a} and {b} trade positions.

behind: {a} moves to the spot right behind {b}. | {a} steps out and gets in line right behind {b}.
| {a} joins the line again right behind {b}.

before: {a} moves to the spot right in front of {b}. | {a} steps out and gets in line right in front of {b}.
| {a} joins the line again right in front of {b}.

who: Who is {place} in line after all this? | After all this, who is {place} in line?
| After all this, which person is {place} in line?

slots: To begin with, {facts}. | Before anything happens, {facts}. | This is where things are: {facts}.

swap: The {a} and the {b} change places. | The {a} changes places with the {b}. | The {a} and the {b} trade positions.

exchange: The {a} changes places with what is in the {p}. | The {a} and what is in the {p} change places.
| What is in the {p} trades positions with the {a}.

contents: What is in the {p} and what is in the {q} change places.
| What is in the {p} changes places with what is in the {q}.
| What is in the {p} and what is in the {q} trade positions.

rotate: All at once, the {a} moves to where the {b} is, the {b} to where the {c} is, and the {c} to where the {a} is.
| In a circle, the {a} replaces the {b}, the {b} replaces the {c}, and the {c} replaces the {a}.
| Three things move on: the {a} to where the {b} was, the {b} to where the {c} was, the {c} to where the {a} was.

where: Where is the {a} after all this? | After all this, where is the {a}? | After all this, what place is the {a} in?
""")
_JUDGE = _table("""
given: {a} keeps {k} {things}. | A count of the {things} kept by {a} gives {k}. | In all, {a} keeps {k} {things}.

more: {a} keeps {k} more {things} than {b} keeps. | {a} keeps as many {things} as {b} and {k} more.
| The {things} kept by {a} are {k} more than those kept by {b}.

fewer: {a} keeps {k} fewer {things} than {b} keeps. | {a} keeps as many {things} as {b} but {k} fewer.
| The {things} kept by {a} are {k} fewer than those kept by {b}.

twice: {a} keeps twice as many {things} as {b} keeps. | {a} keeps 2 times as many {things} as {b}.
| The {things} kept by {a} are twice as many as those kept by {b}.

thrice: {a} keeps three times as many {things} as {b} keeps. | {a} keeps 3 times as many {things} as {b}.
| The {things} kept by {a} are three times as many as those kept by {b}.

half: {a} keeps half as many {things} as {b} keeps. | {a} keeps only half as many {things} as {b}.
| The {things} kept by {a} are half as many as those kept by {b}.

together: {a} keeps as many {things} as {b} and {c} keep together.
| {a} keeps as many {things} as {b} and {c} keep in total.
| The {things} kept by {a} are as many as those kept by {b} plus those kept by {c}.

difference: {a} keeps as many {things} as {b} keeps more than {c} keeps.
| {b} keeps more {things} than {c}, and the difference is what {a} keeps.
| The {things} kept by {a} are as many as those kept by {b} minus those kept by {c}.

ask: How many {things} does {a} keep? | What is the count of the {things} kept by {a}?
| Give the number of {things} that {a} keeps.

queue: {names} line up, with the first one named in front. | A row is made up, from the first to the last, of {names}.
| The row is, from the first to the last: {names}.

front: {a} takes the first place in the row. | {a} runs to the very front of the row. | {a} is moved to the first place.

back: {a} takes the last place in the row. | {a} runs to the very end of the row. | {a} is moved to the last place.

trade: {a} and {b} exchange places. | {a} exchanges places with {b}. | {a} and {b} take each other's place.

behind: {a} moves so as to stand just behind {b}. | {a} leaves the row and enters it again just behind {b}.
| {a} now stands just behind {b}, having moved there.

before: {a} moves so as to stand just ahead of {b}. | {a} leaves the row and enters it again just ahead of {b}.
| {a} now stands just ahead of {b}, having moved there.

who: Who ends up {place} in the row? | Which person ends up {place} in the row? | In the end, who is {place} in the row?

slots: Initially, {facts}. | The first arrangement is this: {facts}. | At the outset, {facts}.

swap: The {a} and the {b} exchange places. | The {a} exchanges places with the {b}.
| The {a} and the {b} are put in each other's place.

exchange: The {a} exchanges places with the item in the {p}. | The {a} and the item in the {p} exchange places.
| The item in the {p} exchanges places with the {a}.

contents: The items in the {p} and the {q} exchange places.
| The item in the {p} exchanges places with the item in the {q}.
| The item in the {p} and the item in the {q} exchange places.

rotate: Together, the {a} is put where the {b} is, the {b} where the {c} is, and the {c} where the {a} is.
| Three items rotate: the {a} to the place of the {b}, the {b} to that of the {c}, the {c} to that of the {a}.
| The {a} gets the place of the {b}, while the {b} gets that of the {c} and the {c} gets that of the {a}.

where: Where does the {a} end up? | In the end, where is the {a}? | In which place does the {a} end up?
""")
_TEST = _table("""
given: {a} holds {k} {things}. | Altogether {a} holds {k} {things}. | It is known that {a} holds {k} {things}.

more: {a} holds {k} more {things} than {b} holds. | {a} holds the {things} that {b} holds in number, plus {k}.
| The count of {things} for {a} is {k} higher than the count for {b}.

fewer: {a} holds {k} fewer {things} than {b} holds. | {a} holds the {things} that {b} holds in number, less {k}.
| The count of {things} for {a} is {k} lower than the count for {b}.

twice: {a} holds twice as many {things} as {b} holds. | {a} holds twice the {things} that {b} holds in number.
| The count of {things} for {a} is two times the count for {b}.

thrice: {a} holds three times as many {things} as {b} holds.
| {a} holds three times the {things} that {b} holds in number.
| The count of {things} for {a} is three times the count for {b}.

half: {a} holds half as many {things} as {b} holds. | {a} holds half the {things} that {b} holds in number.
| The count of {things} for {a} is half the count for {b}.

together: {a} holds as many {things} as {b} and {c} hold together.
| {a} holds as many {things} as {b} and {c} would hold if theirs were added up.
| The count of {things} for {a} is the sum of the counts for {b} and {c}.

difference: {a} holds as many {things} as {b} holds more than {c} holds.
| {a} holds as many {things} as are left when the count for {c} is taken from the count for {b}.
| The count of {things} for {a} is the count for {b} minus the count for {c}.

ask: How many {things} does {a} hold? | What is the count of {things} for {a}? | Determine how many {things} {a} holds.

queue: {names} stand one behind the other, the first one named leading.
| One behind the other, from the leader to the last, stand {names}.
| From the leader to the last, this is the file of people: {names}.

front: {a} goes ahead of everybody. | {a} overtakes all the others and leads. | {a} takes the lead.

back: {a} goes behind everybody. | {a} lets all the others pass and is last. | {a} falls back to the last position.

trade: {a} and {b} swap positions. | {a} swaps positions with {b}. | {a} takes the position of {b}, and {b} that of {a}.

behind: {a} goes to the position immediately after {b}. | {a} steps aside and returns immediately after {b}.
| {a} is told to stand immediately after {b}.

before: {a} goes to the position immediately before {b}. | {a} steps aside and returns immediately before {b}.
| {a} is told to stand immediately before {b}.

who: Who is in the {place} position finally? | Finally, who is in the {place} position?
| Finally, which person is in the {place} position?

slots: Originally, {facts}. | In the first place, {facts}. | As the story opens, {facts}.

swap: The {a} and the {b} swap positions. | The {a} swaps positions with the {b}.
| The {a} is put where the {b} is, and the {b} where the {a} was.

exchange: The {a} swaps positions with the one in the {p}. | The {a} and the one in the {p} swap positions.
| The one in the {p} swaps positions with the {a}.

contents: The one in the {p} and the one in the {q} swap positions.
| The one in the {p} swaps positions with the one in the {q}.
| A swap of positions is made by the one in the {p} and the one in the {q}.

rotate: At the same time, the {a} goes where the {b} is, the {b} where the {c} is, and the {c} where the {a} is.
| The {a} replaces the {b}, which replaces the {c}, which replaces the {a}.
| The {a} takes over the position of the {b}, the {b} that of the {c}, and the {c} that of the {a}.

where: Where is the {a} finally? | Finally, where is the {a}? | What is the final place of the {a}?
""")


def _words(split: str, endings: str, nouns: str, wordings: Wordings) -> Words:
    things, containers, objects, places = (tuple(part.split()) for part in nouns.strip().split("\n"))
    towns = tuple(tuple(town + ending for ending in endings.split()) for town in _TOWNS)
    return Words(
        tuple(_NAMES[SPLITS.index(split) :: len(SPLITS)]), towns, things, containers, objects, places, wordings
    )


WORDS = {
    "train": _words(
        "train",
        "ton ford",
        """marbles apples books stamps pencils shells cards buttons stickers coins
shop school library barn
key lamp cup vase ball hat clock radio candle flute
kitchen attic cellar garage pantry study hallway bedroom bathroom nursery""",
        _TRAIN,
    ),
    "dev": _words(
        "dev",
        "by wick",
        """beads oranges postcards ribbons magnets feathers bottles candies badges whistles
market museum office bakery
ring scarf drum mirror pillow ladder kettle blanket trumpet puzzle
harbor temple castle theater stadium airport chapel palace hospital prison""",
        _DEV,
    ),
    "judge": _words(
        "judge",
        "ham dale",
        """tokens lemons notebooks photos erasers pebbles crayons tickets medals lanterns
hotel clinic kiosk farm
watch glove spoon brush camera hammer wallet bell rattle thimble
drawer basket bucket suitcase locker cabinet trunk backpack crate barrel""",
        _JUDGE,
    ),
    "test": _words(
        "test",
        "field port",
        """bricks peaches magazines acorns combs crystals posters needles balloons pins
club mill factory tower
map rope tent compass shovel helmet telescope kite saddle violin
meadow orchard swamp canyon forest desert valley cave village tunnel""",
        _TEST,
    ),
}
