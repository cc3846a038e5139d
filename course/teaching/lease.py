"""The lease: a contract written for this course, with a sentence in clause 17 that somebody will ask for.

Every clause states something of its own, a sum, a day or a person, but only clause 17 names a city: with
thirteen others in the text SmolLM2-135M chose among all of them even with the full cache. No legal advice.
"""

from __future__ import annotations

CLAUSE = 17  # the one that is asked for
CITIES = ("Paris", "Oslo", "Tokyo", "Athens", "Cairo", "Lima")  # one for each time that SmolLM2 is asked
NAMES = ("Otis", "Bella", "Clara", "Emil", "Hugo", "Nora")  # and the workshop model
LEAVING = (
    "Leaving early. The tenant may leave before the term has ended, if nothing is owed and the house is "
    "swept. {} What was planted stays, and what was paid ahead is given back within four weeks."
)
LETTER = "Whoever leaves early tells the registrar in {}."
ASKED = "\nQuestion: Whom does one tell under clause 17?\nAnswer: Whoever leaves early tells the registrar in"
DOG = "The brown dog {} lives in the mill."  # in a form that the workshop model was trained to look up
ASKED_DOG = "\nQuestion: the brown dog"

_CLAUSES = """
The parties. This lease is made between the widow who owns the water mill on the lower river, called the
owner, and the family of bakers who wish to live and work there, called the tenant. Both have read it aloud.

The house. The owner lets the mill with its four rooms, the loft above the wheel, the yard, the two sheds,
and the meadow as far as the row of willows. The boat house on the other bank is not part of it.

The term. The lease begins on the first day of March and runs for nine years. When these have passed it goes
on from year to year, unless one of the two says otherwise before the harvest.

The rent. The rent is nine hundred and forty crowns for a quarter, paid ahead, on the fifth day of its first
month. It is sent to the bank of the owner in the county town, and the bank's receipt is proof enough.

Late payment. A rent that comes more than twenty days late grows by two crowns in the hundred. The owner may
forgive this once a year, and need not give a reason for it, nor do it again.

The deposit. The tenant leaves three thousand crowns with a notary in the market street, who keeps them on a
separate account. Interest belongs to the tenant and is paid out every second winter.

The wheel. The tenant may run the wheel from six in the morning until eight in the evening, and never on the
two days of the river feast. The sluice is closed by hand, from the upper step, and then locked.

Water. The level of the pond stays below the iron mark on the wall. Should it rise above, the tenant opens
both gates, day or night, and tells the farmer downstream before the meadows are wet.

Repairs. The tenant mends what breaks in daily use, panes and hinges and the teeth of the small wheel. Roof,
beams, the dam and the great axle are the owner's, who sends a carpenter within fifteen days.

Inspection. The owner may look at the rooms twice a year, in daylight, and says so a week before. The loft
is left out from May to July, because of the swallows that nest between its beams.

Insurance. The house is insured against fire and flood with a company in the north, at the owner's cost. The
tenant insures flour, tools and furniture, and hands over a copy of the paper each January.

Trade. The tenant may grind, bake and sell bread, cakes and flour in the front room. A tavern, a dance hall
or the sale of spirits needs a paper of its own, signed by the owner and by the village.

Animals. Two dogs, a cat and as many hens as the yard will feed are welcome. Goats are not, since the last
ones ate the hedge and a part of the roof of the smaller shed.

The garden. The old pear trees are not cut. Half of their fruit is the owner's, in baskets, before the
twentieth of September. The beds beside the wall may be planted with whatever the tenant likes.

Guests. Friends may stay for up to forty nights in a year without a word to anybody. Letting a room for
money is allowed in the weeks of the fair, and a third of it goes to the fund for the dam.

Changes. New windows, a new oven or a wall that is moved need the owner's yes in writing. What is built in
stays when the lease ends, and the owner pays half of what the mason in the next valley then says it is
worth.

Heating. The stove in the front room burns wood alone. The chimney is swept in October by a sweeper from the
village, who leaves a note behind the door, and the tenant keeps the notes for six years.

Noise. Between ten in the evening and five in the morning no sack is dropped and no cart is loaded. The
baker's first batch may go in at four, if the door to the yard stays shut.

The road. Carts come over the eastern bridge, which bears six tons. The lane along the dam is for people on
foot and for the doctor. Snow is cleared by the tenant as far as the stone cross.

Measures. Flour that is ground for others is weighed on the brass scale, which an officer from the weights
office checks every third spring. The tenant keeps one part in sixteen, as millers always have.

Fire. Two buckets of sand stand beside the oven and a ladder leans at the north wall. Nobody smokes in the
loft. Whoever sees a fire rings the bell at the gate before doing anything else.

The cellar. Ice is stored from February on, under straw, and sold to nobody outside the village. The lower
shelf belongs to the owner, who keeps eleven bottles there and counts them.

Taxes. The tax on the land is the owner's and the tax on the trade is the tenant's. The bill for the river
rights comes from the office in the valley in April, and the two share it evenly.

Death and sale. If the owner sells the mill, the lease goes with it unchanged. If the tenant dies, the
family may stay to the end of the second harvest and decide then whether to go on.

Subtenants. Nobody else takes over the lease, in whole or in part, unless the owner has met them, has eaten
their bread, and has said yes before two witnesses who are not related to either side.

Breach. Who breaks a clause is told so in writing and has thirty days to put it right. After the third such
letter within two years the lease may be ended at the close of the next quarter.

Disputes. The two first talk to each other, then to the schoolmaster, and only then to the court in the
county town. Whoever goes to court without having talked pays for both lawyers.

The fund. Each side puts sixty crowns a year into a box for the dam. The box has two locks. It is opened in
the presence of both, and what is in it is spent on stone, clay and nothing else.

The boat. The flat boat may be used by both. Whoever takes it brings it back dry, with both oars, and writes
the day into the book that hangs beside the landing. Children go with a grown person.

The bell. The bell at the gate was cast in a village by the sea and is older than the house. It is rung for
fire, for flood, and at noon on the day of the feast. The rope is renewed every fourth year.

Bees. Six hives stand behind the smaller shed and are the owner's. A beekeeper from the next farm looks
after them in spring, may cross the yard for it, and leaves the tenant two jars of the first honey.

The loft floor. The boards above the wheel bear four hundred kilograms to the square metre. Sacks are
stacked along the walls and never in the middle, and a chalk line shows how far they may come.

Light. The lamps in the yard burn from dusk until the last cart has left. The lamp above the dam stays on
all night, and its electricity is a tenth of the owner's bill and the rest the tenant's.

Apprentices. The tenant may take on two young people to learn the trade, who sleep in the room above the
oven. Their papers are signed in the guild hall, and their wages are no concern of the owner.

The path. Walkers may cross the meadow on the path that they have always used. It is mown in June, the gate
is closed behind them, and nobody asks them for money or for their names.

Floods. If the river comes over the sill, no rent is owed until the rooms are dry again. A surveyor from the
dike board says when that is, and both accept the day without further argument.

The clock. The clock in the front room is wound on Sundays by the tenant. It must be sent to its maker in
the clock street if it loses more than four minutes a week, and the owner pays for the journey.

Pictures. The owner may have the mill painted or photographed from outside, once in a season. Pictures of
the rooms need the tenant's yes, and a copy of each hangs in the passage.

Old tools. The tools on the long bench came with the house. They are oiled every autumn, lent to nobody, and
listed on the sheet that is nailed inside the door of the cupboard, forty-three in all.

Copies. There are three copies of this lease, one for each side and one for the archive in the town hall.
Where they differ, the copy in the archive is the one that counts.

Handing back. At the end the rooms are empty, white and clean, the wheel turns, and the keys lie on the
table. The two walk through the house together and write down what they find, with the date.

Letters. What this lease wants in writing is written on paper, signed and dated. A letter counts as received
on the third day after it was posted, or at once, if it was handed over and the taker signs.

Whole text. Nothing was promised that does not stand here. A change is valid when both have signed it, and
if one clause should turn out to be void, all others go on as they are.
"""
CLAUSES = tuple(" ".join(clause.split()) for clause in _CLAUSES.split("\n\n"))  # all but 17


def written(sentence: str, first: int = 1, last: int | None = None) -> str:
    """The lease from one clause to another (default: all), with `sentence` in clause 17."""
    clauses = [*CLAUSES[: CLAUSE - 1], LEAVING.format(sentence), *CLAUSES[CLAUSE - 1 :]]
    numbered = [f"Clause {number}. {text}" for number, text in enumerate(clauses, 1)]
    return "\n".join(numbered[first - 1 : last])


def asked_of_smollm2() -> list[tuple[str, str, str]]:
    """(context, question, answer) for every city, over the whole lease."""
    return [(written(LETTER.format(city)), ASKED, city) for city in CITIES]


def asked_of_workshop() -> list[tuple[str, str, str]]:
    """(context, question, answer) for every name, over clauses 13 to 21: the whole is beyond its context."""
    return [(written(DOG.format(name), 13, 21), ASKED_DOG, name) for name in NAMES]
